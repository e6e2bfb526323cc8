"""One run's results as text for a terminal, as JSON for programs and as a Markdown page. Paths of this machine are in none."""

from dataclasses import asdict, dataclass, field

from budget import Verdict
from measure import Row, Section

__all__ = ["Report"]

_FOREWORD = (
    "Written by `bench/compare.py --markdown`, not by hand. Everything was measured in one run on one machine, interleaved: "
    "compare rows, not absolute values. What is timed is the product with everything on, from its front doors."
)

_WHERE_THE_TIME_GOES = """## Where the time goes

- **In process.** Creating is handing out a sandbox that stands already: asking the launcher, the fingerprint of what
  the view depends on, the record and the identity file, a rename, about 1 to 1.5 ms. Running `true` is two hops
  between processes, one `posix_spawn` and the path to the program through a fresh overlay. Removing is a kill and the
  end of pid 1; mounts and files go later, by another process.
- **From a cold shell** Python's own start is half of it. The rest is one hop to a process that waits with everything
  loaded.
- **Memory.** A keeper is a fork of the launcher, and Python writes to what it reads (reference counts), so pages that
  could be shared are copied.
- **File work.** Nearly all of what is lost is overlay's own: compare the rows of the plain overlay.
- **Sustained**, without any pause, the making of the next sandbox is part of the price: two forks, some thirty
  mounts, the filter.
- **Snapshot, rollback, fork.** What was written is renamed, never copied. What is left is the end of one first process
  and the start of the next, the record, and for a fork a directory of its own.
- **Changes** are read from the layers: a directory that the sandbox wrote to is opened, one that it did not is not.
- **The network.** What goes out is read and written once more, by one process in Python for all sandboxes. A network of its
  own is made with the blank, before anybody asks for it.
- **A race** is as fast as its slowest approaches fit on the processors. What it adds is two forks, a comparison and a
  patch for each of them; what a copy takes, it does not.
- **Promotion** compares each changed file in base, sandbox and reality, writes it beside its target, exchanges the two
  and keeps what came out; the disk is waited for before that, and before it counts. git is asked what is ignored.
"""


@dataclass(slots=True)
class Report:
    machine: dict[str, str]
    quick: bool
    took_s: float = 0.0
    sections: list[Section] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [f"{name + ':':<28}{value}" for name, value in self.machine.items()]
        for section in self.sections:
            lines += ["", f"{section.letter}. {section.title}", *_wrapped(section.text), ""]
            lines += _aligned(_header(section), _body(section))
        lines += ["", "Budgets", ""]
        cells = [[one.what, one.budget, one.measured, one.verdict] for one in self.verdicts]
        lines += _aligned(["what", "budget", "measured", "verdict"], cells)
        lines += ["", *self._remarks()]
        return "\n".join(lines)

    def markdown(self) -> str:
        lines = [
            "# Performance",
            "",
            _FOREWORD,
            "",
            "## Budgets",
            "",
            *_table(
                ["what", "budget", "measured", "verdict"],
                [[one.what, one.budget, one.measured, one.verdict] for one in self.verdicts],
            ),
        ]
        for section in self.sections:
            lines += ["", f"## {section.letter}. {section.title}", "", section.text, ""]
            lines += _table(_header(section), _body(section))
        lines += ["", _WHERE_THE_TIME_GOES]
        lines += ["", "## The machine", "", *_table(["", ""], [[name, value] for name, value in self.machine.items()])]
        lines += ["", *self._remarks(), ""]
        return "\n".join(lines)

    def document(self) -> dict[str, object]:
        return {
            "machine": self.machine,
            "quick": self.quick,
            "took_s": round(self.took_s, 1),
            "budgets": [
                {"what": one.what, "budget": one.budget, "measured": one.measured, "verdict": one.verdict}
                for one in self.verdicts
            ],
            "sections": [_section_document(section) for section in self.sections],
            "errors": self.errors,
        }

    def _remarks(self) -> list[str]:
        said = [f"The run took {self.took_s:.0f} s."]
        if self.quick:
            said.append("A quick run with very few repetitions: it shows that everything works, not how fast.")
        return said + [f"ERROR: {error}" for error in self.errors]


def _header(section: Section) -> list[str]:
    if section.findings:
        return ["", *dict.fromkeys(finding.who for finding in section.findings)]
    ratio = [f"x {section.baseline}"] if section.baseline else []
    return ["", f"median {section.unit}", "p10", "p90", "n", *ratio, ""]


def _body(section: Section) -> list[list[str]]:
    if not section.findings:
        return [_cells(row, section) for row in section.rows]
    lines: dict[str, list[str]] = {}
    for finding in section.findings:
        lines.setdefault(finding.what, [finding.what]).append(finding.outcome)
    return list(lines.values())


def _cells(row: Row, section: Section) -> list[str]:
    name = f"- {row.name}" if row.part else row.name
    if row.samples is None:
        return [name, "-", "-", "-", "-", *([""] if section.baseline else []), row.absent]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}" if row.ratio >= 0.1 else f"{row.ratio:.4f}"
    ratios = [ratio] if section.baseline else []
    digits = 2 if section.unit == "MiB" or row.samples.median < 100 else 0
    numbers = [row.samples.median, row.samples.quantile(0.1), row.samples.quantile(0.9)]
    return [name, *(f"{number:,.{digits}f}" for number in numbers), str(len(row.samples.values)), *ratios, _note(row)]


def _note(row: Row) -> str:
    return row.note if row.undisturbed is None else f"{row.undisturbed:.2f} by p10"


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns by their widest cell; numbers to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    numeric = _numeric(header)
    lines = []
    for line in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(("   " + "  ".join(cells)).rstrip())
    return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    numeric = _numeric(header)
    rule = ["--:" if column in numeric else "---" for column in range(len(header))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [header, rule, *escaped]]


def _numeric(header: list[str]) -> set[int]:
    return {column for column, title in enumerate(header) if title == "n" or title.startswith(("median ", "p10", "p90", "x "))}


def _wrapped(text: str, width: int = 116) -> list[str]:
    lines, line = [], "  "
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = "  "
        line += f" {word}"
    return [*lines, line]


def _section_document(section: Section) -> dict[str, object]:
    return {
        "letter": section.letter,
        "title": section.title,
        "text": section.text,
        "unit": section.unit,
        "baseline": section.baseline,
        "rows": [_row_document(row) for row in section.rows],
        "findings": [asdict(finding) for finding in section.findings],
    }


def _row_document(row: Row) -> dict[str, object]:
    document: dict[str, object] = {"name": row.name, "part": row.part, "note": row.note}
    if row.samples is None:
        return {**document, "absent": row.absent}
    return {
        **document,
        "median": row.samples.median,
        "mean": row.samples.mean,
        "p10": row.samples.quantile(0.1),
        "p90": row.samples.quantile(0.9),
        "ratio": row.ratio,
        "undisturbed_ratio": row.undisturbed,
        "samples": [round(value, 4) for value in row.samples.values],
    }
