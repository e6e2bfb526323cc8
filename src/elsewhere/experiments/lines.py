"""What a shell line names, as far as that can be told without a shell: the programs that it calls, the scripts that they run, the
files that they take, and the directories that it goes to.

    python -m pytest -q checks/fast.py      programs python, pytest; scripts pytest.py, pytest/__main__.py, checks/fast.py
    cd src && ./score.sh data               programs cd, score.sh; scripts ./score.sh; files src, data
    cat check.sh | sh                       programs cat, sh; candidates check.sh
    diff out expected                       programs diff; files out, expected
    while read a b; do ./try $a; done < cases    programs read, try, done; scripts ./try; files cases
    grep -q fixed README.md                 programs grep

What a program only looks at (`grep`, `wc`, a linter; `< FILE`) or translates (a compiler) is its subject, and no file of the
line: it may be the very thing that an approach is to change.
"""

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Line", "parsed", "programs", "variables", "variants"]

_KEYWORDS = ("then", "do", "else", "if", "elif", "while", "until", "!")
_WRAPPERS = frozenset("env time timeout nice exec sudo npx bunx uv uvx poetry pipenv bundle run xargs cross-env c8 nyc".split())
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", ".", "source")
_NODES = ("node", "nodejs", "ts-node", "tsx")
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
_OTHERS = ("perl", "ruby", "php")
_RUNNERS = (
    "pytest",
    "py.test",
    "unittest",
    "jest",
    "vitest",
    "mocha",
    "ava",
    "bats",
    "rspec",
    "phpunit",
    "behave",
    "nose2",
    "prove",
)
_SIDE_BY_SIDE = ("jest", "vitest", "mocha", "ava")  # their tests often lie beside what they test
_READERS = frozenset(
    """cat grep egrep fgrep rg wc head tail sort uniq cut tr nl stat ls du file test [ [[ echo printf jq yq awk gawk mawk sed find
    ruff mypy dmypy flake8 pylint pyright basedpyright black isort eslint prettier tsc shellcheck shfmt radon cloc scc tokei
    golangci-lint for cp mv rm mkdir touch chmod git cc gcc g++ c++ clang clang++ rustc javac go tar zip gzip pip""".split()
)
_FROM_FILES = ("awk", "gawk", "mawk", "sed", "grep", "egrep", "fgrep", "rg", "jq")
_COMPARERS = ("diff", "cmp", "comm", "sha256sum", "sha1sum", "md5sum", "b2sum")
_NO_PROGRAM = re.compile(r"-|\.?\d[\d.]*[smhd]?$|\w+=|[({]$")  # options, numbers and variables before it
_SEPARATORS = (";", "&&", "||", "|", "&", "\n")
_SUBSTITUTION = re.compile(r"[$<>]\(([^()]*)\)|`([^`]*)`")
_COMMANDS_OR_CODE = re.compile(r"\.(?:sh|bash|zsh|ksh|bats|awk|pl|t|py|js|mjs|cjs|ts|rb|php)$")
_CODE = re.compile(r"\.(?:py|[jt]sx?|[cm]js|c|h|cc|hh|cpp|hpp|go|rs|java|rb|php|cs|kt|swift|scala|lua|html|css|md)$")
_READ_BY_SHELL = ("<", "done", "fi", "esac", "}", "read", "mapfile", "readarray")  # what is redirected to these
_WRITTEN = (">", ">>", ">|", "&>", ">&")
_LISTERS = ("cat", "head", "tail", "sort")
_LISTED = re.compile(r"\bin\s+$|<$")  # before a `$(…)`, or the `(…)` of a `<(…)`
_WITHIN_CODE = re.compile(r"[\w./-]+\.(?:sh|bash|zsh|bats|awk|pl|t)\b")
_ASSIGNED = re.compile(r"""(?:^|[\s;&|(])(\w+)=("[^"$`]*"|'[^'$`]*'|[^\s;&|()$`"'<>]+)""", re.MULTILINE)
_DEFINED = re.compile(r"^(?:export[ \t]+)?(\w+)[ \t]*[:?+!]*=[ \t]*(.+)$", re.MULTILINE)
_LOOP = re.compile(r"\bfor\s+(\w+)\s+in\s+([^;\n]+)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)([%#:/][^{}]*)?\}|\((\w+)\)|(\w+))")
_DEEPEST, _MOST_VARIANTS, _MOST_VALUES = 3, 40, 20


