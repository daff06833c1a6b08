"""`[cloud]`: one provider's stores, queues and secrets; the same section in every configuration file.

The provider is one key, so a file cannot name two. A key of the other provider is a fault of the file (`cloud_rules`).
The longer form `[cloud.aws.s3]` is read as `[cloud.s3]` (`cloud_keys`).

Every command imports this module and few have a `[cloud]`. Validators take longer to build than the whole import, so
they are built when the first section is read (`defer_build`, `_Later`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from rollout.config.cloud_rules import faults, prefix_fault, provider_fault
from rollout.config.section import Section, fault_at

MIB = 1 << 20
GIB = 1 << 30
S3_PART_MIN = 5 * MIB
GCS_CHUNK_UNIT = 256 * 1024
"""Unit in bytes of the chunks of a resumable upload: https://cloud.google.com/storage/docs/resumable-uploads."""

Provider = Literal["", "aws", "gcp"]
Prefix = Annotated[
    str,
    Field(default="", description="Prefix of every object name; a missing final slash is added."),
]
Snapshot = Annotated[
    int,
    Field(default=5 * GIB, ge=MIB, le=10 * GIB, description="Largest object of a snapshot, at most 10 GiB."),
]


def _endpoint(value: str) -> str:
    value = value.rstrip("/")
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("write the scheme too, as in https://minio.example:9000")
    if value and not _has_host(value):
        raise ValueError("is no URL with a host and a port up to 65535")
    return value


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _slash(value: str) -> str:
    if wrong := prefix_fault(value):
        raise ValueError(wrong)
    return value if not value or value.endswith("/") else value + "/"


class _Part(Section):
    model_config = ConfigDict(defer_build=True)


class S3Section(_Part):
    bucket: str = Field(default="", description="Bucket that stores objects instead of the coordinator's disk.")
    prefix: Prefix = ""
    endpoint_url: str = Field(
        default="", description="Endpoint of a compatible store such as MinIO, Ceph or R2; default: [cloud]'s."
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="URLs as host/bucket/key (path) or bucket.host/key (virtual); auto: path with an endpoint_url.",
    )
    checksums: Literal["auto", "when_supported", "when_required"] = Field(
        default="auto",
        description="When checksums are sent; auto: when_supported on AWS, when_required with an endpoint_url.",
    )
    conditional_writes: Literal["auto", "on", "off"] = Field(
        default="auto", description="Use conditional writes; auto: on for AWS, probed once for another store."
    )
    multipart_chunk_bytes: int = Field(
        default=16 * MIB, ge=S3_PART_MIN, le=5 * GIB, description="Size of an upload part, at least 5 MiB."
    )
    max_snapshot_part_bytes: Snapshot = 5 * GIB

    _url = field_validator("endpoint_url")(_endpoint)
    _prefix = field_validator("prefix")(_slash)


class GcsSection(_Part):
    bucket: str = Field(default="", description="Bucket that stores objects instead of the coordinator's disk.")
    prefix: Prefix = ""
    endpoint_url: str = Field(default="", description="Endpoint of an emulator; default: [cloud]'s.")
    resumable_chunk_bytes: int = Field(
        default=16 * MIB,
        ge=5 * MIB,
        le=GIB,
        description="Size of an upload chunk: a multiple of 256 KiB, at least 5 MiB.",
    )
    max_snapshot_part_bytes: Snapshot = 5 * GIB

    _url = field_validator("endpoint_url")(_endpoint)
    _prefix = field_validator("prefix")(_slash)

    @field_validator("resumable_chunk_bytes")
    @classmethod
    def _multiple(cls, value: int) -> int:
        if value % GCS_CHUNK_UNIT:
            raise ValueError(f"must be a multiple of 256 KiB: {value // GCS_CHUNK_UNIT * GCS_CHUNK_UNIT} is one")
        return value


class SqsSection(_Part):
    queue_url: str = Field(default="", description="Queue that delivers rows.")
    output_queue_url: str = Field(default="", description="Queue that also receives results.")
    endpoint_url: str = Field(default="", description="Endpoint of an emulator; default: [cloud]'s.")
    visibility_timeout_secs: int = Field(
        default=300, ge=10, le=43_200, description="Lease on a message, extended while its row is processed."
    )

    _url = field_validator("endpoint_url", "queue_url", "output_queue_url")(_endpoint)


class PubsubSection(_Part):
    topic: str = Field(default="", description="Topic of the subscription, to which `rollout cloud doctor` publishes.")
    subscription: str = Field(default="", description="Subscription that delivers rows.")
    output_topic: str = Field(default="", description="Topic that also receives results.")
    endpoint_url: str = Field(default="", description="Endpoint of an emulator; default: [cloud]'s.")
    ack_deadline_secs: int = Field(
        default=30, ge=10, le=600, description="Lease on a message, extended while its row is processed."
    )

    _url = field_validator("endpoint_url")(_endpoint)


