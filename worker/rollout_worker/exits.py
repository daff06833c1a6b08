"""How a process ended, in words."""

import signal

_HINTS = {"SIGSEGV": " (segmentation fault)", "SIGKILL": " (out of memory?)", "SIGABRT": " (abort)"}


def exit_text(code: int) -> str:
    """`code`: as of subprocess."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"signal {name}{_HINTS.get(name, '')}"
