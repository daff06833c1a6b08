"""Errors of the API: HTTP status, and the error object that OpenAI clients expect."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

from rollout.model.errors import RolloutError
from rollout.workloads.json_form import JsonObject

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(RolloutError):
    """The request was not answered."""

    code: ClassVar[str] = "request_failed"

    def __init__(self, message: str | None = None, **context: Any) -> None:
        """`status` is the HTTP status, `retry_after_s` when the client may retry, `param` the offending key of the
        body."""
        super().__init__(message, **context)

    @property
    def status(self) -> int:
        return self.context.get("status", 500)

    @property
    def headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if (seconds := self.context.get("retry_after_s")) is not None:
            found["retry-after"] = str(max(1, round(seconds)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = "Bearer"
        return found

    def body(self) -> JsonObject:
        kind = _TYPES.get(self.status, _TYPES[500] if self.status >= 500 else _TYPES[400])
        param = self.context.get("param")
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.status}}


class ServerEndedError(RolloutError):
    """The run of the replicas has ended, so the server ends too."""

    code = "server_ended"
