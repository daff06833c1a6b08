"""Rows of files to a dataset, with a report: what the first item of a run does."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from backports.zstd import ZstdFile
from rollout.model.errors import AttemptError, InputError
from rollout.workloads.json_form import parse_json
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.dataset import Dataset, Report, build, faults_to_tell, policies_of
from rollout.workloads.train.encode import Encoded, Encoder
from rollout.workloads.train.rows import parse_row
from rollout.workloads.train.templates import find_template

_BAD_MAX = 100


@dataclass(frozen=True, slots=True)
class Files:
    """`kind` as `[dataset]` says, and what there is of it on this host, in order."""

    kind: str
    paths: tuple[Path, ...]


def read_tokenizer(name: str) -> Any:
    """AttemptError: there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except (OSError, ValueError) as error:
        raise AttemptError(f"the tokenizer cannot be loaded: {error}", code="tokenizer_invalid", retry=False) from error


def prepare(kind: Kind, settings: TrainingSection, files: Files, tokenizer: Any) -> tuple[Dataset, Report]:
    """AttemptError (`invalid_data`, not retryable) with every fault of the data whose policy is `error`."""
    sft = settings if isinstance(settings, SftSection) else None
    template = find_template(tokenizer, settings.base_model.chat_template, "base_model.chat_template")
    length = sft.length if sft is not None else settings.max_length
    encoder = Encoder(tokenizer, template, length, sft.loss_on.kind if sft is not None else "completion_only")
    policies = policies_of(settings.rows)
    pack = (
        sft.packing.max_seq_len if sft is not None and sft.packing is not None and sft.packing.kind != "off" else None
    )
    bad: list[str] = []
    data, report = build(_encoded(kind, files, encoder, bad), policies, pack)
    problems = [*bad, *faults_to_tell(report, policies)]
    if not problems and not data.units:
        problems = ["no row is left to train on"]
    if problems:
        raise AttemptError("\n".join(problems), code="invalid_data", retry=False)
    return data, report


def _encoded(kind: Kind, files: Files, encoder: Encoder, bad: list[str]) -> Iterator[tuple[int, Encoded]]:
    for number, (where, value) in enumerate(rows_of(files), 1):
        try:
            rows = parse_row(kind, value)
            found = [encoder.encode(row) for row in rows]
        except InputError as error:
            if len(bad) < _BAD_MAX:
                bad.append(f"{where}: {error.message}")
            continue
        for one in found:
            yield number, one


def rows_of(files: Files) -> Iterator[tuple[str, Any]]:
    """(file:line or file, row number; value), in order. AttemptError: a file cannot be read."""
    if files.kind == "jsonl_path":
        for path in files.paths:
            yield from _jsonl(path)
    elif files.kind == "parquet_path":
        yield from _table(files.paths, "parquet")
    else:
        yield from _table(files.paths, "dataset")


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        for line, raw in enumerate(file, 1):
            if raw.strip():
                try:
                    yield f"{path.name}:{line}", parse_json(raw.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf"))
                except ValueError as error:
                    raise AttemptError(f"{path.name}:{line}: {error}", code="invalid_data", retry=False) from error


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return cast(IO[bytes], ZstdFile(path)) if path.suffix == ".zst" else path.open("rb")


def _table(paths: Sequence[Path], kind: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
        import pyarrow.parquet as parquet
    except ImportError as error:
        message = f"reading {kind} needs the packages datasets and pyarrow: pip install 'rollout-engine[train]'"
        raise AttemptError(message, code="package_missing", retry=False) from error
    for path in paths:
        if kind == "parquet":
            batches: Iterator[Mapping[str, Any]] = (
                row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist()
            )
        else:
            batches = iter(datasets.load_from_disk(str(path)))  # pyright: ignore
        for number, row in enumerate(batches, 1):
            yield f"{path.name}, row {number}", {key: value for key, value in row.items() if value is not None}


def write_report(path: Path, report: Report) -> None:
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
