"""`rollout context`: named clusters, one of which is in use."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.options import JsonOption, complete_context
from rollout.cli.program import new_app
from rollout.client.contexts import Context, Contexts, contexts_path
from rollout.client.origin import authority_of
from rollout.client.target import DEFAULT_TLS_DIR, context_target, find_target
from rollout.model.errors import ConfigError
from rollout.security import files

app = new_app(help="Manage names of clusters.")


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The context.", autocompletion=complete_context)]


@app.command("list")
def list_contexts(json: JsonOption = False) -> None:
    """List the clusters that this account has joined or added; `*` marks the one in use.

    They are kept in $XDG_CONFIG_HOME/rollout/contexts.toml (~/.config by default).
    --json: `{"current", "contexts": [{"name", "cluster", "coordinators", "tls_dir"}]}`; keys are only ever added.
    """
    contexts = Contexts.read()
    listed = [(name, *_described(name, context)) for name, context in sorted(contexts.known.items())]
    if json:
        from rollout.cli.show import print_json

        keys = ("name", "cluster", "coordinators", "tls_dir")
        print_json({"current": contexts.current, "contexts": [dict(zip(keys, one, strict=True)) for one in listed]})
        return
    if not listed:
        typer.echo("no contexts: `rollout join` makes one")
        return
    width = max(len(name) for name, *_ in listed)
    for name, cluster, addresses, tls_dir in listed:
        mark = "*" if name == contexts.current else " "
        typer.echo(f"{mark} {name:<{width}}  cluster {cluster} at {', '.join(addresses) or '?'}  ({tls_dir})")


@app.command("use")
def use_context(name: NameArgument) -> None:
    """Send commands to this cluster, unless another is named."""
    contexts = Contexts.read()
    context = contexts.get(name)
    contexts.current = name
    contexts.write()
    cluster, addresses, _ = _described(name, context)
    typer.echo(f"in use: {name}, cluster {cluster} at {', '.join(addresses) or '?'}")
    _tell_what_comes_first(name)


@app.command("add")
def add_context(
    name: NameArgument,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="A coordinator; repeatable; default: those the directory knows."
        ),
    ] = None,
    tls_dir: Annotated[
        Path, typer.Option("--tls-dir", metavar="DIR", help="Directory of the operator's certificates.")
    ] = Path(DEFAULT_TLS_DIR),
    use: Annotated[bool, typer.Option("--use", help="Use the context from now on.")] = False,
) -> None:
    """Add or change a context: a name for a cluster whose certificates are in DIR."""
    directory = files.expand(tls_dir).absolute()
    if not any((directory / one).exists() for one in (files.HOST, files.CA_KEY)):
        raise ConfigError(
            f"--tls-dir {tls_dir}: no certificates are there: join the cluster first, which makes the context: rollout "
            f"join --context {name} --coordinator HOST:JOIN_PORT --token-file FILE"
        )
    context = Context(tls_dir=str(directory), coordinator_addrs=coordinator or [])
    target = context_target(name, context, "")  # its addresses are good
    contexts = Contexts.read()
    contexts.add(name, context, use=use or not contexts.current)
    contexts.write()
    typer.echo(f"context {name}: {target}" + (", in use" if contexts.current == name else ""))


@app.command("remove")
def remove_context(name: NameArgument) -> None:
    """Remove a context; the certificates stay."""
    contexts = Contexts.read()
    context = contexts.get(name)
    del contexts.known[name]
    if contexts.current == name:
        contexts.current = ""
    contexts.write()
    typer.echo(f"removed context {name}; the certificates in {context.tls_dir} stay")


def keep_joined(chosen: str, cluster: str, tls_dir: Path) -> None:
    """Record the joined cluster as a context in use, named `chosen` or after the cluster.

    If contexts cannot be stored, only the directory finds the cluster.
    """
    directory = files.expand(tls_dir).absolute()
    try:
        contexts = Contexts.read()
        name = chosen or _name_for(cluster, directory, contexts)
        contexts.add(name, Context(tls_dir=str(directory)), use=True)
        contexts.write()
    except ConfigError as error:
        sys.stderr.write(f"note: no context was made: {error.message}\n")
        return
    typer.echo(
        f"`rollout` commands go to this cluster from now on, as context {name} (kept in {contexts_path()})\n"
        "another cluster: `rollout context list` shows all that were joined, `rollout context use NAME` chooses one"
    )


def _name_for(cluster: str, directory: Path, contexts: Contexts) -> str:
    """Return the cluster's own name, with a number if another cluster already has it."""
    here = authority_of(directory)
    for number in count(1):
        name = cluster if number == 1 else f"{cluster}-{number}"
        known = contexts.known.get(name)
        if known is None or authority_of(Path(known.tls_dir)) in ("", here):
            return name
    raise AssertionError("there is always a further number")


def _described(name: str, context: Context) -> tuple[str, list[str], str]:
    try:
        target = context_target(name, context, "")
    except ConfigError:
        return context.cluster or "rollout", [], context.tls_dir
    return target.cluster, target.addresses, context.tls_dir


def _tell_what_comes_first(name: str) -> None:
    target = find_target(None, None)
    if target.addresses and target.why != f"context {name}":
        sys.stderr.write(
            f"note: in this directory commands go to {target}, which comes first; --context {name} goes to this one\n"
        )
