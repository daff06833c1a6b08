"""Lease epoch in every message: it shows which coordinator is deposed, and which messages no longer count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from rollout.model.errors import FencedError, ProtocolError, UnavailableError

Side = Literal["coordinator", "worker", "client"]


class StaleEpochError(UnavailableError):
    """The message comes from a coordinator that is no longer the leader; find the leader and ask again."""

    code = "stale_epoch"


class Stamped(Protocol):
    """Any message of the protocol."""

    epoch: int

    def HasField(self, field_name: Any) -> bool: ...


class EpochGuard:
    """Highest epoch seen, and the meaning of a message with another.

    On a coordinator a larger epoch means that it is deposed: `on_deposed(epoch)` is called once, then every message
    raises FencedError. On a worker or client a smaller one raises StaleEpochError, a larger one is adopted.
    """

    def __init__(self, side: Side, epoch: int = 0, on_deposed: Callable[[int], None] | None = None) -> None:
        self._side = side
        self._current = epoch
        self._on_deposed = on_deposed
        self._deposed_by: int | None = None

    @property
    def current(self) -> int:
        """Epoch to stamp on messages."""
        return self._current

    @property
    def deposed(self) -> bool:
        return self._deposed_by is not None

    def adopt(self, epoch: int) -> None:
        """Adopt a new lease of this coordinator, or an epoch learned elsewhere. The epoch never decreases."""
        self._current = max(self._current, epoch)

    def stamp(self, message: Any) -> Any:
        message.epoch = self._current
        return message

    def check_peer(self, message: Stamped) -> None:
        """Raise ProtocolError without an epoch, or FencedError or StaleEpochError as the class says."""
        if not message.HasField("epoch"):
            raise ProtocolError(
                f"{type(message).__name__} carries no epoch; every message must say the highest one its sender has seen"
            )
        epoch = message.epoch
        if self._side == "coordinator":
            if epoch > self._current and self._deposed_by is None:
                self._deposed_by = epoch
                if self._on_deposed is not None:
                    self._on_deposed(epoch)
            if self._deposed_by is not None:
                raise FencedError(
                    f"This coordinator is of epoch {self._current}; a leader of epoch {self._deposed_by} took over.",
                    epoch=self._deposed_by,
                )
        elif epoch < self._current:
            raise StaleEpochError(
                f"{type(message).__name__} of epoch {epoch} was ignored: epoch {self._current} has been seen, so its "
                "sender is no longer the leader.",
                epoch=epoch,
            )
        else:
            self._current = epoch
