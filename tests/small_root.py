"""A small root file system, with programs of this host and the libraries that they need: an image for tests."""

from __future__ import annotations

import io
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

SHELL = ("sh", "cat", "ls", "mkdir", "rm", "id", "test", "env", "true", "stat")
PROGRAMS = (
    *SHELL,
    *[
        "bash",
        "chmod",
        "chown",
        "cp",
        "cut",
        "dirname",
        "dash",
        "echo",
        "expr",
        "grep",
        "head",
        "kill",
        "ln",
        "mkfifo",
        "mknod",
        "mktemp",
        "mount",
        "mv",
        "nsenter",
        "printf",
        "ps",
        "pwd",
    ],
    *[
        "readlink",
        "rmdir",
        "sed",
        "seq",
        "setsid",
        "sleep",
        "sort",
        "tail",
        "tar",
        "tee",
        "timeout",
        "touch",
        "tr",
        "truncate",
        "umount",
        "uname",
        "unshare",
        "wc",
    ],
)
PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"


def small_root(names: tuple[str, ...] = PROGRAMS) -> bytes:
    """As a tar."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for directory in ("bin", "etc", "root", "tmp", "usr", "usr/bin", "usr/lib", "proc", "dev", "sys", "var", "run"):
            tar.addfile(_directory(directory, 0o1777 if directory == "tmp" else 0o755))
        libraries: dict[str, None] = {}
        for name in names:
            found = shutil.which(name)
            if found is None:
                continue
            path = Path(found).resolve()
            tar.add(path, f"bin/{name}", filter=_of_root)
            libraries.update(dict.fromkeys(_libraries(path)))
        for library in libraries:
            tar.add(Path(library).resolve(), library.lstrip("/"), filter=_of_root)
        _text(tar, "etc/passwd", PASSWD)
        _text(tar, "etc/group", "root:x:0:\nnogroup:x:65534:\n")
        for link in ("sh", "env"):
            member = tarfile.TarInfo(f"usr/bin/{link}")
            member.type, member.linkname = tarfile.SYMTYPE, f"/bin/{link}"
            tar.addfile(member)
    return stream.getvalue()


def _libraries(program: Path) -> list[str]:
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", said)


def _directory(name: str, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    tar.addfile(member, io.BytesIO(text.encode()))


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = stat.S_IMODE(member.mode) & 0o755
    return member
