"""What keeps the core right, by name: switches that only tests turn off, to see that somebody notices.

`tests/core/test_safeguards_core.py` has the scenario that fails without each. No configuration reaches them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Safeguards:
    cursor_contiguous: bool = True
    """The cursor never passes an item without a result."""
    cursor_stops_with_run: bool = True
    """Nothing is committed behind the result that ended the run."""
    sealed_before_complete: bool = True
    """A run does not end while its client is still submitting."""
    committed_before_complete: bool = True
    """A run ends when its last item has a final result."""
    outcomes_reread: bool = True
    """After a restart policies miss no result that was accepted before."""
    submitted_once: bool = True
    """Items that are sent again are found, not appended again."""
    ids_compared: bool = True
    """Another item at a place that is taken is an error."""
    submits_in_order: bool = True
    """A batch does not overtake one that is still compared with the ledger."""
    sealed_takes_nothing: bool = True
    """Nothing is added behind the count that was sealed."""
    ended_runs_on_disk: bool = True
    """A run of an earlier leader is not opened anew under its id."""
    end_takes_attempts_back: bool = True
    """Killed work stops, and its late results are stale."""
    exclusive_outlives_run: bool = True
    """A killed run goes on with an exclusive item only once its worker has stopped it."""
    deleted_rows_unwritten: bool = True
    """A deletion leaves no orphan behind."""
    present_attempt_only: bool = True
    """A result of an attempt that was taken away is not accepted in place of the present one."""
    holder_only: bool = True
    """Only the worker that holds an attempt may end it."""
    once_a_message: bool = True
    """The same item twice in one message is accepted once."""
    newest_stream_only: bool = True
    """Frames of a worker's older stream are ignored after its new Hello."""
    never_given_is_a_fault: bool = True
    """A result for an attempt that nobody was given quarantines its worker."""
    attempts_limited: bool = True
    """An item that keeps failing fails for good."""
    losses_limited: bool = True
    """An item that keeps killing workers ends."""
    preemption_costs_none: bool = True
    """What is lost to a machine that gave notice uses up no try of its item."""
    leaving_hand_over_only: bool = True
    """An item that a worker which stays gives back in the middle, again and again, fails in the end."""
    lost_is_final: bool = True
    """An item that must not run twice does not after its worker was lost."""
    lost_work_runs_again: bool = True
    """The work of a dead worker runs elsewhere."""
    retried_elsewhere: bool = True
    """An item that failed on one worker is tried on another before it comes back to that."""
    hello_returns_missing: bool = True
    """An assignment that never arrived runs all the same."""
    stall_moves_deadlines: bool = True
    """A coordinator that was stopped does not fail its workers for its own silence."""
    deadlines_only_grow: bool = True
    """A beat that was read earlier and handled later does not shorten a deadline."""
    quarantine_for_good: bool = True
    """A worker that broke the protocol gets no more work."""
    exclusive_waits_for_fence: bool = True
    """Nobody else gets the exclusive items of a quarantined worker before its process has fenced itself."""
    one_host_a_worker: bool = True
    """A host cannot speak in the name of another's worker."""
    overdue_ended: bool = True
    """An attempt whose worker does not enforce its timeout ends."""
    running_runs_only: bool = True
    """A paused, interrupted or ended run hands out nothing."""
    failed_starts_wait: bool = True
    """A worker that could not start what an item needs is given no other such item before it tries again."""
    hopeless_runs_end: bool = True
    """A run of which nothing can be started anywhere ends with the cause, and its user does not wait for ever."""
    ready_workers_only: bool = True
    """A worker that drains gets nothing new."""
    run_cap: bool = True
    """A run never has more in flight than it says."""
    lane_cap: bool = True
    """A lane never has more in flight than it says."""
    one_worker: bool = True
    """Items of a run that asks for it are never on two workers."""
    strict_resources: bool = True
    """A worker's gpus, cpus and memory are not overcommitted."""
    exclusive_not_pipelined: bool = True
    """An exclusive item does not begin while one that it stands on may have to be taken back."""
    pipelined_needs_final: bool = True
    """k+1 does not commit before k, nor on a k that changed."""
    begun_not_stolen: bool = True
    """Work that has begun is not asked back."""
    adopted_not_stolen: bool = True
    """What a new leader knows from the ledger only may have begun."""
    rest_taken_back: bool = True
    """What a worker has not begun when the rest of its run is skipped is not begun any more."""
    one_steal_a_victim: bool = True
    """A second revoke is not sent while the first is unanswered."""
    present_parent_spawns: bool = True
    """A parent that was tried elsewhere makes no more children."""
    children_end_with_parent: bool = True
    """Children of a parent that has a result do not run on."""
    group_ends_others: bool = True
    """The first success of a group cancels the others."""
    pruned_are_skipped: bool = True
    """Results that arrive behind a prune point are evidence only."""
    adopted_in_flight: bool = True
    """A new leader adopts what is in flight and does not run it twice."""
    adopted_may_have_begun: bool = True
    """An item that must not run twice may have begun under the last leader."""


ALL = Safeguards()
