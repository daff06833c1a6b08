"""Samples for the steps of a segment: groups as child items, and their results.

The prompts of a step are a function of the seed and its number, and so are the seeds of its samples; weights are named
by their content. A segment that begins again therefore submits the same items and finds those that already exist.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from blake3 import blake3
from rollout.model.errors import AttemptError, InputError, InvalidResultError
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.workloads.json_form import JsonObject, canonical, dump_line
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.policy_tasks import JOB
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.rollouts import (
    ROLLOUT,
    Group,
    GroupResult,
    Sample,
    Scoring,
    TaskPlay,
    Weights,
    WeightsManifest,
)
from rollout.workloads.train.sampler import step_rows
from rollout.workloads.train.steps import total_rows

from rollout_worker.executors.port import Attempt, Child, Context
from rollout_worker.executors.train_room import with_room

_ATTEMPTS = 5
_EMPTY_STEPS = 5
"""Number of consecutive steps without a rewarded group that end the run."""
_ROUNDS = 7_919
"""Offset between the seeds of replacement rounds."""
_SEED_BYTES = 6  # JSON's numbers are exact below 2^53


@dataclass(slots=True)
class _Asked:
    """A group submitted as the child `ordinal`. `round` is that of replacements; 0 means it replaces none."""

    ordinal: int
    step: int
    place: int
    prompt: Prompt
    weights: Weights
    round: int = 0


@dataclass(slots=True)
class _Row:
    """A sample as ranks get it, with fields that are only shown. `fault` says why it has reward 0 if it could not be
    rewarded."""

    asked: _Asked
    prompt: list[int]
    sample: Sample
    rewards: dict[str, float | None]
    reward: float
    fault: str = ""


@dataclass(slots=True)
class Rollouts:
    """Rollouts of one attempt at a segment or its remainder, which ends after `end` steps.

    `versions` are those from before it, newest last. `next` is the ordinal of the next child.
    """

    config: JsonObject
    settings: PolicySection
    attempt: Attempt
    context: Context
    prompts: Prompts
    evaluation: Prompts | None
    directory: Path
    end: int
    versions: list[Weights]
    next: int = 0
    generated: int = 0
    evaluated: int = 0
    regenerated: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    zeroed: dict[str, int] = field(default_factory=dict[str, int])
    devices: set[str] = field(default_factory=set[str])
    _places: dict[int, int] = field(default_factory=dict[int, int])  # first ordinals of steps that were spawned
    _asked: dict[int, list[_Asked]] = field(default_factory=dict[int, list[_Asked]])
    _early: dict[int, Child] = field(default_factory=dict[int, Child])  # results that were read before their turn
    _manifest: WeightsManifest = field(default_factory=lambda: WeightsManifest(0, {}))
    _published: dict[str, set[bytes]] = field(default_factory=dict[str, set[bytes]])  # objects, by manifest
    _held: set[bytes] = field(default_factory=set[bytes])  # of those: they stay in the store for groups
    _results: AsyncIterator[Child] | None = None
    _rows: list[_Row] = field(default_factory=list[_Row])
    _last_fault: str = ""
    _empty: int = 0  # steps in a row without a group
    _failed: int = 0  # groups of the step without a reward

    # ---- what ranks ask

    async def serve(self, wants: JsonObject) -> JsonObject:
        """Reply to a rank that requests the samples of a step and provides its weights."""
        weights = await self._publish(wants)
        step = int(wants["step"])
        if wants.get("evaluation"):
            rows = await self._evaluate(step, weights)
        else:
            rows = self._rows = await self._step(step, weights)
        path = self.directory / "rollouts.json"
        given = [self._row(row) for row in rows]
        await asyncio.to_thread(path.write_text, json.dumps({"rows": given}), "utf-8")
        return {"rollouts": str(path)}

    def scored(self, metrics: JsonObject, scored: list[JsonObject]) -> None:
        """Write the samples of a trained step, with rewards and advantages, to the file of samples.

        Adds to the step's `metrics` what the trainer does not know.
        """
        step = int(metrics["step"])
        if self._failed:
            metrics["rewards_failed"] = self._failed
        with self.samples.open("ab") as file:
            for row, of in zip(self._rows, scored, strict=True):
                file.write(dump_line(self._line(step, row, of)))

    @property
    def samples(self) -> Path:
        return self.directory / "samples.jsonl"

    def counts(self) -> JsonObject:
        """Return counts of groups and the devices that drew them, with what a successor needs.

        That is `children`, the ordinal of the next; `places`, those of steps in progress; `versions` of the policy that
        samples may use.
        """
        groups: JsonObject = {"generated": self.generated, "evaluated": self.evaluated}
        groups |= {"regenerated": self.regenerated, "dropped": self.dropped, "zeroed": self.zeroed}
        groups |= {"devices": sorted(self.devices)}
        places = {str(step): first for step, first in self._places.items()}
        return {**groups, "children": self.next, "places": places, "versions": [asdict(one) for one in self.versions]}

    def go_on(self, counts: JsonObject, samples: Path) -> None:
        """Continue after an earlier attempt, with its counts and samples."""
        self.next, self.dropped, self.zeroed = counts["children"], dict(counts["dropped"]), dict(counts["zeroed"])
        self.generated, self.evaluated = counts["generated"], counts["evaluated"]
        self.regenerated, self.devices = counts["regenerated"], set(counts["devices"])
        self._places = {int(step): first for step, first in counts["places"].items()}
        self.versions = versions_of(counts)
        shutil.copyfile(samples, self.samples)

    # ---- weights

    async def _publish(self, wants: JsonObject) -> Weights:
        """Store changed tensors as one object, and the list of all tensors as another."""
        path, version, stored = Path(wants["path"]), int(wants["step"]), ""
        if wants["written"]:
            stored = (await self._put(f"the weights of step {version}", path)).hex()
            await asyncio.to_thread(path.unlink)
        self._manifest = self._manifest.followed_by(version, wants["hashes"], wants["written"], stored)
        manifest = await self._put(f"the list of weights of step {version}", self._manifest.encode())
        self._published[manifest.hex()] = {manifest, *map(bytes.fromhex, self._manifest.files)}
        return Weights(version, manifest.hex(), blake3(canonical(wants["hashes"])).hexdigest())

    def _needs(self, asked: list[_Asked]) -> tuple[list[bytes], list[bytes]]:
        """Return the objects of versions that groups newly use, and those that no group needs any longer.

        An unchanged tensor stays with the version that wrote it.
        """
        coming = {one.weights.manifest for some in (asked, *self._asked.values()) for one in some}
        named = coming | {one.manifest for one in self.versions}
        self._published = {manifest: ids for manifest, ids in self._published.items() if manifest in named}
        needed, before = set[bytes]().union(*self._published.values()), self._held
        self._held = needed
        return sorted(needed - before), sorted(before - needed)

    async def _put(self, what: str, data: bytes | Path) -> bytes:
        return await with_room(f"{what} cannot be stored", lambda: self.context.put_object(data), self.context)

    # ---- groups

    async def _step(self, step: int, weights: Weights) -> list[_Row]:
        """Submit what the newest version draws: the samples of the step `lag` ahead, and those of earlier steps that
        have no older version."""
        settings = self.settings
        self.versions = [*(one for one in self.versions if one.version < weights.version), weights]
        for ahead in range(step, min(step + settings.lag, self.end - 1) + 1):
            if ahead not in self._asked:
                await self._spawn_step(ahead)
        self.versions = self.versions[-settings.lag :] if settings.lag else []
        self.context.progress(f"step {step + 1}: {settings.samples} samples are drawn")
        asked, self._failed = self._asked.pop(step), 0
        groups = await self._gather(asked)
        for number in range(1, getattr(settings, "dynamic_sampling", 0) + 1):
            silent = [one for one, rows in zip(asked, groups, strict=True) if _is_silent(rows)]
            if not silent:
                break
            await self._replace(step, silent, number, groups)
        self._places.pop(step, None)
        self._empty = 0 if any(groups) else self._empty + 1
        if self._empty == _EMPTY_STEPS:
            raise AttemptError(
                f"no group of the last {_EMPTY_STEPS} steps has a reward: all were dropped, the last one for this: "
                f"{self._last_fault}",
                code="no_rewards",
                retry=False,
            )
        return [row for rows in groups for row in rows]

    async def _replace(self, step: int, silent: list[_Asked], number: int, groups: list[list[_Row]]) -> None:
        """Replace groups whose samples all have the same reward by groups of other prompts (DAPO's dynamic
        sampling)."""
        settings, count = self.settings, len(self.prompts)
        chosen = step_rows(count, settings.seed + number * _ROUNDS, step, settings.prompts_per_step, self._total(count))
        asked = [
            _Asked(self.next + i, step, one.place, self.prompts[int(chosen[one.place])], one.weights, number)
            for i, one in enumerate(silent)
        ]
        self.next += len(asked)
        self.dropped["zero_variance"] = self.dropped.get("zero_variance", 0) + len(asked)
        await self._spawn(asked, settings.num_generations)
        for one, rows in zip(asked, await self._gather(asked), strict=True):
            groups[one.place] = rows

    async def _spawn_step(self, step: int) -> None:
        settings, count = self.settings, len(self.prompts)
        oldest = next(one for one in self.versions if one.version >= step - settings.lag)
        chosen = step_rows(count, settings.seed, step, settings.prompts_per_step, self._total(count))
        first = self._places.setdefault(step, self.next)
        asked = [_Asked(first + i, step, i, self.prompts[int(index)], oldest) for i, index in enumerate(chosen)]
        self.next = max(self.next, first + len(asked))
        self._asked[step] = asked
        await self._spawn(asked, settings.num_generations)

    async def _evaluate(self, step: int, weights: Weights) -> list[_Row]:
        assert self.evaluation is not None
        asked = [_Asked(self.next + i, step, i, self.evaluation[i], weights) for i in range(len(self.evaluation))]
        self.next += len(asked)
        await self._spawn(asked, 1, evaluation=True)
        rows = [row for rows in await self._gather(asked) for row in rows]
        self.generated, self.evaluated = self.generated - len(asked), self.evaluated + len(asked)
        return rows

    def _total(self, count: int) -> int:
        budget = self.settings.budget
        if budget.max_steps is not None:
            return budget.max_steps * self.settings.step_rows
        return total_rows(count, budget.epochs or 1)

    async def _spawn(self, asked: list[_Asked], samples: int, *, evaluation: bool = False) -> None:
        settings = self.settings
        spec = ItemSpec(
            executor=ROLLOUT,
            max_attempts=_ATTEMPTS,
            max_worker_lost=int(self.config["run"]["max_worker_lost"]),
            require_labels=tuple(sorted(self.config["generation"].get("require_labels", {}).items())),
        )
        items: list[NewItem] = []
        for one in asked:
            group = Group(
                step=one.step,
                index=one.place,
                prompt=one.prompt.ids,
                seeds=[self._seed(evaluation, one, sample) for sample in range(samples)],
                max_tokens=settings.max_completion_length,
                weights=one.weights,
                temperature=0.0 if evaluation else settings.temperature,
                stop=list(settings.stop_token_ids),
                scoring=Scoring(settings.functions, one.prompt.prompt, columns=one.prompt.columns, step=one.step)
                if settings.runs_code
                else None,
                environment=settings.episode,
                trial=self._trial(one, evaluation=evaluation),
                scoring_s=settings.reward_timeout,
            )
            identity = blake3(b"\x01group" + self.attempt.id + one.ordinal.to_bytes(8, "big") + group.identity())
            items.append(NewItem(identity.digest(), group.encode(), spec))
        keeps, lets_go = self._needs(asked)
        await self.context.spawn(items, first_ordinal=asked[0].ordinal, seal=False, keeps=keeps, lets_go=lets_go)

    def _trial(self, asked: _Asked, *, evaluation: bool) -> TaskPlay | None:
        settings = self.settings
        if settings.tasks is None:
            return None
        specs = self.config["executors"][JOB]["tasks"]["eval_dataset" if evaluation else "dataset"]
        prompt = settings.max_length - settings.max_completion_length
        return TaskPlay(specs[asked.prompt.columns["task"]], settings.tasks.max_turns, prompt, settings.temperature)

    def _seed(self, evaluation: bool, asked: _Asked, sample: int) -> int:
        named = canonical([self.settings.seed, evaluation, asked.step, asked.place, asked.round, sample])
        return int.from_bytes(blake3(named).digest()[:_SEED_BYTES], "big")

    async def _gather(self, asked: list[_Asked]) -> list[list[_Row]]:
        return [self._judged(one, await self._child(one.ordinal)) for one in asked]

    async def _child(self, ordinal: int) -> Child:
        """Return the result of a child. Results come in the order of ordinals, each once."""
        while ordinal not in self._early:
            if self._results is None:
                self._results = self.context.children(ordinal)
            try:
                child = await anext(self._results)
            except StopAsyncIteration:
                raise AttemptError("the segment was closed while it waited for samples", code="cancelled") from None
            self._early[child.ordinal] = child
        return self._early.pop(ordinal)

    def _judged(self, asked: _Asked, child: Child) -> list[_Row]:
        """Return a group's samples with rewards. Raises AttemptError if it has none and the run is to stop then."""
        where = f"step {asked.step + 1}, prompt of row {asked.prompt.number}"
        if child.outcome is not Outcome.DONE:
            failure = child.failure
            why = f"{failure.message} ({failure.code})" if failure is not None else child.outcome.name.lower()
            raise AttemptError(f"{where}: its samples could not be drawn: {why}", code="rollout_failed", retry=False)
        try:
            result = GroupResult.decode(child.data, len(self.settings.judges))
        except InvalidResultError as error:
            raise AttemptError(f"{where}: {error.message}", code="rollout_failed", retry=False) from error
        self.generated += 1
        self.regenerated += result.again
        self.devices.add(result.device)
        table: list[list[float | None]] = result.rewards
        if not result.fault and not all(math.isfinite(self._sum(one)) for one in self._by_name(table, result)):
            result.fault = {"code": "reward_invalid", "message": "the sum of its rewards is no finite number"}
            table = []
        if result.fault:
            code, message = str(result.fault["code"]), str(result.fault["message"])
            self._failed += 1
            self._last_fault = f"{where}: {message} ({code})"
            if self.settings.on_reward_error == "stop":
                raise AttemptError(
                    f"{where}: its reward failed: {message} ({code}): mend it, or set on_reward_error",
                    code="reward_failed",
                    retry=False,
                )
            if self.settings.on_reward_error == "drop_group" or not result.samples:
                self.dropped[code] = self.dropped.get(code, 0) + 1
                return []
            self.zeroed[code] = self.zeroed.get(code, 0) + 1
            table = table or [[0.0] * len(result.samples) for _ in self.settings.judges]
        found: list[_Row] = []
        for sample, rewards in zip(result.samples, self._by_name(table, result), strict=True):
            ids, fault = sample.prompt or result.prompt or asked.prompt.ids, result.fault
            why = f"{fault['message']} ({fault['code']})" if fault else ""
            found.append(_Row(asked, ids, sample, rewards, self._sum(rewards), why))
        return found

    # ---- rewards

    def _by_name(self, table: list[list[float | None]], result: GroupResult) -> list[dict[str, float | None]]:
        """Return each sample's rewards by name."""
        judges = self.settings.judges
        return [
            {name: one[place] for name, one in zip(judges, table, strict=True)} for place in range(len(result.samples))
        ]

    def _sum(self, rewards: Mapping[str, float | None]) -> float:
        weights = self.settings.weights
        return sum(weights[name] * value for name, value in rewards.items() if value is not None)

    # ---- forms

    @staticmethod
    def _row(row: _Row) -> JsonObject:
        """Return the row in the form of `backends.training.policy_trainer.Row`."""
        return {
            "group": row.asked.place, "number": row.asked.prompt.number, "prompt": row.prompt,
            "ids": row.sample.ids, "logprobs": row.sample.logprobs, "finish_reason": row.sample.finish_reason,
            "rewards": row.rewards, "reward": row.reward, "learnt": row.sample.learnt,
            "version": row.sample.versions[0][0],
        }  # fmt: skip

    @staticmethod
    def _line(step: int, row: _Row, scored: JsonObject) -> JsonObject:
        asked, sample = row.asked, asdict(row.sample)
        return {
            "step": step, "number": asked.prompt.number, "group": asked.place, "prompt": asked.prompt.prompt,
            "completion": sample["text"], "completion_ids": sample["ids"], "rewards": scored["rewards"],
            "reward": scored["reward"], "advantage": scored["advantage"], "policy_version": sample["versions"][0][0],
            "finish_reason": sample["finish_reason"], "seed": sample["seed"],
            **({"reward_fault": row.fault} if row.fault else {}),
        }  # fmt: skip


