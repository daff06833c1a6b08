"""One root for every error the product raises on purpose.

A class docstring is its default message. `code` is stable and travels on the wire; `retryable` says whether the
same call may succeed later.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class RolloutError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **context: Any) -> None:
        self.message = message or inspect.cleandoc(type(self).__doc__ or "")
        self.context = context
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[RolloutError], message: str, context: dict[str, Any]) -> RolloutError:
    return kind(message, **context)


class UsageError(RolloutError):
    """The command cannot be understood as it was typed."""

    code = "usage"


class ConfigError(RolloutError):
    """The configuration is not usable."""

    code = "config_invalid"


class OtherRunError(ConfigError):
    """The settings are another run's than that of the output directory. `context["changes"]`: in what, for people."""


class InputError(RolloutError):
    """The input is not usable."""

    code = "input_invalid"


class InvalidResultError(InputError):
    """A worker sent a result that its workload cannot read. The item of it counts as failed."""

    code = "invalid_result"


class InputChangedError(RolloutError):
    """The input is not what was checked any more: nothing of it that differs was submitted."""

    code = "input_changed"


class OutputChangedError(RolloutError):
    """Somebody else changed a file while the run was writing it."""

    code = "output_changed"


class IncompleteError(RolloutError):
    """Not every row of the input has its result in the files."""

    code = "incomplete"


class NotFoundError(RolloutError):
    """No such thing."""

    code = "not_found"


class ConflictError(RolloutError):
    """What is stored already says something else."""

    code = "conflict"


class StateError(RolloutError):
    """The state of the run does not allow this."""

    code = "wrong_state"


class ProtocolError(RolloutError):
    """The peer sent something the protocol does not allow."""

    code = "protocol"


class AuthError(RolloutError):
    """The peer's identity does not allow this."""

    code = "not_allowed"


class FencedError(RolloutError):
    """Another coordinator holds the lease."""

    code = "fenced"


class NotLeaderError(RolloutError):
    """This coordinator is not the leader."""

    code = "not_leader"
    retryable = True


class StorageError(RolloutError):
    """The store refused or failed."""

    code = "storage"


class StorageUnavailableError(StorageError):
    """The store cannot be reached at present."""

    code = "storage_unavailable"
    retryable = True


class StorageFaultError(StorageUnavailableError):
    """The disk under the database fails: nothing was written, nothing acknowledged is lost."""

    code = "storage_fault"


class StorageFullError(StorageError):
    """The disk or database is full: nothing was written, nothing acknowledged is lost."""

    code = "storage_full"


class StorageDamagedError(StorageError):
    """A row of the database cannot be read: it is damaged; restore it from a backup."""

    code = "storage_damaged"


class TransactionConflictError(StorageError):
    """Somebody else changed what this transaction read; nothing of it was written, run it again."""

    code = "storage_conflict"
    retryable = True


class SchemaVersionError(StorageError):
    """The database was written by a newer version of this program."""

    code = "schema_newer"


class ObjectCorruptError(StorageError):
    """An object's bytes do not match its id."""

    code = "object_corrupt"


class UnavailableError(RolloutError):
    """The other side cannot be reached at present."""

    code = "unavailable"
    retryable = True


class PluginError(RolloutError):
    """The plugin broke its contract."""

    code = "plugin"


class AttemptError(RolloutError):
    """One attempt at an item failed; `retry` says whether another may succeed.

    `data` and `keeps` are evidence, as those of a result: they stay with the attempt, also where another follows.
    `units_in` and `units_out` were used up by it. `retry_after_ms`: until the next attempt, in place of the item's
    backoff.

    Raised by executors and backends. Anything else an executor raises becomes `executor_error`, retryable.
    """

    code = "attempt_failed"

    def __init__(
        self,
        message: str | None = None,
        *,
        code: str = "attempt_failed",
        retry: bool = True,
        data: bytes = b"",
        keeps: tuple[bytes, ...] = (),
        units_in: int = 0,
        units_out: int = 0,
        retry_after_ms: int | None = None,
        **context: Any,
    ):
        super().__init__(message, **context)
        self.error_code = code
        self.retry = retry
        self.data = data
        self.keeps = keeps
        self.units_in = units_in
        self.units_out = units_out
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[Any, ...]:
        named = {
            "code": self.error_code,
            "retry": self.retry,
            "data": self.data,
            "keeps": self.keeps,
            "units_in": self.units_in,
            "units_out": self.units_out,
            "retry_after_ms": self.retry_after_ms,
        }
        return (_rebuild_attempt, (type(self), self.message, named, self.context))


def _rebuild_attempt(
    kind: type[AttemptError], message: str, named: dict[str, Any], context: dict[str, Any]
) -> AttemptError:
    return kind(message, **named, **context)
