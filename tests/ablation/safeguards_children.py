"""Items that spawn others: what parents hear, what they hold while they wait, and how many may."""

from __future__ import annotations

from removal import Edit
from safeguard import CORE, Safeguard, cut, never

COMMIT, DISPATCH, REPLAY, ROOM = f"{CORE}commit", f"{CORE}dispatch", f"{CORE}replay", f"{CORE}room"
SPAWN, STEAL = f"{CORE}spawn", f"{CORE}steal"

SAFEGUARDS = (
    Safeguard(
        "spawn: only the present attempt",
        "A parent that was tried elsewhere makes no more children.",
        (Edit(f"{SPAWN}:holder", " or grant.worker is not worker or grant.attempt != attempt", ""),),
        ("core/test_core_guards_commit.py::test_an_attempt_that_was_taken_away_makes_no_children",),
    ),
    Safeguard(
        "spawn: a child's place",
        "A parent that is tried again finds its children instead of making new ones.",
        cut(f"{SPAWN}:spawn", "child = grant.log.children.get(parent.seq)", "child = None"),
        (
            "core/test_core_scenarios_children.py::test_children_spawned_again_while_the_first_are_compared_are_made_once",
            "core/test_core_scenarios_children.py::test_children_are_read_in_order_and_the_parent_gives_up_its_slot",
        ),
    ),
    Safeguard(
        "parents that wait hold no place",
        "Caps, resources and credit are the children's while their parents wait: else both wait for ever.",
        cut(f"{SPAWN}:waiting", "hold_caps(run, grant, -1)", "pass"),
        (
            "core/test_core_guards.py::test_a_lane_keeps_its_cap_when_a_parent_goes_on",
            "core/test_core_scenarios_children.py::test_parents_that_wait_leave_their_workers_credit_to_the_children",
        ),
        simulated=True,
    ),
    Safeguard(
        "spawn: sealed children",
        "A parent that spawns others the second time fails.",
        cut(f"{SPAWN}:spawn", "return ConflictError(sealed) if log.sealed else None", "return None"),
        ("core/test_core_guards_commit.py::test_a_parent_that_spawns_more_the_second_time_fails",),
    ),
    Safeguard(
        "spawn: one comparison at a time",
        "Children spawned again while the first are compared are made once.",
        cut(f"{SPAWN}:spawn", "if child.checking:", "if False:"),
        (
            "core/test_core_scenarios_children.py::test_children_spawned_again_while_the_first_are_compared_are_made_once",
        ),
    ),
    Safeguard(
        "children in commit order",
        "A parent reads its children only up to their cursor.",
        (
            Edit(f"{SPAWN}:serve_readers", "if child.cursor > reader.next and", "if child.submitted > reader.next and"),
            Edit(f"{SPAWN}:read", "min(PAGE, child.cursor - reader.next)", "min(PAGE, child.submitted - reader.next)"),
        ),
        ("core/test_core_scenarios_children.py::test_children_are_read_in_order_and_the_parent_gives_up_its_slot",),
    ),
    Safeguard(
        "a parent resumes within its caps",
        "A lane's cap holds while parents go on.",
        cut(f"{SPAWN}:serve_readers", "if not free(grant):", "if False:"),
        ("core/test_core_guards.py::test_a_lane_keeps_its_cap_when_a_parent_goes_on",),
    ),
    Safeguard(
        "a parent hears of new results",
        "Who waits is looked at when a child's result is committed, and again when a page of them was read.",
        cut(f"{COMMIT}:advance", "if moved and log.reader is not None:", "if False:"),
        (
            "core/test_core_scenarios_children.py::test_a_parent_is_looked_at_when_there_is_something_for_it",
            "core/test_core_guards.py::test_a_lane_keeps_its_cap_when_a_parent_goes_on",
        ),
        simulated=True,
    ),
    Safeguard(
        "a parent hears of the next page",
        "What was read is sent before the parent goes on, and what came meanwhile is read after it.",
        cut(f"{SPAWN}:read", "        c.reading[child.id] = child\n", ""),
        ("core/test_core_scenarios_children.py::test_children_are_read_in_order_and_the_parent_gives_up_its_slot",),
    ),
    Safeguard(
        "a parent hears that there are no more",
        "A seal that comes while it waits lets it go on.",
        cut(f"{SPAWN}:spawn", "            c.reading[log.id] = log\n", ""),
        ("core/test_core_scenarios_children.py::test_a_parent_is_looked_at_when_there_is_something_for_it",),
    ),
    Safeguard(
        "a parent hears of what was there before it waited",
        "A new attempt finds the results of children that ended under the one before.",
        cut(f"{SPAWN}:waiting", "    c.reading[child.id] = child\n", ""),
        ("core/test_core_scenarios_children.py::test_children_are_read_in_order_and_the_parent_gives_up_its_slot",),
    ),
    Safeguard(
        "a parent that may not go on yet waits for its caps",
        "It goes on when a place is free, though nothing new comes for it.",
        cut(
            f"{SPAWN}:serve_readers",
            "                continue\n            reader.resume",
            "                pass\n            reader.resume",
        ),
        ("core/test_core_guards.py::test_a_lane_keeps_its_cap_when_a_parent_goes_on",),
    ),
    Safeguard(
        "readers are present attempts",
        "Children are not sent to an attempt that was taken away.",
        cut(
            f"{SPAWN}:serve_readers",
            "reader is None or grant is None or grant.attempt != reader.attempt or grant.worker.session != reader.session",
            "reader is None or grant is None",
        ),
        ("core/test_core_guards_commit.py::test_children_are_not_sent_to_a_stream_that_has_ended",),
    ),
    Safeguard(
        "a parent's children end with it",
        "Children of a parent that has a result do not run on.",
        cut(f"{CORE}results:accept_one", "if child is not None:", "if False:"),
        ("core/test_core_scenarios_children.py::test_a_parent_that_is_done_ends_its_children",),
    ),
    Safeguard(
        "children of a done parent stay closed",
        "A restart does not run them again.",
        (
            Edit(
                f"{REPLAY}:revive",
                "        log.closed = True\n        if not log.flight:\n            c.over.append(log)\n",
                "        pass\n",
            ),
            *never(f"{REPLAY}:reopen", "parent is not None and is_accepted(c.logs[parent.log], parent.seq)"),
        ),
        tests=("core/test_core_guards_commit.py::test_children_of_a_parent_that_is_done_do_not_run_after_a_restart",),
    ),
    Safeguard(
        "a waiting parent counts once",
        "What waits behind a parent that waits for its children is seen, and stolen.",
        cut(f"{STEAL}:backlog", "- worker.running", "- worker.running - worker.waiting"),
        (
            "core/test_core_scenarios_children.py::test_a_parent_that_waits_is_no_backlog_and_hides_none",
            "core/test_core_scenarios_children.py::test_a_worker_whose_parent_waits_steals",
        ),
        simulated=True,
    ),
    Safeguard(
        "bound on parents that wait",
        "They hold no credit: one worker would begin a whole run of them where their children cannot run.",
        cut(f"{DISPATCH}:take_from_run", "no_roots = only_children(c, worker, run)", "no_roots = False"),
        (
            "core/test_core_scenarios_children.py::test_parents_that_wait_are_bounded_where_their_children_cannot_run",
            "core/test_core_scenarios_children.py::test_children_go_where_no_more_parents_are_begun",
        ),
    ),
    Safeguard(
        "bound on parents that wait, by run",
        "Where one run has all the parents that may wait, others still get work.",
        cut(f"{ROOM}:only_children", "worker.by_run.get(run.id, 0) - worker.holds.get(run.id, 0)", "worker.waiting"),
        ("core/test_core_scenarios_children.py::test_parents_that_wait_are_bounded_where_their_children_cannot_run",),
    ),
    Safeguard(
        "bound on parents that wait: thieves",
        "A worker that is given no more parents takes none from others either.",
        cut(f"{STEAL}:most_for", "root and only_children(c, thief, run)", "False"),
        ("core/test_core_scenarios_children.py::test_parents_that_wait_are_bounded_where_their_children_cannot_run",),
    ),
    Safeguard(
        "children pass the parents that are not begun",
        "Whatever their priority: what the parents of a full worker wait for runs there.",
        cut(
            f"{DISPATCH}:take_from_run",
            "roots.append(heapq.heappop(best.heap)[-1])",
            "aside.append(heapq.heappop(best.heap)[-1])\n            first_aside = min(first_aside, aside[-1].head())",
        ),
        ("core/test_core_scenarios_children.py::test_children_go_where_no_more_parents_are_begun",),
    ),
)
