"""What a promotion would do to reality: each row of the decision, what choices settle, the order, and that no edit is ever lost."""

import errno
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from elsewhere.changes.model import Place, Side
from elsewhere.changes.sides import sides_of
from elsewhere.errors import NotFound, UsageError
from elsewhere.promotion import planning
from elsewhere.promotion.applying import Operation
from elsewhere.promotion.choosing import Choices, refuse_idle
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Plan, plan
from elsewhere.promotion.targets import Target

LINES = [f"line {number}\n" for number in range(12)]
TEXT = "".join(LINES)
ROOT = os.geteuid() == 0


class Trees:
    """Three trees that begin alike: what both began with, what the sandbox made of it, and reality."""

    def __init__(self, place: Path) -> None:
        self.base, self.here, self.there = place / "base", place / "here", place / "there"
        (self.base / "src" / "deep").mkdir(parents=True)
        for name in ("app.py", "README.md", "src/one", "src/two", "src/deep/three"):
            (self.base / name).write_text(TEXT)
        (self.base / "link").symlink_to("app.py")
        for path in self.base.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
        for copy in (self.here, self.there):
            shutil.copytree(self.base, copy, symlinks=True)

    def pieces(self, **more: object) -> list[Piece]:
        """Every path that is other in the sandbox, directories as well."""
        before, after = sides_of([str(self.base)]), sides_of([str(self.here)])
        paths = names(self.base) | names(self.here)
        found = [Piece(str(self.there), path, before(path), after(path)) for path in sorted(paths)]
        return [one._replace(**more) for one in found if shape(one.before) != shape(one.after)]

    def plan(self, ours: tuple[str, ...] = (), theirs: tuple[str, ...] = (), **more: object) -> Plan:
        return plan(self.pieces(**more), Choices(ours, theirs))


