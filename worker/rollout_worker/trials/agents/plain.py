"""Agents without a model: the job's bash, and one that does nothing."""

from __future__ import annotations

from rollout_worker.sandboxes.port import Finished
from rollout_worker.trials.port import Agent, Place, TrialFault

_BLANKS = "[! \t]*"
# As the kernel reads the line (execve(2)): a program and one argument. A script needs no executable bit here, and one
# that wants bash runs with sh where there is none.
_RUN = f"""
IFS= read -r line < "$0"
case $line in '#!'*)
  line=${{line#??}}
  line=${{line#"${{line%%{_BLANKS}}}"}}
  program=${{line%%[ \t]*}}
  line=${{line#"$program"}}
  line=${{line#"${{line%%{_BLANKS}}}"}}
  line=${{line%"${{line##*[! \t]}}"}}
  if [ -x "$program" ]; then exec "$program" ${{line:+"$line"}} "$0"; fi
  case $program in */bash*|*/sh*) ;; *) echo "$0: there is no $program to run it" >&2; exit 127;; esac
esac
if command -v bash >/dev/null 2>&1; then exec bash "$0"; else exec sh "$0"; fi
"""
_SHOWN = 500


class BashAgent(Agent):
    """Runs the job's `install` and `execute` with bash, each from a file in the sandbox."""

    version = ""

    def __init__(self, install: str, execute: str) -> None:
        self._install = install
        self._execute = execute

    async def install(self, place: Place) -> None:
        if self._install.strip():
            await _run(place, self._install, "install.sh", "agent_install_failed")

    async def execute(self, place: Place, instruction: str) -> None:
        await _run(place, self._execute, "execute.sh", "agent_execution_failed")


class NopAgent(Agent):
    version = ""

    async def install(self, place: Place) -> None: ...

    async def execute(self, place: Place, instruction: str) -> None: ...


async def _run(place: Place, text: str, name: str, fault: str) -> None:
    path = f"/tmp/rollout-{name}"
    await place.sandbox.write_file(path, text.encode(), mode=0o755)
    check(await place.run(script(path)), name, fault)


def script(path: str) -> list[str]:
    """Return the command that runs a script: with the interpreter in its first line after `#!`, else with bash, else
    with sh."""
    return ["/bin/sh", "-c", _RUN, path]


def check(finished: Finished, what: str, fault: str) -> None:
    """Raise a TrialFault of the type `fault` unless it ended with exit code 0."""
    if finished.ok:
        return
    how = (
        f"ended with exit code {finished.exit_code}"
        if finished.how == "exited"
        else "ran out of time"
        if finished.how == "timed_out"
        else f"was ended by signal {finished.signal}"
    )
    limit = f" (the sandbox's {finished.limit} limit was hit)" if finished.limit else ""
    last = last_words(finished, _SHOWN)
    raise TrialFault(fault, f"{what} {how}{limit}" + (f": {last}" if last else ""))


def last_words(finished: Finished, most: int) -> str:
    """Return the last non-empty line of stderr, or else of stdout; if there are several, followed by the last `most`
    characters as printed. Where one line is shown, as in tables, it is the one that says why."""
    last = finished.stderr.text()[-most:].strip() or finished.stdout.text()[-most:].strip()
    lines = last.splitlines()
    return f"{lines[-1].strip()}\n{last}" if len(lines) > 1 else last
