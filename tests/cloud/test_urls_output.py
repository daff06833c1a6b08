"""An output directory in a bucket: what is written, what never is, and what is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from memory_bucket import MemoryBucket, MemoryStore
from moto_locked import AwsEmulator
from rollout.cloud.bucket import StartOverError
from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    OutputChangedError,
    StateError,
    StorageUnavailableError,
)
from rollout.workloads import bucket_lock, buckets, publishing
from rollout.workloads.bucket_lock import BucketLock
from rollout.workloads.publishing import BucketOutput

RUN, OTHER = "01K00000000000000000000000", "01K11111111111111111111111"
LOCK = "out/.rollout-lock"


@dataclass
class Rig:
    """A machine with a staging directory, and the bucket."""

    path: Path
    bucket: MemoryBucket
    notes: list[str] = field(default_factory=list[str])
    steps: list[str] = field(default_factory=list[str])

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def run(self, run_id: str = RUN, rows: int = 2) -> None:
        self.write("run-id", f"{run_id}\n")
        self.write("completions.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(rows)))
        self.write("summary.json", json.dumps({"run_id": run_id, "rows": rows}))

    @asynccontextmanager
    async def opened(self, *, resume: bool = False, private: bool = True) -> AsyncIterator[BucketOutput]:
        self.path.mkdir(exist_ok=True)
        output = BucketOutput(
            BucketUrl("s3", "memory", "out/"), self.path, CloudSection(),
            ("completions.jsonl", "errors.jsonl", "summary.json"), command="rollout infer",
            tell=self.steps.append, note=self.notes.append,
        )  # fmt: skip
        try:
            await output.open(resume=resume, private=private)
            yield output
        finally:
            await output.close()

    async def publish(self, rows: int = 2, *, resume: bool = False, private: bool = True) -> None:
        async with self.opened(resume=resume, private=private) as output:
            await output.publish(rows)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(buckets, "open_bucket", store.open_bucket)
    return store


@pytest.fixture
def rig(store: MemoryStore, tmp_path: Path) -> Rig:
    return Rig(tmp_path / "staging", store.bucket())


@pytest.fixture
def elsewhere(rig: Rig, tmp_path: Path) -> Rig:
    return Rig(tmp_path / "elsewhere", rig.bucket)


async def test_what_is_there_at_the_end_is_what_a_directory_would_hold(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    for hidden in (".collect.json", ".lock", ".rollout/rollout.db", ".summary.json.tmp"):
        rig.write(hidden, "x")
    rig.write("model/config.json", "{}")
    await rig.publish()
    assert sorted(rig.bucket.objects) == [
        f"out/{name}" for name in ("completions.jsonl", "model/config.json", "run-id", "summary.json")
    ]
    assert rig.bucket.body("out/completions.jsonl") == (rig.path / "completions.jsonl").read_bytes()


async def test_what_is_there_already_is_not_uploaded_again(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    rig.write("completions.jsonl", "longer\nand longer\n")
    written: list[str] = []
    rig.bucket.before = lambda what, key: written.append(key) if what == "write" and key != LOCK else None
    await rig.publish()
    assert written == ["out/completions.jsonl"]


@pytest.mark.parametrize("name", ["completions.jsonl", "summary.json"])
async def test_an_object_that_was_there_before_is_refused_at_once(rig: Rig, name: str) -> None:
    rig.bucket.put(f"out/{name}", b"somebody's")
    with pytest.raises(ConfigError, match=rf"s3://memory/out/{name} "):
        await rig.publish()
    assert list(rig.bucket.objects) == [f"out/{name}"]


async def test_an_object_that_was_replaced_between_two_commands_is_refused(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    rig.bucket.put("out/completions.jsonl", b"somebody's")
    with pytest.raises(ConfigError, match=r"out/completions\.jsonl ") as raised:
        await rig.publish()
    assert str(rig.path) in raised.value.message
    assert rig.bucket.body("out/completions.jsonl") == b"somebody's"
    del rig.bucket.objects["out/completions.jsonl"]
    await rig.publish()
    assert "s3://memory/out/completions.jsonl was deleted" in rig.notes[-1]
    assert rig.bucket.body("out/completions.jsonl") == (rig.path / "completions.jsonl").read_bytes()


@pytest.mark.parametrize("at", ["head", "write"])
async def test_an_object_that_is_replaced_while_the_run_goes_on_is_refused(rig: Rig, at: str) -> None:
    rig.path.mkdir()
    rig.run()
    async with rig.opened() as output:
        await output.claim()
        rig.bucket.before = lambda what, key: (
            rig.bucket.put(key, b"theirs") and None if (what, key) == (at, "out/completions.jsonl") else None
        )
        with pytest.raises(ConfigError, match=r"out/completions\.jsonl "):
            await output.publish(2)
    assert rig.bucket.body("out/completions.jsonl") == b"theirs"
    assert LOCK not in rig.bucket.objects


async def test_an_object_that_is_replaced_after_it_was_uploaded_is_no_success(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()

    def replace(what: str, key: str) -> None:
        if (what, key) == ("write", "out/summary.json"):
            rig.bucket.put("out/completions.jsonl", b"theirs")

    async with rig.opened() as output:
        rig.bucket.before = replace
        with pytest.raises(ConfigError, match=r"completions\.jsonl was replaced") as raised:
            await output.publish(2)
        assert output.rows == 0
    assert f"is safe in {rig.path}" in raised.value.message


async def test_a_second_run_is_refused_while_one_writes(rig: Rig, elsewhere: Rig) -> None:
    async with rig.opened():
        with pytest.raises(StateError, match=r"pid \d+ on .*\(rollout infer\)"):
            await elsewhere.publish()
        assert LOCK in rig.bucket.objects
    assert LOCK not in rig.bucket.objects


async def test_a_lock_that_a_killed_command_left_is_taken_over_on_its_machine_at_once(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    output = BucketOutput(BucketUrl("s3", "memory", "out/"), rig.path, CloudSection(), ())
    await output.open(resume=False, private=True)
    lock = output._lock  # pyright: ignore[reportPrivateUsage]
    assert lock is not None and lock._renewing is not None  # pyright: ignore[reportPrivateUsage]
    lock._renewing.cancel()  # pyright: ignore[reportPrivateUsage]
    assert LOCK in rig.bucket.objects
    await rig.publish()
    assert LOCK not in rig.bucket.objects


async def test_a_lock_that_is_renewed_no_more_is_taken_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lock, "LIFETIME_S", -1.0)
    monkeypatch.setattr(bucket_lock, "_RENEW_S", 0.02)
    monkeypatch.setattr(bucket_lock, "_WATCH_S", 0.03)
    rig.bucket.put(LOCK, b"{}")
    lock = BucketLock(rig.bucket, LOCK, "mine", "")
    await lock.take(rig.steps.append)
    assert rig.steps and "waiting to see whether" in rig.steps[0]
    assert await lock.release() == "" and LOCK not in rig.bucket.objects


async def test_a_lock_that_looks_old_and_is_renewed_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lock, "LIFETIME_S", -1.0)
    monkeypatch.setattr(bucket_lock, "_RENEW_S", 0.05)
    rig.bucket.put(LOCK, b"{}")
    asked = 0

    def renew(what: str, key: str) -> None:
        nonlocal asked
        asked += what == "head"
        if asked == 3:
            rig.bucket.put(LOCK, b"{}")

    rig.bucket.before = renew
    with pytest.raises(StateError, match="is being written by another command"):
        await BucketLock(rig.bucket, LOCK, "mine", "").take(rig.steps.append)


async def test_a_run_whose_lock_was_taken_writes_nothing_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lock, "_RENEW_S", 0.01)
    rig.path.mkdir()
    rig.run()
    async with rig.opened() as output:
        rig.bucket.put(LOCK, b"another's")
        lock = output._lock  # pyright: ignore[reportPrivateUsage]
        assert lock is not None
        assert lock._renewing is not None  # pyright: ignore[reportPrivateUsage]
        await lock._renewing  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(StateError, match="was taken over or deleted by another command"):
            await output.publish(2)
    assert rig.bucket.body(LOCK) == b"another's" and list(rig.bucket.objects) == [LOCK]


async def test_a_renewal_whose_answer_was_lost_is_ours(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lock, "_RENEW_S", 0.01)
    rig.path.mkdir()
    rig.run()
    async with rig.opened() as output:
        rig.bucket.put(LOCK, rig.bucket.body(LOCK))
        there = rig.bucket.objects[LOCK][1].version
        async with asyncio.timeout(20):
            while rig.bucket.objects[LOCK][1].version == there:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await output.publish(2)
    assert LOCK not in rig.bucket.objects


async def test_a_lock_that_is_renewed_again_after_an_outage_is_held(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    monkeypatch.setattr(bucket_lock, "_RENEW_S", 0.01)
    clock = [1000.0]
    monkeypatch.setattr(bucket_lock, "_now", lambda: clock[0])
    away = True

    def fail(what: str, key: str) -> None:
        if away:
            raise StorageUnavailableError("s3://memory cannot be reached")

    lock = BucketLock(rig.bucket, LOCK, "mine", "")
    await lock.take(rig.steps.append)
    rig.bucket.before = fail
    clock[0] += 100
    with pytest.raises(StateError, match="could not be renewed for 60 s"):
        lock.check()
    away = False
    async with asyncio.timeout(20):
        while True:
            await asyncio.sleep(0.01)
            with contextlib.suppress(StateError):
                lock.check()
                break
    assert await lock.release() == ""


async def test_a_command_that_is_stopped_while_it_takes_the_lock_leaves_none(rig: Rig) -> None:
    written = asyncio.Event()

    def slow(what: str, key: str) -> None:
        if what == "write":
            written.set()

    rig.bucket.before = slow
    job = asyncio.ensure_future(rig.publish())
    await written.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert LOCK not in rig.bucket.objects


async def test_without_conditional_writes_that_is_said_and_another_run_is_noticed(rig: Rig) -> None:
    rig.bucket.has_conditions = False
    rig.path.mkdir()
    rig.run()
    async with rig.opened() as output:
        await output.claim()
        assert "has no conditional writes" in rig.notes[0]
        rig.bucket.put("out/run-id", f"{OTHER}\n".encode())
        with pytest.raises(StateError, match="was written by another run meanwhile"):
            await output.publish(2)
    assert "out/completions.jsonl" not in rig.bucket.objects


async def test_a_refused_upload_says_where_the_results_are_and_leaves_no_lock(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()

    def fail(what: str, key: str) -> None:
        if (what, key) == ("write", "out/completions.jsonl"):
            raise StorageUnavailableError("s3://memory cannot be reached")

    async with rig.opened() as output:
        rig.bucket.before = fail
        with pytest.raises(StorageUnavailableError) as raised:
            await output.publish(2)
        assert output.rows == 0
    assert f"what is collected is safe in {rig.path}" in raised.value.message
    assert LOCK not in rig.bucket.objects
    rig.bucket.before = lambda what, key: None
    await rig.publish()
    assert "out/completions.jsonl" in rig.bucket.swept  # what the upload may have left behind


@pytest.mark.parametrize("name", ["run-id", "completions.jsonl"])
async def test_an_upload_whose_end_was_not_recorded_is_known_again(rig: Rig, name: str) -> None:
    """The command was killed after the service had it all."""
    rig.path.mkdir()
    rig.run()
    async with rig.opened() as output:
        write = rig.bucket.write

        async def killed(key: str, *arguments: object, **named: object) -> object:
            blob = await write(key, *arguments, **named)  # type: ignore[arg-type]
            if key == f"out/{name}":
                raise asyncio.CancelledError
            return blob

        rig.bucket.write = killed  # type: ignore[method-assign, assignment]
        with contextlib.suppress(asyncio.CancelledError):
            await output.publish(2)
        rig.bucket.write = write  # type: ignore[method-assign]
    await rig.publish()
    assert "out/summary.json" in rig.bucket.objects


async def test_a_run_id_that_was_deleted_is_asked_about(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    del rig.bucket.objects["out/run-id"]
    with pytest.raises(ConfigError, match="out/run-id was deleted") as raised:
        await rig.publish()
    assert f"--resume {RUN}" in raised.value.message and str(rig.path) in raised.value.message
    await rig.publish(resume=True)
    assert rig.bucket.body("out/run-id") == f"{RUN}\n".encode()


async def test_another_machine_goes_on_with_a_run_of_a_cluster(rig: Rig, elsewhere: Rig) -> None:
    rig.path.mkdir()
    rig.run(rows=2)
    await rig.publish()
    async with elsewhere.opened(private=False) as output:
        assert (elsewhere.path / "run-id").read_text() == f"{RUN}\n"
        elsewhere.run(rows=5)  # from the ledger
        await output.claim()
        await output.publish(5)
    assert rig.bucket.body("out/completions.jsonl").count(b"\n") == 5
    with pytest.raises(ConfigError, match=r"completions\.jsonl, "):
        await rig.publish()  # with a ledger of its own
    async with rig.opened(private=False) as output:
        rig.run(rows=7)
        await output.publish(7)  # and back, at the cluster
    assert rig.bucket.body("out/completions.jsonl").count(b"\n") == 7


async def test_another_machine_does_not_write_over_what_is_no_part_of_the_run(rig: Rig, elsewhere: Rig) -> None:
    rig.path.mkdir()
    rig.run(rows=2)
    await rig.publish()
    rig.bucket.put("out/completions.jsonl", b"somebody's")
    async with elsewhere.opened(private=False) as output:
        elsewhere.run(rows=5)
        with pytest.raises(ConfigError, match=r"completions\.jsonl "):
            await output.publish(5)


async def test_a_run_of_a_private_cluster_elsewhere_is_refused_clearly(rig: Rig, elsewhere: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    with pytest.raises(ConfigError, match=str(elsewhere.path)):
        await elsewhere.publish()
    assert list(elsewhere.path.iterdir()) == []


async def test_two_runs_of_one_place_are_told_apart(rig: Rig, elsewhere: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    elsewhere.path.mkdir()
    elsewhere.run(OTHER)
    with pytest.raises(ConfigError, match=OTHER[-8:]):
        await elsewhere.publish()


async def test_a_file_that_changes_while_it_is_uploaded_is_no_success(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()

    def edit(what: str, key: str) -> None:
        if (what, key) == ("head", "out/completions.jsonl"):
            rig.write("completions.jsonl", "x" * (rig.path / "completions.jsonl").stat().st_size)

    async with rig.opened() as output:
        rig.bucket.before = edit
        with pytest.raises(OutputChangedError):
            await output.publish(2)


async def test_an_upload_that_the_service_lost_is_begun_anew(rig: Rig) -> None:
    lost: list[str] = []

    def lose(what: str, key: str) -> None:
        if (what, key) == ("write", "out/completions.jsonl") and len(lost) < 2:
            lost.append(key)
            raise StartOverError("the upload session is gone")

    rig.path.mkdir()
    rig.run()
    rig.bucket.before = lose
    await rig.publish()
    assert len(lost) == 2
    assert rig.bucket.body("out/completions.jsonl") == (rig.path / "completions.jsonl").read_bytes()


async def test_progress_of_an_upload_counts_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.workloads.publishing._TELL_S", 0.0)
    rig.path.mkdir()
    rig.run()
    rig.write("completions.jsonl", "x" * (2 << 20))
    await rig.publish()
    assert "uploading to s3://memory/out/: 1.0 of 2.0 MiB" in rig.steps


async def test_a_stop_is_heard_while_a_file_is_uploaded(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    rig.write("completions.jsonl", "x" * (4 << 20))
    reached = asyncio.Event()
    head = rig.bucket.head

    async def stalled(key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = "") -> object:
        async for _ in chunks:
            reached.set()
            await asyncio.Event().wait()
        return await head(key)

    async with rig.opened() as output:
        await output.claim()
        write, rig.bucket.write = rig.bucket.write, stalled  # type: ignore[method-assign, assignment]
        publishing_it = asyncio.ensure_future(output.publish(2))
        await reached.wait()
        publishing_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing_it
        rig.bucket.write = write  # type: ignore[method-assign]
        assert output.rows == 0
    assert sorted(rig.bucket.objects) == ["out/run-id"]  # and no lock


async def test_what_a_killed_command_left_of_an_upload_is_aborted(aws: AwsEmulator, tmp_path: Path) -> None:
    bucket = aws.bucket()
    for key in ("out/completions.jsonl", "out/deeper/completions.jsonl"):
        aws.s3.create_multipart_upload(Bucket=bucket, Key=key)
    output = BucketOutput(BucketUrl("s3", bucket, "out/"), tmp_path, aws.cloud(), ("completions.jsonl",))
    try:
        await output.open(resume=False, private=True)
    finally:
        await output.close()
    assert aws.unfinished(bucket) == ["out/deeper/completions.jsonl"]  # of another run, perhaps
    assert aws.keys(bucket) == [] and list(tmp_path.iterdir()) == []


async def test_lines_are_uploaded_while_the_run_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "EVERY_S", 0.0)
    rig.path.mkdir()
    rig.run()
    (rig.path / "summary.json").unlink()
    async with rig.opened() as output:
        await output.claim()
        output.publish_soon(2)
        rig.write("completions.jsonl", (rig.path / "completions.jsonl").read_text() + "a third, not")
        task = output._uploading  # pyright: ignore[reportPrivateUsage]
        assert task is not None
        await task
        assert output.rows == 2 and rig.bucket.body("out/completions.jsonl") == b'{"n": 0}\n{"n": 1}\n'
        output.publish_soon(3)
        await output.publish(3)  # it does not get in the way
        assert output.rows == 3 and rig.bucket.body("out/completions.jsonl").endswith(b"not")


async def test_what_another_machine_uploaded_is_not_replaced_by_less(
    rig: Rig, elsewhere: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its files are rebuilt there."""
    monkeypatch.setattr(publishing, "EVERY_S", 0.0)
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    async with elsewhere.opened(private=False) as output:
        await output.claim()
        whole = (rig.path / "completions.jsonl").read_text()
        elsewhere.write("completions.jsonl", whole[:-9])
        output.publish_soon(1)
        task = output._uploading  # pyright: ignore[reportPrivateUsage]
        assert task is not None
        await task
        assert not [note for note in elsewhere.notes if "warning" in note]
        assert rig.bucket.body("out/completions.jsonl").decode() == whole
        elsewhere.write("completions.jsonl", whole + whole)
        await output.publish(4)
    assert rig.bucket.body("out/completions.jsonl").decode() == whole + whole


async def test_a_machine_that_cannot_reach_the_bucket_keeps_what_it_knows_of_it(rig: Rig) -> None:
    rig.path.mkdir()
    rig.run()
    await rig.publish()
    (rig.path / "run-id").unlink()

    def fail(what: str, key: str) -> None:
        raise StorageUnavailableError("s3://memory cannot be reached")

    rig.bucket.before = fail
    with pytest.raises(StorageUnavailableError):
        await rig.publish()
    assert (rig.path / publishing.RECORD).exists()


async def test_the_lock_that_is_lost_to_a_conflict_is_looked_at_again(rig: Rig) -> None:
    raced = False

    def race(what: str, key: str) -> None:
        nonlocal raced
        if (what, key) == ("write", LOCK) and not raced:
            raced = True
            raise ConflictError("409")

    rig.bucket.before = race
    async with rig.opened():
        assert raced
