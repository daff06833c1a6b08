"""What is packed comes back, and what does not fit is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.model.errors import ProtocolError
from rollout.model.item import Blob, Failure, ItemSpec, NewItem, ObjectSlice
from rollout.model.run import Lane, Order, Policy, RunSpec
from rollout.model.worker import Credit, Inventory
from rollout.wire import codec
from rollout.wire.v1 import common_pb2, runs_pb2, work_pb2

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
OID = bytes(range(32))

text = st.text(st.characters(codec="utf-8"), max_size=8)
small = st.integers(0, 2**31 - 1)
slices = st.builds(ObjectSlice, st.binary(min_size=32, max_size=32), st.integers(0, 2**40), st.integers(0, 2**40))
blobs = st.binary(max_size=40) | slices
pairs = st.dictionaries(text, text, max_size=3).map(lambda d: tuple(sorted(d.items())))
amounts = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.floats(0, 1e9), min_size=1, max_size=3).map(
    lambda d: tuple(sorted(d.items()))
)
names = st.lists(text, max_size=3).map(tuple)
specs = st.builds(
    ItemSpec,
    lane=text.filter(lambda name: "\x00" not in name),
    chain=text,
    resources=amounts,
    require_roles=names,
    require_labels=pairs,
    priority=st.integers(-(2**31), 2**31 - 1),
    timeout_ms=small,
    max_attempts=st.integers(1, 100),
    max_worker_lost=st.integers(1, 100),
    exclusive=st.booleans(),
    pipelined=st.booleans(),
    not_before_ms=st.integers(0, 2**62),
    retry_backoff_ms=small,
    executor=text.filter(lambda name: "\x00" not in name),
)


@given(st.lists(blobs, max_size=20))
def test_blobs_come_back(values: list[Blob]) -> None:
    assert codec.unpack_blobs(*codec.pack_blobs(values)) == values


@given(st.integers(0, 2**60), st.lists(st.tuples(st.binary(min_size=32, max_size=32), blobs, specs), max_size=8))
def test_items_come_back(first: int, rows: list[tuple[bytes, Blob, ItemSpec]]) -> None:
    items = [NewItem(*row) for row in rows]
    wire = common_pb2.ItemBatch.FromString(codec.item_batch_to_wire(first, items).SerializeToString())
    seq, ids, payloads, table, index = codec.item_batch_from_wire(wire)
    assert (seq, ids, payloads) == (first, [i.id for i in items], [i.payload for i in items])
    assert [table[i] for i in (index or [0] * len(items))] == [i.spec for i in items]


@given(specs)
def test_equal_specs_are_one_object(spec: ItemSpec) -> None:
    found = codec.spec_from_wire(common_pb2.ItemSpec.FromString(codec.spec_to_wire(spec).SerializeToString()))
    assert found == spec
    assert codec.spec_from_wire(codec.spec_to_wire(spec)) is codec.spec_from_wire(codec.spec_to_wire(spec))


@given(st.dictionaries(small, st.builds(Failure, st.text("ab", min_size=1), text, st.booleans(), st.booleans())))
def test_failures_come_back(failures: dict[int, Failure]) -> None:
    assert codec.failures_from_wire([codec.failure_to_wire(i, f) for i, f in failures.items()]) == failures


@given(amounts, names, pairs, st.integers(0, 2**32 - 1), st.integers(0, 2**62))
def test_workers_come_back(
    capacity: tuple[tuple[str, float], ...], roles: tuple[str, ...], labels: Any, items: int, size: int
) -> None:
    inventory = Inventory(capacity, roles, labels, roles, "h", "1", roles)
    assert codec.inventory_from_wire(codec.inventory_to_wire(inventory)) == inventory
    credit = Credit(items, size, ((RUN, items),))
    assert codec.credit_from_wire(codec.credit_to_wire(credit)) == credit


def test_a_run_comes_back() -> None:
    spec = RunSpec(
        RUN, "infer", b"{}", "n", Order.ARRIVAL, 3, 4, (Lane("a", 1),), (Policy("p", (("k", "v"),)),), 5, (("l", "m"),)
    )
    assert codec.run_spec_from_wire(codec.run_spec_to_wire(spec)) == spec


def test_an_item_that_takes_nothing_does_not_become_one_that_takes_a_slot() -> None:
    assert dict(codec.spec_from_wire(codec.spec_to_wire(ItemSpec(resources=()))).resources) == {"slots": 0.0}


def test_a_lone_surrogate_does_not_lose_the_failure() -> None:
    assert codec.failure_to_wire(0, Failure("x", "bad \ud800 name")).message == "bad ? name"
    assert len(codec.failure_to_wire(0, Failure("x", "y" * 10_000)).message) == codec.ERROR_TEXT_MAX


def _ref(index: int, **fields: Any) -> common_pb2.IndexedRef:
    values: dict[str, Any] = {"object_id": OID}
    return common_pb2.IndexedRef(index=index, ref=common_pb2.ObjectRef(**values | fields))


def _batch(**fields: Any) -> common_pb2.ItemBatch:
    return common_pb2.ItemBatch(**({"ids": OID, "length": [1], "data": b"x"} | fields))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("length", lambda: codec.unpack_blobs([1, 2], b"ab", [])),
        ("length", lambda: codec.unpack_blobs([], b"ab", [])),
        ("refs", lambda: codec.unpack_blobs([0], b"", [_ref(1)])),
        ("refs", lambda: codec.unpack_blobs([1], b"a", [_ref(0)])),
        ("refs", lambda: codec.unpack_blobs([0], b"", [_ref(0), _ref(0)])),
        ("refs", lambda: codec.unpack_blobs([0], b"", [_ref(0, object_id=b"short")])),
        ("refs", lambda: codec.unpack_blobs([0], b"", [_ref(0, offset=2**63)])),
        ("ids", lambda: codec.split_ids(b"x" * 33)),
        ("ids", lambda: codec.item_batch_to_wire(0, [NewItem(b"short", b"")])),
        ("length", lambda: codec.item_batch_from_wire(_batch(ids=OID * 2))),
        ("first_seq", lambda: codec.item_batch_from_wire(_batch(first_seq=2**63 - 1))),
        ("spec_index", lambda: codec.item_batch_from_wire(_batch(spec_index=[1]))),
        ("spec_index", lambda: codec.item_batch_from_wire(_batch(spec_index=[0, 0]))),
        ("resources", lambda: codec.spec_from_wire(common_pb2.ItemSpec(resources={"slots": math.nan}))),
        ("resources", lambda: codec.spec_from_wire(common_pb2.ItemSpec(resources={"slots": math.inf}))),
        ("resources", lambda: codec.spec_from_wire(common_pb2.ItemSpec(resources={"slots": -1}))),
        ("not_before_ms", lambda: codec.spec_from_wire(common_pb2.ItemSpec(not_before_ms=-1))),
        ("timeout_ms", lambda: codec.spec_from_wire(common_pb2.ItemSpec(timeout_ms=2**63))),
        ("capacity", lambda: codec.inventory_from_wire(common_pb2.Inventory(capacity={"gpus": -1}))),
        ("credit", lambda: codec.credit_from_wire(work_pb2.Credit(run_items={"no": 1}))),
        ("run_id", lambda: codec.run_spec_from_wire(runs_pb2.RunSpec(run_id="x"))),
        ("order", lambda: codec.run_spec_from_wire(runs_pb2.RunSpec(run_id=RUN, workload="w", order="other"))),
        ("errors", lambda: codec.failures_from_wire([common_pb2.ErrorInfo(code="x")] * 2)),
        ("errors", lambda: codec.failures_from_wire([common_pb2.ErrorInfo()])),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, call: Any) -> None:
    with pytest.raises(ProtocolError, match=field):
        call()
