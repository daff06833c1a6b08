"""Faults as they strike: each takes the world and says whether it met anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout.model.errors import RolloutError, StorageFullError
from sim_loop import DEAD, PAUSED
from sim_node import Node
from sim_scenario import Fault

if TYPE_CHECKING:
    from sim_world import World


def strike(world: World, fault: Fault) -> None:
    """Make it happen, and see to its end."""
    world.note(f"fault {fault.kind} {fault.node} {fault.peer} {fault.seconds} {fault.amount}")
    if _FAULTS[fault.kind](world, fault):
        world.faults[fault.kind] += 1


def _partition(world: World, f: Fault) -> bool:
    world.network.block(f.node, f.peer)
    world.later(f.seconds, lambda: world.network.unblock(f.node, f.peer))
    return True


def _one_way(world: World, f: Fault) -> bool:
    world.network.block(f.node, f.peer, both=False)
    world.later(f.seconds, lambda: world.network.unblock(f.node, f.peer))
    return True


def _cut(world: World, f: Fault) -> bool:
    world.network.cut(f.node, f.peer)
    return True


def _reorder(world: World, f: Fault) -> bool:
    world.network.spread[f.node] = f.amount
    world.later(f.seconds, lambda: world.network.spread.pop(f.node, None))
    return False  # counted message by message


def _duplicate(world: World, f: Fault) -> bool:
    world.network.twice = f.amount
    world.later(f.seconds, lambda: setattr(world.network, "twice", 0.0))
    return False


def _pause_node(world: World, node: Node, seconds: float) -> bool:
    """Stopped and continued: its deadlines pass meanwhile; peers give up its connections."""
    if not node.alive or node.loop.state == PAUSED:
        return False
    loop = node.loop
    loop.pause()

    def resume() -> None:
        if loop.state == PAUSED:
            node.woke_at = world.scheduler.now
            loop.resume()

    world.later(seconds, resume)
    if seconds > world.network.break_after:
        world.later(world.network.break_after, lambda: world.network.gone(node.name))
    return True


def _pause(world: World, f: Fault) -> bool:
    return _pause_node(world, world.nodes[f.node], f.seconds)


def _crash(world: World, f: Fault) -> bool:
    node = world.nodes[f.node]
    if not node.alive:
        return False
    node.crash()
    node.restart_in(f.seconds)
    return True


def _crash_in_recovery(world: World, f: Fault) -> bool:
    world.coordinators[f.node].crashes_to_come.append((f.amount, f.seconds))
    return False  # counted when it leads, and is still waiting for workers then


def _child_crash(world: World, f: Fault) -> bool:
    node = world.workers[f.node]
    return node.alive and node.driver is not None and node.driver.crash_child()


def _arm(name: str) -> Callable[[World, Fault], bool]:
    def act(world: World, f: Fault) -> bool:
        setattr(world.coordinators[f.node].faults, name, int(f.amount))
        return False  # counted when a commit meets it

    return act


def _slow_commit(world: World, f: Fault) -> bool:
    faults = world.coordinators[f.node].faults
    faults.slow = f.amount
    world.later(f.seconds, lambda: setattr(faults, "slow", 0.0))
    return False


def _unreachable(world: World, f: Fault) -> bool:
    faults = world.coordinators[f.node].faults
    faults.unreachable = True
    world.later(f.seconds, lambda: setattr(faults, "unreachable", False))
    return False


def _store_full(world: World, f: Fault) -> bool:
    world.store.full = True
    world.later(f.seconds, lambda: setattr(world.store, "full", False))
    return False


def _two_leaders(world: World, f: Fault) -> bool:
    """The leader is stopped, or away from the database, for longer than its lease lasts; then it is back."""
    lease = world.store.tables.lease
    leader = next((c for c in world.coordinators.values() if lease is not None and c.address == lease.address), None)
    if leader is None or not leader.alive:
        return False
    if f.amount:
        leader.faults.unreachable = True
        world.later(f.seconds, lambda: setattr(leader.faults, "unreachable", False))
        return True
    return _pause_node(world, leader, f.seconds)


def _clock_jump(world: World, f: Fault) -> bool:
    node = world.nodes[f.node]
    node.wall_offset_ms += int(f.amount)
    world.later(4.0, lambda: setattr(node, "wall_offset_ms", node.wall_offset_ms - int(f.amount)))  # NTP
    return node.alive


def _drain(world: World, f: Fault) -> bool:
    world.workers[f.node].drain(f.amount)
    return world.workers[f.node].alive


def _drain_in_steal(world: World, f: Fault) -> bool:
    world.workers[f.node].drain_at_revoke = f.amount
    return False


def _operator_drain(world: World, f: Fault) -> bool:
    node = world.workers[f.node]
    if not node.alive or not world.operator.alive:
        return False

    async def order() -> None:
        while True:
            try:
                await world.operator.runs.worker_command(node.incarnation, "drain")
            except StorageFullError:
                await asyncio.sleep(1.0)  # the operator makes room and gives the order again
            except RolloutError as error:
                if error.code in ("not_found", "wrong_state"):
                    return
                raise
            else:
                return

    world.operator.spawn(order())
    return True


def _renewal(world: World, f: Fault) -> bool:
    """A new certificate: the channel is built anew, and Work says Hello on it."""
    node = world.workers[f.node]
    if not node.alive or node.driver is None:
        return False
    node.loop.call_soon(node.driver.renew)
    return True


def _lie(world: World, f: Fault) -> bool:
    """A process of that host sends a result of a log that there never was, on the worker's own stream."""
    node = world.workers[f.node]
    if not node.alive or node.driver is None or not node.driver.session_id:
        return False
    world.liars.add(node.incarnation)
    node.loop.call_soon(node.driver.lie)
    return True


def _start_fails(world: World, f: Fault) -> bool:
    """Processes that it starts meanwhile come to nothing; `amount`: it says that another try may help."""
    node = world.workers[f.node]
    node.starts_fail = True, bool(f.amount)
    world.later(f.seconds, lambda: setattr(node, "starts_fail", (False, False)))
    return False  # counted start by start


def _slow_node(world: World, f: Fault) -> bool:
    node = world.nodes[f.node]
    node.set_lag(f.amount)
    world.later(f.seconds, lambda: node.set_lag(0.0))
    return node.alive


def _handover(world: World, f: Fault) -> bool:
    node = world.coordinators[f.node]
    if not node.alive or node.loop.state == DEAD:
        return False
    node.loop.call_soon(node.stop)
    return True


_FAULTS: dict[str, Callable[[World, Fault], bool]] = {
    "partition": _partition, "one_way": _one_way, "cut": _cut, "reorder": _reorder, "duplicate": _duplicate,
    "pause": _pause, "suspend": _pause, "crash": _crash, "child_crash": _child_crash, "failed_commit": _arm("fail"),
    "torn_commit": _arm("torn"), "late_commit": _arm("late"), "slow_commit": _slow_commit,
    "store_unreachable": _unreachable, "store_full": _store_full, "two_leaders": _two_leaders,
    "clock_jump": _clock_jump, "drain": _drain, "drain_in_steal": _drain_in_steal, "slow_node": _slow_node,
    "handover": _handover, "client_dies": _crash, "operator_drain": _operator_drain,
    "renewal": _renewal, "crash_in_recovery": _crash_in_recovery, "lie": _lie, "start_fails": _start_fails,
}  # fmt: skip
