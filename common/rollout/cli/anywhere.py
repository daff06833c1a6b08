"""Finding a training run, or a snapshot of one, in whatever cluster of this person's it is.

A command that works on this machine alone leaves a private cluster in its output directory, so what one run trained is
in another cluster than the run that wants it. A cluster that an option or the environment names is the only one that is
asked. Else it is the cluster of the command, then private ones, of which a look at their files tells which it may be
before a coordinator is started, then the cluster that was joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout.cli.asking import PATIENCE_S, reached
from rollout.cli.options import choose_cluster, chosen
from rollout.cli.recent import recent_runs
from rollout.cli.references import LAST, means, resolve_run
from rollout.client.origin import authority_of
from rollout.client.private import private_runs, state_of, states_below
from rollout.client.target import Target, Wish, find_target, private_target
from rollout.model.errors import ConfigError, NotFoundError, UnavailableError
from rollout.model.ids import is_ulid
from rollout.workloads.output import RUN_CONFIG, RUN_ID, unseal

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.client.snapshots import Snapshot

Found = TypeVar("Found")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look. `own`: the cluster of the command, None where it has none yet. `only`: nowhere else. `near`:
    directories in and below which private clusters may be that are not known otherwise."""

    own: Target | None
    only: bool
    near: tuple[Path, ...]
    tell: Tell


def places(coordinator: list[str] | None, tls_dir: Path | None, tell: Tell) -> Places:
    """For a command that looks at runs: those that its options name, or every one."""
    choose_cluster(coordinator, tls_dir)
    target = find_target(coordinator, tls_dir, chosen().wish)
    named = target.by != "" or tls_dir is not None
    return Places(target if named else None, named, (Path(),), tell)


async def find_run(where: Places, text: str) -> tuple[Target, str]:
    """(cluster, id), as `at_run`."""
    async with at_run(where, text) as (target, _, run_id):
        return target, run_id


async def find_named(where: Places, uri: str, step: int | None) -> tuple[Target, Snapshot]:
    """What `snapshot:ID` or `run:RUN` stands for; `step`: of a run's, which; None: its last. NotFoundError."""
    from rollout.client.snapshots import snapshot_at

    kind, _, text = uri.partition(":")
    if kind == "snapshot":
        return await find_snapshot(where, text)
    async with at_run(where, text) as (target, client, run_id):
        return target, await snapshot_at(client, run_id, step)


async def find_snapshot(where: Places, text: str) -> tuple[Target, Snapshot]:
    """By the beginning of its id. NotFoundError; ConfigError where it may be any of several."""
    from rollout.client import snapshots

    wanted = text.removeprefix("snapshot:").lower()
    if not wanted or not set(wanted) <= set("0123456789abcdef"):
        raise ConfigError(
            f"snapshot {text!r}: an id has the digits 0 to 9 and a to f; `rollout snapshot list` shows it"
        )
    absent = f"there is no snapshot {wanted[: snapshots.SHORT]!r}, or it was pruned"
    candidates = _of_object(where, wanted)
    async with _first(candidates, where, lambda c: snapshots.find_snapshot(c, wanted), absent) as (target, _, found):
        return target, found


@asynccontextmanager
async def at_run(where: Places, text: str) -> AsyncGenerator[tuple[Target, Runs, str]]:
    """(cluster, client, id) of what `text` stands for, as `resolve_run` has it. NotFoundError, ConfigError."""
    candidates, wanted = _of_run(where, text), text
    if text == LAST and not where.only:
        candidates, wanted = await _last(where)
    absent = f"there is no run {text!r}"
    async with _first(candidates, where, lambda client: _known_run(client, wanted), absent) as found:
        yield found


def work_at_run(
    coordinator: list[str] | None,
    tls_dir: Path | None,
    text: str,
    work: Callable[[Runs, str], Awaitable[Found]],
    tell: Tell,
) -> Found:
    """What `work` makes of the run that `text` stands for, wherever it is."""

    async def working() -> Found:
        async with at_run(places(coordinator, tls_dir, tell), text) as (_, client, run_id):
            return await work(client, run_id)

    return asyncio.run(working())


