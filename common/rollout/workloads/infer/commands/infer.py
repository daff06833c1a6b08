"""`rollout infer`: the standard command, `preview` and `retry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.commands.standard import standard_commands
from rollout.cli.options import JsonOption
from rollout.cli.progress import display_for
from rollout.cli.show import print_json
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings, located
from rollout.workloads.infer.commands import COMMANDS
from rollout.workloads.infer.commands.retry import retry
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.preview import preview
from rollout.workloads.registered import load

app = standard_commands(load("infer"), COMMANDS["infer"].help, "batch")
app.command("retry")(retry)
_OF_RUNS = (
    "name", "coordinator", "tls_dir", "resume", "workers", "dry_run", "detach", "follow", "stop_when_empty",
)  # fmt: skip


@app.command("preview")
@work_command(InferConfig, without=_OF_RUNS)
def show_preview(
    typed: Typed,
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration file (TOML).")],
    show: Annotated[int, typer.Option("--show", metavar="N", min=0, help="Prompts to show in full.")] = 3,
    json: JsonOption = False,
) -> None:
    """Show the first prompts as the model reads them, and count the tokens of all, without an engine.

    It needs the package transformers, and names rows whose prompt leaves no room for a completion or for max_tokens.

    --json: {rows, prompts: [{row, file, line, tokens, text}], tokens: {min, median, p99, max, total}, limit,
    too_long: {rows, first}, cut: {rows, first}, refused: {rows, first}}. Keys are only ever added.

    Exit codes: 0; 2 configuration, input, or a tokenizer that cannot be loaded.
    """
    settings = load_settings(InferConfig, config, typed.given)
    display = display_for(json=False)
    try:
        with located(config, InferConfig):
            found = preview(settings, show, lambda text: display.step(text) if text and not json else None)
    finally:
        display.close()
    if json:
        print_json(found.to_json())
        return
    for line in found.lines():
        display.note(line)
