"""The conformance suite over the providers of this host, as whoever runs the tests, and as a user without privileges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rollout_worker.sandboxes import conformance
from rollout_worker.sandboxes.conformance import CASES, PROVIDERS, Bench, Case, local_bench
from rollout_worker.sandboxes.errors import SandboxRefusedError

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
NOBODY = 65534

# What is the same code for all of them is run over the most isolated one.
PARTS = {
    "bubblewrap": {"commands", "deadlines", "files", "isolation", "life", "limits"},
    "process": {"isolation", "life", "limits"},
    "process-without-namespaces": {"deadlines", "isolation", "life", "limits"},
}
WITHOUT_PRIVILEGES = {case.name for case in CASES if case.part in ("isolation", "limits")}


class Benches:
    """One bench a provider, opened when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, Bench | str] = {}

    async def get(self, name: str) -> Bench:
        if name not in self._found:
            provider = PROVIDERS[name](self._directory / name)
            await provider.open()
            try:
                await provider.probe()
            except SandboxRefusedError as error:
                await provider.close()
                self._found[name] = str(error)
            else:
                large = 200 if name == "bubblewrap" else 8
                self._found[name] = local_bench(provider, self._directory / "scratch", large=large * MIB)
        found = self._found[name]
        if isinstance(found, str):
            pytest.skip(found)
        return found

    async def close(self) -> None:
        """Nothing may be left then."""
        for name, bench in self._found.items():
            if isinstance(bench, Bench):
                await bench.forget()
                left = [p.name for part in ("boxes", "claims") for p in (self._directory / name / part).iterdir()]
                await bench.provider.close()
                assert left == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches() -> AsyncIterator[Benches]:
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as directory:
        found = Benches(Path(directory))
        yield found
        await found.close()


@pytest.mark.parametrize(
    ("provider", "case"),
    [
        pytest.param(provider, case, id=f"{provider}-{case.name}")
        for provider, parts in PARTS.items()
        for case in CASES
        if case.part in parts
    ],
)
async def test_conformance(benches: Benches, provider: str, case: Case) -> None:
    bench = await benches.get(provider)
    try:
        await case.run(bench)
    except conformance.NotApplicableError as error:
        pytest.skip(str(error))


# A Python that was started by another name than it has for this user cannot start itself again.
TRIAL = "import subprocess, sys, rollout_worker.sandboxes.conformance; subprocess.run([sys.executable, '-c', ''], check=True)"


def python_for_nobody() -> list[str]:
    """A Python that a user without privileges can run, with our packages; skips where there is none."""
    if os.geteuid() != 0:
        pytest.skip("the tests run without privileges already")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv (util-linux) to give privileges up with")
    drop = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    for program in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if program is None:
            continue
        command = [*drop, program]
        tried = subprocess.run([*command, "-c", TRIAL], env=environment(), capture_output=True)
        if tried.returncode == 0:
            return command
    pytest.skip("no Python on this machine can be run with our packages without privileges")


def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HOME": "/nonexistent"}


@pytest.mark.parametrize("provider", ["bubblewrap", "process"])
async def test_conformance_without_privileges(provider: str) -> None:
    command = python_for_nobody()
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as directory:
        os.chown(directory, NOBODY, NOBODY)
        command += ["-m", "rollout_worker.sandboxes.conformance", provider, "--state", directory, "--json"]
        command += ["--large-mb", "1", *(f"--case={name}" for name in sorted(WITHOUT_PRIVILEGES))]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
        if "[sandbox_refused]" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        outcomes = json.loads(done.stdout.splitlines()[-1]) if done.stdout else []
    assert {o["name"] for o in outcomes} == WITHOUT_PRIVILEGES, done.stderr
    assert [o for o in outcomes if o["outcome"] == "failed"] == []
    assert done.returncode == 0
    device = Path("/dev/net/tun")
    if device.exists() and device.stat().st_mode & 0o006 == 0o006:  # anybody may lead out of a network of their own
        closed = "a_public_network_reaches_neither_the_host_nor_credentials"
        assert [o["outcome"] for o in outcomes if o["name"] == closed] == ["passed"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nobody"], 'provider: unknown provider "nobody"; known: bubblewrap, '),
        (["no.such:thing"], "provider: no.such:thing cannot be loaded: No module named 'no'"),
        (["process", "--case", "exit_code_zer"], "there is no case exit_code_zer; did you mean exit_code_zero?"),
    ],
)
async def test_the_program_refuses_what_it_does_not_know(arguments: list[str], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollout_worker.sandboxes.conformance", *arguments, "--state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []
