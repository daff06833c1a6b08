"""What reinforcement learning needs of a backend besides completions."""

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
    """Whether `load_weights` needs all tensors that differ from the model's files, not only those that differ from the
    previous weights."""

    def tokens(self) -> TextCodec:
        """Return the model's codec, once the backend has started."""
        ...

    async def load_weights(self, files: Mapping[Path, Sequence[str]]) -> None:
        """Replace these tensors, by their names in the model's files, from safetensors files. Nothing computed with the
        old weights is used afterwards. No row may be running.

        If this raises, the engine may have part of the tensors, and must be closed.
        """
        ...
