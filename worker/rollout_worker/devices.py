"""Accelerators of a worker, leased whole, each to one child process at most. Pure, like the session."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.model.errors import StateError


class DevicePool:
    """Pool of `devices`, which are names for CUDA_VISIBLE_DEVICES (UUIDs). A lease ends when its process is known to
    have ended."""

    def __init__(self, devices: Sequence[str]) -> None:
        if len(set(devices)) != len(devices):
            raise ValueError(f"a device is named twice: {', '.join(devices)}")
        self.devices = tuple(devices)
        self._leases: dict[int, tuple[str, ...]] = {}  # by child

    @property
    def free(self) -> int:
        return len(self.devices) - sum(map(len, self._leases.values()))

    def of(self, child: int) -> tuple[str, ...]:
        return self._leases.get(child, ())

    def lease(self, child: int, count: int) -> tuple[str, ...]:
        """Lease the first free devices, so that neighbors stay together. Raises StateError if there are too few."""
        taken = {device for lease in self._leases.values() for device in lease}
        found = tuple(device for device in self.devices if device not in taken)[:count]
        if len(found) < count or child in self._leases:
            raise StateError(f"child {child} cannot have {count} of {len(found)} free devices")
        if count:
            self._leases[child] = found
        return found

    def give_back(self, child: int) -> None:
        self._leases.pop(child, None)
