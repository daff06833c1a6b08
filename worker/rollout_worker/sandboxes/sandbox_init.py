"""The outer process of one sandbox: makes its namespaces, starts its commands, ends them. Standard library only.

The zygote forks it, with no other thread, so that it may unshare and fork freely. Its children are in the sandbox's pid
namespace, but it is not: nothing in the sandbox can see or signal it. It handles the owner's messages (JSON, with
descriptors) one at a time, and when the owner's end closes, it ends the sandbox.

Its first child is the sandbox's pid 1, which only waits for orphans: when it ends, the kernel ends all others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import tarfile
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rollout_worker.sandboxes import cgroups, kernel, open_files, pid_namespaces, roots, trees, uplink

MESSAGE_BYTES = 1 << 16
KILL_S = 5.0
NAMES_MAX = 3
_LIST_BYTES = 1 << 20  # of /etc/passwd and /etc/group, at most
# Changed by the interpreter and by the zygote.
_CHANGED_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
_NOT_RUNNABLE, _NOT_FOUND, _BROKEN = 126, 127, 125


class CannotMakeError(Exception):
    """A step of making the sandbox failed; the message names the step to the owner."""


def main(sock: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Serve one sandbox, in a child of the zygote."""
    try:
        zygote = os.getppid()
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)
        SandboxInit(sock, config).serve()
    except CannotMakeError as error:
        sock.send(json.dumps({"error": str(error)}).encode())
    except BaseException:  # noqa: BLE001 - the last line of a process: whatever it is, the owner is told
        with contextlib.suppress(OSError):
            sock.send(json.dumps({"error": traceback.format_exc()}).encode()[:MESSAGE_BYTES])
    os._exit(1)


def wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal only ends a wait, through the wakeup descriptor."""


@contextlib.contextmanager
def step(what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CannotMakeError(f"{what}: {error.strerror or error}") from error


class SandboxInit:
    def __init__(self, sock: socket.socket, config: dict[str, Any]) -> None:
        self._sock = sock
        self._config = config
        self._name: str = config["name"]
        self._apart: bool = config["namespaces"]
        self._running: dict[int, int] = {}  # pid of a child: the request it serves
        self._ours: set[int] = set()  # those of them that are not commands
        self._init = 0
        self._uplink = 0
        self._way_out: socket.socket | None = None
        self._groups: list[int] = []
        self._box = -1

    def serve(self) -> None:
        wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, wake_up)
        with step("join the control group"):
            self._groups = [os.open(f"{g}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for g in self._config["cgroups"]]
        with step("open its directory"):
            self._box = os.open(self._config["box"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = self._make()
        ready = json.dumps({"ready": os.getpid()}).encode()
        if listener is None:
            self._sock.send(ready)
        else:
            with listener:
                socket.send_fds(self._sock, [ready], [listener.fileno()])
        while True:
            readable, _, _ = select.select([self._sock, wake], [], [])
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self._reap()
            if self._sock in readable:
                data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 8)
                try:
                    message: dict[str, Any] = json.loads(data) if data else {"op": "end"}
                    self._take(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)

    # Creation

    def _make(self) -> socket.socket | None:
        if not self._apart:
            kernel.adopt_orphans()  # what leaves its session stays a descendant of this process
            return None
        config = self._config
        flags = kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS
        if config["network"] != "host":
            flags |= kernel.NEWNET
        if config["network"] == "public":
            self._start_uplink(**config["uplink"])
        if config["map"]:
            self._enter_user_namespace(*config["map"])
        with step("namespaces of its own"):
            kernel.unshare(flags)
            kernel.die_with_parent(signal.SIGKILL)  # unsharing may have reset it
            socket.sethostname(config["hostname"])
        listener = None
        if config["network"] != "host":
            with step("a network of its own"):
                kernel.raise_interface()
                if config["network"] == "allowlist":
                    listener = socket.create_server(("127.0.0.1", config["proxy_port"]), backlog=128)
        if self._way_out is not None:
            with step("a way out of its network"):
                device, accepting = uplink.attach(config["box"])
                with accepting:
                    socket.send_fds(self._way_out, [b"x"], [device, accepting.fileno()])
                os.close(device)
        with step("mounts of its own"):
            kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        point = "" if config["bubblewrap"] else config["host"]["point"]
        ours, inits = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with step("its first process"):
            self._init = self._fork(lambda: _be_init(inits, ours, point))
        inits.close()
        with ours:
            mounts: list[int] = []
            try:
                if config["bubblewrap"]:
                    mounts.append(roots.by_bubblewrap(config["bubblewrap"]))
                else:
                    roots.of_host(config["host"])
            except OSError as error:
                raise CannotMakeError(f"its root: {error}") from error
            socket.send_fds(ours, [b"root"], mounts)
            for fd in mounts:
                os.close(fd)
            answer = ours.recv(MESSAGE_BYTES).decode()
            if answer != "ok":
                raise CannotMakeError(answer or "its first process ended")
            if point:
                with step("its root"):
                    roots.enter(point)
        return listener

    def _start_uplink(self, nameservers: list[str], listed: list[str]) -> None:
        """Fork the uplink before the namespaces, so that it stays in this host's network; we send it what it serves."""
        self._way_out, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, step("a process for its way out"):
            self._uplink = self._fork(lambda: uplink.main(theirs, nameservers, listed))

    def _enter_user_namespace(self, inside: int, inside_group: int) -> None:
        user, group = os.geteuid(), os.getegid()
        with step("a user namespace"):
            kernel.unshare(kernel.NEWUSER)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{inside} {user} 1")
            _write("/proc/self/gid_map", f"{inside_group} {group} 1")

    def _fork(self, work: Callable[[], None]) -> int:
        """Fork a child, with signals as a new program expects them. `work` does not return to this loop."""
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in _CHANGED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            work()
        except BaseException:  # noqa: BLE001 - nothing of the parent's stack may run in the child
            traceback.print_exc()
        finally:
            os._exit(_BROKEN)

    # Serving

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        op, number = message["op"], int(message.get("id", 0))
        if op == "end":
            self._end()
        elif op == "exec":
            self._running[self._fork(lambda: self._run(fds))] = number
            return
        work = {"files": _serve_files, "usage": self._tell_usage, "kill": self._kill_all, "listen": _listen}[op]
        pid = self._fork(lambda: work(fds))
        self._running[pid] = number
        self._ours.add(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid in self._ours:  # else processes in the sandbox could prevent its end
                    os.kill(pid, signal.SIGCONT)
                continue
            self._ours.discard(pid)
            if pid in (
                self._init,
                self._uplink,
            ):  # it was killed, and with the first everything ended, with the second the network
                self._end()
            number = self._running.pop(pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                ending = {"exit": code} if code >= 0 else {"signal": -code}
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._sock.send(json.dumps({"id": number, **ending}).encode())

    def _end(self) -> NoReturn:
        """End everything and this process. The owner notices that the connection closes."""
        if self._uplink:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._uplink, signal.SIGKILL)
        if self._init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        elif not self._apart:
            self._kill_descendants(set())
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        os._exit(0)

    def _kill_all(self, fds: list[int]) -> None:
        """Kill every process in the sandbox but pid 1, in a child, and wait until they are gone."""
        until = time.monotonic() + KILL_S
        if not self._apart:
            self._kill_descendants({os.getpid()})
            os._exit(0)
        kernel.hide_from_tracers()
        while time.monotonic() < until:
            try:
                # One call that no fork can outrun, because the kernel visits all processes of the namespace under the
                # lock that a fork needs too (kill(2), pid -1).
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                os._exit(0)
            time.sleep(0.001)
        os._exit(1)

    def _kill_descendants(self, spared: set[int]) -> None:
        top = os.getpid() if not spared else os.getppid()
        if self._config["cgroups"]:
            with contextlib.suppress(TimeoutError):
                cgroups.kill([Path(path) for path in self._config["cgroups"]])
        until = time.monotonic() + KILL_S
        while (found := _descendants(top) - spared) and time.monotonic() < until:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that those killed last start nothing
                for pid in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            if not spared:
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            time.sleep(0.001)

    def _tell_usage(self, fds: list[int]) -> NoReturn:
        """Report the sandbox's disk usage, in a child; includes what its owner outside may not list."""
        kernel.hide_from_tracers()
        pids = pid_namespaces.all_processes() if self._apart else _descendants(os.getppid())
        unlinked = open_files.unlinked_size(pid for pid in pids if pid != os.getpid())
        os.fchdir(self._box)
        _write_all(fds[0], json.dumps({"size": trees.usage(".") + unlinked}).encode())
        os._exit(0)

    def _run(self, fds: list[int]) -> NoReturn:
        """Become the command, in a child."""
        kernel.hide_from_tracers()
        body = json.loads(read_all(fds[0]))
        os.setsid()
        for target, fd in enumerate(fds[1:4]):
            os.dup2(fd, target)
        for fd in self._groups:
            os.write(fd, b"0")
        os.closerange(3, 1 << 16)
        try:
            for name, value in body["rlimits"].items():
                _limit(getattr(resource, name), value)
            if self._config["drop"]:
                kernel.no_new_privileges()
                kernel.forbid_keys()
                kernel.keep_capabilities(kernel.CONTAINER_CAPABILITIES)
            if body["user"] is not None:
                _become(body["user"])
                if body["home"] and os.getuid() != 0:
                    body["env"]["HOME"] = _home_of(body["user"])
            os.chdir(body["cwd"])
            argv: list[str] = body["argv"]
            os.execvpe(argv[0], argv, body["env"])
        except FileNotFoundError as error:
            _say(f"cannot run this: {error.filename or body['argv'][0]}: {error.strerror}")
            os._exit(_NOT_FOUND if error.filename != body["cwd"] else _NOT_RUNNABLE)
        except PermissionError as error:
            # Also raised if a directory of PATH may not be searched; a shell reports "not found" then.
            found: str | None = shutil.which(str(body["argv"][0]), os.F_OK, str(body["env"].get("PATH", os.defpath)))
            _say(f"cannot run this: {error}")
            os._exit(_NOT_RUNNABLE if found else _NOT_FOUND)
        except (OSError, LookupError, ValueError) as error:
            _say(f"cannot run this: {error}")
            os._exit(_NOT_RUNNABLE)


def _say(text: str) -> None:
    os.write(2, f"sandbox: {text}\n".encode(errors="replace"))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _become(user: str | int) -> None:
    number, group, groups = find_user(user)
    if number != os.getuid():
        os.setgroups(groups)
        os.setgid(group)
        os.setuid(number)


def _home_of(user: str | int) -> str:
    """Return the user's home as container engines choose it, or /tmp if it cannot be used."""
    rows = (line.split(":") for line in _lines("/etc/passwd"))
    home = next((words[5] for words in rows if len(words) > 6 and str(user) in (words[0], words[2])), "/")
    return home if os.path.isdir(home) and os.access(home, os.W_OK) else "/tmp"


def find_user(user: str | int) -> tuple[int, int, list[int]]:
    """Return (uid, gid, groups) from the sandbox's own files, because NSS would ask the host. Raises LookupError."""
    name = str(user)
    number, group = (int(user), int(user)) if name.isdigit() else (-1, -1)
    for line in _lines("/etc/passwd"):
        words = line.split(":")
        if len(words) > 3 and (words[0] == name or (words[2] == name and name.isdigit())):
            name, number, group = words[0], int(words[2]), int(words[3])
            break
    if number < 0:
        raise LookupError(f"there is no user {user} in /etc/passwd")
    members = [line.split(":") for line in _lines("/etc/group")]
    groups = [int(words[2]) for words in members if len(words) > 3 and name in words[3].split(",")]
    return number, group, [group, *groups]


def _lines(path: str) -> list[str]:
    """Return the lines of a file that the sandbox may have made: it could be a pipe, or endless."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        return os.read(fd, _LIST_BYTES).decode(errors="surrogateescape").splitlines()
    finally:
        os.close(fd)


def _be_init(sock: socket.socket, other: socket.socket, point: str) -> NoReturn:
    """Run as the sandbox's pid 1: enter its root, or mount /proc in the one below `point`; then wait for orphans."""
    other.close()
    kernel.die_with_parent(signal.SIGKILL)
    message, fds, _, _ = socket.recv_fds(sock, 16, 1)
    if not message:  # the sandbox_init ended before its death could be signalled
        os._exit(1)
    try:
        if fds:
            kernel.setns(fds[0], kernel.NEWNS)
        else:
            # Before the root changes: without a visible /proc, a user namespace may not mount a new one.
            kernel.mount("proc", f"{point}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        os.chdir("/")
        kernel.hide_from_tracers()
        sock.send(b"ok")
    except OSError as error:
        sock.send(f"its first process: {error}".encode())
        os._exit(1)
    os.closerange(0, 1 << 16)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def _listen(fds: list[int]) -> NoReturn:
    """Send the owner a listening socket of the sandbox's loopback, through the first fd, in a child."""
    kernel.hide_from_tracers()
    with socket.socket(fileno=os.dup(fds[0])) as owner, socket.create_server(("127.0.0.1", 0), backlog=128) as made:
        socket.send_fds(owner, [b"listener"], [made.fileno()])
    os._exit(0)


def _descendants(top: int) -> set[int]:
    parents: dict[int, int] = {}
    for word in os.listdir("/proc"):
        if word.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{word}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z" or int(parent) == top:
                    parents[int(word)] = int(parent)
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if (parent == top or parent in found) and pid not in found}:
        found |= more
    return found


def _serve_files(fds: list[int]) -> NoReturn:
    """Read or write files as the sandbox sees them, in a child. `fds` are the request, the data and the result."""
    kernel.hide_from_tracers()
    body = json.loads(read_all(fds[0]))
    # First above their final numbers, because dup2 of one might otherwise overwrite the other.
    data, result_end = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 12) for fd in fds[1:3])
    os.dup2(data, 10, inheritable=False)
    os.dup2(result_end, 11, inheritable=False)
    os.closerange(3, 10)
    os.closerange(12, 1 << 16)
    result: dict[str, Any]
    try:
        if body["user"] is not None:
            _become(body["user"])
        result = _FILES[body["what"]](10, body)
    except trees.TooManyError as error:
        result = {"error": error.reason, "text": f"more than {body['max_entries']} files and directories"}
    except trees.TooLargeError as error:
        result = {"error": error.reason, "text": f"more than {body['max_bytes']} bytes"}
    except BrokenPipeError:  # the owner gave up
        os._exit(0)
    except OSError as error:
        result = {"error": errno.errorcode.get(error.errno or 0, "EIO"), "text": error.strerror or str(error)}
    except (tarfile.TarError, LookupError) as error:
        result = {"error": "EINVAL", "text": str(error)}
    os.close(10)
    _write_all(11, json.dumps(result).encode())
    os._exit(0)


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def _write_all(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb", closefd=False, buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _read(data: int, body: dict[str, Any]) -> dict[str, Any]:
    fd = os.open(body["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, os.strerror(number))
    left = int(body["max_bytes"])
    while piece := os.read(fd, 1 << 18):
        left -= len(piece)
        if left < 0:
            raise trees.TooLargeError
        _write_all(data, piece)
    return {}


def _replace(data: int, body: dict[str, Any]) -> dict[str, Any]:
    path: str = body["path"]
    trees.make_directories(os.path.dirname(path) or "/")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, body["mode"])
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    os.fchmod(fd, body["mode"])
    while piece := os.read(data, 1 << 18):
        _write_all(fd, piece)
    os.close(fd)
    return {}


def _pack(data: int, body: dict[str, Any]) -> dict[str, Any]:
    wanted = body["selection"]
    selection = None if wanted is None else trees.Selection(**wanted)
    with os.fdopen(data, "wb", closefd=False) as stream:
        moved = trees.pack(
            body["path"], stream, body["max_bytes"], max_entries=body["max_entries"], selection=selection
        )
    return {"files": moved.files, "size": moved.size, "skipped": moved.skipped, "left_out": moved.left_out}


def _names(data: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"names": [_names_in(path) for path in body["paths"]]}


def _names_in(path: str) -> list[str] | None:
    """Return the first few names, or None if it is not a directory or cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in itertools.islice(entries, NAMES_MAX)]
    except OSError:
        return None


def _unpack(data: int, body: dict[str, Any]) -> dict[str, Any]:
    with os.fdopen(data, "rb", closefd=False) as stream:
        moved = trees.unpack(stream, body["path"], leave=True)
    return {"files": moved.files, "size": moved.size, "skipped": moved.skipped}


_FILES: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
    "names": _names,
    "read": _read,
    "write": _replace,
    "pack": _pack,
    "unpack": _unpack,
}
