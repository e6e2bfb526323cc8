"""A dependency upgrade that broke the tests, and three ways out of it, tried at once: a newer version, a patch of the project, or
going back. One of them is right. The others say what they died of; the right one is promoted, and taken back again.

    python examples/dependency_upgrade.py

It makes its own project with tiny packages of its own, and leaves nothing. The same by hand, in such a project, is COMMAND.
"""

import sys
import zipfile
from pathlib import Path

from elsewhere import Sandbox, race
from scratch import fingerprint, git, scratch_project

# A package that reads amounts of money. 2.0 closed a hole and gives cents; 2.1 only has other words for that.
MONEY = {
    "1.0": "def parse(text):\n    return float(eval(text))\n",
    "2.0": "def parse(text):\n    return round(float(text) * 100)\n",
    "2.1": 'def parse(text):\n    """In cents."""\n    return round(float(text) * 100)\n',
}
FILES = {
    "requirements.txt": "money==1.0\n",
    "invoice.py": """\
        from money import parse


        def total(amounts):
            return f"{sum(parse(amount) for amount in amounts):.2f}"
        """,
    "tests/test_invoice.py": """\
        import unittest

        from invoice import total


        class Invoice(unittest.TestCase):
            def test_nothing(self):
                self.assertEqual(total([]), "0.00")

            def test_one(self):
                self.assertEqual(total(["1.50"]), "1.50")

            def test_several(self):
                self.assertEqual(total(["0.10", "0.20", "12.00"]), "12.30")
        """,
    "install.sh": """\
        #!/bin/sh -e
        # What a package manager does: unpack, and remember the version.
        python3 -m zipfile -e "vendor/money-$1-py3-none-any.whl" lib
        echo "money==$1" > requirements.txt
        """,
    "audit.sh": """\
        #!/bin/sh
        # money 1.0 evaluates what it reads, and may not be used.
        ! grep -q 'eval(' lib/money.py
        """,
    "score.sh": """\
        #!/bin/sh
        # Fewer lines are easier to keep.
        cat invoice.py lib/money.py | wc -l
        """,
    "fix.patch": """\
        --- a/invoice.py
        +++ b/invoice.py
        @@ -3,3 +3,3 @@

         def total(amounts):
        -    return f"{sum(parse(amount) for amount in amounts):.2f}"
        +    return f"{sum(parse(amount) for amount in amounts) / 100:.2f}"
        """,
}
APPROACHES = {"upgrade": "./install.sh 2.1", "patch": "git apply fix.patch", "revert": "git revert --no-edit HEAD"}
TESTS = "PYTHONPATH=lib python3 -B -m unittest -q tests.test_invoice"
AUDIT, SCORE = "./audit.sh", "./score.sh"
COMMAND = [
    *("race", *(word for name, line in APPROACHES.items() for word in ("-a", f"{name}={line}"))),
    *("--verify", TESTS, "--verify", AUDIT, "--score", SCORE, "--lower", "--promote"),
]


def complete(project: Path) -> None:
    """The packages, and the commit that broke it."""
    for version, text in MONEY.items():
        write_wheel(project / f"vendor/money-{version}-py3-none-any.whl", version, text)
    install(project, "1.0")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "Packages, and money 1.0")
    install(project, "2.0")
    git(project, "commit", "-qam", "money 2.0")


def write_wheel(path: Path, version: str, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    about = f"money-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("money.py", text)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: money\nVersion: {version}\n")


def install(project: Path, version: str) -> None:
    with zipfile.ZipFile(project / f"vendor/money-{version}-py3-none-any.whl") as wheel:
        wheel.extract("money.py", project / "lib")
    (project / "requirements.txt").write_text(f"money=={version}\n")


def main() -> int:
    with scratch_project("invoices", FILES) as project:
        complete(project)
        before = fingerprint(project)
        done = race(
            list(APPROACHES.items()), verify=[TESTS, AUDIT], score=SCORE, lower=True, timeout="1m", project=project
        ).check()
        for one in done.results:
            print(f"   {'✓' if one.verified else '✗'} {one.name:8} {one.why}")
        print(done.reason)
        assert done.winner is not None
        assert done.winner.name == "patch"
        assert fingerprint(project) == before, "a race changes nothing"
        report = Path(done.report(project.with_name("report.html")))
        assert "fix.patch" in report.read_text()
        print(f"a report of {report.stat().st_size // 1024} KiB shows what each one did")

        promotion = done.promote()
        assert git(project, "status", "--porcelain") == " M invoice.py\n"
        assert "/ 100" in (project / "invoice.py").read_text()
        promotion.undo()
        assert git(project, "status", "--porcelain") == ""
        print("the patch was promoted, and taken back")
        for one in Sandbox.list():
            Sandbox.get(one.id).remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
