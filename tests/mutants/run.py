"""Mutation testing of the pure parts, with mutmut: `make mutants`.

    python tests/mutants/run.py [--only GLOB ...] [--sample N] [--seed S] [--minutes M] [--children N] [--fresh] [--list]

mutmut changes one expression of a function at a time and runs the tests that reach that function; a change that no
test notices *survives*. Every survivor is judged once, in `judged.toml` beside this file, as `equivalent` (no test
could notice it) or `accepted` (a test could, and why none is worth it); those that only change a sentence for people
are counted and need none. Ends with 1 when a survivor is not judged, and prints each in the form of that file. A
survivor that matters gets a test instead.

mutmut wants packages and tests side by side, so the tree is laid out anew in `.mutants/`. What was killed there stays
killed until its function changes; `--fresh` forgets that. `--only` takes module names such as
`rollout_coordinator.core.ranges` or globs of them. A whole run takes hours.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LITERAL = re.compile(r'("(?:[^"\\\\]|\\\\.)*")')
STAGE = ROOT / ".mutants"
LOG = STAGE / "mutmut.log"
JUDGED = Path(__file__).with_name("judged.toml")
VERDICTS = ("equivalent", "accepted")

PACKAGES = ("common/rollout", "coordinator/rollout_coordinator", "worker/rollout_worker")
MUTATED = (
    "rollout_coordinator/core/*.py",
    "rollout_worker/session*.py",
    "rollout_worker/placement.py",
    "rollout_worker/session/*.py",
)
TESTS = ("tests/core/test_core_*.py", "tests/core/test_many_*.py", "tests/core/test_recent_runs.py",
         "tests/core/test_session*.py", "tests/core/test_devices.py", "tests/sim/test_*.py", "tests/fuzz/test_fuzz_core.py")  # fmt: skip
"""Those that need no process of their own: they run in forks of one that has imported everything."""
MARKED, NAMED = "not slow and not vllm", "not another_process"

CHEAPEST_FIRST = """\
import json
import pathlib

STATS = pathlib.Path(__file__).with_name("mutmut-stats.json")


def pytest_collection_modifyitems(items):
    durations = json.loads(STATS.read_text())["duration_by_test"] if STATS.exists() else {}
    items.sort(key=lambda item: durations.get(item.nodeid, 0.0))
"""
"""Most mutants are killed by many tests: the first of them ends it."""

SURVIVED, NOT_RUN = "survived", "not run"
NO_TEST = "no test reaches it"


@dataclass(frozen=True, order=True)
class Mutant:
    """A change that says the same whichever line it stands on: `nth` tells equal changes of one function apart."""

    function: str
    was: str
    now: str
    nth: int = 1

    def toml(self, note: str) -> str:
        lines = ["[[mutant]]", f"function = {json.dumps(self.function)}"]
        lines += [f"was = {json.dumps(self.was)}", f"now = {json.dumps(self.now)}"]
        lines += [f"nth = {self.nth}"] if self.nth > 1 else []
        return "\n".join([*lines, 'verdict = ""', f'why = ""  # {note}'])


# ---- judgements


def only_words(mutant: Mutant) -> bool:
    """Whether all that changed is a text for people: a literal with a blank in it. No test should fix its wording."""
    was, now = (LITERAL.split(text) for text in (mutant.was, mutant.now))
    if len(was) != len(now) or was[0::2] != now[0::2]:
        return False
    return all(" " in before for before, after in zip(was[1::2], now[1::2], strict=True) if before != after)


def judgements(path: Path = JUDGED) -> dict[Mutant, str]:
    """What `judged.toml` says. Raises ValueError for an entry without a verdict or a reason, and for a second one."""
    found: dict[Mutant, str] = {}
    for entry in tomllib.loads(path.read_text()).get("mutant", []):
        mutant = Mutant(entry["function"], entry["was"], entry["now"], entry.get("nth", 1))
        if entry["verdict"] not in VERDICTS or not entry["why"].strip():
            raise ValueError(f"{path.name}: {mutant}: needs a verdict ({', '.join(VERDICTS)}) and a reason")
        if mutant in found:
            raise ValueError(f"{path.name}: {mutant} is judged twice")
        found[mutant] = entry["verdict"]
    return found


# ---- the tree mutmut works in


def stage(fresh: bool) -> None:
    """Lays packages, tests and configuration out side by side, and takes out of mutmut's copy what is gone."""
    if fresh:
        shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "tests", "smoke"):
        target = STAGE / Path(name).name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / name, target, ignore=ignore)
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    (STAGE / "pyproject.toml").write_text(configuration(pytest_options))
    (STAGE / "conftest.py").write_text(CHEAPEST_FIRST)
    copy = STAGE / "mutants"
    for name in ("tests", "smoke"):
        shutil.rmtree(copy / name, ignore_errors=True)
    for name in PACKAGES:
        package = Path(name).name
        for path in (copy / package).rglob("*.py"):
            if not (STAGE / path.relative_to(copy)).exists():
                path.unlink()
    forget_what_reaches_what()