class Line(NamedTuple):
    """Words as they are written. `candidates` are scripts if there is a file of that name; `references` are what something is
    compared with, or is: files, or whole directories; `patterns` are of files that are run, and `test_names` of tests;
    `tested` is what a test runner is given; `places` are where programs are looked for; `outputs` are written by
    the line itself."""

    programs: set[str]
    scripts: set[str]
    candidates: set[str]
    files: set[str]
    references: set[str]
    directories: set[str]
    places: set[str]
    patterns: set[str]
    tested: set[str]
    test_names: set[str]
    outputs: set[str]


_KINDS = ("program", "script", "candidate", "file", "reference", "directory", "place", "pattern", "tested", "test name", "output")


def parsed(line: str, *, captured: bool = True) -> Line:
    """`captured`: with the commands whose output the line takes for itself."""
    found: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    for kind, word in _named(line, captured=captured):
        if word and kind in found:
            found[kind].add(word)
    found["program"] = {word.rpartition("/")[2] for word in found["program"]} - {""}
    found["file"] |= found["script"] | found["reference"]
    return Line(*(found[kind] for kind in _KINDS))


def programs(line: str, *, captured: bool = True) -> set[str]:
    """Their names, without directories."""
    return parsed(line, captured=captured).programs


# -- variables ------------------------------------------------------------------------------------------------------------------