# ---- where it may be


@asynccontextmanager
async def _first(
    candidates: list[Target], where: Places, ask: Callable[[Runs], Awaitable[Found]], absent: str
) -> AsyncGenerator[tuple[Target, Runs, Found]]:
    """The first cluster that knows it, a client of it, and what it said."""
    looked: list[str] = []
    for target in candidates:
        if target is not where.own:
            where.tell(f"looking in {target}")
        async with AsyncExitStack() as stack:
            try:
                client, _ = await stack.enter_async_context(reached(target, where.tell, patience_s=PATIENCE_S))
                found = await ask(client)
            except (NotFoundError, UnavailableError) as error:
                if where.only:
                    raise
                looked.append(f"{target}{' (not reached)' if isinstance(error, UnavailableError) else ''}")
                continue
            yield target, client, found
            return
    seen = f"; looked in {', '.join(looked)}" if looked else ""
    raise NotFoundError(
        f"{absent}, as far as is known here{seen}. Name its cluster: --dir OUTPUT_DIRECTORY for a run of this machine "
        "alone, --coordinator HOST:PORT or --context NAME for another"
    )


async def _known_run(client: Runs, text: str) -> str:
    run_id = await resolve_run(client, text)
    await client.get(run_id)  # a whole id is taken as it is
    return run_id


async def _last(where: Places) -> tuple[list[Target], str]:
    """(where it may be, id) of the run that was last submitted from here."""
    for run_id in recent_runs():
        if candidates := _of_run(where, run_id):
            return candidates, run_id
    raise NotFoundError(f"{LAST}: no run was submitted from here that is still known")


def _of_run(where: Places, text: str) -> list[Target]:
    def fits(run_id: str, names: tuple[str, ...]) -> bool:
        return run_id == text.upper() or (not is_ulid(text.upper()) and (means(run_id, text) or text in names))

    return _candidates(where, [state for state, run_id, names in _private(where) if fits(run_id, names)])


def _of_object(where: Places, wanted: str) -> list[Target]:
    """Private clusters whose store holds an object whose id begins so."""
    first, second = f"{wanted[:2]:?<2}", f"{wanted[2:4]:?<2}"
    pattern = f"objects/{first}/{second}/{wanted}*"
    states = list(dict.fromkeys(state for state, _, _ in _private(where)))
    return _candidates(where, [state for state in states if any(state.glob(pattern))])


def _candidates(where: Places, states: list[Path]) -> list[Target]:
    own = [where.own] if where.own is not None and _exists(where.own) else []
    if where.only:
        return own
    found = [*own, *(private_target(state) for state in states)]
    joined = find_target(None, None, Wish())
    if joined.addresses:
        found.append(joined)
    return list({_identity(target): target for target in reversed(found)}.values())[::-1]


def _exists(target: Target) -> bool:
    return bool(target.addresses) or (target.private is not None and state_of(target.private) is not None)


def _identity(target: Target) -> str:
    return str(target.private.resolve()) if target.private is not None else authority_of(target.tls_dir)


def _private(where: Places) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """(state directory, run id, names) of the private runs that are known here, the newest first."""
    for run in reversed(private_runs()):
        yield run.state, run.run_id, (run.name,)
    for directory in where.near:
        here = state_of(directory)
        for state in [*([here] if here is not None else []), *states_below(directory)]:
            if run_id := _read(state.parent / RUN_ID).decode("ascii", "replace").strip():
                yield state, run_id, _names(state.parent)


def _names(output: Path) -> tuple[str, ...]:
    stored = unseal(_read(output / RUN_CONFIG)) or {}
    return (str(stored.get("config", {}).get("run", {}).get("name", "")), output.resolve().name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
