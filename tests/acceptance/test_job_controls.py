"""Agents that mean harm: what each trial comes to, exactly, and what is left on the host afterwards."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from acceptance_cli import Cli, until
from job_attacks import ATTACKS
from job_rig import PROVIDERS, Found, sandbox_processes, trials, write_job, write_task

SECRET = f"CANARY_SECRET={secrets.token_hex(16)}"


@dataclass
class Host:
    """What is on this host, for agents to reach, read and kill."""

    directory: Path
    listeners: list[socket.socket]
    process: subprocess.Popen[bytes]

    @property
    def file(self) -> Path:
        return self.directory / "canary"

    def words(self) -> dict[str, str]:
        return {
            "CANARY_FILE": str(self.file),
            "CANARY": str(self.process.pid),
            "PORT": str(self.listeners[0].getsockname()[1]),
            "ABSTRACT": self.listeners[1].getsockname()[1:].decode(),
        }

    def connections(self) -> int:
        """How many came until now."""
        count = 0
        for listener in self.listeners:
            while True:
                try:
                    listener.accept()[0].close()
                except BlockingIOError:
                    break
                count += 1
        return count


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, socket.AF_UNIX)]
        for listener, address in zip(listeners, (("127.0.0.1", 0), f"\0{secrets.token_hex(8)}"), strict=True):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        directory = tmp_path / "host"
        directory.mkdir()
        (directory / "canary").write_text(SECRET)
        name, _, value = SECRET.partition("=")
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = stack.enter_context(subprocess.Popen(sleeper, env={name: value}))
        stack.callback(process.kill)
        yield Host(directory, listeners, process)


@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_agents_that_mean_harm_come_to(cli: Cli, host: Host, provider: str) -> None:
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    attacks = {name: attack for name, attack in ATTACKS.items() if attack.only in (None, provider)}
    for name, attack in attacks.items():
        agent = attack.agent
        for word, value in host.words().items():
            agent = agent.replace(word, value)
        files = {path.replace("/", "__"): text for path, text in attack.files.items()}
        write_task(cli.directory / "attacks" / name, agent, attack.test, attack.toml, **files)
    job = write_job(cli, environment={"type": provider}, datasets=[{"path": "attacks"}])
    done = cli.run("job", "run", job, timeout=120)
    assert done.code == 0, done
    found = {name.split("/")[1]: trial for name, trial in trials(cli.directory / "jobs" / "job")}
    wrong = {
        name: f"{found[name].outcome} and not {(attack.reward, attack.error)}\n{found[name]}"
        for name, attack in attacks.items()
        if found[name].outcome != (attack.reward, attack.error)
    }
    assert not wrong, "\n\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert host.process.poll() is None, "an agent killed a process of the host"
    assert host.connections() == 0
    if provider == "bubblewrap":
        assert host.file.read_text() == SECRET
        nothing_of_the_host_was_kept(found["escapes-to-the-hosts-files"])
    until(lambda: not sandbox_processes(cli), "every process of a sandbox to end", timeout=15)


def nothing_of_the_host_was_kept(trial: Found) -> None:
    kept = [path for path in trial.directory.rglob("*") if path.is_file()]
    assert [path for path in kept if SECRET in path.read_text(errors="replace")] == []
    assert [path for path in trial.directory.rglob("*") if path.is_symlink() and path.readlink().is_absolute()] == []
