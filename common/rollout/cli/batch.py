"""`rollout infer batch` from its configuration to its files."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.cli.boundary import INTERRUPTED, OK
from rollout.cli.collecting import BatchRun
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.plan_files import check_batch, need_backend
from rollout.cli.progress import Display, display_for
from rollout.client import Runs
from rollout.client.embedded import Embedded
from rollout.client.runs import new_ulid
from rollout.client.target import Target, connected, find_target
from rollout.config.load import load_settings
from rollout.model.errors import ConfigError, InputError, NotFoundError, RolloutError
from rollout.model.ids import check_ulid
from rollout.objects import tree
from rollout.wire import event_loop
from rollout.workloads.infer import (
    Collector,
    InferConfig,
    InputReport,
    OutputDirectory,
    ResolvedModel,
    check_input,
    describe_change,
    describe_ignored,
    first_changed_row,
    resolve_config,
    resolve_model,
    resumed_config,
    run_spec,
)

JsonObject = dict[str, Any]

STATE_DIR = ".rollout"
"""Below output.dir: the embedded cluster's ledger, objects, certificates and logs."""
_PATIENCE_S = 900.0  # a batch outlives a coordinator that is being repaired
_FIRST_PATIENCE_S = 20.0  # but an address that never answered a new batch is probably wrong
_GATED = ("meta-llama/", "mistralai/", "google/gemma")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    config: Path
    coordinators: list[str]
    tls_dir: Path | None
    resume: str | None
    workers: int | None
    dry_run: bool
    detach: bool
    json: bool

    def command(self) -> str:
        """What to type to go on."""
        words = ["rollout", "infer", "batch", "--config", str(self.config)]
        for address in self.coordinators:
            words += ["--coordinator", address]
        if self.tls_dir is not None:
            words += ["--tls-dir", str(self.tls_dir)]
        if self.workers is not None:
            words += ["--workers", str(self.workers)]
        return shlex.join(words)


def run_batch(options: BatchOptions) -> int:
    """The exit code. ConfigError and InputError before anything is started or written."""
    config = load_settings(InferConfig, options.config, {"workers.count": options.workers})
    if options.resume is not None:
        check_ulid(options.resume, "--resume")
    target = find_target(options.coordinators, options.tls_dir)
    if options.dry_run:
        return _dry_run(config, options)
    if not target.explicit:
        if options.detach:
            raise ConfigError("--detach needs a cluster that stays: name it with --coordinator HOST:PORT")
        need_backend(config)
    display = display_for(json=options.json)
    try:
        return event_loop.run(_Batch(options, config, target, display).run())
    finally:
        display.close()


def _dry_run(config: InferConfig, options: BatchOptions) -> int:
    """Checks everything that can be checked without a backend; constructs none, writes nothing."""
    report = check_batch(config)
    display = display_for(json=options.json)
    gated = config.model.uri.startswith(_GATED) and not Path(config.model.uri).exists()
    if gated and not os.environ.get("ROLLOUT_SECRET_HF_TOKEN"):
        display.note(f"warning: {config.model.uri} is gated and ROLLOUT_SECRET_HF_TOKEN is not set")
    fields = {"model": config.model.uri, "rows": report.rows, "workers": config.workers.count}
    display.event(
        "dry_run", f"dry-run OK: model={config.model.uri} inputs={report.rows} workers={config.workers.count}", **fields
    )
    return OK


