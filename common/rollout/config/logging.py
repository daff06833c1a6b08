"""Structured logs: one JSON object per line for machines, readable text for a terminal.

Every line has `event`, `level` and `timestamp` (ISO 8601, UTC). Records of libraries that use the standard logging
module have the same form. Secrets are removed before anything is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, cast

import structlog
from structlog.types import EventDict, Processor

from rollout.config.repeats import Repeats
from rollout.config.secret_names import SECRET_PREFIX, VALUE_MIN, secret_text, texts_of
from rollout.config.terminal import Terminal
from rollout.config.visible import styled

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_HIDDEN = "***"
_hidden_values: set[str] = set()
_SECRET_KEY = re.compile(
    r"(^|_)(token|secret|password|passwd|api_?key|authorization|private_key|key_pem)$", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]+):[^/\s@]+(?=@)")
_MAX_DEPTH = 4


class Logging(Protocol):
    """Interface of `settings.LoggingSection`, which takes longer to import than a child process to start."""

    @property
    def level(self) -> str: ...
    @property
    def format(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Json:
    level: str = "info"
    format: str = "json"


JSON = _Json()


def configure(settings: Logging, *, stream: TextIO | None = None) -> None:
    """Send logs of structlog and the standard logging module to `stream` (default: standard output). May be called
    again."""
    out = styled(stream or sys.stdout)
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    ending: list[Processor]
    if console:
        terminal = Terminal(colors=out.isatty() and not os.environ.get("NO_COLOR"))

        def render(logger: Any, method: str, event: EventDict) -> str:
            line = terminal(logger, method, event)
            if line is None:
                raise structlog.DropEvent
            return line

        ending = [render]
    else:
        ending = [structlog.processors.JSONRenderer(serializer=_dumps)]
    ending = [structlog.processors.format_exc_info, redact, *ending]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,  # so that set_level reaches loggers that exist already
    )
    _route_standard_logging(out, shared, ending, settings.level)


def set_level(level: str) -> None:
    """Change the level of everything that logs through structlog."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level.lower()]))


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        if _printed(record.name):
            return  # else each of its lines comes twice
        with suppress(structlog.DropEvent):  # there is nothing to say now
            super().emit(record)


def _printed(name: str) -> bool:
    """Return whether a logger of this name has its own handler, a library's or a user's, that prints to the screen."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger is not logging.root:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):  # pyright: ignore[reportUnknownMemberType]
                return True
        logger = logger.parent
    return False


def _route_standard_logging(out: TextIO, shared: list[Processor], ending: list[Processor], level: str) -> None:
    handler = _Handler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries tell of their inner life at info; what they warn of is worth a line.
    root.setLevel(logging.INFO if level == "debug" else max(logging.WARNING, _LEVELS[level]))


def hide(value: str) -> None:
    """Remove `value` from every later line and redacted text of this process."""
    if len(value) >= VALUE_MIN:
        _hidden_values.add(value)


def _secrets() -> list[str]:
    """Return the hidden values, longest first, so that one contained in another leaves no rest of it."""
    provided = {v for k, v in os.environ.items() if k.startswith(SECRET_PREFIX) and len(v) >= VALUE_MIN}
    texts = {text for value in provided | _hidden_values for text in texts_of(value)}
    return sorted(texts, key=len, reverse=True)


def redact(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Remove passwords, tokens, keys, values of ROLLOUT_SECRET_* and hidden values from all fields. A structlog
    processor."""
    secrets = _secrets()
    for key, value in event.items():
        event[key] = _clean(key, value, secrets, 0)
    return event


def redact_text(text: str) -> str:
    """Return `text` without what looks like a secret."""
    return _clean_text(text, _secrets())


def _clean(key: str, value: Any, secrets: list[str], depth: int) -> Any:
    if isinstance(value, str):
        return _HIDDEN if value and _SECRET_KEY.search(key) else _clean_text(value, secrets)
    if depth >= _MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        items = cast(MutableMapping[str, Any], value).items()
        return {str(name): _clean(str(name), inner, secrets, depth + 1) for name, inner in items}
    if isinstance(value, list | tuple):
        return [_clean(key, inner, secrets, depth + 1) for inner in cast(list[Any], value)]
    if isinstance(value, BaseException):
        return _clean_text(f"{type(value).__name__}: {value}", secrets)
    return value


def _clean_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    text = _URL_PASSWORD.sub(r"\1:" + _HIDDEN, text)
    return secret_text().sub(_HIDDEN, text)


def _dumps(value: Any, **_options: Any) -> str:
    return json.dumps(value, default=str, separators=(", ", ": "))
