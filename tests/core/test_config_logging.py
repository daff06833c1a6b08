"""Logs: their shape, the libraries' records, and what must never be in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import structlog
from rollout.config.logging import configure, set_level
from rollout.config.settings import LoggingSection


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_an_object_with_event_level_and_timestamp() -> None:
    out = io.StringIO()
    configure(LoggingSection(), stream=out)
    structlog.get_logger().info("worker_registered", worker="W", n=3)
    structlog.get_logger().debug("item_committed")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["worker"], line["n"]) == ("worker_registered", "info", "W", 3)
    assert datetime.fromisoformat(line["timestamp"]).utcoffset() is not None


def test_libraries_come_out_the_same_way() -> None:
    out = io.StringIO()
    configure(LoggingSection(), stream=out)
    logging.getLogger("grpc").warning("lost %s", "it")
    logging.getLogger("grpc").info("chatter")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["logger"]) == ("lost it", "warning", "grpc")
    assert "timestamp" in line


def test_an_exception_is_one_line() -> None:
    out = io.StringIO()
    configure(LoggingSection(), stream=out)
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = lines(out)
    assert "ValueError: no" in line["exception"]


def test_the_level_can_change_while_running() -> None:
    out = io.StringIO()
    configure(LoggingSection(), stream=out)
    log = structlog.get_logger()
    log.debug("one")
    set_level("debug")
    log.debug("two")
    assert [line["event"] for line in lines(out)] == ["two"]


@pytest.mark.parametrize("kind", ["json", "console"])
def test_secrets_do_not_come_out(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SECRET_API", "s3cr3t-value")
    out = io.StringIO()
    configure(LoggingSection(format=kind), stream=out)
    log = structlog.get_logger()
    log.info(
        "a", url="postgresql://me:hunter2@db/x", token="hunter2", nested={"password": ["hunter2"]}, prompt_tokens=7
    )
    log.info("the value is s3cr3t-value", key="-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----")
    log.info("b", note="hf_hunter2hunter2hunter2 rj1.w.hunter2hunter2hunter2abcdefgh")
    try:
        password = "hunter2"
        raise ValueError(f"postgresql://me:{password}@db/x")
    except ValueError:
        log.exception("failed")
    text = out.getvalue()
    assert "hunter2" not in text.replace("{password}", "")
    assert "s3cr3t-value" not in text
    assert "prompt_tokens" in text and "7" in text
