"""Errors of AWS and compatible stores as failures with remedies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, cast

from rollout.cloud.retry import Failure, retry_after
from rollout.model.errors import ConfigError, StorageError

THROTTLED = frozenset(
    {
        "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
        "RequestLimitExceeded", "TooManyRequestsException", "RequestThrottledException", "BandwidthLimitExceeded",
        "PriorRequestNotComplete",
        "TransactionInProgressException", "ProvisionedThroughputExceededException", "KmsThrottled", "429",
    }
)  # fmt: skip
TRANSIENT = frozenset(
    {
        "InternalError", "InternalFailure", "InternalServerError", "InternalServiceError", "ServiceUnavailable",
        "RequestTimeout", "RequestTimeoutException", "OperationAborted", "BadDigest", "IncompleteBody",
        "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "ConditionalRequestConflict", "409",
    }
)  # fmt: skip
NOT_IMPLEMENTED = frozenset({"NotImplemented", "501"})
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_UNKNOWN_KEY = frozenset(
    {"InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidToken", "AuthFailure"}
)
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled", "403"})
_ABSENT = frozenset({"NoSuchKey", "NoSuchUpload", "NotFound", "404", "ResourceNotFoundException"})
_REGION = frozenset({"PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "301", "307"})
_CONDITION = frozenset({"PreconditionFailed", "412"})
_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})

_PERMISSIONS = {
    ("s3", "head_object"): "s3:GetObject",
    ("s3", "head_bucket"): "s3:ListBucket",
    ("s3", "list_objects_v2"): "s3:ListBucket",
    ("s3", "copy_object"): "s3:GetObject and s3:PutObject",
    ("s3", "create_multipart_upload"): "s3:PutObject",
    ("s3", "upload_part"): "s3:PutObject",
    ("s3", "upload_part_copy"): "s3:GetObject and s3:PutObject",
    ("s3", "complete_multipart_upload"): "s3:PutObject",
    ("s3", "list_parts"): "s3:ListMultipartUploadParts",
    ("s3", "list_multipart_uploads"): "s3:ListBucketMultipartUploads",
    ("s3", "get_bucket_lifecycle_configuration"): "s3:GetLifecycleConfiguration",
    ("sqs", "send_message_batch"): "sqs:SendMessage",
    ("sqs", "delete_message_batch"): "sqs:DeleteMessage",
    ("sqs", "change_message_visibility_batch"): "sqs:ChangeMessageVisibility",
}
_KEYS = {"s3": "[cloud.s3] bucket", "sqs": "[cloud.sqs] queue_url", "secretsmanager": "[cloud.secrets] allowlist"}
_CHAIN = (
    "give some through the default chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a web identity, or "
    "the role of the machine (in a container the IMDSv2 hop limit must be 2)"
)


def permission(service: str, operation: str) -> str:
    """Return the IAM action that an operation needs: s3:GetObject for ("s3", "head_object")."""
    camel = "".join(part.capitalize() for part in operation.split("_"))
    return _PERMISSIONS.get((service, operation), f"{service}:{camel}")


def code_of(error: BaseException) -> str:
    """Return the service's error code ("NoSuchKey"), the HTTP status of a HEAD request, or an empty string for other
    errors."""
    answer = cast("Mapping[str, Any] | None", getattr(error, "response", None))
    return str(answer["Error"].get("Code", "")) if isinstance(answer, dict) and "Error" in answer else ""


def denied(error: BaseException) -> bool:
    """Return whether an error, as raised here, says that a permission is missing."""
    return error.__cause__ is not None and code_of(error.__cause__) in _DENIED


def headers_of(answer: Mapping[str, Any]) -> Mapping[str, str]:
    return cast("Mapping[str, str]", answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))


def rows(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list that the answer may omit."""
    return cast("list[dict[str, Any]]", answer.get(name) or [])


class NotAnsweredError(Exception):
    """The answer does not come from the service."""


_HAVE_ETAG = frozenset({"head_object", "get_object"})


def check_answer(operation: str, answer: object) -> None:
    """Raise NotAnsweredError for a page of a captive portal or proxy with status 200, which botocore parses as
    empty."""
    if not isinstance(answer, dict):
        return
    found = cast("Mapping[str, Any]", answer)
    headers = headers_of(found)
    html = headers.get("content-type", "").startswith("text/html")
    page = (
        html and found.get("ResponseMetadata", {}).get("HTTPStatusCode") == 200 and headers.get("content-length") != "0"
    )
    of_object = operation in _HAVE_ETAG  # which may be a page itself
    if "ETag" not in found if of_object else page and not found.keys() - {"ResponseMetadata"}:
        raise NotAnsweredError("a page came in place of an answer: a captive portal or a proxy answers")


def classify(
    error: BaseException, service: str, operation: str, parameters: Mapping[str, Any], *, named_by: str = ""
) -> Failure | None:
    """Return the failure, or None if the error is not one of AWS, its SDK or the network.

    `named_by` names the bucket or queue if the service's configuration key does not.
    """
    answer = cast("Mapping[str, Any] | None", getattr(error, "response", None))
    if isinstance(answer, dict) and "Error" in answer:
        return _answered(
            cast("Mapping[str, Any]", answer), service, operation, named_by or _KEYS.get(service, "[cloud]"), parameters
        )
    return _not_answered(error, service)


