"""The workload `serve`: its items are replicas, attempts that answer requests until their run ends.

Requests are not items. They pass through the coordinator's memory (`rollout.client.relay`); the ledger has only the
replicas, their attempts and their counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.model.counts import counted
from rollout.model.errors import ConfigError
from rollout.model.item import NO_LIMIT, ItemSpec, NewItem
from rollout.model.run import END_ON_FAILURE, RunSpec
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.config import SERVER
from rollout.workloads.infer.engine_checks import Gathered, check_backend, check_host
from rollout.workloads.infer.model import model_json, resolve_model
from rollout.workloads.infer.request import SCHEMA_VERSION
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.local_model import names_snapshot, refuse_unless_whole_model
from rollout.workloads.port import Checked, FoundSnapshot, InputReader, Totals, Workload
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.keys import read_keys

EXECUTOR = "infer"
"""The executor that answers requests: the same engines as for batches."""
SECTION = f"executors.{EXECUTOR}"
_PRIORITY = 1000
"""Priority of the run: replicas come before rows, which use the remaining capacity."""


"""A replica fails for good where its configuration is wrong, or no gateway comes back: so do the others then."""


class ServeWriter:
    """A writer of nothing: replicas have no result lines."""

    files: tuple[str, ...] = ()

    def lines(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        return ()

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary


@dataclass(kw_only=True)
class ServeChecked(Checked):
    settings: ServeConfig


class Serve(Workload[ServeConfig, ServeChecked]):
    name = "serve"
    details = "Serve an OpenAI-compatible API with the engines of a cluster: streaming, replay, hot switch."
    settings = ServeConfig
    sections = frozenset(ServeConfig.model_fields)
    unit = "replicas"
    measure = "tokens"
    endless = True
    result_files = ()
    directory_key = "serve.dir"

    def __init__(self) -> None:
        self._here = False

    def works_here(self) -> None:
        self._here = True

    @property
    def executors(self) -> tuple[str, ...]:
        return (EXECUTOR,)

    def directory(self, settings: ServeConfig) -> Path:
        return Path(settings.serve.dir)

    def check_host(self, settings: ServeConfig) -> None:
        check_host(settings.backend, "requests")

    def check(self, settings: ServeConfig, reading: InputReader) -> ServeChecked:
        gathered = Gathered()
        model, notes = None, ()
        check_backend(settings.backend, gathered, here=self._here)
        with gathered.checking():
            notes = read_keys(settings.serve.api_keys_env, os.environ).notes
        with gathered.checking():
            model = resolve_model(settings, reading.directory)
        gathered.raise_all()
        assert model is not None
        engine = {
            "schema": SCHEMA_VERSION,
            "model": model_json(settings.model, model),
            "sampling": settings.sampling.model_dump(mode="json", exclude_unset=True),
            "allow_http_images": settings.serve.allow_http_images,
            "backend": settings.backend.model_dump(mode="json"),
        }
        taken = settings.backend.kind != SERVER and names_snapshot(settings.model.uri)
        return ServeChecked(
            config={
                "schema": SCHEMA_VERSION,
                "names": list(settings.names),
                "executors": {EXECUTOR: engine},
                "orphan_s": settings.serve.orphan_s,
                "run": {"name": settings.names[0], "priority": _PRIORITY},
            },
            total=settings.serve.max_replicas,
            trees=model.trees(f"{SECTION}.model"),
            snapshots=(f"{SECTION}.model",) if taken else (),
            notes=notes,
            settings=settings,
        )

    def found(self, checked: ServeChecked, key: str, snapshot: FoundSnapshot) -> None:
        refuse_unless_whole_model(snapshot.config, "model.uri")
        super().found(checked, key, snapshot)

    def plan(self, checked: ServeChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        """Yield replicas without end: there are as many as there are engines, which come and go."""
        spec = ItemSpec(executor=EXECUTOR, max_attempts=NO_LIMIT, max_worker_lost=NO_LIMIT)
        engine = canonical(config["executors"][EXECUTOR])
        for number in count(start):
            identity = blake3(b"serve\0" + number.to_bytes(8, "little") + engine).digest()
            yield NewItem(identity, canonical({"replica": number, "orphan_s": config["orphan_s"]}), spec)

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        return replace(super().spec(run_id, config), policies=(END_ON_FAILURE,))

    def writer(self, config: JsonObject) -> ServeWriter:
        return ServeWriter()

    def row_input(self, payload: bytes) -> tuple[Any, str]:
        return json.loads(payload), ""

    def describe(self, settings: ServeConfig, checked: ServeChecked) -> list[str]:
        serve = settings.serve
        keys = read_keys(serve.api_keys_env, os.environ)
        who = counted(len(keys.names), "API key") if keys.names else "no API key is asked for"
        return [
            f"model {settings.model.uri} on backend {settings.backend.kind}, for clients {settings.names[0]}",
            f"answers at {serve.listen_addr}{serve.root_path}{' (https)' if serve.tls_cert else ''}; {who}",
            f"{counted(serve.max_replicas, 'engine')} at most, {serve.max_in_flight} requests each at once",
            self.describe_workers(settings),
        ]

    def dry_run(self, settings: ServeConfig, checked: ServeChecked) -> JsonObject:
        return {"model": settings.model.uri, **super().dry_run(settings, checked)}

    def warnings(self, settings: ServeConfig) -> list[str]:
        found: list[str] = []
        if not settings.serve.api_keys_env and settings.serve.address.host not in ("127.0.0.1", "localhost", "::1"):
            found.append(f"{settings.serve.listen_addr} is open to others, and no API key is asked for")
        try:
            self.check_host(settings)
        except ConfigError as error:
            found.append(error.message)
        return found
