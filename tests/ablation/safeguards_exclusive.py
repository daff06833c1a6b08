"""Exclusive items: what must be over before they are given out again."""

from __future__ import annotations

from removal import Edit
from safeguard import CORE, WORKER, Safeguard, cut, never

RESULTS, WORKERS, QUARANTINE = f"{CORE}results", f"{CORE}workers", f"{CORE}quarantine"
SESSION, HOLDING = f"{WORKER}session:Session", f"{WORKER}holding:Holding"
CHILDREN = f"{WORKER}child_events:ChildEvents"

SAFEGUARDS = (
    Safeguard(
        "exclusive items of a quarantined worker wait",
        "Nobody else gets them before its process has fenced itself.",
        cut(f"{QUARANTINE}:quarantine", "spare=exclusive", "spare=None"),
        (
            "core/test_core_quarantine.py::test_exclusive_items_of_a_quarantined_worker_wait_for_its_fence",
            "core/test_core_quarantine.py::test_caps_are_kept_while_they_wait",
            "sim/test_exclusive.py::test_a_quarantined_worker_fences_itself_before_its_exclusive_items_run_elsewhere",
        ),
    ),
    Safeguard(
        "what a quarantined worker kept is taken back",
        "Its exclusive items run elsewhere once it has fenced itself.",
        cut(f"{WORKERS}:scan", "elif worker.grants and worker.state in LEFT:", "elif False:"),
        (
            "core/test_core_quarantine.py::test_exclusive_items_of_a_quarantined_worker_wait_for_its_fence",
            "core/test_core_quarantine.py::test_what_a_leaving_worker_could_not_stop_is_not_given_out_at_once",
        ),
    ),
    Safeguard(
        "the wait counts from the quarantine",
        "An answer that went out just before it cannot move the fence beyond the end of the wait.",
        cut(f"{QUARANTINE}:quarantine", "workers.heard(c, worker, c.now.mono)", "pass"),
        ("core/test_core_quarantine.py::test_the_wait_for_the_fence_counts_from_the_quarantine",),
    ),
    Safeguard(
        "no answer to beats in quarantine",
        "Nothing moves the fence of a quarantined worker any more.",
        cut("rollout_coordinator.heartbeat_service:HeartbeatService._check_standing", "error is not None", "False"),
        ("integration/test_coordinator_hostile.py::test_no_beat_of_a_quarantined_worker_is_answered",),
        slow=True,
    ),
    Safeguard(
        "quarantine of whoever does not stop an exclusive item",
        "The item is not given out while its worker may still run it.",
        cut(f"{QUARANTINE}:overdue", "if spec.exclusive and", "if False and"),
        (
            "core/test_core_quarantine.py::test_an_exclusive_item_that_is_not_stopped_in_time_waits_for_its_workers_fence",
        ),
    ),
    Safeguard(
        "time since a replay is not an item's own",
        "A worker is not blamed for an item that waited behind others while the leader changed.",
        cut(f"{WORKERS}:resume", "grant.started_at.pop(seq, None)", "pass"),
        ("core/test_core_quarantine.py::test_the_time_that_an_adopted_item_waits_at_its_worker_is_not_its_own",),
    ),
    Safeguard(
        "what a leaving worker could not stop",
        "An exclusive item that still runs at Goodbye is not given out at once.",
        cut(f"{WORKERS}:goodbye", ", spare=quarantine.may_run", ""),
        ("core/test_core_quarantine.py::test_what_a_leaving_worker_could_not_stop_is_not_given_out_at_once",),
    ),
    Safeguard(
        "killed attempts are held until their process has ended",
        "An exclusive attempt runs again elsewhere only when it is over, however long its kill takes.",
        cut(f"{SESSION}._stream_up", 'h.stop_reason != "drop"', 'h.stop_reason not in ("drop", "self_fence")'),
        (
            "core/test_session_guards.py::"
            "test_an_exclusive_attempt_that_the_fence_killed_is_held_until_its_process_has_ended",
            "sim/test_exclusive.py::test_what_a_fenced_worker_killed_has_ended_before_it_runs_elsewhere",
        ),
    ),
    Safeguard(
        "the guard kills where the daemon cannot",
        "An exclusive attempt ends at the fence also when its daemon is stopped or hangs.",
        cut(f"{WORKER}placement:Placement.kill_times", "at if child.exclusive else 0.0", "0.0"),
        (
            "core/test_session_guards.py::"
            "test_a_process_is_killed_though_its_daemon_stands_still_while_it_runs_an_exclusive_attempt",
            "integration/test_engine_faults.py::test_exclusive_work_never_overlaps_when_its_worker_is_cut_off",
        ),
        slow=True,
    ),
    Safeguard(
        "the guard knows before the process begins",
        "A daemon that is stopped as soon as it has handed out an exclusive attempt has told the guard before.",
        cut(f"{SESSION}.handle", "self._kill_times() if actions else ()", "()"),
        (
            "core/test_session_guards.py::"
            "test_a_process_is_killed_though_its_daemon_stands_still_while_it_runs_an_exclusive_attempt",
        ),
    ),
    Safeguard(
        "the guard looks at the clock",
        "On a machine that slept through the time it kills as soon as that wakes up: its wait does not count the sleep.",
        cut(f"{WORKER}guard:main", "min(LOOK_S, *times)", "min(times)"),
        ("integration/test_worker_guard.py::test_a_machine_that_slept_through_the_time_wakes_to_it",),
        slow=True,
    ),
    Safeguard(
        "a fence keeps the first reason",
        "An exclusive attempt that had timed out when the fence came has timed out, and is not tried once more for it.",
        cut(f"{HOLDING}._stop_exclusive", 'held.stop_reason or "self_fence"', '"self_fence"'),
        ("core/test_session_guards.py::test_one_that_timed_out_before_the_fence_has_timed_out",),
    ),
    Safeguard(
        "the guard's time moves with the fence",
        "A worker that is well keeps its exclusive attempts for as long as they take.",
        cut(f"{SESSION}._tick", "self._actions += self._kill_times()", "pass"),
        (
            "core/test_session_guards.py::"
            "test_a_process_is_killed_though_its_daemon_stands_still_while_it_runs_an_exclusive_attempt",
        ),
    ),
    Safeguard(
        "what the guard killed did not crash",
        "It is given back as what the fence kills is, and costs its item no failure.",
        never(f"{CHILDREN}._child_ended", "child.kill_at and now >= child.kill_at"),
        ("core/test_session_guards.py::test_what_was_killed_while_the_daemon_stood_still_is_given_back",),
    ),
    Safeguard(
        "dropped attempts are not listed",
        "What the coordinator has taken away is not claimed again while its process ends.",
        cut(f"{SESSION}._stream_up", 'if h.stop_reason != "drop"', ""),
        ("core/test_session_guards.py::test_one_that_the_coordinator_drops_meanwhile_is_not_given_back",),
    ),
    Safeguard(
        "what ends before Welcome is given back behind it",
        "The coordinator does not keep an attempt that ended after its worker said Hello with it.",
        cut(f"{HOLDING}._release", "and self._session:", "and self._welcomed:"),
        (
            "core/test_session_guards.py::"
            "test_an_exclusive_attempt_that_the_fence_killed_is_held_until_its_process_has_ended[before]",
        ),
    ),
    Safeguard(
        "killed parents are not told of again",
        "A parent whose process is being killed makes no children on the next stream.",
        (
            Edit(f"{CHILDREN}._tell_parents", "if not self.held[key].stop_reason else ()", ""),
            Edit(f"{CHILDREN}._tell_parents", "if self.held[key].stop_reason:", "if False:"),
        ),
        ("core/test_session_guards.py::test_a_parent_that_the_fence_killed_makes_no_children_on_the_next_stream",),
    ),
    Safeguard(
        "a started item that its fenced worker killed",
        "on_worker_lost = fail holds also where the worker gives it back.",
        cut(f"{RESULTS}:released", 'if event.reason == "self_fence":', "if False:"),
        (
            "core/test_core_quarantine.py::test_what_a_fenced_worker_killed_is_given_out_when_its_process_has_ended[True]",
        ),
    ),
)
