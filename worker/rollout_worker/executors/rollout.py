"""Executor of rollout groups: several samples of one prompt, from the policy version that the item names.

A process belongs to one run, and its engine holds one version at a time. Groups of that version run concurrently; a
group of another version waits until they have ended, and later groups wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, InputError
from rollout.workloads.train.rollouts import Ask, Group, GroupResult, Sample, Weights, decode_item
from rollout.workloads.train.templates import Template, find_template

from rollout_worker.backends.environment import engine_devices, engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.policy import PolicyBackend
from rollout_worker.backends.port import BackendOptions, Choice, Completion, Request, Sampling
from rollout_worker.backends.tokens import TextCodec
from rollout_worker.executors.port import WEIGHTS_GONE, Attempt, Context, Done, Run, UnsuitableError
from rollout_worker.executors.rollout_asks import answer
from rollout_worker.executors.rollout_scoring import Code, score
from rollout_worker.executors.rollout_trials import trials
from rollout_worker.executors.rollout_turns import Game, Turn
from rollout_worker.executors.train_rollouts import manifest_of
from rollout_worker.executors.train_room import with_room
from rollout_worker.executors.trees import located_options

_log = structlog.get_logger()

NOTHING = Weights(-1, "")
"""Weights of the model as its files have them."""
T = TypeVar("T")


class RolloutExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "engine"

    def __init__(self) -> None:
        self._options: BackendOptions | None = None
        self._engine: PolicyBackend | None = None  # None: not started, or what it holds is not known
        self._codec: TextCodec | None = None
        self._device = ""
        self._template: Template | None = None
        self._concurrency = 1
        self._held = NOTHING
        self._hashes: dict[str, str] = {}  # of the tensors that are not as in the model's files
        self._turn = asyncio.Lock()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return a key per run, because engines hold the run's weights."""
        return blake3(f"rollout {run.run_id}".encode()).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return engine_environment(run.config["backend"], local_model=bool(run.config["model"].get("local")))

    @classmethod
    def devices(cls, run: Run) -> int:
        return engine_devices(run.config["backend"])

    @classmethod
    def shares_devices(cls, run: Run) -> bool:
        """Return whether the engine shares devices with the trainer, which waits while samples are drawn."""
        return run.config.get("placement") == "colocated"

    async def start(self, run: Run, context: Context) -> None:
        self._concurrency = int(run.config.get("groups_at_once") or 1)
        self._options = replace(await located_options(run, context), trained=True)
        self._engine = await self._open()
        self._codec, self._device = self._engine.tokens(), self._engine.device
        self._template = find_template(self._codec.tokenizer, run.config.get("chat_template"))

    async def run(self, attempt: Attempt, context: Context) -> Done:
        try:
            group = decode_item(attempt.payload)
        except InputError as error:
            raise AttemptError(error.message, code="bad_request", retry=False) from error
        name = f"{attempt.id.hex()}-{attempt.attempt}"
        if isinstance(group, Ask):
            return await self._answer(group, name, context)
        again = attempt.failures + attempt.losses > 0
        code = Code(attempt, context, group.scoring_s)
        if group.trial is not None and self._codec is not None:
            result = await trials(group, group.trial, self._codec, attempt, context, again)
        elif group.environment is not None:
            if group.scoring is None or self._codec is None or self._template is None:
                raise AttemptError("a group with an environment has no row for it", code="bad_request", retry=False)

            async def draw(turns: list[Turn]) -> list[Choice]:
                # Nothing is held while an environment answers: whoever wants other weights meanwhile may be what keeps
                # this attempt from being resumed, under a cap of the run's. The version is the same in each turn.
                request = _request(group, name, turns)
                return (await self._drawn(request, group.weights, context)).choices

            game = Game(group, group.environment, group.scoring, self._codec, self._template, draw, code)
            result = await game.result(again)
        else:
            found = await self._drawn(_request(group, name), group.weights, context)
            pairs = zip(found.choices, group.seeds, strict=True)
            samples = [_sample(choice, seed, group.weights.version) for choice, seed in pairs]
            result = GroupResult(samples, again=again)
            await score(group, result, code)
        result.device = self._device
        drawn = sum(sum(sample.learnt) if sample.learnt else len(sample.ids) for sample in result.samples)
        if group.trial is not None:
            return Done(result.encode())  # its tokens are counted where they were drawn
        return Done(result.encode(), units_in=len(result.prompt or group.prompt), units_out=drawn)

    async def _answer(self, ask: Ask, name: str, context: Context) -> Done:
        assert self._codec is not None and self._template is not None

        async def draw(request: Request) -> Choice:
            return (await self._drawn(request, ask.policy.weights, context)).choices[0]

        found = await answer(ask, name, self._codec, self._template, draw)
        return Done(found.encode(), units_in=len(ask.so_far) + len(found.prompt), units_out=len(found.ids))

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _drawn(self, request: Request, weights: Weights, context: Context) -> Completion:
        async with self._holding(weights, context) as engine:
            self._calls += 1
            return await engine.generate(replace(request, request_id=f"{request.request_id}.{self._calls}"))

    @asynccontextmanager
    async def _holding(self, weights: Weights, context: Context) -> AsyncGenerator[PolicyBackend]:
        """Hold the engine at this version."""
        async with self._turn:
            engine = self._engine
            if engine is None or weights != self._held:
                engine = await self._switch(weights, context)
            self._running += 1
            self._idle.clear()
        try:
            yield engine
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _switch(self, weights: Weights, context: Context) -> PolicyBackend:
        """Switch the engine to `weights`. All files are fetched first; an engine that may have loaded part of them is
        closed."""
        manifest = await _fetched(weights, lambda: manifest_of(weights, context), context)
        engine = self._engine
        if self._hashes.keys() - manifest.tensors.keys():
            engine = None  # how the others were, the model's own files know
        held = self._hashes if engine is not None else {}
        every = engine is not None and engine.whole_updates and manifest.hashes != held
        wanted: dict[str, list[str]] = {}
        for name, (file, digest) in sorted(manifest.tensors.items()):
            if every or held.get(name) != digest:
                wanted.setdefault(file, []).append(name)

        async def paths() -> dict[Path, list[str]]:
            return {await context.object_path(bytes.fromhex(file)): names for file, names in wanted.items()}

        files = await _fetched(weights, paths, context)
        await self._idle.wait()
        if engine is None:
            await self.close()
            engine = await self._open()
        self._engine = None
        try:
            if files:
                await engine.load_weights(files)
        except BaseException:
            await engine.close()
            raise
        self._engine, self._held, self._hashes = engine, weights, manifest.hashes
        _log.debug("policy_version", version=weights.version, files=len(files))
        return engine

    async def _open(self) -> PolicyBackend:
        if self._options is None:
            raise AttemptError("the engine is not started", code="engine_not_started")
        engine = open_backend(self._options)
        if not isinstance(engine, PolicyBackend):
            message = f"the backend {self._options.kind} cannot take the weights of a policy: use transformers or vllm"
            raise AttemptError(message, code="bad_run_config", retry=False)
        await engine.start()
        self._held, self._hashes = NOTHING, {}
        return engine


