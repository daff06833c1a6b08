"""Boundary between the program and its user: an error becomes one readable message and an exit code, never a traceback.

Exit codes: 0 success; 1 the work itself failed, or something it needs is missing; 2 configuration, input or usage; 130
interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import typer

from rollout.cli.descriptors import raise_open_files
from rollout.cli.malloc import tune_malloc
from rollout.cli.streams import Output, OutputError, json_line, prepare
from rollout.config.visible import visible
from rollout.model.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    RolloutError,
    SchemaVersionError,
    StateError,
    UsageError,
)
from rollout.model.problems import faults_of

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_USAGE = (UsageError, ConfigError, InputError, NotFoundError, ConflictError, StateError, AuthError, SchemaVersionError)


def debugging() -> bool:
    """Return whether ROLLOUT_DEBUG=1 asks for tracebacks and debug logs on standard error."""
    return os.environ.get("ROLLOUT_DEBUG", "") not in ("", "0")


def exit_code_of(error: RolloutError) -> int:
    return USAGE if isinstance(error, _USAGE) else FAILED


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a command-line program to its end and exit. Every program of the product starts here."""
    gc.freeze()  # what was imported stays: no collection looks through it, nor does the one at the end
    output = prepare()
    tune_malloc()
    raise_open_files()
    code = _run(lambda: _ran(app))
    code = _run(lambda: _ended(output, code))
    gc.freeze()  # collecting all of it at the exit takes longer than many a command
    sys.exit(code)


def begin_logging() -> None:
    """Configure logs for people, on standard error."""
    from rollout.config.logging import configure  # brings structlog and pydantic, which help needs not
    from rollout.config.settings import LoggingSection

    settings = LoggingSection(level="debug" if debugging() else "warning", format="console")
    configure(settings, stream=cast(TextIO, _Stderr()))


class _Stderr:
    """Standard error at the time of each write: a program that calls a command may have replaced it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def _run(step: Callable[[], int]) -> int:
    """Return the exit code of `step`, or the code of its error, after showing the error."""
    try:
        return step()
    except RolloutError as error:
        show(error)
        return exit_code_of(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    except UnicodeEncodeError as error:
        # Of a name that is given to the system: what is printed has escapes.
        shown = error.object[:200].encode("ascii", "backslashreplace").decode()
        show(
            ConfigError(f"the locale of this process has no letters for '{shown}': set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
        )
        return USAGE
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a person must not meet a bare traceback
        if debugging():
            traceback.print_exc()
        _show_unexpected(error)
        return FAILED


def _ran(app: Callable[[], Any]) -> int:
    try:
        code = app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED if ended.code else OK
    return code if isinstance(code, int) else OK


def _ended(output: Output, code: int) -> int:
    """Return `code`, or a failure if part of the requested output could not be printed."""
    try:
        output.end()
    except OutputError:
        if code == OK:
            raise  # else it has been said, or something worse has
    return FAILED if code == OK and output.spoils_success else code


def _redacted(text: str) -> str:
    from rollout.config.logging import redact_text  # as above

    return redact_text(text)


def show(error: RolloutError) -> None:
    """Print `error [code]: message` on standard error.

    With --json, also print `{"error": {code, message, faults}}` on standard output; `faults` lists each fault. Nothing
    is printed if the error is that the reader of standard output has gone.
    """
    if isinstance(error, OutputError) and error.reader_gone and not debugging():
        return
    message = _redacted(error.message)
    if debugging():
        traceback.print_exception(error)
    if "--json" in sys.argv and not isinstance(error, OutputError):
        with suppress(OutputError):
            told = {"code": error.code, "message": message, "faults": faults_of(message)}
            sys.stdout.write(json_line({"event": "error", "error": told}))
            sys.stdout.flush()
    sys.stderr.write(f"error [{error.code}]: {visible(message)}\n")


def _show_unexpected(error: Exception) -> None:
    path = Path(tempfile.gettempdir()) / f"rollout-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = _redacted("".join(traceback.format_exception(error)))
    try:
        path.touch(mode=0o600)
        path.write_text(f"{' '.join(sys.argv)}\n{text}", "utf-8")
        where = f"the traceback is in {path}"
    except OSError:
        where = "ROLLOUT_DEBUG=1 shows the traceback"
    brief = _redacted(f"{type(error).__name__}: {error}")[:500]
    sys.stderr.write(
        f"error [{RolloutError.code}]: this is a fault of the program, not of your input: {brief}\n{where}; please "
        "report it\n"
    )
