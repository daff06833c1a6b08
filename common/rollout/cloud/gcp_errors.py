"""Errors of Google's services, and their remedies.

Form of an error: https://cloud.google.com/apis/design/errors (`error.code`, `error.message`, `error.errors[].reason` or
`error.status`). Reasons: https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollout.cloud.retry import Failure, retry_after
from rollout.model.errors import ConfigError

MESSAGE_MAX = 600
LOG_IN = (
    "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key file of a"
    " service account, or run where a service account is attached (GCE, GKE with workload identity)"
)
CLOCK = "check the clock of this machine: Google takes no token that is more than a few minutes off (`timedatectl`)"
_CERTIFICATE = "SSL_CERT_FILE names the file of a private authority; check endpoint_url too"
_BUSY = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "RESOURCE_EXHAUSTED", "slowDown"})
_TRANSIENT = frozenset({408, 500, 502, 504})
_THROTTLED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Access:
    """What a call needs, for the message if it is refused.

    It names the permission (`storage.objects.get`), the role (`roles/storage.objectViewer`) and the configuration key
    (`[cloud.gcs] bucket`). `missing` is the remedy if a 404 is a fault of the configuration, as for a bucket or a
    subscription; if it is empty, a 404 raises NotFoundError.
    """

    permission: str = ""
    role: str = ""
    key: str = ""
    missing: str = ""


PLAIN = Access()


class Refused(Exception):
    """Unexpected answer with a status of 400 or more."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


def refused(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """Parse an error answer; one that is not JSON, such as a proxy's page, is quoted."""
    reason, message = "", body[:MESSAGE_MAX].decode("utf-8", "replace").strip()
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = None
    error: Any = cast("dict[str, Any]", found).get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):
        fields = cast("dict[str, Any]", error)
        message = str(fields.get("message") or message)[:MESSAGE_MAX]
        each = fields.get("errors")
        first: Any = cast("list[Any]", each)[0] if isinstance(each, list) and each else None
        reason = str(cast("dict[str, Any]", first).get("reason", "")) if isinstance(first, dict) else ""
        reason = reason or str(fields.get("status") or "")
    return Refused(status, reason, message or "no reason given", retry_after(headers.get("Retry-After")))


def classify(e: BaseException, access: Access = PLAIN) -> Failure | None:
    """Return the failure, or None if the error is not one of a Google service or the network and is raised as it is."""
    if isinstance(e, Refused):
        return _of_answer(e, access)
    names = {kind.__name__ for kind in type(e).__mro__ if kind.__module__.startswith("aiohttp.")}  # not imported here
    if names & {"ClientConnectorCertificateError", "ClientConnectorSSLError"}:
        return Failure("invalid", str(e), _CERTIFICATE, raises=ConfigError)
    if names & {"ClientConnectionError", "ClientPayloadError"} or isinstance(e, (TimeoutError, ConnectionError)):
        return Failure("transient", str(e) or type(e).__name__, "check the network and endpoint_url")
    return None


def _of_answer(e: Refused, access: Access) -> Failure:
    if e.status in _THROTTLED or e.reason in _BUSY:
        return Failure("throttled", str(e), retry_after_s=e.retry_after_s)
    if e.status in _TRANSIENT or e.status > 504:
        return Failure("transient", str(e), retry_after_s=e.retry_after_s)
    match e.status:
        case 401:
            remedy = f"the credentials are not valid: {LOG_IN}. If they are fresh, {CLOCK}"
            return Failure("credentials", str(e), remedy)
        case 403:
            return Failure("denied", str(e), _grant(e, access))
        case 404 | 410:
            return Failure("missing", str(e), access.missing, raises=ConfigError if access.missing else None)
        case 409 | 412:
            return Failure("conflict", str(e), "it is another than the one that was expected")
        case _:
            return Failure("invalid", str(e), f"look at {access.key}" if access.key else "")


def _grant(e: Refused, access: Access) -> str:
    if e.reason in ("accessNotConfigured", "SERVICE_DISABLED"):
        return "enable that API in the project: `gcloud services enable SERVICE.googleapis.com`"
    if "VPC Service Controls" in e.message:
        return "a service perimeter (VPC Service Controls) does not let this machine in: ask who administers it"
    if not access.permission:
        return "the credentials lack a permission for that: see docs/cloud-iam.md"
    role = f" (it is in {access.role})" if access.role else ""
    key = f" (and check {access.key})" if access.key else ""
    return f"grant {access.permission}{role} to the account of the credentials{key}"