def _is_silent(rows: list[_Row]) -> bool:
    return bool(rows) and len({row.reward for row in rows}) == 1


def versions_of(counts: JsonObject) -> list[Weights]:
    """Return the policy versions that `Rollouts.counts` names."""
    return [Weights(**one) for one in counts.get("versions", [])]


async def version_files(versions: list[Weights], context: Context) -> dict[int, dict[str, str]]:
    """Return the files of policy versions on this host, by number and tensor."""
    found: dict[int, dict[str, str]] = {}
    for one in versions:
        manifest = await manifest_of(one, context)
        paths = {file: str(await context.object_path(bytes.fromhex(file))) for file in manifest.files}
        found[one.version] = {name: paths[file] for name, (file, _) in manifest.tensors.items()}
    return found


async def version_objects(versions: list[Weights], context: Context) -> tuple[bytes, ...]:
    """Return the objects of the versions that must be kept."""
    found: dict[str, None] = {}
    for one in versions:
        manifest = await manifest_of(one, context)
        found |= dict.fromkeys([one.manifest, *manifest.files])
    return tuple(bytes.fromhex(one) for one in found)


async def manifest_of(weights: Weights, context: Context) -> WeightsManifest:
    """Return the manifest. Raises AttemptError if it is unavailable."""
    path = await context.object_path(bytes.fromhex(weights.manifest))
    try:
        return WeightsManifest.decode(await asyncio.to_thread(path.read_bytes))
    except InputError as error:
        raise AttemptError(error.message, code="weights_invalid", retry=False) from error
