"""What a log remembers, as its row has had it since before it was typed."""

from __future__ import annotations

import pytest
from rollout_coordinator.core.progress import Progress

ROWS = (
    "{}",
    '{"busy_ms":5,"sealed_count":3,"tally":[1,0]}',
    '{"append":[[0,1]],"origin":{"3":[0,1]}}',
    '{"handed_over":{"2":[4,"00ff"]},"holds":[7],"kept":[[1,9],[2,10]],"left":[5]}',
    '{"rest":{"again":-1,"bad":2,"codes":{"überlast":2},"good":3,"ran_ms":9,"units_in":4,"units_out":5,"why":"voll"}}',
)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_and_written_alike(row: str) -> None:
    assert Progress.from_json(row).to_json() == row
