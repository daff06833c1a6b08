"""Writes results of a training run to its files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollout.model.counts import counted
from rollout.model.errors import InvalidResultError, NotFoundError
from rollout.model.ids import short
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, dump_line, lookup
from rollout.workloads.port import Ledger, Totals, unsuccessful
from rollout.workloads.train.health import Watch
from rollout.workloads.train.samples import ONLINE, SAMPLES, rewrite_samples
from rollout.workloads.train.segment import NO_ROLLOUTS, Result, Segment, done, seen_of

METRICS, EVALUATIONS, REPORT, SUMMARY = "metrics.jsonl", "eval.jsonl", "data-report.json", "summary.json"
ERRORS = "errors.jsonl"

COMMITTED = "committed"
NOT_COMMITTED: JsonObject = {COMMITTED: False}
"""Marks lines of a failed segment, which no snapshot includes: they show what went wrong."""
_MODEL = ("parameters", "trained")
"""Keys of the summary that describe the model."""
_SPOOL = ".samples"
"""Directory below the output with samples of segments whose lines are not written yet."""


class TrainWriter:
    """Writes lines and, as an `ArtifactWriter`, samples, which are objects of their own. It is `Remembering`."""

    def __init__(self, config: JsonObject) -> None:
        self._config = config
        self._online = config["algorithm"]["kind"] in ONLINE
        self._spool = Path()
        self.files: tuple[str, ...] = (METRICS, EVALUATIONS, REPORT, ERRORS, *((SAMPLES,) if self._online else ()))
        self.memory: JsonObject = {}
        """What summary.json says of the segments so far: `last`, `failure`, `hardware`; for reinforcement learning
        `first_reward`, `rollouts`, `health` (`Watch`) and `warnings`."""

    # ---- samples

    def open(self, directory: Path) -> None:
        self._spool = directory / _SPOOL
        shutil.rmtree(self._spool, ignore_errors=True)  # of a command that was killed

    def begin(self) -> Iterator[tuple[str, bytes]]:
        return iter(())

    def take_up(self) -> None:
        return

    def refresh(self, state: str = "") -> None:
        if state:
            shutil.rmtree(self._spool, ignore_errors=True)

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        result = done(entry, "segment") if self._online else None
        if result is None or not result.samples:
            return ""
        brought, path = self._spool / f"{entry.seq}.brought", self._spool / str(entry.seq)
        try:
            await asyncio.to_thread(self._spool.mkdir, exist_ok=True)
            await ledger.fetch(bytes.fromhex(result.samples), brought)
            await asyncio.to_thread(rewrite_samples, brought, path)
        except (NotFoundError, InvalidResultError) as error:
            path.unlink(missing_ok=True)
            return f"{SAMPLES} lacks the samples of the steps up to {result.step}: {error.message}"
        finally:
            brought.unlink(missing_ok=True)
        return ""

    def _samples(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        path = self._spool / str(entry.seq)
        if not self._online or not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                yield SAMPLES, line
        path.unlink()

    # ---- lines

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        segment = Segment.decode(entry.payload)
        if entry.outcome is Outcome.SKIPPED or segment.op == "verify":
            return
        if entry.outcome is not Outcome.DONE:
            why = unsuccessful(entry, "segment")
            failure: JsonObject = {"after_step": segment.first, "code": why.code, "message": why.message}
            self.memory["failure"] = failure | ({"op": "prepare"} if segment.op == "prepare" else {})
            line = {"first_step": segment.first + 1, "op": segment.op, "code": why.code, "message": why.message}
            yield ERRORS, dump_line({**line, "attempts": entry.tries})
            seen = seen_of(entry.data)
            for metrics in seen.metrics:
                yield METRICS, dump_line(metrics | NOT_COMMITTED)
            for evaluation in seen.evaluations:
                yield EVALUATIONS, dump_line(evaluation | NOT_COMMITTED)
            return
        result = Result.decode(entry.data)
        if segment.op == "prepare":
            overlap = self._config["evaluation"].get("overlap") if self._config.get("evaluation") else None
            report = result.report if overlap is None else {**result.report, "overlap": overlap}
            yield REPORT, json.dumps(report, indent=2).encode() + b"\n"
            return
        self._remember(result, segment.first)
        for metrics in result.metrics:
            yield METRICS, dump_line(metrics)
        for evaluation in result.evaluations:
            yield EVALUATIONS, dump_line(evaluation)
        yield from self._samples(entry)

    def _remember(self, result: Result, first: int) -> None:
        start: JsonObject = self._config.get("start") or {}  # of a fork, whose state another run left
        last: JsonObject = self.memory.get("last") or start.get("before", {})
        before: JsonObject = last.get("fingerprint", {})
        if before and before != result.fingerprint:
            new = result.fingerprint
            changed = {key: [before.get(key), new.get(key)] for key in sorted(before | new)}
            told = {key: values for key, values in changed.items() if values[0] != values[1]}
            self.memory.setdefault("hardware", []).append({"after_step": first, "changed": told})
        self.memory["last"] = {
            "step": result.step,
            "loss": result.metrics[-1]["loss"] if result.metrics else None,
            "stopped": result.stopped,
            "stopping": result.stopping,
            "snapshot": result.snapshot,
            "weights": result.weights,
            "fingerprint": result.fingerprint,
            "model": result.model,
        }
        if self._online:
            self._remember_rollouts(result)

    def _remember_rollouts(self, result: Result) -> None:
        self.memory["last"]["reward"] = next(
            (line["reward"] for line in reversed(result.metrics) if "reward" in line), None
        )
        if self.memory.get("first_reward") is None:
            self.memory["first_reward"] = next((line["reward"] for line in result.metrics if "reward" in line), None)
        counts, now = self.memory.get("rollouts", NO_ROLLOUTS), NO_ROLLOUTS | result.rollouts
        self.memory["rollouts"] = {name: counts[name] + now[name] for name in ("generated", "evaluated", "regenerated")}
        self.memory["rollouts"] |= {
            **{name: dict(Counter[str](counts[name]) + Counter[str](now[name])) for name in ("dropped", "zeroed")},
            "devices": sorted({*counts["devices"], *now["devices"]}),
        }
        began = Watch(self.memory.setdefault("health", {})).add(result.metrics)
        self.memory.setdefault("warnings", []).extend(
            {"after_step": result.step, "code": one.code, "message": one.text} for one in began
        )

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        last: JsonObject = self.memory.get("last", {})
        failure: JsonObject = self.memory.get("failure", {})
        return (
            summary
            | ({"reason": _reason(failure), "failure": failure} if failure else {})
            | {
                "algorithm": self._config["algorithm"]["kind"],
                "model_uri": self._config["model"]["uri"],
                "steps": last.get("step", 0),
                "final_loss": last.get("loss"),
                "final_evaluation": last.get("stopping", {}).get("last_evaluation"),
                "best_evaluation": last.get("stopping", {}).get("best_evaluation"),
                "stopped_early": last.get("stopped", False),
                "tokens": totals.units_out,
                "final_snapshot": last.get("snapshot", ""),
                "weights_hash": last.get("weights", ""),
                "fingerprint": last.get("fingerprint", {}),
                "fingerprint_changes": self.memory.get("hardware", []),
                **{key: value for key, value in last.get("model", {}).items() if key in _MODEL},
            }
            | (self._of_rollouts(last) if self._online else {})
        )

    def _of_rollouts(self, last: JsonObject) -> JsonObject:
        rollouts: JsonObject = self.memory.get("rollouts", NO_ROLLOUTS)
        return {
            "tier": tier(self._config, rollouts["devices"]),
            "first_reward": self.memory.get("first_reward"),
            "final_reward": last.get("reward"),
            "rollouts": rollouts,
            "warnings": self.memory.get("warnings", []),
        }


def tier(config: JsonObject, devices: Sequence[str]) -> str:
    """Return the reproducibility of a run of reinforcement learning: `regenerate` if a group that is generated again
    has the same bytes (transformers on the CPU), else `replay`: the same rollouts give the same weights. `devices` are
    those that generated samples so far."""
    backend: JsonObject = lookup(config, "executors.rollout.backend") or {}
    drew = set(devices) or {backend.get("device")}
    return "regenerate" if backend.get("kind") == "transformers" and drew == {"cpu"} else "replay"


def _reason(failure: JsonObject) -> str:
    """Return why the run failed, in a sentence that begins with the step."""
    after, message = failure["after_step"], failure["message"]
    return f"after step {after}: {message}" if after or failure["code"] != "invalid_data" else message


def outcome(summary: JsonObject) -> str:
    """Return a line that says what was trained."""
    steps, loss, snapshot = summary["steps"], summary["final_loss"], summary["final_snapshot"]
    early = " (stopped early: the evaluation got no better)" if summary["stopped_early"] else ""
    parts = [f"{counted(steps, 'step')}{early} in {summary['durations']['wall_s']:.1f} s"]
    parts += [f"{summary['tokens']:,} tokens, {summary['tokens_per_s']:.0f} tokens/s"] if steps else []
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    if summary.get("final_reward") is not None:
        parts += [f"reward {summary['first_reward']:.3f} at first, {summary['final_reward']:.3f} at the end"]
    if final := summary.get("final_evaluation"):
        best = summary["best_evaluation"]
        # The loss of a policy's evaluation is its reward's opposite.
        what, sign = ("reward", -1) if "final_reward" in summary else ("loss", 1)
        parts += [f"eval {what} {sign * final['loss']:.4f} at step {final['step']:,}"]
        parts += [f"the best {sign * best['loss']:.4f} at step {best['step']:,}"] if best != final else []
    parts += [f"snapshot {snapshot[:12]}"] if snapshot else []
    return ", ".join(parts)


def how_to_go_on(summary: JsonObject) -> str:
    """Return what to do after a failed segment, or if no segment trained: this run cannot continue, but another one can
    start from the state before the failure or replace it."""
    snapshot, step = summary["final_snapshot"], summary["steps"]
    if not snapshot:
        return "nothing is trained yet, and when the cause is mended, the same command starts another run in its place"
    run = short(summary["run_id"])
    return (
        f"the last good snapshot is {snapshot} of step {step}: when the cause is mended, go on from there with "
        f"`rollout train fork {run} --step {step} --config FILE`, or, where its loss was bad already, from an earlier "
        f"one: `rollout snapshot list --run {run}`"
    )


_OF_THE_USER = ("invalid_data", "tokenizer_invalid", "model_invalid")


def refusal_of(summary: JsonObject) -> str:
    """Return what the user has to fix in a run whose data could not be used, or "" if it failed otherwise."""
    failure: JsonObject = summary.get("failure") or {}
    return failure["message"] if failure.get("op") == "prepare" and failure["code"] in _OF_THE_USER else ""
