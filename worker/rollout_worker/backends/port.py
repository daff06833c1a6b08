"""What an inference engine is to the infer executor. Factories register under `rollout.backends`:

def open_backend(config: BackendOptions) -> Backend
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """`model` is a local directory or a Hugging Face name, already resolved on this host."""

    model: str
    tokenizer: str | None = None
    kind: str = "mock"
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # the rest of [backend]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one row. `seed` is always set (derived from the item id)."""

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


@dataclass(frozen=True, slots=True)
class Request:
    """One row. Exactly one of `prompt` and `messages` is set; messages go through the model's chat template."""

    request_id: str
    sampling: Sampling
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the chat template, such as `enable_thinking`."""


@dataclass(slots=True)
class Choice:
    text: str
    finish_reason: str  # stop | length
    tokens: int
    logprobs: list[dict[str, Any]] | None = None
    """Per token: {"token": str, "logprob": float, "top": [{"token": str, "logprob": float}, ...]}."""


@dataclass(slots=True)
class Completion:
    choices: list[Choice]
    prompt_tokens: int


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
        """Called concurrently, for up to twice `concurrency` rows: the engine batches, and begins them in the order of
        the calls. Cancellation aborts the sequence.

        AttemptError(code="prompt_too_long" | "bad_request" ..., retry=False) for a row that can never succeed.
        """
        ...

    async def close(self) -> None: ...