class CloudSecretsSection(_Part):
    allowlist: list[str] = Field(
        default_factory=list[str],
        description="Secrets that may be read: name or ARN (AWS), name or NAME/versions/N (GCP); NAME#KEY "
        "reads one key of a JSON object.",
    )
    ttl_secs: float = Field(default=300.0, ge=0, le=86_400, description="Seconds until a value is read again.")
    endpoint_url: str = Field(default="", description="Endpoint of an emulator; default: [cloud]'s.")

    _url = field_validator("endpoint_url")(_endpoint)


class CloudSection(_Part):
    provider: Provider = Field(default="", description="Cloud provider.")
    region: str = Field(default="", description="AWS region; default: AWS_REGION, then the profile's.")
    project: str = Field(default="", description="GCP project; default: GOOGLE_CLOUD_PROJECT, then the credentials'.")
    endpoint_url: str = Field(
        default="", description="Endpoint of an emulator for all services; each service can have its own."
    )
    s3: S3Section = Field(default_factory=S3Section.model_construct, description="aws: objects.")
    sqs: SqsSection = Field(default_factory=SqsSection.model_construct, description="aws: queues of rows and results.")
    gcs: GcsSection = Field(default_factory=GcsSection.model_construct, description="gcp: objects.")
    pubsub: PubsubSection = Field(
        default_factory=PubsubSection.model_construct, description="gcp: queues of rows and results."
    )
    secrets: CloudSecretsSection = Field(
        default_factory=CloudSecretsSection.model_construct, description="Secrets that workers may read."
    )

    _url = field_validator("endpoint_url")(_endpoint)

    @field_validator("provider", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if wrong := provider_fault(value):
            raise ValueError(wrong)
        return value

    @model_validator(mode="after")
    def _rules(self) -> CloudSection:
        """Check a section that is made in code; the loader reports a file's faults, all at once."""
        for place, text in faults(self.model_dump(exclude_unset=True)):
            raise fault_at(".".join(map(str, place[1:])), text) if len(place) > 1 else ValueError(text)
        return self

    @property
    def bucket(self) -> str:
        """Bucket of objects; empty if they do not live in a bucket."""
        return {"aws": self.s3.bucket, "gcp": self.gcs.bucket}.get(self.provider, "")

    @property
    def prefix(self) -> str:
        return self.s3.prefix if self.provider == "aws" else self.gcs.prefix

    @property
    def endpoint_of_objects(self) -> str:
        """Endpoint of the object store; empty for the provider's own."""
        return (self.s3 if self.provider == "aws" else self.gcs).endpoint_url or self.endpoint_url

    @property
    def queue_backend(self) -> str:
        """Name of the queue adapter; empty without a provider."""
        return {"aws": "sqs", "gcp": "pubsub"}.get(self.provider, "")

    @property
    def intake(self) -> str:
        """Queue that rows arrive from: an SQS URL or a subscription; empty for none."""
        return {"aws": self.sqs.queue_url, "gcp": self.pubsub.subscription}.get(self.provider, "")

    @property
    def outlet(self) -> str:
        """Queue that results go to: an SQS URL or a topic; empty for none."""
        return {"aws": self.sqs.output_queue_url, "gcp": self.pubsub.output_topic}.get(self.provider, "")

    @property
    def lease_s(self) -> float:
        """Lease of a message, in seconds."""
        return float(self.sqs.visibility_timeout_secs if self.provider == "aws" else self.pubsub.ack_deadline_secs)

    @property
    def place(self) -> str:
        """Place of objects as a URL for people; empty if they do not live in a bucket."""
        scheme = {"aws": "s3", "gcp": "gs"}.get(self.provider, "")
        return f"{scheme}://{self.bucket}/{self.prefix}" if self.bucket else ""


NO_CLOUD = CloudSection.model_construct()


class _Later:
    """Validates as `CloudSection` does, without making its validator part of every configuration file's."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validated, serialization=core_schema.plain_serializer_function_ser_schema(_dumped)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "title": CloudSection.__name__}


def _validated(value: Any) -> CloudSection:
    return value if isinstance(value, CloudSection) else CloudSection.model_validate(value, strict=True)


def _dumped(value: CloudSection) -> dict[str, Any]:
    return value.model_dump(exclude_unset=True)


class WithCloud(Section):
    """A configuration file with `[cloud]`."""

    cloud: Annotated[CloudSection, _Later()] = Field(default_factory=lambda: NO_CLOUD)
