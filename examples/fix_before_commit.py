"""Fix before commit: two fixes are tried in sandboxes, and only the one that makes the tests pass gets to the project, and is
committed there.

    python examples/fix_before_commit.py

It makes its own project, and leaves nothing.
"""

import subprocess
import sys

from elsewhere import Sandbox
from scratch import git, scratch_project

FILES = {
    "prices.py": """\
        def gross(net):
            return net * 1.19
        """,
    "tests/test_prices.py": """\
        import unittest

        from prices import gross


        class Prices(unittest.TestCase):
            def test_cents(self):
                self.assertEqual(gross(9.99), 11.89)

            def test_nothing(self):
                self.assertEqual(gross(0), 0)
        """,
}
FIXES = {
    "truncate": "import math\n\n\ndef gross(net):\n    return math.floor(net * 119) / 100\n",
    "round": "def gross(net):\n    return round(net * 1.19, 2)\n",
}
TESTS = ["python3", "-B", "-m", "unittest", "-q", "tests.test_prices"]


def main() -> int:
    with scratch_project("prices", FILES) as project:
        assert subprocess.run(TESTS, cwd=project, check=False, stderr=subprocess.PIPE).returncode, "there is something to fix"
        print("a test fails; two fixes are tried in sandboxes")
        for name, text in FIXES.items():
            with Sandbox.create(project) as box:
                box.files.write("prices.py", text)
                tests = box.run(TESTS, timeout="1m")
                verdict = tests.stderr.strip().splitlines()[-1]
                print(f"   {name:10} {verdict}")
                if tests.exit_code == 0:
                    box.promote()
                else:
                    assert git(project, "status", "--porcelain") == "", "a fix that fails leaves no trace"
        git(project, "commit", "-qam", "Prices have two digits")
        subprocess.run(TESTS, cwd=project, check=True, stderr=subprocess.PIPE)
        changed = git(project, "show", "--format=", "--name-only", "HEAD").split()
        assert (project / "prices.py").read_text() == FIXES["round"]
        assert git(project, "rev-list", "--count", "HEAD").strip() == "2"
        assert changed == ["prices.py"]
        assert Sandbox.list() == []
    print(f"the one that is green was committed: {', '.join(changed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