def names(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*")}


def shape(side: Side | None) -> object:
    if side is None:
        return None
    if side.type == "file":
        with side.open() as stream:
            return ("file", side.mode, stream.read())
    return (side.type, side.target) if side.type == "link" else (side.type, side.mode)


def shapes(tree: Path) -> dict[str, object]:
    look = sides_of([str(tree)])
    return {path: shape(look(path)) for path in sorted(names(tree))}


def edit(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = f"{text}\n"
    path.write_text("".join(lines))


def reasons(found: Plan) -> dict[str, str]:
    return {one.path: one.reason for one in found.conflicts}


def perform(operations: list[Operation]) -> None:
    """In order, one by one, the plainest way; whatever is not as expected fails."""
    for one in operations:
        place = Path(one.root, one.path)
        found = sides_of([one.root])(one.path)
        assert shape(found) == shape(one.expected), one.path
        wanted = one.wanted
        both = [side is not None and side.type == "directory" for side in (found, wanted)]
        if found is not None and not all(both):
            place.rmdir() if both[0] else place.unlink()
        if wanted is None:
            continue
        if wanted.type == "link":
            place.symlink_to(wanted.target or "")
            continue
        if wanted.type == "directory":
            place.mkdir(exist_ok=all(both))
        else:
            with wanted.open() as stream:
                place.write_bytes(stream.read())
        place.chmod(wanted.mode)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path)


# -- each row -------------------------------------------------------------------------------------------------------------------


def rewrite(tree: Path) -> None:
    edit(tree / "app.py", 1, tree.name)


def rewrite_the_end(tree: Path) -> None:
    edit(tree / "app.py", 10, tree.name)


def rewrite_alike(tree: Path) -> None:
    edit(tree / "app.py", 1, "both")


def make_executable(tree: Path) -> None:
    (tree / "app.py").chmod(0o755)


def make_private(tree: Path) -> None:
    (tree / "app.py").chmod(0o600)


def make_binary(tree: Path) -> None:
    (tree / "app.py").write_bytes(b"\0" + tree.name.encode())


def delete(tree: Path) -> None:
    (tree / "app.py").unlink()


def make_a_link(tree: Path) -> None:
    delete(tree)
    (tree / "app.py").symlink_to("README.md")


def make_a_directory(tree: Path) -> None:
    delete(tree)
    (tree / "app.py").mkdir()
    (tree / "app.py" / "inside").write_text(tree.name)


def make_a_fifo(tree: Path) -> None:
    delete(tree)
    os.mkfifo(tree / "app.py")


def add(tree: Path) -> None:
    (tree / "new").write_text(tree.name)


def add_alike(tree: Path) -> None:
    (tree / "new").write_text("both")


def add_a_tree(tree: Path) -> None:
    (tree / "new" / "below").mkdir(parents=True)
    (tree / "new" / "below" / "file").write_text(tree.name)


def point_away(tree: Path) -> None:
    (tree / "link").unlink()
    (tree / "link").symlink_to(tree.name)


def delete_the_directory(tree: Path) -> None:
    shutil.rmtree(tree / "src")


def edit_in_the_directory(tree: Path) -> None:
    edit(tree / "src" / "one", 1, tree.name)


def add_in_the_directory(tree: Path) -> None:
    (tree / "src" / "deep" / "more").write_text(tree.name)


def make_the_directory_a_file(tree: Path) -> None:
    delete_the_directory(tree)
    (tree / "src").write_text(tree.name)


def make_the_directory_a_link(tree: Path) -> None:
    shutil.move(tree / "src", tree / "moved")
    (tree / "src").symlink_to("moved")


def close_the_directory(tree: Path) -> None:
    (tree / "src").chmod(0o711 if tree.name == "here" else 0o750)


def nothing(tree: Path) -> None:
    pass


Edit = Callable[[Path], None]


@pytest.mark.parametrize(
    ("here", "there", "applied"),
    [
        (rewrite, nothing, ["app.py"]),
        (rewrite, edit_in_the_directory, ["app.py"]),
        (make_executable, nothing, ["app.py"]),
        (delete, nothing, ["app.py"]),
        (make_a_link, nothing, ["app.py"]),
        (make_a_directory, nothing, ["app.py", "app.py/inside"]),
        (add, nothing, ["new"]),
        (add_a_tree, nothing, ["new", "new/below", "new/below/file"]),
        (point_away, nothing, ["link"]),
        (close_the_directory, edit_in_the_directory, ["src"]),
        (delete_the_directory, nothing, ["src", "src/deep", "src/deep/three", "src/one", "src/two"]),
        (make_the_directory_a_file, nothing, ["src", "src/deep", "src/deep/three", "src/one", "src/two"]),
    ],
)
def test_what_only_the_sandbox_changed_is_applied(trees: Trees, here: Edit, there: Edit, applied: list[str]) -> None:
    here(trees.here)
    there(trees.there)
    base, mine, theirs = (shapes(tree) for tree in (trees.base, trees.here, trees.there))
    found = trees.plan()
    assert (found.conflicts, found.merged, found.same, found.kept) == ([], [], [], [])
    assert found.applied == applied
    perform(found.operations)
    after = shapes(trees.there)
    for path in base.keys() | mine.keys() | theirs.keys():
        assert after.get(path) == (theirs if mine.get(path) == base.get(path) else mine).get(path), path


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        (rewrite, rewrite, {"app.py": "text_conflict"}),
        (make_binary, make_binary, {"app.py": "binary"}),
        (rewrite, delete, {"app.py": "deleted_there"}),
        (delete, rewrite, {"app.py": "deleted_here"}),
        (delete, make_executable, {"app.py": "deleted_here"}),
        (make_executable, make_private, {"app.py": "modes_differ"}),
        (rewrite, make_a_link, {"app.py": "type_changed"}),
        (make_a_link, rewrite, {"app.py": "type_changed"}),
        (rewrite, make_a_directory, {"app.py": "type_changed"}),
        (make_a_directory, rewrite, {"app.py": "type_changed"}),
        (make_a_directory, delete, {"app.py": "deleted_there"}),
        (rewrite, make_a_fifo, {"app.py": "type_changed"}),
        (make_a_fifo, nothing, {"app.py": "not_a_file"}),
        (point_away, point_away, {"link": "links_differ"}),
        (add, add, {"new": "both_added"}),
        (add, add_a_tree, {"new": "type_changed"}),
        (close_the_directory, close_the_directory, {"src": "modes_differ"}),
        (edit_in_the_directory, delete_the_directory, {"src/one": "parent_gone"}),
        (add_in_the_directory, delete_the_directory, {"src/deep/more": "parent_gone"}),
        (edit_in_the_directory, make_the_directory_a_file, {"src/one": "parent_replaced"}),
        (edit_in_the_directory, make_the_directory_a_link, {"src/one": "parent_replaced"}),
        (delete_the_directory, edit_in_the_directory, {"src/one": "deleted_here"}),
        (delete_the_directory, add_in_the_directory, {"src/deep": "not_empty"}),
        (make_the_directory_a_file, add_in_the_directory, {"src/deep": "not_empty"}),
        (delete_the_directory, make_the_directory_a_link, {"src": "deleted_here"}),
    ],
)
def test_what_both_changed_is_a_conflict_with_its_reason(trees: Trees, here: Edit, there: Edit, reason: dict[str, str]) -> None:
    here(trees.here)
    there(trees.there)
    found = trees.plan()
    assert reasons(found) == reason
    assert all(one.sentence and one.root == str(trees.there) for one in found.conflicts)


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        (rewrite_alike, rewrite_alike, ["app.py"]),
        (delete, delete, ["app.py"]),
        (add_alike, add_alike, ["new"]),
        (make_a_link, make_a_link, ["app.py"]),
        (make_executable, make_executable, ["app.py"]),
        (delete_the_directory, delete_the_directory, ["src", "src/deep", "src/deep/three", "src/one", "src/two"]),
    ],
)
def test_what_both_did_alike_needs_no_operation(trees: Trees, here: Edit, there: Edit, same: list[str]) -> None:
    here(trees.here)
    there(trees.there)
    assert trees.plan() == Plan(same=same)


