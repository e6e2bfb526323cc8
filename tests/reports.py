"""Documents, patches and outputs as a race leaves them, for the tests of the report and of the table."""

import random
from typing import Any

__all__ = ["PATCH", "attempt", "race", "search"]

START = 1_790_000_000.0
PATCH = """\
diff --git a/src/shop/cart.py b/src/shop/cart.py
index 1111111..2222222 100644
--- a/src/shop/cart.py
+++ b/src/shop/cart.py
@@ -1,8 +1,10 @@
+import math
+
 from shop.prices import Price


 def total(prices: list[float]) -> float:
-    return sum(prices)
+    return math.fsum(prices)


 def discount(price: Price, percent: float) -> Price:
@@ -40,5 +42,4 @@ def receipt(prices: list[Price]) -> str:
     lines = [str(price) for price in prices]
-    lines.append("-" * 20)
-    lines.append(f"total {total(prices)}")
+    lines.append(f"total {total(prices):.2f}")
     return "\\n".join(lines)

"""


def attempt(name: str, number: int = 1, *, verified: bool = True, rank: int | None = 1, **more: Any) -> dict[str, Any]:
    chance = random.Random(f"{name}-{number}")
    seconds = chance.uniform(2, 9)
    began = START + chance.uniform(0, 4)
    steps = 40
    samples, memory, cpu = [], 20e6, 0.0
    for step in range(steps + 1):
        memory = max(8e6, memory + chance.uniform(-12e6, 16e6))
        cpu += chance.uniform(0, 1.6) * seconds / steps * 1000
        samples.append([step * seconds / steps, int(memory), cpu])
    return {
        "name": name,
        "attempt": number,
        "command": f"git apply {name}.patch && python -m pip install --quiet --upgrade shop-prices",
        "sandbox": f"race-shop-{name}-3fa2c1",
        "state": "done",
        "verified": verified,
        "rank": rank,
        "score": round(chance.uniform(50, 99), 1) if verified else None,
        "exit_code": 0,
        "reason": "exited",
        "duration_ms": int(seconds * 1000),
        "started_at": began,
        "ended_at": began + seconds + 1.5,
        "peak_memory_bytes": max(int(one[1]) for one in samples),
        "cpu_ms": cpu,
        "changes": {"files": 1, "added": 4, "removed": 3, "paths": [{"path": "src/shop/cart.py", "kind": "modified"}]},
        "denials": [],
        "why": "all checks passed" if verified else "the check 'tests' ended with 1: 2 of 14 tests failed",
        "checks": [
            {
                "name": "tests",
                "command": "python -m pytest -q",
                "required": True,
                "passed": verified,
                "exit_code": 0 if verified else 1,
                "reason": "exited",
                "duration_ms": 1180,
                "tests": {"passed": 14 if verified else 12, "failed": 0 if verified else 2, "skipped": 1},
                "output": "\x1b[32m..............\x1b[0m [100%]\n14 passed, 1 skipped in 0.92s\n",
            },
            {
                "name": "lint",
                "command": "ruff check src",
                "required": False,
                "passed": True,
                "exit_code": 0,
                "reason": "exited",
                "duration_ms": 90,
                "tests": None,
                "output": "All checks passed!\n",
            },
        ],
        "output": f"applied {name}.patch\ninstalled shop-prices 2.1\n",
        "samples": samples,
        **more,
    }


def race(*attempts: dict[str, Any], winner: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "experiment": {
            "id": "exp-7c1d20",
            "project": "/home/ann/work/shop",
            "base": {"kind": "pinned", "head": "9c2f4e1ab04d7c"},
            "state": "finished",
            "created_at": "2026-09-21T14:13:19.000Z",
            "ended_at": "2026-09-21T14:13:34.500Z",
            "winner": winner,
            "reason": "fsum won: its score 96.2 is higher than 88.1 of decimal; 2 of 3 verified"
            if winner
            else "none of 2 attempts verified: a: its command ended with 1; b: its command ended with 1",
            "promotion": None,
            "setup": {"command": "python -m pip install -e .", "exit_code": 0, "duration_ms": 2310},
            "verify": [
                {"name": "tests", "command": "python -m pytest -q", "required": True},
                {"name": "lint", "command": "ruff check src", "required": False},
            ],
            "score": "./score.sh",
            "approaches": list(attempts),
            **more,
        }
    }


def search(width: int = 3, depth: int = 3) -> dict[str, Any]:
    """A tree in which the first child of each node is gone on from, the second passed over and the rest are dead ends."""
    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": None, "depth": 0, "step": None, "score": 1.0, "state": "start", "why": "", "duration_ms": 0}
    ]
    parent = 0
    for level in range(1, depth + 1):
        for place in range(width):
            state = ("kept" if level == depth else "expanded", "passed over", "dead end")[min(place, 2)]
            nodes.append(
                {
                    "id": len(nodes),
                    "parent": parent,
                    "depth": level,
                    "step": f"replace < by <= in line {level * 10 + place}",
                    "score": None if place >= 2 else level + 1.0 - place,
                    "state": state,
                    "why": "it does not compile" if place >= 2 else "",
                    "duration_ms": 120 + place,
                }
            )
        parent = len(nodes) - width
    document = race(reason=f"Node {parent} has the highest score.", verify=[], score=None, setup=None)
    document["experiment"]["tree"] = {"best": parent, "nodes": nodes}
    return document
