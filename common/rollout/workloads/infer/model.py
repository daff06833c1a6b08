"""What a model is, as far as results depend on it: `content_id` changes when the weights or the tokenizer do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rollout.workloads.infer.config import InferConfig, ModelSection
from rollout.workloads.json_form import JsonObject, short
from rollout.workloads.local_model import LocalModel, files_json, find_model, local_directory, tree_digest


@dataclass(frozen=True, slots=True)
class ResolvedModel(LocalModel):
    """`content_id` is of the model and its tokenizer."""

    tokenizer_path: Path | None = None
    tokenizer_tree: str = ""


def resolve_model(config: InferConfig) -> ResolvedModel:
    """ConfigError when a local directory is missing or holds no model."""
    model = config.model
    if config.backend.kind == "mock":
        return ResolvedModel(model.uri, blake3(b"mock\0" + model.uri.encode()).hexdigest())
    found = find_model(model.uri, "model.uri", model.revision)
    content = bytes.fromhex(found.content_id)
    tokenizer_path, tokenizer_tree = None, ""
    if model.tokenizer is not None:
        tokenizer_path = local_directory(model.tokenizer, "model.tokenizer")
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
    return {
        **files_json(resolved),
        "tokenizer": model.tokenizer,
        "revision": model.revision,
        "tokenizer_local": resolved.tokenizer_path is not None,
        "tokenizer_path": str(resolved.tokenizer_path.absolute()) if resolved.tokenizer_path else None,
        "tokenizer_tree": resolved.tokenizer_tree,
        "tokenizer_manifest": None,
    }


def model_changes(old: JsonObject, new: JsonObject) -> list[str]:
    """What differs between two [model] sections of resolved configurations, as far as results depend on it."""
    changes = [
        f"model.{key}: {short(old.get(key))} -> {short(new.get(key))}"
        for key in ("tokenizer", "revision")
        if old.get(key) != new.get(key)
    ]
    if old["content_id"] == new["content_id"]:
        return []  # perhaps elsewhere, but the same weights and tokenizer
    if old["uri"] != new["uri"]:
        return [f"model.uri: {short(old['uri'])} -> {short(new['uri'])}", *changes]
    if old["local"] and new["local"]:
        return [f"model.uri: the files in {new['uri']} changed", *changes]
    if old.get("commit") and new.get("commit") and old["commit"] != new["commit"]:
        return [f"model.uri: {new['uri']} is now at commit {new['commit'][:12]}, was {old['commit'][:12]}", *changes]
    if old["local"] != new["local"]:
        return [f"model.uri: {new['uri']} is a local directory in one and a Hugging Face name in the other", *changes]
    # A Hugging Face name whose commit only one of the two knew: nothing says that it moved.
    return changes
