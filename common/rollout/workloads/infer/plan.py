"""From a configuration to items, lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from rollout.model.item import ItemSpec, NewItem
from rollout.workloads.infer.config import InferConfig, RunSection
from rollout.workloads.infer.model import ResolvedModel, model_json
from rollout.workloads.infer.payload import Payload, encode_payload
from rollout.workloads.infer.prefix import affinities, cost_of
from rollout.workloads.infer.request import SCHEMA_VERSION, RowRequest, item_id, sampling_json
from rollout.workloads.infer.rows import InputReport, Row, effective_sampling, input_files, read_rows, request_of
from rollout.workloads.json_form import JsonObject


def resolve_config(config: InferConfig, report: InputReport, model: ResolvedModel) -> JsonObject:
    """The run's configuration as workers and a later resume need it: files read, defaults written out."""
    return {
        "schema": SCHEMA_VERSION,
        "model": model_json(config.model, model),
        "sampling": sampling_json(effective_sampling(config)),
        "backend": config.backend.model_dump(mode="json"),
        "input": {
            "glob": config.input.patterns,
            "rows": report.rows,
            "digest": report.digest,
            "files": [{"path": file.path, "rows": file.rows, "digest": file.digest} for file in report.files],
        },
        "output": config.output.model_dump(mode="json"),
        "workers": config.workers.model_dump(mode="json"),
        "run": config.run.model_dump(mode="json"),
    }


def item_spec(run: RunSection) -> ItemSpec:
    return ItemSpec(timeout_ms=run.timeout_ms, max_attempts=run.max_attempts, max_worker_lost=run.max_worker_lost)


def plan(
    config: InferConfig, model_content_id: str, *, start: int = 0, run: RunSection | None = None
) -> Iterator[NewItem]:
    """Items from row `start` on, in input order. InputError if a row is wrong (check_input found none).

    `run`: what the run was made with, where that is not what `config` says.
    """
    sampling, specs = effective_sampling(config), Specs(config, run or config.run)
    rows = (
        (row, request_of(row, sampling)) for row in read_rows(input_files(config.input.patterns)) if row.index >= start
    )
    for row, request, affinity in _with_affinity(rows, wanted=config.workers.prefix_affinity):
        payload = encode_payload(Payload(row.fields, row.index, row.file, row.line))
        yield NewItem(item_id(model_content_id, request, row.index), payload, specs.of(request, affinity))


class Specs:
    """The run's few specs: what differs between rows is where, and how early, they are best begun."""

    def __init__(self, config: InferConfig, run: RunSection) -> None:
        sampling = config.sampling
        self._plain = item_spec(run)
        self._longest_first = config.workers.longest_first
        self._tokens = sampling.max_tokens * sampling.n
        self._known: dict[tuple[str, int], ItemSpec] = {("", 0): self._plain}

    def of(self, request: RowRequest, affinity: str) -> ItemSpec:
        key = (affinity, cost_of(request, self._tokens) if self._longest_first else 0)
        spec = self._known.get(key)
        if spec is None:
            spec = self._known[key] = replace(self._plain, affinity=key[0], cost=key[1])
        return spec


def _with_affinity(rows: Iterator[tuple[Row, RowRequest]], *, wanted: bool) -> Iterator[tuple[Row, RowRequest, str]]:
    if not wanted:
        yield from ((row, request, "") for row, request in rows)
        return
    ahead: deque[tuple[Row, RowRequest]] = deque()

    def requests() -> Iterator[tuple[RowRequest, int]]:
        for row, request in rows:
            ahead.append((row, request))
            yield request, len(row.raw)

    for affinity in affinities(requests()):
        row, request = ahead.popleft()
        yield row, request, affinity
