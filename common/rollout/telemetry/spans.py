"""Spans of traced items, exported over OTLP/HTTP in the background. Spans that cannot be exported are dropped and
counted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rollout.config.settings import TelemetrySection
from rollout.model.errors import ConfigError
from rollout.telemetry.identity import LogTraces

if TYPE_CHECKING:
    from rollout.telemetry.exporting import Exporting

CLOSE_S = 1.0
"""How long a process waits for a collector when it ends."""
_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
LOGS_MAX = 10_000
PARENTS = {"submit": "", "queue": "submit", "attempt": "queue", "engine": "attempt", "commit": "attempt"}
"""The spans of an item and the parent of each."""


class Spans:
    """The spans of a process. `add` never waits and never raises."""

    def __init__(self, exporting: Exporting, ratio: float) -> None:
        self._exporting = exporting
        self._ratio = ratio
        self._logs: dict[int, LogTraces] = {}

    def known(self, log: int) -> LogTraces | None:
        """Return what `of` returned for this log, or None if it was not called yet, or too long ago."""
        return self._logs.get(log)

    def of(self, run_id: str, log: int) -> LogTraces:
        found = self._logs.get(log)
        if found is None or found.run_id != run_id:
            if len(self._logs) >= LOGS_MAX:
                del self._logs[next(iter(self._logs))]
            found = self._logs[log] = LogTraces(run_id, log, self._ratio)
        return found

    def add(
        self,
        item: tuple[LogTraces, int],
        name: str,
        attempt: int,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, str | int] | None = None,
        error: str = "",
    ) -> None:
        """Add a span of `item` (traces of its log, seq). `attempt` is 0 for `submit`. Times are Unix times; `error` is
        the code of a failure."""
        traces, seq = item
        above = PARENTS[name]
        parent = traces.span_id(seq, above, 0 if above == "submit" else attempt) if above else 0
        known = {"rollout.run_id": traces.run_id, "rollout.log": traces.log, "rollout.seq": seq}
        if attempt:
            known["rollout.attempt"] = attempt
        ids = traces.trace_id(seq), traces.span_id(seq, name, attempt), parent
        self._exporting.add(name, ids, min(start_ns, end_ns), end_ns, known | dict(attributes or {}), error)

    def close(self) -> None:
        """Export the rest, for at most `CLOSE_S`. Blocking."""
        closing = threading.Thread(target=self._exporting.close, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporting.give_up()


def open_spans(
    section: TelemetrySection, service: str, instance: str, on_dropped: Callable[[int], object]
) -> Spans | None:
    """Open the spans, or return None if traces are disabled. `service` is the name in traces unless OTEL_SERVICE_NAME
    is set. `on_dropped` is called, in any thread, for spans that were not exported. Raises ConfigError as
    `check_installed`, and for variables OTEL_..."""
    if not section.otlp_endpoint or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    check_installed(section)
    sdk = logging.getLogger("opentelemetry")
    sdk.handlers, sdk.propagate = [logging.NullHandler()], False  # it tells of every try
    exporting: type[Exporting] = import_module("rollout.telemetry.exporting").Exporting
    try:
        return Spans(exporting(section.otlp_endpoint, service, instance, on_dropped), section.trace_ratio)
    except ValueError as error:
        raise ConfigError(f"a variable OTEL_... cannot be used: {error}") from error


def check_installed(section: TelemetrySection) -> None:
    """Raise ConfigError with the install command if traces are enabled and packages are missing. Imports none of
    them."""
    if section.otlp_endpoint:
        try:
            missing = [name for name in _MODULES if find_spec(name) is None]
        except ModuleNotFoundError as error:  # of a package above it
            missing = [error.name or _MODULES[0]]
        if missing:
            raise ConfigError(
                f"telemetry.otlp_endpoint needs the package {missing[0]}, which is not installed: "
                "pip install 'rollout-engine[otel]'"
            )


def environment_of(section: TelemetrySection) -> dict[str, str]:
    """Return variables that pass the section to a child process."""
    if not section.otlp_endpoint or "ROLLOUT_TELEMETRY__OTLP_ENDPOINT" in os.environ:
        return {}
    return {
        "ROLLOUT_TELEMETRY__OTLP_ENDPOINT": section.otlp_endpoint,
        "ROLLOUT_TELEMETRY__TRACE_RATIO": str(section.trace_ratio),
    }