class _Batch:
    """One invocation. What it learns on the way is kept here, for the message when it is interrupted."""

    def __init__(self, options: BatchOptions, config: InferConfig, target: Target, display: Display) -> None:
        self._options = options
        self._config = config
        self._target = target
        self._display = display
        self._run: BatchRun | None = None
        self._embedded: Embedded | None = None

    async def run(self) -> int:
        interrupts = Interrupts(self._at_once)
        interrupts.install()
        try:
            return await interrupts.guard(self._work())
        except Interrupted:
            self._say_interrupted()
            return INTERRUPTED

    async def _work(self) -> int:
        model = await asyncio.to_thread(resolve_model, self._config)
        with OutputDirectory.open(self._config.output.dir) as output:
            known = output.check(self._options.resume)
            report = await self._check_input(None if known else output.index_path)
            resolved = resolve_config(self._config, report, model)
            stored = output.stored_config
            if stored is not None:
                await self._compare(stored, resolved, output)
            if known and stored is not None and (finished := _finished(output, known, stored)):
                self._display.event("summary", _summary_text(finished, output.path), **finished)
                return OK
            patience_s = _PATIENCE_S if known else _FIRST_PATIENCE_S
            async with self._cluster(output.path, patience_s) as runs:
                run_id = known or new_ulid()
                config = await self._agree(runs, output, run_id, stored, resolved, model, new=known is None)
                return await self._carry_out(runs, output, run_id, config, model, report, resumed=known is not None)

    async def _check_input(self, index: Path | None) -> InputReport:
        told = asyncio.get_running_loop().time()
        loop = asyncio.get_running_loop()

        stopped = threading.Event()

        def progress(rows: int, size: int) -> None:
            nonlocal told
            if stopped.is_set():
                raise InputError("interrupted")
            if loop.time() - told > 2:
                told = loop.time()
                loop.call_soon_threadsafe(self._display.step, f"checking the input: {rows} rows, {size >> 20} MiB")

        try:
            return await asyncio.to_thread(check_input, self._config, index_path=index, progress=progress)
        finally:
            stopped.set()  # after Ctrl-C the thread would read on to the end of the input

    async def _compare(self, stored: JsonObject, resolved: JsonObject, output: OutputDirectory) -> None:
        """ConfigError that names what changed since the run was made."""
        changed_row = None
        if stored["input"]["digest"] != resolved["input"]["digest"]:
            changed_row = await asyncio.to_thread(first_changed_row, self._config, output.index_path)
        if changes := describe_change(stored, resolved, changed_row=changed_row):
            raise ConfigError(
                f"{output.path} holds run {output.run_id}, which cannot go on with another configuration:\n"
                + "\n".join(f"  {change}" for change in changes)
                + "\nChange it back, or start a new run by naming another output.dir"
            )
        for ignored in describe_ignored(stored, resolved):
            self._display.note(f"note: {ignored}")

    @asynccontextmanager
    async def _cluster(self, output: Path, patience_s: float) -> AsyncGenerator[Runs, None]:
        target = self._target
        if target.explicit:
            async with connected(target, patience_s=patience_s, on_trouble=self._trouble) as runs:
                yield runs
            return
        self._display.step("starting a coordinator and workers on this machine")
        embedded = Embedded(output / STATE_DIR, workers=self._config.workers.count, report=self._display.note)
        self._embedded = embedded
        try:
            await embedded.start()
            here = Target([embedded.address], embedded.tls_dir, "rollout", explicit=True)
            async with connected(here, patience_s=_PATIENCE_S, on_trouble=self._trouble) as runs:
                yield runs
        finally:
            await asyncio.shield(embedded.stop())

    async def _agree(
        self,
        runs: Runs,
        output: OutputDirectory,
        run_id: str,
        stored: JsonObject | None,
        resolved: JsonObject,
        model: ResolvedModel,
        *,
        new: bool,
    ) -> JsonObject:
        """The configuration the run goes on with, or starts with; the directory is the run's afterwards."""
        try:
            status = None if new else await runs.get(run_id)
        except NotFoundError:
            status = None
            if stored is None or _collected(output) > 0:
                elsewhere = (
                    "without --coordinator: it was started on this machine"
                    if stored is not None and self._target.explicit
                    else "with --coordinator HOST:PORT of the cluster it was submitted to"
                )
                raise ConfigError(
                    f"run {run_id} of {output.path} is not known at {runs.address}: go on where it was started "
                    f"({elsewhere}), or name another output.dir to start a new run"
                ) from None
        if status is not None:
            ledger: JsonObject = json.loads(status.spec.config)
            await self._compare(ledger | {key: resolved[key] for key in ("output", "workers")}, resolved, output)
            config = resumed_config(ledger, resolved)
        else:
            config = resolved
            if self._target.explicit and model.path is not None:
                await self._name_trees(config, model)
        output.claim(run_id, config)
        return config

    async def _name_trees(self, config: JsonObject, model: ResolvedModel) -> None:
        """A local model reaches workers as objects; what they are called is known before they are there."""
        self._display.step(f"hashing {model.uri}")
        assert model.path is not None
        config["model"]["manifest"] = (await tree.describe(model.path, links="follow")).id.hex()
        if model.tokenizer_path is not None:
            config["model"]["tokenizer_manifest"] = (await tree.describe(model.tokenizer_path, links="follow")).id.hex()

    async def _carry_out(
        self,
        runs: Runs,
        output: OutputDirectory,
        run_id: str,
        config: JsonObject,
        model: ResolvedModel,
        report: InputReport,
        *,
        resumed: bool,
    ) -> int:
        spec = run_spec(run_id, config)
        collector = await asyncio.to_thread(Collector, output, run_id, config)
        run = BatchRun(runs, spec, self._config, config, collector, self._display, rows=report.rows)
        self._run = run
        try:
            status = await run.open(resumed=resumed)
            runs.patience_s = _PATIENCE_S
            # A run whose every row is in the ledger may still lack the model: an earlier command was cut off.
            if config["model"].get("manifest") and status.state == "running":
                await self._upload(runs, run_id, model)
            failure = self._embedded.failure if self._embedded is not None else None
            return await run.carry_out(output.path, failure, detach=self._options.detach)
        finally:
            await asyncio.shield(asyncio.to_thread(run.close))

    async def _upload(self, runs: Runs, run_id: str, model: ResolvedModel) -> None:
        for path in (model.path, model.tokenizer_path):
            if path is None:
                continue

            def progress(done: int, total: int, path: Path = path) -> None:
                self._display.step(f"uploading {path.name}: {done >> 20} of {total >> 20} MiB")

            await runs.upload_tree(run_id, path, progress)

    # ---- trouble and interruption

    _troubled = False

    def _trouble(self, error: RolloutError | None, seconds: float) -> None:
        if error is None:
            if self._troubled:
                self._display.note(f"the coordinator answers again after {seconds:.0f} s")
            self._troubled = False
        elif seconds > 2 and not self._troubled:
            self._troubled = True
            self._display.note(f"the coordinator does not answer, trying on: {error.message.splitlines()[0][:200]}")

    def _say_interrupted(self) -> None:
        self._display.close()
        run, command = self._run, self._options.command()
        if run is None or run.run_id == "":
            self._display.event(
                "interrupted", "interrupted before anything was submitted", run_id="", committed=0, command=command
            )
            return
        committed = run.committed
        lines = [f"interrupted: {committed} of {run.rows} rows are in {self._config.output.dir}; nothing is lost"]
        if self._target.explicit:
            submitted = "" if run.submitted >= run.rows else f" ({run.submitted} of {run.rows} rows are submitted)"
            lines.append(
                f"run {run.run_id} goes on at the cluster{submitted}; stop it with: rollout run pause {run.run_id}"
            )
        lines.append(f"continue with: {command}")
        self._display.event("interrupted", "\n".join(lines), run_id=run.run_id, committed=committed, command=command)

    def _at_once(self) -> None:
        """The second Ctrl-C."""
        if self._embedded is not None:
            self._embedded.kill()
        self._display.close()
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


def _collected(output: OutputDirectory) -> int:
    try:
        return int(json.loads((output.path / ".collect.json").read_text("utf-8"))["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _finished(output: OutputDirectory, run_id: str, config: JsonObject) -> JsonObject | None:
    """The summary of a run that was completed and collected: nothing has to be started for it."""
    try:
        summary: JsonObject = json.loads((output.path / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if summary.get("run_id") != run_id or summary.get("state") != "completed":
        return None
    collector = Collector(output, run_id, config)
    try:
        return summary if collector.cursor == config["input"]["rows"] else None
    finally:
        collector.close()


def _summary_text(summary: JsonObject, directory: Path) -> str:
    rows = summary["rows"]
    return (
        f"run {summary['run_id']} is complete already: {rows['completed']} completions, {rows['failed']} failed rows, "
        f"in {directory}"
    )
