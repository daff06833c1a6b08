"""The lease, the driver, the gate: who leads, and what may leave a coordinator."""

from __future__ import annotations

from removal import Edit
from safeguard import COORDINATOR, Safeguard, cut, never

LEASE, DRIVER, QUERIES = (
    f"{COORDINATOR}lease:LeaseKeeper",
    f"{COORDINATOR}driver:Driver",
    f"{COORDINATOR}ledger.queries",
)
GATE, LIFE = f"{COORDINATOR}leadership:Gate", f"{COORDINATOR}lifecycle:Coordinator"

SAFEGUARDS = (
    Safeguard(
        "epoch in the transaction (fence)",
        "A deposed leader writes nothing.",
        cut(f"{QUERIES}:FENCE", "epoch = :epoch AND ", ""),
        (
            "contract/test_ledger_contract.py::test_a_commit_under_another_fence_writes_nothing[sqlite-fence1]",
            "contract/test_lease_keeper.py::test_the_deposed_holder_is_told_and_can_write_nothing[sqlite]",
        ),
    ),
    Safeguard(
        "batch number in the transaction",
        "A transaction that was committed is not committed again, and an unknown outcome can be looked up.",
        cut(f"{QUERIES}:FENCE", " AND batch = :batch", ""),
        ("contract/test_ledger_contract.py::test_a_commit_under_another_fence_writes_nothing[sqlite-fence0]",),
    ),
    Safeguard(
        "the fence is looked at",
        "A transaction whose fence found no row is rolled back.",
        (
            Edit(
                f"{COORDINATOR}ledger.sqlite:SqliteLedger._commit",
                "fence._asdict()).rowcount != 1:",
                "fence._asdict()).rowcount > 1:",
            ),
        ),
        (
            "contract/test_ledger_contract.py::test_a_commit_under_another_fence_writes_nothing[sqlite-fence2]",
            "contract/test_ledger_contract.py::test_a_commit_without_any_lease_is_fenced[sqlite]",
        ),
    ),
    Safeguard(
        "outcome of an unknown COMMIT",
        "After a lost connection `batch` says whether the transaction counts.",
        cut(
            f"{COORDINATOR}ledger.postgres:PostgresLedger._was_committed",
            "return await self._read_batch() == (fence.epoch, fence.batch + 1)",
            "return True",
        ),
        ("contract/test_ledger_outage.py::test_a_commit_without_an_answer_is_looked_up",),
        slow=True,
    ),
    Safeguard(
        "transactions are bounded",
        "A stopped leader cannot keep a standby out of the database.",
        cut("rollout.storage.postgres:PostgresEngine.write", "BEGIN; {settings(timeout_ms)}", "BEGIN;"),
        ("contract/test_ledger_outage.py::test_a_stopped_leader_cannot_keep_others_out",),
        slow=True,
    ),
    Safeguard(
        "reads are begun in time",
        "A coordinator whose database fell silent is told so, and its connections come free.",
        cut("rollout.storage.postgres:PostgresEngine.read", "timeout=self.BEGIN_S", "timeout=None"),
        ("contract/test_postgres_silence.py::test_a_read_of_a_silent_database_ends[BEGIN]",),
        slow=True,
    ),
    Safeguard(
        "statements are bounded here too",
        "The same when it fell silent in the middle of a read, where the server's own bound tells nobody.",
        cut(
            "rollout.storage.postgres:PostgresEngine.open",
            "command_timeout=self.READ_MS / 1000",
            "command_timeout=None",
        ),
        ("contract/test_postgres_silence.py::test_a_read_of_a_silent_database_ends[statement]",),
        slow=True,
    ),
    Safeguard(
        "transactions are bounded here too",
        "A leader whose database fell silent in the middle of a commit stands by in time.",
        cut(
            "rollout.storage.postgres:PostgresEngine.write",
            "asyncio.timeout(2 * timeout_ms / 1000)",
            "asyncio.timeout(None)",
        ),
        ("contract/test_postgres_silence.py::test_a_write_that_a_silent_database_takes_half_of_ends",),
        slow=True,
    ),
    Safeguard(
        "a tenure ends with its trust",
        "A leader whose commit is never answered does not keep its workers from the next one.",
        cut(f"{LIFE}._lead", "raise LeaseLostError", "pass"),
        ("integration/test_coordinator_failover.py::test_a_leader_whose_commit_is_never_answered_stops_serving",),
    ),
    Safeguard(
        "statements of the object store are bounded",
        "The same for objects in the database.",
        cut(
            "rollout.objects.postgres:PostgresObjectStore.open",
            "command_timeout=COMMAND_TIMEOUT_S",
            "command_timeout=None",
        ),
        ("contract/test_postgres_silence.py::test_a_silent_database_is_told_to_who_wants_an_object",),
        slow=True,
    ),
    Safeguard(
        "lease: insert from absent",
        "Of two coordinators that start at once one leads.",
        cut(f"{QUERIES}:INSERT_LEASE", "DO NOTHING", "DO UPDATE SET holder = excluded.holder"),
        ("contract/test_lease_keeper.py::test_the_lease_row_is_swapped_whole[sqlite]",),
    ),
    Safeguard(
        "lease: swap compares the whole row",
        "A steal that raced with any write of the row fails.",
        cut(
            f"{QUERIES}:SWAP_LEASE",
            "AND holder = :old_holder AND epoch = :old_epoch AND batch = :old_batch AND beat = :old_beat\n"
            "   AND released = :old_released AND address = :old_address",
            "AND (holder = :old_holder OR epoch >= :old_epoch OR batch >= :old_batch OR beat >= :old_beat"
            " OR released = :old_released OR address = :old_address)",
        ),
        ("contract/test_lease_keeper.py::test_the_lease_row_is_swapped_whole[sqlite]",),
    ),
    Safeguard(
        "lease: renewal heeds the epoch",
        "A deposed holder does not renew its successor's lease.",
        cut(
            f"{QUERIES}:RENEW_LEASE",
            " AND holder = :holder AND epoch = :epoch",
            " AND (holder = :holder OR epoch <> :epoch OR one = 1)",
        ),
        (
            "contract/test_lease_keeper.py::test_renewal_heeds_holder_epoch_and_release[sqlite]",
            "contract/test_lease_keeper.py::test_the_deposed_holder_is_told_and_can_write_nothing[sqlite]",
        ),
    ),
    Safeguard(
        "lease: renewal heeds the release",
        "A lease that was given up is not taken back by a late renewal.",
        cut(f"{QUERIES}:RENEW_LEASE", " AND released = 0", ""),
        ("contract/test_lease_keeper.py::test_renewal_heeds_holder_epoch_and_release[sqlite]",),
    ),
    Safeguard(
        "lease: epochs grow",
        "Every new holder has an epoch of its own.",
        cut(f"{LEASE}._win_row", "row.epoch + 1", "row.epoch"),
        (
            "contract/test_lease_keeper.py::test_a_clean_stop_hands_over_at_once[sqlite]",
            "contract/test_lease_keeper.py::test_the_row_is_never_emptied[sqlite]",
        ),
    ),
    Safeguard(
        "lease: unchanged for its TTL",
        "A live leader is not deposed.",
        cut(f"{LEASE}._win_row", "now - seen_at >= self._ttl", "True"),
        (
            "contract/test_lease_keeper.py::test_renewals_keep_it[sqlite]",
            "contract/test_lease_keeper.py::test_a_transaction_of_the_holder_is_a_sign_of_life[sqlite]",
        ),
        simulated=True,
    ),
    Safeguard(
        "lease: any change of the row is a sign of life",
        "A leader that only commits is not deposed.",
        cut(f"{LEASE}._win_row", "if row != seen:", "if seen is None:"),
        (
            "contract/test_lease_keeper.py::test_renewals_keep_it[sqlite]",
            "contract/test_lease_keeper.py::test_a_transaction_of_the_holder_is_a_sign_of_life[sqlite]",
        ),
    ),
    Safeguard(
        "trust deadline from the attempt's start (renewal)",
        "A renewal that took long does not lengthen the holder's trust beyond what a challenger waits.",
        cut(f"{LEASE}._renew", "self._started = max(self._started, started)", "self._started = self._clock()"),
        ("contract/test_lease_slow_store.py::test_a_renewal_counts_from_its_start",),
    ),
    Safeguard(
        "trust deadline from the attempt's start (acquiring)",
        "The same for the write that won the lease.",
        cut(f"{LEASE}._win", "self._started = started", "self._started = self._clock()"),
        ("contract/test_lease_slow_store.py::test_a_lease_is_trusted_from_the_start_of_the_write_that_won_it",),
    ),
    Safeguard(
        "trust deadline from the attempt's start (commits)",
        "The same for a transaction, which is a sign of life too.",
        cut(f"{DRIVER}._step", "lease.extend(handled)", "lease.extend(self._clock.now().mono)"),
        ("integration/test_driver_guards.py::test_a_commit_extends_the_lease_from_its_start",),
    ),
    Safeguard(
        "trust ends",
        "A holder that could not renew stops before a challenger may steal.",
        cut(
            f"{LEASE}.trusted",
            "return (self._clock() if now is None else now) < self._started + self._ttl - self._margin",
            "return True",
        ),
        (
            "contract/test_lease_keeper.py::test_trust_ends_while_the_store_is_away_and_returns_with_it[sqlite]",
            "contract/test_lease_keeper.py::test_trust_ends_before_the_ttl_without_renewal[sqlite]",
        ),
    ),
    Safeguard(
        "margin of trust",
        "Clocks that run a little apart do not make two leaders.",
        cut(f"{LEASE}.trusted", " - self._margin", ""),
        ("contract/test_lease_keeper.py::test_trust_ends_before_the_ttl_without_renewal[sqlite]",),
    ),
    Safeguard(
        "a fenced renewal ends the tenure",
        "A holder that finds another epoch says so and leads no more.",
        never(f"{LEASE}._renew", "not held"),
        ("contract/test_lease_keeper.py::test_the_deposed_holder_is_told_and_can_write_nothing[sqlite]",),
    ),
    Safeguard(
        "release marks only its own tenure",
        "A deposed holder that stops does not release its successor's lease.",
        never(f"{LEASE}._mark_released", "row is None or row.epoch != epoch or row.holder != self._holder"),
        (
            "contract/test_lease_slow_store.py::test_who_was_deposed_without_knowing_does_not_release_its_successors_lease",
        ),
    ),
    Safeguard(
        "file lock",
        "Two coordinators on one SQLite file do not both lead.",
        cut(f"{COORDINATOR}lease:FileLock.try_acquire", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        ("contract/test_lease_keeper.py::test_the_lock_ends_with_its_process",),
    ),
    Safeguard(
        "persist before send",
        "Nothing leaves the coordinator before it is on disk.",
        cut(
            f"{DRIVER}._step",
            "        if step.writes:\n",
            "        for send in step.sends:\n"
            "            self._answer(send) if isinstance(send, Reply) else self._deliver(send)\n"
            "        step.sends = []\n"
            "        if step.writes:\n",
        ),
        ("integration/test_coordinator_driver.py::test_a_reply_comes_after_its_commit",),
        simulated=True,
    ),
    Safeguard(
        "a failed commit is not answered",
        "What could not be written is neither said nor believed: the core is rebuilt from the ledger.",
        cut(
            f"{DRIVER}._step",
            "            await self._ledger.commit(Fence(lease.epoch, self._batch), step.writes)\n",
            "            try:\n"
            "                await self._ledger.commit(Fence(lease.epoch, self._batch), step.writes)\n"
            "            except StorageError:\n"
            "                self._batch -= 1\n",
        ),
        ("integration/test_coordinator_driver.py::test_a_failed_commit_discards_the_core_and_replays[1]",),
        simulated=True,
    ),
    Safeguard(
        "trust is looked at before a commit",
        "A leader whose lease ran out writes nothing more.",
        cut(
            f"{DRIVER}._step",
            "        if not lease.trusted():\n            raise LeaseLostError  # nothing is written",
            "        if False:\n            raise LeaseLostError  # nothing is written",
        ),
        ("integration/test_driver_guards.py::test_a_lease_that_ran_out_while_the_core_worked_commits_nothing",),
    ),
    Safeguard(
        "trust is looked at after a commit",
        "A leader that was stopped during a commit says nothing of it.",
        cut(
            f"{DRIVER}._step",
            "            if not lease.trusted():\n                raise LeaseLostError  # stopped",
            "            if False:\n                raise LeaseLostError  # stopped",
        ),
        (
            "integration/test_coordinator_driver.py::test_nothing_is_said_when_the_lease_ran_out_while_a_commit_was_under_way",
        ),
    ),
    Safeguard(
        "trust is looked at between steps",
        "A leader whose lease ran out while idle stops.",
        cut(f"{DRIVER}._serve", "if not lease.trusted():", "if False:"),
        ("integration/test_coordinator_driver.py::test_a_lease_that_is_not_trusted_commits_nothing",),
        covered_by="trust is looked at before a commit",
    ),
    Safeguard(
        "replay heeds the epoch",
        "A leader that was deposed while its store was away does not serve from what it reads.",
        never(f"{DRIVER}._replay", "row is None or row.epoch != lease.epoch"),
        ("integration/test_coordinator_driver.py::test_a_new_epoch_in_the_ledger_is_seen_at_replay",),
    ),
    Safeguard(
        "answers to a discarded core",
        "What was read for a core that is gone is not taken for what its successor asked.",
        cut(f"{DRIVER}._reset", "load.cancel()", "pass"),
        ("integration/test_driver_guards.py::test_what_was_read_for_a_discarded_core_does_not_reach_the_next",),
    ),
    Safeguard(
        "calls end with the tenure",
        "A client does not wait for a store that its coordinator lost, while another coordinator leads.",
        cut(f"{GATE}.end_waits", "wait.reschedule(asyncio.get_running_loop().time())", "pass"),
        ("integration/test_coordinator_failover.py::test_calls_that_wait_for_a_silent_database_end_with_the_tenure",),
    ),
    Safeguard(
        "clients of a discarded core are told",
        "Nobody waits for an answer that will never come.",
        cut(f"{DRIVER}._reset", "future.set_exception(error)", "pass"),
        ("integration/test_coordinator_driver.py::test_a_failed_commit_discards_the_core_and_replays[1]",),
    ),
    Safeguard(
        "reads that break are loud",
        "A run does not wait for ever for an answer of the ledger.",
        cut(f"{DRIVER}._loaded", "self._fault = error", "pass"),
        (
            "integration/test_coordinator_driver.py::test_a_load_that_breaks_ends_the_driver_instead_of_never_being_answered",
        ),
    ),
    Safeguard(
        "queries see what is durable",
        "A status never tells of what a commit under way may still lose.",
        cut(f"{DRIVER}.query", "self._queue.ask(run, future)", "run()"),
        ("integration/test_driver_guards.py::test_a_query_waits_for_the_commit_under_way",),
    ),
    Safeguard(
        "the inbox is bounded",
        "A flood of submits neither fills memory nor delays workers.",
        cut(f"{COORDINATOR}event_queue:EventQueue.put", "if lane.is_full():", "if False:"),
        ("integration/test_coordinator_driver.py::test_a_flood_waits_outside_and_workers_pass_it",),
    ),
    Safeguard(
        "many small events wait outside",
        "What hundreds of workers say does not delay the step that takes it, nor their beats.",
        cut(f"{COORDINATOR}event_queue:_Lane.is_full", " or len(self.entries) >= EVENTS_MAX", ""),
        ("integration/test_coordinator_driver.py::test_many_small_events_wait_outside_as_well",),
    ),
    Safeguard(
        "wake-ups of gRPC are taken at once",
        "gRPC's thread reads sockets however long a turn of the loop takes: beats do not lie unread.",
        cut("rollout.wire.event_loop:take_all", "if written > 1:", "if False:"),
        ("contract/test_wire_event_loop.py::test_all_wake_ups_are_taken_in_one_turn",),
    ),
    Safeguard(
        "a busy coordinator is told less often",
        "Hundreds of workers do not drown a coordinator in small messages.",
        cut("rollout_worker.linger:linger", "answer_s < SLOW_S or news >= ENOUGH", "True"),
        ("core/test_driver_linger.py::test_a_coordinator_that_answers_late_is_told_less_often",),
    ),
    Safeguard(
        "epoch at the coordinator",
        "A call without an epoch is refused.",
        never(f"{GATE}.check", 'not message.HasField("epoch")'),
        ("integration/test_coordinator_hostile.py::test_frames_that_break_the_protocol[<lambda>-no epoch0]",),
        slow=True,
    ),
    Safeguard(
        "a newer epoch at the coordinator",
        "A sender that has seen a newer leader is sent there.",
        never(f"{GATE}.check", "message.epoch > self._leadership.epoch"),
        ("integration/test_coordinator_hostile.py::test_a_liar_about_the_epoch_is_refused_and_deposes_nobody",),
        slow=True,
    ),
    Safeguard(
        "the ledger is believed, not the peer",
        "A liar about the epoch deposes nobody.",
        cut(
            f"{LIFE}._verify", "row is not None and row.epoch > p.leadership.epoch and not self._fenced.done()", "True"
        ),
        ("integration/test_coordinator_hostile.py::test_a_liar_about_the_epoch_is_refused_and_deposes_nobody",),
        slow=True,
    ),
    Safeguard(
        "a standby serves nobody",
        "Calls to a coordinator that does not lead are refused with the leader's address.",
        (Edit(f"{COORDINATOR}leadership:Leadership.refusal", "if self.part is Part.LEADER:", "if True:"),),
        ("contract/test_access_guards.py::test_who_does_not_lead_serves_nobody",),
    ),
    Safeguard(
        "one CA a database",
        "A coordinator with another CA does not join the others.",
        cut(f"{LIFE}._check_authority", 'if await storage.get("security", "ca") != authority.ca_hash:', "if False:"),
        tests=("contract/test_child_faults.py::test_a_coordinator_with_another_ca_is_refused",),
    ),
    Safeguard(
        "sessions are unique",
        "A second stream under the name of an open one is refused.",
        never(f"{COORDINATOR}sessions:Router.register", "session.id in self._sessions"),
        ("integration/test_driver_guards.py::test_two_streams_under_one_name_are_refused",),
    ),
    Safeguard(
        "outboxes are bounded",
        "A worker that does not read its stream costs a bounded amount of memory.",
        never(f"{COORDINATOR}sessions:Outbox.put", "len(self._sends) > OUTBOX_MAX"),
        ("integration/test_driver_guards.py::test_a_stream_that_nobody_reads_is_closed",),
    ),
)
