"""What PostgreSQL does to answer: it is free to choose its plan, and has no statistics of a table that grew just now."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest
from ledger_rows import Writer, result_rows
from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import queries
from rollout_coordinator.ledger.postgres import PostgresLedger


def rows_seen(plan: dict[str, Any]) -> int:
    """Rows that all nodes of a plan gave on or threw away."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
    return own * plan["Actual Loops"] + sum(map(rows_seen, plan.get("Plans", ())))


@pytest.mark.parametrize("known", [False, True], ids=["guessed", "known"])
@pytest.mark.parametrize("items", [3_000, 10_000, 50_000])
async def test_finding_pending_rows_costs_no_more_in_a_long_log(postgres_url: str, items: int, known: bool) -> None:
    ledger = PostgresLedger(postgres_url)
    await ledger.open()
    connection = await asyncpg.connect(postgres_url)
    try:
        for table in ("item", "result"):  # no statistics come unasked
            await connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        writer = Writer(ledger)
        await writer.lead()
        await writer.run(items)
        await writer.commit(Writes(results=[result_rows([*range(1000), *range(2000, items, 2)])]))
        if known:
            await connection.execute("ANALYZE")
        text, names = queries.for_postgres(queries.PENDING)
        given = {"log": 1, "from_seq": 900, "to_seq": 1400, "n": 500}
        explain = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {text}"
        plan = json.loads(await connection.fetchval(explain, *(given[name] for name in names)))[0]["Plan"]
        assert plan["Actual Rows"] == 400
        assert rows_seen(plan) <= 5 * 500, plan
    finally:
        await connection.close()
        await ledger.close()
