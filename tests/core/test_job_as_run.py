"""A job as a run, without a cluster: what is planned, placed, kept and reckoned. Whole commands are in tests/acceptance."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from job_directories import record, used
from job_files import make_task
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.printed import Line
from rollout.config.load import load_settings
from rollout.model.errors import ConfigError, InputError, NotFoundError, StorageError
from rollout.model.item import Failure, NewItem, Outcome
from rollout.objects.digest import object_id as name_of
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid_result import lines_of
from rollout.workloads.job import placing
from rollout.workloads.job.commands.job_tail import _text, check_wanted, fits, of_trials, tail
from rollout.workloads.job.config import EnvironmentSection, JobConfig
from rollout.workloads.job.mending import mend
from rollout.workloads.job.providers_here import engine_faults, network_faults
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.job.workload import Job, JobChecked
from rollout.workloads.output import OutputDirectory, seal
from rollout.workloads.port import FailedTry, InputReader, Running
from rollout_worker.sandboxes.local import Features

RUN, NEXT = "01K9ABCDEFGHJKMNPQRSTVWXY0", "01K9ABCDEFGHJKMNPQRSTVWXY1"
LEFT = {"setup/stdout.txt": b"set up\n", "agent/stdout.txt": b"worked\n", "verifier/reward.txt": b"1\n"}


def tar_of(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in more:
            tar.addfile(info)
    return data.getvalue()


@dataclass
class Cluster:
    """What a cluster keeps of runs."""

    objects: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    tries: dict[int, list[FailedTry]] = field(default_factory=dict[int, list[FailedTry]])
    fetched: int = 0

    def put(self, data: bytes) -> str:
        self.objects[name_of(data)] = data
        return name_of(data).hex()

    async def fetch(self, object_id: bytes, path: Path) -> None:
        self.fetched += 1
        if object_id not in self.objects:
            raise NotFoundError("the object is gone")
        path.write_bytes(self.objects[object_id])

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        return self.tries.get(seq, [])


class Here:
    """A job in a directory of its own, its commands one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cluster = Cluster()
        self.keys: dict[str, Any] = {
            "name": "j",
            "jobs_dir": str(path / "jobs"),
            "n_attempts": 1,
            "environment": {"type": "process"},
            "agents": [{"name": "a", "execute": "true"}],
            "datasets": [{"path": str(path / "d")}],
        }
        for name in ("one", "two"):
            make_task(path / "d" / name, files={"instruction.md": f"Do {name}.\n"})

    @property
    def job(self) -> Path:
        return self.path / "jobs" / "j"

    def check(self, *, retry: Sequence[str] = (), output: OutputDirectory | None = None) -> tuple[Job, JobChecked]:
        workload = Job(retry)
        (self.path / "job.json").write_text(json.dumps(self.keys))
        settings = load_settings(JobConfig, self.path / "job.json", environ={})
        kept = output.kept if output is not None else {}
        reading = InputReader(exclude=self.job, resumed=bool(kept), kept=kept, index=self.path / "index")
        return workload, workload.check(settings, reading)

    def run(
        self, entries: int | None = None, *, state: str = "completed", retry: Sequence[str] = (), **ends: Any
    ) -> str:
        """What the person is told, when the same command is given again and `entries` trials of it end, as `ends` has
        it: by label, a record. All others pass."""
        with OutputDirectory.open(self.job) as output:
            known = output.run_id
            workload, checked = self.check(retry=retry, output=output)
            told = ""
            if known is None:
                output.claim(RUN, checked.config, kept=checked.keep)
            elif checked.follows:
                stored = output.stored_config
                assert stored is not None
                told = workload.plan_followup(checked, stored, self.job)
                if not checked.follows:
                    return told
                output.hand_over(NEXT if known == RUN else RUN, checked.config, checked.keep)
            run_id = output.run_id
            assert run_id is not None
            collector = Collector(output, run_id, workload.writer(checked.config), total=checked.total, unit="trials")
            items = list(workload.plan(checked, checked.config, 0))[:entries]
            new = [self.entry(seq, item.payload, ends) for seq, item in enumerate(items)]
            if "skipped" in ends:
                seq, tries, how = ends["skipped"]
                new[seq] = entry(seq, items[seq].payload, None, tries=tries, **how)
            asyncio.run(collector.place(new, self.cluster))
            collector.add(new)
            collector.finish(state)
            collector.refresh(state)
            collector.close()
            return told

    def entry(self, seq: int, payload: Any, ends: dict[str, Any]) -> CommitEntry:
        spec = TrialSpec.decode(payload)
        given: Any = ends.get(spec.task, {})
        files = self.cluster.put(given.pop("tar", tar_of(LEFT)))
        found = record(spec.task, spec.agent, spec.attempt, **({"reward": 1.0} | given), files=files)
        found = found.model_copy(update={"trial": spec.id})
        failed = found.result.error is not None
        return entry(seq, payload, found, outcome=Outcome.FAILED if failed else Outcome.DONE)

    def lines(self, name: str = "trials.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.job / name).read_text().splitlines()]

    def result(self) -> dict[str, Any]:
        return json.loads((self.job / "result.json").read_text())

    def mend(self) -> tuple[list[str], list[str]]:
        told: list[str] = []
        made = asyncio.run(mend(self.cluster.fetch, self.job, told.append))
        return [str(Path(path).relative_to(self.job)) for path in made], told


def entry(seq: int, payload: Any, found: TrialRecord | None, **more: Any) -> CommitEntry:
    values: dict[str, Any] = {
        "attempt": 1,
        "outcome": Outcome.DONE,
        "id": b"",
        "accepted_ms": 5000,
        "duration_ms": 2000,
    }
    data = b"" if found is None else found.encode()
    return CommitEntry(position=seq, seq=seq, data=data, payload=payload, **(values | more))


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def spec_of(item: NewItem) -> TrialSpec:
    assert isinstance(item.payload, bytes)
    return TrialSpec.decode(item.payload)


def below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


# ---- the run


def test_a_job_becomes_a_run_of_a_trial_an_item(here: Here) -> None:
    agents = [{"name": "oracle"}, {"name": "b", "execute": "true", "n_concurrent": 2}]
    here.keys |= {"agents": agents, "n_attempts": 2, "n_concurrent_trials": 3, "retry": {"max_attempts": 5}}
    here.keys |= {"budget": {"max_tokens": 100, "max_cost_usd": 0.5, "max_wall_time_sec": 60}}
    workload, checked = here.check()
    spec = workload.spec(RUN, checked.config)
    assert (spec.order, spec.max_in_flight, checked.total) == ("arrival", 3, 8)
    assert [(lane.name, lane.max_in_flight) for lane in spec.lanes] == [("oracle", 0), ("b", 2)]
    options = dict(spec.policies[0].options)
    assert (options["units_in"], options["units_out"], options["wall_s"]) == ("100", "500000", "60")
    assert (options["min_percent"], options["after"]) == ("50", "20")
    codes = options["codes"].split(",")
    assert {"environment_lost", "api_overloaded", "worker_lost"} <= set(codes) and "verifier_failed" not in codes
    items = list(workload.plan(checked, checked.config, 5))
    assert [spec_of(item).label for item in items] == ["d/one/b/2", "d/two/oracle/2", "d/two/b/2"]
    assert items[0].spec.lane == "b" and items[0].spec.max_attempts == 5
    trees = {tree.key: tree.path for tree in checked.trees}
    assert trees[f"trees.{spec_of(items[0]).checksum}"] == here.path / "d" / "one"


def test_no_limits_are_no_policy(here: Here) -> None:
    here.keys["infrastructure"] = {"min_success_rate": 0}
    workload, checked = here.check()
    assert workload.spec(RUN, checked.config).policies == ()


def test_variables_that_workers_of_this_machine_lack_are_told_with_all_else(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOBODYS", raising=False)
    here.keys["agents"][0]["env"] = {"A": "${NOBODYS}"}
    (here.path / "d" / "two" / "instruction.md").unlink()
    workload, _ = Job(), None
    settings = JobConfig.model_validate(here.keys)
    workload.works_here()
    with pytest.raises(ConfigError, match=r"(?s)agents.0.env: .*NOBODYS.*instruction.md: "):
        workload.check(settings, InputReader(exclude=here.job))


def test_a_secret_that_is_written_out_is_warned_of(here: Here) -> None:
    here.keys["agents"][0]["env"] = {"API_KEY": "s3cret", "OTHER_TOKEN": "${T}", "PLAIN": "x"}
    _, checked = here.check()
    (told,) = [note for note in checked.notes if "stored with the job" in note]
    assert told.startswith("warning: agents.0.env: ") and "${API_KEY}" in told


def test_process_sandboxes_are_warned_of_once_as_what_they_are_here(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.keys["environment"] = {"type": "process"}
    settings = JobConfig.model_validate(here.keys)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    workload = Job()
    (told,) = workload.host_notes(settings)
    assert told.startswith("warning: ") and "this machine" in told and "as root" in told
    assert workload.check(settings, InputReader(exclude=here.job)).notes == ()
    (elsewhere,) = Job().check(settings, InputReader(exclude=here.job)).notes
    assert "their worker's machine" in elsewhere and "this machine" not in elsewhere


# ---- the files


def test_the_files_of_a_job(here: Here) -> None:
    here.run(two={"reward": None, "error": "environment_start_failed"})
    one, two = here.job / "d/one/a/1", here.job / "d/two/a/1"
    assert below(one) == {"result.json", *LEFT}
    assert (two / "error.txt").read_text() == "environment_start_failed: environment_start_failed it was\n"
    assert json.loads((one / "result.json").read_text())["reward"] == 1.0
    assert [(line["label"], line["outcome"]) for line in here.lines()] == [
        ("d/one/a/1", "done"),
        ("d/two/a/1", "failed"),
    ]
    assert [line["type"] for line in here.lines("errors.jsonl")] == ["environment_start_failed"]
    result = here.result()
    assert (result["job_name"], result["cancelled"], result["total_trials"], result["failed_trials"]) == (
        "j",
        False,
        2,
        1,
    )
    assert json.loads((here.job / "config.json").read_text())["environment"]["type"] == "process"
    assert json.loads((here.job / "stats.json").read_text())["groups"][0]["counts"]["infrastructure"] == 1
    assert not list(here.job.glob(".placing*"))


def test_a_job_that_was_killed_is_cancelled_and_counts_what_did_not_run_as_skipped(here: Here) -> None:
    here.run(1, state="killed")
    assert (here.result()["cancelled"], here.result()["skipped_trials"]) == (True, 1)
    here.run()
    assert (here.result()["cancelled"], here.result()["skipped_trials"]) == (False, 0)


def test_tries_before_the_last_are_kept_beside_it(here: Here) -> None:
    workload, checked = here.check()
    (item, _) = workload.plan(checked, checked.config, 0)
    last = record("one", "a", reward=1.0, files=here.cluster.put(tar_of(LEFT)))
    early = record("one", "a", error="environment_lost", files=here.cluster.put(tar_of({"setup/stderr.txt": b"no"})))
    early = early.model_copy(update={"trial": spec_of(item).id})
    here.cluster.tries[0] = [
        FailedTry(1, "environment_lost", "gone", early.encode()),
        FailedTry(2, "worker_failed", "its worker was lost", began_ms=1000, ended_ms=3000, worker_lost=True),
    ]
    writer = workload.writer(checked.config)
    writer.open(here.job)
    here.job.mkdir(parents=True)
    asyncio.run(writer.place(entry(0, item.payload, last, tries=3), here.cluster))
    tries = here.job / "d/one/a/1/tries"
    assert below(tries / "1") == {"result.json", "error.txt", "setup/stderr.txt"}
    lost = json.loads((tries / "2" / "result.json").read_text())
    assert (lost["error"]["type"], lost["durations"]["total_sec"]) == ("environment_lost", 2.0)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure("worker_lost", "3 workers were lost", worker_lost=True), "environment_lost"),
        (Failure("verifier_failed", "exit 1"), "verifier_failed"),
        (Failure("executor_error", "KeyError: 1"), "internal_error"),
    ],
)
def test_a_trial_whose_executor_said_nothing_has_an_error_of_the_table(
    here: Here, failure: Failure, expected: str
) -> None:
    workload, checked = here.check()
    item = next(workload.plan(checked, checked.config, 0))
    writer = workload.writer(checked.config)
    lines = dict(writer.lines(entry(0, item.payload, None, outcome=Outcome.FAILED, failure=failure)))
    line = json.loads(lines["errors.jsonl"])
    assert line["type"] == expected and failure.message in line["message"]


