"""Embeddings of a Hugging Face model: its last hidden states, pooled to one vector of unit length per text.

Shapes: B texts of a pass, T tokens of the longest, H numbers of a vector.
"""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.model.errors import AttemptError

_PASS_TOKENS = 16_384
"""Maximum padded tokens of one pass, which bounds memory."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_PLAIN = ("Transformer", "Pooling", "Normalize")


def pooling_of(name: str, revision: str | None, *, causal: bool) -> str:
    """Return the pooling that the model's files specify (as sentence-transformers writes them); else, like vLLM, the
    last token of a causal model and the first of any other. Raises AttemptError if the files specify something
    unsupported."""
    modules: list[dict[str, Any]] = _file(name, "modules.json", revision) or []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _PLAIN:
            raise _unsupported(f"a module {kind}")
        if kind != "Pooling":
            continue
        given: dict[str, Any] = _file(name, f"{module.get('path', '1_Pooling')}/config.json", revision) or {}
        wanted = [key for key, value in given.items() if key.startswith("pooling_mode") and value is True]
        if wanted and (len(wanted) > 1 or wanted[0] not in _MODES):
            raise _unsupported(" and ".join(wanted))
        if wanted:
            return _MODES[wanted[0]]
    return "last" if causal else "cls"


def _file(name: str, file: str, revision: str | None) -> Any:
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(name, file, revision=revision, **missing)
    return None if found is None else json.loads(Path(found).read_text("utf-8"))


def _unsupported(what: str) -> AttemptError:
    message = f"the model's modules.json has {what}, which backend transformers does not do: use backend vllm"
    return AttemptError(message, code="bad_request", retry=False)


@dataclass(slots=True, eq=False)
class _Text:
    ids: list[int]
    pooling: str
    future: asyncio.Future[list[float]]


class Embedder:
    """Runs one pass at a time over waiting texts, the longest first, to save padding. `lock` is held while the model is
    in use."""

    def __init__(self, base: Any, device: str, texts: int, lock: threading.Lock) -> None:
        self._base = base
        self._device = device
        self._texts = texts
        self._lock = lock
        self._waiting: list[_Text] = []
        self._passes: asyncio.Task[None] | None = None

    async def vector(self, ids: list[int], pooling: str) -> list[float]:
        """Return the vector, not normalised."""
        text = _Text(ids, pooling, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run())
        return await text.future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # those that are asked for at the same time go together
        while chosen := self._next():
            try:
                vectors = await asyncio.to_thread(self._forward, chosen)
            except Exception as error:  # noqa: BLE001 - a fault in the model must reach its rows, or they wait for ever
                failure = AttemptError(f"the model failed in a step: {error!r}", code="engine_error")
                for text in chosen:
                    if not text.future.done():
                        text.future.set_exception(failure)
                continue
            for text, vector in zip(chosen, vectors, strict=True):
                if not text.future.done():
                    text.future.set_result(vector)

    def _next(self) -> list[_Text]:
        self._waiting = sorted((text for text in self._waiting if not text.future.done()), key=lambda t: -len(t.ids))
        if not self._waiting:
            return []
        count = max(1, min(self._texts, _PASS_TOKENS // len(self._waiting[0].ids)))
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        return chosen

    def _forward(self, texts: list[_Text]) -> list[list[float]]:
        import torch

        lengths = [len(text.ids) for text in texts]
        width = max(lengths)
        ids_BT = torch.tensor([text.ids + [0] * (width - len(text.ids)) for text in texts], device=self._device)
        mask_BT = torch.tensor([[1] * length + [0] * (width - length) for length in lengths], device=self._device)
        with self._lock, torch.inference_mode():
            states_BTH = self._base(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state.float()
            found = [
                pool(states_TH[:length], text.pooling)
                for states_TH, length, text in zip(states_BTH, lengths, texts, strict=True)
            ]
            return [vector_H.tolist() for vector_H in found]


def pool(states_TH: Any, pooling: str) -> Any:
    """Pool the states of a text's tokens, without padding, to one vector."""
    if pooling == "mean":
        return states_TH.mean(dim=0)
    return states_TH[-1] if pooling == "last" else states_TH[0]
