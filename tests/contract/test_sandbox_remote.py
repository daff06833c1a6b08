"""Providers that reach their sandboxes by exec only: `command`, `kubernetes` and `modal`, over boxes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kubernetes_server import CAN_RUN, WHY_NOT, FakeKubernetes
from modal_client import FakeModal, exception
from rollout_worker.sandboxes import conformance
from rollout_worker.sandboxes.command import CommandProvider
from rollout_worker.sandboxes.conformance import CASES, Bench, Case
from rollout_worker.sandboxes.errors import (
    ImagePullError,
    SandboxCreateError,
    SandboxGoneError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.kubernetes import KubernetesProvider
from rollout_worker.sandboxes.modal import USD_PER_CORE_HOUR, USD_PER_GIB_HOUR, ModalProvider, ModalSettings
from rollout_worker.sandboxes.port import Capabilities, Image, Limits, Network, Sandbox, Spec
from rollout_worker.sandboxes.providers import open_provider

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_boxes = pytest.mark.skipif(not CAN_RUN, reason=WHY_NOT)

SMALL = Spec(network=Network("public"), limits=Limits(0.1, 128, 128, 64))


def of_directories(top: Path) -> dict[str, Any]:
    """Templates whose sandboxes are directories of this machine."""
    top.mkdir(exist_ok=True)
    return {
        "create_command": f"mktemp -d -p {top}",
        "exec_command": "cd {sandbox_id} && sh -c {command}",
        "destroy_command": "rm -rf {sandbox_id}",
    }


def of_boxes(top: Path) -> dict[str, Any]:
    """Templates whose sandboxes have namespaces of their own."""
    top.mkdir(exist_ok=True)
    helper = f"PYTHONPATH={Path(__file__).parent} {sys.executable} -c"
    make = "import sys, kubernetes_server as k; from pathlib import Path; print(k.start_box(Path(sys.argv[1]), closed=True))"
    inside = "setpriv --bounding-set=-sys_admin,-mknod,-sys_ptrace --inh-caps=-all env HOME=/root"
    return {
        "create_command": f"d=$(mktemp -d -p {top}) && {helper} '{make}' $d > $d/pid && echo $d",
        "exec_command": "exec nsenter -t $(cat {sandbox_id}/pid) -m -p -n -i -r -w " + inside + " sh -c {command}",
        "destroy_command": "kill -9 $(cat {sandbox_id}/pid) 2> /dev/null; rm -rf {sandbox_id}",
    }


# The suite


@dataclass
class Benches:
    """One of each provider, opened when it is first needed."""

    top: Path
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    found: dict[str, Bench] = field(default_factory=dict)

    async def get(self, name: str) -> Bench:
        if name not in self.found:
            kill: Callable[[Sandbox], None] | None = None
            state = self.top / name
            if name == "kubernetes":
                server = await self.stack.enter_async_context(FakeKubernetes())
                provider: Any = open_provider("kubernetes", state, server.config)
                kill = lambda sandbox: server.evict(sandbox.name)  # noqa: E731
            elif name == "modal":
                client = FakeModal()
                self.stack.callback(client.close)
                provider = ModalProvider(state, ModalSettings(default_image="debian:12"), client)
                kill = lambda sandbox: client.sandboxes[sandbox.name].end(137)  # noqa: E731
            else:
                templates = of_boxes if name == "command-boxes" else of_directories
                provider = open_provider("command", state, templates(self.top / f"{name}-in"))
            await self.stack.enter_async_context(provider)
            bench = Bench(provider, self.top / "scratch", address=None, kill_from_outside=kill, large=8 << 20)
            self.stack.push_async_callback(bench.forget)
            self.found[name] = bench
        return self.found[name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches() -> AsyncIterator[Benches]:
    with tempfile.TemporaryDirectory(prefix="remote-") as directory:
        found = Benches(Path(directory))
        try:
            yield found
        finally:
            await found.stack.aclose()
        claims = [p for name in ("kubernetes", "modal", "command") for p in Path(directory).glob(f"*/{name}/claims/*")]
        assert claims == []


QUICK = {
    "command-boxes": {"a_deadline_ends_daemons"},
    "command-directories": {"a_signal_is_no_exit_code", "a_deadline_ends_what_ignores_sigterm"},
    "kubernetes": {
        "a_deadline_ends_daemons",
        "a_lost_sandbox_is_no_failed_command",
        "destroyed_sandboxes_are_gone",
        "downloads_stay_in_their_target",
        "large_output_goes_to_a_file",
        "output_comes_while_it_runs",
        "uploads_do_not_follow_links_in_the_way",
        "what_cannot_be_read",
    },
    "modal": {"stdin_of_bytes"},
}
"""What is the same code for all is run over one of them; the rest in the slow lane."""
BOXES_LACK = {"what_is_written_in_the_root_stays_there", "keys_of_the_kernel_are_out_of_reach"}
"""The root of the stand-ins' boxes is read-only, and their commands are of one user, whose keys they share."""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(
            name,
            case,
            id=f"{name}-{case.name}",
            marks=[*([] if case.name in quick else [pytest.mark.slow]), *([] if "dir" in name else [needs_boxes])],
        )
        for name, quick in QUICK.items()
        for case in CASES
        if case.name not in BOXES_LACK
    ],
)
async def test_conformance(benches: Benches, name: str, case: Case) -> None:
    try:
        await case.run(await benches.get(name))
    except conformance.NotApplicableError as error:
        pytest.skip(str(error))


