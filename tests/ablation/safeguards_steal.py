"""Who may take what from whom."""

from __future__ import annotations

from removal import Edit
from safeguard import CORE, Safeguard, cut

DISPATCH, STEAL = f"{CORE}dispatch", f"{CORE}steal"

SAFEGUARDS = (
    Safeguard(
        "revoke confirmation",
        "A stolen item is given to its thief only after its victim gave it up.",
        cut(
            f"{STEAL}:seek",
            "        c.next_revoke += 1\n",
            "        c.next_revoke += 1\n"
            "        for grant, seqs in grants:\n"
            "            for seq in seqs:\n"
            '                end_attempt(c, grant, seq, AttemptEnd.REVOKED, "revoked", "", to=thief.id)\n',
        ),
        (
            "core/test_core_guards_dispatch.py::test_a_stolen_item_is_its_thiefs_only_when_its_victim_gave_it_up",
            "core/test_core_scenarios_dispatch.py::test_a_steal_does_not_outlive_its_victims_session",
        ),
        simulated=True,
    ),
    Safeguard(
        "only unstarted items are stolen",
        "Work that has begun is not asked back.",
        (
            Edit(f"{STEAL}:loot", " if seq not in grant.started", ""),
            Edit(f"{STEAL}:may_be_stolen", " and grant.open > len(grant.started)", ""),
        ),
        ("core/test_core_guards_dispatch.py::test_what_has_begun_is_not_asked_back",),
    ),
    Safeguard(
        "adopted attempts are not stolen",
        "What a new leader knows from the ledger only may have begun.",
        cut(f"{STEAL}:may_be_stolen", " and not grant.unsure", ""),
        ("core/test_core_guards_dispatch.py::test_what_is_known_from_the_ledger_only_is_not_asked_back",),
    ),
    Safeguard(
        "chains are not stolen",
        "An item of a chain stays with the worker that has its state.",
        cut(f"{STEAL}:may_be_stolen", " and not grant.info.spec.chain", ""),
        ("core/test_core_guards_dispatch.py::test_what_a_thief_may_not_have_is_not_asked_for[chain]",),
    ),
    Safeguard(
        "thieves fit their loot",
        "A worker is not handed what it cannot run.",
        cut(f"{STEAL}:most_for", "not fits(thief, shape) or ", ""),
        ("core/test_core_guards_dispatch.py::test_what_a_thief_may_not_have_is_not_asked_for[fits]",),
    ),
    Safeguard(
        "only running runs are stolen from",
        "The items of a paused run stay where they are.",
        cut(f"{STEAL}:may_be_stolen", "return running and", "return"),
        ("core/test_core_guards_dispatch.py::test_a_paused_run_is_not_stolen_from",),
    ),
    Safeguard(
        "one steal a victim",
        "A second revoke is not sent while the first is unanswered.",
        cut(f"{STEAL}:seek", " and w.revoke is None", ""),
        ("core/test_core_guards_dispatch.py::test_a_victim_is_asked_once_at_a_time",),
    ),
    Safeguard(
        "a steal ends with its session",
        "A revoke that will never be answered does not block its victim.",
        cut(f"{CORE}workers:hello", "steal.forget(c, worker)", "pass"),
        ("core/test_core_scenarios_dispatch.py::test_a_steal_does_not_outlive_its_victims_session",),
    ),
    Safeguard(
        "bound of a steal",
        "A thief gets at most half of a backlog, and 32 items.",
        cut(f"{STEAL}:loot", "min(-(-backlog(victim) // 2), c.settings.steal_max)", "1 << 30"),
        (
            "core/test_core_scenarios_dispatch.py::test_a_thief_that_has_begun_what_it_stole_steals_again",
            "core/test_core_scenarios_dispatch.py::test_an_idle_worker_steals_unstarted_work",
        ),
    ),
)
