"""`rollout train verify`: starts workers at the run's cluster, prints the verdicts, and returns the exit code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from rollout.cli.anywhere import Places, find_run
from rollout.cli.boundary import FAILED, INTERRUPTED, OK
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.progress import Display
from rollout.client.embedded import Embedded
from rollout.client.private import OwnerLock, address_of
from rollout.client.runs import Runs
from rollout.client.snapshots import SHORT
from rollout.client.target import Target, connected
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, IncompleteError, RolloutError
from rollout.model.ids import short
from rollout.wire import event_loop
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.commands.snapshots import TrainingRun, kept_of, training_run
from rollout.workloads.train.commands.verify import DIFFERENT_HARDWARE, Stretch, Verdict, Verification, stretches

_PATIENCE_S = 60.0


class Verifying:
    """`wanted` is the number of a segment, 0 for the last, None for all."""

    def __init__(
        self, where: Places, text: str, wanted: int | None, display: Display, *, workers: int, different_hardware: bool
    ) -> None:
        self._where = where
        self._text = text
        self._wanted = wanted
        self._display = display
        self._workers = workers
        self._different_hardware = different_hardware
        self._embedded: Embedded | None = None
        self._done = 0

    def run(self) -> int:
        """Verify, and return the exit code. Raises ConfigError on other hardware than the run's, unless that is
        allowed."""
        try:
            return event_loop.run(self._guarded())
        finally:
            self._display.close()

    async def _guarded(self) -> int:
        interrupts = Interrupts(self._at_once)
        interrupts.install()
        try:
            return await interrupts.guard(self._work())
        except Interrupted:
            self._display.close()
            said = f"interrupted: {counted(self._done, 'segment')} verified"
            self._display.event("interrupted", said, verified=self._done)
            return INTERRUPTED

    def _at_once(self) -> None:
        """Handle the second Ctrl-C."""
        if self._embedded is not None:
            self._embedded.kill()
        self._display.close()

    async def _work(self) -> int:
        target, run_id = await find_run(self._where, self._text)
        async with self._cluster(target) as client:
            run = await training_run(client, run_id)
            work = stretches(run, await kept_of(client, run), self._wanted)
            verification = Verification(client, run, work, allow_different_hardware=self._different_hardware)
            await verification.open()
            self._say_work(run, work, verification.run_id)
            try:
                return self.conclude(run, await self._verdicts(verification, sum(len(one.segments) for one in work)))
            except BaseException:
                with suppress(RolloutError):
                    await asyncio.shield(verification.end())
                raise

    @asynccontextmanager
    async def _cluster(self, target: Target) -> AsyncGenerator[Runs]:
        """Yield the run's cluster with workers; a private cluster that is not running is started."""
        if target.private is None:
            async with connected(target, patience_s=_PATIENCE_S) as client:
                yield client
            return
        lock = OwnerLock(target.private)
        address = ""
        while not lock.try_acquire():
            if address := address_of(target.private):
                break
            await asyncio.sleep(0.1)
        try:
            if not address:
                self._display.step("starting a coordinator and workers on this machine")
                embedded = Embedded(target.private, workers=self._workers, report=self._display.note, lock=lock)
                self._embedded = embedded
                await embedded.start()
                address = embedded.address
            here = Target([address], target.private / "tls", "rollout", explicit=True)
            async with connected(here, patience_s=_PATIENCE_S) as client:
                yield client
        finally:
            if self._embedded is not None:
                await asyncio.shield(self._embedded.stop())
            lock.release()

    async def _verdicts(self, verification: Verification, count: int) -> list[Verdict]:
        found: list[Verdict] = []
        status = pb.RunStatus()
        async for page in verification.verdicts():
            if isinstance(page, list):
                for verdict in page:
                    self._say(verdict)
                found += page
                self._done = len(found)
            else:
                status = page
                self._display.step(f"verifying: {len(found)} of {counted(count, 'segment')}")
        if len(found) < count:
            raise _ended_early(status)
        return found

    # ---- what is said

    def _say_work(self, run: TrainingRun, work: list[Stretch], run_id: str) -> None:
        segments = [one for stretch in work for one in stretch.segments]
        numbers = f"segment {segments[0].number}"
        if len(segments) > 1:
            numbers = f"segments {segments[0].number} to {segments[-1].number}"
        begun = len(work)
        text = (
            f"verifying {numbers} of run {short(run.run_id)} ({run.status.spec.name}), from {begun} "
            f"snapshot{'' if begun == 1 else 's'}, as run {short(run_id)}"
        )
        fields: JsonObject = {"run_id": run.run_id, "verification": run_id, "segments": len(segments), "from": begun}
        self._display.event("verifying", text, **fields)

    def _say(self, verdict: Verdict) -> None:
        one = verdict.segment
        steps = f"steps {one.first + 1} to {one.result.step}"
        if verdict.found is None:
            said = f"not executed: {verdict.failure.message if verdict.failure else ''}"
        elif verdict.same:
            said = f"same  {one.result.snapshot[:SHORT]}"
        else:
            said = (
                f"DIFFERS in {', '.join(verdict.differs)}: {one.result.snapshot[:SHORT]} was committed, and "
                f"{verdict.found.snapshot[:SHORT]} came out"
            )
        fields: JsonObject = {
            "segment": one.number,
            "first_step": one.first + 1,
            "last_step": one.result.step,
            "same": verdict.same,
            "differs": list(verdict.differs),
            "committed": one.result.snapshot,
            "found": verdict.found.snapshot if verdict.found else "",
            "made_by": one.worker,
            "worker": verdict.worker,
        }
        if verdict.failure is not None:
            fields["failure"] = {"code": verdict.failure.code, "message": verdict.failure.message}
        self._display.event("segment", f"segment {one.number}  {steps:<16}  {said}", **fields)

    def conclude(self, run: TrainingRun, verdicts: list[Verdict]) -> int:
        """Return the exit code. Raises ConfigError on other hardware."""
        self._display.close()
        for verdict in verdicts:
            if verdict.failure is not None and verdict.failure.code == DIFFERENT_HARDWARE:
                raise _refused(verdict.failure.message)
        different = [one for one in verdicts if one.found is not None and not one.same]
        failed = [one for one in verdicts if one.found is None]
        others = [one for one in verdicts if one.found and one.found.fingerprint != one.segment.result.fingerprint]
        if others:
            self._display.note(
                f"note: {len(others)} of them ran on other hardware or versions than before, so their manifests differ"
            )
        same = len(verdicts) - len(different) - len(failed)
        of = counted(len(verdicts), "segment")
        text = f"{same} of {of} of run {short(run.run_id)} came to the same bytes and metrics"
        fields: JsonObject = {
            "run_id": run.run_id,
            "same": same,
            "different": [one.segment.number for one in different],
            "failed": [one.segment.number for one in failed],
            "different_hardware": bool(others),
        }
        self._display.event("verified", text, **fields)
        return OK if same == len(verdicts) else FAILED


def _ended_early(status: pb.RunStatus) -> RolloutError:
    """Return why the run ended early: no worker could execute the rest, or someone killed it."""
    for cause in status.causes:
        if cause.code == DIFFERENT_HARDWARE:
            return _refused(cause.message)
    why = status.causes[0].message if status.causes else status.reason
    return IncompleteError(f"not every segment was executed again: the verification {status.state}: {why}")


def _refused(message: str) -> ConfigError:
    return ConfigError(
        "no worker has the hardware and versions that the run had, so other bytes would prove nothing. To compare all "
        f"the same: --allow-different-hardware\nfrom a worker: {message}"
    )
