"""Cluster of a run: where the output directory's run is or goes, and what to do if that cluster is gone."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from rollout.cli.command_cluster import CommandCluster
from rollout.cli.options import chosen
from rollout.cli.work_options import Options
from rollout.client.origin import authority_of, origin_of
from rollout.client.private import STATE_DIR, known_private_runs, state_of
from rollout.client.target import ClusterSelector, Target, find_target, private_target
from rollout.model.errors import ConfigError
from rollout.model.ids import short
from rollout.workloads.output import RUN_ID


def target_of(options: Options) -> Target:
    """Return the cluster that the options name, wherever the output directory's run is."""
    selector = ClusterSelector(local=True) if options.local else chosen().selector
    return find_target(list(options.coordinators), options.tls_dir, selector)


def place(output: Path, target: Target, options: Options) -> Target:
    """Return the cluster of the run of `output`: by default a private one below the directory.

    Raises ConfigError with the command that resumes the run if it is on another cluster than `target`.
    """
    directory = output.expanduser()
    state, run_id = directory / STATE_DIR, _run_id(directory)
    origin = origin_of(directory, run_id)
    if origin is not None:
        here = authority_of(target.tls_dir) if target.addresses else ""
        if origin.authority and here != origin.authority:
            goes = f"{target}" if target.addresses else "a private cluster"
            raise ConfigError(
                f"run {short(run_id or '')} of {output} was started on {origin}, and this command would go to {goes}. "
                f"Go on with: {shlex.join(options.words)} {origin.options()}\n  or name another output directory to "
                "start a new run"
            )
        return target
    if not target.addresses:
        return private_target(state, target.why)
    if run_id is None or state_of(directory) is None:
        return target
    if target.by == "option":
        raise ConfigError(
            f"run {short(run_id)} of {output} was started on this machine, by the private cluster in {state}. Go on "
            f"without a cluster: {shlex.join([*options.words, '--local'])}\n  or name another output directory to "
            "start a new run"
        )
    return private_target(state, "the output directory")


def _run_id(output: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (output / RUN_ID).read_text("ascii").strip() or None
    return None


def why_gone(output: Path, run_id: str, cluster: CommandCluster) -> str:
    """Return why the cluster does not know the run, and how to continue if possible."""
    named = f"{output / RUN_ID} names run {run_id}"
    if cluster.had_ledger:
        return f"{named}, which was deleted"
    go_on = "To go on with it, name the cluster where it was started: --coordinator HOST:PORT or --context NAME"
    if cluster.is_own:
        state = output / STATE_DIR
        if any(run.run_id == run_id for run in known_private_runs()):
            return f"{named}, whose private cluster, {state}, was deleted: it alone could go on with the run"
        return (
            f"{named}, whose cluster is not known here: where that was a private one, {state} was deleted, or left "
            f"behind when the directory was copied\n{go_on}"
        )
    where = f'cluster "{cluster.target.cluster}" at {cluster.address}'
    if origin_of(output, run_id) is not None:
        return f"{named}, which was started on {where} and deleted there"
    return f"{named}, and {where} has no such run\n{go_on}; --local, if that was on this machine alone"
