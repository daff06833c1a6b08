"""From a configuration to items, lazily, and what a resumed run may change of its configuration."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Order, RunSpec
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.model import ResolvedModel, model_json
from rollout.workloads.infer.payload import Payload, encode_payload
from rollout.workloads.infer.prefix import affinities, cost_of
from rollout.workloads.infer.request import SCHEMA_VERSION, JsonObject, RowRequest, canonical, item_id, sampling_json
from rollout.workloads.infer.rows import InputReport, Row, effective_sampling, input_files, read_rows, request_of

WORKLOAD = "infer"

# What changes no result: a resumed run may set these anew. Everything else belongs to the run.
_FREE = ("output", "workers")
# What changes how, not what: a resumed run keeps its recorded value and the user is told so.
_RECORDED = frozenset(
    {
        "backend.concurrency", "backend.delay_ms", "backend.jitter_ms", "backend.max_num_seqs", "backend.fail_rate",
        "backend.fail_match", "backend.gpu_memory_utilization", "backend.tensor_parallel_size", "backend.device",
        "backend.enforce_eager", "backend.cpu_kvcache_gib", "backend.engine", "run.name", "run.priority",
        "run.max_attempts", "run.max_worker_lost", "run.order", "run.timeout_ms", "run.max_in_flight",
    }
)  # fmt: skip


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


def resumed_config(old: JsonObject, new: JsonObject) -> JsonObject:
    """What a resumed run goes on with: its own configuration, and the new values of what may change."""
    return {**old, **{section: new[section] for section in _FREE}}


def run_spec(run_id: str, resolved: JsonObject) -> RunSpec:
    """The run to submit. Its `config` leaves out what may change on resume, so opening it again compares equal."""
    run = resolved["run"]
    config = {key: value for key, value in resolved.items() if key not in _FREE}
    return RunSpec(
        run_id=run_id,
        workload=WORKLOAD,
        config=canonical(config),
        name=run["name"],
        order=Order(run["order"]),
        priority=run["priority"],
        max_in_flight=run["max_in_flight"],
    )


def item_spec(config: InferConfig) -> ItemSpec:
    run = config.run
    return ItemSpec(timeout_ms=run.timeout_ms, max_attempts=run.max_attempts, max_worker_lost=run.max_worker_lost)


def plan(config: InferConfig, model_content_id: str, *, start: int = 0) -> Iterator[NewItem]:
    """Items from row `start` on, in input order. InputError if a row is wrong (check_input found none)."""
    sampling, specs = effective_sampling(config), Specs(config)
    rows = (
        (row, request_of(row, sampling)) for row in read_rows(input_files(config.input.patterns)) if row.index >= start
    )
    for row, request, affinity in _with_affinity(rows, wanted=config.workers.prefix_affinity):
        payload = encode_payload(Payload(row.fields, row.index, row.file, row.line))
        yield NewItem(item_id(model_content_id, request, row.index), payload, specs.of(request, affinity))


class Specs:
    """The run's few specs: what differs between rows is where, and how early, they are best begun."""

    def __init__(self, config: InferConfig) -> None:
        sampling = config.sampling
        self._plain = item_spec(config)
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


def describe_change(old: JsonObject, new: JsonObject, *, changed_row: str | None = None) -> list[str]:
    """Why `new` cannot continue the run of `old` (both from resolve_config); empty: it can.

    `changed_row` is what rows.first_changed_row found.
    """
    changes = [
        f"{key}: {_short(before)} -> {_short(after)}"
        for key, before, after in _differences(old, new)
        if not key.startswith(("model.", "input.")) and key not in _RECORDED
    ]
    return [
        *_model_changes(old["model"], new["model"]),
        *changes,
        *_input_changes(old["input"], new["input"], changed_row),
    ]


def describe_ignored(old: JsonObject, new: JsonObject) -> list[str]:
    """Changes that a resumed run does not follow: it keeps the value it was submitted with."""
    return [
        f"{key}: the run keeps {_short(before)}, not {_short(after)}"
        for key, before, after in _differences(old, new)
        if key in _RECORDED
    ]


def _differences(old: JsonObject, new: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    for section in sorted(old.keys() | new.keys()):
        if section in _FREE:
            continue
        before, after = old.get(section), new.get(section)
        if not isinstance(before, dict) or not isinstance(after, dict):
            if before != after:
                yield section, before, after
            continue
        before, after = cast(JsonObject, before), cast(JsonObject, after)
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                yield f"{section}.{key}", before.get(key), after.get(key)


def _model_changes(old: JsonObject, new: JsonObject) -> list[str]:
    changes = [
        f"model.{key}: {_short(old.get(key))} -> {_short(new.get(key))}"
        for key in ("tokenizer", "revision")
        if old.get(key) != new.get(key)
    ]
    if old["content_id"] == new["content_id"]:
        return []  # perhaps elsewhere, but the same weights and tokenizer
    if old["uri"] != new["uri"]:
        return [f"model.uri: {_short(old['uri'])} -> {_short(new['uri'])}", *changes]
    if old["local"] and new["local"]:
        return [f"model.uri: the files in {new['uri']} changed", *changes]
    if old.get("commit") and new.get("commit") and old["commit"] != new["commit"]:
        return [f"model.uri: {new['uri']} is now at commit {new['commit'][:12]}, was {old['commit'][:12]}", *changes]
    if old["local"] != new["local"]:
        return [f"model.uri: {new['uri']} is a local directory in one and a Hugging Face name in the other", *changes]
    # A Hugging Face name whose commit only one of the two knew: nothing says that it moved.
    return changes


def _input_changes(old: JsonObject, new: JsonObject, changed_row: str | None) -> list[str]:
    if old["digest"] == new["digest"]:
        return []
    if changed_row:
        return [f"input: {changed_row}"]
    before = [(file["digest"], file["path"]) for file in old["files"]]
    after = [(file["digest"], file["path"]) for file in new["files"]]
    if sorted(before) == sorted(after):
        return ["input: the same files in another order"]
    known = {path: digest for digest, path in before}
    changes = [
        f"input: the rows of {path} changed" if path in known else f"input: {path} was added"
        for digest, path in after
        if known.get(path) != digest
    ]
    gone = sorted(known.keys() - {path for _, path in after})
    return [*changes, *(f"input: {path} is missing" for path in gone)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
