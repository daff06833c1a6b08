"""What `rollout job show|export|compare|regrade` make of the directory of a job."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_directories import RUN_ID, make_job, record, used
from located import places
from rollout.cli.__main__ import app
from rollout.cli.program import command_of
from rollout.client.private import PrivateRun, remember_private_run
from rollout.client.recent import remember_run
from rollout.model.errors import ConfigError, InputError
from rollout.model.ids import make_ulid
from rollout.workloads.job.commands import job_tools
from rollout.workloads.job.compare_directories import compare_directories
from rollout.workloads.job.html import html_file
from rollout.workloads.job.job_directory import read_job_directory
from rollout.workloads.job.overview import overview
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.regrade import by_agent, choose, regraded
from rollout.workloads.job.table import COLUMNS, csv_file, rows

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`rollout ARGUMENTS` in an empty directory: (exit code, standard output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))

    def calling(*arguments: str) -> tuple[int, str]:
        code = command_of(app, "rollout")(list(arguments), prog_name="rollout", standalone_mode=False)
        return code or 0, capsys.readouterr().out

    return calling


MIXED = [
    record("t1", reward=1.0, cost=0.5, usage=used(100, 20, 0.5)),
    record("t1", attempt=2, reward=0.0, seconds=50.0),
    record("t2", error="agent_execution_timeout"),
    record("t2", attempt=2, error="environment_start_failed"),
    record("t1", agent="b", reward=1.0),
    record("t1", agent="b", attempt=2, error="verifier_timeout"),
]


def mixed(path: Path, **options: Any) -> Path:
    return make_job(path, MIXED, skipped=("d/t2/b/1",), **options)


def test_a_text_in_csv_is_no_formula_and_a_number_stays_one(tmp_path: Path) -> None:
    (row,) = rows(read_job_directory(make_job(tmp_path / "job", [record("t", reward=-1.0)])))
    texts = ["=1+1", "+1", "-1", "@a", "\tx", "\rx", "a=b"]
    written = csv_file([row | {"error_message": text} for text in texts]).decode()
    cells = list(csv.DictReader(io.StringIO(written, newline="")))
    assert [one["error_message"] for one in cells] == [*("'" + text for text in texts[:-1]), "a=b"]
    assert {one["reward"] for one in cells} == {"-1.0"}


# ---- the directory


def test_trials_of_an_earlier_plan_are_told_and_not_counted(tmp_path: Path, call: Call) -> None:
    path = mixed(tmp_path / "job")
    (path / "d/gone/a/1").mkdir(parents=True)
    gone = record("gone", reward=1.0).result
    (path / "d/gone/a/1/result.json").write_bytes(gone.to_json())
    job = read_job_directory(path)
    assert (len(job.trials), job.earlier, job.notes) == (7, 1, ())
    assert "job: 1 earlier trial left out" in call("job", "show", "./job")[1]
    (path / "result.json").unlink()  # as long as nothing says what the plan is, all that is there counts
    assert len(read_job_directory(path).trials) == 7  # the one that was skipped is not known any more


def test_every_planned_trial_is_there_once_with_what_it_came_to(tmp_path: Path) -> None:
    job = read_job_directory(mixed(tmp_path / "nightly"))
    assert (job.name, job.run_id, job.state, job.notes) == ("nightly", RUN_ID, "completed", ())
    assert [(trial.label, job.status(trial), job.infrastructure(trial), job.score(trial)) for trial in job.trials] == [
        ("d/t1/a/1", "completed", False, 1.0),
        ("d/t1/a/2", "completed", False, 0.0),
        ("d/t2/a/1", "failed", False, 0.0),
        ("d/t2/a/2", "failed", True, None),
        ("d/t1/b/1", "completed", False, 1.0),
        ("d/t1/b/2", "failed", False, 0.0),
        ("d/t2/b/1", "skipped", False, None),
    ]


def test_a_job_may_say_otherwise_what_counts(tmp_path: Path) -> None:
    policy = {"environment_start_failed": {"has_valid_reward": True}}
    job = read_job_directory(mixed(tmp_path / "job", override_error_policy=policy))
    assert job.score(job.find("d/t2/a/2")) == 0.0


def test_a_job_that_goes_on_has_pending_trials_and_skips_none(tmp_path: Path) -> None:
    job = read_job_directory(mixed(tmp_path / "job", state=""))
    assert (job.state, job.status(job.trials[-1])) == ("", "pending")


def test_a_summary_of_another_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job")
    (path / "run-id").write_text("01K9ABCDEFGHJKMNPQRSTVWXY0")
    assert read_job_directory(path).state == ""


def test_what_is_damaged_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job")
    lines = (path / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (path / "trials.jsonl").write_bytes(b"".join([b"{}\n", *lines[1:4], b"no json\n", lines[4], lines[5][:-9]]))
    (path / "d/t1/b/2/result.json").write_bytes(b"{")
    (path / "config.json").write_text('{"agents": 3}')
    (path / "stats.json").write_text("[]")
    job = read_job_directory(path)
    assert [place for note in job.notes for place in places(note.removeprefix(f"{path}/"))] == [
        "config.json: agents",
        "trials.jsonl:1",
        "trials.jsonl:5",
        "d/t1/b/2/result.json",
        "stats.json",
    ]
    # The first is read from its directory, the last, whose line is being written, is nowhere.
    found = {trial.label: trial for trial in job.trials}
    assert found["d/t1/a/1"].result is not None and found["d/t1/a/1"].record is None
    assert found["d/t1/b/2"].result is None


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job")
    for name in ("trials.jsonl", "config.json", "result.json", "stats.json", "summary.json", "run-id"):
        (path / name).unlink()
        os.mkfifo(path / name)
    job = read_job_directory(path)
    damaged = [Path(note.partition(":")[0]).name for note in job.notes]
    assert damaged == ["summary.json", "result.json", "config.json", "trials.jsonl", "stats.json"]
    assert len(job.trials) == len(MIXED)


def test_a_result_in_the_directory_of_another_trial_is_left_out(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job")
    (path / "trials.jsonl").write_bytes(b"")
    (path / "d/t1/a/1/result.json").write_bytes((path / "d/t1/a/2/result.json").read_bytes())
    job = read_job_directory(path)
    (note,) = job.notes
    assert note.startswith(f"{path}/d/t1/a/1/result.json: ") and "d/t1/a/2" in note
    assert job.trials[0].result is None


def test_trials_that_were_run_anew_are_counted_once(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job")
    (path / "d/t1/a/1").rename(path / "d/t1/a/1.before-0123abcd")
    assert len(read_job_directory(path).trials) == len(MIXED) + 1


@pytest.mark.parametrize(("made", "said"), [("", "no such directory"), ("d", "no job was run there"), ("f", "a file")])
def test_a_directory_without_a_job_is_refused(tmp_path: Path, made: str, said: str) -> None:
    path = tmp_path / "x"
    if made:
        path.mkdir() if made == "d" else path.touch()
    with pytest.raises(ConfigError, match=said):
        read_job_directory(path)


@pytest.mark.parametrize(
    ("text", "label"),
    [("d/t1/b/1", "d/t1/b/1"), ("t1/b/2", "d/t1/b/2"), ("t2/b", "d/t2/b/1"), ("/d/t1/a/1/", "d/t1/a/1")],
)
def test_a_trial_is_named_by_what_it_alone_has(tmp_path: Path, text: str, label: str) -> None:
    assert read_job_directory(mixed(tmp_path / "job")).find(text).label == label


def test_a_name_that_no_trial_or_several_have_is_refused(tmp_path: Path) -> None:
    job = read_job_directory(mixed(tmp_path / "job"))
    with pytest.raises(ConfigError, match=r'"t9".* d/t1/a/1, '):
        job.find("t9")
    with pytest.raises(ConfigError, match=r'"t2/a" .* 2 trials: d/t2/a/1, d/t2/a/2'):
        job.find("t2/a")


# ---- show


def test_an_overview_is_what_the_jobs_own_statistics_say(tmp_path: Path) -> None:
    path = mixed(tmp_path / "job", metrics=[{"type": "sum"}])
    written = json.loads((path / "stats.json").read_bytes())["groups"]
    found = overview(read_job_directory(path))
    for agent, group in zip(found.agents, written, strict=True):
        assert agent.agent == group["agent"] and agent.statistics.pass_rate is not None
        assert agent.statistics.pass_rate.mean == group["pass_rate"]["mean"]
        assert agent.statistics.pass_rate.low == group["pass_rate"]["low"]
        assert agent.metrics == group["metrics"]
    assert (found.agents[0].cost_usd, found.agents[0].tokens.n_input, found.groups) == (0.5, 100, ())
    assert [(one.type, one.count, one.agents) for one in found.errors] == [
        ("agent_execution_timeout", 1, {"a": 1}),
        ("environment_start_failed", 1, {"a": 1}),
        ("verifier_timeout", 1, {"b": 1}),
    ]
    assert found.slowest[0].label == "d/t1/a/2"


def test_agents_are_told_apart_by_dataset_where_there_are_several(tmp_path: Path) -> None:
    records = [record("t", reward=1.0), record("t", reward=0.0, dataset="e")]
    found = overview(read_job_directory(make_job(tmp_path / "job", records)))
    assert [one.dataset for one in found.agents] == [None]
    rates = [(one.dataset, one.statistics.pass_rate and one.statistics.pass_rate.mean) for one in found.groups]
    assert rates == [("d", 1.0), ("e", 0.0)]


def test_show_says_the_same_to_people_and_to_programs(tmp_path: Path, call: Call) -> None:
    mixed(tmp_path / "job")
    _, text = call("job", "show", "./job")
    assert "job: 7 trials: 3 completed, 3 failed, 1 skipped" in text
    assert "33.3 % [" in text and "pass@2" in text and "environment_start_failed" in text
    found = json.loads(call("job", "show", "./job", "--json")[1])
    assert (found["state"], found["agents"][0]["counts"]["infrastructure"]) == ("completed", 1)
    assert found["agents"][0]["pass_rate"]["mean"] == pytest.approx(1 / 3)


def test_show_of_a_trial_has_all_of_it(tmp_path: Path, call: Call) -> None:
    one = record("t", reward=1.0, cost=0.25, remarks=["the host's \x1b[31m files"], usage=used(1200, 7, 0.25))
    make_job(tmp_path / "job", [one], files={"agent/stdout.txt": b"x"})
    _, text = call("job", "show", "./job", "t")
    assert r"remark         the host's \x1b[31m files" in text and "1,200 in" in text and "install" in text
    found = json.loads(call("job", "show", "./job", "d/t/a/1", "--json")[1])
    assert found["files"] == ["job/d/t/a/1/agent/stdout.txt", "job/d/t/a/1/result.json"]
    assert (found["result"]["cost"], found["record"]["usage"]["n_input_tokens"]) == (0.25, 1200)


def test_show_of_the_failed_ones(tmp_path: Path, call: Call) -> None:
    mixed(tmp_path / "job")
    lines = [json.loads(line) for line in call("job", "show", "./job", "--failed", "--json")[1].splitlines()]
    assert [line["directory"] for line in lines] == ["d/t2/a/1", "d/t2/a/2", "d/t1/b/2"]
    assert "verifier_timeout it was" in call("job", "show", "./job", "--failed")[1]


def test_show_of_those_that_did_not_pass(tmp_path: Path, call: Call) -> None:
    mixed(tmp_path / "job")
    lines = [json.loads(line) for line in call("job", "show", "./job", "--not-passed", "--json")[1].splitlines()]
    assert [line["directory"] for line in lines] == ["d/t1/a/2", "d/t2/a/1", "d/t2/a/2", "d/t1/b/2"]
    (tmp_path / "job/d/t1/a/2/verifier").mkdir()
    (tmp_path / "job/d/t1/a/2/verifier/stdout.txt").write_text("\n".join(f"line {n}" for n in range(40)))
    _, text = call("job", "show", "./job", "t1/a/2")
    assert "verifier/stdout.txt, the end of it:\n  line 28\n" in text and "line 39" in text and "line 27" not in text
    assert "the end of it" not in call("job", "show", "./job", "t1/a/1")[1]


@pytest.mark.parametrize("named", ["nightly", RUN_ID, RUN_ID[-8:], RUN_ID[:20].lower()])
def test_a_job_is_named_as_a_run_is(tmp_path: Path, call: Call, named: str) -> None:
    mixed(tmp_path / "jobs/nightly")
    make_job(tmp_path / "jobs/other", [record("t", reward=1.0)], run_id="01K8ABCDEFGHJKMNPQRSTVWXYA")
    assert json.loads(call("job", "show", named, "--json")[1])["directory"] == "jobs/nightly"


def test_a_name_that_two_jobs_have_is_refused(tmp_path: Path, call: Call) -> None:
    mixed(tmp_path / "x/nightly")
    mixed(tmp_path / "y/nightly")
    with pytest.raises(ConfigError, match=r'"nightly".*x/nightly, y/nightly'):
        call("job", "show", "nightly")


def test_a_job_of_this_directory_comes_before_others_of_the_account(tmp_path: Path, call: Call) -> None:
    (tmp_path / "here").mkdir()
    for number, path in enumerate(("here/jobs/nightly", "there/nightly", "elsewhere/nightly")):
        run_id = make_ulid(number, bytes(10))
        state = mixed(tmp_path / path, run_id=run_id) / ".rollout"
        state.mkdir()
        for file in ("rollout.db", "coordinator.toml"):
            (state / file).touch()
        remember_private_run(PrivateRun(run_id, "nightly", state))
        remember_run(run_id)
    os.chdir(tmp_path / "here")
    for named in ("nightly", "@last"):
        assert json.loads(call("job", "show", named, "--json")[1])["directory"] == "jobs/nightly"
    os.chdir(tmp_path / "here/jobs/nightly/d")
    with pytest.raises(ConfigError, match=r'3 jobs .*"nightly"'):
        call("job", "show", "nightly")


def test_a_shell_is_offered_jobs_and_their_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    monkeypatch.setattr(job_tools, "complete_run", lambda *_: [("nightly", "of the cluster"), ("night-2", "running")])
    mixed(tmp_path / "jobs/nightly")
    context: Any = SimpleNamespace(params={"job": "nightly"})
    assert job_tools.complete_job(context, "nig") == [("nightly", "jobs/nightly"), ("night-2", "running")]
    assert job_tools.complete_trial(context, "d/t2") == ["d/t2/a/1", "d/t2/a/2", "d/t2/b/1"]
    assert job_tools.complete_trial(SimpleNamespace(params={"job": "gone"}), "") == []  # pyright: ignore


# ---- export


def test_the_table_is_the_same_in_every_format(tmp_path: Path, call: Call) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    mixed(tmp_path / "job")
    for ending in ("csv", "jsonl", "parquet"):
        assert call("job", "export", "./job", "--output", f"t.{ending}")[1] == f"t.{ending}: 7 trials\n"
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == lines  # pyright: ignore[reportUnknownMemberType]
    with (tmp_path / "t.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for line, row in zip(lines, cells, strict=True):
        for name, value in line.items():
            assert row[name] == ("" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
    first, third = lines[0], lines[2]
    assert (first["status"], first["passed"], first["rewards"], first["n_input_tokens"], first["cost_usd"]) == (
        "completed",
        True,
        '{"reward": 1.0}',
        100,
        0.5,
    )
    assert (third["status"], third["score"], third["reward"], third["error_type"]) == (
        "failed",
        0.0,
        None,
        "agent_execution_timeout",
    )


def test_a_cost_that_nobody_knows_is_missing_and_not_0(tmp_path: Path) -> None:
    known = record("t1", cost=0.5, usage=used(1, 1, 0.5))
    job = read_job_directory(make_job(tmp_path / "job", [known, record("t2")]))
    assert [row["cost_usd"] for row in rows(job)] == [0.5, None]


def test_every_column_is_documented() -> None:
    page = (ROOT / "docs/job.md").read_text()
    types = {"text": "text", "integer": "integer", "number": "number", "truth": "true or false"}
    lines = {kind: next(line for line in page.splitlines() if line.startswith(f"{kind} | ")) for kind in types.values()}
    assert [one.name for one in COLUMNS if f"`{one.name}`" not in lines[types[one.type]]] == []


@pytest.mark.parametrize(
    ("output", "said"),
    [("t.xlsx", "must be one of .csv"), ("gone/t.csv", "no directory gone"), ("d.csv", "a directory")],
)
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, call: Call, output: str, said: str) -> None:
    mixed(tmp_path / "job")
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(ConfigError, match=said):
        call("job", "export", "./job", "--output", output)


class Page(HTMLParser):
    """Tags, links and the text of a page; what is not closed in its order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.links = list[str]()
        self.texts = list[str]()
        self._open = list[str]()
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(path: Path, output: Path) -> Page:
    return Page(html_file(read_job_directory(path), output).decode())