def test_text_and_modes_are_merged(trees: Trees) -> None:
    rewrite(trees.here)
    rewrite_the_end(trees.there)
    make_executable(trees.there)
    trees.there.joinpath("src").chmod(0o700)
    found = trees.plan()
    assert (found.merged, found.applied, found.conflicts) == (["app.py"], [], [])
    perform(found.operations)
    assert (trees.there / "app.py").read_text() == TEXT.replace("line 1\n", "here\n").replace("line 10\n", "there\n")
    assert stat.S_IMODE((trees.there / "app.py").stat().st_mode) == 0o755


def test_what_is_expected_is_what_was_seen(trees: Trees) -> None:
    rewrite(trees.here)
    (operation,) = trees.plan().operations
    seen = (trees.there / "app.py").stat()
    assert operation.expected is not None
    about = operation.expected.about
    assert (about.st_ino, about.st_size, about.st_mtime_ns) == (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    assert operation.expected.place == Place(str(trees.there), "app.py")


def test_the_owner_of_a_piece_goes_with_it(trees: Trees) -> None:
    add(trees.here)
    assert [one.owner for one in trees.plan(owner=(7, 8)).operations] == [(7, 8)]


# -- without a base -------------------------------------------------------------------------------------------------------------


def test_without_a_base_only_what_reality_left_alone_is_applied(trees: Trees) -> None:
    rewrite(trees.here)
    assert trees.plan(known=False).applied == ["app.py"]
    assert reasons(trees.plan(known=False, moved=True)) == {"app.py": "no_base"}
    rewrite_alike(trees.there)
    shutil.copy2(trees.there / "app.py", trees.here / "app.py")
    assert trees.plan(known=False, moved=True) == Plan(same=["app.py"])


def test_two_pieces_about_one_path_are_one(trees: Trees) -> None:
    """Something deleted, and a directory added in its place."""
    make_a_directory(trees.here)
    whole = next(one for one in trees.pieces() if one.path == "app.py")
    parts = [whole._replace(after=None), whole._replace(before=None)]
    inside = [one for one in trees.pieces() if one.path != "app.py"]
    for _ in range(2):  # what is read for the first time may have another time of its last reading afterwards
        first, second = plan([*parts, *inside]), plan([whole, *inside])
    assert first == second


# -- what stands in the way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "outside"),
    [
        ("app.py", False),
        ("src/../app.py", True),  # what is called src there may be a link
        ("./.././there/app.py", False),
        ("src/deep/../../../base", True),
        ("{there}/src/../app.py", True),
        ("{there}/src", False),
        ("{there}", False),
        ("..", True),
        ("../there/app.py", False),
        ("../base", True),
        ("src/../../base", True),
        ("/etc/passwd", True),
        ("{there}/../base", True),
        ("{there}-other", True),
    ],
)
def test_a_link_that_leads_outside_is_a_conflict(trees: Trees, target: str, outside: bool) -> None:
    (trees.here / "pointer").symlink_to(target.format(there=trees.there))
    assert reasons(trees.plan()) == ({"pointer": "link_outside"} if outside else {})
    assert plan(trees.pieces(), restoring=True).conflicts == []


