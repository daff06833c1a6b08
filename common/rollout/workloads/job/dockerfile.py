"""What a Dockerfile copies out of its build context, as far as its text tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

_HEREDOC = re.compile(r"<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_FLAG = re.compile(r"--[a-z-]+(=\S*)?\s+")
_REMOTE = re.compile(r"(https?|git|ssh)://|git@", re.IGNORECASE)
_ESCAPE = re.compile(r"^#\s*escape\s*=\s*`", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Copied:
    """A source of a COPY or ADD, as it is written, and the line on which the instruction begins."""

    line: int
    instruction: str
    source: str


def copied(text: str) -> Iterator[Copied]:
    """Every source in the build context. What depends on variables, other stages or the network is left out."""
    for line, instruction in _instructions(text):
        word, _, rest = instruction.partition(" ")
        if word.upper() not in ("COPY", "ADD"):
            continue
        rest = rest.strip()
        elsewhere = False
        while flag := _FLAG.match(rest):
            elsewhere |= flag[0].startswith("--from=")
            rest = rest[flag.end() :]
        if elsewhere:
            continue
        for source in _sources(rest):
            if "$" not in source and not _HEREDOC.match(source) and not _REMOTE.match(source):
                yield Copied(line, word.upper(), source)


def missing_source(source: str, context: Path) -> str:
    """Why `source` is not in the build context `context`; empty: it is there."""
    path = PurePosixPath(source.lstrip("/"))
    if ".." in path.parts:
        return "leads out of the directory of the Dockerfile, which is all that a build sees"
    if any(letter in source for letter in "*?["):
        return "" if any(context.glob(str(path))) else "matches no file beside the Dockerfile"
    return "" if (context / path).exists() else "is not beside the Dockerfile"


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """(line, instruction on one line), without comments and the texts of heredocs."""
    escape = "`" if _ESCAPE.search(text.partition("\n\n")[0]) else "\\"
    begun, parts = 0, list[str]()
    waiting: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if waiting:
            if line.strip() == waiting[0]:
                waiting.pop(0)
            continue
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        begun = begun or number
        if stripped.endswith(escape):
            parts.append(stripped[:-1])
            continue
        whole = " ".join([*parts, stripped]).strip()
        yield begun, re.sub(r"\s+", " ", whole) if "[" not in whole else whole
        waiting = [found[2] for found in _HEREDOC.finditer(whole)]
        begun, parts = 0, []


def _sources(rest: str) -> list[str]:
    """All words but the last, which is the destination."""
    if rest.startswith("["):
        try:
            words: Any = json.loads(rest)
        except ValueError:
            return []
        return [one for one in cast("list[Any]", words)[:-1] if isinstance(one, str)]
    return rest.split()[:-1]