# Commands of the user


async def run_one(config: dict[str, Any], tmp_path: Path, command: str, **options: Any) -> Any:
    async with command_provider(tmp_path, config, None) as provider, await provider.create(SMALL) as sandbox:
        return await sandbox.exec(command, **options)


FOUND = Capabilities(
    private_directories=False,
    own_processes=True,
    hides_sandboxes=True,
    hides_host=True,
    writable_root=True,
    users=True,
    roots=frozenset({"host", "image"}),
    networks=frozenset({"none", "public", "allowlist"}),
    limits=dict.fromkeys(("cpus", "memory", "storage", "pids"), "no"),
    mounts=False,
)
"""As if it had been tried out, for tests that are not about that: it takes a second."""


def command_provider(tmp_path: Path, config: dict[str, Any], found: Capabilities | None = FOUND) -> CommandProvider:
    provider = open_provider("command", tmp_path / "state", config)
    assert isinstance(provider, CommandProvider)
    provider._found = found
    return provider


async def test_input_travels_in_the_text_where_exec_takes_none(tmp_path: Path) -> None:
    config = of_directories(tmp_path / "in")
    config["exec_command"] += " < /dev/null"
    data = bytes(range(256)) * 300
    finished = await run_one(config, tmp_path, "cat", stdin=data)
    assert finished.stdout.head == data


async def test_what_exec_prints_beside_does_not_count(tmp_path: Path) -> None:
    config = of_directories(tmp_path / "in")
    config["exec_command"] = f"echo Welcome; {config['exec_command']}; echo Bye; exit 5"
    finished = await run_one(config, tmp_path, "echo x; exit 3")
    assert (finished.exit_code, finished.stdout.text()) == (3, "x\n")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("busybox") is None, reason="there is no busybox")
async def test_busybox_is_enough(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    subprocess.run(["busybox", "--install", "-s", str(programs)], check=True)
    config = of_directories(tmp_path / "in")
    config["exec_command"] = f"cd {{sandbox_id}} && PATH={programs} exec ash -c {{command}}"
    async with command_provider(tmp_path, config) as provider, await provider.create(SMALL) as sandbox:
        source = tmp_path / "source" / ("n" * 120) / "ü"
        source.mkdir(parents=True)
        (source / "file").write_bytes(os.urandom(2 << 20))
        await sandbox.upload(tmp_path / "source", "there")
        await sandbox.download("there", tmp_path / "back")
        again = (tmp_path / "back").joinpath(*source.parts[-2:]) / "file"
        assert again.read_bytes() == (source / "file").read_bytes()
        finished = await sandbox.exec("(setsid sleep 86398 &); echo x; sleep 86398", timeout_s=0.3)
        assert (finished.how, finished.stdout.text()) == ("timed_out", "x\n")
        assert subprocess.run(["pgrep", "-f", "sleep 8639[8]"], capture_output=True).stdout == b""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"create_command": "echo no quota >&2; exit 4"}, "create_command ended with 4: no quota"),
        ({"create_command": "true"}, "create_command printed nothing, where an id was to be"),
        ({"exec_command": "no-such-cli {sandbox_id} {command}"}, "exec_command ended with 127: .*no-such-cli"),
        ({"exec_command": "cd {sandbox_id}; sh -c {command} | sed 's/$/\\r/'"}, "must not give commands a terminal"),
        ({"create_command": "echo {image}"}, "give `default_image` in provider_config"),
    ],
)
async def test_what_does_not_work_is_told(tmp_path: Path, changes: dict[str, str], told: str) -> None:
    config = of_directories(tmp_path / "in") | changes | {"exec_patience_secs": 0}
    async with command_provider(tmp_path, config, None) as provider:
        with pytest.raises(SandboxRefusedError, match=told):
            await provider.probe()