def forget_what_reaches_what() -> None:
    """mutmut asks new tests only which functions they reach; an old one may reach others once the code has moved."""
    digest = hashlib.sha256()
    for path in sorted(path for name in (*PACKAGES, "tests") for path in (STAGE / Path(name).name).rglob("*.py")):
        digest.update(f"{path.relative_to(STAGE)}\0".encode() + path.read_bytes())
    before = STAGE / "digest"
    if not before.exists() or before.read_text() != digest.hexdigest():
        (STAGE / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    before.write_text(digest.hexdigest())


def configuration(pytest_options: dict[str, object]) -> str:
    tests = sorted({str(path.relative_to(ROOT)) for pattern in TESTS for path in ROOT.glob(pattern)})
    settings = {
        "source_paths": [Path(name).name for name in PACKAGES],
        "only_mutate": list(MUTATED),
        "also_copy": ["smoke", "conftest.py"],
        "pytest_add_cli_args": ["-m", MARKED, "-k", NAMED, "-p", "no:cacheprovider", "-p", "no:xdist"],
        "pytest_add_cli_args_test_selection": tests,
        "use_git_change_detection": False,
        "use_setproctitle": False,
    }
    lines = ["[tool.mutmut]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    lines += ["[tool.pytest.ini_options]", *(f"{key} = {json.dumps(value)}" for key, value in pytest_options.items())]
    return "\n".join(lines) + "\n"


def mutmut(*args: str, minutes: float | None = None) -> int:
    """Runs mutmut's command line in the tree; an interrupt when the time is up lets it keep what it has found."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(STAGE / "mutants" / part) for part in (".", "smoke"))}
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *args]
    with LOG.open("w") as log:
        process = subprocess.Popen(command, cwd=STAGE, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(None if minutes is None else minutes * 60)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
            process.wait(60)
            return 0


def generate(children: int) -> None:
    """Writes every mutant, without running any: mutmut's command line has no word for that."""
    code = (
        "import sys; from pathlib import Path; from mutmut import __main__ as m; Path('mutants').mkdir(exist_ok=True);"
        "m.copy_src_dir(); m.copy_also_copy_files(); m.create_mutants(int(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(children)], cwd=STAGE, check=True, stdout=subprocess.DEVNULL)


# ---- what it found


def metas() -> Iterator[Path]:
    yield from sorted((STAGE / "mutants").rglob("*.py.meta"))


def names() -> list[str]:
    return [name for path in metas() for name in json.loads(path.read_text())["exit_code_by_key"]]


def outcomes() -> dict[str, str]:
    """`killed`, SURVIVED, NO_TEST or NOT_RUN of each mutant. A time-out, a crash, anything but success is a kill."""
    words = {0: SURVIVED, 5: NO_TEST, 33: NO_TEST, None: NOT_RUN, 2: NOT_RUN}
    return {
        name: words.get(code, "killed")
        for path in metas()
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items()
    }


def identities(wanted: Iterable[str]) -> dict[str, Mutant]:
    """The change each of these mutants makes."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import get_module_from_key, orig_function_and_class_names_from_key

    keep = set(wanted)
    functions = {name.partition("__mutmut_")[0] for name in keep}
    found: dict[str, Mutant] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for path in metas():
        source = path.relative_to(STAGE / "mutants").with_suffix("")
        for name in json.loads(path.read_text())["exit_code_by_key"]:
            if name.partition("__mutmut_")[0] not in functions:
                continue
            function, owner = orig_function_and_class_names_from_key(name)
            qualified = ".".join(part for part in (get_module_from_key(name), owner, function) if part)
            lines = get_diff_for_mutant(name, path=source).splitlines()[3:]
            was, now = (" ".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
            seen[(qualified, was, now)] += 1
            if name in keep:
                found[name] = Mutant(qualified, was, now, seen[(qualified, was, now)])
    return found


def choose(args: argparse.Namespace) -> list[str]:
    """The mutants of the modules asked for, or a sample of them."""
    every = names()
    if args.only:
        patterns = [pattern for only in args.only for pattern in (f"{only}.x*", f"{only}.*.x*")]
        every = [name for name in every if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not every:
        raise SystemExit(f"no mutant in {', '.join(args.only)}")
    if args.sample and args.sample < len(every):
        every = sorted(random.Random(args.seed).sample(every, args.sample))
    return every


def report(chosen: list[str], whole: bool) -> int:
    """Says what survived and is not judged, and which judgements are out of date. The number of the former."""
    judged = judgements()
    found = outcomes()
    counts = Counter(found[name] for name in chosen)
    alive = {name: found[name] for name in chosen if found[name] in (SURVIVED, NO_TEST)}
    named = identities(name for name in chosen)
    words = {name for name in alive if only_words(named[name])}
    alive = {name: why for name, why in alive.items() if name not in words}
    open_ones = sorted((named[name], why) for name, why in alive.items() if named[name] not in judged) if alive else []
    dead = {named[name] for name in chosen if found[name] == "killed"}
    for mutant, why in open_ones:
        print("\n" + mutant.toml(why))
    for mutant in sorted(dead & set(judged)):
        print(f"\njudged, but killed: take it out of {JUDGED.name}: {mutant}")
    for mutant in sorted(set(judged) - set(named.values())) if whole else []:
        print(f"\njudged, but there is no such mutant any more: take it out of {JUDGED.name}: {mutant}")
    print(f"\n{len(chosen)} mutants: " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items())))
    print(f"survivors: {len(words)} change only words, {len(alive) - len(open_ones)} are judged, {len(open_ones)} not")
    return len(open_ones)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="modules, or globs of them")
    parser.add_argument("--sample", type=int, metavar="N", help="that many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, help="stop after that long; the rest counts as not run")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--list", action="store_true", help="count the mutants of each module and run none")
    args = parser.parse_args()
    judgements()
    stage(args.fresh)
    generate(args.children)
    os.chdir(STAGE)
    chosen = choose(args)
    if args.list:
        for module, count in sorted(Counter(name.rpartition(".")[0] for name in chosen).items()):
            print(f"{count:6} {module}")
        return 0
    killed = {name for name, outcome in outcomes().items() if outcome == "killed"}
    if to_run := [name for name in chosen if name not in killed]:
        print(f"{len(to_run)} mutants to run of {len(chosen)}; mutmut writes to {LOG}", flush=True)
        code = mutmut("run", "--max-children", str(args.children), *to_run, minutes=args.minutes)
        if code != 0:
            print(f"{LOG.read_text()[-4000:]}\nmutmut ended with {code}: all of it is in {LOG}")
            return 2
    return 1 if report(chosen, whole=not (args.only or args.sample)) else 0


if __name__ == "__main__":
    sys.exit(main())
