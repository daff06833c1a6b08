"""What is written, and what survives: the ledger's tables, the key-value store, objects, queues."""

from __future__ import annotations

from removal import Edit
from safeguard import COORDINATOR, Safeguard, cut, never

QUERIES = f"{COORDINATOR}ledger.queries"
LEDGER, READS = "contract/test_ledger_contract.py::", "contract/test_ledger_reads.py::"
PLANS = "contract/test_postgres_plans.py::test_finding_pending_rows_costs_no_more_in_a_long_log"
STORES = "contract/test_objects.py::"
FS = "rollout.objects.fs:FsObjectStore"
REMOTE, CACHE = "rollout.objects.remote:RemoteObjects", "rollout.objects.cache:ObjectCache"
SERVER = f"{COORDINATOR}objects_server:ObjectsService"
QUEUE = "rollout.queues.local:LocalQueue"
OBJECTS_GATE = f"{COORDINATOR}objects_gate:ObjectsGate"

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
        "fsync of objects",
        "An object that was acknowledged survives a power loss.",
        cut(f"{FS}._spool", "os.fsync(file.fileno())", "pass"),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "fsync of an object's directory",
        "Its name survives too.",
        cut(f"{FS}._publish", "        fsync_dir(shard)\n", ""),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "objects show by one rename",
        "A part of an object is never read.",
        cut(f"{FS}._publish", "tmp.replace(path)  # last", "path.write_bytes(tmp.read_bytes())  # last"),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "hash of an upload",
        "Bytes that do not match their id never show.",
        never(f"{FS}._spool", "hasher.digest() != object_id"),
        (f"{STORES}TestFs::test_what_does_not_match_its_id_never_shows[wrong bytes!]",),
    ),
    Safeguard(
        "size of an upload",
        "An upload that is cut short or too long never shows.",
        never(f"{FS}._spool", "written != size"),
        (f"{STORES}TestFs::test_what_does_not_match_its_id_never_shows[short]",),
        covered_by="hash of an upload",
    ),
    Safeguard(
        "hash of a read",
        "Bit rot is reported, and a new upload heals it.",
        (
            Edit(f"{FS}.get", "if at == end and hasher.digest() != object_id:", "if False:"),
            Edit(f"{FS}.get", "if hasher is not None and hasher.digest() != object_id:", "if False:"),
        ),
        (f"{STORES}test_fs_bit_rot_is_reported_and_healed_by_a_new_upload",),
    ),
    Safeguard(
        "damaged objects are replaced",
        "An object of the wrong length is not taken for stored.",
        never(f"{FS}._keep_existing", "path.stat().st_size != size"),
        ("contract/test_durability.py::test_an_object_of_the_wrong_length_is_not_taken_for_stored",),
    ),
    Safeguard(
        "room for the ledger",
        "Objects leave the ledger's disk enough to commit.",
        never(f"{FS}._check_room", "free < size + self._reserve"),
        (f"{STORES}test_fs_full_disk",),
    ),
    Safeguard(
        "object pin",
        "An object that somebody holds is not deleted.",
        cut(
            "rollout.objects.pins:PinTable.unless_pinned",
            "return False if self._pinned([object_id]) else act()",
            "return act()",
        ),
        (f"{STORES}TestFs::test_pins_keep_from_deletion_until_they_expire",),
    ),
    Safeguard(
        "pins are never shortened",
        "A second pin of the same holder does not end the first.",
        cut("rollout.objects.pins:PinTable.pin", "max(expires_ms, excluded.expires_ms)", "excluded.expires_ms"),
        (f"{STORES}TestFs::test_pins_keep_from_deletion_until_they_expire",),
    ),
    Safeguard(
        "uploads are pinned",
        "A result's object is not collected on its way to the ledger.",
        cut(f"{SERVER}._put", "await self._pin([object_id], first.pin, peer.role)", "pass"),
        ("contract/test_objects_remote.py::test_round_trip",),
    ),
    Safeguard(
        "what is found is pinned first",
        "An object that Has reports stays until it is referred to.",
        cut(f"{SERVER}.Has", "await self._pin(ids, request.pin, peer.role)", "pass"),
        ("contract/test_durability.py::test_what_a_client_is_told_to_be_there_is_kept_for_it",),
    ),
    Safeguard(
        "collection: references",
        "An object that a payload or result refers to is kept.",
        cut(f"{COORDINATOR}gc:collect_garbage", "meta.object_id not in referenced and ", ""),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "collection: age",
        "What was stored a moment ago is kept.",
        never(f"{COORDINATOR}gc:collect_garbage", "meta.created_ms > oldest"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "collection: pins",
        "What is pinned is not asked for.",
        cut(f"{COORDINATOR}gc:collect_garbage", "[m for m in batch if m.object_id not in pinned]", "batch"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
        covered_by="object pin",
    ),
    Safeguard(
        "collected objects are forgotten",
        "A result that refers to a collected object is not accepted from memory.",
        cut(f"{COORDINATOR}gc:collect_garbage", "forget([meta.object_id])", "pass"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "references of every run",
        "Deleting a run keeps the objects that others refer to.",
        cut(
            f"{QUERIES}:REFERENCED",
            "FROM result WHERE object_id IN ({ids})",
            "FROM result WHERE 1 = 0 AND object_id IN ({ids})",
        ),
        (f"{READS}test_referenced_objects[sqlite]",),
    ),
    Safeguard(
        "accepted only with durable objects",
        "A result whose object was never stored is tried again.",
        cut(f"{OBJECTS_GATE}.check_results", "if not missing:", "if True:"),
        ("integration/test_coordinator_run.py::test_results_with_objects_are_accepted_only_when_the_object_is_there",),
        slow=True,
    ),
    Safeguard(
        "submitted only with durable objects",
        "Items that refer to objects that are not there are refused.",
        cut(f"{OBJECTS_GATE}.check_payloads", "        if missing:", "        if False:"),
        ("contract/test_durability.py::test_items_that_refer_to_what_is_not_stored_are_refused",),
    ),
    Safeguard(
        "a new leader asks again for objects",
        "Another leader may have deleted what this one has seen.",
        cut(f"{COORDINATOR}lifecycle:Coordinator._win", "p.objects_gate.forget_all()", "pass"),
        ("contract/test_durability.py::test_a_new_tenure_believes_in_no_object_it_has_seen",),
    ),
    Safeguard(
        "bytes of a download",
        "Damaged bytes are never believed.",
        cut(f"{REMOTE}.stream", "if hasher is not None and hasher.digest() != object_id:", "if False:"),
        ("contract/test_objects_remote.py::test_damaged_bytes_are_never_believed",),
    ),
    Safeguard(
        "bytes of a fetched file",
        "A file gets its name only when it is whole.",
        cut(f"{REMOTE}._resume", "        return hasher.digest() == object_id", "        return True"),
        ("contract/test_objects_remote.py::test_damaged_bytes_are_never_believed",),
    ),
    Safeguard(
        "epoch at the objects server",
        "Nothing is put where the newer leader does not read.",
        never(f"{SERVER}._check_epoch", "request.epoch > self.epoch"),
        ("contract/test_durability.py::test_nothing_is_put_at_the_server_of_a_deposed_leader",),
    ),
    Safeguard(
        "size of an object",
        "One client cannot fill the store with one upload.",
        never(f"{SERVER}._put", "size > self._max_object_bytes"),
        ("contract/test_objects_remote.py::test_bad_uploads[messages3-InputError-over the limit]",),
    ),
    Safeguard(
        "size of a chunk",
        "One message of an upload costs a bounded amount of memory.",
        never(f"{COORDINATOR}objects_server:_bounded", "len(chunk) > CHUNK"),
        ("contract/test_objects_remote.py::test_bad_uploads[messages5-ProtocolError-at most]",),
    ),
    Safeguard(
        "stalled uploads end",
        "A client that stops in the middle does not hold its place for ever.",
        cut(f"{COORDINATOR}objects_server:stall_watch", "task.cancel()", "pass"),
        ("contract/test_objects_remote.py::test_a_stalled_upload_is_ended_and_leaves_nothing",),
    ),
    Safeguard(
        "one pack's failure",
        "A failed upload fails its own blobs only, and tells them.",
        cut("rollout.objects.pack:Packer._upload", "pack.id.set_exception(e)", "pack.id.set_result(b'')"),
        ("contract/test_objects_cache.py::test_a_failed_pack_fails_its_blobs_only",),
    ),
    Safeguard(
        "one who gives up",
        "A caller that is cancelled does not take its neighbours' upload along.",
        cut(
            "rollout.objects.pack:Packer.add_many",
            "await asyncio.shield(asyncio.gather(*{future for future, _, _ in places}))",
            "await asyncio.gather(*{future for future, _, _ in places})",
        ),
        ("contract/test_objects_cache.py::test_one_who_gives_up_does_not_take_the_pack_along",),
    ),
    Safeguard(
        "one fetch a host",
        "A large object is fetched once, whatever number of processes ask.",
        cut(f"{CACHE}._load", "if not await asyncio.to_thread(self._touch, path):", "if True:"),
        ("contract/test_objects_cache.py::test_processes_of_a_host_fetch_once",),
        slow=True,
    ),
    Safeguard(
        "slices within their object",
        "An input that its object does not hold is refused before its attempt begins.",
        never(f"{CACHE}.ready", "(await asyncio.to_thread(path.stat)).st_size < end"),
        ("contract/test_objects_cache.py::test_processes_read_what_is_ready_themselves",),
    ),
    Safeguard(
        "a cache that cannot be read",
        "An input that cannot be read from the host's cache fails its attempt, which does not wait for ever.",
        cut(f"{CACHE}.path", "with storage_errors(self._unreadable):", "if True:"),
        ("contract/test_objects_cache.py::test_a_cache_that_cannot_be_read_says_so",),
    ),
    Safeguard(
        "inputs that cannot be read",
        "An input that a process cannot read from the cache costs its attempt, not the process.",
        cut("rollout_worker.runner:Runner._assign", "with suppress(OSError):", "if True:"),
        ("integration/test_runner_inputs.py::test_what_cannot_be_read_is_asked_for_too",),
        slow=True,
    ),
    Safeguard(
        "slices read whole",
        "A process takes no part of an input for the whole.",
        cut("rollout.objects.cache:read_cached", "if len(data) == blob.length:", "if True:"),
        ("contract/test_objects_cache.py::test_processes_read_what_is_ready_themselves",),
    ),
    Safeguard(
        "evicted inputs",
        "An input that left the cache before its attempt began is fetched again.",
        cut(
            "rollout_worker.runner:Runner._attempt",
            "attempt.payload = await context.get_object(unread)",
            "pass",
        ),
        ("integration/test_runner_inputs.py::test_what_was_evicted_is_asked_for",),
        slow=True,
    ),
    Safeguard(
        "slices asked for are whole",
        "A process that asked for an object takes no part of a slice for the whole.",
        never("rollout_worker.attempt_context:_read", "len(data) != length"),
        ("integration/test_runner_inputs.py::test_what_cannot_be_had_fails_its_attempt_only",),
        slow=True,
    ),
    Safeguard(
        "names in a directory's manifest",
        "A manifest cannot write outside its directory.",
        never(
            "rollout.objects.tree:_safe",
            'any(part in ("", ".", "..") for part in parts) or "\\0" in path or "\\\\" in path',
        ),
        ("contract/test_objects_cache.py::test_unsafe_names_are_refused",),
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
        (f"{PLANS}[3000-guessed]", f"{PLANS}[50000-known]"),
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
