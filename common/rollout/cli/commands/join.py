"""`rollout join`: makes this host one that can control a cluster."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.commands.context import keep_joined
from rollout.cli.tokens import TokenFileOption, TokenOption, find_token
from rollout.client.target import DEFAULT_TLS_DIR


def join(
    coordinator: Annotated[
        str, typer.Option("--coordinator", metavar="HOST:JOIN_PORT", help="Join address of a coordinator.")
    ],
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    tls_dir: Annotated[
        Path, typer.Option("--tls-dir", metavar="DIR", help="Directory of this host's key and certificate.")
    ] = Path(DEFAULT_TLS_DIR),
    context: Annotated[
        str, typer.Option("--context", metavar="NAME", help="Name of the new context; default: the cluster's.")
    ] = "",
) -> None:
    """Enrol this host as an operator's, and use the cluster from now on.

    The authority is checked against the token's hash before the token is sent. Commands find the cluster through DIR in
    this directory, elsewhere through the new context.
    """
    from rollout.security import join_client  # brings cryptography and grpc
    from rollout.security.roles import Role
    from rollout.security.tokens import check_role

    token = find_token(token, token_file)
    check_role(token, Role.OPERATOR)
    joined = asyncio.run(join_client.join(coordinator, token, tls_dir, socket.gethostname()))
    typer.echo(joined.told(tls_dir))
    keep_joined(context, joined.cluster, tls_dir)
