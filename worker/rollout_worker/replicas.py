"""Attempts that answer requests of gateways: which were announced, and the traffic of their processes. Pure."""

from __future__ import annotations

from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker.attempts import AttemptKey, Held, replica_key
from rollout_worker.session_events import RelayIn


class Replicas:
    """Replicas. A process may speak only for attempts that it holds and has announced."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._announced: dict[AttemptKey, tuple[int, work_pb2.Announce]] = {}  # with the process that runs it
        self._draining: set[AttemptKey] = set()

    def __len__(self) -> int:
        return len(self._announced)

    def from_child(self, child: int, held: Held, frame: work_pb2.WorkUp) -> work_pb2.WorkUp | None:
        """Return what the coordinator is sent of the frame, or None."""
        kind = frame.WhichOneof("body")
        if kind == "announce":
            if held.stop_reason:
                return None
            # Who it is, and whose, is not the process's to say.
            announce = work_pb2.Announce(
                run_id=held.plan.run.run_id, replica=frame.announce.replica, engine=f"{self._incarnation}/{child}"
            )
            self._announced[held.key] = child, announce
            self._draining.discard(held.key)
            return work_pb2.WorkUp(announce=announce)
        if held.key not in self._announced:
            return None  # from before it learned that every channel hung up
        if kind == "said":
            return work_pb2.WorkUp(said=frame.said)
        if not frame.withdraw.draining:
            return self.ended(held.key)
        self._draining.add(held.key)
        return work_pb2.WorkUp(withdraw=frame.withdraw)

    def to_child(self, wire: common_pb2.ReplicaKey, frame: work_pb2.WorkDown) -> RelayIn | None:
        """Return the frame for the child, or None if the replica is gone."""
        found = self._announced.get(replica_key(wire))
        return RelayIn(found[0], frame) if found is not None else None

    def hang_up(self) -> list[RelayIn]:
        """Close all channels when the coordinator is lost.

        Each process announces anew, so that what it sends before it knows of the loss is distinguished from later
        messages.
        """
        announced, self._announced = self._announced, {}
        self._draining.clear()
        hung_up = ((child, work_pb2.HungUp(replica=said.replica)) for child, said in announced.values())
        return [RelayIn(child, work_pb2.WorkDown(hung_up=frame)) for child, frame in hung_up]

    def announcements(self) -> list[work_pb2.WorkUp]:
        """Return the announcements for a new stream."""
        frames: list[work_pb2.WorkUp] = []
        for key, (_, announce) in self._announced.items():
            frames.append(work_pb2.WorkUp(announce=announce))
            if key in self._draining:
                withdraw = work_pb2.Withdraw(replica=announce.replica, draining=True)
                frames.append(work_pb2.WorkUp(withdraw=withdraw))
        return frames

    def ended(self, key: AttemptKey) -> work_pb2.WorkUp | None:
        """Handle the end of an attempt, or of its answering. Returns None if it was no replica."""
        found = self._announced.pop(key, None)
        self._draining.discard(key)
        return work_pb2.WorkUp(withdraw=work_pb2.Withdraw(replica=found[1].replica)) if found is not None else None
