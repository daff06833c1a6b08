"""Between the program and the person: errors become one readable message and an exit code, never a traceback.

Exit codes: 0 success; 1 the work itself failed, or something it needs is not there; 2 configuration, input or usage;
130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rollout.cli.descriptors import raise_open_files
from rollout.cli.malloc import tune_malloc
from rollout.config.logging import configure, redact_text
from rollout.config.settings import LoggingSection
from rollout.model.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    RolloutError,
    SchemaVersionError,
    StateError,
)

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_USAGE = (ConfigError, InputError, NotFoundError, ConflictError, StateError, AuthError, SchemaVersionError)


def debugging() -> bool:
    """ROLLOUT_DEBUG=1: tracebacks and debug logs on standard error."""
    return os.environ.get("ROLLOUT_DEBUG", "") not in ("", "0")


def exit_code_of(error: RolloutError) -> int:
    return USAGE if isinstance(error, _USAGE) else FAILED


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a command-line program to its end and exit. Every program of the product starts through this."""
    tune_malloc()
    raise_open_files()
    configure(LoggingSection(level="debug" if debugging() else "warning", format="console"), stream=sys.stderr)
    try:
        app()
    except RolloutError as error:
        show(error)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing more to say, also not while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a person must not meet a bare traceback
        if debugging():
            traceback.print_exc()
        _show_unexpected(error)
        sys.exit(FAILED)
    sys.exit(OK)


def show(error: RolloutError) -> None:
    """`error: message [code]` on standard error; with --json also `{"error": {...}}` on standard output."""
    message = redact_text(error.message)
    if debugging():
        traceback.print_exception(error)
    if "--json" in sys.argv:
        line = json.dumps({"event": "error", "error": {"code": error.code, "message": message}}, ensure_ascii=False)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stderr.write(f"error: {message} [{error.code}]\n")


def _show_unexpected(error: Exception) -> None:
    path = Path(tempfile.gettempdir()) / f"rollout-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = redact_text("".join(traceback.format_exception(error)))
    try:
        path.touch(mode=0o600)
        path.write_text(f"{' '.join(sys.argv)}\n{text}", "utf-8")
        where = f"the traceback is in {path}"
    except OSError:
        where = "ROLLOUT_DEBUG=1 shows the traceback"
    brief = redact_text(f"{type(error).__name__}: {error}")[:500]
    sys.stderr.write(
        f"error: this is a fault of the program, not of your input: {brief}\n  {where}; please report it\n"
    )
