"""`rollout test run` beside pytest-xdist, two processes each, on suites that are made here and on two that packages ship.

All take turns, several rounds; the figures are medians of whole commands. Ours begins and ends a private cluster each
time, and has seen the suite once before, so that it knows how long tests take. Run: python
tests/bench/bench_test_offload.py [--rounds N] [--only SUITE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measure import Row, directory, machine

SLOTS = 2
EMPTY = 5000
EMPTY_MS = 2.0
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""With the interpreter of the peer as `python`."""
ENV = os.environ | {"PATH": PATH, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
XDIST = ("-p", "xdist", "-n", str(SLOTS), "--dist")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings")


def empty(root: Path, count: int) -> list[str]:
    for file in range(100):
        tests = "".join(f"def test_{n}(): pass\n" for n in range(count // 100))
        (root / f"test_{file:02}.py").write_text(tests)
    return []


def uneven(root: Path, count: int) -> list[str]:
    """Most tests take milliseconds, some hundreds of them, a few seconds: the longest are in one file, at its end."""
    lengths = random.Random(7)
    for file in range(20):
        seconds = sorted(min(lengths.lognormvariate(-4.5, 1.6), 3.0) for _ in range(count // 20))
        body = "".join(f"def test_{n}(): time.sleep({one:.4f})\n" for n, one in enumerate(seconds))
        (root / f"test_{file:02}.py").write_text(f"import time\n{body}")
    long = "".join(f"def test_long_{n}(): time.sleep({2 + n})\n" for n in range(3))
    (root / "test_long.py").write_text(f"import time\n{long}")
    return []


def shipped(package: str, *parts: str) -> Callable[[Path, int], list[str]]:
    """Tests of an installed package, in a copy of it."""

    def lay_out(root: Path, count: int) -> list[str]:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        shutil.copytree(Path(spec.origin).parent, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        return [f"{package}/{part}" for part in parts]

    return lay_out


SUITES: dict[str, tuple[str, Callable[[Path, int], list[str]], int]] = {
    "empty": (f"{EMPTY:,} empty tests in 100 files", empty, EMPTY),
    "uneven": ("403 uneven tests", uneven, 400),
    "networkx": ("networkx: classes, generators, linear algebra", shipped("networkx", "classes", "generators", "linalg"), 0),
    "sympy": ("sympy: logic", shipped("sympy", "logic"), 0),
}  # fmt: skip


def timed(words: list[str], root: Path) -> float:
    began = time.monotonic()
    done = subprocess.run(words, cwd=root, env=ENV, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return time.monotonic() - began


def passed_by_pytest(root: Path, paths: list[str]) -> tuple[int, float]:
    """How many tests pass in one plain process, and how long that takes."""
    began = time.monotonic()
    done = subprocess.run([*PYTEST, *paths], cwd=root, env=ENV, capture_output=True, text=True)
    words = done.stdout.strip().splitlines()[-1].replace("=", " ").split()
    return int(words[words.index("passed,") - 1] if "passed," in words else words[words.index("passed") - 1]), (
        time.monotonic() - began
    )


def measure(name: str, rounds: int) -> list[Row]:
    what, lay_out, count = SUITES[name]
    with directory() as root:
        paths = lay_out(root, count)
        (root / "pytest.ini").write_text("[pytest]\n")
        program = str(Path(sys.executable).with_name("rollout"))
        ways = {
            "ours": [program, "test", "run", "--parallel", str(SLOTS), *paths],
            "worksteal": [*PYTEST, *XDIST, "worksteal", *paths],
            "loadfile": [*PYTEST, *XDIST, "loadfile", *paths],
        }
        plain, plain_s = passed_by_pytest(root, paths)
        timed(ways["ours"], root)
        summary = json.loads((root / "test-results" / "summary.json").read_text())
        assert summary["tests"]["passed"] == plain, (summary["tests"], plain)
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, words in ways.items():
                took[way].append(timed(words, root))
    medians = {way: statistics.median(values) for way, values in took.items()}
    peer = min(medians["worksteal"], medians["loadfile"])
    rows = [
        Row(
            f"{what}, {SLOTS} processes",
            f"{medians['ours']:.1f} s; worksteal {medians['worksteal']:.1f}, loadfile {medians['loadfile']:.1f}, "
            f"plain pytest {plain_s:.1f} ({rounds} rounds)",
            "≤1.0 of xdist",
            medians["ours"] <= peer,
            {**{f"{way}_s": value for way, value in medians.items()}, "plain_s": plain_s},
        )
    ]
    if name == "empty":
        each_ms = 1000 * medians["ours"] / count
        target = f"≤{EMPTY_MS:.0f} ms"
        figure = f"{each_ms:.2f} ms; plain pytest {1000 * plain_s / count:.2f}"
        rows.append(Row("each of them", figure, target, each_ms <= EMPTY_MS, {"each_ms": each_ms}))
    return rows


def rows(quick: bool) -> list[Row]:
    return [row for name in SUITES for row in measure(name, 1 if quick else 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--only", choices=list(SUITES), action="append", help="this suite; repeatable")
    given = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for name in given.only or SUITES:
        for row in measure(name, given.rounds):
            print(f"{row.what}: {row.figure}  [{row.target}: {row.verdict}]", flush=True)


if __name__ == "__main__":
    main()
