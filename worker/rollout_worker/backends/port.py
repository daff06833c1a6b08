"""The interface between an inference engine and the infer executor. Factories register under `rollout.backends`:

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
    """`model` is a local directory or a Hugging Face name, already resolved on this host. `trained` means that requests
    will ask for `Sampling.ids`, and a `PolicyBackend` gets new weights. `adapters` are paths of LoRA adapters by the
    names that requests use; the one without a name serves requests that name none."""

    model: str
    tokenizer: str | None = None
    kind: str = "mock"
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # the rest of [backend]
    trained: bool = False
    adapters: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of a row. `seed` is always set (derived from the item id); `seed_given` means that
    the run or the row names one, from which it follows.

    `seeds` has one for each of the `n` completions; if empty, they follow from `seed`. `limits` likewise; if empty, all
    have `max_tokens`. `stop_ids` are tokens that end a completion, besides the model's own, and do not belong to its
    text. With `ids`, a completion has `Choice.ids` and `Choice.id_logprobs`, and its text includes the tokens of
    `stop_ids`.
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
        """The form of the text, by vLLM's names, or None for any."""
        if self.json_schema is not None:
            return "json", self.json_schema
        if self.regex is not None:
            return "regex", self.regex
        if self.choice:
            return "choice", list(self.choice)
        return None if self.grammar is None else ("grammar", self.grammar)


@dataclass(frozen=True, slots=True)
class Embed:
    """A text, or token ids, to embed. `dimensions` keeps the first numbers, normalised again. `pooling` is mean, last
    or cls; empty means what the model's files specify."""

    input: str | tuple[int, ...]
    dimensions: int | None = None
    pooling: str = ""


def cannot_continue(why: str) -> AttemptError:
    """Return the error for a request with `so_far` that this engine cannot continue."""
    return AttemptError(f"a request cannot go on behind its first tokens: {why}", code=CANNOT_CONTINUE, retry=False)


class EngineFaultError(AttemptError):
    """The engine can serve no row. That is not the row's fault, and costs it no attempt. `retry` means that the engine
    may recover by itself."""


def _nobody(message: str) -> None:
    """Ignore the reason why a row waits."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt has been read. `thinking` is that of `Completion`."""

    prompt_tokens: int
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a choice. The texts of all its deltas, joined, are its text.

    `ids` and `logprobs` have every token as soon as it is generated. Text that a stop string or the rest of a character
    may still change comes later; which text has come depends on the ids generated, not on their timing.
    """

    index: int
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    """Reasoning that a server separates from the text itself, like `tool_calls`, which are complete."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    repeated: bool = False
    """Whether this repeats the deltas of `Request.so_far`."""
    last: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A row. Exactly one of `prompt`, `prompt_ids`, `prompts`, `messages`, `embed` and `body` is set. Messages go
    through the model's chat template; `prompt_ids` are used unchanged. `prompts` has such ids for each of the `n`
    completions. `body` and `url` are an OpenAI request as its row has it, without `model`, for a backend that forwards
    it; `sampling` then has only the run's defaults."""

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
    """One of `BackendOptions.adapters`; empty for the one without a name, or none."""
    alone: bool = False
    """Whether all completions of the row start together and, if the backend supports it, share no pass of the model
    with other rows: their bytes then do not depend on what else the engine does."""
    waits: Callable[[str], None] = _nobody
    """Called with text for users about what the row waits for, outside itself; "" when it no longer waits."""
    on_begin: Callable[[Begun], None] | None = None
    on_delta: Callable[[Delta], None] | None = None
    """Both are called on the event loop, before `generate` returns. Without `on_delta` nothing is streamed."""
    so_far: tuple[int, ...] = ()
    """Ids already generated, for the single choice of a request with `on_delta`: it continues after them. The first
    delta is `repeated`, and the completion is complete, except that `Choice.logprobs` covers new tokens only. If this
    engine cannot, it raises AttemptError(code=CANNOT_CONTINUE, retry=False)."""


@dataclass(slots=True)
class Choice:
    text: str
    finish_reason: str  # stop | length
    tokens: int
    logprobs: list[dict[str, Any]] | None = None
    """Per token: {"token": str, "logprob": float, "top": [{"token": str, "logprob": float}, ...]}."""
    ids: list[int] = field(default_factory=list[int])
    """All generated ids, including an end-of-sequence token."""
    id_logprobs: list[float] = field(default_factory=list[float])
    """Log-probabilities of `ids`, from the logits divided by the temperature (1 if it is 0), before any truncation."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls as OpenAI writes them: {"id", "type": "function", "function": {"name", "arguments"}}, arguments being JSON
    text."""
    reasoning: str | None = None
    refusal: str | None = None
    note: str | None = None
    """A note for users about how the text was parsed."""
    stop_reason: str | int | None = None
    """The stop string that ended the text, or the id of a token besides the model's own, if the engine reports it."""


@dataclass(slots=True)
class Completion:
    """The completion of a row. A row that asks for embeddings has one per input, and no choices."""

    choices: list[Choice]
    prompt_tokens: int
    embeddings: list[list[float]] | None = None
    thinking: bool = False
    """Whether the chat template opened `<think>`, so that texts begin inside it."""


class Backend(Protocol):
    @property
    def concurrency(self) -> int:
        """Number of sequences that the engine batches."""
        ...

    @property
    def device(self) -> str: ...

    async def start(self) -> None:
        """Load the model. Raises AttemptError(retry=False) with the remedy if it cannot be loaded."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Generate a completion. It is called concurrently, for up to twice `concurrency` rows, and the engine batches.
        The first call starts first, together with others that the engine chooses. Cancellation aborts the sequence.

        Raises AttemptError(code="prompt_too_long" | "bad_request" ..., retry=False) for a row that can never succeed,
        and EngineFaultError if no row can.
        """
        ...

    async def close(self) -> None: ...

    # Optional: `hold(on: bool) -> None`, as of an executor (executors/port.py);
    # `calls_in: FindCalls | None`, which reads calls of tools in texts of its model (answers.py).
