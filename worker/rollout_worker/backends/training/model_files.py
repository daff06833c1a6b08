"""The files of a snapshot's `model/` besides the weights: configuration, and the tokenizer used in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rollout.model.errors import AttemptError
from rollout.workloads.train.dataset import Dataset
from rollout.workloads.train.templates import find_template
from transformers.utils import hub

from rollout_worker.backends.training.prepare import read_tokenizer

ADAPTER = "adapter_config.json"
_KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_KEPT_MAX = 64 << 20
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class ModelFiles:
    """`files` are by name. `tokenizer` is the one used in training, with its template. `pad` is the padding token of
    scored sequences, None if there is none."""

    def __init__(
        self,
        model: str,
        revision: str | None,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        adapter: bool = False,
        scored: Iterable[Dataset] = (),
    ) -> None:
        """`tokenizer` replaces the model's. `chat_template` is that of `read_template`. With `adapter`, the export has
        no config.json, which some tokenizers need. `scored` are rows whose last token has the score."""
        files = _model_files(model, revision)
        self.tokenizer: Any = read_tokenizer(tokenizer or model, None if tokenizer else revision)
        changed = tokenizer is not None or adapter
        if chat_template is not None:
            self.tokenizer.chat_template = find_template(self.tokenizer, chat_template).text
            changed = True
        config = json.loads(files["config.json"])
        ids = {name: getattr(self.tokenizer, name) for name in _IDS} if tokenizer is not None else {}
        data = list(scored)
        if data:
            before = self.tokenizer.pad_token_id
            ids["pad_token_id"] = _set_pad(self.tokenizer, data, _embeddings(config))
            changed |= ids["pad_token_id"] != before
        self.pad: int | None = self.tokenizer.pad_token_id
        if changed:
            others = {name: value for name, value in files.items() if not _matches(name, _TOKENIZER)}
            files = others | _saved(self.tokenizer)
        known = {name: value for name, value in ids.items() if value is not None or data}
        if known:
            files |= _edited(files, ("config.json", "generation_config.json"), lambda value: {**value, **known})
        self.files = files

    def untie(self) -> None:
        """Record that the output layer has weights of its own, unlike config.json."""
        self.files |= _edited(self.files, ("config.json",), _untied)


def base_of_adapter(directory: Path) -> str | None:
    """Return the base model of the adapter in a directory, or None if there is no adapter."""
    path = directory / ADAPTER
    return str(json.loads(path.read_text("utf-8"))["base_model_name_or_path"]) if path.is_file() else None


def _model_files(name: str, revision: str | None) -> dict[str, bytes]:
    directory = Path(name)
    if (base := base_of_adapter(directory)) is not None:
        # What is trained is the whole model, with that adapter merged into it, or another adapter of it.
        return _model_files(base, None) | {k: v for k, v in _read_files(directory).items() if k != ADAPTER}
    if not directory.is_dir():
        library: Any = hub
        directory = Path(library.cached_file(name, "config.json", revision=revision)).parent
    return _read_files(directory)


def _read_files(directory: Path) -> dict[str, bytes]:
    paths = sorted({path for pattern in _KEPT for path in directory.glob(pattern) if path.is_file()})
    named = {path.name: path for path in paths if not path.name.endswith(".index.json")}
    size = sum(path.stat().st_size for path in named.values())
    if size > _KEPT_MAX:
        raise AttemptError(
            f"the model's files beside its weights have {size >> 20} MiB, {_KEPT_MAX >> 20} at most go into a snapshot",
            code="model_invalid",
            retry=False,
        )
    return {file: path.read_bytes() for file, path in named.items()}


def _saved(tokenizer: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}


def _edited(
    files: dict[str, bytes], names: Iterable[str], edit: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    return {
        name: json.dumps(edit(json.loads(files[name])), indent=2).encode() + b"\n" for name in names if name in files
    }


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = config.get("text_config") or {}
    more = {"text_config": _untied(inner)} if inner else {}
    return {**config, "tie_word_embeddings": False, **more}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _embeddings(config: dict[str, Any]) -> int:
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)


def _set_pad(tokenizer: Any, data: list[Dataset], embeddings: int) -> int | None:
    """Make the tokenizer pad with a token that ends no row and differs from the end-of-sequence token.

    transformers reads the score at the last token that is not the padding token: it would differ from training's where
    rows end in it. Candidates are the tokenizer's own padding token, a special token that no row has, and a new one
    that the model has an embedding for. If there is none, returns None, and rows are scored one at a time.
    """
    ends: set[int] = set()
    used: NDArray[np.bool_] = np.zeros(max(embeddings, len(tokenizer)), np.bool_)
    for one in data:
        ends.update(one.ids[one.offsets[1:] - 1].tolist())
        used[one.ids] = True
    own: int | None = tokenizer.pad_token_id
    if own is not None and own not in ends and own != tokenizer.eos_token_id:
        return own
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    special: list[tuple[int, str]] = [(n, str(token)) for n, token in tokenizer.added_tokens_decoder.items()]
    free = [(n, text) for n, text in special if n in tokenizer.all_special_ids or "pad" in text.lower()]
    free = [(n, text) for n, text in free if n < len(used) and not used[n] and n not in taken]
    if free:
        tokenizer.pad_token = min(free, key=lambda one: ("pad" not in one[1].lower(), one[0]))[1]
    elif max(tokenizer.get_vocab().values(), default=-1) + 1 < embeddings:
        tokenizer.add_special_tokens({"pad_token": "<|score_pad|>"})
    else:
        tokenizer.pad_token = None
    return tokenizer.pad_token_id
