"""Finds a training run, or one of its snapshots, in any of the user's clusters.

A command that works on this machine alone leaves a private cluster in its output directory. The run that a user wants
may therefore be in another cluster than the command's. If an option or the environment names a cluster, only that one
is asked. Otherwise the order is: the command's own cluster; the clusters of runs that were started from here, whose
files show whether they may hold the run before a coordinator is started; the joined cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout.cli.asking import PATIENCE_S, once, reached
from rollout.cli.options import choose_cluster, chosen
from rollout.cli.references import LAST, means, resolve_run
from rollout.client.embedded_cloud import keeps_objects_in_a_bucket
from rollout.client.origin import authority_of, origin_of
from rollout.client.private import private_runs, state_of
from rollout.client.recent import recent_runs
from rollout.client.target import ClusterSelector, Target, find_target, private_target
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
    """Clusters to search.

    `own` is the command's cluster, or None if it has none yet. `only` restricts the search to it. `near` lists
    directories that may hold, or have below them, private clusters that are not recorded elsewhere. `takes_dir` says
    whether the command has the option --dir.
    """

    own: Target | None
    only: bool
    near: tuple[Path, ...]
    tell: Tell
    takes_dir: bool = True


def places(coordinator: list[str] | None, tls_dir: Path | None, tell: Tell) -> Places:
    """Return the places for a command that looks at runs: those that its options name, or all."""
    choose_cluster(coordinator, tls_dir)
    target = find_target(coordinator, tls_dir, chosen().selector)
    named = target.by != "" or tls_dir is not None
    return Places(target if named else None, named, (Path(),), once(tell))


async def find_run(where: Places, text: str) -> tuple[Target, str]:
    """Return (cluster, run id), as `at_run` finds them."""
    async with at_run(where, text) as (target, _, run_id):
        return target, run_id


async def find_named(where: Places, uri: str, step: int | None) -> tuple[Target, Snapshot]:
    """Return the snapshot that `snapshot:ID` or `run:RUN` names, and its cluster.

    `step` selects a snapshot of the run; None selects the last. Raises NotFoundError.
    """
    from rollout.client.snapshots import snapshot_at

    kind, _, text = uri.partition(":")
    if kind == "snapshot":
        return await find_snapshot(where, text)
    async with at_run(where, text) as (target, client, run_id):
        return target, await snapshot_at(client, run_id, step)


async def find_snapshot(where: Places, text: str) -> tuple[Target, Snapshot]:
    """Return (cluster, snapshot), as `at_snapshot` finds them."""
    async with at_snapshot(where, text) as (target, _, found):
        return target, found


@asynccontextmanager
async def at_snapshot(where: Places, text: str) -> AsyncGenerator[tuple[Target, Runs, Snapshot]]:
    """Yield (cluster, client, snapshot) for the beginning of a snapshot's id.

    Raises NotFoundError, or ConfigError if several snapshots match.
    """
    from rollout.client import snapshots

    wanted = text.removeprefix("snapshot:").lower()
    if not wanted or not set(wanted) <= set("0123456789abcdef"):
        raise ConfigError(
            f"snapshot {text!r}: an id has the digits 0 to 9 and a to f; `rollout snapshot list` shows it"
        )
    absent = f"there is no snapshot {wanted[: snapshots.SHORT]!r}, or it was pruned"
    candidates = candidates_for_object(where, wanted)
    async with _first(candidates, where, lambda c: snapshots.find_snapshot(c, wanted), absent) as found:
        yield found


@asynccontextmanager
async def at_run(where: Places, text: str) -> AsyncGenerator[tuple[Target, Runs, str]]:
    """Yield (cluster, client, run id) for `text`, as `resolve_run` reads it. Raises NotFoundError and ConfigError."""
    candidates, wanted = candidates_for_run(where, text), text
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
    """Return what `work` returns for the run that `text` names, in whatever cluster it is."""

    async def working() -> Found:
        async with at_run(places(coordinator, tls_dir, tell), text) as (_, client, run_id):
            return await work(client, run_id)

    return asyncio.run(working())


# ---- where it may be


@asynccontextmanager
async def _first(
    candidates: list[Target], where: Places, ask: Callable[[Runs], Awaitable[Found]], absent: str
) -> AsyncGenerator[tuple[Target, Runs, Found]]:
    """Yield the first cluster that knows the object, a client of that cluster, and its answer."""
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
    other = "--coordinator HOST:PORT or --context NAME"
    advice = f"Name its cluster: --dir OUTPUT_DIRECTORY for a run of this machine alone, {other} for another"
    if not where.takes_dir:
        advice = f"Start this command where the run's output directory is, or name its cluster: {other}"
    raise NotFoundError(f"{absent}, as far as is known here{seen}. {advice}")


async def _known_run(client: Runs, text: str) -> str:
    run_id = await resolve_run(client, text)
    await client.get(run_id)  # a whole id is taken as it is
    return run_id


async def _last(where: Places) -> tuple[list[Target], str]:
    """Return (candidate clusters, id) of the run that was last submitted from here."""
    for run_id in recent_runs():
        if candidates := candidates_for_run(where, run_id):
            return candidates, run_id
    raise NotFoundError(f"{LAST}: no run was submitted from here that is still known")


def candidates_for_run(where: Places, text: str) -> list[Target]:
    def fits(run: _Known) -> bool:
        run_id, part = run.run_id, text.upper()
        return run_id == part or (not is_ulid(part) and (means(run_id, text) or text in run.names))

    found = [] if where.only else [run for run in _known(where) if fits(run)]
    named = [run for run in found if text in run.names]
    if len({run.run_id for run in named}) > 1:
        where.tell(f"note: {len({run.run_id for run in named})} runs are named {text!r}; this is about the nearest")
    return _candidates(where, [run.target for run in [*named, *found]])


def candidates_for_object(where: Places, wanted: str) -> list[Target]:
    """Return the private clusters whose store holds an object whose id begins with `wanted`, or is a bucket, and the
    clusters of other machines."""
    first, second = f"{wanted[:2]:?<2}", f"{wanted[2:4]:?<2}"
    patterns = [f"objects/{part}{first}/{second}/{wanted}*" for part in ("cas/", "")]  # and in the layout of before
    targets = {_identity(run.target): run.target for run in _known(where)}.values()
    holding = [one for one in targets if one.private is not None and _holds(one.private, patterns)]
    return _candidates(where, [*holding, *(one for one in targets if one.private is None)])


def _holds(state: Path, patterns: list[str]) -> bool:
    return keeps_objects_in_a_bucket(state) or any(True for pattern in patterns for _ in state.glob(pattern))


def _candidates(where: Places, known: list[Target]) -> list[Target]:
    own = [where.own] if where.own is not None and _exists(where.own) else []
    if where.only:
        return own
    joined = find_target(None, None, ClusterSelector())
    found = [*own, *known, *([joined] if joined.addresses else [])]
    first: dict[str, Target] = {}
    for target in found:
        first.setdefault(_identity(target), target)
    return list(first.values())


def _exists(target: Target) -> bool:
    return bool(target.addresses) or (target.private is not None and state_of(target.private) is not None)


def _identity(target: Target) -> str:
    return str(target.private.resolve()) if target.private is not None else authority_of(target.tls_dir)


@dataclass(frozen=True, slots=True)
class _Known:
    """A run that was started from here, and its cluster."""

    run_id: str
    names: tuple[str, ...]
    target: Target


def _known(where: Places) -> Iterator[_Known]:
    """Yield the runs of nearby output directories, then the others, newest first."""
    for directory in where.near:
        for output in (directory, *_outputs_below(directory)):
            if (run_id := _read(output / RUN_ID).decode("ascii", "replace").strip()) and (
                target := cluster_of(output, run_id)
            ):
                yield _Known(run_id, _names(output), target)
    for run in reversed(private_runs()):
        yield _Known(run.run_id, (run.name,), private_target(run.state))


def cluster_of(output: Path, run_id: str) -> Target | None:
    """Return the cluster of an output directory's run, or None if it is not known."""
    if (state := state_of(output)) is not None:
        return private_target(state)
    origin = origin_of(output, run_id)
    if origin is None:
        return None
    return Target(list(origin.addresses), Path(origin.tls_dir), origin.cluster, True, str(output))


def _outputs_below(directory: Path) -> list[Path]:
    with suppress(OSError):
        patterns = (f"*/{RUN_ID}", f"*/*/{RUN_ID}")  # a job's is jobs/NAME
        return [path.parent for pattern in patterns for path in sorted(directory.glob(pattern))]
    return []


def _names(output: Path) -> tuple[str, ...]:
    stored = unseal(_read(output / RUN_CONFIG)) or {}
    return (str(stored.get("config", {}).get("run", {}).get("name", "")), output.resolve().name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
