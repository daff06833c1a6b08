"""The CLI as a user runs it: subprocesses, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prefork
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

ROLLOUT = str(Path(sys.executable).with_name("rollout"))


@dataclass
class Finished:
    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def event(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == name)


@dataclass
class Cli:
    """Commands in a directory of their own."""

    directory: Path
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *args: str, program: str = ROLLOUT, together: bool = False) -> subprocess.Popen[str]:
        """`together`: standard error goes where standard output goes, as in a terminal."""
        process = prefork.Popen(
            [program, *args],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if together else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=os.environ | self.env,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *args: str, timeout: float = 90, together: bool = False) -> Finished:
        process = self.start(*args, together=together)
        out, err = process.communicate(timeout=timeout)
        err = err or ""
        assert "Traceback" not in out + err, out + err
        return Finished(process.returncode, out, err)

    def rows(self, count: int, name: str = "in.jsonl") -> Path:
        path = self.directory / name
        path.write_text("".join(json.dumps({"prompt": f"row {n}", "n": n}) + "\n" for n in range(count)))
        return path

    def config(self, name: str = "batch.toml", /, **sections: dict[str, Any] | None) -> Path:
        """A batch on the mock backend; `sections` are laid over it, and None leaves one out."""
        values: dict[str, dict[str, Any]] = {
            "model": {"uri": "mock"},
            "backend": {"kind": "mock"},
            "input": {"glob": "in.jsonl"},
            "output": {"dir": "out"},
        }
        for section, keys in sections.items():
            values[section] = values.get(section, {}) | (keys or {})
        for section in [section for section, keys in sections.items() if keys is None]:
            del values[section]
        lines: list[str] = []
        for section, keys in values.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
        path = self.directory / name
        path.write_text("\n".join(lines) + "\n")
        return path

    def completions(self, output: str = "out") -> list[dict[str, Any]]:
        """The whole lines: of a file that is being written, or whose writer was killed, the last may be a part."""
        path = self.directory / output / "completions.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_rows(self, count: int, process: subprocess.Popen[str], output: str = "out") -> None:
        until(lambda: len(self.completions(output)) >= count or process.poll() is not None, f"{count} rows")
        assert process.poll() is None, process.communicate()

    def left_behind(self) -> list[str]:
        """Processes that still work in this directory."""
        found: list[str] = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            command = " ".join(process.info["cmdline"] or [])
            if str(self.directory) in command or process.info["cwd"] == str(self.directory):
                found.append(f"{process.pid} {command}")
        return found


def until(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Other processes are watched through files and the process table: there is nothing to await."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.05)