async def test_images_are_prepared_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = of_directories(tmp_path / "in") | {
        "prepare_command": f"echo {{image}} >> {log}; echo building...; echo id-of-{{image}}",
        "create_command": f"d=$(mktemp -d -p {tmp_path / 'in'}); echo {{image_id}} {{cpus}} {{memory_mb}} > $d/told; echo $d",
        "default_image": "a b",
    }
    async with command_provider(tmp_path, config) as provider:
        for image in ("x:1", "x:1"):
            async with await provider.create(Spec(root=Image(image), network=Network("public"))) as sandbox:
                assert (await sandbox.read_file("told")).decode() == "id-of-x:1 1 2048\n"
    assert log.read_text() == "x:1\n"


OWNER = """
import asyncio, json, sys
from pathlib import Path
from rollout_worker.sandboxes.port import Limits, Network, Spec
from rollout_worker.sandboxes.providers import open_provider

async def main():
    async with open_provider(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])) as provider:
        spec = Spec(network=Network("public"), limits=Limits(0.1, 128, 128, 64))
        sandbox = await provider.create(spec)
        print(sandbox.name, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


async def killed_owner(name: str, state: Path, config: dict[str, Any]) -> str:
    """The sandbox that it left behind."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, name, str(state), json.dumps(config), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    found = (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()
    return found


async def test_whoever_comes_next_removes_what_a_killed_owner_left(tmp_path: Path) -> None:
    config = of_directories(tmp_path / "in")
    await killed_owner("command", tmp_path / "state", config)
    assert len(list((tmp_path / "in").iterdir())) == 1
    async with command_provider(tmp_path, config):
        assert list((tmp_path / "in").iterdir()) == []
        assert list((tmp_path / "state/command/claims").iterdir()) == []


async def test_a_sandbox_that_is_not_removed_keeps_its_claim(tmp_path: Path) -> None:
    config = of_directories(tmp_path / "in") | {"destroy_command": f"test -e {tmp_path}/may && rm -rf {{sandbox_id}}"}
    (tmp_path / "may").touch()
    async with command_provider(tmp_path, config) as provider:
        sandbox = await provider.create(SMALL)
        (tmp_path / "may").unlink()
        with pytest.raises(SandboxTeardownError, match="destroy_command ended with 1"):
            await sandbox.destroy()
        assert [p.name for p in (tmp_path / "state/command/claims").iterdir()] == [sandbox.name]
        (tmp_path / "may").touch()
        await sandbox.destroy()
        assert list((tmp_path / "state/command/claims").iterdir()) == []


# Kubernetes


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[FakeKubernetes]:
    if not CAN_RUN:
        pytest.skip(WHY_NOT)
    async with FakeKubernetes() as found:
        yield found


def kubernetes(
    server: FakeKubernetes, tmp_path: Path, found: Capabilities | None = FOUND, **changes: Any
) -> KubernetesProvider:
    provider = open_provider("kubernetes", tmp_path / "state", server.config | changes)
    assert isinstance(provider, KubernetesProvider)
    provider._found = found
    return provider


async def test_dropped_connections_lose_and_double_nothing(server: FakeKubernetes, tmp_path: Path) -> None:
    async with kubernetes(server, tmp_path) as provider, await provider.create(SMALL) as sandbox:
        lines = "".join(f"{n}\n" for n in range(40_000)).encode()
        seen = bytearray()
        server.drop_after_s = 0.4

        def see(stream: str, data: bytes) -> None:
            seen.extend(data)
            server.drop_bytes = 1000 if server.drops < 4 else None

        script = (
            "n=0; while [ $n -lt 40 ]; do seq $((n * 1000)) $((n * 1000 + 999)); n=$((n + 1)); sleep 0.02; done; exit 7"
        )
        finished = await sandbox.exec(script, on_output=see)
        assert (finished.exit_code, finished.stdout.head) == (7, lines)
        assert bytes(seen) == lines
        assert server.drops >= 4
        server.drop_bytes = 100_000
        data = os.urandom(1_000_000)
        await sandbox.write_file("data", data)
        assert await sandbox.read_file("data") == data


