"""Renders a row's prompt as the run's model reads it, for `rollout item show`, with the files on this host."""

from __future__ import annotations

from pathlib import Path

from rollout.model.counts import counted
from rollout.model.errors import ConfigError, InputError
from rollout.workloads.digest import Text
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.request import parse_row
from rollout.workloads.infer.token_counter import brings_tokenizer, counter, prompts_in, require_tokenizer
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import LocalModel, cached_directory, hub_commit, local_directory, tree_digest

_KEY, _TITLE = "rendered", "prompt as the model reads it"


def prompt_detail(config: JsonObject, row: JsonObject) -> Text:
    """Return {prompts: [{tokens, text}], limit, why}. `config` is the run's. `limit` is the model's context in tokens,
    or null. `why` explains missing prompts. Blocking."""
    try:
        prompts, limit = rendered(config, row)
    except (ConfigError, InputError) as error:
        value: JsonObject = {"prompts": [], "limit": None, "why": error.message}
        return Text(_TITLE, f"not known here: {error.message}", _KEY, value)
    held = f" of the {limit:,} that the model holds" if limit is not None else ""
    if len(prompts) == 1:
        title, text = f"{_TITLE}, {counted(prompts[0]['tokens'], 'token')}{held}", prompts[0]["text"]
    else:
        title = f"{_TITLE}, {len(prompts):,} prompts"
        text = "\n".join(f"{counted(one['tokens'], 'token')}{held}:\n{one['text']}" for one in prompts)
    return Text(title, text, _KEY, {"prompts": prompts, "limit": limit, "why": ""})


def rendered(config: JsonObject, row: JsonObject) -> tuple[list[JsonObject], int | None]:
    """Return the row's prompts, each {tokens, text}, and the model's context in tokens, None if unknown.

    Raises ConfigError if the tokenizer is not on this host or there is no such prompt, InputError if the row is
    invalid. Blocking.
    """
    model, backend = config["model"], config["backend"]
    kind, uri, tokenizer = backend["kind"], model["uri"], model["tokenizer"]
    require_tokenizer(kind, uri, tokenizer)
    request = parse_row(row, SamplingSection.model_validate(config["sampling"]), kind)
    revision: str | None = model["revision"]
    own: Path | None = None
    if brings_tokenizer(kind, uri):
        own = _files(uri, model["path"], model["tree"], model["commit"] or hub_commit(uri, revision))
    if tokenizer is not None:
        path = model["tokenizer_path"] or local_directory(tokenizer, "model.tokenizer")
        used = _files(tokenizer, path, model["tokenizer_tree"], hub_commit(tokenizer, revision))
    else:
        used = own
    asked: JsonObject = {
        "tokenizer": str(used),
        "revision": None,
        "model": str(own) if own is not None else None,
        "trust_remote_code": backend["trust_remote_code"],
        "max_model_len": backend["max_model_len"],
    }
    found: list[JsonObject] = []
    with counter(asked, [{**prompt, "show": True, "at": None} for prompt in prompts_in(request)]) as answers:
        limit: int | None = next(answers)["limit"]
        for answer in answers:
            if "error" in answer:
                raise ConfigError(f"{answer['code']}: {answer['error']}")
            found.append({"tokens": answer["tokens"], "text": answer["text"]})
    return found, limit


def _files(name: str, path: str | Path | None, tree: str, commit: str) -> Path:
    """Return the directory on this host. Raises ConfigError if it is missing or has changed. `tree` is its digest, if
    known."""
    if path is None:
        cached = cached_directory(LocalModel(name, "", commit=commit))
        if cached is None:
            raise ConfigError(f"{name} is not in the Hugging Face cache of this host")
        return cached
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{directory}, with the tokenizer, is not on this host")
    if tree and tree_digest(directory)[0].hex() != tree:
        raise ConfigError(f"the files in {directory} changed since the run was made")
    return directory
