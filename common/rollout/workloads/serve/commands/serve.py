"""`rollout serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings, located
from rollout.workloads.registered import load
from rollout.workloads.serve.config import ServeConfig

app = typer.Typer(add_completion=False)


@app.command()
@work_command(ServeConfig, without=("name", "resume", "detach"))
def serve(
    typed: Typed,
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The server's configuration (TOML).")],
) -> None:
    """Answer requests of OpenAI's clients with the engines of a cluster, until Ctrl-C.

    Addresses: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /metrics. /health answers 200
    once an engine has generated something.

    With no cluster named or joined, or with --local, it starts a coordinator and workers on this machine for as long as
    it runs. Batches of the same model share its engines: requests go first.

    Ctrl-C takes no further requests and finishes those that run; a second one ends at once. SIGHUP reads the
    configuration again: another model takes over when it is ready, and no request is dropped.

    --json prints an object a line, told apart by `event`: `cluster` {cluster, addresses, private, why}, `listening`
    {url}, `ready` {url, model, run_id}, `switched` {model, run_id}, `draining` {in_flight}, `ended` {}, `note`
    {message}, `dry_run` {model, replicas, workers} and `error` {error: {code, message, faults}}.

    Exit codes: 0 it was ended; 1 no engine can be started, or somebody ended its run; 2 configuration, or the address
    is in use.
    """
    from rollout.cli.session import Options  # brings grpc
    from rollout.workloads.serve.commands.serving import serve_until_ended

    def read() -> ServeConfig:
        return load_settings(ServeConfig, config, typed.given)

    at_place = partial(located, config, ServeConfig)
    settings = read()
    options = Options(words=typed.words("serve", config=config), **typed.shared)
    with at_place():
        raise typer.Exit(serve_until_ended(load("serve"), settings, read, at_place, options))
