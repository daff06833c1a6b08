"""What an inference engine is to the infer executor. Factories register under `rollout.backends`:

def open_backend(config: BackendOptions) -> Backend
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollout.model.errors import AttemptError
from rollout.workloads.serve.frames import CANNOT_CONTINUE


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """`model` is a local directory or a Hugging Face name, already resolved on this host. `trained`: requests will ask
    for `Sampling.ids`, and a `PolicyBackend` gets new weights. `adapters`: places of LoRA adapters, by the names that
    requests use; the one without a name is of those that name none."""

    model: str
    tokenizer: str | None = None
    kind: str = "mock"
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # the rest of [backend]
    trained: bool = False
    adapters: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one row. `seed` is always set (derived from the item id); `seed_given`: the run
    or the row names one, from which it follows.

    `seeds`: one of each of the `n` completions; empty: they follow `seed`. `limits`: likewise; empty: all have
    `max_tokens`. `stop_ids`: tokens that end a completion, beside the model's own, and are no part of its text. `ids`:
    a completion has `Choice.ids` and `Choice.id_logprobs`, and its text has the tokens of `stop_ids`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0
    n: int = 1
    logprobs: int | None = None  # number of alternatives per token; 0: only the chosen token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: dict[str, Any] | None = None
    ignore_eos: bool = False
    seeds: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ids: bool = False
    seed_given: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    allowed_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    @property
    def structure(self) -> tuple[Literal["json", "regex", "choice", "grammar"], Any] | None:
        """The form of the text, by vLLM's names. None: any."""
        if self.json_schema is not None:
            return "json", self.json_schema
        if self.regex is not None:
            return "regex", self.regex
        if self.choice:
            return "choice", list(self.choice)
        return None if self.grammar is None else ("grammar", self.grammar)


@dataclass(frozen=True, slots=True)
class Embed:
    """A text, or token ids as they are, to be made a vector. `dimensions`: the first so many, of unit length again.
    `pooling`: mean, last or cls; empty: as the model's files say."""

    input: str | tuple[int, ...]
    dimensions: int | None = None
    pooling: str = ""


def cannot_continue(why: str) -> AttemptError:
    """Of a request with `so_far` that this engine cannot go on with."""
    return AttemptError(f"a request cannot go on behind its first tokens: {why}", code=CANNOT_CONTINUE, retry=False)


class EngineFaultError(AttemptError):
    """No row can be served by this engine: it is not the row's fault, and costs it no attempt. `retry`: the engine may
    be able to by itself, later."""


def _nobody(message: str) -> None:
    """Hears why a row waits, and forgets it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt has been read. `thinking`: as of `Completion`."""

    prompt_tokens: int
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice. The texts of all deltas of a choice, joined, are its text.

    `ids` and `logprobs` have every token as soon as it is drawn. Text that a stop string or the rest of a character may
    still change comes later; how much of it has come is decided by the ids that were drawn, not by when they were.
    """

    index: int
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    """Of a server that parts it from the text itself, as `tool_calls`, which are whole."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    repeated: bool = False
    """What the deltas of `Request.so_far` have said."""
    last: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One row. Exactly one of `prompt`, `prompt_ids`, `prompts`, `messages`, `embed` and `body` is set; messages go
    through the model's chat template, and `prompt_ids` are taken as they are. `prompts`: such ids of each of the `n`
    completions. `body` and `url`: an OpenAI request as its row has it, without `model`, for a backend that forwards
    it; `sampling` then says nothing beside the run's defaults."""

    request_id: str
    sampling: Sampling
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the chat template, such as `enable_thinking`."""
    prompt_ids: tuple[int, ...] | None = None
    prompts: tuple[tuple[int, ...], ...] = ()
    embed: Embed | None = None
    body: dict[str, Any] | None = None
    url: str = ""
    adapter: str = ""
    """One of `BackendOptions.adapters`; empty: that without a name, or none."""
    alone: bool = False
    """All completions of the row begin together, and, where a backend can do that, no other row shares a pass of the
    model with them: their bytes do not depend on what else the engine does."""
    waits: Callable[[str], None] = _nobody
    """Hears, for people, what outside the row waits for; an empty text: for nothing any longer."""
    on_begin: Callable[[Begun], None] | None = None
    on_delta: Callable[[Delta], None] | None = None
    """Both are called on the event loop, before `generate` returns. Without `on_delta` nothing is streamed."""
    so_far: tuple[int, ...] = ()
    """Ids that were drawn already, of the one choice of a request with `on_delta`: it goes on behind them. The first
    delta is `repeated`, and the completion is the whole one, but for `Choice.logprobs`, which has the new tokens'.
    AttemptError(code=CANNOT_CONTINUE, retry=False): this engine cannot."""


@dataclass(slots=True)
class Choice:
    text: str
    finish_reason: str  # stop | length
    tokens: int
    logprobs: list[dict[str, Any]] | None = None
    """Per token: {"token": str, "logprob": float, "top": [{"token": str, "logprob": float}, ...]}."""
    ids: list[int] = field(default_factory=list[int])
    """All that were drawn, with the end-of-sequence token if it was."""
    id_logprobs: list[float] = field(default_factory=list[float])
    """Of `ids`: of the logits divided by the temperature (1 where it is 0), before anything is cut off."""
    tool_calls: list[dict[str, Any]] | None = None
    """As OpenAI writes them: {"id", "type": "function", "function": {"name", "arguments"}}, arguments a JSON text."""
    reasoning: str | None = None
    refusal: str | None = None
    note: str | None = None
    """What a person should know of how the text was read."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the token beside the model's own, that ended the text, where the engine says it."""


@dataclass(slots=True)
class Completion:
    """`embeddings`: of a row that asks for vectors, one of each input; it has no choices."""

    choices: list[Choice]
    prompt_tokens: int
    embeddings: list[list[float]] | None = None
    thinking: bool = False
    """The chat template opened `<think>` for the model: texts begin within it."""


class Backend(Protocol):
    @property
    def concurrency(self) -> int:
        """Sequences the engine keeps in a batch."""
        ...

    @property
    def device(self) -> str: ...

    async def start(self) -> None:
        """Load the model. AttemptError(retry=False) with what to do if it cannot be loaded."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Called concurrently, for up to twice `concurrency` rows: the engine batches. It begins the first that was
        called, and with it those that it chooses. Cancellation aborts the sequence.

        AttemptError(code="prompt_too_long" | "bad_request" ..., retry=False) for a row that can never succeed.
        EngineFaultError: no row can.
        """
        ...

    async def close(self) -> None: ...

    # Optional: `hold(on: bool) -> None`, as of an executor (executors/port.py);
    # `calls_in: FindCalls | None`, which reads calls of tools in texts of its model (answers.py).
