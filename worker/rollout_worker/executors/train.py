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
from rollout.snapshots.tar import pack, unpack
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.segment import Result, Segment, stopping_after

from rollout_worker.backends.training.determinism import environment
from rollout_worker.executors.port import Attempt, Context, Done, Run
from rollout_worker.executors.train_ranks import Ranks
from rollout_worker.executors.trees import host_directory, locate_model, shared_tree

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
        cache = host_directory(
            await context.object_path(bytes.fromhex(config["dataset"]["manifest"])), context, "tokens"
        )
        done = await self._ranks.result(
            op="prepare", kind=_kind(self._run), settings=_settings(self._run), datasets=given,
            directory=str(directory), cache=str(cache), model=self._model[0], tokenizer=self._model[1],
        )  # fmt: skip
        data: JsonObject = {"pad": done["pad"]}
        report: JsonObject = {}
        for name, one in done["datasets"].items():
            object_id = await context.put_object(Path(one["path"]))
            data[name] = {"object": object_id.hex(), "units": one["units"]}
            report[name] = one["report"]
        keeps = tuple(bytes.fromhex(one["object"]) for one in data.values() if isinstance(one, dict))
        result = Result(data=data, report=report)
        self._state = State(0, result, built=False)
        return Done(result.encode(), keeps=keeps)

    async def _files(self, dataset: JsonObject, context: Context) -> JsonObject:
        tree = await shared_tree(bytes.fromhex(dataset["manifest"]), context)
        return {**dataset, "root": str(tree)}

    # ---- steps

    async def _train(
        self, segment: Segment, attempt: Attempt, context: Context
    ) -> tuple[Result, Path, asyncio.Task[JsonObject] | None]:
        """The result so far, where the state is being written, and when it is; None: there was nothing to do."""
        before = Result.decode(attempt.predecessor) if attempt.predecessor else None
        here = self._state
        if before is None and not segment.start and not segment.data:
            if here is None or here.step != segment.first:
                raise AttemptError("what the segment before leaves is not here", code="state_elsewhere")
            before = here.result
        before = before or Result(step=segment.first, snapshot=segment.start, data=segment.data)
        if before.stopped or (before.steps and segment.first >= before.steps):
            return replace(before, stopped=True, metrics=[], evaluations=[]), Path(), None
        if before.step != segment.first:
            raise AttemptError(
                f"the segment before ended at step {before.step}, and this one begins at {segment.first}",
                code="segment_missing",
                retry=False,
            )
        if here is None or not here.built or here.step != segment.first or segment.op == "verify":
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
            except ObjectCorruptError as error:
                raise AttemptError(error.message, code="snapshot_corrupt") from error
            await self._ranks.result(op="restore", directory=str(directory))
            await asyncio.to_thread(shutil.rmtree, directory)

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
            fingerprint=self._built["fingerprint"], label=segment.label, algorithm=_kind(self._run),
            model={"parameters": self._built["parameters"], "trained": self._built["trained"]},
        )  # fmt: skip
        section = _settings(self._run)["eval"]
        manifest = {
            "format": 1, "kind": "train_state", "algorithm": _kind(self._run),
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
        object_id, size = await asyncio.to_thread(pack, directory, archive)
        final = replace(result, snapshot=object_id.hex(), size=size, weights=done["weights"])
        tokens = sum(int(step["tokens"]) for step in result.metrics)
        if segment.op == "verify":
            return Done(final.encode(), units_out=tokens)
        stored = await context.put_object(archive)
        if stored != object_id:
            raise AttemptError("the snapshot changed while it was stored", code="object_corrupt")
        result.snapshot = object_id.hex()
        return Done(final.encode(), units_out=tokens, keeps=(object_id,))

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


def _line(metrics: JsonObject, steps: int) -> str:
    loss, rate, norm = metrics["loss"], metrics["lr"], metrics["grad_norm"]
    return f"step {metrics['step']}/{steps} · loss {loss:.4f} · lr {rate:.3g} · grad norm {norm:.3g}"
