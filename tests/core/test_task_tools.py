"""Tasks that are made, reviewed and judged: what `rollout task init|check|oracle` rest upon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from job_directories import make_job, record
from job_files import make_task
from located import places
from rollout.cli.__main__ import app
from rollout.cli.program import command_of
from rollout.model.errors import ConfigError
from rollout.workloads.job.check_tasks import CheckedTask, check_tasks
from rollout.workloads.job.copied_files import copied
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.job.job_directory import read_job_directory
from rollout.workloads.job.load_task import TaskUse, load_task
from rollout.workloads.job.new_task import write_task
from rollout.workloads.job.record import SERVICES_ENDED
from rollout.workloads.job.verdict import Verdict, tail, verdicts

Call = Callable[..., tuple[int, str]]
Came = float | str | None
"""A reward, an error, or neither."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def calling(*arguments: str) -> tuple[int, str]:
        code = command_of(app, "rollout")(list(arguments), prog_name="rollout", standalone_mode=False)
        return code or 0, capsys.readouterr().out

    return calling


def check(*paths: Path) -> list[CheckedTask]:
    return list(check_tasks(paths, {}))


def warnings(directory: Path) -> list[str]:
    """Of one task without faults, without the path of its directory."""
    (found,) = check(directory)
    assert found.faults == ()
    return [warning.removeprefix(f"{directory}/") for warning in found.warnings]


# ---- init


@pytest.mark.parametrize("dialect", ["rollout", "harbor"])
def test_a_new_task_has_neither_faults_nor_warnings(tmp_path: Path, dialect: DialectName) -> None:
    write_task(tmp_path / "t", dialect, "me/mine")
    task = load_task(tmp_path / "t", TaskUse(oracle=True)).task
    assert (task.dialect_name, task.package, warnings(tmp_path / "t")) == (dialect, "me/mine", [])
    assert os.access(tmp_path / "t/tests/test.sh", os.X_OK)


