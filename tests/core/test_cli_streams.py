"""Standard output that cannot be written, for a while or for good."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from typing import TextIO, cast

import pytest
from rich.table import Table
from rollout.cli import at_start, show
from rollout.cli.streams import Output, OutputError, json_line, prepare


class Disk(io.StringIO):
    full = False

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().flush()

    def fileno(self) -> int:
        raise OSError("no file")


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_an_interrupt_while_the_program_loads_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    at_start.told(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "\ninterrupted\n"
    at_start.told(ValueError, ValueError("a fault"), None)
    assert "ValueError: a fault" in capsys.readouterr().err


def test_a_command_ends_with_the_reason() -> None:
    disk = Disk()
    output = Output(disk)
    output.write("a\n")
    output.flush()
    disk.full = True
    with pytest.raises(OutputError, match="standard output cannot be written: No space left on device"):
        output.flush()
    with pytest.raises(OutputError):
        output.write("b\n")
    assert output.spoils_success and disk.getvalue() == "a\n"


def test_a_workload_goes_on_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk()
    output = Output(disk)
    output.keep_going("the run goes on", log=False)
    disk.full = True
    output.flush()
    disk.full = False
    output.write("lost for good\n")
    output.end()
    assert told(capsys) == ["standard output cannot be written: No space left on device; the run goes on"]
    assert output.spoils_success and disk.getvalue() == ""


def test_a_log_goes_on_when_there_is_room_again(capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk()
    output = Output(disk)
    output.keep_going("the log is lost", log=True)
    disk.full = True
    output.flush()
    output.flush()
    disk.full = False
    output.write("back\n")
    output.flush()
    output.end()
    assert len(told(capsys)) == 1
    assert not output.spoils_success and disk.getvalue() == "back\n"


def test_it_looks_like_the_stream_and_hides_what_is_not_guarded() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    output = Output(stream)
    assert (output.encoding, output.isatty()) == ("ascii", False)
    assert not hasattr(output, "buffer")
    assert cast(TextIO, output).writable()


HOSTILE = "a\x1b[2Jb\x9bc\rd\x7f\u202ee\tf\n"
SHOWN = "a\\x1b[2Jb\\x9bc\\rd\\x7f\\u202ee\tf\n"


def test_control_characters_reach_no_stream_but_as_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which `prepare` replaces
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    prepare()
    sys.stdout.write(HOSTILE)
    sys.stderr.write(HOSTILE)
    assert capsys.readouterr() == (SHOWN, SHOWN)
    table = Table(box=None)
    table.add_column(HOSTILE.strip())
    table.add_row(HOSTILE.strip())
    show.console().print(table, HOSTILE, style="bold")
    out, _ = capsys.readouterr()
    assert not set("\x1b\x9b\r\x7f\u202e") & set(out) and "a\\x1b[2Jb\\x9bc" in out


def test_a_line_of_json_keeps_its_value_and_steers_no_terminal() -> None:
    line = json_line({HOSTILE: HOSTILE})
    assert json.loads(line) == {HOSTILE: HOSTILE} and not set("\x1b\x9b\r\x7f\u202e") & set(line)
