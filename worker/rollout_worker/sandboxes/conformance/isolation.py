"""Cases on what a sandbox must not see, change or reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    case,
    eventually,
    needs,
    output_of,
    raises,
    same,
    true,
)
from rollout_worker.sandboxes.errors import (
    SandboxFileError,
)
from rollout_worker.sandboxes.port import (
    Finished,
    Mount,
    Network,
    Sandbox,
)


@case
async def private_directories(bench: Bench) -> None:
    needs((await bench.capabilities()).private_directories, "directories are not private")
    paths = ("/app", "/tests", "/logs", "/solution", "/tmp")
    there = {path: Path(path).exists() for path in paths}
    marker = f"conformance-{os.getpid()}-{time.monotonic_ns()}"
    async with await bench.make(directories=paths) as one, await bench.make(directories=paths) as two:
        for path in paths:
            await one.write_file(f"{path}/{marker}", b"one")
            same(await output_of(two, f"ls {path}"), "", f"what another sandbox has in {path}")
            same(await output_of(one, f"cat {path}/{marker}"), "one", f"what the sandbox has in {path}")
            true(not Path(path, marker).exists(), f"this host has it in {path}")
    same({path: Path(path).exists() for path in paths}, there, "directories of this host")


@case
async def processes_outside_are_out_of_reach(bench: Bench) -> None:
    needs((await bench.capabilities()).own_processes, "processes outside are not hidden")
    async with await bench.make() as one, await bench.make() as two:
        await one.exec("sleep 86399 > /dev/null 2>&1 &")
        same(await output_of(two, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 8639[9]' || true"), "0", "")
        same((await two.exec(f"kill -0 {os.getpid()} 2>/dev/null")).ok, False, "the owner can be signalled")
        # Checked first, because what follows could kill processes of the user who runs this.
        outside = str(Path("/proc/self/ns/pid").readlink())
        true(await output_of(two, "readlink /proc/self/ns/pid") != outside, "it is in the pid namespace outside")
        await two.exec("kill -9 -1", timeout_s=PATIENCE_S)
        same(await output_of(one, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 8639[9]'"), "1", "")
        same(await output_of(two, "kill -9 1; echo alive", timeout_s=PATIENCE_S), "alive", "after kill -9 1")


@case
async def other_sandboxes_are_out_of_reach(bench: Bench) -> None:
    needs((await bench.capabilities()).hides_sandboxes, "other sandboxes' files are not hidden")
    needs(bench.host_directory, "this host does not have them")
    assert bench.host_directory is not None
    async with await bench.make() as one, await bench.make() as two:
        await one.write_file("secret", b"of one")
        path = bench.host_directory(one)
        true(path.is_dir(), f"the suite was told of {path}, which does not exist")
        for place in (str(path), f"/proc/1/root{path}", f"/proc/self/root{path}"):
            same((await two.exec(["ls", place])).ok, False, f"{place} can be listed")
        uncover = f"p={path}; while [ $p != / ]; do umount $p; p=$(dirname $p); done 2> /dev/null; ls {path}"
        same((await two.exec(uncover)).ok, False, f"{path} can be uncovered")


@case
async def the_host_is_out_of_reach(bench: Bench) -> None:
    needs((await bench.capabilities()).hides_host, "the host's files are not hidden")
    secret = bench.directory() / "secret"
    secret.write_text("of the host")
    async with await bench.make() as sandbox:
        await sandbox.exec(["ln", "-s", str(secret), "link"])
        ways = ["link", str(secret), f"/proc/1/root{secret}", f"/proc/1/cwd{secret}", f"/proc/self/root{secret}"]
        ways += ["../" * 30 + str(secret)[1:], f"/proc/1/../..{secret}", f"/../..{secret}"]
        for way in ways:
            same((await sandbox.exec(["cat", way])).ok, False, f"{way} can be read")
            async with raises(SandboxFileError):
                await sandbox.read_file(way)
        found = await sandbox.exec("for fd in /proc/*/fd/*; do cat $fd/secret; done; ls /proc/*/fd/*/", timeout_s=30)
        true("of the host" not in found.stdout.text(), "a descriptor of a process in the sandbox leads out")


MACHINE = ("kernel/core_pattern", "kernel/panic", "kernel/modprobe", "vm/overcommit_memory", "fs/file-max")
"""Files of /proc/sys that concern the whole machine in any namespace. Only inspected: a write would take effect."""


@case
async def the_machine_cannot_be_changed(bench: Bench) -> None:
    needs((await bench.capabilities()).own_processes, "processes outside are not hidden")
    look = (
        f"for f in {' '.join(MACHINE)}; do test -w /proc/sys/$f && echo $f; done; test -w /proc/sysrq-trigger && echo s"
    )
    async with await bench.make() as sandbox:
        same((await sandbox.exec(look)).stdout.text(), "", "settings of the machine that can be written")
        nested = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
        if (await sandbox.exec([*nested, "true"])).ok:  # root of a namespace of its own, which any user may be
            inner = f"mount -o remount,bind,rw /proc/sys; umount /proc/sys; {look}"
            same((await sandbox.exec([*nested, "sh", "-c", inner])).stdout.text(), "", "settings, from a namespace")
            same((await sandbox.exec([*nested, "mount", "-t", "proc", "x", "/proc"])).ok, False, "a new /proc")
        for command in ("mkdir m && mount -t tmpfs x m", "mknod device b 254 0", "nsenter -t 1 -m true"):
            same((await sandbox.exec(command)).ok, False, f"`{command}` succeeds")


KEYS = """
import ctypes, os, sys
add, control = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
libc = ctypes.CDLL(None, use_errno=True)
name = sys.argv[1].encode()
for keyring in (-3, -4, -5):  # of the session, of the user, of the user's sessions
    libc.syscall(add, b"user", name, b"secret", 6, keyring)
    print(keyring, "found" if libc.syscall(control, 10, keyring, b"user", sys.argv[2].encode(), 0) > 0 else "none")
