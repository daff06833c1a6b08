"""A model as the user names it, a local directory or a Hugging Face name, and the identity of its content."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rollout.files import replacing
from rollout.model.errors import ConfigError
from rollout.workloads.json_form import JsonObject, short

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CHUNK = 1 << 20
SNAPSHOTS = ("snapshot:", "run:")


Bring = Callable[[str, str], "Path | None"]
"""Called with (the user's text, its key). Returns the local directory of a URL, None for other text. Raises
ConfigError."""


def no_bucket(text: str, what: str) -> Path | None:
    """A `Bring` that fetches nothing from buckets."""
    return None


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`path` is the local directory, which is sent to workers as objects; None for a Hugging Face name."""

    uri: str
    content_id: str
    path: Path | None = None
    tree: str = ""  # tree_digest of `path`
    commit: str = ""
    size: int = 0


def names_snapshot(uri: str) -> bool:
    """Return whether it is snapshot:ID or run:RUN_ID, the last one of that run."""
    return uri.startswith(SNAPSHOTS)


def refuse_unless_whole_model(run: JsonObject, what: str) -> None:
    """Raise ConfigError if the run with this configuration leaves no complete language model. `what` is the key that
    names it."""
    algorithm = run["algorithm"]
    if algorithm["kind"] == "rm":
        raise ConfigError(f"{what}: the snapshot is of a reward model, which writes no text: name one of another run")
    if algorithm["settings"].get("lora"):
        raise ConfigError(
            f"{what}: the snapshot holds an adapter, and not the whole model: write one with `rollout snapshot export "
            "ID --merged --output DIR`, and name DIR"
        )


def refuse_unless_reward_model(run: JsonObject, what: str) -> None:
    """Raise ConfigError if the run with this configuration leaves no complete reward model. `what` is the key."""
    kind = run["algorithm"]["kind"]
    if kind != "rm":
        raise ConfigError(f"{what}: the snapshot is of {kind}, and no reward model: name one of `rollout train rm`")
    if run["algorithm"]["settings"].get("lora"):
        raise ConfigError(
            f"{what}: the snapshot holds an adapter, and not the whole reward model: train one without lora"
        )


MODEL_FILE, ADAPTER_FILE, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.*"


def find_model(
    uri: str, what: str, revision: str | None = None, bring: Bring = no_bucket, file: str = MODEL_FILE
) -> LocalModel:
    """Find a model. `what` is its key in messages. `bring` fetches files from buckets. `file` must exist in the
    directory. Raises ConfigError if a directory is missing or not a model.

    The cluster resolves names of snapshots (`Checked.snapshots`).
    """
    if names_snapshot(uri):
        return LocalModel(uri, "")
    path = bring(uri, what) or local_directory(uri, what)
    if path is None:
        commit = hub_commit(uri, revision)
        identity = f"hub\0{uri}\0{commit or revision or ''}".encode()
        return LocalModel(uri, blake3(identity).hexdigest(), commit=commit)
    if not (path / file).is_file():
        place = uri if path != Path(uri).expanduser() else path
        whose = "adapter" if file == ADAPTER_FILE else "model"
        raise ConfigError(f"{what}: {place} has no {file}: name the directory that holds the {whose}'s files")
    if file == ADAPTER_FILE and not any(path.glob(ADAPTER_WEIGHTS)):
        raise ConfigError(f"{what}: {uri} has no weights ({ADAPTER_WEIGHTS}): name the directory that holds them")
    content, size = tree_digest(path)
    return LocalModel(uri, content.hex(), path, content.hex(), "", size)


def files_json(model: LocalModel) -> JsonObject:
    """Return the model in a run's configuration.

    A client whose workers may be on other hosts uploads the directory (rollout.objects.tree) and sets `manifest` (hex);
    without one, workers look for the same files under the same path.
    """
    return {
        "uri": model.uri,
        "content_id": model.content_id,
        "commit": model.commit,
        "local": model.path is not None,
        "path": str(model.path.absolute()) if model.path else None,
        "tree": model.tree,
        "manifest": None,
        "snapshot": "",
    }


def with_tokenizer(
    files: JsonObject, tokenizer: str | None, revision: str | None, path: Path | None, tree: str
) -> JsonObject:
    """Return `files_json` extended by a tokenizer. `path` is its local directory, if it has one, with the digest
    `tree`."""
    return {
        **files,
        "tokenizer": tokenizer,
        "revision": revision,
        "tokenizer_local": path is not None,
        "tokenizer_path": str(path.absolute()) if path else None,
        "tokenizer_tree": tree,
        "tokenizer_manifest": None,
    }


def model_changes(old: JsonObject, new: JsonObject, section: str = "model") -> list[str]:
    """Return differences between two `files_json` of resolved configurations that affect results."""
    changes = [
        f"{section}.{key}: {short(old.get(key))} -> {short(new.get(key))}"
        for key in ("tokenizer", "revision", "lora", "loras")
        if old.get(key) != new.get(key)
    ]
    if old["content_id"] == new["content_id"]:
        return []  # perhaps elsewhere, but the same weights and tokenizer
    if old["uri"] != new["uri"]:
        return [f"{section}.uri: {short(old['uri'])} -> {short(new['uri'])}", *changes]
    adapts = bool(old.get("adapters") or new.get("adapters"))
    if old["local"] and new["local"] and (old.get("tree") != new.get("tree") or not (changes or adapts)):
        return [f"{section}.uri: the files in {new['uri']} changed", *changes]
    if old.get("commit") and new.get("commit") and old["commit"] != new["commit"]:
        return [
            f"{section}.uri: {new['uri']} is now at commit {new['commit'][:12]}, was {old['commit'][:12]}",
            *changes,
        ]
    if old["local"] != new["local"]:
        return [
            f"{section}.uri: {new['uri']} is a local directory in one and a Hugging Face name in the other",
            *changes,
        ]
    if adapts and not changes:
        return [f"{section}.lora: the files of an adapter or of the tokenizer changed"]
    # A Hugging Face name whose commit only one of the two knew: nothing says that it moved.
    return changes


def tree_digest(directory: Path) -> tuple[bytes, int]:
    """Return (blake3 over sorted relative names and contents, total bytes). Hidden files do not count.

    Contents are read once: digests are cached by size and modification time in the user's cache directory.
    """
    files = sorted(
        (path.relative_to(directory).as_posix(), path)
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    cache_file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout" / "digests.json"
    cache = _read_cache(cache_file)
    known = len(cache)
    whole, total = blake3(), 0
    try:
        for name, path in files:
            stat = path.stat()
            key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
            digest = cache.get(key) or _file_digest(path)
            cache[key] = digest
            encoded = name.encode()
            whole.update(len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(digest))
            total += stat.st_size
    except OSError as error:
        raise ConfigError(f"cannot read the model: {error.filename}: {error.strerror}") from error
    if len(cache) != known:
        _write_cache(cache_file, cache)
    return whole.digest(), total


def _file_digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _write_cache(path: Path, cache: dict[str, str]) -> None:
    # Only a cache: where it cannot be written the next call reads the files again.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False, shared=True) as file:
            file.write(json.dumps(dict(list(cache.items())[-4000:])).encode())


def local_directory(uri: str, what: str) -> Path | None:
    """Return a local directory, or None for a Hugging Face name. Raises ConfigError if it is neither."""
    path = Path(uri).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError(f"{what}: {uri} is a file: name the directory that holds the model's files")
    if uri.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(uri):
        where = "" if path.is_absolute() else f" in the current directory {Path.cwd()}"
        raise ConfigError(
            f"{what}: there is no directory {uri}{where}, and it is not a Hugging Face name such as org/model"
        )
    return None


def taken_for_hub(model: LocalModel) -> str:
    """Return a note about a Hugging Face name that may be a mistyped local directory, or ""."""
    path = Path(model.uri)
    if model.path is not None or model.commit or names_snapshot(model.uri) or not path.parent.is_dir():
        return ""
    with suppress(OSError):
        beside = [one.name for one in path.parent.iterdir() if (one / "config.json").is_file()]
        if near := difflib.get_close_matches(path.name, beside, n=1):
            return (
                f"there is no directory {path} here, so it is taken as a Hugging Face name; did you mean "
                f"{path.with_name(near[0])}?"
            )
    return ""


def cached_directory(model: LocalModel) -> Path | None:
    """Return the files of a Hugging Face name that were downloaded to this host before."""
    if not model.commit:
        return None
    directory = _hub() / f"models--{model.uri.replace('/', '--')}" / "snapshots" / model.commit
    return directory if (directory / "config.json").is_file() else None


def _hub() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def hub_commit(name: str, revision: str | None) -> str:
    """Return the commit that `name` stands for, if this machine knows it without the network, or ""."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    try:
        ref = (_hub() / f"models--{name.replace('/', '--')}" / "refs" / (revision or "main")).read_text("utf-8").strip()
    except OSError:
        return ""
    return ref if _COMMIT.fullmatch(ref) else ""
