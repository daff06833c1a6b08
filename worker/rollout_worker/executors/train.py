"""Executor of the `train` workload: segments of a training run in sequence, from snapshot to snapshot.

It has no step counter. An item says where its segment begins, and the state is either already there, because the
segment before ran here, or comes from that segment's snapshot. A state whose segment failed or was taken away is
discarded with the processes that held it.

Two attempts are accepted at once: while the snapshot of one is written and stored, the steps of the next run. Their
results are reported in order.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, ObjectCorruptError
from rollout.model.item import Key, Outcome
from rollout.snapshots.parts import FORMAT, parts_of, read_manifest
from rollout.snapshots.tar import Packed, pack, unpack
from rollout.workloads.json_form import JsonObject, canonical, lookup
from rollout.workloads.train.config import SECTIONS
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.prompts import Prompts
from rollout.workloads.train.segment import Result, Segment, encode_results

from rollout_worker.backends.training.determinism import environment
from rollout_worker.executors import train_room
from rollout_worker.executors.port import Attempt, Context, Done, HandOverError, Run, UnsuitableError
from rollout_worker.executors.rollout_scoring import load_code
from rollout_worker.executors.train_leaving import Leaving, encode, is_part, taken_over
from rollout_worker.executors.train_pace import Pace, evaluation_figures, figures, line
from rollout_worker.executors.train_ranks import Ranks
from rollout_worker.executors.train_rollouts import Rollouts, version_files, version_objects, versions_of
from rollout_worker.executors.train_room import with_room
from rollout_worker.executors.trees import changed_directory, host_directory, locate_model, shared_tree

log = structlog.get_logger()

HUNG_S, HUNG_STEPS = 1800.0, 50.0
"""Minimum seconds, and multiple of a step's time, without a step after which hanging processes are killed."""


@dataclass(slots=True)
class Steps:
    """Steps of a segment.

    `before` is what it began with, `result` the result so far. `directory` is where the state is written, and `writing`
    is done when it is. `leave` is the file that ends the steps early.
    """

    segment: Segment
    before: Result
    result: Result
    directory: Path
    leave: Path | None
    writing: asyncio.Task[JsonObject] | None = None
    staged_at: float = 0.0

    @property
    def left(self) -> int:
        return min(self.segment.first + self.segment.steps, self.result.steps) - self.result.step


@dataclass(slots=True)
class State:
    """State of this run: after the item that left `result`, whose snapshot may still be stored. `built` says that the
    processes hold it."""

    step: int
    result: Result
    built: bool = True


class TrainExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "engine"
    concurrency = 1
    ahead = 1

    def __init__(self) -> None:
        self._run: Run | None = None
        self._ranks: Ranks | None = None
        self._judges: list[JsonObject] = []
        self._built: JsonObject = {}
        self._fingerprint: JsonObject = {}  # of what is built here, once it is known
        self._state: State | None = None
        self._pace = Pace()
        self._shown: JsonObject = {}
        self._turn = asyncio.Lock()
        self._waiting: set[Key] = set()
        self._given_back: set[Key] = set()
        self._over = asyncio.Event()  # of the attempt that had the turn last
        self._over.set()
        self._leaving = Leaving()
        self._under_way: Steps | None = None

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return a key per run, because the processes hold its state."""
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
        await self._locate(run, context)

    async def _locate(self, run: Run, context: Context) -> None:
        self._model = await locate_model(run.config["model"], context)
        reference = run.config.get("reference_model")
        self._reference = await locate_model(reference, context) if reference else None
        self._judges = [
            {"name": reward["name"], "weight": reward["weight"], "model": (await locate_model(table, context))[0]}
            for place, table in run.config.get("reward_models", {}).items()
            if (reward := _settings(run)["reward"][int(place)])
        ]

    async def close(self) -> None:
        await self._throw_away()

    def take_back(self, keys: list[Key]) -> list[Key]:
        """Take back and return those that wait for the segment before."""
        found = [key for key in keys if key in self._waiting]
        self._given_back.update(found)
        return found

    def leave(self, budget_s: float) -> None:
        self._leaving.begin(budget_s)
        self._decide()

    def _decide(self) -> None:
        steps = self._under_way
        if steps is not None:
            self._leaving.decide(steps.leave, steps.left, self._pace.step_s)

    async def run(self, attempt: Attempt, context: Context) -> Done:
        over = asyncio.Event()
        try:
            await self._take_turn(attempt.key)
            before, self._over = self._over, over
            try:
                return await self._in_turn(attempt, context, before)
            finally:
                over.set()
        finally:
            self._given_back.discard(attempt.key)

    async def _take_turn(self, key: Key) -> None:
        self._waiting.add(key)
        try:
            await self._turn.acquire()
        finally:
            self._waiting.discard(key)
        if key in self._given_back:
            self._turn.release()
            await asyncio.Event().wait()  # until it is cancelled

    async def _in_turn(self, attempt: Attempt, context: Context, before: asyncio.Event) -> Done:
        """Run an attempt in its turn.

        `before` is set when the result of the segment before is reported. It comes first whatever happens to this one,
        because it may have failed while the processes that hold both states were writing the other.
        """
        segment = Segment.decode(attempt.payload)
        steps: Steps | None = None
        try:
            try:
                if segment.op == "prepare":
                    return await self._prepare(attempt, context)
                if segment.op == "verify":
                    return await self._verify(segment, attempt, context)
                steps = await self._train(segment, attempt, context)
            finally:
                self._turn.release()
            if steps.writing is None:
                done = Done(steps.result.encode(), outcome=Outcome.SKIPPED)
            elif is_part(segment, steps.result):
                raise await self._hand_over(steps, before, context)
            else:
                done = await self._store(steps, context)
            await before.wait()
            return done
        except asyncio.CancelledError:
            await self._throw_away()
            raise
        except BaseException as error:
            if steps is not None:
                _leave_steps(error, steps.result)
            await before.wait()
            # The next segment may have begun on what this one leaves: it is dropped with it.
            await self._throw_away()
            raise

    # ---- data

    async def _prepare(self, attempt: Attempt, context: Context) -> Done:
        assert self._run is not None
        run, config = self._run, self._run.config
        given = {
            name: await self._files(config[name], context) for name in ("dataset", "eval_dataset") if config.get(name)
        }
        directory = context.scratch / "tokens"
        manifest = await self._fetch(bytes.fromhex(config["dataset"]["manifest"]), "the list of rows", context)
        cache = host_directory(manifest, context, "tokens")

        async def prepared() -> JsonObject:
            ranks = await self._running_ranks(context)
            context.progress("turning the rows into tokens")
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            return await ranks.result(
                op="prepare", kind=_kind(run), settings=_settings(run), datasets=given,
                directory=str(directory), cache=str(cache), model=self._model[0], tokenizer=self._model[1],
                reward_models={one["name"]: one["model"] for one in self._judges},
            )  # fmt: skip

        try:
            await load_code(*code_of(_settings(run)), attempt, context)
            done = await with_room(
                "the tokens cannot be written", lambda: self._reading_models(prepared, context), context
            )
        except AttemptError as error:
            if error.error_code in _OF_THE_WORKER:
                raise UnsuitableError(error.message, code=error.error_code, retry=error.retry) from error
            raise
        data: JsonObject = {"pad": done["pad"]}
        report: JsonObject = {}
        for name, one in done["datasets"].items():
            object_id = await self._put(f"the tokens of {name}", Path(one["path"]), context)
            data[name] = {"object": object_id.hex(), "units": one["units"]}
            report[name] = one["report"]
        named = [data[name]["object"] for name in done["datasets"]]
        # A segment that is begun again needs what the run began with, and an adapter is nothing without its base.
        tables: list[JsonObject] = [config.get(key) or {} for key in ("start", "model", "reference_model")]
        tables += config.get("reward_models", {}).values()
        named += [table["snapshot"] for table in tables if table.get("snapshot")]
        beside: list[str] = lookup(config, "start.before.rollouts.objects") or []
        named += beside
        keeps = tuple(bytes.fromhex(one) for one in dict.fromkeys(named))
        result = Result(data=data, report=report)
        self._state = State(0, result, built=False)
        return Done(result.encode(), keeps=keeps)

    async def _files(self, dataset: JsonObject, context: Context) -> JsonObject:
        manifest = bytes.fromhex(dataset["manifest"])
        tree = await with_room("the rows cannot be fetched", lambda: shared_tree(manifest, context), context)
        return {**dataset, "root": str(tree)}

    # ---- steps

    async def _train(self, segment: Segment, attempt: Attempt, context: Context) -> Steps:
        """Run the steps of a segment. Without `writing`, there was nothing to do."""
        here = self._state
        if attempt.predecessor:
            before = segment.begins_with(Result.decode(attempt.predecessor))
        else:
            stands = 0 if segment.before else segment.first  # behind the item before it, which may be the first one
            # The last segment may end before its steps do: at an early stop, or where rows were dropped or packed.
            there = here is not None and (here.step == stands or (here.step < stands and here.result.is_last))
            before = segment.begins_with(here.result if here is not None and there else None)
        if before is None:
            raise AttemptError("what the segment before leaves is not here", code="state_elsewhere")
        if before.stopped or (before.steps and segment.first >= before.steps):
            nothing = replace(before, stopped=True, metrics=[], evaluations=[])
            return Steps(segment, before, nothing, Path(), None)
        if before.step != segment.first:
            raise AttemptError(
                f"the state at step {segment.first} is not there: the segment that leads to it failed, and the last "
                f"that did not ended at step {before.step}; go on from there with `rollout train fork`",
                code="segment_missing",
                retry=False,
            )
        leave = context.scratch / "leave"
        part = await self._taken_over(attempt, segment, before, context)
        here = self._state  # of a hand-over that could not be restored, nothing is left
        if part is None and (here is None or not here.built or here.step != segment.first):
            await self._stand_at(before, context)
        self._state = None
        return await self._steps(segment, before, attempt, context, part, leave)

    async def _taken_over(self, attempt: Attempt, segment: Segment, before: Result, context: Context) -> Result | None:
        """Return how far an earlier attempt got, whose state the processes now have, or None."""
        part = await taken_over(attempt, segment, before, context)
        if part is not None:
            try:
                await self._stand_at(part, context)
            except AttemptError as error:
                log.info("hand_over_ignored", step=part.step, error=error.message)
                await self._throw_away()
                return None
            log.info("hand_over_taken", step=part.step, first=segment.first)
        return part

    async def _stand_at(self, before: Result, context: Context) -> None:
        """Restore the state that `before` left. Raises UnsuitableError if that is impossible on this worker."""
        assert self._run is not None
        if self._fingerprint:  # of what was built here before: as long to find out as it takes to compare
            self._same_hardware(before.fingerprint)
        if self._built:
            await self._throw_away()
        data, evaluation = before.data["dataset"], before.data.get("eval_dataset")
        paths = [
            str(await self._fetch(bytes.fromhex(one["object"]), "the tokens", context)) if one else None
            for one in (data, evaluation)
        ]

        async def built() -> JsonObject:
            assert self._run is not None
            ranks = await self._running_ranks(context)
            context.progress("loading the model")
            return await ranks.result(
                op="build", kind=_kind(self._run), settings=_settings(self._run), model=self._model[0],
                tokenizer=self._model[1], reference=self._reference[0] if self._reference else None,
                pad=before.data["pad"], data=paths[0], eval_data=paths[1],
                dtype=lookup(self._run.config, "generation.dtype"), judges=self._judges,
            )  # fmt: skip

        try:
            self._built = await self._reading_models(built, context)
        except UnsuitableError:
            raise
        except AttemptError as error:
            raise UnsuitableError(error.message, code=error.error_code, retry=error.retry) from error
        self._fingerprint = self._built["fingerprint"]
        self._same_hardware(before.fingerprint)
        if before.snapshot:
            await self._restore(before, await self._running_ranks(context), context)

    async def _reading_models(self, work: Callable[[], Awaitable[JsonObject]], context: Context) -> JsonObject:
        """Return what `work` returns, which reads the models' files: before and after it, they are those the run began
        with.

        Raises UnsuitableError if somebody changed them and there are no others.
        """
        while True:
            await self._locate_anew(context)
            try:
                done = await work()
            except AttemptError:
                if not await self._changed_directory():
                    raise  # else the change explains it
            else:
                if not await self._changed_directory():
                    return done
            await self._throw_away()  # it may have read either

    async def _locate_anew(self, context: Context) -> None:
        """Fetch files that were changed on this host from the store, if the run's client uploaded them."""
        changed = await self._changed_directory()
        if not changed:
            return
        assert self._run is not None
        try:
            await self._locate(self._run, context)
        except AttemptError as error:
            if error.error_code != "model_missing":
                raise
            raise UnsuitableError(
                f"the files in {changed} changed since the run began: put them back and repeat the command, or "
                "start another run",
                code="model_changed",
                retry=False,
            ) from error

    async def _changed_directory(self) -> str:
        assert self._run is not None
        changed = await changed_directory(self._run.config["model"], self._model)
        if not changed and self._reference is not None:
            changed = await changed_directory(self._run.config["reference_model"], self._reference)
        return changed

    def _same_hardware(self, old: JsonObject) -> None:
        """Raise UnsuitableError if the state comes from hardware on which the same input gives other bytes."""
        assert self._run is not None
        new = self._fingerprint
        if not old or old == new or self._run.config["run"].get("allow_different_hardware"):
            return
        changed = "; ".join(_differences(old, new))
        raise UnsuitableError(
            f"it would not give the same bytes as the worker before it ({changed}): the run goes on with one that "
            "does. To go on here all the same, fork it with --allow-different-hardware",
            code="different_hardware",
            retry=False,
        )

    async def _restore(self, before: Result, ranks: Ranks, context: Context) -> None:
        context.progress(f"restoring the state of step {before.step}")
        directory, expected = context.scratch / "restored", bytes.fromhex(before.snapshot)
        what = f"the snapshot {before.snapshot[:12]} of step {before.step}"

        async def unpacked() -> None:
            source = await self._fetch(expected, what, context)
            shutil.rmtree(directory, ignore_errors=True)
            try:
                await asyncio.to_thread(unpack, source, directory, expected)
            except ObjectCorruptError:
                with suppress(OSError):  # this host's copy: the next try fetches it anew
                    source.unlink()
                raise

        try:
            try:
                await with_room(f"{what} cannot be unpacked", unpacked, context)
            except ObjectCorruptError:
                await with_room(f"{what} cannot be unpacked", unpacked, context)
        except ObjectCorruptError as error:
            raise UnsuitableError(f"{what} is damaged: {error.message}", code="object_corrupt") from error
        try:
            manifest = await asyncio.to_thread(read_manifest, directory, "train_state")
        except ObjectCorruptError as error:
            raise AttemptError(error.message, code="snapshot_mismatch", retry=False) from error
        self._same_run(manifest, what)
        self._same_hardware(manifest["fingerprint"])
        await ranks.result(op="restore", directory=str(directory))
        await asyncio.to_thread(shutil.rmtree, directory)

    def _same_run(self, manifest: JsonObject, what: str) -> None:
        """Raise AttemptError if the snapshot has another algorithm or model than this run."""
        assert self._run is not None
        wanted = {"algorithm": _kind(self._run), "model": self._run.config["model"]["content_id"]}
        wrong = [key for key, value in wanted.items() if manifest.get(key) != value]
        if wrong:
            said = ", ".join(f"{key} {manifest.get(key)!r} instead of {wanted[key]!r}" for key in wrong)
            raise AttemptError(f"{what} does not fit this run: {said}", code="snapshot_mismatch", retry=False)

    async def _fetch(self, object_id: bytes, what: str, context: Context) -> Path:
        """Fetch an object to this host. Raises UnsuitableError if it is gone, or damaged in the store."""
        try:
            return await with_room(f"{what} cannot be fetched", lambda: context.object_path(object_id), context)
        except AttemptError as error:
            code = {"not_found": "object_missing", "object_corrupt": "object_corrupt"}.get(error.error_code)
            if code is None:
                raise
            raise UnsuitableError(
                f"{what} cannot be had from the store: {error.message}: bring the store's objects back, or go on from "
                "another snapshot (rollout snapshot list)",
                code=code,
                retry=code != "object_missing",
            ) from error

    async def _steps(
        self, segment: Segment, before: Result, attempt: Attempt, context: Context,
        part: Result | None = None, leave: Path | None = None, children: int = 0,
    ) -> Steps:  # fmt: skip
        """Run steps. `part` has those that were done elsewhere; `leave` is that of Steps; `children` is the number of
        children."""
        assert self._run is not None and self._ranks is not None
        config, ranks, from_here = self._run.config, self._ranks, part or before
        metrics, evaluations = (list(part.metrics), list(part.evaluations)) if part is not None else ([], [])
        result = replace(
            from_here, steps=self._built["steps"], metrics=metrics, evaluations=evaluations, report={}, snapshot="",
            size=0, weights="",
            fingerprint=self._built["fingerprint"], algorithm=_kind(self._run), parts={},
            model={"parameters": self._built["parameters"], "trained": self._built["trained"]},
        )  # fmt: skip
        manifest = {
            "format": FORMAT, "kind": "train_state", "algorithm": _kind(self._run),
            "settings": blake3(canonical(config["algorithm"])).hexdigest(),
            "model": config["model"]["content_id"], "data": before.data, "fingerprint": result.fingerprint,
        }  # fmt: skip
        directory = context.scratch / "state"
        rollouts = await self._rollouts(segment, part, before, attempt, context, children)
        versions = await version_files(rollouts.versions, context) if rollouts is not None else {}
        staged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._pace.step_s is None:
            self._pace.begin(time.monotonic())
            context.progress(f"step {from_here.step + 1}/{result.steps} is under way")
        steps = self._under_way = Steps(segment, before, result, directory, leave)
        self._decide()

        async def follow() -> JsonObject:
            done: JsonObject = {}
            stepping = True
            answers = ranks.command(
                lambda: max(HUNG_S, HUNG_STEPS * (self._pace.step_s or 0.0)) if stepping else None,
                op="run", first=from_here.step, steps=segment.first + segment.steps - from_here.step,
                directory=str(directory), manifest=manifest, stopping=from_here.stopping, leave=str(leave or ""),
                exchange=str(rollouts.directory) if rollouts is not None else "", versions=versions,
            )  # fmt: skip
            try:
                async for answer in answers:
                    done = answer.get("done", done)
                    stepping = "step" in answer or "evaluation" in answer
                    if "staged" in answer:
                        staged.set_result(int(answer["staged"]["step"]))
                    elif "wants" in answer:
                        assert rollouts is not None
                        ranks.reply(**await ranks.meanwhile(rollouts.serve(answer["wants"])))
                    elif "full" in answer:
                        train_room.tell("the snapshot cannot be written", answer["full"], train_room.DISK_FULL, context)
                    else:
                        if rollouts is not None and "step" in answer:
                            rollouts.scored(answer["step"], answer["scored"])
                        self._take(answer, result, context)
                        self._decide()
            except BaseException as error:
                if not staged.done():
                    staged.set_exception(error)
                    staged.exception()  # whoever waits sees it; nobody has to
                raise
            context.hindered("")
            return done

        writing = asyncio.create_task(follow())
        try:
            result.step = await asyncio.shield(staged)
        except BaseException as error:
            writing.cancel()
            await asyncio.wait([writing])
            _leave_steps(error, result)
            raise
        finally:
            self._under_way = None
        if rollouts is not None:
            result.samples = (await self._put("the samples of the segment", rollouts.samples, context)).hex()
            result.rollouts = rollouts.counts()
        self._state = State(result.step, result) if not is_part(segment, result) else None
        steps.writing, steps.staged_at = writing, time.monotonic()
        return steps

    async def _rollouts(
        self, segment: Segment, part: Result | None, before: Result, attempt: Attempt, context: Context, children: int
    ) -> Rollouts | None:
        """Return the rollouts, or None if the algorithm draws no samples. `part` and `children` are those of
        `_steps`."""
        assert self._run is not None
        section = SECTIONS[self._run.config["algorithm"]["kind"]]
        if not issubclass(section, PolicySection):
            return None
        settings = section.model_validate(_settings(self._run))
        data, evaluation = before.data["dataset"], before.data.get("eval_dataset")
        prompts = [
            Prompts(await self._fetch(bytes.fromhex(one["object"]), "the prompts", context)) if one else None
            for one in (data, evaluation)
        ]
        assert prompts[0] is not None
        directory = context.scratch / "rollouts"
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        directory.mkdir()
        found = Rollouts(
            self._run.config, settings, attempt, context, prompts[0], prompts[1], directory,
            end=min(segment.first + segment.steps, self._built["steps"]), versions=versions_of(before.rollouts),
            next=children,
        )  # fmt: skip
        if part is not None:
            earlier = await self._fetch(bytes.fromhex(part.samples), "the samples so far", context)
            await asyncio.to_thread(found.go_on, part.rollouts, earlier)
        return found

    def _take(self, answer: JsonObject, result: Result, context: Context) -> None:
        """Record the answer of a step, or of an evaluation, which may be in progress."""
        assert self._run is not None
        if "step" in answer:
            metrics = answer["step"]
            result.metrics.append(metrics)
            result.step = int(metrics["step"])
            self._pace.add(int(metrics["tokens"]), time.monotonic())
            # What depends on the host's speed is shown and not kept: metrics are the same bytes wherever it ran.
            shown = self._shown = figures(metrics | answer.get("speed", {}), result.steps, self._pace)
            shown |= evaluation_figures(result.stopping)
            context.progress(line(shown), **shown)
        elif answer.get("under_way") and self._shown:
            context.progress(f"{line(self._shown)} · {answer['under_way']}", **self._shown)
        elif "evaluation" in answer:
            result.evaluations.append(answer["evaluation"])
            result.stopping, result.stopped = answer["stopping"], answer["ends"]
            self._shown |= evaluation_figures(result.stopping)
            context.progress(line(self._shown), **self._shown)

    async def _store(self, steps: Steps, context: Context) -> Done:
        result, writing = steps.result, steps.writing
        assert writing is not None
        try:
            done = await asyncio.shield(writing)
        except BaseException:
            writing.cancel()
            raise
        archive, what = context.scratch / "state.tar", f"the snapshot of step {result.step}"
        packed = await self._pack(what, steps.directory, archive, context)
        final = self._final(result, packed, done)
        if await self._put(what, archive, context) != packed.id:
            raise AttemptError("the snapshot changed while it was stored", code="object_corrupt")
        self._leaving.stored(time.monotonic() - steps.staged_at)
        result.snapshot = final.snapshot
        versions = await version_objects(versions_of(final.rollouts), context)
        if versions:
            final.rollouts = final.rollouts | {"objects": [one.hex() for one in versions]}
        keeps = (packed.id, *versions)
        if final.samples:
            keeps = (*keeps, bytes.fromhex(final.samples))  # last: it outlives the others
        return Done(final.encode(), units_out=_tokens(final), keeps=keeps)

    async def _hand_over(self, steps: Steps, before: asyncio.Event, context: Context) -> HandOverError:
        """Hand over. Raises UnsuitableError if the state cannot be stored in time; the attempt is then returned at no
        cost."""
        context.progress(f"step {steps.result.step}/{steps.result.steps} is handed over: the worker leaves")
        try:
            part = await self._store(steps, context)
            path = context.scratch / "part"
            path.write_bytes(part.data)
            result_id = await self._put("what was done so far", path, context)
            await before.wait()  # its snapshot has its name then
        except AttemptError as error:
            log.warning("hand_over_failed", error=error.message)
            message = f"what was done so far cannot be handed over: {error.message}"
            raise UnsuitableError(message, code=error.error_code) from error
        log.info("handed_over", step=steps.result.step)
        return HandOverError(encode(result_id, steps.before), (*part.keeps, result_id))

    def _final(self, result: Result, packed: Packed, done: JsonObject) -> Result:
        """Return the result that the ledger gets of a segment whose state is packed."""
        assert self._run is not None
        label = self._run.config["snapshots"]["label"] if result.is_last else ""
        return replace(
            result, snapshot=packed.id.hex(), size=packed.size, weights=done["weights"], label=label,
            parts=parts_of(packed.members),
        )  # fmt: skip

    # ---- verifying

    async def _verify(self, segment: Segment, attempt: Attempt, context: Context) -> Done:
        """Repeat segments that another item committed, in fresh processes, and keep only their figures."""
        before, found = Result(**segment.before), list[Result]()
        self._state = None
        await self._stand_at(before, context)
        directory, archive = context.scratch / "state", context.scratch / "state.tar"
        for first, steps in segment.through:
            children = int(found[-1].rollouts.get("children", 0)) if found else 0
            again = Segment("segment", first, steps)
            found_steps = await self._steps(again, before, attempt, context, children=children)
            assert found_steps.writing is not None
            done, result = await found_steps.writing, found_steps.result
            packed = await self._pack(f"the state of step {result.step}", directory, archive, context)
            before = self._final(result, packed, done)
            found.append(before)
        self._state = None  # the next one begins with processes of its own
        return Done(encode_results(found), units_out=sum(map(_tokens, found)))

    async def _pack(self, what: str, directory: Path, archive: Path, context: Context) -> Packed:
        packed = await with_room(
            f"{what} cannot be written", lambda: asyncio.to_thread(pack, directory, archive), context
        )
        await asyncio.to_thread(shutil.rmtree, directory)
        return packed

    async def _put(self, what: str, path: Path, context: Context) -> bytes:
        async def put() -> bytes:
            return await self._leaving.again(lambda: context.put_object(path))

        return await with_room(f"{what} cannot be stored", put, context)

    # ---- processes

    async def _running_ranks(self, context: Context) -> Ranks:
        assert self._run is not None
        if self._ranks is None or not self._ranks.alive:
            await self._throw_away()
            settings = _settings(self._run)
            world, threads = int(settings["devices"]), int(settings["threads"])
            context.progress("starting the processes that train" if world > 1 else "starting the process that trains")
            shape = f"{settings['minibatch_size']} rows of at most {settings['max_length']} tokens"
            self._ranks = Ranks(world, threads, environment(threads), shape)
            await self._ranks.start()
        return self._ranks

    async def _throw_away(self) -> None:
        self._state, self._built, self._pace, self._shown = None, {}, Pace(), {}
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            await ranks.close()


_OF_THE_WORKER = frozenset({"package_missing", "tokenizer_invalid"})
"""Codes of a worker's faults, rather than faults of the data it reads."""


def _leave_steps(error: BaseException, result: Result) -> None:
    """Keep the steps before a failure with the attempt, as evidence; nothing continues from them."""
    if isinstance(error, AttemptError) and not isinstance(error, UnsuitableError | HandOverError) and result.metrics:
        seen = Result(step=result.step, steps=result.steps, metrics=result.metrics, evaluations=result.evaluations)
        error.data = seen.encode()


def _kind(run: Run) -> str:
    return run.config["algorithm"]["kind"]


def _settings(run: Run) -> JsonObject:
    return run.config["algorithm"]["settings"]


def code_of(settings: JsonObject) -> tuple[list[str], str]:
    """Return the settings' rewards that are code, and the environment; empty if there is none."""
    functions = [one["function"] for one in settings.get("reward", ()) if one["function"]]
    return functions, lookup(settings, "environment.class_") or ""


def _differences(old: JsonObject, new: JsonObject) -> list[str]:
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in sorted(old | new) if old.get(key) != new.get(key)]


def _tokens(result: Result) -> int:
    return sum(int(step["tokens"]) for step in result.metrics)
