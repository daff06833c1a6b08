"""Turns rows into items: identity, lanes and limits. The command and the Python API share it."""

from __future__ import annotations

import json
from typing import Any, cast

from blake3 import blake3

from rollout.model.errors import InputError
from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Lane, RunSpec
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.map.call import Call
from rollout.workloads.map.config import RunSection
from rollout.workloads.map.limits import BACKSTOP_S

WORKLOAD = "map"
LANES_MAX = 1000
_SCHEMA = b"\x01"


def run_config(call: Call, manifest: str | None, run: RunSection) -> JsonObject:
    """Return what the executor and a later resume need of a run, without its input. Raises ConfigError if arguments are
    not JSON."""
    code: JsonObject = {} if manifest is None else {"manifest": manifest}
    arguments = call.arguments()
    return {
        "function": call.function,
        **({"arguments": arguments} if arguments else {}),
        "code": code,
        "timeout_s": run.timeout,
        "run": run.model_dump(exclude={"timeout"}),
    }


class Planner:
    """Makes the items of one run, whose configuration is `config`."""

    def __init__(self, config: JsonObject) -> None:
        arguments = [config["arguments"]] if "arguments" in config else []
        self._identity = blake3(_SCHEMA + canonical([config["function"], config["code"], *arguments])).digest()
        self._timeout_s = float(config["timeout_s"])
        self._run = RunSection.model_validate({"timeout": self._timeout_s, **config["run"]})
        self._specs: dict[str, ItemSpec] = {}

    def item(self, index: int, payload: bytes, lane: str = "") -> NewItem:
        """Return the item of row `index`, counted from 0, whose JSON is `payload`."""
        identity = blake3(self._identity + index.to_bytes(8, "little") + payload).digest()
        return NewItem(identity, payload, self.spec(lane))

    def spec(self, lane: str) -> ItemSpec:
        spec = self._specs.get(lane)
        if spec is None:
            run = self._run
            resources = [("gpus", float(run.gpus)), ("memory_mib", run.memory), ("slots", 1.0)]
            spec = self._specs[lane] = ItemSpec(
                lane=lane,
                resources=tuple((name, amount) for name, amount in resources if amount),
                timeout_ms=round((self._timeout_s + BACKSTOP_S) * 1000) if self._timeout_s else 0,
                max_attempts=run.max_attempts,
                retry_backoff_ms=round(run.retry_backoff * 1000),
            )
        return spec


def lane_of(row: Any, key: str) -> str:
    """Return the lane of a row: the value of its field `key`. Raises InputError if that cannot name a lane."""
    if not isinstance(row, dict) or key not in row:
        raise InputError(f"the row has no field {key!r}, which --lane-key names")
    value = cast("dict[str, Any]", row)[key]
    if isinstance(value, dict | list | float) or value is None:
        raise InputError(f"the field {key!r} must be a string, a whole number, true or false to name a lane")
    name = value if isinstance(value, str) else json.dumps(value)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InputError(
            f"the field {key!r} names a lane, and holds half of a surrogate pair: repair the escape"
        ) from None
    if not 0 < size <= 256:
        raise InputError(f"the field {key!r} names a lane, so it must have 1 to 256 bytes")
    return name


def map_spec(run_id: str, config: JsonObject, free: frozenset[str] = frozenset()) -> RunSpec:
    run = config["run"]
    lanes: list[str] = config.get("lanes", [])
    cap = run["concurrency"]
    return RunSpec(
        run_id=run_id,
        workload=WORKLOAD,
        config=canonical({key: value for key, value in config.items() if key not in free}),
        name=run["name"],
        priority=run["priority"],
        max_in_flight=0 if run["lane_key"] else cap,
        lanes=tuple(Lane(name, cap) for name in lanes),
    )
