"""Directories that a run names, on this host: the client's own if they are here, else the uploaded ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.model.errors import AttemptError, ConfigError
from rollout.objects.tree import materialise
from rollout.snapshots.export import check_export, export_model
from rollout.snapshots.tar import unpack
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import tree_digest

from rollout_worker.backends.port import BackendOptions
from rollout_worker.executors.port import Context, Run


async def locate_model(model: JsonObject, context: Context) -> tuple[str, str | None]:
    """Return the model and its tokenizer on this host: directories, or Hugging Face names as given."""
    path = model["uri"]
    if model.get("snapshot"):
        path = str(await exported(bytes.fromhex(model["snapshot"]), context))
    elif model.get("local"):
        path = await _directory(model["path"], model["tree"], model.get("manifest"), context)
    tokenizer = model.get("tokenizer")
    if tokenizer is not None and model.get("tokenizer_local"):
        manifest = model.get("tokenizer_manifest")
        tokenizer = await _directory(model["tokenizer_path"], model["tokenizer_tree"], manifest, context)
    return path, tokenizer


async def located_options(run: Run, context: Context) -> BackendOptions:
    """Of the engine of a run that has [model] and [backend]."""
    model, backend = run.config["model"], dict(run.config["backend"])
    kind = str(backend.pop("kind"))
    path, tokenizer = await locate_model(model, context)
    if model.get("revision"):
        backend["revision"] = model["revision"]
    return BackendOptions(path, tokenizer, kind, backend, adapters=await _locate_adapters(model, context))


async def _locate_adapters(model: JsonObject, context: Context) -> dict[str, str]:
    """Return the model's adapters on this host by name, as `locate_model` does."""
    found: dict[str, str] = {}
    adapters: dict[str, JsonObject] = model.get("adapters") or {}
    for one in adapters.values():
        local = one["local"]
        path = await _directory(one["path"], one["tree"], one.get("manifest"), context) if local else one["uri"]
        found[one["name"]] = path
    return found


async def changed_directory(model: JsonObject, located: tuple[str, str | None]) -> str:
    """Return a user's own directory, among those of `locate_model`, that no longer holds what the run began with.

    Returns an empty string if there is none. Directories from the store are never changed.
    """
    used = [(located[0], model.get("path"), model.get("tree"))] if model.get("local") else []
    if model.get("tokenizer_local"):
        used.append((located[1] or "", model["tokenizer_path"], model["tokenizer_tree"]))
    for path, named, tree in used:
        if path == named and tree and not await asyncio.to_thread(_holds, Path(path), tree):
            return path
    return ""


async def _directory(path: str, tree: str, manifest: str | None, context: Context) -> str:
    """Return the client's own directory if its files are here too (one machine, a shared disk), else that from
    objects."""
    if await asyncio.to_thread(_holds, Path(path), tree):
        return path
    if manifest is None:
        raise AttemptError(
            f"the model directory {path} is not on this host, or holds other files, and was not uploaded",
            code="model_missing",
            retry=False,
        )
    return str(await shared_tree(bytes.fromhex(manifest), context))


async def exported(snapshot: bytes, context: Context) -> Path:
    """Return a snapshot's model as a directory that engines load and all processes of this host share."""
    source = await context.object_path(snapshot)
    root = host_directory(source, context, "models")
    return await asyncio.to_thread(_export, source, snapshot, root / snapshot.hex())


def host_directory(source: Path, context: Context, name: str) -> Path:
    """Return a lasting directory beside the cache that holds the object `source`, shared by processes of this host.

    If the object is not in a cache, it is one of the attempt's own.
    """
    cache = source.parents[1]
    return cache.with_name(f"{cache.name}-{name}") if source.parent.name == source.name[:2] else context.scratch / name


def _export(source: Path, snapshot: bytes, directory: Path) -> Path:
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        unpack(source, Path(scratch) / "state", snapshot)
        export_model(Path(scratch) / "state", Path(scratch) / "model")
        check_export(Path(scratch) / "state", Path(scratch) / "model")
        with suppress(OSError):  # another process was faster
            (Path(scratch) / "model").rename(directory)
    return directory


async def shared_tree(manifest: bytes, context: Context) -> Path:
    """Return the directory of an uploaded tree, shared by all processes of this host; its files link into the cache."""
    source = await context.object_path(manifest)
    return await materialise(manifest, _ContextCache(context), host_directory(source, context, "trees"))


def _holds(path: Path, tree: str) -> bool:
    try:
        return path.is_dir() and tree_digest(path)[0].hex() == tree
    except ConfigError:
        return False


class _ContextCache:
    """The cache that `materialise` needs, through the attempt's context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def path(self, object_id: bytes) -> Path:
        return await self._context.object_path(object_id)
