"""What a model is, as far as results depend on it: `content_id` changes when the weights or the tokenizer do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from rollout.workloads.infer.config import SERVER, BackendSection, ModelSection
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import (
    Bring,
    LocalModel,
    files_json,
    find_model,
    local_directory,
    no_bucket,
    tree_digest,
    with_tokenizer,
)


@dataclass(frozen=True, slots=True)
class ResolvedModel(LocalModel):
    """`content_id` is of the model and its tokenizer."""

    tokenizer_path: Path | None = None
    tokenizer_tree: str = ""


class NamesModel(Protocol):
    """A configuration that says which model is asked, and by what."""

    @property
    def model(self) -> ModelSection: ...

    @property
    def backend(self) -> BackendSection: ...


def resolve_model(config: NamesModel, bring: Bring = no_bucket) -> ResolvedModel:
    """`bring`: of what is in a bucket. ConfigError when a directory is missing or holds no model."""
    model = config.model
    if config.backend.kind in ("mock", SERVER):
        return ResolvedModel(model.uri, blake3(f"{config.backend.kind}\0{model.uri}".encode()).hexdigest())
    found = find_model(model.uri, "model.uri", model.revision, bring)
    content = bytes.fromhex(found.content_id)
    tokenizer_path, tokenizer_tree = None, ""
    if model.tokenizer is not None:
        what = "model.tokenizer"
        tokenizer_path = bring(model.tokenizer, what) or local_directory(model.tokenizer, what)
        if tokenizer_path:
            tokenizer = tree_digest(tokenizer_path)[0]
            tokenizer_tree = tokenizer.hex()
        else:
            tokenizer = blake3(b"hub\0" + model.tokenizer.encode()).digest()
        content = blake3(content + tokenizer).digest()
    return ResolvedModel(
        found.uri, content.hex(), found.path, found.tree, found.commit, found.size, tokenizer_path, tokenizer_tree
    )


def model_json(model: ModelSection, resolved: ResolvedModel) -> JsonObject:
    """[model] of the resolved configuration: `files_json`, and the same of the tokenizer."""
    path, tree = resolved.tokenizer_path, resolved.tokenizer_tree
    return with_tokenizer(files_json(resolved), model.tokenizer, model.revision, path, tree)
