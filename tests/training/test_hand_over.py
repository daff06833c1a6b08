"""A segment that is handed over in the middle, once or several times, commits what an undisturbed one does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, HANDED_OVER_MAX, Key
from rollout.workloads.train.segment import Result, Segment, timeless
from rollout_worker.executors import train, train_leaving
from rollout_worker.executors.port import Attempt, Done, HandOverError, Run, UnsuitableError
from rollout_worker.executors.train import TrainExecutor
from rollout_worker.executors.train_ranks import Ranks
from training_jobs import settings_of, tokens
from training_rig import make_small

pytestmark = pytest.mark.timeout(400)

STEPS = 24
Decide = Callable[[train_leaving.Leaving, Path | None, int, float | None], None]


@dataclass
class Context:
    place: Path
    scratch: Path
    notes: list[str] = field(default_factory=list[str])

    def progress(self, note: str, **_: Any) -> None:
        self.notes.append(note)

    def hindered(self, message: str, *, code: str = "") -> None:
        assert not message

    async def put_object(self, data: bytes | Path) -> bytes:
        raw = data if isinstance(data, bytes) else data.read_bytes()
        found = blake3(raw).digest()
        (self.place / found.hex()).write_bytes(raw)
        return found

    async def object_path(self, object_id: bytes) -> Path:
        path = self.place / object_id.hex()
        if not path.exists():
            raise AttemptError("there is no such object", code="not_found", retry=False)
        return path


@dataclass
class Job:
    """One segment of STEPS steps. Each attempt is made by a worker that has seen nothing."""

    run: Run
    before: Result
    place: Path
    attempts: int = 0
    notes: list[str] = field(default_factory=list[str])

    async def attempt(self, handoff: bytes = b"") -> Done:
        self.attempts += 1
        executor = TrainExecutor()
        scratch = self.place / f"scratch-{self.attempts}"
        scratch.mkdir()
        context: Any = Context(self.place / "objects", scratch, self.notes)
        await executor.start(self.run, context)
        attempt = Attempt(
            Key(1, 1), self.attempts, b"i", Segment("segment", 0, STEPS).encode(), DEFAULT_SPEC, self.run, None,
            self.before.encode(), handoff=handoff,
        )  # fmt: skip
        executor.leave(1e6)
        try:
            return await executor.run(attempt, context)
        finally:
            await executor.close()

    async def through_hand_overs(self) -> tuple[Result, list[HandOverError]]:
        """Goes on from each hand-over, as the coordinator has it done."""
        handed: list[HandOverError] = []
        while True:
            try:
                done = await self.attempt(handed[-1].data if handed else b"")
            except HandOverError as error:
                handed.append(error)
            else:
                return Result.decode(done.data), handed


class SharedRanks(Ranks):
    """Processes that outlive an attempt: each builds and restores in them anew, and a start of libraries is saved."""

    running: SharedRanks | None = None

    def __new__(cls, *_: Any) -> SharedRanks:
        return cls.running or super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        if SharedRanks.running is None:
            super().__init__(*arguments)

    async def start(self) -> None:
        if SharedRanks.running is None:
            SharedRanks.running = self
            await super().start()

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        SharedRanks.running = None
        await super().close()


@pytest.fixture
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(train, "Ranks", SharedRanks)
    yield
    if SharedRanks.running is not None:
        await SharedRanks.running.end()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Job:
    model, objects = tmp_path / "model", tmp_path / "objects"
    make_small(model, "0123456789 abcdefghijklmnopqrstuvwxyz,", attention_dropout=0.1)
    objects.mkdir()
    data = tokens("sft", model, tmp_path / "tokens").read_bytes()
    (objects / blake3(data).hexdigest()).write_bytes(data)
    world = getattr(request, "param", 1)
    parallel: dict[str, Any] = {"strategy": "ddp"} if world > 1 else {}
    settings = settings_of("sft", model, budget={"max_steps": STEPS}, disable_dropout=False, devices=world, **parallel)
    config = {
        "model": {"uri": "tiny", "content_id": "m"}, "run": {}, "snapshots": {"label": ""},
        "algorithm": {"kind": "sft", "settings": settings.model_dump(mode="json")},
    }  # fmt: skip

    async def located(*_: Any) -> tuple[str, None]:
        return str(model), None

    monkeypatch.setattr(train, "locate_model", located)
    before = Result(data={"pad": 0, "dataset": {"object": blake3(data).hexdigest(), "units": 9}})
    return Job(Run("01J00000000000000000000000", "train", config), before, tmp_path)


def never(*_: Any) -> None:
    pass


def after(steps: int) -> Decide:
    """Leaves after so many steps of each attempt."""

    def decide(_: train_leaving.Leaving, flag: Path | None, left: int, step_s: float | None) -> None:
        first = decide.__dict__.setdefault(str(flag), left)
        if flag is not None and first - left >= steps:
            flag.touch()

    return decide


def without_times(result: Result) -> dict[str, Any]:
    metrics = [timeless(line) for line in result.metrics]
    return {"metrics": metrics, "rest": {k: getattr(result, k) for k in Result.__slots__ if k != "metrics"}}


@pytest.mark.engine
async def test_a_segment_handed_over_several_times_commits_the_same_bytes(
    job: Job, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await same_bytes(job, monkeypatch)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("job", [1, 2], indirect=True)
async def test_so_does_one_in_fresh_processes_each_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    await same_bytes(job, monkeypatch)


async def same_bytes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_leaving.Leaving, "decide", never)
    whole, none = await job.through_hand_overs()
    assert not none
    monkeypatch.setattr(train_leaving.Leaving, "decide", after(3))
    result, handed = await job.through_hand_overs()
    assert len(handed) >= 2
    assert all(0 < len(one.data) <= HANDED_OVER_MAX and len(one.keeps) == 2 for one in handed)
    assert without_times(result) == without_times(whole)
    assert (result.snapshot, result.weights) == (whole.snapshot, whole.weights)
    assert [line["step"] for line in result.metrics] == list(range(1, STEPS + 1))


@pytest.mark.engine
@pytest.mark.slow
async def test_a_hand_over_that_is_lost_or_of_something_else_is_ignored(
    job: Job, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_leaving.Leaving, "decide", after(3))
    with pytest.raises(HandOverError) as handed:
        await job.attempt()
    segment, context = Segment("segment", 0, STEPS), Context(job.place / "objects", job.place)
    attempt = Attempt(Key(1, 1), 2, b"i", segment.encode(), DEFAULT_SPEC, job.run, handoff=handed.value.data)

    async def taken(before: Result = job.before, **more: Any) -> Result | None:
        for name, value in more.items():
            setattr(attempt, name, value)
        return await train_leaving.taken_over(attempt, segment, before, context)  # type: ignore[arg-type]

    part = await taken()
    assert part is not None and 0 < part.step < STEPS
    assert await taken(Result(data=job.before.data, snapshot="ab" * 32)) is None, "it stood on another state"
    assert await taken(handoff=b"nonsense") is None
    assert await taken(handoff=b"[]") is None
    assert await taken(handoff=handed.value.data) is not None
    monkeypatch.setattr(train_leaving.Leaving, "decide", never)
    whole, _ = await job.through_hand_overs()
    state = job.place / "objects" / part.snapshot
    state.write_bytes(b"damaged")
    result = Result.decode((await job.attempt(handed.value.data)).data)
    assert (result.snapshot, len(result.metrics)) == (whole.snapshot, STEPS)
    for one in handed.value.keeps:
        (job.place / "objects" / one.hex()).unlink(missing_ok=True)
    assert await taken() is None


@pytest.mark.parametrize(
    ("budget_s", "left", "step_s", "store_s", "leaves"),
    [
        (60, 10, 1.0, 5.0, False),  # it ends in time
        (60, 100, 1.0, 5.0, True),
        (60, 100, 1.0, 0.0, True),  # how long it takes to store is not known yet
        (60, 100, None, 0.0, True),  # nor how long a step takes
        (15, 100, 1.0, 30.0, False),  # too little time: it is given back without
        (15, 100, 20.0, 1.0, False),
    ],
)
def test_it_is_handed_over_where_there_is_time_and_not_enough_to_end(
    tmp_path: Path, budget_s: float, left: int, step_s: float | None, store_s: float, leaves: bool
) -> None:
    leaving, flag = train_leaving.Leaving(), tmp_path / "leave"
    leaving.stored(store_s)
    leaving.decide(flag, left, step_s)
    assert not flag.exists(), "nobody leaves"
    leaving.begin(budget_s)
    leaving.decide(None, left, step_s)
    leaving.decide(flag, left, step_s)
    assert flag.exists() is leaves


@pytest.mark.engine
async def test_what_cannot_be_handed_over_is_given_back_at_once(
    job: Job, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_leaving.Leaving, "decide", after(3))

    async def refuses(*_: Any) -> bytes:
        raise AttemptError("it is not allowed", code="denied", retry=False)

    monkeypatch.setattr(Context, "put_object", refuses)
    with pytest.raises(UnsuitableError, match="cannot be handed over: it is not allowed"):
        await job.attempt()


async def test_what_may_be_stored_later_is_tried_for_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_leaving, "PAUSE_S", 0.01)
    errors: list[AttemptError] = []

    async def puts() -> bytes:
        if errors:
            raise errors.pop()
        return b"stored"

    leaving = train_leaving.Leaving()
    for budget_s, error, tried in (
        (None, AttemptError("a reset connection"), False),
        (0.0, AttemptError("a reset connection"), False),
        (60.0, AttemptError("it is not allowed", retry=False), False),
        (60.0, AttemptError("a reset connection"), True),
    ):
        if budget_s is not None:
            leaving.begin(budget_s)
        errors[:] = [error, error] if tried else [error]
        if tried:
            assert await leaving.again(puts) == b"stored"
        else:
            with pytest.raises(AttemptError):
                await leaving.again(puts)


async def test_where_a_hand_over_cannot_be_restored_the_state_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a worker that stood at the start of the segment: its processes are thrown away with the failed try."""
    before, stood = Result(), list[int]()

    async def part(*_: Any) -> Result:
        return Result(step=3)

    async def stand_at(_: TrainExecutor, at: Result, context: Any) -> None:
        stood.append(at.step)
        if at.step:
            raise AttemptError("it is damaged")

    async def steps(*_: Any) -> None:
        pass

    monkeypatch.setattr(train, "taken_over", part)
    monkeypatch.setattr(TrainExecutor, "_stand_at", stand_at)
    monkeypatch.setattr(TrainExecutor, "_steps", steps)
    executor, context = TrainExecutor(), Context(tmp_path, tmp_path)
    executor._state = train.State(0, before)
    segment = Segment("segment", 0, STEPS)
    run = Run("R", "train", {})
    attempt = Attempt(Key(1, 1), 2, b"i", segment.encode(), DEFAULT_SPEC, run, None, before.encode())
    await executor._train(segment, attempt, context)  # type: ignore[arg-type]
    assert stood == [3, 0]
