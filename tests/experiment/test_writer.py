"""From the commit log to the files of a run: in order, once, and the same again when they are written anew."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from experiments import resolved
from rollout.model.errors import NotFoundError, ProtocolError, StorageFullError
from rollout.model.item import Failure, Outcome
from rollout.snapshots.tar import pack
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.experiment import writer as writer_module
from rollout.workloads.experiment.compile import Items, job_of, write_trees
from rollout.workloads.experiment.contracts import ref_of, sha256_of
from rollout.workloads.experiment.layout import PRUNED, artifact_path
from rollout.workloads.experiment.writer import ExperimentWriter
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.run_config import job_json
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import FailedTry, Running
from test_facts import record

RUN = "01K00000000000000000000000"
BLOB = b"a workspace"
OUTCOME = {"outcome": "success", "exit_status": 0, "metrics": {"m": 1}}


class Store:
    """A ledger whose objects are files. `tries`: of every trial."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tries: list[FailedTry] = []
        directory.mkdir()

    async def fetch(self, object_id: bytes, path: Path) -> None:
        found = self.directory / object_id.hex()
        if not found.exists():
            raise NotFoundError("it is gone")
        shutil.copy(found, path)

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        return self.tries

    def keep(self, spec: TrialSpec, files: dict[str, bytes]) -> str:
        """The id, in hex, of the tar of a trial's files."""
        made = self.directory / f"files-{spec.id[:16]}"
        for name, data in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        found = self.directory / spec.id
        pack(made, found)
        return found.name


class Bench:
    def __init__(self, directory: Path, **sections: Any) -> None:
        self.experiment = resolved(**sections)
        self.job = job_of(self.experiment)
        trees = write_trees(self.experiment, directory / "trees", None)
        self.items = Items(self.experiment, self.job, {key: checksum for key, (checksum, _) in trees.items()})
        self.store = Store(directory / "objects")
        self.run = directory / "run"
        self.config = {"experiment": self.experiment.json, "executors": {"job": {"job": job_json(self.job)}}}

    def entry(
        self, seq: int, outcome: Outcome = Outcome.DONE, error: str = "", files: dict[str, bytes] | None = None
    ) -> CommitEntry:
        payload = self.items.item(seq).payload
        assert isinstance(payload, bytes)
        spec = TrialSpec.decode(payload)
        data = b""
        if outcome in (Outcome.DONE, Outcome.FAILED) or files:
            data = self.record(spec, error, files or {"contract/outcome.json": json.dumps(OUTCOME).encode()}).encode()
        failure = Failure(error, "why") if outcome is Outcome.FAILED else None
        return CommitEntry(
            seq, seq, 1, outcome, data, payload, bytes.fromhex(spec.id), failure, worker="w", accepted_ms=1, tries=2
        )

    def record(self, spec: TrialSpec, error: str, files: dict[str, bytes]) -> TrialRecord:
        made = record(error)
        result = made.result.model_copy(
            update={"task_name": spec.task, "dataset_name": spec.dataset, "agent_name": spec.agent}
        )
        return made.model_copy(update={"trial": spec.id, "result": result, "files": self.store.keep(spec, files)})

    def evidence(self, seq: int) -> bytes:
        ids = {**self.items.input(seq).ids.to_json(), "run_id": RUN}
        refs = {"trial_input_ref": ref_of(sha256_of(BLOB)), "incomplete": "of a test"}
        paths = {"trial_dir": "elsewhere", "trial_input": "elsewhere"}
        return json.dumps(
            {"ids": ids, "runtime": {"executor": "local_process"}, "evidence": refs, "paths": paths}
        ).encode()

    def collector(self, output: OutputDirectory) -> Collector:
        total = len(self.items)
        return Collector(output, RUN, ExperimentWriter(self.config), total=total, unit="trials")

    async def write(self, entries: list[CommitEntry], *, again: bool = False) -> list[str]:
        """What the person is told."""
        with OutputDirectory.open(self.run, "test") as output:
            output.claim(RUN, self.config)
            collector = self.collector(output)
            try:
                if again:
                    collector.restart()
                told = await collector.place(entries, self.store)
                collector.add(entries)
                collector.flush()
                collector.refresh("completed")
                return told
            finally:
                collector.close()

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.run / "facts").glob("*.jsonl")}

    def trials(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "facts" / "trials.jsonl").read_text().splitlines()]


