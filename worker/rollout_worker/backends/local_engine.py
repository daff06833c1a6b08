"""What engines share that hold their model in this process: device, tokens, images, and sequences at once."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from rollout.model.errors import AttemptError

from rollout_worker.backends.port import BackendOptions
from rollout_worker.backends.tokens import TextCodec
from rollout_worker.backends.vision import Vision

CPU_SEQUENCES = 32
GPU_SEQUENCES = 256


def not_started() -> AttemptError:
    return AttemptError("the engine is not started", code="engine_not_started")


class LocalEngine:
    def __init__(self, config: BackendOptions) -> None:
        self._config = config
        self._options = config.options
        self._codec: TextCodec | None = None
        self._vision: Vision | None = None
        self._device = ""
        self._concurrency = int(self._options.get("max_num_seqs") or CPU_SEQUENCES)

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def device(self) -> str:
        return self._device

    def tokens(self) -> TextCodec:
        if self._codec is None:
            raise not_started()
        return self._codec

    def _choose_device(self) -> None:
        """Choose the device, and with it the number of concurrent sequences. Raises AttemptError as `probe_device`
        does."""
        self._device = probe_device(self._options.get("device"))
        if not self._options.get("max_num_seqs"):
            self._concurrency = GPU_SEQUENCES if self._device == "cuda" else CPU_SEQUENCES

    def _load_codec(self, max_model_len: int) -> TextCodec:
        self._codec = TextCodec.load(
            self._config.tokenizer or self._config.model,
            revision=None if self._config.tokenizer else self._options.get("revision"),
            trust_remote_code=bool(self._options.get("trust_remote_code")),
            max_model_len=max_model_len,
        )
        return self._codec

    def _load_vision(self) -> None:
        self._vision = Vision.load(
            self._config.model,
            self.tokens(),
            revision=self._options.get("revision"),
            trust_remote_code=bool(self._options.get("trust_remote_code")),
        )


def probe_device(wanted: str | None) -> str:
    """cpu or cuda, by asking torch and nothing else. AttemptError when cuda is wanted and not there."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise AttemptError(
            'backend.device is "cuda" but torch.cuda.is_available() is false on this worker: check the driver, or '
            "that a CUDA build of torch is installed",
            code="device_missing",
            retry=False,
        )
    return wanted or ("cuda" if available else "cpu")
