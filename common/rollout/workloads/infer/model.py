"""The identity of a model: `content_id` changes when weights or tokenizer do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from rollout.workloads.infer.config import SERVER, BackendSection, ModelSection
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.local_model import (
    ADAPTER_FILE,
    Bring,
    LocalModel,
    files_json,
    find_model,
    local_directory,
    no_bucket,
    tree_digest,
    with_tokenizer,
)
from rollout.workloads.port import Tree


@dataclass(frozen=True, slots=True)
class ResolvedModel(LocalModel):
    """`content_id` covers the model, its tokenizer and its adapters. `adapters` has them by name."""

    tokenizer_path: Path | None = None
    tokenizer_tree: str = ""
    adapters: tuple[tuple[str, LocalModel], ...] = ()

    def trees(self, table: str) -> tuple[Tree, ...]:
        """Return the trees of files that travel to workers. `table` is the section of the run's configuration with
        `model_json`."""
        adapters = ((f"adapters.{at}.manifest", one.path) for at, (_, one) in enumerate(self.adapters))
        directories = (("manifest", self.path), ("tokenizer_manifest", self.tokenizer_path), *adapters)
        return tuple(Tree(f"{table}.{key}", path) for key, path in directories if path is not None)


class NamesModel(Protocol):
    """A configuration that names a model and its backend."""

    @property
    def model(self) -> ModelSection: ...

    @property
    def backend(self) -> BackendSection: ...


def resolve_model(config: NamesModel, bring: Bring = no_bucket) -> ResolvedModel:
    """Resolve the model. `bring` fetches files from buckets. Raises ConfigError if a directory is missing or not a
    model."""
    found = _without_adapters(config, bring)
    if not config.model.adapters:
        return found
    adapters: list[tuple[str, LocalModel]] = []
    for name, uri, key in config.model.adapters:
        if config.backend.kind in _NO_FILES:
            adapters.append((name, LocalModel(uri, blake3(uri.encode()).hexdigest())))
        else:
            adapters.append((name, find_model(uri, key, None, bring, ADAPTER_FILE)))
    named = [[name, one.content_id] for name, one in adapters]
    content = blake3(canonical([found.content_id, *named])).hexdigest()
    return replace(found, content_id=content, adapters=tuple(adapters))


_NO_FILES = ("mock", SERVER)


def _without_adapters(config: NamesModel, bring: Bring) -> ResolvedModel:
    model = config.model
    if config.backend.kind in _NO_FILES:
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
    """Return [model] of the resolved configuration: `files_json` of the model, the tokenizer and the adapters."""
    path, tree = resolved.tokenizer_path, resolved.tokenizer_tree
    fields = with_tokenizer(files_json(resolved), model.tokenizer, model.revision, path, tree)
    if not resolved.adapters:
        return fields
    adapters = {str(at): {"name": name, **files_json(one)} for at, (name, one) in enumerate(resolved.adapters)}
    return {**fields, "lora": model.lora, "loras": model.loras, "adapters": adapters}