async def test_commits_are_in_the_order_of_the_schedule_and_a_gap_is_refused(tmp_path: Path) -> None:
    """003, test 2: what comes out of order is held by the coordinator; here it never comes."""
    bench = Bench(tmp_path)
    with pytest.raises(ProtocolError):
        await bench.write([bench.entry(0), bench.entry(2)])
    await bench.write([bench.entry(seq) for seq in range(6)])
    assert [row["schedule_index"] for row in bench.trials()] == list(range(6))


async def test_a_duplicate_completion_is_dropped(tmp_path: Path) -> None:
    """003, test 3, and edge cases 1, 3 and 4."""
    bench = Bench(tmp_path)
    entries = [bench.entry(seq) for seq in range(6)]
    await bench.write(entries[:3])
    before = bench.files()
    await bench.write(entries[:3])
    assert bench.files() == before
    await bench.write(entries)
    assert len(bench.trials()) == 6


async def test_a_primary_metric_that_no_trial_reports_is_warned_of_and_one_that_some_report_is_not(
    tmp_path: Path,
) -> None:
    for name, count in (("mm", 1), ("m", 0), ("score", 0)):
        bench = Bench(tmp_path / name, primary_metric={"name": name})
        told = [*await bench.write([bench.entry(seq) for seq in range(4)])]
        with OutputDirectory.open(bench.run) as output:  # and by the command that goes on
            collector = bench.collector(output)
            told += await collector.place([bench.entry(4), bench.entry(5)], bench.store)
            collector.add([bench.entry(4), bench.entry(5)])
            warnings = collector.finish("completed")["experiment"]["warnings"]
            collector.close()
        assert (len(told), len(warnings)) == (count, count)


@pytest.mark.parametrize(("works", "count"), [(False, 1), (True, 0)])
async def test_a_grader_that_never_works_is_warned_of(tmp_path: Path, works: bool, count: int) -> None:
    bench = Bench(tmp_path)
    entries = [bench.entry(seq, Outcome.FAILED, "verifier_reward_missing") for seq in range(5)]
    if works:
        entries[0] = bench.entry(0)
    told = await bench.write(entries)
    with OutputDirectory.open(bench.run) as output:
        collector = bench.collector(output)
        last = [bench.entry(5, Outcome.FAILED, "verifier_reward_missing")]
        told += await collector.place(last, bench.store)
        collector.add(last)
        warnings = collector.finish("completed")["experiment"]["warnings"]
        collector.close()
    assert (len(told), len(warnings)) == (count, count)


async def test_files_that_are_written_anew_are_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entries = [
        bench.entry(0),
        bench.entry(1, Outcome.FAILED, "agent_execution_failed"),
        bench.entry(2, Outcome.SKIPPED),
    ]
    await bench.write(entries)
    before, progress = bench.files(), (bench.run / "runtime" / "schedule_progress.json").read_bytes()
    await bench.write(entries, again=True)
    assert (bench.files(), (bench.run / "runtime" / "schedule_progress.json").read_bytes()) == (before, progress)
    assert json.loads(progress)["consecutive_failures"] == {"0": 0, "1": 1}


async def test_tries_whose_worker_was_lost_are_no_attempts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.tries = [
        FailedTry(1, "worker_failed", "gone", worker_lost=True),
        FailedTry(2, "environment_lost", "gone"),
    ]
    await bench.write([bench.entry(0)])
    assert bench.trials()[0]["attempt"] == 2
    assert (bench.run / "trials" / "trial_000001" / "tries" / "2" / "result.json").exists()


