"""Turns rows of files into a dataset, with a report: the first item of a run does this, and a dry run.

The result for the same rows, tokenizer and settings is cached on the host.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3
from rollout.model.errors import AttemptError, InputError
from rollout.model.problems import problems
from rollout.objects.digest import hash_file
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.dataset import Dataset, build
from rollout.workloads.train.encode import Encoded, Encoder, Fault
from rollout.workloads.train.files import values_of
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.report import BadRows, Place, Report, faults_to_tell, policies_of
from rollout.workloads.train.rows import LossOn, Row, parse_row
from rollout.workloads.train.templates import find_template
from rollout.workloads.train.vocabulary import too_many_tokens

from rollout_worker.backends.training.faults import of_its_input
from rollout_worker.backends.training.prepare_prompts import collect, room_for_prompts

_BATCH = 512
_KINDS_MAX = 6
ROOM = 3600
"""Characters for all faults together: an error's text has at most 4096 on its way to the client."""
_SENTENCE, _LEAST = 260, 100  # of each: for what is wrong and what to do, for where
_SCHEMA = 3
CACHE_MAX = 16 << 30
"""Maximum bytes of cached tokens on a host; the least recently used are deleted first."""


@dataclass(frozen=True, slots=True)
class Files:
    """`kind` is that of `[dataset]`, followed by the files on this host, in order. `names` are those for users, if they
    differ. `identity` covers their content."""

    kind: str
    paths: tuple[Path, ...]
    names: tuple[str, ...] = ()
    identity: str = ""

    @property
    def named(self) -> list[tuple[str, Path]]:
        return list(zip(self.names or [path.name for path in self.paths], self.paths, strict=True))


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of positions that a model declares. `fixed` means that it has a table of them, and none beyond."""

    count: int
    fixed: bool


_WITH_TABLE = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"}
)  # fmt: skip
"""Decoders of transformers whose positions are learnt or in a table. Others compute them (RoPE, ALiBi)."""


def read_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load a tokenizer. Raises AttemptError if there is none."""
    import transformers

    tokenizers: Any = transformers.AutoTokenizer
    try:
        return tokenizers.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise AttemptError(
            f"base_model.tokenizer: the tokenizer cannot be loaded from {name}: {error}",
            code="tokenizer_invalid",
            retry=False,
        ) from error