def test_a_link_that_leads_outside_is_taken_only_by_its_very_path(trees: Trees) -> None:
    (trees.here / "src" / "pointer").symlink_to("/etc/passwd")
    for glob in ("*", "src", "src/*", "**"):
        assert reasons(trees.plan(ours=(glob,))) == {"src/pointer": "link_outside"}
    assert trees.plan(ours=("src/pointer",)).applied == ["src/pointer"]
    assert trees.plan(theirs=("*",)) == Plan(kept=["src/pointer"])


def test_a_link_by_way_of_another_link_does_not_lead_outside_either(trees: Trees) -> None:
    """By its words it stays inside; the kernel goes up from where the other one leads."""
    (trees.here / "src" / "deep" / "up").symlink_to("../..")
    (trees.here / "pointer").symlink_to("src/deep/up/../base/app.py")
    assert (trees.here / "pointer").resolve() == trees.base / "app.py"
    assert reasons(trees.plan()) == {"pointer": "link_outside"}


def test_a_choice_about_another_target_is_no_mistake_if_there_are_several(trees: Trees) -> None:
    for tree in (trees.here, trees.there):
        edit(tree / "app.py", 3, tree.name)
    choices = Choices(ours=("app.py", "elsewhere"), theirs=("src/*",))
    found = plan(trees.pieces(), choices, one_of_several=True)
    assert (found.applied, found.disputed, found.fitting) == (["app.py"], ["app.py"], Choices(ours=("app.py",)))
    with pytest.raises(UsageError) as idle:
        refuse_idle(choices, [found, Plan()])
    assert (idle.value.code, idle.value.detail["value"]) == ("no_such_conflict", "elsewhere")
    refuse_idle(choices, [found, Plan(fitting=Choices(("elsewhere",), ("src/*",)))])


def test_a_link_that_reality_has_already_is_no_conflict(trees: Trees) -> None:
    for tree in (trees.here, trees.there):
        (tree / "pointer").symlink_to("/etc/passwd")
    assert trees.plan() == Plan(same=["pointer"])


def test_devices_sockets_and_fifos_are_never_moved_whatever_was_chosen(trees: Trees) -> None:
    os.mkfifo(trees.here / "new")
    assert reasons(trees.plan()) == reasons(trees.plan(ours=("new",))) == {"new": "not_a_file"}
    assert trees.plan(theirs=("new",)) == Plan(kept=["new"])
    (trees.here / "new").unlink()
    make_a_fifo(trees.there)
    rewrite(trees.here)
    assert reasons(trees.plan()) == {"app.py": "type_changed"}
    assert reasons(trees.plan(ours=("app.py",))) == {"app.py": "not_a_file"}


def test_nothing_is_looked_up_through_a_link(trees: Trees) -> None:
    """Not even to find out that what was deleted is gone."""
    (trees.here / "src" / "one").unlink()
    make_the_directory_a_link(trees.there)
    assert reasons(trees.plan()) == {"src/one": "parent_replaced"}
    assert reasons(trees.plan(ours=("src/one",))) == {"src/one": "parent_replaced"}
    assert trees.plan(theirs=("src/one",)) == Plan(kept=["src/one"])


def test_a_link_that_the_sandbox_put_in_place_of_a_directory_like_reality_is_the_same(trees: Trees) -> None:
    for tree in (trees.here, trees.there):
        delete_the_directory(tree)
        (tree / "src").symlink_to("app.py")
    assert trees.plan() == Plan(same=["src", "src/deep", "src/deep/three", "src/one", "src/two"])


def test_what_lies_below_a_conflict_waits_for_it(trees: Trees) -> None:
    make_a_directory(trees.here)
    rewrite(trees.there)
    assert reasons(trees.plan()) == {"app.py": "type_changed"}
    assert trees.plan(theirs=("app.py",)) == Plan(kept=["app.py", "app.py/inside"])
    settled = trees.plan(ours=("app.py",))
    assert (settled.applied, settled.conflicts) == (["app.py", "app.py/inside"], [])
    perform(settled.operations)
    assert (trees.there / "app.py" / "inside").read_text() == "here"


def as_an_ordinary_user(place: Path, program: str) -> str:
    """The program with nobody's powers, if we have any; `place` is all it gets."""
    import sys

    inside = f"import os, sys\nif os.geteuid() == 0:\n    os.setgroups([]); os.setgid(4242); os.setuid(4242)\n{program}"
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", inside, str(place)], env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PERMITTED = """
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.planning import plan
from elsewhere.changes.sides import sides_of
place = sys.argv[1]
before, after, now = (sides_of([place + '/' + tree]) for tree in ('base', 'here', 'there'))
for path in ('shut/new', 'shut/file', 'unreadable', 'closed/file', 'strange', 'sticky/file', 'sticky/mine', 'fine', 'strange-mode'):
    found = plan([Piece(place + '/there', path, before(path), after(path))])
    print(path, *(one.reason for one in found.conflicts))
    forced = plan([Piece(place + '/there', path, before(path), after(path))], Choices(ours=('**',)) if found.conflicts else Choices())
    assert [one.reason for one in forced.conflicts] == [one.reason for one in found.conflicts], forced
