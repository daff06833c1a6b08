"""What keeps a worker's session right, by name: switches that only tests turn off, to see that somebody notices.

`tests/core/test_safeguards_session.py` has the scenario that fails without each. No configuration reaches them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Safeguards:
    older_streams_ignored: bool = True
    """What was said on a stream that has ended does not count on the next one."""
    welcome_first: bool = True
    """Nothing is believed before both sides know what the worker holds."""
    hello_lists_held: bool = True
    """Work in flight outlives a stream and a leader."""
    results_kept: bool = True
    """A result that was lost on its way is sent again: it is kept until it is acknowledged."""
    dropped_stops: bool = True
    """Work that runs elsewhere by now stops here, and reports nothing."""
    told_twice_runs_once: bool = True
    """An attempt that is held or finished here is not started again."""
    begun_not_given_up: bool = True
    """What has begun here, or has ended, does not begin elsewhere: a revoke gives up the unstarted only."""
    process_asked_first: bool = True
    """What waits in a process may have begun there meanwhile, so it is given up only when that lets it go."""
    starts_told_first: bool = True
    """The coordinator knows what has begun when it hears what was given up."""
    self_fence: bool = True
    """A worker that nobody acknowledges stops before the coordinator gives its work to others."""
    fence_from_send: bool = True
    """An answer that took its time does not lengthen a worker's trust."""
    fenced_starts_nothing: bool = True
    """What it would start may run elsewhere."""
    fenced_tells_nothing: bool = True
    """It says Hello before it says anything else."""
    fence_holds_engines: bool = True
    """What waits in an engine's own queue begins nothing outside once its worker is cut off."""
    fence_kills_exclusive: bool = True
    """Exclusive attempts never overlap."""
    guard_told: bool = True
    """An exclusive attempt ends at the fence also when its daemon is stopped or hangs."""
    killed_held_until_ended: bool = True
    """An exclusive attempt runs again elsewhere only when it is over, however long its kill takes."""
    notice_told_first: bool = True
    """The coordinator knows that the machine is taken away before anything of it is lost."""
    drain_waits: bool = True
    """The last results are durable when the worker leaves."""
    attempt_checked: bool = True
    """A result of an attempt that a process was once given is not taken for that of a later one."""
    crash_costs_what_ran: bool = True
    """Attempts that waited in a process that died are no losses."""
    suspects_run_alone: bool = True
    """Nothing is given to a process beside an isolated attempt."""
    failed_start_costs_none: bool = True
    """A million rows do not fail for one missing model, and none pays for it with an attempt."""
    causes_told_first: bool = True
    """The coordinator knows why attempts come back before it gives them out again."""
    timeouts: bool = True
    """An attempt that runs longer than it may is stopped."""
    cancel_enforced: bool = True
    """A process that does not let go of an attempt is killed."""
    stored_before_told: bool = True
    """A result names its object only once that is stored."""
    parents_go_first: bool = True
    """A parent keeps its devices while it waits: what needs them keeps no places that its children need."""
    devices_leased: bool = True
    """A device is one process's until that has ended."""


ALL = Safeguards()
