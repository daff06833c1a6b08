"""The workload's shared values: a test, a try, a batch of tests and its result.

Batches are payloads of items, and batch results are their results. Results come from workers, whose tests may write
anything: `BatchResult.parse` checks every field, and files are encoded anew from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.model.errors import InvalidResultError

ID_MAX = 8 << 10
OUTPUT_MAX = 64 << 10
"""Characters kept of each stream of a try: the first and the last half."""


class Outcome(StrEnum):
    """How a try ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ERROR = "error"
    """An error outside the test: in a fixture, in collection, or because it could not run."""
    CRASHED = "crashed"
    """The test ended its process."""
    TIMEOUT = "timeout"


class Status(StrEnum):
    """The result of a test over all of its tries."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ERROR = "error"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    FLAKY = "flaky"
    """The test both failed and passed in one run."""


GOOD = frozenset({Outcome.PASSED, Outcome.SKIPPED, Outcome.XFAILED, Outcome.XPASSED})
"""Outcomes that do not fail a run. A strict xfail that passes is `failed`, as pytest reports it."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(_Model):
    """A test as discovered. `id` is its framework's name for it, unique within its group, any Unicode."""

    id: Annotated[str, Field(min_length=1, max_length=ID_MAX)]
    group: str = ""
    framework: str = "pytest"
    file: str = ""
    """Path relative to the project."""
    line: Annotated[int, Field(ge=0)] = 0
    """Line number from 1, or 0 if unknown."""
    scope: str = ""
    """Tests with the same scope share fixtures (of a module or class) and stay together; empty for a test on its
    own."""
    markers: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    """Fixtures it uses that live until its process ends."""


class Try(_Model):
    """One try at a test. `started` is in Unix seconds. `phase` is the one that did not pass."""

    outcome: Outcome
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    started: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    worker: Annotated[str, Field(max_length=500)] = ""
    process: Annotated[str, Field(max_length=100)] = ""
    """The process on the worker that ran it. Within a process, tests ran in the order of `started`."""
    cached: Annotated[str, Field(max_length=100)] = ""
    """The earlier run with this try, if it was reused because nothing it depends on has changed."""
    phase: Annotated[str, Field(pattern="^(|setup|call|teardown|collect)$")] = ""
    message: Annotated[str, Field(max_length=OUTPUT_MAX)] = ""
    """One line: the error, the reason of a skip, or the signal of a crash."""
    details: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""
    """The traceback as the framework prints it."""
    stdout: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""
    stderr: Annotated[str, Field(max_length=2 * OUTPUT_MAX)] = ""


class CaseResult(_Model):
    """A test and its tries, in order."""

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
    """Tests that run one after the other in one process: the payload of an item.

    `retries` is the number of further tries of each failed test. `limit_s` is the time limit of a test, 0 for none.
    `attempt` is the number of the first try, from 1; later tries belong to child items, in a fresh process or sandbox.
    """

    group: str
    ids: Annotated[tuple[str, ...], Field(min_length=1)]
    attempt: Annotated[int, Field(ge=1)] = 1
    retries: Annotated[int, Field(ge=0)] = 0
    limit_s: Annotated[float, Field(ge=0)] = 0.0
    expected_ms: Annotated[int, Field(ge=0)] = 0
    avoid: Annotated[str, Field(max_length=500)] = ""
    """The worker, as its executor names it, that should not run the batch if there is another one."""
    ends_session: bool = False
    """Whether the session's fixtures end with this batch. If they fail then, its last test has an error."""

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        return cls.model_validate_json(payload)


class BatchResult(_Model):
    """The result of a batch: each of its tests once, in the order in which they ran."""

    cases: tuple[CaseResult, ...]
    files: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """Object id, in hex, of a tar of files that tests left (`rollout.snapshots.tar`)."""
    files_error: Annotated[str, Field(max_length=4000)] = ""
    """Why `files` is empty although files were asked for."""

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Decode a result. Raises InvalidResultError if the bytes are not a result of a batch."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidResultError(f"a worker sent what is no result of a batch: {where}: {first['msg']}") from None