def test_the_page_needs_nothing_else_and_has_every_table(tmp_path: Path) -> None:
    page = page_of(mixed(tmp_path / "job"), tmp_path / "job.html")
    text = " ".join(" ".join(page.texts).split())
    assert not page.tags & {"script", "img", "link", "iframe", "object"} and "@import" not in text
    for wanted in ("Agents", "pass@2", "Errors", "Trials", "33.3 % [", "environment_start_failed it was", "skipped"):
        assert wanted in text
    assert "prefers-color-scheme: dark" in text and "url(" not in text


def test_the_page_links_to_the_trials_from_wherever_it_lies(tmp_path: Path) -> None:
    path = make_job(tmp_path / "jobs/a job", [record("t #1", reward=1.0)])
    for directory in (tmp_path, path, tmp_path / "reports"):
        directory.mkdir(exist_ok=True)
        (link,) = page_of(path, directory / "x.html").links
        from urllib.parse import unquote

        assert (directory / unquote(link)).resolve() == (path / "d/t #1/a/1").resolve()
        assert "#" not in link and " " not in link


def test_a_remark_is_on_the_page_once_with_the_number_of_its_trials(tmp_path: Path) -> None:
    records = [record(f"t{n}", reward=1.0, remarks=["image: not isolated"]) for n in range(5)]
    page = page_of(make_job(tmp_path / "job", records), tmp_path / "x.html")
    (at,) = (index for index, text in enumerate(page.texts) if text == "image: not isolated")
    assert page.texts[at + 1 : at + 3] == ["5", "d/t0/a/1, d/t1/a/1, d/t2/a/1, ..."]