"""


@case
async def keys_of_the_kernel_are_out_of_reach(bench: Bench) -> None:
    needs((await bench.capabilities()).own_processes, "processes outside are not hidden")
    async with await bench.make() as one, await bench.make() as two:
        needs((await one.exec("command -v python3")).ok, "there is no python3 to ask for keys with")
        names = [f"conformance-{os.getpid()}-{number}" for number in (1, 2)]
        none = "-3 none -4 none -5 none"
        await one.exec(["python3", "-c", KEYS, names[0], names[0]])
        found = await two.exec(["python3", "-c", KEYS, names[1], names[0]])
        same(found.check().stdout.text().split(), none.split(), "keys of another sandbox")


@case
async def what_is_written_in_the_root_stays_there(bench: Bench) -> None:
    needs((await bench.capabilities()).writable_root, "the root cannot be written")
    name = f"/usr/conformance-{os.getpid()}"
    async with await bench.make() as one, await bench.make() as two:
        (await one.exec(f"echo x > {name}")).check()
        true(not Path(name).exists(), f"this host has {name}")  # before anything of it is removed
        (await one.exec("echo x >> /etc/hosts && rm /usr/bin/env")).check()
        same((await two.exec(f"test -e {name} || ! test -e /usr/bin/env")).ok, False, "another sandbox sees it")
        same((Path(name).exists(), Path("/usr/bin/env").exists()), (False, True), "this host sees it")


@case
async def mounts(bench: Bench) -> None:
    found = await bench.capabilities()
    needs(found.private_directories and found.mounts, "there are no mounts")
    source = bench.directory()
    (source / "file").write_text("of the host")
    shown = (Mount(source, "/shown"), Mount(source, "/open", read_only=False), Mount(source / "file", "/one"))
    async with await bench.make(mounts=shown) as sandbox:
        same(await output_of(sandbox, "cat /shown/file /one"), "of the hostof the host", "what is mounted")
        same((await sandbox.exec("echo x > /shown/new")).ok, False, "a read-only mount can be written")
        (await sandbox.exec("echo x > /open/new")).check()
    same((source / "new").read_text(), "x\n", "what was written to a mount")
    same((source / "file").read_text(), "of the host", "a mounted file, after the sandbox")


class _Server:
    """Answers each connection with its first line, in upper case."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write((await reader.readline()).upper())
            await writer.drain()
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


async def _talk(sandbox: Sandbox, host: str, port: int, *lines: str) -> Finished:
    """Connect from inside, send lines, print the answer."""
    needs((await sandbox.exec("command -v bash")).ok, "there is no bash to connect with")
    send = "".join(f"{line}\\r\\n" for line in lines)
    script = f"exec 3<>/dev/tcp/{host}/{port} || exit 9; printf '{send}' >&3; timeout 10 cat <&3"
    return await sandbox.exec(["bash", "-c", script], timeout_s=PATIENCE_S)


