"""Turns a configuration into items, lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rollout.model.errors import InputChangedError, InputError
from rollout.model.item import ItemSpec, NewItem
from rollout.workloads.arriving_rows import QueueInput
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.images import load_images
from rollout.workloads.infer.model import ResolvedModel, model_json
from rollout.workloads.infer.payload import Payload, encode_payload
from rollout.workloads.infer.prefix import affinities, cost_of
from rollout.workloads.infer.request import SCHEMA_VERSION, RowRequest, adapter_of, item_id, sampling_json
from rollout.workloads.infer.rows import Row, effective_sampling, request_of, row_of
from rollout.workloads.input_lines import Line
from rollout.workloads.invalid import invalid_item
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import input_section
from rollout.workloads.sections import RunSection
from rollout.workloads.source import InputReport

_OF_COMMAND = {"glob", "follow", "stop_when_empty_s"}
READ = "read"
"""Key of `input`: how its files are read, where that differs from the default."""


def resolve_config(
    config: InferConfig,
    report: InputReport,
    model: ResolvedModel,
    queue: QueueInput | None = None,
    *,
    embeds: bool = False,
) -> JsonObject:
    """Return the run's configuration as workers and a later resume need it: files read, defaults explicit. `embeds`
    means that rows ask for embeddings."""
    rows = queue.section() if queue else input_section(config.input.patterns, report)
    if how := config.input.model_dump(mode="json", exclude=_OF_COMMAND, exclude_defaults=True):
        rows[READ] = how
    return {
        "schema": SCHEMA_VERSION,
        "model": model_json(config.model, model),
        "sampling": sampling_json(effective_sampling(config)),
        "backend": config.backend.model_dump(mode="json"),
        "input": {**rows, "embeddings": True} if embeds else rows,
        "output": config.output.model_dump(mode="json"),
        "workers": config.workers.model_dump(mode="json"),
        "run": config.run.model_dump(mode="json"),
    }


def plan(
    config: InferConfig, model_content_id: str, lines: Iterable[Line], run: RunSection | None = None
) -> Iterator[NewItem]:
    """Yield an item for each of `lines`, in order. Raises what `lines` raises.

    `run` replaces the [run] section of `config` if the run was started with another one.
    """
    sampling, specs = effective_sampling(config), Specs(config, run or config.run)
    rows = (_asked(line, sampling, config.backend.kind) for line in lines)
    for row, request, affinity in _with_affinity(rows, wanted=config.workers.prefix_affinity):
        line = row.line
        if line.fault:
            yield invalid_item(line, specs.plain)
            continue
        images = _images(request, line)
        payload = encode_payload(Payload(row.fields, line.index, line.file, line.line, images=images))
        adapter = adapter_of(row.fields, config.model.loras)
        yield NewItem(
            item_id(model_content_id, request, line.index, adapter, images), payload, specs.of(request, affinity)
        )


def _images(request: RowRequest, line: Line) -> dict[str, str]:
    try:
        return load_images(request.images, line.file)
    except InputError as error:
        raise InputChangedError(f"{line.where}: {error.message}, as it was when the input was checked") from error


def item_factory(
    config: InferConfig, model_content_id: str, run: RunSection, check: Callable[[Row, RowRequest], object]
) -> Callable[[Line], NewItem]:
    """Return a function that makes an item of a single row. Prefixes shared with other rows are unknown to it. `check`
    raises InputError for faults besides the request."""
    sampling, specs = effective_sampling(config), Specs(config, run)

    def take(line: Line) -> NewItem:
        row = row_of(line)
        request = request_of(row, sampling, config.backend.kind)
        check(row, request)
        payload = encode_payload(Payload(row.fields, line.index, line.file, line.line))
        identity = item_id(model_content_id, request, 0, adapter_of(row.fields, config.model.loras))
        return NewItem(identity, payload, specs.of(request, ""))

    return take


def _asked(line: Line, sampling: SamplingSection, kind: str) -> tuple[Row, RowRequest]:
    if line.fault:
        return Row(line, {}), RowRequest(sampling, ("",))
    row = row_of(line)
    return row, request_of(row, sampling, kind)


class Specs:
    """The few specs of a run: rows differ only in where and how early they should start."""

    def __init__(self, config: InferConfig, run: RunSection) -> None:
        sampling = config.sampling
        self.plain = run.item_spec()
        self._longest_first = config.workers.longest_first
        self._tokens = sampling.max_tokens * sampling.n
        self._known: dict[tuple[str, int], ItemSpec] = {("", 0): self.plain}

    def of(self, request: RowRequest, affinity: str) -> ItemSpec:
        key = (affinity, cost_of(request, self._tokens) if self._longest_first else 0)
        spec = self._known.get(key)
        if spec is None:
            spec = self._known[key] = replace(self.plain, affinity=key[0], cost=key[1])
        return spec


def _with_affinity(rows: Iterator[tuple[Row, RowRequest]], *, wanted: bool) -> Iterator[tuple[Row, RowRequest, str]]:
    if not wanted:
        yield from ((row, request, "") for row, request in rows)
        return
    ahead: deque[tuple[Row, RowRequest]] = deque()

    def requests() -> Iterator[tuple[RowRequest, int]]:
        for row, request in rows:
            ahead.append((row, request))
            yield request, len(row.line.raw)

    for affinity in affinities(requests()):
        row, request = ahead.popleft()
        yield row, request, affinity