def test_what_agents_say_is_text_on_the_page(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    one = record("t", error="agent_execution_failed", remarks=[attack])
    assert one.result.error is not None
    error = one.result.error.model_copy(update={"message": attack})
    one = one.model_copy(update={"result": one.result.model_copy(update={"error": error})})
    page = page_of(make_job(tmp_path / "job", [one]), tmp_path / "x.html")
    assert "script" not in page.tags and page.texts.count(attack) == 3


# ---- compare


def compared(tmp_path: Path, a: list[TrialRecord], b: list[TrialRecord], *agents: str) -> list[Any]:
    one, other = (read_job_directory(make_job(tmp_path / name, of)) for name, of in (("a", a), ("b", b)))
    return compare_directories(one, other, agents)[0]


def test_jobs_are_paired_by_task_and_what_is_in_one_alone_is_told(tmp_path: Path) -> None:
    a = [record("t1", reward=1.0, commit="1"), record("t2", reward=0.0), record("t3", reward=1.0)]
    b = [record("t1", reward=0.0, commit="2"), record("t2", reward=0.0), record("t4", reward=1.0)]
    b += [record("t3", error="environment_lost")]
    (found,) = compared(tmp_path, a, b)
    assert (found.comparison.tasks, found.comparison.difference) == (2, -0.5)
    assert (found.only_a, found.only_b, found.moved) == (("d/t3",), ("d/t4",), ("d/t1",))
    assert [flip.task for flip in found.comparison.lost] == ["t1"]


def test_two_agents_of_one_job_or_of_two(tmp_path: Path) -> None:
    records = [record("t", agent="x", reward=0.0), record("t", agent="y", reward=1.0)]
    job = read_job_directory(make_job(tmp_path / "a", records))
    for agents in ((), ("x", "y")):
        ((found,), _) = compare_directories(job, job, agents)
        assert (found.comparison.agent_a, found.comparison.difference) == ("x", 1.0)
    other = read_job_directory(make_job(tmp_path / "b", records))
    ((found,), _) = compare_directories(job, other, ("y", "x"))
    assert found.comparison.difference == -1.0


def test_each_agent_with_itself_and_the_only_ones_with_each_other(tmp_path: Path) -> None:
    first = [record("t", agent="x", reward=0.0), record("t", agent="y", reward=1.0)]
    second = [record("t", agent="y", reward=1.0), record("t", agent="x", reward=1.0)]
    found = [one.comparison for one in compared(tmp_path / "1", first, second)]
    assert [(one.agent_a, one.agent_b, one.difference) for one in found] == [("x", "x", 1.0), ("y", "y", 0.0)]
    old, new = [record("t", agent="old", reward=0.0)], [record("t", agent="new", reward=1.0)]
    (only,) = compared(tmp_path / "2", old, new)
    assert (only.comparison.agent_a, only.comparison.agent_b, only.comparison.difference) == ("old", "new", 1.0)


def test_an_agent_that_was_not_scored_hinders_no_other(tmp_path: Path, call: Call) -> None:
    records = [record("t", agent="x", reward=0.0), record("t", agent="y", error="environment_lost")]
    for name in ("a", "b"):
        make_job(tmp_path / name, records)
    found, impossible = compare_directories(read_job_directory(tmp_path / "a"), read_job_directory(tmp_path / "b"))
    assert [one.comparison.agent_a for one in found] == ["x"]
    assert [one.partition(":")[0] for one in impossible] == ["y"]
    assert call("job", "compare", "./a", "./b")[0] == 0


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        (("z",), 'a has no agent "z"; it has x'),
        (("x", "x"), "x is compared with itself"),
        (("x", "y", "z"), "3 are named"),
        ((), "a has the agents x: name two"),
    ],
)
def test_nothing_is_compared_with_nothing(tmp_path: Path, agents: tuple[str, ...], said: str) -> None:
    job = read_job_directory(make_job(tmp_path / "a", [record("t", agent="x", reward=1.0)]))
    with pytest.raises(ConfigError, match=said):
        compare_directories(job, job, agents)


