"""What every part of the workload speaks of: a test, a try at it, a batch of tests and its result.

Batches are payloads of items and batch results their results. A result comes from a worker, whose tests may do anything
to it: `BatchResult.parse` checks every field, and what is written to a file is encoded anew from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.model.errors import InvalidResultError

ID_MAX = 8 << 10
OUTPUT_MAX = 64 << 10
"""Characters of each stream of a try that are kept: the first and the last half."""


class Outcome(StrEnum):
    """How a try ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ERROR = "error"
    """Outside of the test itself: a fixture, the collection, or a test that could not be run."""
    CRASHED = "crashed"
    """Its process ended with it."""
    TIMEOUT = "timeout"


class Status(StrEnum):
    """What a test came to over all of its tries."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ERROR = "error"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    FLAKY = "flaky"
    """Failed and passed in one run."""


GOOD = frozenset({Outcome.PASSED, Outcome.SKIPPED, Outcome.XFAILED, Outcome.XPASSED})
"""A strict xfail that passes is reported as `failed` by pytest itself."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(_Model):
    """A test as it was discovered. `id`: as its framework names it, unique within its group, any Unicode."""

    id: Annotated[str, Field(min_length=1, max_length=ID_MAX)]
    group: str = ""
    framework: str = "pytest"
    file: str = ""
    """Relative to the project."""
    line: Annotated[int, Field(ge=0)] = 0
    """From 1; 0: not known."""
    scope: str = ""
    """Tests of one scope share fixtures (a module, a class) and stay together; empty: on its own."""
    markers: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    """Fixtures that it uses and that live until its process ends."""


class Try(_Model):
    """One try at a test. `started`: Unix seconds. `phase`: of what did not pass."""

    outcome: Outcome
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    started: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    worker: Annotated[str, Field(max_length=500)] = ""
    process: Annotated[str, Field(max_length=100)] = ""
    """Of the worker: names the process that ran it. Tests of one process ran in it in the order of `started`."""
    cached: Annotated[str, Field(max_length=100)] = ""
    """The run that it was made in, if in an earlier one: nothing that it depends on was changed since."""
    phase: Annotated[str, Field(pattern="^(|setup|call|teardown|collect)$")] = ""
    message: Annotated[str, Field(max_length=OUTPUT_MAX)] = ""
    """One line: the error, the reason of a skip, the signal of a crash."""
    details: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""
    """The traceback as the framework prints it."""
    stdout: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""
    stderr: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""


class CaseResult(_Model):
    """A test and its tries, in the order in which they were made."""

    id: Annotated[str, Field(min_length=1, max_length=ID_MAX)]
    group: str = ""
    tries: Annotated[tuple[Try, ...], Field(min_length=1)]

    @property
    def status(self) -> Status:
        last = self.tries[-1].outcome
        if last in GOOD and any(one.outcome not in GOOD for one in self.tries):
            return Status.FLAKY
        return Status(last.value)

    @property
    def good(self) -> bool:
        return self.tries[-1].outcome in GOOD


class Batch(_Model):
    """Tests that run in one process, one after the other: the payload of an item.

    `retries`: further tries of each that fails. `limit_s`: of one test; 0: none. `attempt`: number of the first try
    here, from 1: later ones are of children, in a fresh process or sandbox.
    """

    group: str
    ids: Annotated[tuple[str, ...], Field(min_length=1)]
    attempt: Annotated[int, Field(ge=1)] = 1
    retries: Annotated[int, Field(ge=0)] = 0
    limit_s: Annotated[float, Field(ge=0)] = 0.0
    expected_ms: Annotated[int, Field(ge=0)] = 0
    avoid: Annotated[str, Field(max_length=500)] = ""
    """A worker, as its executor names it: the batch is for another one, if there is one."""
    ends_session: bool = False
    """Fixtures of the session end with it: what fails there is an error of its last test."""

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        return cls.model_validate_json(payload)


class BatchResult(_Model):
    """The result of a batch: each of its tests once, in the order in which they ran."""

    cases: tuple[CaseResult, ...]
    files: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """A tar of files that tests left (`rollout.snapshots.tar`), in hex."""
    files_error: Annotated[str, Field(max_length=4000)] = ""
    """Why there are none."""

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """InvalidResultError: these bytes are no result of a batch."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidResultError(f"a worker sent what is no result of a batch: {where}: {first['msg']}") from None