@case
async def no_network_reaches_nobody(bench: Bench) -> None:
    needs("none" in (await bench.capabilities()).networks, "the network cannot be closed")
    async with _Server() as port, await bench.make(network=Network("none")) as sandbox:
        same((await _talk(sandbox, "127.0.0.1", port, "hello")).exit_code, 9, "connecting to this host")
        interfaces = await output_of(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")
        same(interfaces.split(), ["lo"], "its interfaces")


@case
async def the_hosts_network(bench: Bench) -> None:
    needs("host" in (await bench.capabilities()).networks, "there is no network of the host")
    needs(bench.address, "sandboxes do not reach this machine")
    async with _Server() as port, await bench.make(network=Network("host")) as sandbox:
        same((await _talk(sandbox, str(bench.address), port, "hello")).stdout.text(), "HELLO\r\n", "the answer")


@case
async def a_public_network_reaches_neither_the_host_nor_credentials(bench: Bench) -> None:
    needs(await bench.has_public_apart(), "there is no public network that is a sandbox's own")
    async with _Server("0.0.0.0") as port, await bench.make(network=Network("public")) as sandbox:
        places = [
            "127.0.0.1",
            "169.254.169.254",
            "100.100.100.200",
            *([bench.own_address] if bench.own_address else []),
        ]
        for place in places:
            same((await _talk(sandbox, place, port, "hello")).exit_code, 9, f"connecting to {place}")


@case
async def a_public_network_leads_out(bench: Bench) -> None:
    needs(await bench.has_public_apart(), "there is no public network that is a sandbox's own")
    needs(bench.own_address, "this machine has no address for it")
    listed = Network("public", (str(bench.own_address),))
    async with _Server("0.0.0.0") as port, await bench.make(network=listed) as sandbox:
        found = await _talk(sandbox, str(bench.own_address), port, "hello")
        same(found.stdout.text(), "HELLO\r\n", "the answer")


@case
async def public_networks_are_apart(bench: Bench) -> None:
    needs(await bench.has_public_apart(), "there is no public network that is a sandbox's own")
    async with await bench.make(network=Network("public")) as one, await bench.make(network=Network("public")) as two:
        needs((await one.exec("command -v python3")).ok, "there is no python3 to serve with")
        abstract = f"conformance-{os.getpid()}"
        serve = (
            "import socket, threading\n"
            "def serve(s):\n while True: s.accept()[0].sendall(b'of one')\n"
            "a = socket.create_server(('0.0.0.0', 8977)); b = socket.socket(socket.AF_UNIX)\n"
            f"b.bind('\\0{abstract}'); b.listen(); open('up', 'w')\n"
            "threading.Thread(target=serve, args=(a,)).start(); serve(b)\n"
        )
        ask = (
            "import socket\n"
            f"for f, a in ((socket.AF_INET, ('127.0.0.1', 8977)), (socket.AF_UNIX, '\\0{abstract}')):\n"
            " with socket.socket(f) as s: print('refused' if s.connect_ex(a) else s.recv(9).decode())\n"
        )
        await one.write_file("serve.py", serve.encode())
        (await one.exec("(python3 serve.py > /dev/null 2>&1 &)")).check()
        await eventually(lambda: _exists(one, "up"), "its own service is up")
        same((await output_of(one, f'python3 -c "{ask}"')).split("\n"), ["of one", "of one"], "its own service")
        same((await output_of(two, f'python3 -c "{ask}"')).split("\n"), ["refused", "refused"], "another's service")


async def _exists(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.exec(["test", "-e", path])).ok


@case
async def allowlist_lets_through_what_is_listed(bench: Bench) -> None:
    needs("allowlist" in (await bench.capabilities()).networks, "allowlists cannot be enforced")
    needs(bench.proxied_here, "the proxy does not reach this machine")
    async with _Server() as port, await bench.make(network=Network("allowlist", ("127.0.0.0/8",))) as sandbox:
        proxy = (await output_of(sandbox, "echo $https_proxy")).removeprefix("http://").rpartition(":")
        request = f"CONNECT 127.0.0.1:{port} HTTP/1.1"
        found = await _talk(sandbox, proxy[0], int(proxy[2]), request, "", "hello")
        true(found.stdout.text().startswith("HTTP/1.1 200"), f"a listed host is refused: {found.stdout.text()!r}")
        true("HELLO" in found.stdout.text(), f"it does not answer: {found.stdout.text()!r}")
        same((await _talk(sandbox, "127.0.0.1", port, "hello")).exit_code, 9, "connecting past the proxy")


@case
async def allowlist_refuses_everything_else(bench: Bench) -> None:
    needs("allowlist" in (await bench.capabilities()).networks, "allowlists cannot be enforced")
    needs(bench.proxied_here, "there is no proxy on this machine")
    # The name resolves to this host's loopback, which a name alone must not allow.
    async with _Server() as port, await bench.make(network=Network("allowlist", ("localhost", "*.test"))) as sandbox:
        proxy = (await output_of(sandbox, "echo $https_proxy")).removeprefix("http://").rpartition(":")
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "example.org:443", f"0:{port}"):
            found = await _talk(sandbox, proxy[0], int(proxy[2]), f"CONNECT {host} HTTP/1.1", "", "hello")
            status = found.stdout.text()[:12]
            true(status in ("HTTP/1.1 403", "HTTP/1.1 502"), f"{host} is not refused: {found.stdout.text()!r}")
            true("HELLO" not in found.stdout.text(), f"{host} is reached")


@case
async def users(bench: Bench) -> None:
    needs((await bench.capabilities()).users, "there are no other users")
    async with await bench.make(user="nobody") as sandbox:
        ids = (await output_of(sandbox, "id -u; id -un")).split()
        same(ids[1], "nobody", "who it is")
        true(ids[0] != "0", "nobody is root")
        same((await sandbox.exec("echo x > /etc/hosts")).ok, False, "nobody can write to /etc")
        same(await output_of(sandbox, "id -u", user=0), "0", "as root")
        same((await sandbox.exec("true", user="no-such-user")).exit_code, 126, "as a user that does not exist")
        same(await output_of(sandbox, "grep -c 'CapEff:.0000000000000000' /proc/self/status"), "1", "no privileges")
