"""Ctrl-C while a program is still being imported, which takes a moment on a busy machine. Imported first.

It prints one word and no traceback. Python then ends the process as the signal would have: exit code 130 in a shell.
"""

from __future__ import annotations

import gc
import sys
from types import TracebackType


def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("\ninterrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = told
gc.set_threshold(10_000)  # importing makes many objects and no garbage: looking for it took a fifth of the time