for name in ('opened', 'narrowed'):
    pieces = [Piece(place + '/there', path, before(path), after(path)) for path in (name, name + '/new')]
    found = plan(pieces)
    print(name, *(one.path for one in found.operations), *(one.reason for one in found.conflicts))
piece = Piece(place + '/there', 'shut/gone/new', None, after('shut/gone/new'))
print(*(one.reason for chosen in (Choices(), Choices(ours=('**',))) for one in plan([piece], chosen).conflicts))
"""


@pytest.mark.skipif(not ROOT, reason="only root can make files that belong to others")
def test_what_cannot_be_read_or_written_is_a_conflict(place: Path) -> None:
    for tree in ("base", "here", "there"):
        for directory in ("shut", "closed", "sticky", "opened", "narrowed"):
            (place / tree / directory).mkdir(parents=True)
            (place / tree / directory).chmod(0o555 if directory in ("opened", "narrowed") else 0o755)
        for name in ("shut/file", "unreadable", "closed/file", "strange", "sticky/file", "sticky/mine", "fine", "strange-mode"):
            (place / tree / name).write_text("text here" if tree == "here" else "text")
            (place / tree / name).chmod(0o644)
    for name in ("shut", "opened", "narrowed"):
        (place / "here" / name / "new").write_text("new")
    (place / "here/shut/gone").mkdir()
    (place / "here/shut/gone/new").write_text("new")
    (place / "here" / "opened").chmod(0o755)
    (place / "here" / "narrowed").chmod(0o500)
    for name in ("sticky/file", "sticky/mine"):
        (place / "here" / name).unlink()
    (place / "here" / "strange-mode").write_text("text")
    (place / "here" / "strange-mode").chmod(0o755)
    for path in [place, *place.rglob("*")]:
        os.chown(path, 4242, 4242)
    there = place / "there"
    (there / "shut").chmod(0o555)
    (there / "closed").chmod(0o000)
    (there / "unreadable").chmod(0o000)
    for name in ("strange", "strange-mode", "sticky/file", "sticky"):
        os.chown(there / name, 0, 0)
    (there / "sticky").chmod(0o1777)
    assert as_an_ordinary_user(place, PERMITTED).splitlines() == [
        "shut/new not_permitted",
        "shut/file not_permitted",
        "unreadable not_permitted",
        "closed/file not_permitted",
        "strange not_permitted",
        "sticky/file not_permitted",
        "sticky/mine",
        "fine",
        "strange-mode not_permitted",
        "opened opened opened/new",
        "narrowed narrowed not_permitted",
        "parent_gone not_permitted",
    ]


def test_a_target_that_is_not_there_is_an_error_by_itself(trees: Trees) -> None:
    rewrite(trees.here)
    trees.there.rename(trees.there.with_name("gone"))
    with pytest.raises(NotFound, match="there"):
        trees.plan()


def test_a_file_that_goes_while_it_is_read_is_looked_at_again(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(trees.here)
    edit(trees.there / "app.py", 1, "read")  # of another size than the sandbox's would not be read at all
    real = Side.open

    def going(side: Side) -> object:
        if side.place is not None and side.place.root == str(trees.there) and (trees.there / "app.py").exists():
            (trees.there / "app.py").unlink()
            raise FileNotFoundError(errno.ENOENT, "it is no file any more", side.place.path)
        return real(side)

    monkeypatch.setattr(Side, "open", going)
    assert reasons(trees.plan()) == {"app.py": "deleted_there"}


# -- upper and lower case -------------------------------------------------------------------------------------------------------


class Folding(Target):
    """A file system to which upper and lower case are the same."""

    def side(self, path: str) -> Side | None:
        names = {one.lower(): one for one in os.listdir(self.root)}
        return super().side(names.get(path.lower(), path))


@pytest.mark.parametrize("content", [TEXT, "other"])
def test_a_name_that_is_another_one_s_is_a_conflict(trees: Trees, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    (trees.here / "APP.py").write_text(content)
    assert trees.plan().applied == ["APP.py"]
    monkeypatch.setattr(planning, "Target", Folding)
    assert reasons(trees.plan()) == reasons(trees.plan(ours=("*",))) == {"APP.py": "case_collision"}
    assert trees.plan(theirs=("APP.py",)) == Plan(kept=["APP.py"])


def test_the_right_spelling_is_no_conflict_where_case_does_not_count(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(trees.here)
    monkeypatch.setattr(planning, "Target", Folding)
    assert Folding(str(trees.there)).ignores_case("")
    assert trees.plan().applied == ["app.py"]


def test_two_new_names_that_would_be_one_are_conflicts(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("New", "new"):
        (trees.here / name).write_text(name)
    assert trees.plan().applied == ["New", "new"]
    monkeypatch.setattr(planning, "Target", Folding)
    assert reasons(trees.plan()) == {"New": "case_collision", "new": "case_collision"}
    one = trees.plan(theirs=("new",))
    assert (one.applied, one.kept, one.conflicts) == (["New"], ["new"], [])


def test_a_second_link_of_the_other_spelling_does_not_make_a_file_system_blind(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("one")
    os.link(tmp_path / "name", tmp_path / "NAME")
    (tmp_path / "empty").mkdir()
    target = Target(str(tmp_path))
    assert not target.ignores_case("")
    assert not target.ignores_case("empty")
    assert not target.ignores_case("no/such")
    assert not target.spelled_otherwise("name")


# -- directories that go --------------------------------------------------------------------------------------------------------


def test_what_reality_has_in_a_directory_that_goes_is_named(trees: Trees) -> None:
    delete_the_directory(trees.here)
    for name in ("a", "b", "c", "d", "e"):
        (trees.there / "src" / name).write_text("there")
    (conflict,) = trees.plan().conflicts
    assert (conflict.path, conflict.reason) == ("src", "not_empty")
    assert conflict.sentence.endswith(": a, b, c and 2 others")


def test_unknown_content_is_never_deleted_even_if_ours_was_chosen(trees: Trees) -> None:
    delete_the_directory(trees.here)
    add_in_the_directory(trees.there)
    assert reasons(trees.plan(ours=("src",))) == {"src/deep": "not_empty"}
    found = trees.plan(theirs=("src/deep",))
    assert (found.kept, found.conflicts) == (["src", "src/deep"], [])
    perform(found.operations)
    assert names(trees.there / "src") == {"deep", "deep/more"}


def test_a_directory_stays_for_what_was_kept_in_it(trees: Trees) -> None:
    delete_the_directory(trees.here)
    edit_in_the_directory(trees.there)
    found = trees.plan(theirs=("src/one",))
    assert (found.kept, found.conflicts) == (["src", "src/one"], [])
    perform(found.operations)
    assert names(trees.there / "src") == {"one"}


def test_a_file_cannot_take_the_place_of_a_directory_in_which_something_is_kept(trees: Trees) -> None:
    make_the_directory_a_file(trees.here)
    edit_in_the_directory(trees.there)
    assert reasons(trees.plan(theirs=("src/one",))) == {"src": "not_empty"}
    assert trees.plan(theirs=("src",)).kept == ["src", "src/one"]
    settled = trees.plan(ours=("src/one",))
    perform(settled.operations)
    assert (trees.there / "src").read_text() == "here"


def test_ours_replaces_a_directory_of_reality_only_if_it_is_empty(trees: Trees) -> None:
    rewrite(trees.here)
    make_a_directory(trees.there)
    assert reasons(trees.plan(ours=("app.py",))) == {"app.py": "not_empty"}
    (trees.there / "app.py" / "inside").unlink()
    found = trees.plan(ours=("app.py",))
    assert found.applied == ["app.py"]
    perform(found.operations)
    assert "here" in (trees.there / "app.py").read_text()


def test_ours_makes_the_directories_again_that_reality_deleted(trees: Trees) -> None:
    add_in_the_directory(trees.here)
    delete_the_directory(trees.there)
    found = trees.plan(ours=("src/deep/more",))
    assert (found.applied, found.conflicts) == (["src/deep/more"], [])
    assert [one.path for one in found.operations] == ["src", "src/deep", "src/deep/more"]
    perform(found.operations)
    assert (trees.there / "src" / "deep" / "more").read_text() == "here"


# -- choices --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["app.py", "./app.py", "*.py", "{there}/app.py", "**", "a[p]p.py"])
def test_a_conflict_is_settled_by_its_path_or_a_glob(trees: Trees, value: str) -> None:
    rewrite(trees.here)
    rewrite(trees.there)
    value = value.format(there=trees.there)
    ours, theirs = trees.plan(ours=(value,)), trees.plan(theirs=(value,))
    assert theirs == Plan(kept=["app.py"])
    assert (ours.applied, ours.conflicts) == (["app.py"], [])
    perform(ours.operations)
    assert (trees.there / "app.py").read_text() == (trees.here / "app.py").read_text()


def test_a_path_that_looks_like_a_glob_is_found(trees: Trees) -> None:
    for tree in (trees.here, trees.there):
        (tree / "[id].ts").write_text(tree.name)
    assert trees.plan(theirs=("[id].ts",)) == Plan(kept=["[id].ts"])


@pytest.mark.parametrize("value", ["READMEE.md", "README.md", "src/**"])
def test_a_choice_that_names_no_conflict_is_an_error(trees: Trees, value: str) -> None:
    rewrite(trees.here)
    edit(trees.here / "README.md", 1, "no conflict")
    rewrite(trees.there)
    for choice in ("ours", "theirs"):
        with pytest.raises(UsageError, match=r"names no conflict; there are: app\.py") as raised:
            trees.plan(**{choice: ("app.py", value)} if choice == "ours" else {choice: (value,)})  # type: ignore[arg-type]
        assert (raised.value.code, raised.value.detail) == ("no_such_conflict", {"value": value, "paths": ["app.py"]})


def test_a_choice_without_conflicts_is_an_error(trees: Trees) -> None:
    rewrite(trees.here)
    with pytest.raises(UsageError, match="there is none"):
        trees.plan(ours=("app.py",))


def test_one_path_cannot_be_both_ours_and_theirs(trees: Trees) -> None:
    rewrite(trees.here)
    rewrite(trees.there)
    with pytest.raises(UsageError, match=r"'app.py' is named by --ours \*\.py and by --theirs app\.py") as raised:
        trees.plan(ours=("*.py",), theirs=("app.py",))
    assert raised.value.code == "ours_and_theirs"


def test_outside_of_projects_only_absolute_values_count_and_paths_are_absolute(trees: Trees) -> None:
    rewrite(trees.here)
    rewrite(trees.there)
    pieces = [one._replace(root="/", path=f"{trees.there}/{one.path}"[1:]) for one in trees.pieces()]
    with pytest.raises(UsageError, match="names no conflict"):
        plan(pieces, Choices(ours=("app.py",)))
    assert plan(pieces, Choices(ours=(f"{trees.there}/app.py",))).applied == [f"{trees.there}/app.py"]


def test_a_conflict_of_text_has_both_versions_for_whoever_resolves_it(trees: Trees) -> None:
    rewrite(trees.here)
    rewrite(trees.there)
    add(trees.here)
    found = trees.plan()
    (conflict,) = found.conflicts
    assert conflict.content is not None
    assert b"<<<<<<< sandbox\nhere\n=======\nthere\n>>>>>>> reality\n" in conflict.content
    assert [one.path for one in found.operations] == ["new"]


# -- order ----------------------------------------------------------------------------------------------------------------------


def test_operations_are_in_an_order_in_which_they_can_be_done(trees: Trees) -> None:
    delete_the_directory(trees.here)
    make_a_directory(trees.here)
    add_a_tree(trees.here)
    for tree in (trees.base, trees.here, trees.there):
        for name in ("opened", "shut"):
            (tree / name).mkdir()
            (tree / name).chmod(0o755 if name == "shut" else 0o555)
    (trees.here / "opened").chmod(0o755)
    (trees.here / "shut" / "file").write_text("here")
    (trees.here / "shut").chmod(0o555)
    assert [one.path for one in trees.plan().operations] == [
        *("opened", "src/deep/three", "src/deep", "src/one", "src/two", "src"),
        *("app.py", "new", "new/below", "app.py/inside", "shut/file", "new/below/file", "shut"),
    ]


# -- no scan --------------------------------------------------------------------------------------------------------------------


def test_only_what_the_change_names_is_looked_at(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are listed only if they are to go, each parent is opened once for each question."""
    for number in range(50):
        (trees.here / "src" / f"new-{number}").write_text("here")
    pieces = trees.pieces()
    opened: list[str] = []
    real = Target._opened

    def counted(self: Target, directory: str, flags: int) -> object:
        opened.append(directory)
        return real(self, directory, flags)

    monkeypatch.setattr(Target, "_opened", counted)
    monkeypatch.setattr(Target, "names", lambda *_: pytest.fail("a directory was listed"))
    assert len(plan(pieces).operations) == 50
    assert sorted(opened) == ["src"]


