"""The executor of the `train` workload: segments of a training run, one after the other, from snapshot to snapshot.

It owns no step counter: an item says where its segment begins, and the state either stands there already, since the
segment before ran here, or comes from the snapshot that the segment before left. A state whose segment failed or was
taken away is thrown away with the processes that held it.

Two attempts are taken at once: while the snapshot of one is written and stored, the steps of the next run.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, ObjectCorruptError
from rollout.model.item import Outcome
from rollout.snapshots.parts import FORMAT, parts_of, read_manifest
from rollout.snapshots.tar import Packed, pack, unpack
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.segment import Result, Segment, encode_results, stopping_after

from rollout_worker.backends.training.determinism import environment
from rollout_worker.executors.port import Attempt, Context, Done, Run
from rollout_worker.executors.train_ranks import Ranks
from rollout_worker.executors.trees import locate_model, shared_tree

_log = structlog.get_logger()


@dataclass(slots=True)
class State:
    """Where this run stands: after the item that left `result`, whose snapshot may still be on its way. `built`: the
    processes hold the state."""

    step: int
    result: Result
    built: bool = True


class TrainExecutor:
    placement: ClassVar[Literal["engine", "slot"]] = "engine"
    concurrency = 2

    def __init__(self) -> None:
        self._run: Run | None = None
        self._ranks: Ranks | None = None
        self._built: JsonObject = {}
        self._state: State | None = None
        self._turn = asyncio.Lock()

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """A run has its processes to itself: they hold its state."""
        return blake3(run.run_id.encode()).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        local = bool(run.config["model"].get("local"))
        return {"HF_HUB_OFFLINE": "1"} if local else {}

    @classmethod
    def devices(cls, run: Run) -> int:
        settings = _settings(run)
        return 0 if settings.get("device") == "cpu" else int(settings["devices"])

    async def start(self, run: Run, context: Context) -> None:
        self._run = run
        self._model = await locate_model(run.config["model"], context)
        reference = run.config.get("reference_model")
        self._reference = await locate_model(reference, context) if reference else None
        await self._start_ranks()

    async def close(self) -> None:
        await self._throw_away()

    async def run(self, attempt: Attempt, context: Context) -> Done:
        segment = Segment.decode(attempt.payload)
        async with self._turn:
            try:
                if segment.op == "prepare":
                    return await self._prepare(context)
                if segment.op == "verify":
                    return await self._verify(segment, context)
                result, directory, writing = await self._train(segment, attempt, context)
            except BaseException:
                await self._throw_away()
                raise
        if writing is None:
            return Done(result.encode(), outcome=Outcome.SKIPPED)
        try:
            return await self._store(segment, result, directory, writing, context)
        except BaseException:
            # The next segment may have begun on what this one leaves: it is dropped with it.
            await self._throw_away()
            raise

    # ---- data

    async def _prepare(self, context: Context) -> Done:
        assert self._run is not None
        if self._ranks is None:
            await self._start_ranks()
        assert self._ranks is not None
        config = self._run.config
        given = {
            name: await self._files(config[name], context) for name in ("dataset", "eval_dataset") if config.get(name)
        }
        directory = context.scratch / "tokens"
        directory.mkdir()
        done = await self._ranks.result(
            op="prepare", kind=_kind(self._run), settings=_settings(self._run), datasets=given,
            directory=str(directory), tokenizer=self._model[1] or self._model[0],
        )  # fmt: skip
        data: JsonObject = {"pad": done["pad"]}
        report: JsonObject = {}
        for name, one in done["datasets"].items():
            object_id = await context.put_object(Path(one["path"]))
            data[name] = {"object": object_id.hex(), "units": one["units"]}
            report[name] = one["report"]
        named = [one["object"] for one in data.values() if isinstance(one, dict)]
        if start := config.get("start"):
            named.append(start["snapshot"])  # a segment that is begun again needs it
        keeps = tuple(bytes.fromhex(one) for one in named)
        result = Result(data=data, report=report)
        self._state = State(0, result, built=False)
        return Done(result.encode(), keeps=keeps)

    async def _files(self, dataset: JsonObject, context: Context) -> JsonObject:
        tree = await shared_tree(bytes.fromhex(dataset["manifest"]), context)
        return {"kind": dataset["kind"], "paths": [str(tree / name) for name in dataset["files"]]}

    # ---- steps

    async def _train(
        self, segment: Segment, attempt: Attempt, context: Context
    ) -> tuple[Result, Path, asyncio.Task[JsonObject] | None]:
        """The result so far, where the state is being written, and when it is; None: there was nothing to do."""
        here = self._state
        if attempt.predecessor:
            before = segment.begins_with(Result.decode(attempt.predecessor))
        else:
            stands = 0 if segment.before else segment.first  # behind the item before it, which may be the first one
            before = segment.begins_with(here.result if here is not None and here.step == stands else None)
        if before is None:
            raise AttemptError("what the segment before leaves is not here", code="state_elsewhere")
        if before.stopped or (before.steps and segment.first >= before.steps):
            return replace(before, stopped=True, metrics=[], evaluations=[]), Path(), None
        if before.step != segment.first:
            raise AttemptError(
                f"the segment before ended at step {before.step}, and this one begins at {segment.first}",
                code="segment_missing",
                retry=False,
            )
        if here is None or not here.built or here.step != segment.first:
            await self._stand_at(before, context)
        self._state = None
        return await self._steps(segment, before, context)

    async def _stand_at(self, before: Result, context: Context) -> None:
        """The processes, with the state that `before` left."""
        assert self._run is not None
        if self._ranks is None or self._built:
            await self._throw_away()
            await self._start_ranks()
        assert self._ranks is not None
        data, evaluation = before.data["dataset"], before.data.get("eval_dataset")
        self._built = await self._ranks.result(
            op="build", kind=_kind(self._run), settings=_settings(self._run), model=self._model[0],
            reference=self._reference[0] if self._reference else None, pad=before.data["pad"],
            data=str(await context.object_path(bytes.fromhex(data["object"]))),
            eval_data=str(await context.object_path(bytes.fromhex(evaluation["object"]))) if evaluation else None,
        )  # fmt: skip
        self._same_hardware(before)
        if before.snapshot:
            directory = context.scratch / "restored"
            expected = bytes.fromhex(before.snapshot)
            source = await context.object_path(expected)
            try:
                await asyncio.to_thread(unpack, source, directory, expected)
                await asyncio.to_thread(self._check, directory)
            except ObjectCorruptError as error:
                raise AttemptError(error.message, code="snapshot_corrupt") from error
            await self._ranks.result(op="restore", directory=str(directory))
            await asyncio.to_thread(shutil.rmtree, directory)

    def _check(self, directory: Path) -> None:
        """ObjectCorruptError: what was unpacked is no state of this training, which no name of an object says."""
        assert self._run is not None
        manifest = read_manifest(directory, "train_state")
        for what, mine in (("algorithm", _kind(self._run)), ("model", self._run.config["model"]["content_id"])):
            if manifest[what] != mine:
                raise ObjectCorruptError(f"the snapshot's {what} is {manifest[what]}, and the run's is {mine}")

    def _same_hardware(self, before: Result) -> None:
        assert self._run is not None
        old, new = before.fingerprint, self._built["fingerprint"]
        if not old or old == new or self._run.config.get("allow_different_hardware"):
            return
        changed = "; ".join(
            f"{key}: {old.get(key)} -> {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)
        )
        raise AttemptError(
            f"this worker would not give the same bytes as the one before ({changed}): run it on the same kind of "
            "host, or say --allow-different-hardware",
            code="different_hardware",
        )

    async def _steps(
        self, segment: Segment, before: Result, context: Context
    ) -> tuple[Result, Path, asyncio.Task[JsonObject]]:
        assert self._run is not None and self._ranks is not None
        config = self._run.config
        result = replace(
            before, steps=self._built["steps"], metrics=[], evaluations=[], report={}, snapshot="", size=0, weights="",
            fingerprint=self._built["fingerprint"], algorithm=_kind(self._run), parts={},
            model={"parameters": self._built["parameters"], "trained": self._built["trained"]},
        )  # fmt: skip
        section = _settings(self._run)["eval"]
        manifest = {
            "format": FORMAT, "kind": "train_state", "algorithm": _kind(self._run),
            "settings": blake3(canonical(config["algorithm"])).hexdigest(),
            "model": config["model"]["content_id"], "data": before.data, "fingerprint": result.fingerprint,
        }  # fmt: skip
        directory = context.scratch / "state"
        staged: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def follow() -> JsonObject:
            done: JsonObject = {}
            try:
                async for answer in self._ranks.command(  # type: ignore[union-attr]
                    op="run", first=segment.first, steps=segment.steps, directory=str(directory), manifest=manifest
                ):
                    done = answer.get("done", done)
                    if "step" in answer:
                        result.metrics.append(answer["step"])
                        context.progress(_line(answer["step"], result.steps))
                    elif "evaluation" in answer:
                        result.evaluations.append(answer["evaluation"])
                        result.stopping, stop = stopping_after(
                            result.stopping, answer["evaluation"]["loss"], section["patience"], section["min_delta"]
                        )
                        result.stopped = result.stopped or stop
                    elif "staged" in answer:
                        staged.set_result(int(answer["staged"]["step"]))
            except BaseException as error:
                if not staged.done():
                    staged.set_exception(error)
                    staged.exception()  # whoever waits sees it; nobody has to
                raise
            return done

        writing = asyncio.create_task(follow())
        try:
            result.step = await asyncio.shield(staged)
        except BaseException:
            writing.cancel()
            await asyncio.wait([writing])
            raise
        self._state = State(result.step, result)
        return result, directory, writing

    async def _store(
        self, segment: Segment, result: Result, directory: Path, writing: asyncio.Task[JsonObject], context: Context
    ) -> Done:
        try:
            done = await asyncio.shield(writing)
        except BaseException:
            writing.cancel()
            raise
        archive = context.scratch / "state.tar"
        packed = await asyncio.to_thread(pack, directory, archive)
        final = self._final(result, packed, done)
        stored = await context.put_object(archive)
        if stored != packed.id:
            raise AttemptError("the snapshot changed while it was stored", code="object_corrupt")
        result.snapshot = final.snapshot
        return Done(final.encode(), units_out=_tokens(final), keeps=(packed.id,))

    def _final(self, result: Result, packed: Packed, done: JsonObject) -> Result:
        """What the ledger gets to know of a segment whose state is packed."""
        assert self._run is not None
        label = self._run.config["snapshots"]["label"] if result.is_last else ""
        return replace(
            result, snapshot=packed.id.hex(), size=packed.size, weights=done["weights"], label=label,
            parts=parts_of(packed.members),
        )  # fmt: skip

    # ---- verifying

    async def _verify(self, segment: Segment, context: Context) -> Done:
        """Segments that another item committed, once more, in processes that have done nothing else. Nothing is kept of
        them but what they come to."""
        before, found = Result(**segment.before), list[Result]()
        self._state = None
        await self._stand_at(before, context)
        directory, archive = context.scratch / "state", context.scratch / "state.tar"
        for first, steps in segment.through:
            result, _, writing = await self._steps(Segment("segment", first, steps), before, context)
            done = await writing
            packed = await asyncio.to_thread(pack, directory, archive)
            await asyncio.to_thread(shutil.rmtree, directory)
            before = self._final(result, packed, done)
            found.append(before)
        self._state = None  # the next one begins with processes of its own
        return Done(encode_results(found), units_out=sum(map(_tokens, found)))

    # ---- processes

    async def _start_ranks(self) -> None:
        assert self._run is not None
        settings = _settings(self._run)
        self._ranks = Ranks(int(settings["devices"]), int(settings["threads"]), environment(int(settings["threads"])))
        await self._ranks.start()

    async def _throw_away(self) -> None:
        self._state, self._built = None, {}
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            await ranks.close()


def _kind(run: Run) -> str:
    return run.config["algorithm"]["kind"]


def _settings(run: Run) -> JsonObject:
    return run.config["algorithm"]["settings"]


def _tokens(result: Result) -> int:
    return sum(int(step["tokens"]) for step in result.metrics)


def _line(metrics: JsonObject, steps: int) -> str:
    loss, rate, norm = metrics["loss"], metrics["lr"], metrics["grad_norm"]
    return f"step {metrics['step']}/{steps} · loss {loss:.4f} · lr {rate:.3g} · grad norm {norm:.3g}"