def _answered(
    answer: Mapping[str, Any], service: str, operation: str, key: str, parameters: Mapping[str, Any]
) -> Failure:
    error: Mapping[str, Any] = answer["Error"]
    headers = headers_of(answer)
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    code = str(error.get("Code", ""))
    said = f"{code}: {error.get('Message', '')}".rstrip(": ") if code else f"HTTP {status}"
    if code in THROTTLED or status in (429, 503):
        return Failure("throttled", said, retry_after_s=retry_after(headers.get("retry-after")))
    if code in _CONDITION or status == 412:
        return Failure("conflict", said, "the object is another than the one that was expected")
    if code in _CLOCK:
        return Failure("invalid", said, _clock(headers), raises=ConfigError)
    if code in NOT_IMPLEMENTED or status == 501:
        remedy = 'the store does not know this request: [cloud.s3] conditional_writes = "off" does without conditions'
        return Failure("invalid", said, remedy if service == "s3" else "", raises=StorageError)
    if code in TRANSIENT or status >= 500:
        return Failure("transient", said, retry_after_s=retry_after(headers.get("retry-after")))
    if code in EXPIRED:
        return Failure("credentials", said, f"the credentials have expired and the chain has no newer ones: {_CHAIN}")
    if code in _UNKNOWN_KEY or code == "SignatureDoesNotMatch":
        return Failure("credentials", said, f"AWS does not know these credentials: {_CHAIN}")
    if code in _REGION or code == "AuthorizationHeaderMalformed":
        return _region(error, headers, said, key)
    if code == "NoSuchBucket":
        named = key if key.startswith("the URL") else f"{key} ({parameters.get('Bucket', '')})"
        remedy = f"there is no such bucket: check {named}, or make it"
        return Failure("missing", said, remedy, raises=ConfigError)
    if code in ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"):
        remedy = "there is no such queue: check [cloud.sqs] queue_url and [cloud] region"
        return Failure("missing", said, remedy, raises=ConfigError)
    if code == "InvalidObjectState":
        at = f"--bucket {parameters.get('Bucket', 'BUCKET')} --key '{parameters.get('Key', 'KEY')}'"
        remedy = f"the object is archived: aws s3api restore-object {at} --restore-request Days=7, and wait until it is"
        return Failure("invalid", said, remedy, raises=ConfigError)
    if code in _DENIED or status == 403:
        remedy = f"allow {permission(service, operation)} on it for this identity (and check {key})"
        if (service, operation) in (("s3", "head_object"), ("s3", "get_object")):
            remedy += "; without s3:ListBucket on the bucket, what is not there is refused in these words too"
        return Failure("denied", said, remedy)
    if code in _ABSENT or status == 404:
        return Failure("missing", said)
    return Failure(
        "invalid", said, f"the service refuses {operation}", raises=StorageError if service == "s3" else None
    )


def _region(error: Mapping[str, Any], headers: Mapping[str, str], said: str, key: str) -> Failure:
    region = headers.get("x-amz-bucket-region") or str(error.get("Region") or "")
    where = f"it is in region {region}: set [cloud] region" if region else "it is in another region: set [cloud] region"
    return Failure("region", said, f"{where} (or check {key})")


def _clock(headers: Mapping[str, str]) -> str:
    theirs = headers.get("date", "")
    by = ""
    if theirs:
        seconds = time.time() - parsedate_to_datetime(theirs).timestamp()
        by = f" by {abs(seconds):.0f} s ({'ahead' if seconds > 0 else 'behind'})"
    return f"this machine's clock is wrong{by}: set it, and let NTP (chrony, systemd-timesyncd) keep it"


_NAMED = {
    "NoCredentialsError": ("credentials", f"there are none: {_CHAIN}"),
    "PartialCredentialsError": ("credentials", f"they are not whole: {_CHAIN}"),
    "CredentialRetrievalError": ("credentials", f"the chain fails: {_CHAIN}"),
    "TokenRetrievalError": ("credentials", "log in again: aws sso login"),
    "SSOTokenLoadError": ("credentials", "log in again: aws sso login"),
    "UnauthorizedSSOTokenError": ("credentials", "log in again: aws sso login"),
    "ProfileNotFound": ("credentials", "check AWS_PROFILE and ~/.aws/config"),
    "InvalidRegionError": ("region", "check [cloud] region"),
    "ParamValidationError": ("invalid", "check the value in the configuration"),
    "SSLError": ("invalid", "check the certificate: AWS_CA_BUNDLE names the file of a private authority"),
}
_NETWORK = frozenset(
    {
        "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError",
        "HTTPClientError",
        "ProxyConnectionError", "ResponseStreamingError", "IncompleteReadError", "FlexibleChecksumError",
        "AioReadTimeoutError", "ResponseParserError", "ClientError", "ClientPayloadError", "ClientConnectionError",
        "ServerDisconnectedError", "SocketTimeoutError", "ServerTimeoutError", "ClientOSError", "ClientConnectorError",
        "MetadataRetrievalError", "ClientConnectionResetError", "ContentLengthError", "TransferEncodingError",
    }
)  # fmt: skip
"""Names of errors of botocore and aiohttp, which are not imported here."""


def _not_answered(error: BaseException, service: str) -> Failure | None:
    name = type(error).__name__
    if name in _NAMED:
        kind, remedy = _NAMED[name]
        return Failure(cast("Any", kind), str(error), remedy, raises=ConfigError)
    if name in _NETWORK or isinstance(error, (TimeoutError, ConnectionError, NotAnsweredError)):
        remedy = f"check the network, endpoint_url and [cloud] region (service {service})"
        return Failure("transient", str(error) or name, remedy)
    return None