# -- against a plain model ------------------------------------------------------------------------------------------------------


def tangle(tree: Path, dice: random.Random, steps: int) -> None:
    """Random edits of everything that can be there."""
    for _ in range(steps):
        there = sorted(names(tree))
        path = tree / (dice.choice(there) if there and dice.random() < 0.75 else f"n{dice.randrange(3)}")
        if not all(parent.is_dir() and not parent.is_symlink() for parent in path.parents if parent.is_relative_to(tree)):
            continue
        is_directory = path.is_dir() and not path.is_symlink()
        is_file = path.is_file() and not path.is_symlink()
        what = dice.randrange(8)
        if what == 0:
            shutil.rmtree(path) if is_directory else path.unlink(missing_ok=True)
        elif what in (1, 2, 3) and is_file:
            lines = path.read_text().splitlines(keepends=True) or ["one\n"]
            lines[dice.randrange(len(lines))] = f"{tree.name} {dice.randrange(3)}\n"
            path.write_text("".join(lines))
        elif what == 4 and (is_file or is_directory):
            path.chmod(dice.choice((0o700, 0o755, 0o711)))
        elif what == 5 and not os.path.lexists(path):
            path.mkdir(mode=0o755)
            path.chmod(0o755)
        elif what == 6 and is_directory:
            (path / f"n{dice.randrange(3)}").exists() or (path / f"m{dice.randrange(3)}").write_text(f"{dice.randrange(2)}\n")
        elif what == 7 and not is_directory:
            path.unlink(missing_ok=True)
            if dice.random() < 0.4:
                path.symlink_to(dice.choice(("app.py", "src", "nowhere")))
            else:
                path.write_text(f"{dice.choice(('both', tree.name))}\n")


