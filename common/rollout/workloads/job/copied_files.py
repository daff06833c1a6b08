"""Finds the files that a Dockerfile copies from its build context, as far as its text shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollout.workloads.job.dockerfile import parse, split

_REMOTE = re.compile(r"(https?|git|ssh)://|git@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Copied:
    """A source of a COPY or ADD as written, and the first line of the instruction."""

    line: int
    instruction: str
    source: str


def copied(text: str) -> Iterator[Copied]:
    """Yield every source in the build context. Sources that depend on variables, other stages or the network are left
    out.

    Raises DockerfileError.
    """
    for one in parse(text):
        if one.name not in ("COPY", "ADD") or one.flag("from") is not None:
            continue
        for source in list(one.words or split(one.value))[:-1]:
            if "$" not in source and not source.startswith("<<") and not _REMOTE.match(source):
                yield Copied(one.line, one.name, source)


def missing_source(source: str, context: Path) -> str:
    """Return why `source` is not in the build context `context`, or "" if it is."""
    path = PurePosixPath(source.lstrip("/"))
    if ".." in path.parts:
        return "leads out of the directory of the Dockerfile, which is all that a build sees"
    if any(letter in source for letter in "*?["):
        return "" if any(context.glob(str(path))) else "matches no file beside the Dockerfile"
    return "" if (context / path).exists() else "is not beside the Dockerfile"