def test_jobs_without_an_agent_or_a_task_in_common_are_refused(tmp_path: Path) -> None:
    two = [record("t", agent="x", reward=1.0), record("t", agent="y", reward=1.0)]
    with pytest.raises(ConfigError, match="no agent is in both jobs: a has x, y, b has z"):
        compared(tmp_path / "1", two, [record("t", agent="z", reward=1.0)])
    with pytest.raises(InputError, match="a: no task was scored in both"):
        compared(tmp_path / "2", [record("t", reward=1.0)], [record("u", reward=1.0)])


def test_compare_prints_the_difference_the_interval_the_test_and_the_flips(tmp_path: Path, call: Call) -> None:
    make_job(tmp_path / "a", [record(f"t{n}", reward=0.0) for n in range(8)])
    make_job(tmp_path / "b", [record(f"t{n}", reward=float(n < 6)) for n in range(8)])
    _, text = call("job", "compare", "./a", "./b")
    assert "8 tasks scored in both: A 0, B 0.75" in text and "difference B - A +0.75 [+" in text
    assert "p = 0.0156 (McNemar's mid-p test; exact 0.0312)" in text and "d/t5  A 0%, B 100%" in text
    found = json.loads(call("job", "compare", "./a", "./b", "--json")[1])
    assert (found["job_b"], found["test"], found["discordant"], found["only_a"]) == ("b", "mcnemar_mid_p", [0, 6], [])


