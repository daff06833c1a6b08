"""`rollout serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.work_command import Typed, work_command
from rollout.cli.work_options import Options
from rollout.config.load import load_settings, located
from rollout.workloads.registered import load
from rollout.workloads.serve.config import ServeConfig

app = typer.Typer(add_completion=False)


@app.command()
@work_command(ServeConfig, without=("name", "resume", "detach"))
def serve(
    typed: Typed,
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration file (TOML).")],
) -> None:
    """Serve an OpenAI-compatible API with the engines of a cluster, until Ctrl-C.

    Addresses: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health (200 once an engine is ready),
    /metrics.

    Without a cluster, or with --local, it starts a private one. Batches of the same model share its engines; requests
    come first. The first Ctrl-C finishes running requests. SIGHUP rereads the configuration and can switch the model
    without dropping a request.

    --json prints an object per line with an `event`: `cluster` {cluster, addresses, private, why}, `listening`
    {url}, `ready` {url, model, run_id}, `switched` {model, run_id}, `draining` {in_flight}, `ended` {}, `note`
    {message}, `dry_run` {model, replicas, workers} and `error` {error: {code, message, faults}}.

    Exit codes: 0 ended; 1 no engine can start, or its run was ended; 2 configuration, or the address is in use.
    """
    from rollout.workloads.serve.commands.serving import serve_until_ended

    def read() -> ServeConfig:
        return load_settings(ServeConfig, config, typed.given)

    at_place = partial(located, config, ServeConfig)
    settings = read()
    options = Options(words=typed.words("serve", config=config), **typed.shared)
    with at_place():
        raise typer.Exit(serve_until_ended(load("serve"), settings, read, at_place, options))
