"""The executor of the `infer` workload: rows to a backend's continuous batch and back."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, ConfigError, InputError
from rollout.objects.cache import ObjectCache
from rollout.objects.tree import materialise
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.model import tree_digest
from rollout.workloads.infer.payload import ChoiceResult, RowResult, decode_payload, encode_result
from rollout.workloads.infer.request import RowRequest, canonical, parse_row, row_seed
from rollout.workloads.invalid import refuse_invalid

from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.port import Backend, BackendOptions, Completion, Request, Sampling
from rollout_worker.executors.port import Attempt, Context, Done, Run, remember

_log = structlog.get_logger()


class InferExecutor:
    placement: ClassVar[Literal["engine", "slot"]] = "engine"

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._sampling: dict[str, SamplingSection] = {}
        self._calls = 0

    @property
    def concurrency(self) -> int:
        return self._backend.concurrency if self._backend else 1

    @property
    def ahead(self) -> int:
        """A whole batch: where all rows are of one length they end in one step, and the next must be there."""
        return self.concurrency

    @classmethod
    def engine_key(cls, run: Run) -> str:
        model = run.config["model"]
        identity = {key: model.get(key) for key in ("content_id", "uri", "tokenizer", "revision")}
        return blake3(canonical([identity, run.config["backend"]])).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        local = bool(run.config["model"].get("local"))
        return engine_environment(run.config["backend"], local_model=local)

    @classmethod
    def devices(cls, run: Run) -> int:
        """As many accelerators as the engine spreads one model over; a registered backend says it as vLLM does."""
        backend = run.config["backend"]
        if backend.get("device") == "cpu" or backend.get("kind") == "mock":
            return 0
        return 1 if backend.get("kind") == "transformers" else int(backend.get("tensor_parallel_size") or 1)

    async def start(self, run: Run, context: Context) -> None:
        """Bring the model here and load it. AttemptError (not retryable) says what is missing."""
        backend = dict(run.config["backend"])
        kind = str(backend.pop("kind"))
        model, tokenizer = await locate_model(run, context)
        if run.config["model"].get("revision"):
            backend["revision"] = run.config["model"]["revision"]
        options = BackendOptions(model=model, tokenizer=tokenizer, kind=kind, options=backend)
        opened = open_backend(options)
        await opened.start()
        self._backend = opened
        _log.info("engine_ready", backend=kind, device=opened.device, concurrency=opened.concurrency, run_id=run.run_id)

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if self._backend is None:
            raise AttemptError("the engine is not started", code="engine_not_started")
        refuse_invalid(attempt.payload)
        try:
            request = parse_row(decode_payload(attempt.payload).row, self._defaults(attempt.run))
        except InputError as error:
            raise AttemptError(error.message, code="bad_request", retry=False) from error
        self._calls += 1
        completion = await self._backend.generate(engine_request(request, attempt, self._calls))
        if not completion.choices:
            raise AttemptError("the backend returned no completion", code="empty_completion")
        data = encode_result(row_result(completion))
        units_out = sum(choice.tokens for choice in completion.choices)
        return Done(data, units_in=completion.prompt_tokens, units_out=units_out)

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


def open_backend(options: BackendOptions) -> Backend:
    """The backend registered under `options.kind`. AttemptError (not retryable) when there is none."""
    registered = entry_points(group="rollout.backends")
    found = [entry for entry in registered if entry.name == options.kind]
    if not found:
        known = ", ".join(sorted({entry.name for entry in registered})) or "none"
        raise AttemptError(
            f"no backend {options.kind!r} is installed on this worker (installed: {known})",
            code="backend_missing",
            retry=False,
        )
    try:
        return cast(Backend, found[0].load()(options))
    except ImportError as error:
        raise AttemptError(
            f"backend {options.kind!r} cannot be imported on this worker: {error}: install its extra, "
            f"pip install 'rollout-engine[{options.kind}]'",
            code="backend_missing",
            retry=False,
        ) from error


async def locate_model(run: Run, context: Context) -> tuple[str, str | None]:
    """Where the model and its tokenizer are on this host: directories, or Hugging Face names as given."""
    model: dict[str, Any] = run.config["model"]
    path = model["uri"]
    if model.get("local"):
        path = await _directory(model["path"], model["tree"], model.get("manifest"), context)
    tokenizer = model.get("tokenizer")
    if tokenizer is not None and model.get("tokenizer_local"):
        manifest = model.get("tokenizer_manifest")
        tokenizer = await _directory(model["tokenizer_path"], model["tokenizer_tree"], manifest, context)
    return path, tokenizer


async def _directory(path: str, tree: str, manifest: str | None, context: Context) -> str:
    """The very directory the client named if its files are here too (one machine, a shared disk), else from objects."""
    if await asyncio.to_thread(_holds, Path(path), tree):
        return path
    if manifest is None:
        raise AttemptError(
            f"the model directory {path} is not on this host, or holds other files, and was not uploaded",
            code="model_missing",
            retry=False,
        )
    manifest_id = bytes.fromhex(manifest)
    source = await context.object_path(manifest_id)
    # Beside the host's cache, so that every engine on the host shares the directory and files are links.
    sharded = source.parent.name == manifest[:2]
    root = source.parents[1].with_name(f"{source.parents[1].name}-trees") if sharded else context.scratch / "trees"
    return str(await materialise(manifest_id, cast(ObjectCache, _ContextCache(context)), root))


def _holds(path: Path, tree: str) -> bool:
    try:
        return path.is_dir() and tree_digest(path)[0].hex() == tree
    except ConfigError:
        return False


class _ContextCache:
    """What `materialise` needs of a cache, through the attempt's context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def path(self, object_id: bytes) -> Path:
        return await self._context.object_path(object_id)


def engine_request(request: RowRequest, attempt: Attempt, call: int = 0) -> Request:
    """`request_id` differs between attempts, and between calls for one that was given back: an engine never sees one id
    twice. What comes before the dot names the attempt."""
    return Request(
        request_id=f"{attempt.id.hex()}-{attempt.attempt}.{call}",
        sampling=to_sampling(request.sampling, row_seed(request, attempt.id)),
        prompt=request.prompt,
        messages=request.messages,
        template=request.template,
    )


def to_sampling(section: SamplingSection, seed: int) -> Sampling:
    if isinstance(section.json_schema, str):
        raise ConfigError("sampling.json_schema must be resolved before a run is submitted")
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_tokens=section.max_tokens,
        min_tokens=section.min_tokens,
        stop=tuple(section.stop),
        seed=seed,
        n=section.n,
        logprobs=section.logprobs,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        repetition_penalty=section.repetition_penalty,
        json_schema=section.json_schema,
        ignore_eos=section.ignore_eos,
    )


def row_result(completion: Completion) -> RowResult:
    choices = tuple(
        ChoiceResult(choice.text, choice.finish_reason, choice.tokens, choice.logprobs) for choice in completion.choices
    )
    return RowResult(choices, completion.prompt_tokens)