# ---- regrade

MANIFEST = {"artifacts/manifest.json": b'[{"source": "/app", "status": "ok"}, {"source": "/b", "status": "missing"}]'}


def kept(task: str, **options: Any) -> TrialRecord:
    return record(task, files="ab" * 32, **options)


def test_trials_whose_agent_came_to_its_end_are_verified_again(tmp_path: Path) -> None:
    records = [
        kept("ok", reward=1.0),
        kept("late", error="agent_execution_timeout", verified=True),
        kept("never", error="agent_execution_timeout"),
        kept("broken", error="verifier_failed"),
        kept("unstarted", error="environment_start_failed"),
        kept("unknown", error="new_kind"),
        record("lost", error="verifier_failed"),
    ]
    chosen = choose(read_job_directory(make_job(tmp_path / "job", records, skipped=("d/x/a/1",), files=MANIFEST)))
    assert [trial.task for trial in chosen.trials] == ["ok", "late", "broken"]
    left_out = ("agent_execution_timeout", "environment_start_failed", "new_kind", "nothing was kept", "did not run")
    assert [why in note for why, note in zip(left_out, chosen.notes, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"[]", "they kept no artifacts"),
        (b"{", "manifest.json cannot be read"),
        (b'[{"source": "/big", "status": "too_large"}]', r"the artifact /big was not kept \(too_large\)"),
    ],
)
def test_what_was_not_kept_is_not_verified_as_if_it_never_was(tmp_path: Path, manifest: bytes, said: str) -> None:
    files = {"artifacts/manifest.json": manifest}
    with pytest.raises(ConfigError, match=f"no trial of job can be verified again\n1 trial is left out: {said}"):
        choose(read_job_directory(make_job(tmp_path / "job", [kept("t", reward=1.0)], files=files)))


