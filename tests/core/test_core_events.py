"""What the core's events tell people: which machine, who ordered it, why, and what follows."""

from __future__ import annotations

from core_world import World
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import RunSpec
from rollout.model.worker import Credit, Inventory
from rollout_coordinator.core.events import RunCommand, SubmitOpen, WorkerCommand, WorkerGoodbye, WorkerHello

SENTENCES_OF = ("run_paused", "run_resumed", "run_killed", "run_continued")


def hello(w: World, name: str, host_id: str = "HOST") -> None:
    inventory = Inventory(host="gpu-1")
    w.step(WorkerHello(f"{name}-s", name, host_id, inventory, Credit(4), address="10.0.0.2"))


def test_a_lost_worker_is_named_with_its_machine_and_the_limit() -> None:
    w = World()
    hello(w, "A")
    w.open()
    w.submit(2)
    w.pass_time(12.0, beat=False)
    (told,) = w.events("worker_failed")
    assert told["reason"].startswith("silent for 6.") and told["reason"].endswith(" s, the limit is 6 s")
    assert (told["host_name"], told["address"], told["items"]) == ("gpu-1", "10.0.0.2", 2)


def test_the_next_worker_of_a_machine_takes_the_place_of_the_one_that_was_lost() -> None:
    w = World()
    hello(w, "A")
    w.pass_time(12.0, beat=False)
    hello(w, "B", host_id="OTHER")
    hello(w, "C")
    hello(w, "D")
    assert [told["replaces"] for told in w.events("worker_ready")] == ["", "", "A", ""]


def test_a_lost_worker_that_comes_back_is_told_as_that() -> None:
    w = World()
    hello(w, "A")
    w.pass_time(12.0, beat=False)
    hello(w, "A")
    first, again = w.events("worker_ready")
    assert "lost_s" not in first and 5 < again["lost_s"] < 7


def test_who_drained_a_worker_is_told_here_and_to_the_worker() -> None:
    w = World()
    a = w.worker("A")
    w.ask(WorkerCommand, "A", "drain", "500", "operator on host laptop (7)")
    w.ask(WorkerCommand, "A", "drain", "500", "somebody else")
    (told,) = w.events("worker_told_to_drain")
    assert told["reason"] == "drained by the operator on host laptop (7)"
    w.step(WorkerGoodbye(a.session, told["reason"]))
    (left,) = w.events("worker_deregistered")
    assert (left["reason"], left["host_name"]) == (told["reason"], "host-A")


def test_who_submitted_a_run_and_how_many_items_it_has() -> None:
    w = World()
    w.ask(SubmitOpen, RunSpec("R", "map", b"{}", name="nightly"), "operator on host laptop (7)", "10.0.0.7")
    w.submit(3)
    w.seal(3)
    w.seal(3)
    (told,) = w.events("run_submitted")
    assert (told["name"], told["by"], told["address"]) == ("nightly", "operator on host laptop (7)", "10.0.0.7")
    assert w.events("run_sealed") == [{"run_id": "R", "name": "nightly", "items": 3}]


def test_who_ordered_something_of_a_run() -> None:
    w = World()
    w.open(name="nightly")
    for verb in ("pause", "resume", "kill", "continue"):
        w.ask(RunCommand, "R", verb, by="operator on host laptop (7)")
    told = [w.events(name) for name in SENTENCES_OF]
    assert [(one["name"], one["by"]) for (one,) in told] == [("nightly", "operator on host laptop (7)")] * 4
    assert w.view().reason == "" and not w.events("run_killed")[0]["reason"]


def test_a_run_that_completes_tells_why_most_of_its_failed_items_failed() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(5, specs=ItemSpec(max_attempts=1))
    log = w.root()
    for seq in range(3):
        a.finish((log, seq), failure=Failure("executor_error", f"\nValueError: row {seq} has no text\nTrace", False))
    a.finish((log, 3), failure=Failure("timeout", "no result within 5 s", False))
    a.finish((log, 4))
    w.seal(5)
    (told,) = w.events("run_completed")
    assert (told["done"], told["failed"]) == (1, 4)
    assert (told["most_common"], told["most_common_count"]) == ("ValueError: row 0 has no text", 3)


def test_a_leader_that_did_not_see_most_failures_gives_an_example() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(3, specs=ItemSpec(max_attempts=1))
    log = w.root()
    for seq in range(2):
        a.finish((log, seq), failure=Failure("bad", "x", False))
    w.restart()
    a.hello()
    a.finish((log, 2), failure=Failure("worse", "", False))
    w.seal(3)
    (told,) = w.events("run_completed")
    assert told["such_as"] == "worse" and "most_common" not in told
