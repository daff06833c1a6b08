"""`rollout infer retry`: runs failed rows again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.directories import Kind, directory_of
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import OF_SERVER, SERVER, InferConfig, ModelSection
from rollout.workloads.infer.lines import COMPLETIONS
from rollout.workloads.infer.plan import READ
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import claimed
from rollout.workloads.registered import load
from rollout.workloads.staging import output_bucket, staging_directory

OF_INPUT = ("limit", "sample", "sample_seed", "follow", "stop_when_empty")
"""Options that select rows, which the run already fixed."""
BATCH = Kind("batch", "batches", lambda path: (path / COMPLETIONS).is_file() and claimed(path) is not None)


@work_command(InferConfig, without=["resume", "dry_run", "name", *OF_INPUT])
def retry(
    typed: Typed,
    run: Annotated[
        str, typer.Argument(metavar="[RUN|DIR]", help="The run, or its output directory or URL.", show_default=False)
    ] = "",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Its configuration in place of RUN.")
    ] = None,
    code: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="CODE", help="Only rows with this code in errors.jsonl; repeatable."),
    ] = None,
) -> None:
    """Run the failed rows of a complete batch again, and merge their results into its files.

    Invalid rows stay out, and the input must be unchanged. With --config, limits such as max_attempts or timeout_ms may
    differ. The same command resumes, with the exit codes of `rollout infer batch`.
    """
    if bool(run) == (config is not None):
        raise ConfigError("name the run or its output directory, or its configuration with --config FILE")
    settings = load_settings(InferConfig, config) if config is not None else _settings(_directory(run))
    words = ["rollout", "infer", "retry", *([run] if run else ["--config", str(config)])]
    for one in code or ():
        words += ["--code", one]
    typed.run(load("infer"), settings, words, config, retry=frozenset(code or ()))


def _directory(text: str) -> Path:
    bucket = output_bucket(text)
    if bucket is not None:
        found = staging_directory(bucket)
        if claimed(found) is None:
            raise ConfigError(
                f"{text}: its files are not on this machine: give the command where the batch was collected, or "
                "collect it here first, with `rollout infer batch` and its configuration"
            )
        return found
    found = directory_of(BATCH, text, lambda line: typer.echo(line, err=True))
    if found is None or claimed(found) is None:
        raise ConfigError(f"{text}: no batch here is called that: name its output directory, or --config FILE")
    return found


def _settings(directory: Path) -> InferConfig:
    """Return the settings of the run in `directory`. Raises ConfigError if its configuration is incomplete."""
    stored = claimed(directory)
    config: JsonObject = stored["config"] if stored is not None else {}
    if not {"model", "sampling", "input"} <= config.keys():
        raise ConfigError(f"{directory}: its run is no batch of `rollout infer`")
    sections = {name: value for name, value in config.items() if name in InferConfig.model_fields}
    sections["model"] = {key: value for key, value in config["model"].items() if key in ModelSection.model_fields}
    if config["backend"]["kind"] != SERVER:
        sections["backend"] = {key: value for key, value in config["backend"].items() if key not in OF_SERVER}
    sections["input"] = {"glob": config["input"].get("glob", []), **config["input"].get(READ, {})}
    bucket = output_bucket(config["output"]["dir"])
    sections["output"] = {**config["output"], "dir": str(bucket or directory)}
    try:
        return InferConfig.model_validate(sections)
    except ValueError as error:
        raise ConfigError(
            f"{directory}: the configuration of its run cannot be used (another version made it): name the file with "
            "--config FILE"
        ) from error
