"""Frameworks that are commands: what they print, as several versions of them really did, becomes cases and tries.

`recorded/` holds their outputs; tests/integration/test_offload_toolchains.py runs them where they are installed.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError, InputError
from rollout.workloads.test.cases import Batch, BatchResult, CaseResult, Outcome
from rollout.workloads.test.config import FrameworkSection, GroupSection
from rollout.workloads.test.frameworks import FRAMEWORKS
from rollout.workloads.test.frameworks.cargo import filter_of
from rollout.workloads.test.frameworks.javascript import pattern_of
from rollout.workloads.test.frameworks.port import Discovered, Ended, Group
from rollout.workloads.test.project import Project

RECORDED = Path(__file__).parent / "recorded"
NESTED = 'tests/math.test.js > math > add (x) [y] > z > adds "two" $1 ünï 世界'


def group(kind: str, selected: tuple[str, ...] = (), filters: str = "", **settings: object) -> Group:
    section = FrameworkSection.model_validate({"type": kind, **settings})
    return Group("g", GroupSection(filters=filters), section, selected)


def discovered(root: Path, one: Group) -> Discovered:
    framework, project = FRAMEWORKS[one.framework.kind], Project(root, None)
    return framework.discover(project, one, framework.group_config(project, one), lambda text: None)


def results(
    one: Group, ids: list[str], directory: Path, stdout: str = "", stderr: str = "", code: int = 1
) -> BatchResult:
    framework = FRAMEWORKS[one.framework.kind]
    batch = Batch(group="g", ids=tuple(ids))
    config = framework.group_config(Project(directory, None), one)
    (directory / "events.jsonl").write_text(stdout)  # of go
    return framework.results(batch, config, directory, Ended(code, stdout, stderr))


def outcomes(found: BatchResult | tuple[CaseResult, ...]) -> dict[str, str]:
    cases = found.cases if isinstance(found, BatchResult) else found
    return {case.id.rpartition(" > ")[2].rpartition(" ")[2]: case.tries[-1].outcome.value for case in cases}


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "version", ["vitest-5.1.2", "vitest-3.2.7", "vitest-1.6.1", "jest-30.5.2", "jest-29.7.0", "jest-27.5.1"]
)
def test_vitest_and_jest(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = version.partition("-")[0]
    report = json.loads((RECORDED / f"{version}-list.json").read_text().replace("/project", str(tmp_path)))
    (tmp_path / "listed.json").write_text(json.dumps(report))
    take = 'for word; do case $word in --outputFile=*) cp listed.json "${word#--outputFile=}";; esac; done; exit 1'
    runner = program(tmp_path / "runner", take)

    found = discovered(tmp_path, group(kind, command=str(runner)))
    ids = [case.id for case in found.cases]
    assert len(ids) == len(set(ids)) == 10 and NESTED in ids and "tests/other.test.js > fails" in ids
    assert {case.scope for case in found.cases} == {f"tests/{name}.test.js" for name in ("math", "other", "hook")}
    assert [(one.id, one.status) for one in found.results] == [("tests/broken.test.js", "error")]
    assert "nothing is not defined" in found.results[0].tries[0].details
    chosen = discovered(tmp_path, group(kind, ("tests/other.test.js > fails",), command=str(runner)))
    assert [case.id for case in chosen.cases] == ["tests/other.test.js > fails"]

    (tmp_path / "report.json").write_bytes((RECORDED / f"{version}-run.json").read_bytes())
    ran = results(group(kind), [*ids, "tests/math.test.js > vanished", "tests/gone.test.js > x"], tmp_path)
    hooks = "error" if kind == "vitest" else "failed"
    assert outcomes(ran) == {
        NESTED.rpartition(" > ")[2].rpartition(" ")[2]: "passed",
        "fails": "passed",  # of other.test.js, which is last
        "skipped": "skipped",
        "later": "skipped",
        "same": "failed",  # of two of this name the second fails
        "1": "passed",
        "2": "skipped",  # left out of this run
        "one": hooks,
        "two": "error" if kind == "vitest" else "skipped",
    }
    failed = next(case.tries[0] for case in ran.cases if case.id == "tests/math.test.js > math > fails")
    assert failed.outcome is Outcome.FAILED and "Object.is" in failed.message and failed.details


def test_a_pattern_of_names_matches_those_and_no_others() -> None:
    pattern = re.compile(pattern_of([NESTED, "a.js > x.y", "b.js > (x|y) > *"]))
    assert [bool(pattern.search(name)) for name in (
        'math add (x) [y] > z adds "two" $1 ünï 世界', "x.y", " x.y", "(x|y) *", "xzy", "x.y more", "x *",
    )] == [True, True, True, True, False, False, False]  # fmt: skip


@pytest.mark.parametrize("version", ["0.9.148", "0.9.143"])
def test_nextest(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "cargo", f"cat {RECORDED}/nextest-{version}.json")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ids = [case.id for case in discovered(tmp_path, group("nextest")).cases]
    assert "sums tests::adds" in ids and "sums::bin/tool tests::in_binary" in ids and len(ids) == 8
    assert "sums tests::ignored" not in ids
    assert len(discovered(tmp_path, group("cargo", ("sums::whole", "sums tests::adds"))).cases) == 5

    (tmp_path / "junit.xml").write_bytes((RECORDED / f"nextest-{version}.xml").read_bytes())
    ran = results(group("cargo"), ids, tmp_path)
    assert {case.id: case.tries[0].outcome.value for case in ran.cases} == {
        "sums tests::adds": "passed",
        "sums tests::fails": "failed",
        "sums tests::panics": "passed",
        "sums::whole aborts": "crashed",
        "sums::whole flaky": "failed",
        "sums::whole hangs": "timeout",
    }
    failed = next(case.tries[0] for case in ran.cases if case.id == "sums tests::fails")
    assert "to stdout" in failed.stdout and "to stderr" in failed.stderr and failed.started > 1.7e9


def test_filters_of_nextest_name_tests_exactly() -> None:
    ids = ["a x::y", "a x::z", "b::bin/c odd (name)"]
    assert filter_of(ids) == (
        r"(binary_id(=a) & (test(=x::y) | test(=x::z))) | (binary_id(=b::bin\u{2f}c) & (test(=odd\u{20}\u{28}name\u{29})))"
    )


@pytest.mark.parametrize("version", ["1.27.3", "1.23.9", "1.21.13"])
def test_go(version: str, tmp_path: Path) -> None:
    recorded = {kind: RECORDED / f"go-{version}-{kind}.jsonl" for kind in ("list", "run", "died")}
    script = program(tmp_path / "go", f"cat {recorded['list']}; cat {RECORDED}/go-{version}-list.err >&2; exit 1")
    found = discovered(tmp_path, group("go", command=str(script)))
    names = ["TestAdd", "TestGood", "TestSkipped", "TestParallel", "TestÜnï", "TestExits", "FuzzAdd", "ExampleAdd"]
    inner = ["TestGood", "TestPanics", "TestAfter", "TestHangs"]
    assert [case.id for case in found.cases] == [
        *(f"example.com/sums {name}" for name in names),
        *(f"example.com/sums/inner {name}" for name in inner),
    ]
    (broken,) = found.results
    assert broken.id == "example.com/sums/broken" and "undefined: undefined" in broken.tries[0].message

    ids = [*(case.id for case in found.cases), "example.com/sums TestVanished", "example.com/sums/broken TestNever"]
    said = (RECORDED / f"go-{version}-run.err").read_text()
    ran = results(group("go"), ids, tmp_path, recorded["run"].read_text(), said)
    assert {case.id.removeprefix("example.com/sums"): case.tries[0].outcome.value for case in ran.cases} == {
        " TestAdd": "failed", " TestGood": "passed", " TestSkipped": "skipped", " TestParallel": "passed",
        " TestÜnï": "passed", " FuzzAdd": "passed", " ExampleAdd": "passed", " TestExits": "error",  # not in this run
        " TestVanished": "error", "/inner TestGood": "passed", "/inner TestPanics": "crashed", "/broken TestNever": "error",
    }  # fmt: skip
    made = {case.id: case.tries[0] for case in ran.cases}
    assert made["example.com/sums TestAdd"].message == "sums_test.go:18: got 3, want 4"
    assert made["example.com/sums TestSkipped"].message == "sums_test.go:24: not here"
    assert made["example.com/sums/inner TestPanics"].message.startswith("panic: oh no")
    assert "undefined: undefined" in made["example.com/sums/broken TestNever"].message

    died = results(group("go"), ids, tmp_path, recorded["died"].read_text())
    assert {case.id.removeprefix("example.com/sums"): case.tries[0].outcome.value for case in died.cases} == {
        " TestGood": "passed", " TestExits": "crashed", "/inner TestHangs": "timeout",
    }  # fmt: skip
    assert 0.9 < died.cases[-1].tries[0].seconds < 2.0  # as recorded


Run = Callable[..., BatchResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Discovers and runs as a worker does, in one directory."""

    def run_batch(one: Group, ids: list[str], limit_s: float = 0.0) -> BatchResult:
        framework, project = FRAMEWORKS[one.framework.kind], Project(tmp_path, None)
        config, batch = framework.group_config(project, one), Batch(group="g", ids=tuple(ids), limit_s=limit_s)
        out = tmp_path / "out dir"
        out.mkdir()
        command = framework.command(batch, config, str(out))
        ended = subprocess.run(command.words, cwd=tmp_path, capture_output=True, text=True)
        return framework.results(batch, config, out, Ended(ended.returncode, ended.stdout, ended.stderr))

    return run_batch


ODD = ["a b", "it's $HOME;", "[x]*", "ünï"]


def test_templates_with_exit_codes_judge_each_test_by_itself(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("# all\n\n" + "\n".join(ODD) + "\n")
    one = group(
        "default",
        filters="-v",
        discover_command="cat ids; : {filters}",
        run_command="echo {tests}; [ {tests} != 'a b' ]",
    )
    found = discovered(tmp_path, one)
    assert [case.id for case in found.cases] == ODD
    ran = run(one, ODD)
    assert [case.tries[0].outcome.value for case in ran.cases] == ["failed", "passed", "passed", "passed"]
    assert [case.tries[0].stdout.strip() for case in ran.cases] == ODD
    assert ran.cases[0].tries[0].message.endswith("1") and ran.cases[0].tries[0].started > 1.7e9


def test_a_template_that_hangs_is_ended(run: Run) -> None:
    ran = run(group("default", discover_command="true", run_command="exec sleep {tests}"), ["0", "60"], limit_s=1.0)
    assert [case.tries[0].outcome.value for case in ran.cases] == ["passed", "timeout"]


@pytest.mark.parametrize("template", ["write {result_file} {tests}", "write 'my results.xml' {tests}"])
def test_templates_with_junit(run: Run, tmp_path: Path, template: str) -> None:
    (tmp_path / "inner").mkdir()
    program(
        tmp_path / "inner" / "write",
        'exec > "$1"; shift; echo "<testsuite>"; for id; do echo "<testcase classname=\'c\' name=\'${id#c/}\'><failure/></testcase>"; done;'
        "echo '<testcase name=\"long\"/></testsuite>'; exit 1",
    )
    one = group("default", discover_command="true", run_command=f"./{template}", working_dir="inner",
                result_file="my results.xml", test_id_format="{classname}/{name}")  # fmt: skip
    ran = run(one, ["c/a b", "c/ü", "very long", "c/vanished"][:3])
    assert {case.id: case.tries[0].outcome.value for case in ran.cases} == {
        "c/a b": "failed",
        "c/ü": "failed",
        "very long": "passed",
    }


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"discover_command": "echo why >&2; exit 3", "run_command": "x"}, InputError, "ended with 3:\n    why"),
        ({"discover_command": "printf 'a\\001b\\n'", "run_command": "x"}, InputError, "'a\\x01b'"),
        ({"discover_command": "true", "run_command": "x {result_file}"}, ConfigError, "framework.test_id_format: "),
        ({"discover_command": "true", "run_command": "x", "working_dir": "nowhere"}, ConfigError, "cannot be run: "),
    ],
)
def test_templates_that_fail_are_named(
    tmp_path: Path, settings: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as raised:
        discovered(tmp_path, group("default", **settings))
    assert said in str(raised.value)


@pytest.mark.parametrize("kind", ["cargo", "vitest", "jest", "go"])
def test_a_toolchain_that_is_not_there_or_prints_something_else_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^(cargo|npx|go) cannot be run"):
        discovered(tmp_path, group(kind))
    for name in ("cargo", "npx", "go"):
        program(tmp_path / name, "echo '{}'; echo no such command >&2; exit 2")
    with pytest.raises(InputError, match=r"group g: (cargo|npx|go) .*ended with 2") as raised:
        discovered(tmp_path, group(kind))
    assert str(raised.value).endswith("no such command")


def test_a_command_without_results_is_an_error_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text("<not junit")
    (tmp_path / "report.json").write_text('{"testResults": [{"name": 3}]}')
    for kind in ("cargo", "vitest", "go"):
        ran = results(group(kind), ["a b", "c d"], tmp_path, "out", "why", code=9)
        assert [(case.id, case.tries[0].outcome.value) for case in ran.cases] == [("a b", "error"), ("c d", "error")]
        assert {"cargo": "junit.xml: "}.get(kind, "9") in ran.cases[0].tries[0].message and ran.cases[0].tries[
            0
        ].stderr.endswith("why")