def test_globs_choose_tasks_and_one_that_takes_none_is_refused(tmp_path: Path) -> None:
    records = [kept("t1", reward=1.0), kept("t2", reward=1.0), kept("u", reward=1.0, dataset="e")]
    job = read_job_directory(make_job(tmp_path / "job", records, files=MANIFEST))
    assert [trial.task for trial in choose(job, ("t*", "e/u")).trials] == ["t1", "t2", "u"]
    assert [trial.task for trial in choose(job, ("d/*2",)).trials] == ["t2"]
    with pytest.raises(ConfigError, match=r'"v".* t1, t2, u'):
        choose(job, ("t1", "v"))


def test_what_a_new_verifier_changed(tmp_path: Path) -> None:
    before = [
        kept("t1", reward=1.0),
        kept("t2", reward=0.0),
        kept("t3", error="verifier_failed"),
        kept("t4", reward=0.0),
    ]
    after = [kept("t1", reward=1.0), kept("t2", reward=1.0), kept("t3", reward=1.0)]
    first, second = (read_job_directory(make_job(tmp_path / name, of)) for name, of in (("a", before), ("b", after)))
    found = regraded(first, second)
    assert [(one.trial, one.before, one.after) for one in found if one.changed] == [
        ("d/t2/a/1", 0.0, 1.0),
        ("d/t3/a/1", 0.0, 1.0),
    ]
    (agent,) = by_agent(found)
    assert (agent.trials, agent.pass_rate_before, agent.pass_rate_after) == (3, 1 / 3, 1.0)


def test_rows_of_a_job_that_ran_nothing(tmp_path: Path) -> None:
    job = read_job_directory(make_job(tmp_path / "job", [], skipped=("d/t/a/1",), agents=[{"name": "nop"}]))
    (row,) = rows(job)
    assert (row["status"], row["score"], row["total_sec"], row["error_type"]) == ("skipped", None, None, None)
    assert overview(job).agents[0].statistics.pass_rate is None
