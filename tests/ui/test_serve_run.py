"""The page of a run of `rollout serve`."""

from __future__ import annotations

import json

from rollout.ui.page import Section, nowhere, render
from rollout.ui.views import _run  # pyright: ignore[reportPrivateUsage]
from rollout.wire.v1 import runs_pb2


def test_the_figures_of_all_replicas_are_added_up_and_nothing_is_called_done() -> None:
    replicas = [{"requests": 15, "running": 1, "completion_tokens": 30}, {"requests": 4, "running": 0}]
    status = runs_pb2.RunStatus(
        state="running",
        submitted=3,
        note="1 of 15 requests running",
        figures_of_each=[json.dumps(one).encode() for one in replicas],
    )
    status.spec.workload = "serve"
    run = _run(status) | {"cost": ""}
    assert run["figures"] == {"replicas": 2, "requests": 19, "running": 1, "completion_tokens": 30}
    html = render(Section("run", {"run": run, "config": {}}), nowhere)
    assert "<dt>completion tokens</dt><dd>30</dd>" in html and "<dt>requests</dt><dd>19</dd>" in html
    assert "<progress" not in html and "replicas/s" not in html
