"""Dispatch by executor, against the plainest account of it: an item is done if, and only if, somebody hosts its executor."""

from __future__ import annotations

from core_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.model.item import ItemSpec, hosted
from rollout.model.run import RunState

NAMES = ("script", "tool", "model")
"""The first one is the run's workload, which an item names with an empty string."""


@settings(max_examples=200, deadline=None)
@given(
    hosts=st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=3),
    asked=st.lists(st.sampled_from(("", *NAMES, "model:2")), min_size=1, max_size=40),
    restart=st.booleans(),
)
def test_what_somebody_hosts_is_done_and_nothing_else(hosts: list[set[str]], asked: list[str], restart: bool) -> None:
    w = World(window_items=8, assign_items_max=3)
    for n, names in enumerate(hosts):
        w.worker(f"W{n}", credit=3, executors=tuple(names))
    w.open()
    w.submit(len(asked), specs=[ItemSpec(executor=name) for name in asked])
    w.seal(len(asked))
    if restart:
        w.restart()
        for worker in w.workers.values():
            worker.hello()
    w.drain_all()
    somewhere = set[str]().union(*hosts)
    expected = {seq for seq, name in enumerate(asked) if hosted(name or NAMES[0]) in somewhere}
    assert set(w.ledger.results.get(w.root(), {})) == expected
    for worker, names in zip(w.workers.values(), hosts, strict=True):
        assert {hosted(worker.info[key][2].executor or NAMES[0]) for key in worker.info} <= names
    assert (w.view().state is RunState.COMPLETED) == (len(expected) == len(asked))
