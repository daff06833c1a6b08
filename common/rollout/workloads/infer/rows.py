"""Rows of the input: JSON objects with a request; every error has file and line."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from rollout.model.counts import counted
from rollout.model.errors import InputError
from rollout.workloads.infer.bodies import IGNORED
from rollout.workloads.infer.config import InferConfig, SamplingSection, load_schema
from rollout.workloads.infer.honoured import FORWARDS, wrong_engine
from rollout.workloads.infer.images import check_image, digest_of, image_urls, load_images
from rollout.workloads.infer.prompts import kind_of
from rollout.workloads.infer.request import RowRequest, adapter_of, id_key, parse_row, sampling_json
from rollout.workloads.input_lines import Line, fail, json_of
from rollout.workloads.json_form import HALF_PAIR, JsonObject, is_unicode, short
from rollout.workloads.port import InputReader, Rows
from rollout.workloads.source import UniqueIds


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is a JSON object."""

    line: Line
    fields: JsonObject


def effective_sampling(config: InferConfig) -> SamplingSection:
    """Return [sampling] with the JSON schema read from its file. Raises ConfigError."""
    schema = load_schema(config.sampling.json_schema)
    return config.sampling if schema is None else config.sampling.model_copy(update={"json_schema": schema})


def row_of(line: Line) -> Row:
    """Parse a line. Raises InputError with file and line."""
    value = json_of(line)
    if not isinstance(value, dict):
        fail(line.file, line.line, f'a row must be a JSON object such as {{"prompt": "..."}}, not {kind_of(value)}')
    return Row(line, cast(JsonObject, value))


def request_of(row: Row, sampling: SamplingSection, kind: str) -> RowRequest:
    """Return the row's request. Raises InputError with file and line."""
    try:
        request = parse_row(row.fields, sampling, kind)
    except InputError as error:
        fail(row.line.file, row.line.line, error.message)
    # Only an escape can hold one: what is not escaped was decoded from UTF-8.
    if b"\\u" in row.line.raw:
        asked = [request.content, request.body, sampling_json(request.sampling), request.template]
        if not is_unicode(asked):
            fail(row.line.file, row.line.line, HALF_PAIR)
    return request


@dataclass(slots=True)
class Asked:
    """Collects what rows ask for. `embeddings` are the rows that ask for vectors, in ascending order."""

    completions: bool = False
    embeddings: array[int] = field(default_factory=lambda: array("q"))

    def take(self, row: int, request: RowRequest) -> None:
        if request.embeds:
            self.embeddings.append(row)
        else:
            self.completions = True


def check_input(config: InferConfig, reading: InputReader, asked: Asked | None = None) -> Rows:
    """Read and check every row before anything starts, except rows that will arrive from a queue. `asked` is told each
    row's request. Raises InputError with all faults."""
    sampling, ids, ignored = effective_sampling(config), UniqueIds(), Ignored()
    misplaced = Misplaced(bool(config.model.loras))
    check_engine = engine_check(config)

    def check(line: Line) -> None:
        row = row_of(line)
        request = request_of(row, sampling, config.backend.kind)
        check_engine(row, request)
        if asked is not None:
            asked.take(line.index, request)
        if "body" in row.fields:
            ignored.count(row.fields["body"])
        else:
            misplaced.count(row.fields)
        key = id_key(row.fields)
        if row.fields.get(key) is not None:
            ids.add(line, key, row.fields[key])

    found = reading.input(config.input, check, files_named)
    if found.source is not None:
        found.source.notes += (*ignored.notes(), *misplaced.notes())
    return found


def engine_check(config: InferConfig) -> Callable[[Row, RowRequest], None]:
    """Return a check that raises InputError for a row meant for another model or another kind of engine."""
    http = config.input.allow_http_images or config.backend.kind in FORWARDS
    files = not config.input.queue
    loras = config.model.loras
    names = (*loras, *model_names(config.model.uri)) if config.input.model_in_rows == "error" else ()

    def check(row: Row, request: RowRequest) -> None:
        for url in request.images:
            try:
                check_image(url, row.line.file if files else None, http=http)
            except InputError as error:
                fail(row.line.file, row.line.line, error.message)
        if fault := wrong_engine(config.backend.kind, config.backend.engine, embeds=request.embeds):
            fail(row.line.file, row.line.line, fault)
        try:
            adapter_of(row.fields, loras)
        except InputError as error:
            fail(row.line.file, row.line.line, error.message)
        if loras and request.embeds and config.backend.kind == "transformers":
            fail(row.line.file, row.line.line, _NO_VECTORS)
        if names and "body" in row.fields and (fault := _another_model(row.fields["body"], names)):
            fail(row.line.file, row.line.line, fault)

    return check


_NO_VECTORS = (
    'the row wants embeddings, and backend "transformers" makes none where rows may name adapters: use model.lora in '
    "place of [model.loras]"
)


def files_named(line: Line) -> bytes:
    """Return a hash of the files that the row names, or b"" if there are none or they cannot be read."""
    if b"image_url" not in line.raw:
        return b""
    try:
        fields = row_of(line).fields
        body: Any = fields.get("body", fields)
        urls = image_urls(cast(JsonObject, body).get("messages")) if isinstance(body, dict) else []
        images = load_images(urls, line.file)
    except InputError:
        return b""
    return digest_of(images) if images else b""


class Ignored:
    """Collects keys of OpenAI rows that have no effect, to report them once."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._rows = 0

    def count(self, body: JsonObject) -> None:
        found = IGNORED & body.keys()
        self._keys |= found
        self._rows += bool(found)

    def notes(self) -> tuple[str, ...]:
        if not self._rows:
            return ()
        keys = ", ".join(sorted(self._keys))
        rows = counted(self._rows, "row")
        return (f"keys that change no result are ignored, in {rows}: {keys}",)


class Misplaced:
    """Collects sampling parameters next to the prompt of plain rows, where they are mere data."""

    _NAMES = frozenset(SamplingSection.model_fields) - {"n", "choice", "regex", "grammar"} | {"max_completion_tokens"}
    # Left out: often data of their own.

    def __init__(self, loras: bool) -> None:
        self._rows: Counter[str] = Counter()
        self._names = self._NAMES if loras else self._NAMES | {"lora"}

    def count(self, fields: JsonObject) -> None:
        if found := self._names & fields.keys():
            self._rows.update(found)

    def notes(self) -> tuple[str, ...]:
        if not self._rows:
            return ()
        keys = ", ".join(f"{key} ({counted(rows, 'row')})" for key, rows in sorted(self._rows.items()))
        return (f'fields of rows that set nothing where they are: {keys}; a row\'s own are in its "sampling"',)


def model_names(uri: str) -> tuple[str, ...]:
    """Return the names that a row may use for the run's model: its uri as configured, and the last part of that."""
    return tuple(dict.fromkeys((uri, uri.rstrip("/").rpartition("/")[2])))


def _another_model(body: JsonObject, names: tuple[str, ...]) -> str:
    wanted = body.get("model")
    if wanted is None or wanted in names:
        return ""
    return (
        f'"body.model" is {short(wanted)}, and this run\'s model is "{names[-1]}": remove it from the row, or set '
        'model_in_rows = "ignore" in section [input]'
    )
