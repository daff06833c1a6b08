"""The executor of training where things go wrong: over processes that only say what they did."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Key, Outcome
from rollout.snapshots.tar import Packed, pack
from rollout.workloads.local_model import tree_digest
from rollout.workloads.train.encode import FAULTS
from rollout.workloads.train.report import Report
from rollout.workloads.train.segment import Result, Segment, stopping_after
from rollout_worker.backends.training.faults import is_full, ran_out_of_memory
from rollout_worker.executors import train, train_ranks, train_room, trees
from rollout_worker.executors.port import Attempt, Done, Run, UnsuitableError
from rollout_worker.executors.train import TrainExecutor
from rollout_worker.executors.train_ranks import Ranks

FINGERPRINT = {"device": "cpu x86_64 AVX512", "threads": 1}
CONFIG: dict[str, Any] = {
    "model": {"uri": "tiny", "content_id": "m"},
    "algorithm": {
        "kind": "sft",
        "settings": {
            "devices": 1, "threads": 1, "device": "cpu", "minibatch_size": 4, "max_length": 64,
        },
    },
    "dataset": {"kind": "jsonl_path", "files": [], "manifest": "00" * 32},
    "run": {},
    "snapshots": {"label": ""},
}  # fmt: skip
RUN = Run("01J00000000000000000000000", "train", CONFIG)
STEPS = 40


@dataclass
class Fake:
    """In the place of `Ranks`. `say`: instead of the answers to `run`, by its first step."""

    fingerprint: dict[str, Any] = field(default_factory=lambda: dict(FINGERPRINT))
    say: dict[int, Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]]]] = field(default_factory=dict[int, Any])
    asked: list[str] = field(default_factory=list[str])
    fails: dict[str, AttemptError] = field(default_factory=dict[str, AttemptError])
    during: dict[str, Callable[[], object]] = field(default_factory=dict[str, Any])
    built: dict[str, Any] = field(default_factory=dict[str, Any])
    alive: bool = False
    steps: int = STEPS
    patience_s: Any = None

    def __call__(self, *_: Any) -> Fake:
        return self

    async def start(self) -> None:
        self.alive = True

    async def close(self) -> None:
        self.alive = False
        self.asked.append("close")

    async def result(self, **command: Any) -> dict[str, Any]:
        self.asked.append(command["op"])
        if happens := self.during.pop(command["op"], None):
            happens()
        if error := self.fails.get(command["op"]):
            raise error
        if command["op"] == "build":
            self.built = command
        if command["op"] == "prepare":
            path = Path(command["directory"]) / "dataset"
            path.write_bytes(b"tokens")
            return {"pad": 0, "datasets": {"dataset": {"path": str(path), "units": 40, "report": REPORT}}}
        return {"fingerprint": self.fingerprint, "steps": self.steps, "parameters": 5, "trained": 5}

    async def command(self, patience_s: Any, /, **command: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(f"run {command['first']}")
        self.patience_s = patience_s
        answers = self.say.get(command["first"], steps)
        async for answer in answers(command):
            if not self.alive:
                raise AttemptError("the process of rank 0 was killed", code="trainer_died")
            yield answer


async def steps(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for step in range(command["first"], command["first"] + command["steps"]):
        await asyncio.sleep(0)
        yield {"step": {"step": step + 1, "loss": 1.0 / (step + 1), "lr": 0.1, "grad_norm": 2.0, "tokens": 8}}
    yield {"staged": {"step": command["first"] + command["steps"]}}
    state = Path(command["directory"])
    state.mkdir(parents=True)
    (state / "manifest.json").write_text(json.dumps(command["manifest"]))
    (state / "model.safetensors").write_bytes(bytes([command["first"]]))
    yield {"done": {"weights": "w"}}


@dataclass
class Store:
    """The objects, and what reaching them is like."""

    place: Path
    refuses: list[Exception] = field(default_factory=list[Exception])
    hold: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])
    fetched: list[str] = field(default_factory=list[str])

    def path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        (self.place / name[:2]).mkdir(parents=True, exist_ok=True)
        return self.place / name[:2] / name


REPORT = Report(dict.fromkeys(FAULTS, "error")).to_json()


class Context:
    def __init__(self, store: Store, scratch: Path, seq: int) -> None:
        self.store, self.scratch, self.seq = store, scratch, seq
        scratch.mkdir()
        self.notes: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self.stepped = asyncio.Event()  # to the end of the segment
        self.hindrances: list[str] = []

    def progress(self, note: str, **figures: Any) -> None:
        self.notes.append(note)
        if figures:
            self.figures.append(figures)
            if len(self.figures) == 10:
                self.stepped.set()

    def hindered(self, message: str, *, code: str = "") -> None:
        if message or self.hindrances[-1:] not in ([], [""]):
            self.hindrances.append(f"{code}: {message}" if message else "")

    async def put_object(self, data: bytes | Path) -> bytes:
        if (hold := self.store.hold.get(self.seq)) is not None:
            await hold.wait()
        if self.store.refuses:
            raise self.store.refuses.pop(0)
        raw = data if isinstance(data, bytes) else data.read_bytes()
        self.store.path(blake3(raw).digest()).write_bytes(raw)
        return blake3(raw).digest()

    async def object_path(self, object_id: bytes) -> Path:
        path = self.store.path(object_id)
        self.store.fetched.append(path.name)
        if not path.exists():
            raise AttemptError(f"there is no object {path.name}", code="not_found", retry=False)
        return path


@dataclass
class World:
    """An executor whose data is prepared, and its chain so far."""

    executor: TrainExecutor
    ranks: Fake
    store: Store
    place: Path
    results: list[Result] = field(default_factory=list[Result])
    contexts: list[Context] = field(default_factory=list[Context])

    def begin(self, seq: int, *, pipelined: bool = False, of: Result | None = None) -> asyncio.Task[Done]:
        """Segment `seq` has ten steps; 0 prepares."""
        segment = Segment("prepare") if seq == 0 else Segment("segment", 10 * (seq - 1), 10)
        before = of or (self.results[-1] if self.results else None)
        data = before.encode() if before is not None and not pipelined else b""
        attempt = Attempt(Key(1, seq), 1, b"i", segment.encode(), DEFAULT_SPEC, RUN, None, data)
        context = Context(self.store, self.place / f"scratch-{len(self.contexts)}", seq)
        self.contexts.append(context)
        return asyncio.create_task(self.executor.run(attempt, context))  # type: ignore[arg-type]

    async def end(self, task: asyncio.Task[Done]) -> Result:
        result = Result.decode((await asyncio.wait_for(task, 20)).data)
        self.results.append(result)
        return result

    def elsewhere(self) -> World:
        """Another worker, with what the chain has come to."""
        world = World(TrainExecutor(), Fake(), self.store, self.place, list(self.results), self.contexts)
        world.executor._run, world.executor._model, world.executor._reference = RUN, ("tiny", None), None  # type: ignore[attr-defined]
        return world


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    ranks = Fake()
    monkeypatch.setattr(train, "Ranks", lambda *_: current[0].ranks)
    monkeypatch.setattr(train, "locate_model", lambda model, context: _later(("tiny", None)))
    monkeypatch.setattr(train, "shared_tree", lambda manifest, context: _later(tmp_path))
    monkeypatch.setattr(train_room, "FIRST_S", 0.0)
    monkeypatch.setattr(train_room, "MOST_S", 0.0)
    found = World(TrainExecutor(), ranks, Store(tmp_path / "objects"), tmp_path)
    current = [found]
    found.use = lambda other: current.__setitem__(0, other)  # type: ignore[attr-defined]
    found.store.path(bytes(32)).write_bytes(b"rows")
    await found.executor.start(RUN, Context(found.store, tmp_path / "start", 0))  # type: ignore[arg-type]
    await found.end(found.begin(0))
    return found


async def _later(value: Any) -> Any:
    return value


async def test_what_it_says_of_itself(world: World) -> None:
    await world.end(world.begin(1))
    await world.end(world.begin(2))
    prepared, first, second = world.contexts
    assert prepared.notes == ["starting the process that trains", "turning the rows into tokens"]
    assert first.notes[:2] == ["loading the model", "step 1/40 is under way"]
    assert [shown["step"] for shown in first.figures + second.figures] == list(range(1, 21)), "each step, as it ends"
    last = second.figures[-1]
    assert last.keys() == {"step", "steps", "loss", "lr", "grad_norm", "tokens_per_s", "eta_s"}
    assert last["steps"] == STEPS and last["loss"] == 0.05 and last["tokens_per_s"] > 0 and last["eta_s"] >= 0
    assert re.match(
        r"step 20/40 · loss 0.0500 · lr 0.1 · grad norm 2 · [\d,]+ tokens/s · ETA ", second.notes[-1] + " · ETA "
    )
    assert len(world.results[-1].metrics) == 10, "what is kept comes with the result"


async def test_an_evaluation_is_said_and_takes_as_long_as_it_takes(world: World) -> None:
    patience: list[float | None] = []

    stopping = stopping_after({}, 5, 0.125, 0, 0.0)[0]

    async def with_evaluation(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in steps(command):
            if "staged" in answer:
                yield {"under_way": "evaluating"}
                patience.append(world.ranks.patience_s())
                after, ends = stopping_after(stopping, 10, 0.25, 0, 0.0)
                yield {"evaluation": {"step": 10, "loss": 0.25}, "stopping": after, "ends": ends}
                patience.append(world.ranks.patience_s())
                yield {"under_way": ""}
                patience.append(world.ranks.patience_s())
            yield answer | {"speed": {"tokens_per_second": 8.0, "mfu": 0.41}} if "step" in answer else answer

    world.ranks.say = {0: with_evaluation}
    result = await world.end(world.begin(1))
    assert patience == [None, train.HUNG_S, None], "only a step may hang"
    assert result.evaluations == [{"step": 10, "loss": 0.25}]
    context = world.contexts[-1]
    assert context.figures[-1]["mfu"] == 0.41 and " · MFU 41% · " in context.notes[-2] + " · "
    assert context.notes[-2].startswith("step 10/40 · ") and context.notes[-2].endswith(" · evaluating")
    assert " · eval loss 0.2500 (best 0.1250 at step 5) · " in context.notes[-1]
    shown = {"eval_step": 10, "eval_loss": 0.25, "best_eval_step": 5, "best_eval_loss": 0.125}
    assert shown.items() <= context.figures[-1].items()
    await world.end(world.begin(2))
    assert shown.items() <= world.contexts[-1].figures[0].items(), "until there is another"


async def test_results_are_told_in_their_order_and_steps_do_not_wait_for_the_store(world: World) -> None:
    world.store.hold[1] = asyncio.Event()
    first, second = world.begin(1), world.begin(2, pipelined=True)
    await asyncio.sleep(0.01)
    await asyncio.wait_for(world.contexts[-1].stepped.wait(), 20)
    await asyncio.sleep(0.1)
    assert not first.done() and not second.done()
    world.store.hold[1].set()
    ended: list[int] = []
    first.add_done_callback(lambda _: ended.append(1))
    second.add_done_callback(lambda _: ended.append(2))
    await asyncio.gather(first, second)
    assert ended == [1, 2] and world.ranks.asked.count("build") == 1


async def test_what_follows_a_snapshot_that_cannot_be_stored_is_thrown_away_with_it(world: World) -> None:
    """Its steps are done meanwhile, and its own snapshot finds a store that works again."""
    world.store.hold = {1: asyncio.Event(), 2: asyncio.Event()}
    first, second = world.begin(1), world.begin(2, pipelined=True)
    await asyncio.sleep(0.01)
    await asyncio.wait_for(world.contexts[-1].stepped.wait(), 20)
    world.store.refuses = [AttemptError("the store lost the connection", code="store_lost")]
    world.store.hold[1].set()
    with pytest.raises(AttemptError, match="lost the connection"):
        await first
    world.store.hold[2].set()
    early = Result.decode((await second).data)  # which nobody commits: what it stands on is not in the ledger
    assert not world.ranks.alive, "the state after segment 2 is gone, too"
    assert (await world.end(world.begin(1))).step == 10
    before = len(world.ranks.asked)
    assert await world.end(world.begin(2)) == early
    assert world.ranks.asked[before:] == ["run 10"], "from where it stands, and once"


async def test_a_segment_that_fails_harms_the_one_before_in_nothing(world: World) -> None:
    async def explodes(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"step": {"step": 11, "loss": 9.0, "lr": 1.0, "grad_norm": 2.0, "tokens": 8}}
        raise AttemptError("the loss is nan at step 12, ...", code="loss_not_finite", retry=False)

    written = asyncio.Event()

    async def slowly(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in steps(command):
            if "done" in answer:
                await written.wait()
            yield answer

    world.ranks.say = {0: slowly, 10: explodes}
    first, second = world.begin(1), world.begin(2, pipelined=True)
    await asyncio.sleep(0.1)
    assert world.ranks.alive and not second.done(), "the state of the first is being written by these processes"
    written.set()
    assert (await world.end(first)).snapshot
    with pytest.raises(AttemptError, match="nan at step 12") as failed:
        await second
    assert (failed.value.error_code, failed.value.retry) == ("loss_not_finite", False)
    assert [line["step"] for line in Result.decode(failed.value.data).metrics] == [11], "evidence of what it saw"
    assert not world.ranks.alive, "what it left is thrown away"


async def test_a_full_disk_or_store_is_waited_for_and_nothing_is_done_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in steps(command):
            if "done" in answer:
                yield {"full": "No space left on device (os error 28)"}
            yield answer

    tries: list[int] = []

    def packs(directory: Path, target: Path) -> Packed:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pack(directory, target)

    world.ranks.say = {0: full}
    world.store.refuses = [
        AttemptError("the object store has 3 MiB free", code="storage_full"),
        AttemptError("nobody leads at present", code="unavailable"),
    ]
    monkeypatch.setattr(train, "pack", packs)
    await world.end(world.begin(1))
    told = world.contexts[-1].hindrances
    assert [one.partition(":")[0] for one in told] == [
        "disk_full", "", "disk_full", "disk_full", "", "disk_full", "store_unavailable", ""
    ]  # fmt: skip
    assert "the snapshot of step 10 cannot be stored: the object store has 3 MiB free; the run keeps" in told[5]
    assert world.ranks.asked.count("run 0") == 1


async def test_another_kind_of_host_is_refused_with_what_differs_unless_it_is_allowed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.end(world.begin(1))
    other = world.elsewhere()
    other.ranks.fingerprint = FINGERPRINT | {"device": "cpu x86_64 AVX2"}
    world.use(other)  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(UnsuitableError, match=r"\(device 'cpu x86_64 AVX512' -> 'cpu x86_64 AVX2'\)") as refused:
            await other.begin(2)
        assert (refused.value.error_code, refused.value.retry) == ("different_hardware", False)
    assert other.ranks.asked.count("build") == 1, "that it differs is known"
    monkeypatch.setitem(CONFIG, "run", {"allow_different_hardware": True})
    assert (await other.end(other.begin(2))).fingerprint["device"] == "cpu x86_64 AVX2"


async def test_a_damaged_copy_is_fetched_anew_and_a_snapshot_that_is_gone_is_named(world: World) -> None:
    first = await world.end(world.begin(1))
    path = world.store.path(bytes.fromhex(first.snapshot))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    other = world.elsewhere()
    world.use(other)  # type: ignore[attr-defined]
    with pytest.raises(UnsuitableError, match=f"snapshot {first.snapshot[:12]} of step 10 cannot be had") as gone:
        await other.begin(2)  # this store does not have it a second time
    assert (gone.value.error_code, gone.value.retry) == ("object_missing", False)
    path.write_bytes(good)
    await other.end(other.begin(2))
    assert "restoring the state of step 10" in world.contexts[-1].notes


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("algorithm", "dpo", "does not fit this run: algorithm 'dpo' instead of 'sft'"),
        ("model", "other", "does not fit this run: model 'other' instead of 'm'"),
        ("format", 2, "has format 2, and this program reads 1"),
        ("kind", "buffer", "is a snapshot of kind 'buffer'"),
    ],
)
async def test_a_snapshot_of_something_else_is_refused(world: World, key: str, value: Any, says: str) -> None:
    first = await world.end(world.begin(1))
    state = world.place / "forged"
    state.mkdir()
    manifest = {"format": 1, "kind": "train_state", "algorithm": "sft", "model": "m", "fingerprint": FINGERPRINT}
    (state / "manifest.json").write_text(json.dumps(manifest | {key: value}))
    pack(state, world.place / "forged.tar")
    raw = (world.place / "forged.tar").read_bytes()
    first.snapshot = blake3(raw).hexdigest()
    world.store.path(blake3(raw).digest()).write_bytes(raw)
    other = world.elsewhere()
    world.use(other)  # type: ignore[attr-defined]
    with pytest.raises(AttemptError, match=says) as refused:
        await other.begin(2, of=first)
    assert (refused.value.error_code, refused.value.retry) == ("snapshot_mismatch", False)


async def test_snapshots_that_the_run_began_with_are_kept_as_long_as_it_is(world: World) -> None:
    tables = {"model": {"uri": "run:a", "snapshot": "aa" * 32}, "reference_model": {"uri": "tiny", "snapshot": ""}}
    started = {"start": {"uri": "run:a", "snapshot": "bb" * 32}}
    for config, names in ((tables, ["aa"]), ({**tables, **started}, ["bb", "aa"])):
        other = world.elsewhere()
        other.results.clear()
        world.use(other)  # type: ignore[attr-defined]
        other.executor._run = replace(RUN, config={**CONFIG, **config})  # type: ignore[attr-defined]
        done = await asyncio.wait_for(other.begin(0), 20)
        assert [one.hex()[:2] for one in done.keeps[1:]] == names, "behind the tokens"


async def test_what_does_not_start_on_a_worker_costs_no_attempt(world: World) -> None:
    world.ranks.fails = {"build": AttemptError("lora needs peft", code="package_missing", retry=False)}
    with pytest.raises(UnsuitableError, match="lora needs peft"):
        await world.begin(1)


@pytest.mark.parametrize("which", ["model", "reference_model"])
async def test_a_model_that_changes_while_the_run_goes_on_is_never_trained(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / which
    directory.mkdir()
    weights = directory / "model.safetensors"
    weights.write_bytes(b"old")
    named = {"uri": str(directory), "local": True, "path": str(directory), "tree": tree_digest(directory)[0].hex()}
    monkeypatch.setitem(CONFIG, which, CONFIG["model"] | named | {"manifest": None})
    monkeypatch.setattr(train, "locate_model", trees.locate_model)
    await world.executor._locate(RUN, world.contexts[0])  # type: ignore[arg-type]

    async def refused(seq: int) -> None:
        with pytest.raises(UnsuitableError, match=f"the files in {directory} changed since the run began") as error:
            await world.begin(seq)
        assert (error.value.error_code, error.value.retry) == ("model_changed", False)
        assert not world.ranks.alive, "what has read it is thrown away"

    def change() -> None:
        weights.write_bytes(b"other")

    for operation, seq in (("prepare", 0), ("build", 1)):
        world.ranks.during = {operation: change}
        await refused(seq)
        weights.write_bytes(b"old")
    world.ranks.during, world.ranks.fails = {"build": change}, {"build": AttemptError("cut off", code="model_invalid")}
    await refused(1)  # the change is why it failed
    weights.write_bytes(b"old")
    world.ranks.fails.clear()
    await world.end(world.begin(1))
    await world.executor._throw_away()  # type: ignore[attr-defined] # as after a process that was killed
    change()
    done = len(world.ranks.asked)
    await refused(2)
    assert "build" not in world.ranks.asked[done:]
    # What the run's client put into the store is used in its place.
    monkeypatch.setitem(CONFIG[which], "manifest", "00" * 32)
    monkeypatch.setattr(trees, "shared_tree", lambda manifest, context: _later(tmp_path / "uploaded"))
    await world.end(world.begin(2))
    assert world.ranks.built[which.removesuffix("_model")] == str(tmp_path / "uploaded")


async def test_nothing_comes_after_a_segment_that_failed(world: World) -> None:
    await world.end(world.begin(1))
    with pytest.raises(AttemptError, match="ended at step 10; go on from there with `rollout train fork`") as refused:
        await world.begin(3)
    assert not refused.value.retry


async def test_a_segment_that_waits_for_its_turn_is_given_back_and_never_begins(world: World) -> None:
    """On pause and drain; the one that trains stays."""
    go = asyncio.Event()

    async def slowly(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        await go.wait()
        async for answer in steps(command):
            yield answer

    world.ranks.say = {0: slowly}
    first, second = world.begin(1), world.begin(2, pipelined=True)
    await asyncio.sleep(0.05)
    assert world.executor.take_back([Key(1, 1), Key(1, 2)]) == [Key(1, 2)]
    go.set()
    await world.end(first)
    await asyncio.sleep(0.05)
    assert not second.done() and "run 10" not in world.ranks.asked
    second.cancel()
    await asyncio.wait([second])
    await world.end(world.begin(2))
    assert world.ranks.asked.count("build") == 1, "it stands where it stood"


async def test_after_an_early_stop_the_rest_is_skipped_there_and_elsewhere(world: World) -> None:
    """In the middle of a segment, behind which others already wait."""
    told: list[Any] = []

    async def stops(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        told.append(command["stopping"])
        stopping, ends = stopping_after(command["stopping"], 14, 0.5, 1, 0.0)
        async for answer in steps(command | {"steps": 4}):
            if "staged" in answer:
                yield {"evaluation": {"step": 14, "loss": 0.5}, "stopping": stopping, "ends": ends}
            yield answer

    world.ranks.say = {10: stops}
    before = await world.end(world.begin(1))
    before.stopping = stopping_after({}, 4, 0.25, 1, 0.0)[0]
    tasks = [world.begin(2, of=before), *(world.begin(seq, pipelined=True) for seq in (3, 4))]
    second = await world.end(tasks[0])
    assert told == [before.stopping] and (second.step, second.stopped, second.is_last) == (14, True, True)
    assert [line["step"] for line in second.metrics] == [11, 12, 13, 14] and second.snapshot
    assert [(await task).outcome for task in tasks[1:]] == [Outcome.SKIPPED, Outcome.SKIPPED]
    assert (await world.elsewhere().begin(3, of=second)).outcome is Outcome.SKIPPED


async def test_segments_beyond_the_end_are_skipped(world: World) -> None:
    """There are more than steps where rows were dropped or packed."""

    async def ends(command: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for answer in steps(command | {"steps": 6}):
            yield answer

    world.ranks.say, world.ranks.steps = {0: ends}, 6
    tasks = [world.begin(1), *(world.begin(seq, pipelined=True) for seq in (2, 3))]
    assert (await world.end(tasks[0])).step == 6
    assert [(await task).outcome for task in tasks[1:]] == [Outcome.SKIPPED, Outcome.SKIPPED]


def test_a_rank_that_the_kernel_ended_for_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(1, 1, {}, "4 rows of at most 64 tokens")
    ranks._processes = [SimpleNamespace(code=-signal.SIGKILL)]  # type: ignore[list-item]
    monkeypatch.setattr(train_ranks, "_oom_kills", lambda: 0)
    assert ranks._died().error_code == "trainer_died"
    monkeypatch.setattr(train_ranks, "_oom_kills", lambda: 1)
    died = ranks._died()
    assert died.error_code == "out_of_memory"
    assert "minibatches of 4 rows of at most 64 tokens: lower minibatch_size" in died.message


async def test_a_rank_that_dies_while_samples_are_drawn_is_noticed_at_once() -> None:
    ranks, cancelled = Ranks(1, 1, {}), asyncio.Event()

    async def drawing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    await ranks.start()
    try:
        assert await ranks.meanwhile(asyncio.sleep(0, 5)) == 5
        ranks._processes[0].kill()
        with pytest.raises(AttemptError) as died:
            await ranks.meanwhile(drawing())
        assert died.value.error_code == "trainer_died" and died.value.retry and cancelled.is_set()
    finally:
        await ranks.close()


async def test_a_rank_that_died_before_a_command_is_noticed_at_once() -> None:
    """It may die between two segments, after the second has found it alive."""
    ranks = Ranks(1, 1, {})
    await ranks.start()
    try:
        ranks._processes[0].kill()
        assert ranks._reading is not None
        await ranks._reading
        with pytest.raises(AttemptError) as died:
            await asyncio.wait_for(ranks.result(op="run"), 60)
        assert died.value.error_code == "trainer_died" and died.value.retry
    finally:
        await ranks.close()


async def test_a_rank_that_hangs_is_given_up() -> None:
    with pytest.raises(AttemptError, match="said nothing for 0 s") as hung:
        await train_ranks._within(0.01, asyncio.Queue())
    assert hung.value.error_code == "trainer_hung" and hung.value.retry


@pytest.mark.parametrize(
    ("error", "memory", "full"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:125] . DefaultCPUAllocator: can't allocate memory"), True, False),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"), True, False),
        (MemoryError(), True, False),
        (ValueError("rows about out of memory"), False, False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False, True),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
    ],
)
def test_errors_of_libraries_that_have_a_remedy_are_known(error: Exception, memory: bool, full: bool) -> None:
    assert (ran_out_of_memory(error), is_full(error)) == (memory, full)