def variables(text: str, *, make: bool = False) -> dict[str, list[str]]:
    """What those that a line or a file of commands sets may hold, as far as it is written out there."""
    found: dict[str, list[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        found.setdefault(name, []).append(value.strip("\"'"))
    for name, value in _DEFINED.findall(text) if make else ():
        found.setdefault(name, []).append(value.strip())
    for name, words in _LOOP.findall(text):
        plain = (word.strip("\"'") for word in itertools.takewhile(lambda one: one != "do", words.split()))
        found.setdefault(name, []).extend(word for word in plain if "$" not in word and "`" not in word)
    return {name: list(dict.fromkeys(values))[:_MOST_VALUES] for name, values in found.items()}


def variants(line: str, values: Mapping[str, Iterable[str]]) -> list[str]:
    """The line, and what becomes of it with those values."""
    found = [line]
    for one in found:
        for match in _VARIABLE.finditer(one):
            for value in values.get(match[1] or match[3] or match[4], ()):
                held = os.path.join(os.path.dirname(value), "*") if match[2] else value  # of `${t%.in}`, the directory is known
                other = one[: match.start()] + held + one[match.end() :]
                if len(found) < _MOST_VARIANTS and other not in found:
                    found.append(other)
    return found


# -- commands -------------------------------------------------------------------------------------------------------------------


def _named(line: str, depth: int = 0, *, captured: bool = True) -> Iterator[tuple[str, str]]:
    if depth > _DEEPEST:
        return
    while (found := _SUBSTITUTION.search(line)) is not None:
        if _LISTED.search(line[: found.start()] + found[0][0].strip("$`")):
            yield from (("reference", word) for words, _ in _commands(found[1] or found[2] or "") for word in _listed(words))
        line = f"{line[: found.start()]}${{_}}{line[found.end() :]}"
        if captured:
            yield from _named(found[1] or found[2] or "", depth + 1)
    where = ""
    before: list[list[str]] = []  # in the same pipeline
    for words, feeds in _commands(line):
        if words[0] in ("while", "until", "read", "mapfile", "readarray"):
            yield from (("reference", word) for others in before for word in _listed(others))
        for kind, word in _of_command(words):
            if kind == "line":
                yield from _named(word, depth + 1, captured=captured)
                continue
            if kind == "directory" and words[0] == "cd":
                where = f"{where}/{word}" if where and not word.startswith("/") else word
                yield kind, where
            if kind == "input" or (kind == "script" and word == "{}"):
                yield from (one for others in before for one in _handed_over(others))
            if kind == "program" and word in _COMPARERS:
                yield from (("reference", one) for others in before for one in _input_of(others))
            yield kind, word
        before = [*before, words] if feeds else []


def _of_command(words: list[str]) -> Iterator[tuple[str, str]]:
    """One command with its arguments, and what stands before it."""
    at, name = 0, ""
    while at < len(words):
        name = words[at].rpartition("/")[2]
        if _NO_PROGRAM.match(words[at]):
            yield from _looked_through(words[at])
            at += 1
            continue
        yield "program", name
        if "/" in words[at]:
            yield "script", words[at]
        if name not in _WRAPPERS and name not in _KEYWORDS:
            break
        at += 1
        if name in _WRAPPERS and at < len(words) and words[at].startswith("-"):  # who knows which of its options have a value
            at = next((number for number in range(at, len(words)) if _is_known(words[number])), at)
    if at >= len(words):
        return
    rest = words[at + 1 :]
    yield from _taken(name, rest)
    if name in _SHELLS or name in _NODES or name in _OTHERS or _PYTHON.fullmatch(name):
        yield from _interpreted(name, rest)
    elif name in _RUNNERS:
        yield from _tested(name, rest)
    elif name == "eval":
        yield "line", " ".join(rest)
    elif name == "go" and rest[:1] == ["run"]:
        yield from (("script", word) for word in rest if word.endswith(".go"))
    elif name == "find":
        yield from _executed(rest)
    elif name in _FROM_FILES:
        yield from _from_files(rest)


def _is_known(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name != "." and (name in (*_SHELLS, *_NODES, *_OTHERS, *_RUNNERS) or _PYTHON.fullmatch(name) is not None)


def _looked_through(word: str) -> Iterator[tuple[str, str]]:
    """The directories of a variable like PATH."""
    variable, _, value = word.partition("=")
    if variable.endswith("PATH"):
        yield from (("directory", part) for part in value.split(":"))
    if variable == "PATH":
        yield from (("place", part) for part in value.split(":"))


def _taken(name: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    """The arguments of a program that may be files, and where it is told to work."""
    for number, word in enumerate(rest):
        before = rest[number - 1] if number else name if name in _WRITTEN else ""
        if before in _WRITTEN or (name == "tee" and not word.startswith("-")):
            yield "output", word
        if name in ("cd", "pushd") or before in ("-C", "--directory", "--cwd", "--prefix"):
            yield "directory", word
        elif name == "export":
            yield from _looked_through(word)
        elif name in _READ_BY_SHELL and (before == "<" or (name == "<" and number == 0)):
            yield "subject" if _CODE.search(word) else "reference", word
        elif name not in _READERS and "<" not in before and not word.startswith(("<", ">")):
            value = word.partition("=")[2] if word.startswith("-") else word
            yield "reference" if name in _COMPARERS else "file", value.partition("::")[0]


def _interpreted(name: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    """What an interpreter is given: a line, a module, a script, or else its input."""
    shell, node = name in _SHELLS, name in _NODES
    inline = (
        r"-e|-pe?|--eval|--print"
        if node
        else "-r"
        if name == "php"
        else r"-[wnpalis0]*[eE]"
        if name in _OTHERS
        else r"-[a-zA-Z]*c"
    )
    with_a_value = r"[-+]\w*[oO]" if shell else "-I" if name in _OTHERS else "-[WX]"
    read, skip = "", False
    for word, follows in itertools.pairwise([*rest, ""]):
        option, equals, value = word.partition("=")
        if skip:
            skip = False
        elif set(word) <= set("<>&"):
            read, skip = follows if word == "<" else read, True
        elif re.fullmatch(inline, word):
            yield from [("line", follows)] if shell else (("candidate", one) for one in _WITHIN_CODE.findall(follows))
            return
        elif word == "-m" and not shell and follows:
            yield from _module(follows, rest[rest.index(word) + 2 :])
            return
        elif name != "php" and option in ("-r", "--require", "--import", "--loader", "--experimental-loader"):
            loaded = value if equals else follows
            skip = not equals
            yield from (("script", one) for one in [loaded] if one.startswith((".", "/")))
            yield from _without_ending(name, loaded)
        elif re.fullmatch(with_a_value, word):
            skip = True
        elif shell and word == "-s":
            break
        elif not word.startswith(("-", "+")) and not (word.isdigit() and set(follows) & set("<>")):
            yield "script", word
            yield from _without_ending(name, word)
            return
    if read:
        yield "script", read
    else:
        yield "input", name


def _without_ending(name: str, word: str) -> Iterator[tuple[str, str]]:
    if "." in os.path.basename(word):
        return
    for ending in ("js", "ts", "mjs", "cjs") if name in _NODES else ():
        yield from (("candidate", one) for one in (f"{word}.{ending}", f"{word}/index.{ending}"))
    if name == "ruby":
        yield "candidate", f"{word}.rb"


def _module(module: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    path, name = module.replace(".", "/"), module.partition(".")[0]
    yield "program", name
    yield from (("script", one) for one in (f"{path}.py", f"{path}/__main__.py"))
    if name in _RUNNERS:
        yield from _tested(name, rest)
        yield from (("script", f"{one.replace('.', '/')}.py") for one in rest if not one.startswith("-"))


def _tested(name: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    for word in rest:
        value = word.partition("=")[2] if word.startswith("-") else word.partition("::")[0]
        if not word.startswith("-"):
            yield "script", value
        if name not in _SIDE_BY_SIDE:
            yield "tested", value
    if name in ("pytest", "py.test"):
        loaded = [word for before, word in itertools.pairwise(rest) if before == "-p"]
        paths = [one.replace(".", "/") for one in (*loaded, *(word[2:] for word in rest if word.startswith("-p")))]
        yield from (("candidate", one) for path in paths if path for one in (f"{path}.py", f"{path}/__init__.py"))
    if name == "unittest" and "discover" in rest:
        after = [word for before, word in itertools.pairwise(rest) if before in ("-p", "--pattern")]
        given = [word.partition("=")[2] for word in rest if word.startswith("--pattern=")]
        named = [*after, *given, *(one for one in rest if re.search(r"[*?[]", one))]
        yield from (("test name", word) for word in named if not set(word.removesuffix(".py")) <= set("*?"))


def _from_files(rest: list[str]) -> Iterator[tuple[str, str]]:
    """What `awk` and its like do is in a file."""
    for word, follows in itertools.pairwise([*rest, ""]):
        if re.fullmatch(r"-[a-zA-Z]*f|--(?:from-)?file", word):
            yield "script", follows
        elif re.match(r"--(?:from-)?file=", word):
            yield "script", word.partition("=")[2]


def _executed(rest: list[str]) -> Iterator[tuple[str, str]]:
    """By `find`, for each file that it finds."""
    for number, word in enumerate(rest):
        if word in ("-exec", "-execdir", "-ok", "-okdir"):
            found = list(_of_command(rest[number + 1 :]))
            yield from (one for one in found if one[1] != "{}")
            if ("script", "{}") in found or rest[number + 1 : number + 2] == ["{}"]:
                yield from _found(rest[:number])


def _found(rest: list[str]) -> Iterator[tuple[str, str]]:
    """The files of a `find`."""
    starts = list(itertools.takewhile(lambda word: not word.startswith(("-", "(", "!")), rest)) or ["."]
    names = [name for word, name in itertools.pairwise(rest) if word in ("-name", "-iname", "-path", "-wholename")]
    for start, name in itertools.product(starts, names or [""]):
        yield "pattern", os.path.normpath(f"{start}/**/{name}")
        yield "candidate", os.path.normpath(f"{start}/{name}")


def _handed_over(words: list[str]) -> Iterator[tuple[str, str]]:
    """What is run of a command whose output an interpreter reads, or gets as arguments."""
    if words[0] == "find":
        yield from _found(words[1:])
    else:
        yield from (("candidate", word) for word in words[1:] if _COMMANDS_OR_CODE.search(word))


def _input_of(words: list[str]) -> Iterator[str]:
    """What a program reads whose output is compared with something; for one that only looks at it, it is its subject."""
    if not any(word in _READERS for word in words):
        yield from (word for before, word in itertools.pairwise(words) if before == "<")


def _listed(words: list[str]) -> Iterator[str]:
    """Files whose lines are taken one by one, and so say what is tried; whoever goes through code looks at that."""
    if words[0] in _LISTERS:
        yield from (word for word in words[1:] if not word.startswith(("-", "<", ">")) and not _CODE.search(word))


def _commands(line: str) -> Iterator[tuple[list[str], bool]]:
    """Of a shell line, each command by itself, and whether the next one reads what it says."""
    lexer = shlex.shlex(line.replace("\n", " ; "), posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        found = list(lexer)
    except ValueError:
        found = line.split()
    words: list[str] = []
    for word in found:
        if word in _SEPARATORS or set(word) <= set(";&|()"):
            if words:
                yield words, word in ("|", "|&")
            words = []
        else:
            words.append(word)
    if words:
        yield words, False
