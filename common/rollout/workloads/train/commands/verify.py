"""Executes segments of a training run again and compares the results with the committed ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

from blake3 import blake3

from rollout.client.runs import Runs, from_seq, new_ulid
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import short
from rollout.model.item import Failure, ItemSpec, NewItem, Outcome
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.port import ABOUT
from rollout.workloads.train.commands.snapshots import TrainingRun
from rollout.workloads.train.segment import Result, Segment, decode_results, timeless

DIFFERENT_HARDWARE = "different_hardware"
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Committed:
    """A segment in the ledger. `number` counts from 1. `worker` is the incarnation that made it."""

    number: int
    first: int
    steps: int
    result: Result
    worker: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive segments to execute one after the other, starting from `before`, which is kept."""

    before: Result
    segments: tuple[Committed, ...]

    def payload(self) -> bytes:
        through = [[one.first, one.steps] for one in self.segments]
        first, steps = through[0][0], sum(steps for _, steps in through)
        return Segment("verify", first, steps, asdict(self.before), through).encode()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a segment. `differs` names parts of the snapshot, `metrics` or `evaluations`; it is empty if all
    are equal. `failure` says why the segment could not be executed."""

    segment: Committed
    found: Result | None
    worker: str
    differs: tuple[str, ...]
    failure: Failure | None = None

    @property
    def same(self) -> bool:
        return self.found is not None and not self.differs


def stretches(run: TrainingRun, kept: set[int], wanted: int | None) -> list[Stretch]:
    """Return what to execute for every segment, or for the one with the number `wanted`; 0 is the last.

    A stretch begins at a kept snapshot (`kept` has seqs) or at the base model, and reaches to the next one. Raises
    NotFoundError.
    """
    prepared, segments = run.prepared(), run.segments()
    who = f"run {short(run.run_id)}"
    if prepared is None or not segments:
        raise NotFoundError(f"{who} has no committed segment yet: there is nothing to verify")
    numbers = [entry.seq for entry, _, _ in segments]
    until = wanted or numbers[-1]
    if until not in numbers:
        raise NotFoundError(f"{who} has no segment {until}: it has {numbers[0]} to {numbers[-1]}")
    found: list[tuple[Result, list[Committed]]] = []
    before = prepared
    for entry, segment, result in segments:
        if not found or entry.seq - 1 in kept:
            begun = segment.begins_with(before) or before
            # A stretch is executed on what gave the bytes that it is compared with.
            found.append((_without_metrics(replace(begun, fingerprint=result.fingerprint)), []))
        steps = result.step - segment.first
        found[-1][1].append(Committed(entry.seq, segment.first, steps, result, entry.worker))
        before = result
    whole = [Stretch(begun, tuple(ones)) for begun, ones in found]
    if wanted is None:
        return whole
    (only,) = [one for one in whole if one.segments[0].number <= until <= one.segments[-1].number]
    return [replace(only, segments=tuple(one for one in only.segments if one.number <= until))]


def _without_metrics(result: Result) -> Result:
    return replace(result, metrics=[], evaluations=[], report={}, parts={}, stopped=False)


def differences(committed: Result, found: Result) -> tuple[str, ...]:
    """Return which parts of a segment differ from the committed ones."""
    same_hardware = committed.fingerprint == found.fingerprint  # else the manifest, which names it, differs too
    names = sorted(committed.parts.keys() | found.parts.keys())
    parts = [name for name in names if committed.parts.get(name) != found.parts.get(name)]
    if not same_hardware:
        parts = [name for name in parts if name != "manifest"]
    elif committed.snapshot != found.snapshot and not parts:
        parts.append("archive")
    if committed.weights != found.weights and "weights" not in parts:
        parts.append("weights")
    if _timeless(committed.metrics) != _timeless(found.metrics):
        parts.append("metrics")
    if _timeless(committed.evaluations) != _timeless(found.evaluations):
        parts.append("evaluations")
    if committed.samples != found.samples:
        parts.append("samples")
    return tuple(parts)


def _timeless(lines: Sequence[JsonObject]) -> list[JsonObject]:
    return [timeless(line) for line in lines]


class Verification:
    """A verification, which is a run with an item for each stretch. Call `open`, then `verdicts`."""

    def __init__(self, client: Runs, run: TrainingRun, work: list[Stretch], *, allow_different_hardware: bool) -> None:
        self.run_id = new_ulid()
        self._client = client
        self._work = work
        allowed = run.config["run"] | {"allow_different_hardware": allow_different_hardware}
        more = {ABOUT: run.run_id, "run": allowed}
        self._spec = RunSpec(
            run_id=self.run_id,
            workload="train",
            config=canonical(run.config | more),
            name=f"verify {run.status.spec.name}",
        )

    async def open(self) -> None:
        """Open the run, which keeps its objects from now on. Raises NotFoundError if one is already gone."""
        await self._client.open(self._spec)
        needed = {one.before.snapshot: one for one in self._work if one.before.snapshot}
        for one in self._work:
            needed |= {data["object"]: one for data in one.before.data.values() if isinstance(data, dict)}
        async with self._client.objects(self.run_id) as objects:
            there = await objects.has([bytes.fromhex(name) for name in needed])
        for (name, one), has in zip(needed.items(), there, strict=True):
            if not has:
                number = one.segments[0].number
                raise NotFoundError(f"object {name[:12]}, with which segment {number} begins, was let go meanwhile")

    async def verdicts(self) -> AsyncGenerator[list[Verdict] | pb.RunStatus, None]:
        """Yield the verdicts of each stretch in order, and from time to time the state of the run."""
        spec = ItemSpec(max_attempts=_ATTEMPTS)
        payloads = [one.payload() for one in self._work]
        items = [NewItem(blake3(self.run_id.encode() + one).digest(), one, spec) for one in payloads]
        await self._client.submit(self._spec, from_seq(items))
        left = dict(enumerate(self._work))
        async with aclosing(self._client.watch(self.run_id, payloads=True)) as pages:
            async for page in pages:
                for entry in page.entries:
                    stretch = left.pop(entry.seq)
                    if entry.outcome is Outcome.DONE:
                        yield _verdicts(stretch, decode_results(entry.data), entry.worker)
                    else:
                        failure = entry.failure or Failure("cancelled", "the verification was ended")
                        yield _not_executed(stretch, entry.worker, failure)
                if page.status is not None:
                    yield page.status
                    if page.status.state in ("failed", "killed"):  # no worker could, or a person ended it
                        for stretch in left.values():
                            yield _not_executed(stretch, "", _why(page.status))
                        return

    async def end(self) -> None:
        """End the run, so that nothing of it is executed any more."""
        await self._client.command(self.run_id, "kill", reason="the command that verifies was ended", own=True)


def _why(status: pb.RunStatus) -> Failure:
    if status.causes:
        return Failure(status.causes[0].code, status.causes[0].message)
    return Failure(status.state, status.reason)


def _not_executed(stretch: Stretch, worker: str, failure: Failure) -> list[Verdict]:
    return [Verdict(one, None, worker, (), failure) for one in stretch.segments]


def _verdicts(stretch: Stretch, found: list[Result], worker: str) -> list[Verdict]:
    """Return the verdicts on a stretch. Raises ConfigError if a worker of another version did something else."""
    if len(found) != len(stretch.segments):
        raise ConfigError("a worker answered with another number of segments: it has another version of this program")
    return [
        Verdict(one, again, worker, differences(one.result, again))
        for one, again in zip(stretch.segments, found, strict=True)
    ]
