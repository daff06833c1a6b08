"""Turns batches into items of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Order, Policy, RunSpec
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.test.cases import Batch, Case

WORKLOAD = "test"
_SCHEMA = b"\x01"
_MAX_LOST = 3
"""Workers that a batch may take down. A test that ends its interpreter does not end a worker."""


def item_of(batch: Batch, seq: int, of_run: bytes) -> NewItem:
    """Return the item of a batch. `of_run` is what its result depends on besides the batch."""
    payload = batch.encode()
    return NewItem(
        blake3(_SCHEMA + of_run + seq.to_bytes(8, "little") + payload).digest(),
        payload,
        ItemSpec(cost=batch.expected_ms, max_worker_lost=_MAX_LOST),
    )


def run_spec(run_id: str, config: JsonObject, free: Iterable[str]) -> RunSpec:
    run: JsonObject = config["run"]
    rest = ()
    if run["max_failures"]:  # an attempt counts the tests that failed for good as `units_out`
        rest = (Policy("skip_rest", (("units_out", str(run["max_failures"])), ("unit_out", "failed tests"))),)
    return RunSpec(
        run_id=run_id,
        workload=WORKLOAD,
        config=canonical({key: value for key, value in config.items() if key not in free}),
        name=run["name"],
        order=Order.ARRIVAL,
        priority=run["priority"],
        max_in_flight=run["max_in_flight"],
        policies=rest,
    )


def digest_of(cases: Sequence[Case]) -> str:
    """Return a hash of the set of tests, whatever their order."""
    return blake3(canonical(sorted([case.group, case.id] for case in cases))).hexdigest()
