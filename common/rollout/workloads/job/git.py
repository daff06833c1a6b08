"""Calls git for a job: the commit of a directory, and a repository's files at a commit."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from rollout.files import locked
from rollout.model.errors import InputError
from rollout.processes.command import Finished, run

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FETCH_S = 3600.0
_ASK_S = 120.0


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the account's cache of repositories."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout" / "git"


@dataclass(frozen=True, slots=True)
class Commit:
    """`changed` are paths below the directory that differ from the commit, relative to the top of the repository."""

    id: str
    changed: tuple[str, ...]


def commit_of(directory: Path) -> Commit | None:
    """Return the commit checked out in the repository that contains `directory`, or None without a repository or
    git."""
    try:
        found = _git(directory, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
        if found.code:
            return None
        status = _git(directory, "--no-optional-locks", "status", "--porcelain", "-z", "--no-renames", "--", ".")
    except (InputError, FileNotFoundError):
        return None
    changed = tuple(entry[3:] for entry in status.stdout.split("\0") if entry)
    return Commit(found.stdout.strip(), changed)


def checked_url(url: str) -> str:
    """Return `url` if it is safe to pass to git. Raises ValueError."""
    if not url or url.startswith("-") or any(ord(c) < 32 for c in url) or "::" in url.split("/")[0]:
        raise ValueError(
            f'"{url[:80]}" is no address of a repository: https://..., ssh://..., user@host:path or a path'
        )
    return url


def shown(text: str) -> str:
    """Redact `text` for a message: what precedes the @ of an address may be a password."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)


def _address(url: str) -> str:
    """Return `url` in a form that works from any directory: it is a path unless it names a protocol or a host."""
    checked_url(url)
    remote = "://" in url or re.match(r"[^/]*:", url)
    return url if remote else str(Path(url).expanduser().resolve())


def is_commit(text: str) -> bool:
    """Return whether `text` is a complete commit id, in lower-case hex."""
    return _COMMIT.fullmatch(text) is not None


def resolve_commit(url: str, reference: str | None) -> str:
    """Return the commit that `reference`, a branch or tag, names now in the repository at `url`; None means its default
    branch.

    Raises InputError if there is no such reference, or the repository cannot be reached.
    """
    if reference is not None and is_commit(reference):
        return reference
    named = reference or "HEAD"
    listed = _git(None, "ls-remote", "--", _address(url), named, f"{named}^{{}}", timeout_s=_ASK_S)
    lines = [line.partition("\t") for line in listed.stdout.splitlines()]
    commits = {name: commit for commit, _, name in lines}
    for name in (f"refs/tags/{named}^{{}}", f"refs/tags/{named}", f"refs/heads/{named}", named):
        if name in commits:
            return commits[name]
    hint = "; write all 40 digits of a commit" if re.fullmatch(r"[0-9a-fA-F]{4,64}", named) else ""
    raise InputError(f'{shown(url)}: there is no branch or tag "{named}"{hint}')


def checkout(url: str, commit: str, cache: Path) -> Path:
    """Return a directory with the files of the repository at `url` at `commit` (all hex digits), without `.git`.

    Each url and commit is fetched once, by one process at a time, and appears atomically. Raises InputError if it
    cannot be fetched or there is no such commit.
    """
    address = _address(url)
    place = cache / blake2b(address.encode(), digest_size=16).hexdigest()
    done = place / commit
    if done.is_dir():
        return done
    try:
        place.mkdir(parents=True, exist_ok=True)
        with locked(place / ".lock"):
            if not done.is_dir():
                _fetch(address, commit, place / ".fetching", done)
    except OSError as error:
        raise InputError(f"{shown(url)}: cannot write into {place}: {error.strerror or error}") from error
    return done


def _fetch(address: str, commit: str, work: Path, done: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)  # what a process that was killed left
    work.mkdir()
    try:
        _git(work, "init", "--quiet")
        shallow = _git(work, "fetch", "--quiet", "--depth=1", "--", address, commit, check=False, timeout_s=_FETCH_S)
        if shallow.code:  # a server that gives no single commit
            _git(work, "fetch", "--quiet", "--", address, "+refs/*:refs/all/*", timeout_s=_FETCH_S)
        found = _git(work, "cat-file", "-t", commit, check=False)
        if found.stdout.strip() != "commit":
            raise InputError(f"{shown(address)}: there is no commit {commit}")
        _git(work, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--force", commit, timeout_s=_FETCH_S)
        shutil.rmtree(work / ".git")
        work.rename(done)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _git(directory: Path | None, *arguments: str, check: bool = True, timeout_s: float = _ASK_S) -> Finished:
    """Run git. Raises InputError if it is not installed, failed or did not answer."""
    # Variables of a git that calls us, such as GIT_DIR in a hook, would lead ours elsewhere; nobody answers a prompt.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_LFS_SKIP_SMUDGE": "0"}
    where = [] if directory is None else ["-C", str(directory)]
    try:
        done = run(["git", *where, *arguments], env=environment, timeout_s=timeout_s, errors="surrogateescape")
    except FileNotFoundError as error:
        raise InputError("git is not installed here: install it, or give the tasks as a local path") from error
    except TimeoutError as error:
        raise InputError(f"git {arguments[0]} did not end within {timeout_s:.0f} s") from error
    if check and done.code:
        said = [line for line in done.stderr.splitlines() if line.strip()][:3]
        raise InputError(f"git {arguments[0]} failed: {shown(' '.join(said)) or f'exit code {done.code}'}")
    return done


_KEPT = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