async def _fetched(weights: Weights, fetch: Callable[[], Awaitable[T]], context: Context) -> T:
    """Return what `fetch` returns. Raises UnsuitableError if the weights are not in the store."""
    what = f"the weights of version {weights.version}"
    try:
        return await with_room(f"{what} cannot be fetched", fetch, context)
    except AttemptError as error:
        if error.error_code != "not_found":
            raise
        raise UnsuitableError(
            f"{what} are gone from the store: the segment publishes them again when it begins again, which it does "
            "after `rollout run kill` and `rollout run resume`",
            code=WEIGHTS_GONE,
        ) from error


def _request(group: Group, request_id: str, turns: Sequence[Turn] = ()) -> Request:
    """Return the request for a group. `turns` are those of the samples that continue; if empty, all samples begin."""
    sampling = Sampling(
        temperature=group.temperature,
        max_tokens=group.max_tokens,
        n=len(turns or group.seeds),
        seeds=tuple(turn.seed for turn in turns) or tuple(group.seeds),
        limits=tuple(turn.limit for turn in turns),
        stop_ids=tuple(group.stop),
        ids=True,
    )
    if not turns:
        return Request(request_id, sampling, prompt_ids=tuple(group.prompt), alone=True)
    return Request(request_id, sampling, prompts=tuple(tuple(turn.prompt) for turn in turns), alone=True)


def _sample(choice: Choice, seed: int, version: int) -> Sample:
    return Sample(
        ids=choice.ids,
        logprobs=choice.id_logprobs,
        finish_reason="stop" if choice.finish_reason == "stop" else "length",
        seed=seed,
        text=choice.text,
        versions=[[version, len(choice.ids)]],
    )