async def test_artifacts_are_kept_once_by_their_hash_and_evidence_says_where(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = sha256_of(BLOB)
    entries = [
        bench.entry(
            seq,
            files={"evidence/evidence.json": bench.evidence(seq), f"evidence/artifacts/{digest[:2]}/{digest}": BLOB},
        )
        for seq in range(2)
    ]
    assert await bench.write(entries) == []
    assert (bench.run / artifact_path(digest)).read_bytes() == BLOB
    lines = (bench.run / "evidence" / "evidence_records.jsonl").read_text().splitlines()
    assert [json.loads(line)["paths"]["trial_dir"] for line in lines] == ["trials/trial_000001", "trials/trial_000002"]


async def test_a_trial_whose_evidence_had_no_room_is_committed_in_its_place(tmp_path: Path) -> None:
    """003, edge case 9: the slot is final, with its error, and says nothing about the agent."""
    bench = Bench(tmp_path)
    await bench.write([bench.entry(0, Outcome.FAILED, "evidence_storage_full"), bench.entry(1)])
    columns = ("schedule_index", "status", "classification", "score")
    assert [tuple(row[name] for name in columns) for row in bench.trials()] == [
        (0, "failed", "evidence_storage_full", None),
        (1, "completed", None, 1.0),
    ]


async def test_a_full_disk_while_artifacts_are_collected_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """003, edge case 9: on the machine of the command."""

    def full(run: Path, directory: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    bench = Bench(tmp_path)
    digest = sha256_of(BLOB)
    files = {"evidence/evidence.json": bench.evidence(0), f"evidence/artifacts/{digest[:2]}/{digest}": BLOB}
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "take", full)
        with pytest.raises(StorageFullError):
            await bench.write([bench.entry(0, files=files)])
    await bench.write([bench.entry(0, files=files)])
    assert (bench.run / artifact_path(digest)).read_bytes() == BLOB
    assert len(bench.trials()) == 1


async def test_a_result_behind_the_prune_point_is_evidence_and_no_fact(tmp_path: Path) -> None:
    """Whether such a trial had begun depends on the workers, so facts are the same as if it had not."""
    began, never_began = Bench(tmp_path / "began"), Bench(tmp_path / "never-began")
    files = {"contract/outcome.json": json.dumps(OUTCOME).encode(), "evidence/evidence.json": began.evidence(1)}
    for bench, left in ((began, files), (never_began, None)):
        await bench.write([bench.entry(0), bench.entry(1, Outcome.SKIPPED, files=left)])
    assert began.files() == never_began.files()
    (line,) = (began.run / PRUNED).read_text().splitlines()
    assert json.loads(line)["ids"]["trial_id"] == "trial_000002"
    assert (began.run / "trials" / "trial_000002" / "trial.json").exists()


async def test_what_a_worker_forged_is_told_of_and_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wrong = "0" * 64
    entry = bench.entry(
        0,
        files={
            "contract/outcome.json": b'{"outcome": "won"}',
            "contract/events.jsonl": b'{"event_type": "e"}\nnonsense\n',
            "evidence/evidence.json": bench.evidence(1),
            f"evidence/artifacts/00/{wrong}": BLOB,
            "verifier/grader_exit_code": b"many",
        },
    )
    (told,) = await bench.write([entry])
    assert "outcome.json: outcome" in told and "events.jsonl:2" in told and wrong[:8] in told
    (row,) = bench.trials()
    assert (row["outcome"], row["score"], row["grade_exit_status"]) == ("error", None, None)
    assert not (bench.run / artifact_path(wrong)).exists()
    evidence = bench.run / "evidence" / "evidence_records.jsonl"
    assert not evidence.exists() or evidence.read_bytes() == b""


def test_control_and_progress_follow_what_runs(tmp_path: Path) -> None:
    """003, test 10, with what a run of the real engine shows in tests/acceptance/test_experiment.py."""
    bench = Bench(tmp_path)
    writer = ExperimentWriter(bench.config)
    bench.run.mkdir()
    (bench.run / "run-id").write_text(RUN)
    writer.open(bench.run)
    writer.watch("paused", "lunch")
    writer.board([Running(3, 1.0, "agent execution", 1, "w"), Running(4, 1.0, "", 2, "v")], 2)
    writer.refresh()
    control = json.loads((bench.run / "runtime" / "run_control.json").read_text())
    assert (control["run_id"], control["status"], control["pause"]["label"]) == (RUN, "paused", "lunch")
    assert {name: one["worker_id"] for name, one in control["active_trials"].items()} == {
        "trial_000004": "w",
        "trial_000005": "v",
    }
    progress = json.loads((bench.run / "runtime" / "schedule_progress.json").read_text())
    assert (progress["next_schedule_index"], progress["next_trial_index"], progress["total_slots"]) == (5, 6, 6)
    writer.watch("running", "")
    writer.refresh("interrupted")
    control = json.loads((bench.run / "runtime" / "run_control.json").read_text())
    assert (control["status"], len(control["active_trials"]), control["pause"]) == ("interrupted", 2, None)
    writer.refresh("killed")
    assert json.loads((bench.run / "runtime" / "run_control.json").read_text())["active_trials"] == {}