@pytest.mark.parametrize("seed", range(120))
def test_random_edits_on_both_sides_are_both_there_afterwards_or_nothing_is(place: Path, seed: int) -> None:
    dice = random.Random(seed)
    trees = Trees(place)
    tangle(trees.here, dice, dice.randint(1, 7))
    tangle(trees.there, dice, dice.choice((0, 1, 3, 5, 8)))
    base, here, there = (shapes(tree) for tree in (trees.base, trees.here, trees.there))
    found = trees.plan()
    conflicting = {one.path for one in found.conflicts}
    for one in found.operations:
        assert shape(one.expected) == there.get(one.path)
        if there.get(one.path) != base.get(one.path):  # reality changed it: both are in it, or it is a conflict
            assert one.wanted is not None
            wanted, mine, theirs, old = shape(one.wanted), here[one.path], there[one.path], base[one.path]
            assert isinstance(wanted, tuple)
            assert isinstance(mine, tuple)
            assert isinstance(theirs, tuple)
            assert isinstance(old, tuple)
            for change in (mine, theirs):
                assert change[1] in (old[1], wanted[1])
                fresh = set(change[2].splitlines()) - set(old[2].splitlines())
                assert fresh <= set(wanted[2].splitlines())
    assert shapes(trees.there) == there, "a plan changes nothing"
    if conflicting:
        # Whatever was chosen, what is unknown stays, and every plan without conflicts can be done.
        for choices in (Choices(theirs=("**",)), Choices(ours=("**",))):
            settled = plan(trees.pieces(), choices)
            if settled.conflicts:
                continue
            copy = place / f"done-{len(choices.ours)}"
            shutil.copytree(trees.there, copy, symlinks=True)
            perform([one._replace(root=str(copy)) for one in settled.operations])
            after = shapes(copy)
            known = {one.path for one in trees.pieces()}
            assert {path: one for path, one in after.items() if path not in known and path in there} == {
                path: one for path, one in there.items() if path not in known
            }
            if choices.theirs:
                for path in there.keys() - base.keys() | {path for path in base if there.get(path) not in (None, base[path])}:
                    assert after.get(path) == there[path] or path in settled.merged
        return
    perform(found.operations)
    after = shapes(trees.there)
    for path in base.keys() | here.keys() | there.keys():
        if path in found.merged:
            continue
        mine_changed = here.get(path) != base.get(path)
        assert after.get(path) == (here if mine_changed else there).get(path), path
