"""How a process ended, in words. `code` is its exit code, or the negative number of the signal that killed it."""

import signal

_HINTS = {"SIGSEGV": " (segmentation fault)", "SIGKILL": " (out of memory?)", "SIGABRT": " (abort)"}


def ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {_name(code)}"


def exit_text(code: int) -> str:
    """Return the ending, with the usual cause of a signal."""
    return ending(code) + _HINTS.get(_name(code), "")


def how_ended(code: int) -> str:
    """Return the ending as a predicate."""
    return f"exited with {code}" if code >= 0 else f"was killed by {_name(code)}"


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)
