"""What a child process prints reaches the log, bounded, and what does not is counted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from rollout.config.logging import redact_text
from rollout_worker.bounded_lines import LINE_MAX
from rollout_worker.processes.output import BURST_S, BYTES_A_SECOND, LINES_A_SECOND, Output
from rollout_worker.trials.masking import Masks


class Log:
    def __init__(self) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []
        self.output = Output(lambda *entry: self.entries.append(entry), 0.0)

    def feed(self, data: bytes, now: float = 0.0, stream: str = "stdout") -> None:
        self.output.feed(stream, data, now)

    @property
    def lines(self) -> list[str]:
        return [fields["text"] for _, event, fields in self.entries if event == "child_output"]

    @property
    def dropped(self) -> tuple[int, int]:
        told = [fields for _, event, fields in self.entries if event == "child_output_dropped"]
        return sum(f["lines"] for f in told), sum(f["bytes"] for f in told)


def test_lines_are_put_together_from_their_parts_by_stream() -> None:
    log = Log()
    log.feed(b"hel")
    log.feed(b"other\n", stream="stderr")
    log.feed(b"lo\n\nend")
    log.output.close()
    assert log.lines == ["other", "hello", "end"]


def test_a_progress_bar_is_the_line_that_a_terminal_shows_last() -> None:
    log = Log()
    log.feed(b"\rloading:   0%" + b"\rloading:  50%" * 2000)
    log.feed(b"\rloading: 100%\r\nready\r\n")
    assert log.lines == ["loading: 100%", "ready"]


def test_a_json_line_keeps_its_level_and_fields() -> None:
    log = Log()
    log.feed(b'{"event": "loaded", "level": "warning", "n": 1, "child": 7, "timestamp": "x"}\n{"no": "event"}\n')
    assert log.entries == [("warning", "loaded", {"n": 1}), ("info", "child_output", {"text": '{"no": "event"}'})]


def test_a_line_without_an_end_is_cut_and_the_next_is_whole() -> None:
    log = Log()
    for _ in range(3):
        log.feed(b"x" * LINE_MAX)
    log.feed(b"x\nnext\n")
    assert log.lines == ["x" * LINE_MAX + " (cut: too long for the log)", "next"]


def test_a_gigabyte_is_dropped_but_for_what_a_log_can_take_and_is_counted() -> None:
    log = Log()
    chunk = b"some line of output\n" * 3000
    seconds, now = 10, 0.0
    for _ in range(seconds * 50):
        now += 0.02
        log.feed(chunk, now)
    log.output.tell()
    most = (seconds + BURST_S) * LINES_A_SECOND
    assert 0.9 * most <= len(log.lines) <= most
    assert sum(map(len, log.lines)) <= (seconds + BURST_S) * BYTES_A_SECOND
    assert len(log.lines) + log.dropped[0] == seconds * 50 * 3000
    log.feed(b"back to normal\n", now + 60)
    assert log.lines[-1] == "back to normal"


def test_the_last_words_are_kept_whatever_is_dropped() -> None:
    log = Log()
    log.feed(b"y\n" * 1_000_000)
    log.feed(json.dumps({"why": "MemoryError"}).encode())
    assert log.output.last_words.endswith(b'"MemoryError"}')


def test_what_is_left_out_is_counted_once_for_each_run_and_marks_are_no_lines() -> None:
    shown: list[tuple[int, str]] = []
    missing: list[tuple[int, int, int]] = []
    output = Output(
        lambda *entry: None,
        0.0,
        lambda stream, line, key: shown.append((key.log if key is not None else 0, line)),
        lambda *count: missing.append(count),
    )
    rows = 3000
    data = b"".join(b"\x1e%d.%d.1\nrow %d\n\x1e\n" % (1 + n // 2000, n, n) for n in range(rows))
    data += b"\x1e!2.40.400\n\x1e2.7.1\n" + b"z" * 3 * LINE_MAX + b"\n"
    for begin in range(0, len(data), 777):  # lines and marks are cut anywhere
        output.feed("stdout", data[begin : begin + 777], 0.0)
    output.close()
    assert len(shown) + sum(lines for _, lines, _ in missing) == rows + 40 + 1
    counted = Counter[int]()
    for log, lines, _ in missing:
        counted[log] += lines
    assert counted == {1: 2000 - len(shown), 2: 1000 + 40 + 1}


def test_secrets_of_several_lines_are_masked_in_each_and_before_a_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "-----BEGIN KEY-----\nabcdefgh0123\nABCDEFGH4567\nend\n"
    account = json.dumps({"id": 7, "private_key": key}, indent=1)
    monkeypatch.setenv("ROLLOUT_SECRET_ACCOUNT", account)
    log = Log()
    log.feed("\n".join((key, account, json.dumps(account), repr(key))).encode() + b"\n")
    log.feed(b"x" * (LINE_MAX - 5) + b"ABCDEFGH")
    log.feed(b"4567" + b"y" * LINE_MAX + b"\n")
    for shown in (Masks([account]).text(key), *map(redact_text, log.lines)):
        assert "abcd" not in shown and "ABCD" not in shown
