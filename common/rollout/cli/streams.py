"""Standard output and standard error of every program, whatever they are connected to, in any locale.

A stream that is closed, full or not read loses its lines and nothing else: the write raises `OutputError`, or nothing
after `keep_going`. Characters that the stream's encoding lacks, and control characters, are printed as escapes: a text
from a worker or a function must not control a terminal.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rollout.config.visible import visible, visible_json
from rollout.model.errors import RolloutError

_ESCAPES = "rollout_escapes"


class OutputError(RolloutError):
    """Standard output cannot be written. `reader_gone` says that its reader, such as `| head`, has closed it."""

    code = "output_unwritable"
    reader_gone = False


class Output:
    """Replacement for `sys.stdout`. It has no `buffer`: writes that bypass it are not guarded."""

    def __init__(self, stream: TextIO, lost: OSError | None = None) -> None:
        self._stream = stream
        self._closed = lost is not None
        self._lost = lost
        self._meanwhile: str | None = None
        self._log = False
        self._told = False

    @property
    def spoils_success(self) -> bool:
        """Whether requested output could not be written."""
        return self._lost is not None and not self._log

    def keep_going(self, meanwhile: str, *, log: bool) -> None:
        """Continue without output after a failure; say so once on standard error, with `meanwhile`.

        `log` says that the output is a log: it resumes when there is space again and does not affect the exit code.
        """
        self._meanwhile, self._log = meanwhile, log

    def write(self, text: str) -> int:
        return self.write_styled(visible(text))

    def write_styled(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text), len(text))

    @property
    def styled(self) -> TextIO:
        """Stream for styled text, as `rollout.config.visible.styled`."""
        return cast(TextIO, _Styled(self))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def end(self) -> None:
        """Flush for the last time. What stays in the buffer must not fail again when the interpreter exits."""
        try:
            self.flush()
        finally:
            self._meanwhile, self._told = "", True  # the interpreter flushes once more
            if self._lost is not None:
                self._give_up()

    def _try(self, function: Callable[[], Any], instead: Any) -> Any:
        if not self._closed:
            try:
                return function()
            except OSError as error:
                self._lost = error
                if not self._log:
                    self._give_up()
        assert self._lost is not None
        problem = OutputError(f"standard output cannot be written: {self._lost.strerror or self._lost}")
        problem.reader_gone = self._lost.errno == errno.EPIPE
        if self._meanwhile is None:
            raise problem
        if not self._told:
            self._told = True
            with suppress(OSError):
                sys.stderr.write(f"{problem.message}; {self._meanwhile}\n")
        return instead

    def _give_up(self) -> None:
        self._closed = True
        with suppress(OSError, ValueError):
            _to_null(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)


class _Styled:
    """View of `Output` that keeps terminal escapes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.write = output.write_styled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


class _Escaping:
    """Replacement for `sys.stderr`."""

    def __init__(self, stream: TextIO) -> None:
        self.styled = stream

    def write(self, text: str) -> int:
        return self.styled.write(visible(text))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


def prepare() -> Output:
    """Make the standard streams usable and return `sys.stdout`. Call it before anything is opened or printed."""
    codecs.register_error(_ESCAPES, _escape)
    for fd in range(3):
        # Else the next file that is opened takes the number, and gets what is printed.
        try:
            os.fstat(fd)
        except OSError:
            _to_null(fd)
    closed = sys.stdout is None  # pyright: ignore[reportUnnecessaryComparison] - that is what `>&-` makes of it
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # pyright: ignore[reportUnnecessaryComparison]
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the program
        with suppress(AttributeError):  # a test's own
            getattr(sys, name).reconfigure(errors=_ESCAPES)
    output = Output(sys.stdout, OSError(errno.EBADF, os.strerror(errno.EBADF)) if closed else None)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, _Escaping(sys.stderr))
    return output


def keep_going(meanwhile: str, *, log: bool = False) -> None:
    """Continue without output after a failure: this program's work matters more. See `Output.keep_going`."""
    output: Any = sys.stdout
    if isinstance(output, Output):
        output.keep_going(meanwhile, log=log)


def json_line(value: Any) -> str:
    """Return `value` as a line of JSON that standard output can encode; other characters are JSON escapes."""
    text = visible_json(json.dumps(value, ensure_ascii=False))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text + "\n"


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    r"""Escape a byte of a file name that is not text as \xff, and other characters as \xe9, \u20ac, \U0001f600."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters: list[str] = []
    for letter in error.object[error.start : error.end]:
        code = ord(letter)
        letters.append(
            f"\\x{code - 0xDC00:02x}"
            if 0xDC80 <= code <= 0xDCFF
            else letter.encode("ascii", "backslashreplace").decode()
        )
    return "".join(letters), error.end
