"""Classifies errors of libraries by the remedy: too little memory, a full disk, or unsupported input. Libraries raise
them under many names."""

from __future__ import annotations

import errno

from rollout.workloads.train.config import TrainingSection

LESS_MEMORY = (
    "lower minibatch_size (and raise gradient_accumulation as much), or max_length, or set gradient_checkpointing = "
    "true"
)
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "not enough memory")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_ROOM = (
    "no space left on device", "disk quota exceeded", "file too large", "os error 28", "os error 27", "os error 122",
)  # fmt: skip


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host ran out of memory: torch.OutOfMemoryError, MemoryError, or the RuntimeError
    of CPU allocators."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and _says(error, _MEMORY)


def out_of_memory(settings: TrainingSection, error: BaseException) -> str:
    """Return the message, with the shape of a batch and what to lower."""
    return (
        f"out of memory with minibatches of {settings.minibatch_size} rows of at most {settings.max_length} tokens: "
        f"{LESS_MEMORY} ({str(error).partition(chr(10))[0][:300]})"
    )


def of_its_input(error: BaseException) -> bool:
    """Return whether the same input causes the error again. `tokenizers` raises a plain Exception for a text."""
    return isinstance(error, TypeError | ValueError | LookupError) or type(error) is Exception


def is_full(error: BaseException) -> bool:
    """Return whether a disk or quota is full. safetensors gives no error number, only text."""
    return (isinstance(error, OSError) and error.errno in _FULL) or _says(error, _NO_ROOM)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)