async def test_a_command_starts_once_though_the_answer_was_lost(server: FakeKubernetes, tmp_path: Path) -> None:
    async with kubernetes(server, tmp_path) as provider, await provider.create(SMALL) as sandbox:
        server.drop_bytes = 5
        (await sandbox.exec("echo x >> times")).check()
        assert (server.drops, await sandbox.read_file("times")) == (1, b"x\n")


async def test_an_evicted_pod_is_gone(server: FakeKubernetes, tmp_path: Path) -> None:
    async with kubernetes(server, tmp_path) as provider, await provider.create(SMALL) as sandbox:
        begun = asyncio.Event()
        running = asyncio.ensure_future(sandbox.exec("echo x; sleep 1000", on_output=lambda s, d: begun.set()))
        await begun.wait()
        server.evict(sandbox.name)
        with pytest.raises(SandboxGoneError, match=r"Evicted: The node was low on resource\."):
            await running


async def test_images_and_room(server: FakeKubernetes, tmp_path: Path) -> None:
    async with kubernetes(server, tmp_path, pending_timeout_secs=0.5) as provider:
        with pytest.raises(ImagePullError, match="nobody/nothing:1 cannot be had: ImagePullBackOff: Back-off"):
            await provider.create(Spec(root=Image("nobody/nothing:1"), network=Network("public")))
        large = Spec(network=Network("public"), limits=Limits(cpus=9))
        for wait, told in ((False, "no node has room for"), (True, "after 0.5 s pod .* does not run")):
            with pytest.raises(SandboxNoRoomError, match=f"{told}.*Insufficient cpu"):
                await provider.create(large, wait=wait)
    assert server.pods == {}