def test_an_empty_directory_takes_a_task_and_another_is_left_alone(tmp_path: Path, call: Call) -> None:
    (tmp_path / "t").mkdir()
    call("task", "init", "t")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"t is not empty .* nothing was written"):
        call("task", "init", "t", "--format", "harbor")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("f",), "cannot make a task of f: it is a file"),
        (("f/t",), "cannot make a task of f/t: it is a file"),
        (("a:b",), "the directory's name is the task's"),
        (("t", "--name", "mine"), "must be like org/name"),
    ],
)
def test_a_task_that_cannot_be_is_not_begun(tmp_path: Path, call: Call, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match=said):
        call("task", "init", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


# ---- check


def test_all_faults_of_all_tasks_are_told_at_once(tmp_path: Path, call: Call) -> None:
    make_task(tmp_path / "d/good")
    make_task(tmp_path / "d/one", "[agent]\ntimeout = 3\n[verifer]\n")
    make_task(tmp_path / "d/two", without=("tests/test.sh",))
    with pytest.raises(ConfigError) as caught:
        call("task", "check", "d", "nowhere")
    assert places(caught.value.message) == [
        "d/one/task.toml:2: agent.timeout",
        "d/one/task.toml:3: verifer",
        "d/two",
        "nowhere",
    ]
    assert "tests/test.sh" in caught.value.message


def test_check_is_an_object_a_task_for_programs(tmp_path: Path, call: Call) -> None:
    make_task(tmp_path / "d/a", files={"tests/test.sh": "echo 1"})
    (found,) = [json.loads(line) for line in call("task", "check", "d", "--json")[1].splitlines()]
    assert (found["name"], found["ok"], found["format"], found["faults"]) == ("a", True, "rollout", [])
    assert len(found["warnings"]) == 1 and len(found["checksum"]) == 64


def test_a_directory_of_no_tasks_and_two_of_one_name_are_faults(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (found,) = check(tmp_path / "empty")
    assert "neither a task nor a directory of tasks" in found.faults[0]
    make_task(tmp_path / "d/Task")
    make_task(tmp_path / "d/task")
    faults = [fault for found in check(tmp_path / "d") for fault in found.faults]
    assert len(faults) == 1 and faults[0].startswith(f"{tmp_path}/d: Task and task ")


def test_a_directory_that_only_looks_like_a_task_is_told(tmp_path: Path) -> None:
    make_task(tmp_path / "d/a")
    make_task(tmp_path / "d/b", without=("task.toml", "instruction.md"))
    (warning,) = check(tmp_path / "d")[-1].warnings
    assert "d/b: " in warning and "task.toml" in warning


DOCKERFILE = """\
# COPY comment /x
FROM debian:12 AS base
copy --chown=1:1 gone.txt \\
    # a comment between
    also.txt /app/
ADD https://example.org/x git@github.com:a/b /x
COPY --from=base /x /y
COPY ["with space", "here.txt", "/app/"]
COPY <<EOF <<-"TWO" /app/
COPY inside /x
EOF
COPY inside /x
TWO
COPY $NAME ../tests *.csv her?.txt . /app/
"""


def test_sources_of_a_dockerfile() -> None:
    assert [(one.line, one.instruction, one.source) for one in copied(DOCKERFILE)] == [
        (3, "COPY", "gone.txt"),
        (3, "COPY", "also.txt"),
        (8, "COPY", "with space"),
        (8, "COPY", "here.txt"),
        (14, "COPY", "../tests"),
        (14, "COPY", "*.csv"),
        (14, "COPY", "her?.txt"),
        (14, "COPY", "."),
    ]


def test_what_a_dockerfile_copies_and_is_not_there(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": DOCKERFILE, "environment/here.txt": "x"}
    found = warnings(make_task(tmp_path / "t", files=files))
    assert [": ".join(warning.split(": ")[:2]) for warning in found] == [
        "environment/Dockerfile:3: COPY gone.txt",
        "environment/Dockerfile:3: COPY also.txt",
        "environment/Dockerfile:8: COPY with space",
        "environment/Dockerfile:14: COPY ../tests",
        "environment/Dockerfile:14: COPY *.csv",
    ]


OURS = 'version = "1.0"\ndialect = "rollout"\n'
REWARD = "> /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(
    ("toml", "name", "text", "said"),
    [
        ("", "tests/test.sh", "true\n", "tests: no file there names reward.txt or reward.json"),
        ("", "tests/test.sh", f"set -eu\nx\nif [ $? -eq 0 ]; then echo 1 {REWARD}fi\n", "tests/test.sh:3: is never"),
        (OURS, "tests/test.sh", f"x=1\necho 1 {REWARD}exit $x\n", "tests/test.sh:3: in this task's format"),
        ("", "tests/test.sh", f"if true; then\necho 1 {REWARD}", "tests/test.sh:3: syntax error"),
        ("", "solution/solve.sh", "cd /app\r\nls\r\n", "solution/solve.sh:1: ends with a carriage return"),
        ("", "environment/test.sh", "echo 1 > /logs/verifier/reward.txt\n", "environment/test.sh: the same file as"),
        (
            OURS,
            "solution/solve.sh",
            "cd /app\npython3 -m http.server 8000 &\n",
            "solution/solve.sh:2: starts what goes",
        ),
        (OURS, "solution/solve.sh", "service nginx start\n", "solution/solve.sh:1: starts what goes"),
        (OURS + 'environment.docker_image = "x"', "a", "", "environment/Dockerfile: not built, since"),
        ('environment.env = {A = "${B}"}', "a", "", "task.toml: environment.env: A needs B, which is not set here"),
    ],
)
def test_what_often_goes_wrong_is_a_warning(tmp_path: Path, toml: str, name: str, text: str, said: str) -> None:
    task = make_task(tmp_path / "t", toml)
    (task / name).write_bytes(text.encode())
    (found,) = warnings(task)
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("toml", "name", "text"),
    [
        ("", "tests/test.sh", f"set -e\nif test -f x; then echo 1 {REWARD}fi\n"),
        ("", "tests/test.sh", f"false\nif [ $? -eq 0 ]; then echo 1 {REWARD}fi\nexit $?\n"),  # no exit code counts
        ("", "tests/test.sh", "#!/usr/bin/env python3\nopen('/logs/verifier/reward.txt', 'w').write('1')\nif (\n"),
        ("", "tests/check.py", "reward.json"),
        (OURS, "tests/test.sh", f"echo 1 {REWARD}exit 0\n"),
        ("", "solution/solve.sh", "nohup serve &\n"),
        (OURS + "verifier.keep_processes = true", "solution/solve.sh", "serve &\n"),
        (OURS, "solution/solve.sh", "a &\nb && c &&\nd 2>&1\n# e &\nwait\n"),
        (OURS, "solution/solve.sh", "b && c &&\nd 2>&1 # e &\nnginx -t\n"),
        ('environment.env = {A = "${B:-c}"}', "a", ""),
        ('environment.docker_image = "x"', "environment/Dockerfile", "FROM debian:12\n"),
    ],
)
def test_what_may_be_right_is_none(tmp_path: Path, toml: str, name: str, text: str) -> None:
    assert warnings(make_task(tmp_path / "t", toml, files={name: text})) == []


def test_tasks_may_be_checked_as_of_another_format_than_their_version_says(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", OURS + 'environment.docker_image = "x"')
    (found,) = check_tasks([task], {}, "harbor")
    assert found.to_json()["format"] == "harbor" and found.warnings == ()


def test_each_step_has_its_own_tests_and_solution(tmp_path: Path) -> None:
    files = {
        "steps/one/instruction.md": "x",
        "steps/one/tests/test.sh": "true\n",
        "steps/one/solution/solve.sh": "x",
        "steps/two/instruction.md": "x",
        "steps/two/tests/test.sh": f"echo 1 {REWARD}",
    }
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    without, solution = warnings(make_task(tmp_path / "t", toml, without=("tests/test.sh",), files=files))[::-1]
    assert solution.endswith("there is no steps/two/solution/solve.sh: nothing shows that the task can be done")
    assert without.startswith("steps/one/tests: no file there names reward.txt")


# ---- oracle


def judged(tmp_path: Path, **came: Came) -> Verdict:
    """Of a task at which agents came to this."""
    records = [
        record("t", agent, error=what) if isinstance(what, str) else record("t", agent, reward=what)
        for agent, what in came.items()
    ]
    agents = [{"name": agent} for agent in came]
    (found,) = verdicts(read_job_directory(make_job(tmp_path / "job", records, agents=agents)))
    return found


@pytest.mark.parametrize(
    ("oracle", "nop", "complaints", "warns"),
    [
        (1.0, 0.0, [], False),
        (2.0, -1.0, [], False),
        (1.0, "agent_execution_timeout", [], False),
        (1.0, "verifier_reward_missing", [], True),
        (0.5, 0.0, ["oracle: reward 0.5: the solution does not pass the tests"], False),
        (1.0, 1.0, ["nop: reward 1: an agent that does nothing passes, so the tests test nothing"], False),
        (1.0, "environment_lost", ["nop: environment_lost: environment_lost it was"], False),
        ("verifier_failed", 0.0, ["oracle: verifier_failed: verifier_failed it was"], False),
        (None, 1.0, ["oracle was not verified", "nop: reward 1: an agent"], False),
    ],
)
def test_a_task_is_good_when_its_solution_passes_and_doing_nothing_does_not(
    tmp_path: Path, oracle: Came, nop: Came, complaints: list[str], warns: bool
) -> None:
    found = judged(tmp_path, oracle=oracle, nop=nop)
    assert found.ok == (not complaints) and bool(found.warnings) == warns
    assert len(found.complaints) == len(complaints)
    assert all(one.message.startswith(said) for one, said in zip(found.complaints, complaints, strict=True))


def test_a_solution_whose_service_was_ended_is_told_as_that(tmp_path: Path) -> None:
    why = f"{SERVICES_ENDED}: nginx; keep_processes = true"
    records = [record("t", agent="oracle", reward=0.0, remarks=[why]), record("t", agent="nop", reward=0.0)]
    agents = [{"name": "oracle"}, {"name": "nop"}]
    (found,) = verdicts(read_job_directory(make_job(tmp_path / "job", records, agents=agents)))
    assert [one.message for one in found.complaints] == [f"oracle: reward 0: {why}"]


@pytest.mark.parametrize(("arguments", "said"), [(("d", "--provider", "none"), "no provider"), (("gone",), "gone")])
def test_a_directory_that_was_there_before_outlives_a_command_that_is_refused(
    tmp_path: Path, call: Call, arguments: tuple[str, ...], said: str
) -> None:
    write_task(tmp_path / "d", "rollout")
    write_task(tmp_path / "mine", "rollout")
    with pytest.raises(ConfigError, match=said):
        call("task", "oracle", *arguments, "--output", "mine")
    assert (tmp_path / "mine/task.toml").is_file()


def test_a_trial_that_did_not_run_shows_nothing(tmp_path: Path) -> None:
    agents = [{"name": "oracle"}, {"name": "nop"}]
    path = make_job(tmp_path / "job", [], skipped=("d/t/oracle/1", "d/t/nop/1"), agents=agents)
    (found,) = verdicts(read_job_directory(path))
    assert [one.message for one in found.complaints] == ["oracle did not run", "nop did not run"]


def test_the_end_of_what_the_verifier_printed_explains_a_failure(tmp_path: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(100))
    files = {"verifier/stdout.txt": lines, "verifier/stderr.txt": b"", "agent/stdout.txt": b"x"}
    files["tries/1/verifier/stdout.txt"] = b"y"
    job = read_job_directory(make_job(tmp_path / "job", [record("t", reward=0.0)], files=files))
    ((path, found),) = tail(job, job.trials[0])
    assert path.name == "stdout.txt" and found == [f"line {number}" for number in range(88, 100)]
