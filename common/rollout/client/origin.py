"""The cluster of an output directory's run, as recorded by the command that started it."""

from __future__ import annotations

import hashlib
import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.client.target import Target
from rollout.model.errors import ConfigError
from rollout.security import files
from rollout.workloads.output import write_atomically

ORIGIN = ".cluster.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """`authority` identifies the cluster; the rest says how to reach it."""

    run_id: str
    authority: str
    cluster: str
    addresses: tuple[str, ...]
    tls_dir: str
    why: str

    def __str__(self) -> str:
        return f'cluster "{self.cluster}" at {", ".join(self.addresses)}'

    def options(self) -> str:
        """Return the options for a command that goes there."""
        context = self.why.removeprefix("context ").partition(",")[0]
        if self.why.startswith("context "):
            return shlex.join(["--context", context])
        with suppress(ConfigError):
            if files.joined(Path(self.tls_dir)).get("coordinator_addrs"):
                # It is kept up to date, and the coordinator of then may be down.
                return shlex.join(["--tls-dir", self.tls_dir])
        return shlex.join([*(o for a in self.addresses for o in ("--coordinator", a)), "--tls-dir", self.tls_dir])


def authority_of(tls_dir: Path) -> str:
    """Return a digest of the authority that an identity belongs to, or ""."""
    pem = files.read(tls_dir / files.CA)
    return hashlib.sha256(b"".join(pem.split())).hexdigest() if pem else ""


def keep_origin(output: Path, run_id: str, target: Target, addresses: list[str]) -> None:
    """Record that `target` has `run_id`. A read-only directory does without."""
    found = Origin(
        run_id,
        authority_of(target.tls_dir),
        target.cluster,
        tuple(addresses),
        str(target.tls_dir.resolve()),
        target.why,
    )
    fields = {name: getattr(found, name) for name in Origin.__slots__}
    with suppress(OSError):
        write_atomically(output / ORIGIN, json.dumps(fields).encode())


def origin_of(output: Path, run_id: str | None) -> Origin | None:
    """Return the cluster of the run in `output`, or None if it was private or is unknown."""
    try:
        found: Any = json.loads((output / ORIGIN).read_text("utf-8"))
        origin = Origin(**found | {"addresses": tuple(found["addresses"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return origin if origin.run_id == run_id else None