async def test_networks_are_claimed_only_where_policies_are_enforced(server: FakeKubernetes, tmp_path: Path) -> None:
    async with kubernetes(server, tmp_path, None) as provider:
        assert (await provider.probe()).networks == {"public", "none", "allowlist"}
        with pytest.raises(SandboxRefusedError, match=r"not names: pypi\.org"):
            await provider.create(Spec(network=Network("allowlist", ("pypi.org", "10.0.0.0/8"))))
        async with await provider.create(Spec(network=Network("allowlist", ("10.1.2.3",)))) as sandbox:
            policy = server.policies[sandbox.name]["spec"]
            assert policy["egress"] == [{"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]}]
            assert (
                policy["podSelector"]["matchLabels"].items()
                <= server.pods[sandbox.name].manifest["metadata"]["labels"].items()
            )
    assert server.policies == {}


async def test_a_plugin_without_policies_closes_nothing(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_worker.sandboxes.kubernetes._CLOSED_S", 0.2)
    server.enforces = False
    async with kubernetes(server, tmp_path, None) as provider:
        found = await provider.probe()
        assert found.networks == {"public"}
        assert "does not enforce policies" in " ".join(found.notes)
        with pytest.raises(SandboxRefusedError, match="network `none` cannot be enforced"):
            await provider.create(Spec())


async def test_pods_of_a_killed_owner_are_removed_by_their_labels(server: FakeKubernetes, tmp_path: Path) -> None:
    server.busy = 2  # answered again
    name = await killed_owner("kubernetes", tmp_path / "state", server.config)
    assert name in server.pods
    (tmp_path / "state/kubernetes/claims" / name).unlink()  # the claim is lost, the labels are not
    shutil.rmtree(tmp_path / "state/kubernetes/boxes" / name)
    async with kubernetes(server, tmp_path):
        await asyncio.sleep(0.1)  # the server's own delay
        assert server.pods == {}


async def test_who_may_not_is_told(server: FakeKubernetes, tmp_path: Path) -> None:
    server.kubeconfig.write_text(server.kubeconfig.read_text().replace("secret", "wrong"))
    with pytest.raises(SandboxRefusedError, match="the Kubernetes API server refused: 401"):
        async with kubernetes(server, tmp_path):
            pass
    with pytest.raises(SandboxRefusedError, match="no usable configuration of a Kubernetes cluster"):
        async with kubernetes(server, tmp_path, kubeconfig=str(tmp_path / "nothing")):
            pass


async def test_a_root_of_this_host_is_no_pod(server: FakeKubernetes, tmp_path: Path) -> None:
    config = {"kubeconfig": str(server.kubeconfig)}
    async with open_provider("kubernetes", tmp_path, config) as provider:
        with pytest.raises(SandboxRefusedError, match=r"set docker_image of the task .* or `default_image`"):
            await provider.create(SMALL)


# Modal


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[FakeModal]:
    if not CAN_RUN:
        pytest.skip(WHY_NOT)
    found = FakeModal()
    yield found
    found.close()


def modal(client: FakeModal, tmp_path: Path) -> ModalProvider:
    provider = ModalProvider(tmp_path / "state", ModalSettings(default_image="debian:12"), client)
    provider._found = FOUND
    return provider


async def test_an_end_is_what_our_status_says(client: FakeModal, tmp_path: Path) -> None:
    async with modal(client, tmp_path) as provider, await provider.create(SMALL) as sandbox:
        client.drop = 1
        finished = await sandbox.exec("exit 137")  # the client's own return code is -1 always
        assert (finished.how, finished.exit_code) == ("exited", 137)
        finished = await sandbox.exec("kill -9 $$")
        assert (finished.how, finished.signal) == ("signalled", 9)
        finished = await sandbox.exec("sleep 1000", timeout_s=0.2)
        assert (finished.how, finished.exit_code, finished.signal) == ("timed_out", None, None)


async def test_networks_limits_and_price(client: FakeModal, tmp_path: Path) -> None:
    async with modal(client, tmp_path) as provider:
        hosts = ("pypi.org", "*.example.com", "10.0.0.1", "10.1.0.0/16")
        for network, options in (
            (Network("none"), {"block_network": True}),
            (Network("public"), {}),
            (
                Network("allowlist", hosts),
                {
                    "outbound_cidr_allowlist": ["10.0.0.1/32", "10.1.0.0/16"],
                    "outbound_domain_allowlist": ["pypi.org", "*.example.com"],
                },
            ),
        ):
            async with await provider.create(Spec(network=network, limits=Limits(2, 1024))) as sandbox:
                made = client.made[-1]
                assert {key: made[key] for key in made if "network" in key or "allowlist" in key} == options
                assert (made["cpu"], made["memory"], made["timeout"]) == ((2, 2), (1024, 1024), 6 * 3600)
                sandbox._begun -= 3600
                assert sandbox.cost() == pytest.approx(2 * USD_PER_CORE_HOUR + USD_PER_GIB_HOUR, rel=0.01)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("RemoteError", ImagePullError),
        ("ResourceExhaustedError", SandboxNoRoomError),
        ("AuthError", SandboxRefusedError),
        ("ConnectionError", SandboxCreateError),
    ],
)
async def test_what_modal_refuses(client: FakeModal, tmp_path: Path, fault: str, kind: type[Exception]) -> None:
    async with modal(client, tmp_path) as provider:
        client.fault = getattr(exception, fault)("as it says")
        with pytest.raises(kind, match="as it says"):
            await provider.create(SMALL)
        assert all(sandbox.code is not None for sandbox in client.sandboxes.values())


async def test_sandboxes_of_dead_owners_end(client: FakeModal, tmp_path: Path) -> None:
    async with modal(client, tmp_path) as other:
        lost = await other.create(SMALL)
        client.sandboxes[lost.name].tags["rollout-owner"] = "dead"
        async with modal(client, tmp_path):
            assert client.sandboxes[lost.name].code == 137


# Live


async def judge(provider: Any, tmp_path: Path) -> None:
    async with provider:
        bench = Bench(provider, tmp_path / "scratch", address=None, large=8 << 20)
        outcomes = await conformance.run(bench)
        await bench.forget()
    assert [o for o in outcomes if o.outcome == "failed"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("SANDBOX_TEST_KUBECONFIG" not in os.environ, reason="SANDBOX_TEST_KUBECONFIG names no cluster")
async def test_a_real_cluster(tmp_path: Path) -> None:
    config = {"kubeconfig": os.environ["SANDBOX_TEST_KUBECONFIG"], "default_image": "debian:12"}
    await judge(open_provider("kubernetes", tmp_path / "state", config), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("SANDBOX_TEST_MODAL" not in os.environ, reason="SANDBOX_TEST_MODAL is not set")
async def test_the_real_modal(tmp_path: Path) -> None:
    await judge(open_provider("modal", tmp_path / "state", {"default_image": "debian:12"}), tmp_path)
