"""Executor of the `infer` workload: feeds rows to a backend's continuous batch and returns their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, InputError
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.honoured import FORWARDS
from rollout.workloads.infer.payload import decode_payload, encode_result
from rollout.workloads.infer.request import adapter_of, canonical, parse_row, row_seed
from rollout.workloads.invalid import refuse_invalid
from rollout.workloads.json_form import JsonObject

from rollout_worker.backends.environment import engine_devices, engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import Backend, EngineFaultError
from rollout_worker.backends.suggested import suggested_sampling
from rollout_worker.executors.infer_requests import (
    answer,
    engine_requests,
    read_answers,
    row_result,
    with_all_images,
)
from rollout_worker.executors.port import Attempt, Context, Done, Run, UnsuitableError, remember
from rollout_worker.executors.serving import SERVE, Engine, Room, Serving
from rollout_worker.executors.trees import located_options

_log = structlog.get_logger()
ENGINE_WAITS = "engine_waits"
"""Cause code of rows whose engine waits for something external, such as its server."""


class InferExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "engine"

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._sampling: dict[str, SamplingSection] = {}
        self._calls = 0
        self._suggested: JsonObject = {}
        self._room = Room(lambda: self.concurrency)
        self._serving: set[Serving] = set()

    @property
    def concurrency(self) -> int:
        return self._backend.concurrency if self._backend else 1

    @property
    def ahead(self) -> int:
        """Rows to hold ahead: a whole batch, because rows of equal length end in one step and the next must be
        there."""
        return self.concurrency

    @classmethod
    def engine_key(cls, run: Run) -> str:
        model = run.config["model"]
        identity = {key: model.get(key) for key in ("content_id", "uri", "tokenizer", "revision")}
        return blake3(canonical([identity, run.config["backend"]])).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        model: JsonObject = run.config["model"]
        adapters: dict[str, JsonObject] = model.get("adapters") or {}
        local = all(one.get("local") for one in (model, *adapters.values()))
        return engine_environment(run.config["backend"], local_model=local)

    @classmethod
    def devices(cls, run: Run) -> int:
        return engine_devices(run.config["backend"])

    @classmethod
    def replicas(cls, run: Run) -> int:
        wanted = run.config["backend"].get("replicas", 1)
        return 0 if wanted == "auto" else int(wanted)

    async def start(self, run: Run, context: Context) -> None:
        """Fetch the model and load it. Raises AttemptError (not retryable), which says what is missing."""
        options = await located_options(run, context)
        opened = open_backend(options)
        await opened.start()
        self._backend = opened
        kind, model = options.kind, options.model
        self._suggested = await suggested_sampling(kind, model, options.options.get("revision"))
        _log.info("engine_ready", backend=kind, device=opened.device, concurrency=opened.concurrency, run_id=run.run_id)

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if self._backend is None:
            raise AttemptError("the engine is not started", code="engine_not_started")
        if attempt.run.workload == SERVE:
            return await self._serve(self._backend, attempt, context)
        refuse_invalid(attempt.payload)
        try:
            payload = decode_payload(attempt.payload)
            kind = str(attempt.run.config["backend"]["kind"])
            request = parse_row(payload.row, self._defaults(attempt.run), kind)
            adapter = adapter_of(payload.row, attempt.run.config["model"].get("loras") or ())
        except InputError as error:
            raise AttemptError(error.message, code="bad_request", retry=False) from error
        request = await with_all_images(request, payload.images, fetch=kind not in FORWARDS)
        self._calls += 1
        # What comes before the dot names the attempt; one that was given back is called again.
        name = f"{attempt.id.hex()}-{attempt.attempt}.{self._calls}"
        waits = partial(context.hindered, code=ENGINE_WAITS)
        try:
            asked = engine_requests(request, name, row_seed(request, attempt.id), adapter=adapter, waits=waits)
            async with self._room.row():
                completion = await answer(self._backend, asked)
        except EngineFaultError as error:
            raise UnsuitableError(error.message, code=error.error_code, retry=error.retry) from error
        if not completion.choices and not completion.embeddings:
            raise AttemptError("the backend returned no completion", code="empty_completion")
        read_answers(completion, request, getattr(self._backend, "calls_in", None))
        data = encode_result(row_result(completion, payload.tag))
        units_out = sum(choice.tokens for choice in completion.choices)
        return Done(data, units_in=completion.prompt_tokens, units_out=units_out)

    async def _serve(self, backend: Backend, attempt: Attempt, context: Context) -> Done:
        engine = Engine(backend, attempt.run.config, self._suggested, self._room)
        serving = Serving(engine, attempt, context, partial(context.hindered, code=ENGINE_WAITS))
        self._serving.add(serving)
        try:
            return await serving.run()
        finally:
            self._serving.discard(serving)

    def leave(self, budget_s: float) -> None:
        for serving in self._serving:
            serving.leave(budget_s)

    def hold(self, on: bool) -> None:
        hold: Callable[[bool], None] | None = getattr(self._backend, "hold", None)
        if hold is not None:
            hold(on)

    async def close(self) -> None:
        if self._backend is not None:
            backend, self._backend = self._backend, None
            await backend.close()

    def _defaults(self, run: Run) -> SamplingSection:
        defaults = self._sampling.get(run.run_id)
        if defaults is None:
            sampling = SamplingSection.model_validate(run.config["sampling"])
            defaults = remember(self._sampling, run.run_id, sampling)
        return defaults
