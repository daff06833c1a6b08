"""Free space of the file systems below directories, as Prometheus gauges."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge


class FreeSpace:
    """`PREFIX_disk_free_bytes` and `PREFIX_disk_size_bytes` by path, one measurement behind: measurements run in
    threads, so that a file system that does not respond blocks nothing."""

    def __init__(self, prefix: str, directories: Iterable[str], registry: CollectorRegistry) -> None:
        self._directories = sorted({Path(one).expanduser().absolute() for one in directories})
        self._free = Gauge(f"{prefix}_disk_free_bytes", "Free space that we may use.", ["path"], registry=registry)
        self._size = Gauge(f"{prefix}_disk_size_bytes", "Size of the file system.", ["path"], registry=registry)
        self._thread = threading.Thread()
        self.look()

    def look(self) -> None:
        """Start another measurement, unless one is running."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        for directory in self._directories:
            with suppress(OSError):
                there = next(path for path in (directory, *directory.parents) if path.exists())
                usage = shutil.disk_usage(there)
                self._free.labels(str(directory)).set(usage.free)
                self._size.labels(str(directory)).set(usage.total)
