"""Writes the files of a run from its ledger, without its input, through its workload's port."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rollout.cli.boundary import FAILED, OK
from rollout.cli.collecting import Collecting, to_its_end
from rollout.cli.progress import Display
from rollout.cli.words import unsuccessful
from rollout.client import Runs
from rollout.client.run_session import RunSession
from rollout.config.wording import describe
from rollout.model.counts import of_unit
from rollout.model.errors import ConfigError, InputError
from rollout.model.ids import short
from rollout.model.problems import problems
from rollout.model.run import ENDED
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.carrying import CARRIED
from rollout.workloads.collector import Collector
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Workload
from rollout.workloads.registered import entries, load
from rollout.workloads.resume import open_collector

OUTPUT = "output"


class ResultsOf:
    """One run's files in one directory. `options` are `KEY=VALUE` of [output]; `place` also stores files of single
    units."""

    def __init__(
        self,
        runs: Runs,
        run_id: str,
        directory: Path,
        display: Display,
        options: Sequence[str],
        *,
        place: bool = True,
    ) -> None:
        self._runs = runs
        self._place = place
        self._run_id = run_id
        self._directory = directory
        self._display = display
        self._options = options

    async def write(self) -> int:
        """Write the files and return the exit code.

        Raises ConfigError if the directory belongs to another run, or no installed workload matches.
        """
        status = await self._runs.get(self._run_id)
        workload = workload_of(status)
        with OutputDirectory.open(self._directory, "rollout run results") as output:
            output.check(self._run_id)
            stored = output.stored_config or {OUTPUT: await self._fitting(workload, status)}
            config = self._config(workload, output, json.loads(status.spec.config), stored)
            self._tell_carried(output, config)
            collector = await asyncio.to_thread(
                open_collector, workload, output, self._run_id, config, status.submitted, alone=True
            )
            try:
                return await self._collect(workload, config, output, collector, status)
            finally:
                await asyncio.shield(asyncio.to_thread(_close, collector))

    async def _fitting(self, workload: Workload[Any, Any], status: pb.RunStatus) -> JsonObject:
        """Return [output] for the shape of the first row; the section of the configuration file is no part of the
        run."""
        if not status.submitted:
            return {}
        reply = await self._runs.item(self._run_id, [0])
        payload = reply.payload
        if reply.HasField("payload_ref"):
            payload, _ = await self._runs.item_bytes(self._run_id, reply)
        with suppress(ValueError, InputError):
            first = workload.item_input(payload)[0]
            for key, section in workload.output_of_rows.items() if isinstance(first, dict) else ():
                if key in first:
                    return section
        return {}

    def _config(
        self, workload: Workload[Any, Any], output: OutputDirectory, config: JsonObject, stored: JsonObject
    ) -> JsonObject:
        """Return the run's configuration with [output] from `stored` or --set, and claim the directory for the run."""
        section = output_section(workload, output.path, self._options, stored)
        config |= {key: value for key, value in stored.items() if key in workload.free}
        config |= {OUTPUT: section}
        output.claim(self._run_id, config, workload.result_files, output.kept)
        return config

    def _tell_carried(self, output: OutputDirectory, config: JsonObject) -> None:
        carried = config.get(CARRIED)
        if carried and not (output.path / carried["directory"]).exists():
            self._display.note(
                f"note: run {short(self._run_id)} carries on the results of run {short(carried['run_id'])}, which are "
                "in its own output directory alone: the files here have the rows that it ran itself"
            )

    async def _collect(
        self,
        workload: Workload[Any, Any],
        config: JsonObject,
        output: OutputDirectory,
        collector: Collector,
        status: pb.RunStatus,
    ) -> int:
        for fault in collector.faults:
            self._display.note(f"note: {fault}; what it should hold is written anew from the ledger")
        session = RunSession(self._runs, self._run_id)
        files = Collecting(session, collector, self._display)

        async def read() -> pb.RunStatus:
            await self._read(session, files, collector, workload.unit, status.cursor)
            return status

        _, summary = await files.finish(read)
        complete = status.state == "completed" and collector.complete
        made = await to_its_end(workload.derive, config, output.path) if complete else []
        there = OutputPlace(output.path).files(workload.result_files, made)
        self._display.close()
        text = _text(workload, status, collector, there)
        self._display.event("summary", text, **summary, complete=complete, files=there)
        return OK if complete else FAILED

    async def _read(self, session: RunSession, files: Collecting, collector: Collector, unit: str, end: int) -> None:
        """Read the commit log up to `end`; later commits are left to the next command."""
        async with aclosing(session.log(collector.cursor, end)) as pages:
            async for entries in pages:
                await files.add(entries, place=self._place)
                self._display.step(f"writing results: {collector.cursor:,} of {of_unit(end, unit)}")


def workload_of(status: pb.RunStatus) -> Workload[Any, Any]:
    """Return the run's workload. Raises ConfigError if no installed workload writes its files."""
    name = status.spec.workload
    if name not in entries():
        raise ConfigError(
            f"run {short(status.spec.run_id)} is of the workload {name!r}, which is not installed here "
            f"(there are {', '.join(entries())}): install the package that provides it"
        )
    return load(name)


def output_section(
    workload: Workload[Any, Any], directory: Path, options: Sequence[str], stored: JsonObject
) -> JsonObject:
    """Return [output]: `stored` or else the defaults, overridden by `options`. Raises ConfigError."""
    section: JsonObject = dict(stored.get(OUTPUT, {}))
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--set {option}: write KEY=VALUE, such as openai=true")
        section[key.strip()] = _value(value.strip())
    field = workload.settings.model_fields.get(OUTPUT)
    model = field.annotation if field is not None else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        if options:
            raise ConfigError(f"--set: the workload {workload.name} has no section [{OUTPUT}]")
        return section
    keys = {"dir": str(directory)} if "dir" in model.model_fields else {}
    try:
        return model.model_validate({**section, **keys}).model_dump(mode="json")
    except ValidationError as error:
        names = [(f"{OUTPUT}.{'.'.join(map(str, e['loc']))}", e) for e in error.errors(include_url=False)]
        raise ConfigError(problems(f"{name}: {describe(e, name)}" for name, e in names)) from error


def _value(text: str) -> Any:
    """Parse a TOML value; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _close(collector: Collector) -> None:
    try:
        collector.flush()
    finally:
        collector.close()


def _text(workload: Workload[Any, Any], status: pb.RunStatus, collector: Collector, files: dict[str, str]) -> str:
    totals, unit = collector.totals, workload.unit
    of = of_unit(status.submitted, unit) + ("" if status.sealed else " submitted so far")
    lines = [
        f"run {short(status.spec.run_id)} is {status.state}: {totals.rows:,} of {of} are in the files"
        + (f" ({unsuccessful(totals.failed, totals.invalid)}: in errors.jsonl)" if totals.failed else "")
    ]
    if status.state not in ENDED:
        lines.append("what is committed later the same command adds")
    elif status.state != "completed":
        reason = status.reason.partition("\n")[0]
        why = f" ({reason})" if reason else ""
        lines.append(f"it ended before the rest had a result{why}: `rollout run resume` goes on with it")
    lines.append("files: " + ", ".join(files.values()))
    return "\n".join(lines)
