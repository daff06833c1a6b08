"""What PostgreSQL does to answer: it is free to choose its plan, and has no statistics of a table that grew just now."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from ledger_rows import Writer, attempt_row, result_rows
from rollout.model.item import AttemptEnd, Failure, Outcome
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


VIEWS = {
    "failed": (queries.FAILED_SEQS, {"log": 1, "from_seq": 0, "n": 50}),
    "retried": (queries.RETRIED_SEQS, {"log": 1, "from_seq": 0, "n": 50}),
    "last failed": (queries.LAST_FAILED, {"log": 1, "n": 50}),
    "last failed attempts": (queries.LAST_FAILED_ATTEMPTS, {"log": 1, "n": 50}),
}


@pytest.mark.parametrize("known", [False, True], ids=["guessed", "known"])
async def test_looking_into_a_long_run_reads_what_is_shown(postgres_url: str, known: bool) -> None:
    ledger = PostgresLedger(postgres_url)
    await ledger.open()
    connection = await asyncpg.connect(postgres_url)
    try:
        for table in ("item", "result", "attempt"):
            await connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        writer = Writer(ledger)
        await writer.lead()
        items = 20_000
        await writer.run(items)
        bad = range(5, items, 100)
        failed = result_rows(bad, outcome=Outcome.FAILED, failures=dict.fromkeys(range(len(bad)), Failure("bad", "x")))
        good = result_rows([seq for seq in range(items) if seq % 100 != 5])
        attempts = [attempt_row(seq, AttemptEnd.REVOKED) for seq in range(items)]
        attempts += [replace(attempt_row(seq, AttemptEnd.FAILED, attempt=2), began_ms=5) for seq in bad]
        await writer.commit(Writes(results=[good, failed], attempts=attempts))
        if known:
            await connection.execute("ANALYZE")
        for name, (query, given) in VIEWS.items():
            text, names = queries.for_postgres(query)
            explain = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {text}"
            plan = json.loads(await connection.fetchval(explain, *(given[name] for name in names)))[0]["Plan"]
            assert plan["Actual Rows"] == 50, name
            assert rows_seen(plan) <= 1000, (name, plan)
    finally:
        await connection.close()
        await ledger.close()
