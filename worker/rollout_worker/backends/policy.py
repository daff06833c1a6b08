"""What reinforcement learning asks of a backend beside completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from rollout_worker.backends.port import Backend
from rollout_worker.backends.tokens import TextCodec


@runtime_checkable
class PolicyBackend(Backend, Protocol):
    """A backend whose model's weights can be replaced."""

    whole_updates: ClassVar[bool]
    """`load_weights` needs all tensors in which the new weights differ from the model's files, not only those in which
    they differ from the weights before."""

    def tokens(self) -> TextCodec:
        """Of the model, once it is started."""
        ...

    async def load_weights(self, files: Mapping[Path, Sequence[str]]) -> None:
        """Replace these tensors, by their names in the model's files; safetensors files have them. Nothing that was
        computed with the weights before is used after it. No row may be under way.

        An error: the engine may hold a part of them, and must be closed.
        """
        ...
