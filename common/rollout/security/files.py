"""The files of `tls_dir`, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rollout import files
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError

CA = "ca.pem"
CA_KEY = "ca.key.pem"
ISSUER = "issuer.pem"
ISSUER_KEY = "issuer.key.pem"
HOST = "host.pem"
HOST_KEY = "host.key.pem"
JOINED = "join.json"

FORMER_MAX = 4
KEYS = frozenset({CA_KEY, ISSUER_KEY, HOST_KEY})
IDENTITY = KEYS | {CA, ISSUER, HOST, JOINED}


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file durably, with `mode` from the first byte on. Raises ConfigError if the directory cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.replacing(path, shared=True, mode=mode) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; check transport.tls_dir") from error


def expand(path: Path) -> Path:
    return path.expanduser()


def read(path: Path) -> bytes | None:
    """Read a file, or return None if it is missing. Raises ConfigError if it is unreadable, or a key that everyone may
    read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # A group may read: Kubernetes mounts secrets so.
            if path.name in KEYS and mode & 0o007:
                raise ConfigError(
                    f"{path} is a private key that every user of this host may read (mode {mode & 0o777:04o}): run "
                    f"`chmod 600 {path}`, and if others have users here, make new keys"
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; check its owner and mode") from error


def joined(tls_dir: Path) -> dict[str, Any]:
    """Return what the cluster reported when `join` made `tls_dir`: `cluster`, `coordinator_addrs`, `host_id`, `role`;
    empty if no cluster was joined. Raises ConfigError if it is unreadable."""
    path = tls_dir / JOINED
    stored = read(path)
    try:
        found: Any = json.loads(stored or b"{}")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): join again with a new token") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: join again with a new token")
    told = cast(dict[str, Any], found)
    addresses = cast(list[Any] | None, told.get("coordinator_addrs", []))
    if not isinstance(addresses, list) or not isinstance(told.get("cluster", ""), str):
        raise ConfigError(f"{path} is damaged: join again with a new token")
    for address in addresses:
        parse_address(str(address), f"{path}: coordinator_addrs", need_port=True)
    return told


def keep_addresses(tls_dir: Path, addresses: list[str]) -> None:
    """Save the coordinators that the cluster reports now, for the next process, if this host has joined. A read-only
    directory keeps what it has."""
    with suppress(ConfigError):
        known = joined(tls_dir)
        before = [str(address) for address in known.get("coordinator_addrs", [])]
        if known and addresses and before != addresses:
            gone = dict.fromkeys([*before, *former_addresses(tls_dir)])
            former = [address for address in gone if address not in addresses][:FORMER_MAX]
            known = {key: value for key, value in known.items() if key != "former_addrs"}
            write_joined(
                tls_dir, known | {"coordinator_addrs": addresses} | ({"former_addrs": former} if former else {})
            )


def former_addresses(tls_dir: Path) -> list[str]:
    """Return coordinators that the cluster reported earlier, the latest first, to try when none of the current ones
    responds. One that was down then may lead now."""
    return [str(address) for address in joined(tls_dir).get("former_addrs", [])]


def write_joined(tls_dir: Path, told: dict[str, Any]) -> None:
    """Save what `joined` returns."""
    text = json.dumps(told, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    write_atomic(tls_dir / JOINED, text.encode())


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Hold the lock of the directory inside the block. Raises ConfigError if the directory cannot be used."""
    with ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            held.enter_context(files.locked(directory / ".lock", 0o600))
        except OSError as error:
            raise ConfigError(f"cannot use {directory}: {error.strerror or error}; check transport.tls_dir") from error
        yield