def test_a_record_that_cannot_be_read_is_the_error_of_its_trial_alone(here: Here) -> None:
    workload, checked = here.check()
    item = next(workload.plan(checked, checked.config, 0))
    found = record("one", "a", reward=1.0).model_copy(update={"remarks": ["\udcff"]})
    unreadable = entry(0, item.payload, found)
    _, ((_, line), *_) = lines_of(workload.writer(checked.config).lines, unreadable)
    error = json.loads(line)["record"]["result"]["error"]
    assert error["type"] == "internal_error"
    assert list(workload.remarks(unreadable)) == []
    assert TrialRecord.decode(found.well_formed().encode()).remarks == [r"\udcff"]


def test_a_tar_of_a_worker_puts_nothing_outside_of_its_trial(here: Here) -> None:
    link = tarfile.TarInfo("agent/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    fifo = tarfile.TarInfo("agent/fifo")
    fifo.type = tarfile.FIFOTYPE
    here.run(1, one={"tar": tar_of({"agent/ok.txt": b"x"}, link, fifo)})
    assert below(here.job / "d/one/a/1") == {"result.json", "agent/ok.txt"}
    bad = tar_of({"agent/ok.txt": b"x", "../../../../../out.txt": b"x"})
    here.keys["name"] = "other"
    workload, checked = here.check()
    item = next(workload.plan(checked, checked.config, 0))
    writer = workload.writer(checked.config)
    directory = here.path / "jobs" / "other"
    directory.mkdir()
    writer.open(directory)
    found = record("one", "a", reward=1.0, files=here.cluster.put(bad))
    found = found.model_copy(update={"trial": spec_of(item).id})
    told = asyncio.run(writer.place(entry(0, item.payload, found), here.cluster))
    assert "cannot be unpacked" in told and (directory / "d/one/a/1/result.json").exists()
    assert not list(here.path.rglob("out.txt"))


def test_a_tar_of_a_worker_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(data: bytes) -> str:
        archive, directory = tmp_path / "tar", tmp_path / "out"
        archive.write_bytes(data)
        with pytest.raises(InputError) as caught:
            placing.unpack(archive, directory)
        return caught.value.message

    plain = tar_of({"a": b"x", "b": b"y"})
    assert "cannot be unpacked" in told(gzip.compress(plain))  # a thousandth of what it would fill
    name = tarfile.TarInfo("n" * (2 << 20))
    assert "a header of" in told(tar_of({}, name))
    monkeypatch.setattr(placing, "ENTRIES_MAX", 1)
    assert "more than 1 entries" in told(plain)
    monkeypatch.setattr(placing, "BYTES_MAX", 1)
    assert "larger than" in told(plain)


def test_what_somebody_changed_or_deleted_is_written_anew_and_what_he_added_stays(here: Here) -> None:
    here.run()
    one, two = here.job / "d/one/a/1", here.job / "d/two/a/1"
    assert here.mend() == ([], [])
    (one / "agent" / "stdout.txt").write_text("forged\n")
    (one / "notes.txt").write_text("mine")
    (two / "agent" / "stdout.txt").unlink()
    (two / "agent").rmdir()
    (two / "agent").symlink_to("/etc")
    (two / "result.json").unlink()
    assert here.mend() == (["d/one/a/1", "d/two/a/1"], [])
    assert (one / "agent/stdout.txt").read_bytes() == LEFT["agent/stdout.txt"] and (one / "notes.txt").exists()
    assert below(two) == {"result.json", *LEFT} and not (two / "agent").is_symlink()


def test_what_the_cluster_keeps_no_more_is_told(here: Here) -> None:
    here.run()
    here.cluster.objects.clear()
    (here.job / "d/one/a/1/result.json").unlink()
    made, told = here.mend()
    assert made == [] and "d/one/a/1: " in told[0]
    assert (here.job / "d/one/a/1/result.json").exists()  # which is known without it


# ---- the same command again


def test_a_job_that_changed_in_nothing_follows_no_run(here: Here) -> None:
    here.run(1)
    with OutputDirectory.open(here.job) as output:
        _, checked = here.check(output=output)
    assert (checked.follows, checked.total) == ("", 2)


def test_added_attempts_run_and_what_is_there_stays(here: Here) -> None:
    here.run()
    fetched = here.cluster.fetched
    here.keys["n_attempts"] = 2
    told = here.run()
    assert "2 new (d/one/a/2, d/two/a/2)" in told
    assert here.cluster.fetched == fetched + 2 and len(here.lines()) == len(here.lines(".placed.jsonl")) == 4
    assert [one["attempt"] for one in here.result()["results"]] == [1, 1, 2, 2]
    assert here.result()["completed_trials"] == 4
    with OutputDirectory.open(here.job) as output:  # the second run is known as the first was
        _, checked = here.check(output=output)
    assert (checked.follows, checked.total) == ("", 2)
    assert len(checked.config["trees"]) == 2


def test_a_changed_task_runs_anew_and_what_it_was_is_kept(here: Here) -> None:
    here.run()
    (here.path / "d" / "one" / "instruction.md").write_text("Something else.\n")
    assert re.search(r"1 changed.*\(d/one/a/1\)", here.run())
    kept = [path.name for path in (here.job / "d/one/a").iterdir() if "before" in path.name]
    assert len(kept) == 1 and below(here.job / "d/one/a" / kept[0]) == {"result.json", *LEFT}
    assert len(here.lines()) == 2


def test_trials_that_are_gone_count_no_more_and_are_there_when_they_come_back(here: Here) -> None:
    here.run()
    here.keys["datasets"][0]["task_names"] = ["one"]
    assert re.search(r"1 gone.*\(d/two/a/1\)", here.run())
    assert here.result()["total_trials"] == len(here.lines()) == 1 and (here.job / "d/two/a/1/result.json").exists()
    del here.keys["datasets"][0]["task_names"]
    assert here.run(0) == "trials: 2 as they are"
    assert here.result()["completed_trials"] == len(here.lines()) == 2


def test_trials_that_failed_so_run_once_more(here: Here) -> None:
    here.run(two={"reward": None, "error": "environment_start_failed"})
    assert "none ended with verifier_failed" in here.run(retry=["verifier_failed"])
    told = here.run(retry=["environment_start_failed"])
    assert told == "trials: 1 as they are; 1 once more (d/two/a/1)"
    assert here.lines("errors.jsonl") == [] and here.result()["completed_trials"] == 2
    assert any("before" in path.name for path in (here.job / "d/two/a").iterdir())


def test_what_has_no_result_goes_on_under_other_settings(here: Here) -> None:
    here.run(1, state="killed")
    here.keys["n_concurrent_trials"] = 2
    assert here.run() == "trials: 1 as they are; 1 without a result yet"
    assert here.result()["completed_trials"] == 2


def test_a_job_that_is_done_needs_no_other_run_for_other_settings(here: Here) -> None:
    here.run()
    here.keys |= {"n_concurrent_trials": 2, "metrics": [{"type": "max"}], "budget": {"max_tokens": 1}}
    with OutputDirectory.open(here.job) as output:
        workload, checked = here.check(output=output)
        stored = output.stored_config
    assert checked.follows == "" and stored is not None
    assert workload.describe_change("job", stored["job"], checked.config["job"]) == []


def test_a_budget_counts_what_earlier_runs_used(here: Here) -> None:
    here.keys |= {"budget": {"max_cost_usd": 1.0}}
    here.run(one={"cost": 0.3}, two={"cost": 0.3})
    here.keys["n_attempts"] = 2
    with OutputDirectory.open(here.job) as output:
        workload, checked = here.check(output=output)
        stored = output.stored_config
        assert stored is not None
        workload.plan_followup(checked, stored, here.job)
        limits = dict(workload.spec(NEXT, checked.config).policies[0].options)
    assert (limits["units_out"], limits["used_out"]) == ("1000000", "600000")
    here.keys["budget"] = {"max_cost_usd": 0.5}
    told = here.run()
    assert "budget.max_cost_usd is 0.5" in told and "$0.60 are spent" in told
    assert here.result()["skipped_trials"] == 2


def test_a_budget_counts_trials_that_run_anew(here: Here) -> None:
    here.keys |= {"budget": {"max_cost_usd": 1.0}}
    here.run(one={"cost": 0.3, "reward": None, "error": "verifier_failed"}, two={"cost": 0.3})
    here.run(retry=["verifier_failed"], one={"cost": 0.3})
    assert json.loads((here.job / "summary.json").read_text())["job"]["cost_usd"] == pytest.approx(0.9)
    here.keys["n_attempts"] = 2
    here.run(1, one={"cost": 0.3})
    here.keys["n_attempts"] = 3
    assert "$1.20 are spent" in here.run()
    assert json.loads((here.job / "stats.json").read_text())["spent"]["cost_usd"] == pytest.approx(1.2)


def test_tries_of_a_trial_that_was_skipped_are_kept_and_counted(here: Here) -> None:
    here.keys |= {"budget": {"max_cost_usd": 1.5}}
    workload, checked = here.check()
    trial = spec_of(next(workload.plan(checked, checked.config, 0)))
    tried = record("one", "a", error="api_overloaded", cost=1.0, usage=used(5, 5, 1.0))
    tried = tried.model_copy(update={"trial": trial.id})
    here.cluster.tries[0] = [FailedTry(number, "api_overloaded", "busy", tried.encode()) for number in (1, 2)]
    skipped = {"outcome": Outcome.SKIPPED, "failure": Failure("rest_skipped", "$2 were used")}
    here.run(skipped=(0, 2, skipped))
    assert below(here.job / "d/one/a/1") == {
        f"tries/{number}/{name}" for number in (1, 2) for name in ("result.json", "error.txt")
    }
    assert [line["label"] for line in here.lines()] == ["d/two/a/1"]
    job = json.loads((here.job / "summary.json").read_text())["job"]
    assert (job["cost_usd"], job["tokens"], job["skipped"]) == (2.0, 20, 1)
    with OutputDirectory.open(here.job) as output:
        assert here.check(output=output)[1].follows == "1 trial was skipped"
    here.keys |= {"n_attempts": 2, "budget": {"max_cost_usd": 3.0}}
    here.cluster.tries.clear()
    here.run(one={"cost": 0.5})
    assert (here.job / "d/one/a/1/result.json").exists() and len(list((here.job / "d/one/a").glob("1.before-*"))) == 1
    assert json.loads((here.job / "summary.json").read_text())["job"]["cost_usd"] == 3.0  # two more attempts


def test_files_that_were_changed_are_written_anew_with_trials_of_earlier_runs(here: Here) -> None:
    here.run()
    here.keys["n_attempts"] = 2
    here.run()
    (here.job / "trials.jsonl").write_text("forged\n")
    here.run()
    assert len(here.lines()) == 4
    (kept,) = here.job.glob(".kept-*.jsonl")
    kept.write_bytes(kept.read_bytes() + b"\n{}")
    with pytest.raises(StorageError, match=kept.name):
        here.run()


def test_a_directory_changes_hands_as_a_whole(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.run()
    real = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if Path(target).name == "run-id":
            raise KeyboardInterrupt
        return real(self, target)

    with OutputDirectory.open(here.job) as output:
        monkeypatch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            output.hand_over(NEXT, {"job": {}}, {"plan": "x"})
        monkeypatch.undo()
        assert output.run_id == RUN
    with OutputDirectory.open(here.job) as output:
        assert (output.run_id, output.stored_config, output.kept) == (NEXT, {"job": {}}, {"plan": "x"})


def test_a_dry_run_says_what_it_would_do_with_what_is_there_and_changes_nothing(here: Here) -> None:
    here.run()
    here.keys["n_attempts"] = 2
    before = {path: path.stat().st_mtime_ns for path in here.job.rglob("*")}
    workload, checked = here.check()
    lines = workload.describe(JobConfig.model_validate(here.keys), checked)
    assert lines[0] == "1 agent x 2 tasks x 2 attempts = 4 trials, 4 at once"
    assert any(line.startswith(f"{here.job} ") and "2 new (d/one/a/2, d/two/a/2)" in line for line in lines)
    assert "process: " in lines[3]
    assert before == {path: path.stat().st_mtime_ns for path in here.job.rglob("*")}


def summary(skipped: int, reason: str = "") -> dict[str, Any]:
    job = {"trials": 9, "completed": 0, "failed": 9 - skipped, "infrastructure": 0, "skipped": skipped}
    agents = {"a": {"trials": 9, "scored": 0, "passed": 0, "mean_reward": None}}
    rates = {"cost_usd": 0.0, "agents": agents, "errors": {"environment_lost": 1}}
    return {"trials": {"skipped": skipped, "completed": 0, "committed": 9}, "reason": reason, "job": job | rates}


def test_a_job_that_was_stopped_by_its_infrastructure_is_no_success(here: Here) -> None:
    stopped = summary(3, "5 of 6 trials failed by no fault of an agent (x 5); the limit is 0.5")
    job = Job()
    assert job.exit_code(stopped) == 1 and "the same command runs the trials" in job.outcome(stopped)
    assert not job.exit_code(summary(3, "100 tokens were used, of at most 90")) and not job.exit_code(summary(0))
    assert "\na: 9 trials, none scored" in job.outcome(stopped) and job.failed_for_good(stopped) == 6


# ---- for people


def test_the_board_has_agents_and_what_runs(here: Here) -> None:
    here.keys |= {"agents": [{"name": "a", "execute": "true"}, {"name": "nop"}]}
    workload, checked = here.check()
    writer = workload.writer(checked.config)
    here.job.mkdir(parents=True)
    writer.open(here.job)
    items = list(workload.plan(checked, checked.config, 0))
    ended = record("one", "a", reward=1.0, cost=0.5, usage={"n_input_tokens": 7, "n_output_tokens": 3})
    list(writer.lines(entry(0, items[0].payload, ended.model_copy(update={"trial": items[0].id.hex()}))))
    board = writer.board([Running(2, 62.4, "verification", 2)], 1)
    assert board.rows == (("a", "2", "1", "1", "0", "1", "0", "1"), ("nop", "2", "0", "0", "0", "0", "2", ""))
    assert board.running == (("d/two/a/1", "verification", "62 s", "try 2"),)
    assert board.line == "10 tokens, $0.50"
    assert board.fields["trials_running"] == [
        {"trial": "d/two/a/1", "phase": "verification", "seconds": 62.4, "try": 2}
    ]
    many = writer.board([Running(2, 1.0, "", 1)], 2)  # more run than were asked for
    assert many.rows[0][5:7] == ("", "") and many.fields["agents"]["a"]["running"] is None


def test_tail_shows_lines_of_the_trials_that_are_wanted() -> None:
    def line(text: str, **more: Any) -> Line:
        return Line(1, "W", 1, 1, "job", "stdout", text, **more)

    lines = [
        line("[d/one two/a/1 agent] hello [x] there"),
        line("[d/two/b/12 verifier] ok"),
        line("engine says something"),
    ]
    assert [(one.trial, one.phase, one.text) for one in of_trials(lines, "")] == [
        ("d/one two/a/1", "agent", "hello [x] there"),
        ("d/two/b/12", "verifier", "ok"),
    ]
    assert [one.trial for one in of_trials(lines, "d/*/b/*")] == ["d/two/b/12"]
    turned = next(iter(of_trials([line("[d/one/a/1 agent] a\u202eb\u2066c")], "")))
    assert _text(turned) == r"[d/one/a/1 agent] a\u202eb\u2066c"
    assert fits("d/two/b/12", "two/b") and not fits("d/two/b/12", "one") and not fits("d/two/b/12", "two*")
    gap = [line("", left_out=(3, 40))]
    assert [one.line.left_out for one in of_trials(gap, "")] == [(3, 40)] and list(of_trials(gap, "a")) == []


def test_tail_says_that_a_job_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run of a job has begun there yet"):
        tail(str(tmp_path))


async def test_the_first_interrupt_may_let_work_end_by_itself() -> None:
    ended, asked = asyncio.Event(), 0

    def gently() -> bool:
        nonlocal asked
        asked += 1
        ended.set()
        return True

    async def work() -> None:
        await ended.wait()
        raise Interrupted

    interrupts = Interrupts(lambda: None, gently)
    asyncio.get_running_loop().call_soon(interrupts._signalled)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(Interrupted):
        await interrupts.guard(work())
    assert asked == 1


def test_an_engine_that_does_not_answer_is_told_before_the_job() -> None:
    environment = EnvironmentSection(type="docker", provider_config={"host": "unix:///nowhere/docker.sock"})
    (fault,) = engine_faults(environment)
    assert fault.startswith("environment.type: ") and "/nowhere/docker.sock" in fault
    assert "environment: {type: " in fault


def test_images_that_cannot_be_built_are_told_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.sandboxes.images.programs.BUILDERS", ())
    (fault,) = engine_faults(EnvironmentSection(type="bubblewrap", provider_config={"image": "build"}))
    assert fault.startswith("environment.type: ")
    assert "apt-get install skopeo umoci buildah" in fault


def test_a_network_that_cannot_be_made_is_told_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no device for a way out."""
    monkeypatch.setattr("rollout_worker.sandboxes.process.ProcessProvider._ways", _bare)
    environment = EnvironmentSection(type="process")
    (fault,) = network_faults(environment, {"public"})
    assert fault.startswith("environment.type: ")
    assert "network_mode: host" in fault
    assert list(network_faults(environment, {"no-network"})) == []
    shared = EnvironmentSection(type="process", network_mode="host")
    assert list(network_faults(shared, {"public"})) == []
    (fault,) = network_faults(EnvironmentSection(type="kubernetes", network_mode="host"), {"public"})
    assert fault.startswith("environment.network_mode: ")


def _bare(provider: object) -> list[Features]:
    return [Features(namespaces=False, network=False, overlay=False)]


def test_a_trial_that_the_job_has_not_is_not_waited_for(tmp_path: Path) -> None:
    planned = [["00", f"d/hello/mine/{attempt}"] for attempt in (1, 2)]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".run.json").write_bytes(seal({"config": {"output": {"planned": planned}}}))
    for known in ("", "mine", "d/*/mine/2"):
        check_wanted(str(tmp_path), known)
    with pytest.raises(ConfigError, match=r'"d/helo/mine/1"; near are d/hello/mine/1, '):
        check_wanted(str(tmp_path), "d/helo/mine/1")
    with pytest.raises(ConfigError, match=r'"zzz"; it has d/hello/mine/1, d/hello/mine/2$'):
        check_wanted(str(tmp_path), "zzz")
