"""Lease epoch in every message: it shows which messages no longer count. What deposes a coordinator is in
`rollout_coordinator.leadership`."""

from __future__ import annotations

from typing import Any, Protocol

from rollout.model.errors import ProtocolError, UnavailableError


class StaleEpochError(UnavailableError):
    """The message comes from a coordinator that is no longer the leader; find the leader and ask again."""

    code = "stale_epoch"


class Stamped(Protocol):
    """Any message of the protocol."""

    epoch: int

    def HasField(self, field_name: Any) -> bool: ...


class EpochGuard:
    """Highest epoch that a worker or client has seen: a message with a smaller one raises, a larger one is adopted."""

    def __init__(self) -> None:
        self._current = 0

    @property
    def current(self) -> int:
        """Epoch to stamp on messages."""
        return self._current

    def stamp(self, message: Any) -> Any:
        message.epoch = self._current
        return message

    def check_peer(self, message: Stamped) -> None:
        """Raise ProtocolError without an epoch, and StaleEpochError if its sender is no longer the leader."""
        if not message.HasField("epoch"):
            raise ProtocolError(
                f"{type(message).__name__} carries no epoch; every message must say the highest one its sender has seen"
            )
        epoch = message.epoch
        if epoch < self._current:
            raise StaleEpochError(
                f"{type(message).__name__} of epoch {epoch} was ignored: epoch {self._current} has been seen, so its "
                "sender is no longer the leader.",
                epoch=epoch,
            )
        self._current = epoch
