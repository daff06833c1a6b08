"""What is written, and what survives: the ledger's tables, the key-value store, queues."""

from __future__ import annotations

from safeguard import COORDINATOR, Safeguard, cut, never

QUERIES = f"{COORDINATOR}ledger.queries"
LEDGER, READS = "contract/test_ledger_contract.py::", "contract/test_ledger_reads.py::"
PLANS = "contract/test_postgres_plans.py::test_finding_pending_rows_costs_no_more_in_a_long_log"
QUEUE = "rollout.queues.local:LocalQueue"

SAFEGUARDS = (
    Safeguard(
        "result inserted from absent",
        "A second result of an item fails its whole transaction.",
        cut(f"{QUERIES}:RESULTS", 'position bigint",', 'position bigint", ignore=True,'),
        (f"{LEDGER}test_a_second_result_of_an_item_fails_the_whole_transaction[sqlite]",),
    ),
    Safeguard(
        "item inserted from absent",
        "An item's row is written once.",
        cut(f"{QUERIES}:ITEMS", 'object_length bigint",', 'object_length bigint", ignore=True,'),
        (f"{LEDGER}test_an_item_row_is_written_once[sqlite]",),
    ),
    Safeguard(
        "first word on an attempt",
        "How an attempt ended is not rewritten.",
        cut(f"{QUERIES}:ATTEMPTS", "ignore=True", 'key=("log", "seq", "attempt")'),
        (f"{READS}test_the_first_word_on_an_attempt_stands[sqlite]",),
    ),
    Safeguard(
        "one transaction a step",
        "All of a step is on disk, or nothing.",
        cut("rollout.storage.sqlite:transaction", 'connection.execute("ROLLBACK")', 'connection.execute("COMMIT")'),
        (f"{LEDGER}test_a_second_result_of_an_item_fails_the_whole_transaction[sqlite]",),
    ),
    Safeguard(
        "fsync of the ledger (SQLite synchronous)",
        "What was acknowledged survives a power loss.",
        cut("rollout.storage.sqlite:SqliteEngine._connect", "synchronous=FULL", "synchronous=NORMAL"),
        ("contract/test_durability.py::test_a_commit_returns_after_its_fsync",),
    ),
    Safeguard(
        "the commit log ends at the cursor",
        "Clients read final results only.",
        cut(f"{COORDINATOR}ledger.sqlite:_commit_log", "min(cursor + limit, committed[0])", "cursor + limit"),
        (f"{READS}test_the_commit_log_ends_at_the_cursor[sqlite]",),
    ),
    Safeguard(
        "pending rows have no result",
        "What is final is not read back to run again.",
        cut(
            f"{QUERIES}:PENDING",
            "\n   AND NOT EXISTS (SELECT 1 FROM result WHERE result.log = item.log AND result.seq = item.seq LIMIT 1 OFFSET 0)",
            "",
        ),
        (f"{READS}test_pending_rows_are_those_without_a_result[sqlite]",),
    ),
    Safeguard(
        "pending rows look their results up",
        "PostgreSQL reads no more of a log than it answers, whatever its statistics say.",
        cut(f"{QUERIES}:PENDING", " LIMIT 1 OFFSET 0", ""),
        (f"{PLANS}[3000-known]", f"{PLANS}[50000-known]"),
    ),
    Safeguard(
        "reading goes on behind many results",
        "Pending rows far behind the first ones are found.",
        cut(f"{COORDINATOR}ledger.reads:PendingBuilder.add", "min(to_seq, self.behind)", "self.behind"),
        (f"{READS}test_pending_rows_behind_many_results[postgres-700-4200]",),
    ),
    Safeguard(
        "pending rows carry their history",
        "Attempt numbers, losses and backoff survive a restart.",
        cut(f"{COORDINATOR}ledger.reads:add_history", "if item is not None:", "if False:"),
        (f"{READS}test_pending_rows_carry_their_history[sqlite]",),
    ),
    Safeguard(
        "ended attempts are not open",
        "A new leader does not adopt what was given back.",
        cut(
            f"{QUERIES}:OPEN_ATTEMPTS",
            "AND NOT EXISTS (SELECT 1 FROM attempt\n                    WHERE",
            "AND NOT EXISTS (SELECT 1 FROM attempt\n                    WHERE 1 = 0 AND",
        ),
        (f"{LEDGER}test_results_and_ended_attempts_close[sqlite]",),
    ),
    Safeguard(
        "log numbers are never used again",
        "A late frame for a deleted run does not reach another one.",
        cut(f"{QUERIES}:KEEP_NEXT_LOG", "FROM log WHERE TRUE", "FROM log WHERE 1 = 0"),
        (f"{READS}test_the_number_of_a_deleted_log_is_never_used_again[sqlite]",),
    ),
    Safeguard(
        "text that no database takes",
        "A worker's error message never fails the transaction of everybody's results.",
        cut(
            f"{COORDINATOR}ledger.rows:clean",
            'return text.replace("\\x00", "\\ufffd").encode("utf-8", "replace").decode("utf-8")',
            "return text",
        ),
        (f"{READS}test_results_come_in_order_with_blobs_and_failures[sqlite]",),
    ),
    Safeguard(
        "numbers that no column holds",
        "A worker's counter never fails the transaction of everybody's results.",
        cut(f"{COORDINATOR}ledger.rows:clamp", "return number if", "return number if True or"),
        (f"{READS}test_numbers_that_no_column_holds_are_clamped[sqlite]",),
    ),
    Safeguard(
        "a newer schema is refused",
        "An older program does not write into tables that it does not know.",
        never("rollout.storage.migrations:plan", "stored > known"),
        ("contract/test_storage_migrations.py::test_a_newer_schema_is_refused[sqlite]",),
    ),
    Safeguard(
        "migrations in one transaction",
        "A migration that fails leaves the database as it was.",
        cut(
            "rollout.storage.sqlite:SqliteEngine._migrate",
            "connection.execute(statement)",
            'connection.execute(statement); connection.execute("COMMIT"); connection.execute("BEGIN")',
        ),
        ("contract/test_storage_migrations.py::test_a_failed_migration_leaves_the_version[sqlite]",),
    ),
    Safeguard(
        "compare-and-swap of a key",
        "Of two that change a key at once one fails.",
        cut("rollout.storage.kv_sqlite:_apply", "if not all(_holds(db, check) for check in checks):", "if False:"),
        ("contract/test_storage_kv.py::test_one_of_many_swaps_wins[sqlite]",),
    ),
    Safeguard(
        "transactions check what they scanned",
        "A row that another process added fails the transaction that looked for it.",
        cut(
            "rollout.storage.kv_sqlite:_holds",
            "return tuple(_scan(db, check.namespace, check.prefix, check.limit)) == check.found",
            "return True",
        ),
        ("contract/test_storage_kv.py::test_what_another_process_changed_fails_the_transaction[sqlite-scan]",),
    ),
    Safeguard(
        "watchers hear of commits only",
        "What was rolled back is never seen.",
        cut("rollout.storage.kv:KvStorage.watch", "page.floor is None or reached + 1 < page.floor", "False"),
        ("contract/test_storage_kv.py::test_a_watcher_that_comes_too_late_is_told[sqlite]",),
    ),
    Safeguard(
        "queue: durable before visible",
        "A message that was handed out is not lost with its process.",
        cut(
            f"{QUEUE}.enqueue",
            "            names = self._make_ids(len(bodies))\n",
            "            names = self._make_ids(len(bodies))\n            self._cold.extend(names)\n",
        ),
        ("contract/test_queues.py::test_nothing_shows_before_it_is_durable",),
    ),
    Safeguard(
        "queue: receipts",
        "A message whose lease was lost is not acknowledged by its former holder.",
        cut(f"{QUEUE}._holder", "held is not None and str(held.receipt) == message.receipt", "held is not None"),
        ("contract/test_queues.py::TestLocal",),
    ),
    Safeguard(
        "queue: leases end",
        "A message whose holder died comes again.",
        cut(f"{QUEUE}._expire", "late.append((name, held))", "pass"),
        ("contract/test_queues.py::TestLocal",),
    ),
)
