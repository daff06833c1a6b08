"""Names of images: `[registry/]repository[:tag][@digest]`, with the defaults that docker has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollout_worker.sandboxes.errors import ImageNotFoundError

_DEFAULT = "docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-f:]+\])(?::\d+)?")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`version`: a tag or a digest."""

    registry: str
    repository: str
    version: str

    @property
    def is_digest(self) -> bool:
        return self.version.startswith("sha256:")

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}{'@' if self.is_digest else ':'}{self.version}"


def parse(text: str) -> Reference:
    """ImageNotFoundError: it is no name of an image."""
    name, at, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = first
    else:
        registry, rest = _DEFAULT, name
    repository, colon, tag = rest.partition(":")
    if registry in (_DEFAULT, "index.docker.io"):
        registry = _DEFAULT
        repository = repository if "/" in repository else f"library/{repository}"
    fine = _REGISTRY.fullmatch(registry) and _REPOSITORY.fullmatch(repository) and (not colon or _TAG.fullmatch(tag))
    if not fine or (at and not _DIGEST.fullmatch(digest)):
        raise ImageNotFoundError(
            f"{text!r} is no name of an image: write [registry/]repository[:tag] or ...@sha256:..."
        )
    return Reference(registry, repository, digest if at else tag or "latest")
