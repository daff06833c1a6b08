"""The worker: epochs, sessions, the fence, results until they are acknowledged, processes."""

from __future__ import annotations

from removal import Edit
from safeguard import WORKER, Safeguard, cut, never

SESSION, HOLDING, CHILDREN, PLACE = (
    f"{WORKER}session:Session",
    f"{WORKER}holding:Holding",
    f"{WORKER}child_events:ChildEvents",
    f"{WORKER}placement",
)

SAFEGUARDS = (
    Safeguard(
        "epoch at the worker (EpochGuard)",
        "What a deposed leader says is ignored.",
        cut("rollout.wire.epoch:EpochGuard.check_peer", "elif epoch < self._current:", "elif False:"),
        ("contract/test_wire_calls.py::test_a_worker_adopts_newer_epochs_and_ignores_older_ones",),
        simulated=True,
    ),
    Safeguard(
        "epoch in every message",
        "A message without an epoch is refused by workers and clients.",
        never("rollout.wire.epoch:EpochGuard.check_peer", 'not message.HasField("epoch")'),
        ("contract/test_wire_calls.py::test_a_worker_adopts_newer_epochs_and_ignores_older_ones",),
    ),
    Safeguard(
        "frames of an older stream",
        "What was said on a stream that has ended does not count on the next one.",
        never(f"{SESSION}._frame", "frame.session != self._session or not self._session"),
        ("core/test_session_scenarios.py::test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults",),
    ),
    Safeguard(
        "Welcome comes first",
        "Nothing is believed before both sides know what the worker holds.",
        never(f"{SESSION}._frame", "not self._welcomed"),
        ("core/test_session_scenarios.py::test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults",),
    ),
    Safeguard(
        "one Welcome a stream",
        "A second reconciliation cannot drop what came since.",
        never(f"{SESSION}._welcome", "self._welcomed"),
        ("core/test_session_scenarios.py::test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults",),
    ),
    Safeguard(
        "results are kept until they are acknowledged",
        "A result that was lost on its way is sent again.",
        cut(
            f"{HOLDING}._flush",
            "                result.sent = now\n",
            "                result.sent = now\n"
            "                self.unacknowledged.pop(AttemptKey(result.log, result.seq, result.attempt))\n",
        ),
        (
            "core/test_session_scenarios.py::test_an_item_from_assignment_to_acceptance",
            "core/test_session_scenarios.py::test_hello_lists_what_is_held_and_results_wait_for_welcome",
        ),
    ),
    Safeguard(
        "a new stream sends only what Welcome asks for",
        "Results that the ledger has, or that are stale, are not sent again.",
        cut(f"{SESSION}._stream_up", "self._outbox.clear()", "pass"),
        ("core/test_session_guards.py::test_a_new_stream_sends_only_what_it_is_asked_for",),
    ),
    Safeguard(
        "Welcome drops what was given to others",
        "Work that runs elsewhere by now stops here.",
        cut(f"{SESSION}._welcome", 'self._give_up(key, "drop", now)', "pass"),
        ("core/test_session_scenarios.py::test_welcome_drops_what_was_given_to_others",),
    ),
    Safeguard(
        "dropped attempts report nothing",
        "A result that comes after its attempt was dropped is not told.",
        never(f"{CHILDREN}._complete", 'held.stop_reason == "drop"'),
        ("core/test_session_scenarios.py::test_welcome_drops_what_was_given_to_others",),
    ),
    Safeguard(
        "an assignment told twice",
        "An attempt that is held or finished here is not started again.",
        never(f"{SESSION}._assign", "key in self.held or key in self.unacknowledged"),
        ("core/test_session_guards.py::test_an_assignment_told_twice_runs_once",),
    ),
    Safeguard(
        "Hello lists what is held",
        "Work in flight outlives a stream and a leader.",
        cut(f"{SESSION}._stream_up", "held=keys_to_wire(h.key for h in held),", "held=[],"),
        (
            "core/test_session_scenarios.py::test_hello_lists_what_is_held_and_results_wait_for_welcome",
            "core/test_session_leaving.py::test_the_fence_stops_starts_and_results_and_kills_the_exclusive",
        ),
    ),
    Safeguard(
        "Hello: what has begun",
        "What waits in a process behind others is stolen under a new leader too.",
        cut(f"{SESSION}._stream_up", "if h.begun", "if h.state not in UNSTARTED"),
        ("core/test_session_ahead.py::test_a_new_stream_hears_only_of_this_one_as_begun",),
    ),
    Safeguard(
        "Hello lists what is not acknowledged",
        "A finished result outlives a stream and a leader.",
        cut(f"{SESSION}._stream_up", "unacknowledged=keys_to_wire(self.unacknowledged),", "unacknowledged=[],"),
        (
            "core/test_session_scenarios.py::test_hello_lists_what_is_held_and_results_wait_for_welcome",
            "core/test_session_leaving.py::test_the_fence_stops_starts_and_results_and_kills_the_exclusive",
        ),
    ),
    Safeguard(
        "starts are told before a confirmation",
        "The coordinator knows what has begun when it hears what was given up.",
        cut(f"{HOLDING}._send", "            self._flush(now)\n", ""),
        ("core/test_session_scenarios.py::test_only_unstarted_attempts_are_given_up_to_a_thief",),
    ),
    Safeguard(
        "only unstarted attempts are given up",
        "What has begun here does not begin elsewhere.",
        (
            Edit(
                f"{SESSION}._revoke",
                "if held is not None and held.state in UNSTARTED:",
                "if held is not None and not behind:",
            ),
            Edit(
                f"{SESSION}._revoke",
                'held.move("give_up")',
                "self.place.children[1].take_out(held) if held.child else None",
            ),
        ),
        ("core/test_session_scenarios.py::test_only_unstarted_attempts_are_given_up_to_a_thief",),
    ),
    Safeguard(
        "finished results are not given up",
        "An attempt with a result that is not acknowledged is kept at a revoke.",
        cut(f"{SESSION}._revoke", " or key in self.unacknowledged", ""),
        ("core/test_session_scenarios.py::test_a_revoked_result_that_is_not_acknowledged_is_kept",),
    ),
    Safeguard(
        "a process is asked before its backlog is given up",
        "What waits in a process may have begun there meanwhile.",
        cut(
            f"{SESSION}._revoke",
            "asked.setdefault(behind[key], set()).add(key)",
            "given_up.append(key)",
        ),
        ("core/test_session_guards.py::test_what_waits_in_a_process_is_given_up_only_when_that_lets_it_go",),
    ),
    Safeguard(
        "self-fence",
        "A worker that nobody acknowledges stops before the coordinator gives its work to others.",
        cut(f"{SESSION}._tick", "elif self._acked_at is not None and", "elif False and"),
        (
            "core/test_session_leaving.py::test_the_fence_counts_from_the_send_of_what_was_acknowledged",
            "core/test_session_leaving.py::test_an_orphan_drops_everything_after_its_grace",
        ),
        simulated=True,
    ),
    Safeguard(
        "a fenced worker starts nothing",
        "What it would start may run elsewhere.",
        cut(f"{SESSION}.handle", "self._dispatch_due and self._fenced_at is None and", "self._dispatch_due and"),
        ("core/test_session_leaving.py::test_the_fence_stops_starts_and_results_and_kills_the_exclusive",),
    ),
    Safeguard(
        "a fenced worker submits nothing",
        "It says Hello before it says anything else.",
        cut(f"{HOLDING}.wants_flush", " or self._fenced_at is not None", ""),
        ("core/test_session_leaving.py::test_the_fence_stops_starts_and_results_and_kills_the_exclusive",),
    ),
    Safeguard(
        "exclusive attempts are told of when their run has ended",
        "The coordinator learns that it may give the item out again.",
        cut(f"{SESSION}._ended", '"cancel" if held.spec.exclusive else "drop"', '"drop"'),
        ("core/test_session_guards.py::test_the_end_of_an_exclusive_attempt_is_told_though_its_run_has_ended",),
    ),
    Safeguard(
        "so are results that are dropped then",
        "An attempt whose result nobody wants any more is known to be over.",
        cut(f"{SESSION}._ended", 'self._release(key, "cancel")', "pass"),
        ("core/test_session_guards.py::test_the_end_of_an_exclusive_attempt_is_told_though_its_run_has_ended",),
    ),
    Safeguard(
        "exclusive never overlaps",
        "A fenced worker kills its exclusive attempts.",
        cut(f"{SESSION}._fence", "self._stop_exclusive(self.held.values())", "()"),
        ("core/test_session_leaving.py::test_the_fence_stops_starts_and_results_and_kills_the_exclusive",),
        simulated=True,
    ),
    Safeguard(
        "the fence counts from the send",
        "An answer that took its time does not lengthen a worker's trust.",
        cut(f"{SESSION}._acknowledged", "self._acked(event.sent_at)", "self._acked(now)"),
        ("core/test_session_leaving.py::test_the_fence_counts_from_the_send_of_what_was_acknowledged",),
    ),
    Safeguard(
        "acknowledgements count from the send of the result",
        "A late acceptance of an old result does not lengthen a worker's trust.",
        cut(f"{SESSION}._accepted", "self._acked(sent)", "self._acked(now)"),
        ("core/test_session_guards.py::test_a_late_acceptance_counts_from_the_send_of_its_result",),
    ),
    Safeguard(
        "the fence never moves back",
        "A late answer to an early beat does not fence a worker that is well.",
        cut(f"{SESSION}._acked", "max(self._acked_at, sent_at)", "sent_at"),
        ("core/test_session_guards.py::test_a_late_answer_does_not_move_the_fence_back",),
    ),
    Safeguard(
        "a clock that counts sleep",
        "A laptop that wakes up knows that it is fenced.",
        cut(
            f"{WORKER}guard:clock",
            "time.monotonic() if boottime is None else time.clock_gettime(boottime)",
            "time.monotonic()",
        ),
        ("core/test_session_guards.py::test_the_fence_counts_the_time_that_a_machine_sleeps",),
    ),
    Safeguard(
        "orphans give up",
        "A worker that nobody wants for its grace time begins anew.",
        never(f"{SESSION}._tick", "now - self._fenced_at >= self._settings.orphan_grace_s"),
        ("core/test_session_leaving.py::test_an_orphan_drops_everything_after_its_grace",),
    ),
    Safeguard(
        "a draining worker asks for nothing",
        "What leaves takes no new work.",
        cut(f"{HOLDING}._credit_now", "if self._drain_until is not None:", "if False:"),
        ("core/test_session_leaving.py::test_a_drain_releases_the_unstarted_finishes_the_rest_and_says_goodbye",),
    ),
    Safeguard(
        "a draining worker gives back what comes late",
        "An assignment that crossed the drain is released.",
        cut(f"{SESSION}._assign", "if self._drain_until is not None:", "if False:"),
        ("core/test_session_guards.py::test_an_assignment_that_crosses_a_drain_goes_back",),
    ),
    Safeguard(
        "a drain waits for acknowledgements",
        "The last results are durable when the worker leaves.",
        cut(f"{SESSION}._drain_step", "done = not self.held and not self.unacknowledged", "done = not self.held"),
        ("core/test_session_leaving.py::test_a_drain_releases_the_unstarted_finishes_the_rest_and_says_goodbye",),
    ),
    Safeguard(
        "attempt check on a process's results",
        "A result of an attempt that a process was once given is not taken for a later one.",
        cut(f"{CHILDREN}._child_results", "if held is None or held.attempt != attempts[i]:", "if held is None:"),
        ("core/test_session_guards.py::test_what_a_process_says_of_another_attempt_is_ignored",),
    ),
    Safeguard(
        "attempt check on what a process gives back",
        "A late answer does not put a later attempt back into the queue.",
        cut(f"{CHILDREN}._child_returned", " or held.attempt != key.attempt", ""),
        ("core/test_session_guards.py::test_what_a_process_says_of_another_attempt_is_ignored",),
    ),
    Safeguard(
        "a crash costs what ran",
        "Attempts that waited behind in a process that died are no losses.",
        cut(
            f"{CHILDREN}._child_ended",
            "id(held) in hit or held.started is not None or held.state is State.WAITING",
            "True",
        ),
        ("core/test_session_processes.py::test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it",),
    ),
    Safeguard(
        "what began behind a parent is not begun again",
        "An attempt that began while a parent in its process waited is lost with that process, as the parent is.",
        cut(f"{CHILDREN}._child_ended", "held.started is not None", "False"),
        (
            "core/test_session_processes.py::"
            "test_what_began_while_a_parent_waited_is_lost_with_their_process_and_not_begun_again",
        ),
    ),
    Safeguard(
        "a parent waits from where it stopped",
        "Results that were sent, and whose Resume was lost with the stream, are sent and resumed again.",
        cut(
            f"{SESSION}._children", "self._actions.append(", "self._awaited.pop(held.key, None); self._actions.append("
        ),
        ("core/test_session_processes.py::test_a_parent_whose_resume_was_lost_is_resumed_on_the_next_stream",),
    ),
    Safeguard(
        "a crash is told as a loss",
        "A row that kills engines becomes a dead letter.",
        cut(f"{CHILDREN}._child_ended", "worker_lost=True", "worker_lost=False"),
        ("core/test_session_processes.py::test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it",),
    ),
    Safeguard(
        "suspects run alone",
        "Nothing is given to an engine beside an isolated attempt.",
        (
            Edit(f"{PLACE}:Placement._fill", "if held.isolate and (batch or child.active):", "if False:"),
            Edit(f"{PLACE}:Placement._fill", "child.alone = True", "pass"),
        ),
        ("core/test_session_processes.py::test_an_isolated_attempt_runs_alone_in_its_engine",),
    ),
    Safeguard(
        "slots",
        "No more processes work at once than there are slots.",
        cut(f"{PLACE}:Placement._slot_room", "self.slots + min(waiting, self.slots) - len(pool)", "1 << 20"),
        ("core/test_session_processes.py::test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it",),
    ),
    Safeguard(
        "engines",
        "No more engines are up at once than the machine holds.",
        cut(f"{PLACE}:Placement._grow", 'self.max_engines - len(self.of_kind("engine"))', "1"),
        ("core/test_session_processes.py::test_an_engine_in_use_is_not_evicted_and_an_idle_one_is",),
    ),
    Safeguard(
        "engines in use are not ended",
        "None is taken from its work for another.",
        cut(f"{PLACE}:Placement._make_room", " and not c.in_hand]", "]"),
        ("core/test_session_processes.py::test_an_engine_in_use_is_not_evicted_and_an_idle_one_is",),
    ),
    Safeguard(
        "restarts back off",
        "An engine that cannot start does not eat the machine.",
        cut(f"{PLACE}:Placement._grow", " or now < self.backoff(key).until", ""),
        (
            "core/test_session_processes.py::test_an_executor_that_cannot_start_costs_one_attempt_per_try",
            "core/test_session_processes.py::test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it",
        ),
    ),
    Safeguard(
        "an engine that cannot start costs one attempt a try",
        "A million rows do not fail for one missing model.",
        cut(
            f"{CHILDREN}._not_startable",
            'self._give_up(head.key, "engine_start", now)',
            "head.move('finish'); self._forget(head); self._finish(failed(head, failure))",
        ),
        ("core/test_session_processes.py::test_an_executor_that_cannot_start_costs_one_attempt_per_try",),
    ),
    Safeguard(
        "timeouts",
        "An attempt that runs longer than it may is stopped.",
        never(
            f"{HOLDING}._check_timeouts",
            "limit and held.started is not None and now - held.started >= limit and not held.stop_reason",
        ),
        (
            "core/test_session_scenarios.py::test_a_timeout_counts_from_the_start_and_is_reported_once_the_attempt_is_over",
        ),
    ),
    Safeguard(
        "cancellations are enforced",
        "A process that does not let go of an attempt is killed.",
        cut(f"{SESSION}._tick", "[k for k, at in self._kills.items() if now >= at]", "[]"),
        ("core/test_session_scenarios.py::test_cancel_reaches_the_process_which_is_killed_if_it_does_not_let_go",),
    ),
    Safeguard(
        "large results are durable before they are told",
        "A result names its object only once that is stored.",
        cut(
            f"{CHILDREN}._complete",
            "            self._actions.append(ev.Store(held.key, data))\n",
            "            self._actions.append(ev.Store(held.key, data))\n            self._finish(result)\n",
        ),
        ("core/test_session_guards.py::test_a_large_result_is_told_only_when_it_is_stored",),
    ),
    Safeguard(
        "inputs are fetched before an attempt starts",
        "An attempt never runs without its payload.",
        cut(f"{SESSION}._assign", "elif held.remote:", "elif False:"),
        ("core/test_session_scenarios.py::test_large_inputs_and_results_travel_as_objects",),
    ),
    Safeguard(
        "what runs behind a parent that waits has begun",
        "Its timeout counts, and the coordinator hears that it runs.",
        cut(f"{CHILDREN}._child_waits", "self._started += child.mark_started(now)", "pass"),
        ("core/test_session_processes.py::test_what_runs_on_behind_a_parent_that_waits_has_begun",),
    ),
    Safeguard(
        "spawns are told again on a new stream",
        "Children whose spawn was lost with the stream are made.",
        cut(f"{SESSION}._welcome", "self._tell_parents(now)", "pass"),
        ("core/test_session_processes.py::test_a_waiting_parent_frees_its_slot_and_says_so_again_on_a_new_stream",),
    ),
    Safeguard(
        "stopped parents spawn nothing",
        "An attempt that is being stopped makes no more children.",
        cut(f"{CHILDREN}._running_in", " and not held.stop_reason", ""),
        ("core/test_session_guards.py::test_an_attempt_that_is_being_stopped_makes_no_children",),
    ),
    Safeguard(
        "the attempt's table",
        "An attempt changes state only as its table says.",
        cut(f"{WORKER}attempts:Held.move", "TABLE[self.state, cause]", "TABLE.get((self.state, cause))"),
        ("core/test_session_guards.py::test_an_attempt_changes_state_as_its_table_says",),
    ),
    Safeguard(
        "columns of a process's results",
        "User code that writes to its socket cannot make its worker break the protocol.",
        cut(f"{WORKER}children:ChildProcess._frame", "            self.kill()", "            pass"),
        ("contract/test_child_faults.py::test_a_process_that_breaks_the_protocol_is_killed_and_tells_nothing",),
    ),
)
