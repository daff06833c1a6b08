"""Parses Dockerfiles as BuildKit does: continued lines, comments, here-documents, variables.

https://docs.docker.com/reference/dockerfile/. This is our own code because existing libraries do not support
here-documents (dockerfile-parse) or bring another language's runtime into a process that forks (dockerfile).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from rollout.model.errors import InputError

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_HEREDOC = re.compile(r"""(?<!<)<<(-?)(["']?)([A-Za-z_][\w.]*)\2""")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_KNOWN = [
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
]


class DockerfileError(InputError):
    """The text is not a Dockerfile, or asks for something unsupported."""


@dataclass(frozen=True, slots=True)
class Heredoc:
    name: str
    text: str
    expand: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction. `words` are its arguments if they are a JSON list. `line` counts from 1."""

    name: str
    value: str
    line: int
    flags: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        return next((value for key, value in self.flags if key == name), None)


def parse(text: str) -> tuple[Instruction, ...]:
    """Parse a Dockerfile. Raises DockerfileError with the line."""
    lines = text.removeprefix("\ufeff").splitlines()
    escape = _escape(lines)
    found: list[Instruction] = []
    at = 0
    while at < len(lines):
        begun = at
        joined, at = _join(lines, at, escape)
        if not joined.strip():
            continue
        name, rest = [*joined.split(None, 1), ""][:2]
        name = name.upper()
        if name not in _KNOWN:
            raise DockerfileError(f"Dockerfile, line {begun + 1}: there is no instruction {name}")
        heredocs, at = _heredocs(rest, lines, at, begun + 1) if name in _WITH_HEREDOC else ((), at)
        flags, value = _flags(rest.strip())
        found.append(Instruction(name, value, begun + 1, flags, _words(value), heredocs))
    if not any(one.name == "FROM" for one in found):
        raise DockerfileError("the Dockerfile has no FROM")
    early = next(one for one in found if one.name != "ARG")
    if early.name != "FROM":
        raise DockerfileError(f"Dockerfile, line {early.line}: {early.name} stands before FROM")
    return tuple(found)


def _escape(lines: list[str]) -> str:
    for line in lines:
        directive = _DIRECTIVE.match(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2]
    return "\\"


def _join(lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """Return the logical line that begins at `at`, without comments and empty lines in it, and the start of the next.

    Comments and empty lines before its first word do not belong to it: the line is then empty.
    """
    joined = ""
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.lstrip().startswith("#") or (joined and not line.strip()):
            if not joined:
                return "", at
            continue
        stripped = line.rstrip()
        if not stripped.endswith(escape) or not stripped:
            return joined + line, at
        joined += stripped[: -len(escape)]
    return joined, at


def _heredocs(rest: str, lines: list[str], at: int, begun: int) -> tuple[tuple[Heredoc, ...], int]:
    found: list[Heredoc] = []
    for match in _HEREDOC.finditer(rest):
        tabs, quote, name = match[1], match[2], match[3]
        body: list[str] = []
        while True:
            if at >= len(lines):
                raise DockerfileError(f"Dockerfile, line {begun}: the here-document {name} does not end")
            line = lines[at].lstrip("\t") if tabs else lines[at]
            at += 1
            if line == name:
                break
            body.append(line)
        found.append(Heredoc(name, "".join(f"{line}\n" for line in body), not quote))
    return tuple(found), at


def _flags(rest: str) -> tuple[tuple[tuple[str, str], ...], str]:
    flags: list[tuple[str, str]] = []
    while match := _FLAG.match(rest):
        flags.append((match[1], match[2] or ""))
        rest = rest[match.end() :]
    return tuple(flags), rest


def _words(value: str) -> tuple[str, ...] | None:
    if not value.startswith("["):
        return None
    try:
        found: object = json.loads(value)
    except ValueError:
        return None
    words = cast("list[object]", found) if isinstance(found, list) else [None]
    return tuple(str(word) for word in words) if all(isinstance(word, str) for word in words) else None


# Variables

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+?])((?:[^{}]|\$\{[^{}]*\})*))?\})")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Substitute `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+other}`; quotes are kept."""

    def fill(match: re.Match[str]) -> str:
        name, how, other = match[1] or match[2], match[3] or "", match[4] or ""
        value = values.get(name)
        there = bool(value) if how.startswith(":") else value is not None
        if how.endswith("-"):
            return (value or "") if there else expand(other, values)
        if how.endswith("+"):
            return expand(other, values) if there else ""
        if how.endswith("?") and not there:
            raise DockerfileError(f"{name} is not set: {other}")
        return value or ""

    return _VARIABLE.sub(fill, text)


def split(text: str, values: Mapping[str, str] | None = None) -> list[str]:
    """Split text into words as a Dockerfile does: remove quotes and backslashes, and substitute variables."""
    words: list[str] = []
    _each(text, values or {}, values is not None, words.append)
    return words


def unquote(text: str, values: Mapping[str, str]) -> str:
    """Return the whole text as one word."""
    words: list[str] = []
    _each(text, values, True, words.append, blanks="")
    return "".join(words)


def _each(text: str, values: Mapping[str, str], filled: bool, take: Callable[[str], None], blanks: str = " \t") -> None:
    word: list[str] = []
    begun = False
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'" and at + 1 < len(text) and (not quote or text[at + 1] in '"\\$'):
            word.append(text[at + 1])
            begun = True
            at += 2
            continue
        if char in ("'", '"') and (not quote or quote == char):
            quote = "" if quote else char
            begun = True
        elif char == "$" and filled and quote != "'" and (match := _VARIABLE.match(text, at)):
            word.append(expand(match[0], values))
            begun = True
            at = match.end()
            continue
        elif char in blanks and not quote:
            if begun:
                take("".join(word))
            word, begun = [], False
        else:
            word.append(char)
            begun = True
        at += 1
    if quote:
        raise DockerfileError(f"a quote is not closed: {text}")
    if begun:
        take("".join(word))