def prepare(
    kind: Kind,
    settings: TrainingSection,
    files: Files,
    tokenizer: Any,
    room: int = ROOM,
    positions: Positions | None = None,
) -> tuple[Dataset | list[Prompt], Report]:
    """Prepare the dataset, or the prompts of an algorithm that generates samples. Raises AttemptError (`invalid_data`,
    not retryable) with every fault of the data whose policy is `error`, in about `room` characters."""
    loss_on, length, pack = _form(settings)
    table = positions.count if positions is not None and positions.fixed else length
    if isinstance(settings, PolicySection):
        table = room_for_prompts(settings, positions.count if positions is not None else None)
    template = find_template(tokenizer, settings.base_model.chat_template)
    encoder = Encoder(tokenizer, template, min(length, table), loss_on)
    policies = policies_of(settings.rows)
    bad = BadRows(_KINDS_MAX)
    encoded = _encoded(kind, files, encoder, loss_on, bad)
    if isinstance(settings, PolicySection):
        report = Report(policies)
        data = collect(encoded, report)
    else:
        data, report = build(((place, one) for place, _, one in encoded), policies, pack)
    limit = "packing.max_seq_len" if pack is not None else "max_length"
    about: dict[Fault, str] = {"too_long": f", more than {limit} = {length:,} tokens"}
    remedies: dict[Fault, str] = {}
    if encoder.seams:
        helps = "; ".join(remedy for remedy, _ in encoder.seams.most_common(2))
        remedies["merged_at_seam"] = f"prompt and completion together do not begin with the prompt's tokens: {helps}"
    if isinstance(settings, PolicySection):
        about["too_long"] = f", more than the {table:,} tokens {_LEFT if table == length else _POSITIONS}"
        raised = "raise max_length, " if table == length else ""
        remedies["too_long"] = f"{raised}lower max_completion_length, or shorten it"
    elif table < length:
        about["too_long"] = f", more tokens than the model has positions: {table:,} (max_position_embeddings)"
        remedies["too_long"] = "shorten it (keep: it is cut off at the end)"
    each = max(_LEAST, room // max(1, bad.kinds + len(report.errors)) - _SENTENCE)
    unkept: tuple[Fault, ...] = ("too_long",) if isinstance(settings, PolicySection) else ()
    told = [*bad.lines(each), *faults_to_tell(report, about, each, remedies, unkept)]
    if not told and not report.units:
        told = [f"no row is left to train on: all {report.rows:,} are dropped"]
    if told:
        raise AttemptError(problems(told), code="invalid_data", retry=False)
    report.notes += _notes(kind, encoder, report, positions)
    return data, report


_LEFT = "that max_completion_length leaves of max_length"
_POSITIONS = "that max_completion_length leaves of the model's positions (max_position_embeddings)"


def _notes(kind: Kind, encoder: Encoder, report: Report, positions: Positions | None) -> Iterator[str]:
    if encoder.unended and kind != "rm":
        yield (
            "warning: the tokenizer has no end-of-sequence token, so none is behind the texts and the model does not "
            "learn to stop: name one as eos_token in tokenizer_config.json"
        )
    if kind in ("grpo", "ppo") and encoder.endless:
        yield (
            "warning: the tokenizer has no end-of-sequence token, so that samples end at max_completion_length, or at "
            "one of stop_token_ids"
        )
    if positions is not None and report.longest > positions.count:
        yield (
            f"the longest sequence has {report.longest:,} tokens, and the model was made for {positions.count:,} "
            "(max_position_embeddings): its positions go on, but it may be worse there"
        )


def _form(settings: TrainingSection) -> tuple[LossOn, int, int | None]:
    """Return (what is learnt, maximum tokens of a row, of a sequence that several share)."""
    if isinstance(settings, PolicySection):
        return "completion_only", settings.max_length - settings.max_completion_length, None
    if not isinstance(settings, SftSection):
        return "completion_only", settings.max_length, None
    return settings.loss_on.kind, settings.length, settings.length if settings.packed else None


def _encoded(
    kind: Kind, files: Files, encoder: Encoder, loss_on: LossOn, bad: BadRows
) -> Iterator[tuple[Place, Row, Encoded]]:
    rows = _rows(kind, files, loss_on, bad)
    while batch := list(islice(rows, _BATCH)):
        found = _tokens(encoder, [row for _, row in batch])
        for (place, row), one in zip(batch, found, strict=True):
            if isinstance(one, InputError):
                bad.add(place, one.message)
            else:
                yield place, row, one


def _tokens(encoder: Encoder, rows: list[Row]) -> list[Encoded | InputError]:
    """Tokenise a batch. If a library refuses it, tokenise row by row, to find the row."""
    try:
        return encoder.encode_many(rows)
    except Exception as error:
        if not of_its_input(error):
            raise
        if len(rows) == 1:
            return [InputError(f"the tokenizer cannot take it: {type(error).__name__}: {error}")]
    return [found for row in rows for found in _tokens(encoder, [row])]


def _rows(kind: Kind, files: Files, loss_on: LossOn, bad: BadRows) -> Iterator[tuple[Place, Row]]:
    for place, value in _values(files):
        try:
            found = parse_row(kind, value, loss_on)
        except InputError as error:
            bad.add(place, error.message)
            continue
        for row in found:
            yield place, row


def _values(files: Files) -> Iterator[tuple[Place, Any]]:
    number = 0
    for name, path in files.named:
        try:
            for line, value in values_of(files.kind, name, path):
                number += 1
                yield Place(number, name, line), value
        except InputError as error:
            code = "package_missing" if "package" in error.context else "invalid_data"
            raise AttemptError(error.message, code=code, retry=False) from error


# ---- kept on the host


def prepared(
    kind: Kind,
    settings: TrainingSection,
    files: Files,
    tokenizer: Any,
    path: Path,
    cache: Path | None,
    room: int = ROOM,
    positions: Positions | None = None,
) -> tuple[int, JsonObject]:
    """Write the dataset, or the prompts, of `files` to `path`, from `cache` if possible. Returns (units, report).
    Raises AttemptError."""
    key = _key(kind, settings, files, tokenizer, positions) if files.identity else None
    kept = cache / key if cache is not None and key is not None else None
    if kept is not None and (report := _taken(kept, path)) is not None:
        return report["sequences"], report
    data, made = prepare(kind, settings, files, tokenizer, room, positions)
    if isinstance(data, Dataset):
        data.save(path)
    else:
        Prompts.save(data, path)
    report = made.to_json()
    if kept is not None:
        _keep(kept, path, report)
    return made.units, report


def _key(
    kind: Kind, settings: TrainingSection, files: Files, tokenizer: Any, positions: Positions | None
) -> str | None:
    """Return a hash of everything that tokens depend on, or None for a tokenizer that does not identify itself."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None
    template = find_template(tokenizer, settings.base_model.chat_template)
    own = json.dumps(tokenizer.chat_template, sort_keys=True)
    parts = [
        _SCHEMA, kind, files.kind, files.identity, files.names, list(_form(settings)), policies_of(settings.rows),
        template.text, template.marked_texts, own, fast.to_str(),
        [tokenizer.eos_token, tokenizer.bos_token, sorted(tokenizer.all_special_ids)],
        version("transformers"), version("tokenizers"), astuple(positions) if positions is not None else None,
    ]  # fmt: skip
    return blake3(canonical(parts)).hexdigest()


def _taken(kept: Path, path: Path) -> JsonObject | None:
    """Copy from the cache, if the entry is complete."""
    try:
        record: JsonObject = json.loads((kept / "report.json").read_bytes())
        shutil.copyfile(kept / "tokens", path)
        if hash_file(path)[0].hex() != record["tokens"]:
            shutil.rmtree(kept)
            return None
        os.utime(kept)
    except (OSError, ValueError, KeyError):
        return None
    return record["report"]


def _keep(kept: Path, path: Path, report: JsonObject) -> None:
    """Add an entry to the cache, atomically. If the cache cannot be written, nothing happens."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent, prefix=".") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            shutil.copyfile(path, made / "tokens")
            record = {"report": report, "tokens": hash_file(path)[0].hex()}
            (made / "report.json").write_text(json.dumps(record), "utf-8")
            made.rename(kept)
        _prune(kept.parent)


def _prune(cache: Path) -> None:
    entries = sorted(cache.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    total = 0
    for entry in entries:
        total += sum(file.stat().st_size for file in entry.iterdir())
        if total > CACHE_MAX:
            shutil.rmtree(entry)


def files_of(given: JsonObject, root: Path) -> Files:
    """Return `dataset` of a run's configuration, whose files are below `root`."""
    places, names = zip(*given["files"], strict=True)
    return Files(given["kind"], tuple(root / place for place in places), names, given["manifest"])


def read_config(model: str, revision: str | None = None) -> Any:
    """Load config.json of a model. Raises AttemptError if there is none."""
    import transformers

    configs: Any = transformers.AutoConfig
    try:
        return configs.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise AttemptError(f"the model cannot be loaded: {error}", code="model_invalid", retry=False) from error


def positions_of(config: Any) -> Positions | None:
    """Return the positions, or None if the configuration does not say."""
    text = config.get_text_config()
    count: Any = getattr(text, "max_position_embeddings", None)
    return Positions(count, text.model_type in _WITH_TABLE) if isinstance(count, int) and count > 0 else None


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """Raise AttemptError if the tokenizer has ids without an embedding in the model."""
    embeddings: int | None = getattr(config.get_text_config(), "vocab_size", None)
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
    if embeddings is not None and vocabulary > embeddings:
        raise AttemptError(too_many_tokens(vocabulary, embeddings), code="invalid_data", retry=False)


def pad_of(tokenizer: Any) -> int:
    """Return an id for padding. Any id works, because masks mark padding."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad or 0)
