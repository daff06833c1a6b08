"""What the most common errors look like to those who meet them: a text that a person can read from end to end.

`REWRITE_GOLDEN=1 pytest tests/acceptance/test_golden_errors.py` writes what is printed now.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, free_port

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "errors.txt"
NOBODY = "10.0.0.1:50059"
ULID = re.compile(r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes") as found:
        found.add_coordinator().wait_event("coordinator_ready")
        yield found


def test_the_most_common_errors(cli: Cli, cluster: Cluster) -> None:
    told = GOLDEN.read_text()
    head, *scenes = re.split(r"(?m)^(?=# )", told)
    operator = cluster.operator()[-1]
    names = {
        "10.0.0.1:50051": cluster.addresses[0],
        "10.0.0.1:50052": cluster.join_address,
        NOBODY: f"127.0.0.1:{free_port()}",
        "TOKEN": cluster.token("operator"),
    }
    ids = {typed: typed for line in re.findall(r"(?m)^\$ .*", told) for typed in ULID.findall(line)}
    typist = Typist(cli, names, ids)
    happened = head
    for number, scene in enumerate(scenes):
        where = cli.directory / str(number)
        shutil.copytree(operator, where / "data" / "tls") if "10.0.0.1" in scene else where.mkdir()
        for name, text in re.findall(r"(?ms)^\$ cat (\S+)\n(.*?)\n(?=\$ |\n*\Z)", head):
            (where / name).write_text(f"{text}\n")
        if NOBODY in scene:
            joined = where / "data" / "tls" / "join.json"
            joined.write_text(joined.read_text().replace(cluster.addresses[0], names[NOBODY]))
        title, *typed = re.findall(r"(?m)^[#$] .*", scene)
        happened += f"{title}\n" + "".join(f"{line}\n{typist.types(line[2:], where)}" for line in typed) + "\n"
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(happened)
    else:
        assert happened == told


@dataclass
class Typist:
    cli: Cli
    names: dict[str, str]
    """What the text has in the place of an address or a token."""
    ids: dict[str, str]

    def types(self, typed: str, where: Path) -> str:
        """What it prints, as the text has it."""
        program, *args = shlex.split(self._real(typed))
        if program != "rollout":
            return subprocess.check_output(["bash", "-c", typed], cwd=where, text=True)
        if args[-1] == "&":
            Cli(where, self._env(where), self.cli.started).start(*args[:-1])
            until(lambda: (where / "out" / "run-id").exists(), "the run to begin")
            return ""
        found = Cli(where, self._env(where), self.cli.started).run(*args, together=True)
        printed = found.out.replace(str(where), "/home/ada").replace(str(self.cli.directory), "/home/ada")
        return f"{self._shown(printed)}(exit code {found.code})\n"

    def _env(self, where: Path) -> dict[str, str]:
        return self.cli.env | {"XDG_CONFIG_HOME": str(where / ".config"), "XDG_STATE_HOME": str(where / ".state")}

    def _real(self, typed: str) -> str:
        for shown, real in self.names.items():
            typed = typed.replace(shown, real)
        return typed

    def _shown(self, printed: str) -> str:
        for shown, real in self.names.items():
            printed = printed.replace(real, shown)
        runs = [path.read_text().strip() for path in self.cli.directory.glob("*/out/run-id")]
        for found in [*ULID.findall(printed), *runs]:
            self.ids.setdefault(found, f"01M8DRKDWQHJH10XCQ7C0EKZ{len(self.ids):02}")
        for found, shown in self.ids.items():
            printed = printed.replace(found, shown).replace(found[-8:], shown[-8:])
        printed = printed.replace(f" on {socket.gethostname()}: ", " on head-1: ")
        return re.sub(r"(pid|[Tt]ried for|again for) \d+", r"\1 15", printed)
