"""The record of one try at a trial, which is the data of the item's result, whether the item is done or failed.

Everything large is in one tar, `files`, with the layout of the trial's directory.
"""

from __future__ import annotations

from typing import Any, Self, cast

from pydantic import Field, ValidationError

from rollout.config.section import Section
from rollout.model.errors import InputError
from rollout.workloads.job.results import TrialResult
from rollout.workloads.json_form import JsonObject, canonical

SETUP, AGENT, VERIFIER, ARTIFACTS = "setup", "agent", "verifier", "artifacts"
"""Directories of a trial. Each of the first three has stdout.txt and stderr.txt; `agent` and `verifier` also have the
files of /logs/agent and /logs/verifier. With several steps those are below `steps/NAME/`."""


SERVICES_ENDED = "processes that the solution left running were ended before verification"
"""Beginning of a remark on a trial of the oracle."""


class Usage(Section):
    """The usage of a whole trial. `cost_usd` is None if the price is unknown. `models` are by name, if there are
    several."""

    n_input_tokens: int = 0
    n_cache_tokens: int = 0
    n_output_tokens: int = 0
    cost_usd: float | None = None
    models: dict[str, Usage] = Field(default_factory=dict)


class StepRecord(Section):
    """One step of a task with several. `error` is type and message."""

    name: str
    rewards: dict[str, float] | None
    error: tuple[str, str] | None = None


class TrialRecord(Section):
    """`trial` is the id and `files` the object of the tar, both in hex. `remarks` mention, for example, missing
    isolation."""

    trial: str
    result: TrialResult
    rewards: dict[str, float] | None = None
    steps: list[StepRecord] = Field(default_factory=list[StepRecord])
    files: str | None = Field(default=None, pattern=r"^([0-9a-f]{2})*$")
    usage: Usage = Usage()
    agent_version: str = ""
    provider: str = ""
    environment_cost_usd: float = 0.0
    remarks: list[str] = Field(default_factory=list[str])
    preserved: str = ""  # name of the sandbox that was left for a person to look at
    network: str = ""  # of the sandbox: none, allowlist, public or host; "": there was no sandbox
    policy: dict[str, Any] | None = None  # what the policy drew that answered its agent (`trials.agents.policy_engine`)

    def well_formed(self) -> Self:
        """Return a copy without lone surrogates, which agents' names and words may contain and which are not valid
        text."""
        return type(self).model_validate(as_text(self.model_dump()))

    def encode(self) -> bytes:
        return canonical(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a record. Raises InputError."""
        try:
            record = cls.model_validate_json(data)
            record.encode()  # a time that is in no year of ours, say, could not be written again
        except (ValueError, ValidationError) as error:
            raise InputError(f"not the record of a trial: {error}") from error
        return record


def as_text(value: Any) -> Any:
    """Return `value` with lone surrogates escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {as_text(key): as_text(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple(as_text(one) for one in cast("tuple[Any, ...]", value))
    if isinstance(value, list):
        return [as_text(one) for one in cast("list[Any]", value)]
    return value


def record_json(record: TrialRecord) -> JsonObject:
    """Return the record as part of a line."""
    return record.model_dump(mode="json", exclude_defaults=True)


def record_from(value: JsonObject) -> TrialRecord:
    """Reverse `record_json`."""
    return TrialRecord.model_validate(value, strict=False)
