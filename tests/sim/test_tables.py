"""The second implementation of the ledger, where the simulation alone would not tell that it differs from the first."""

from __future__ import annotations

import pytest
import sim_tables
from rollout.model.worker import Inventory, WorkerState
from rollout_coordinator.core.step import WorkerRow, Writes


def test_the_newest_quarantined_workers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As contract/test_ledger_contract.py asks it of the others."""
    out = [WorkerRow(name, "h", Inventory(), WorkerState.QUARANTINED, 1, n, "lied") for n, name in enumerate("CBA", 5)]
    living = WorkerRow("D", "h", Inventory(), WorkerState.READY, 1, 0, "")
    tables = sim_tables.Tables()
    tables.apply(Writes(workers={row.incarnation: row for row in (living, *out)}))
    assert tables.snapshot().workers == [living, *out]
    monkeypatch.setattr(sim_tables, "QUARANTINED_MAX", 2)
    assert tables.snapshot().workers == [living, *out[1:]]
