"""Jobs as a user writes them: tasks whose instruction is what the agent does, and the files that trials leave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from acceptance_cli import Cli

PROVIDERS = ("process", "bubblewrap")
SCRIPT = {
    "name": "script",
    "install": "if [ -e /app/install.sh ]; then bash /app/install.sh; fi",
    "execute": "bash /tmp/instruction.md",
}
"""An agent that does what the instruction says: each task brings its agent's behaviour along."""
MARK = "ROLLOUT_TEST_OF"
"""In the environment of every process in a sandbox of these jobs: by it they are found among those of others."""
DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . /app\n"
SMALL = "[environment]\ncpus = 0.25\nmemory_mb = 256\nstorage_mb = 100\n"
REWARD_1 = "echo 1 > /logs/verifier/reward.txt"


def write_task(
    directory: Path,
    instruction: str = "true",
    test: str = REWARD_1,
    toml: str = SMALL,
    *,
    dockerfile: str | None = DOCKERFILE,
    **files: str,
) -> Path:
    """`files`: more of them, `a__b` is a/b; a `_sh` at the end is `.sh`."""
    wanted = {"task.toml": toml, "instruction.md": f"{instruction}\n", "tests/test.sh": f"{test}\n"}
    wanted |= {} if dockerfile is None else {"environment/Dockerfile": dockerfile}
    wanted |= {name.replace("__", "/").replace("_sh", ".sh"): text for name, text in files.items()}
    for name, text in wanted.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def write_job(cli: Cli, name: str = "job.yaml", /, **keys: Any) -> str:
    """A job of the agent `script` under `process`, one try at each trial; `keys` are laid over it."""
    environment = {"type": "process", "provider_config": {"image": "host"}, "env": {MARK: str(cli.directory)}}
    environment |= keys.pop("environment", {})
    values: dict[str, Any] = {
        "name": "job",
        "environment": environment,
        "retry": {"max_attempts": 1},
        "agents": [SCRIPT],
        "infrastructure": {"min_success_rate": 0},
    }
    path = cli.directory / name
    path.write_text(json.dumps({**values, **keys}, indent=1))
    return str(path)


@dataclass(frozen=True)
class Found:
    """A trial's directory."""

    directory: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    @property
    def outcome(self) -> tuple[float | None, str | None]:
        """(reward, type of error)."""
        error = self.result["error"]
        return self.result["reward"], error and error["type"]

    def text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    def __str__(self) -> str:
        """All that may say why, for a test that fails."""
        outputs = {name: self.text(name) for name in sorted(OUTPUTS)}
        return "\n".join([json.dumps(self.result, indent=1), *(f"{n}:\n{t}" for n, t in outputs.items() if t)])


OUTPUTS = {f"{phase}/{stream}.txt" for phase in ("setup", "agent", "verifier") for stream in ("stdout", "stderr")}


def trials(job: Path) -> Iterator[tuple[str, Found]]:
    """(dataset/task/agent/attempt, trial) of each that has a result."""
    for path in sorted(job.glob("*/*/*/*/result.json")):
        yield str(path.parent.relative_to(job)), Found(path.parent)


def outcomes(job: Path) -> dict[str, tuple[float | None, str | None]]:
    return {name: found.outcome for name, found in trials(job)}


def job_result(job: Path) -> dict[str, Any]:
    return json.loads((job / "result.json").read_text())


def counts(job: Path) -> Mapping[str, int]:
    """Each kind of trial, as the job's result has it."""
    found = job_result(job)
    return {kind: found[f"{kind}_trials"] for kind in ("total", "completed", "failed", "skipped")}


def sandbox_processes(cli: Cli) -> dict[int, str]:
    """Every process on this host that was started in a sandbox of a job of `cli`: (id, command)."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(cli.directory):
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
