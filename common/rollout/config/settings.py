"""Settings of the coordinator and the worker: one model per file; unknown keys are rejected.

`load.py` loads them (TOML with locations, environment overrides, nearest valid key). Rules that concern several fields
are validators here, so that `rollout plan` and the daemons share them.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.secret_names import value_faults
from rollout.config.section import Section, fault_at
from rollout.model.address import is_loopback, parse_address
from rollout.model.errors import ConfigError

DAY_MS = 86_400_000
YEAR_S = 365 * 86_400
UI_LISTEN = "127.0.0.1:8265"
"""Default address of the live page."""
UI_PREFIX = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
UI_PREFIX_FORM = "must be parts of letters, digits and . _ ~ -, each behind a slash, such as /rollout"
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""Amount of a resource."""


class EmbeddedStorage(Section):
    path: str = Field(default="./data/rollout.db", description="SQLite file, created at the first start.")


class PostgresStorage(Section):
    url: str = Field(default="", description="postgresql://user@host:5432/db; a transaction-mode pooler is supported.")
    direct_url: str = Field(default="", description="URL that bypasses the pooler: LISTEN wakes watchers sooner.")
    pool_size: int = Field(default=8, ge=2, le=200, description="Maximum number of connections.")


class StorageSection(Section):
    backend: Literal["embedded", "postgres"] = Field(default="embedded", description="Where the ledger lives.")
    embedded: EmbeddedStorage = EmbeddedStorage()
    postgres: PostgresStorage = PostgresStorage()

    @model_validator(mode="after")
    def _url(self) -> StorageSection:
        if self.backend == "postgres" and not self.postgres.url:
            raise ValueError('storage.backend is "postgres" but [storage.postgres] url is empty')
        return self


class TransportSection(Section):
    listen_addr: str = Field(
        default="127.0.0.1:50051", description="mTLS address of the coordinator; port 0: any free port."
    )
    join_addr: str = Field(
        default="", description="Address where hosts join, with server authentication only; empty: off."
    )
    advertise_addr: str = Field(
        default="", description="Address under which others reach this coordinator; default: listen_addr."
    )
    coordinator_addrs: list[str] = Field(
        default_factory=list[str],
        description="All coordinators, leader and standbys; a worker's default: those of the cluster it joined.",
    )
    tls_dir: str = Field(default="./data/tls", description="Directory of the CA, the host key and certificates.")
    cluster: str = Field(
        default="rollout",
        pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$",
        description="SPIFFE trust domain; a worker's default: the cluster it joined.",
    )
    certificate_lifetime_s: float = Field(
        default=4 * 3600, ge=4, le=YEAR_S, description="Lifetime of a process's certificate, renewed at half."
    )
    host_certificate_lifetime_s: float = Field(
        default=30 * 86400, ge=60, le=10 * YEAR_S, description="Lifetime of a joined host's certificate."
    )
    orphan_grace_ms: int = Field(
        default=60_000, ge=0, le=DAY_MS, description="How long a fenced worker keeps its work for a new leader."
    )
    heartbeat_interval_ms: int = Field(default=500, ge=50, le=60_000, description="Time between heartbeats.")
    worker_self_fence_timeout_ms: int = Field(
        default=4_000, ge=200, le=DAY_MS, description="Silence after which a worker starts no further work."
    )
    coordinator_failure_timeout_ms: int = Field(
        default=5_000,
        ge=300,
        le=DAY_MS,
        description="Silence after which a worker counts as failed and the leader's lease expires.",
    )
    clock_skew_budget_ms: int = Field(
        default=250, ge=0, le=DAY_MS, description="Allowance for clock skew in every deadline."
    )

    @model_validator(mode="after")
    def _split_brain(self) -> TransportSection:
        if self.worker_self_fence_timeout_ms >= self.coordinator_failure_timeout_ms:
            raise ValueError(
                f"worker_self_fence_timeout_ms ({self.worker_self_fence_timeout_ms}) must be less than "
                f"coordinator_failure_timeout_ms ({self.coordinator_failure_timeout_ms}): a worker must stop before "
                "its work is given to another"
            )
        if self.clock_skew_budget_ms >= 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"clock_skew_budget_ms ({self.clock_skew_budget_ms}) must be less than twice heartbeat_interval_ms "
                f"({self.heartbeat_interval_ms}): a larger slack makes deadlines meaningless"
            )
        if self.worker_self_fence_timeout_ms <= 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"worker_self_fence_timeout_ms ({self.worker_self_fence_timeout_ms}) must be more than twice "
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}): one late beat would fence the worker"
            )
        return self


class ObjectsSection(Section):
    backend: str = Field(
        default="",
        description='"fs", "postgres", "s3", "gcs" or a plugin\'s name; default: the bucket of [cloud], else '
        "by storage.backend.",
    )
    path: str = Field(default="./data/object-store", description="Directory of the fs store.")
    shared: bool = Field(default=False, description="Every coordinator mounts the fs path.")
    listen_addr: str = Field(default="", description="Address for objects; default: a free port beside listen_addr.")
    cache_dir: str = Field(default="./data/object-cache", description="Object cache of a worker.")
    cache_max_mib: int = Field(
        default=20_480, ge=64, le=1 << 40, description="Cache size; the least recently used objects are evicted first."
    )


class HttpSection(Section):
    listen_addr: str = Field(default="", description="Address of metrics and health; empty: off.")


class TelemetrySection(Section):
    otlp_endpoint: str = Field(
        default="",
        description="OTLP/HTTP collector of traces, such as http://HOST:4318; needs rollout-engine[otel]; "
        "empty: off. See docs/telemetry.md.",
    )
    trace_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of items to trace; use the same in every program."
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f'"{url}" is no URL: write http://HOST:4318 or https://HOST:4318')
        return url


class CoordinatorHttpSection(HttpSection):
    ui: bool = Field(default=False, description="Serve the live page, as `rollout ui` does.")
    ui_listen_addr: str = Field(
        default=UI_LISTEN,
        description="Address of the live page; beyond loopback people log in, which needs transport.join_addr.",
    )
    ui_prefix: str = Field(default="", description="Path below which a proxy serves the page, such as /rollout.")
    ui_certificate: str = Field(default="", description="PEM certificate chain for https.")
    ui_key: str = Field(default="", description="PEM private key for https.")

    @model_validator(mode="after")
    def _page(self) -> CoordinatorHttpSection:
        try:
            parse_address(self.ui_listen_addr)
        except ConfigError as error:
            raise fault_at("ui_listen_addr", error.message) from error
        if self.ui_prefix and not UI_PREFIX.fullmatch(self.ui_prefix):
            raise fault_at("ui_prefix", UI_PREFIX_FORM)
        if bool(self.ui_certificate) != bool(self.ui_key):
            raise fault_at("ui_certificate", "and ui_key go together")
        return self

    @property
    def ui_needs_login(self) -> bool:
        return bool(self.ui_prefix) or not is_loopback(parse_address(self.ui_listen_addr).host)


class WorkerSection(Section):
    slots: int = Field(default=1, ge=1, le=4096, description="Concurrent attempts of workloads that use slots.")
    executors: list[str] = Field(
        default_factory=list[str], description="Executors to host, by name; default: all installed."
    )
    roles: list[str] = Field(default_factory=list[str], description="Properties that items can require.")
    labels: dict[str, str] = Field(default_factory=dict[str, str], description="Properties that items can require.")
    capacity: dict[str, Amount] = Field(default_factory=dict[str, Amount], description="Additional resources, by name.")
    devices: list[str] = Field(
        default_factory=list[str],
        description="Accelerators to lease, named as in CUDA_VISIBLE_DEVICES; default: those that it lists, else all.",
    )
    scratch_dir: str = Field(default="./data/scratch", description="Parent of the attempts' directories.")
    max_engines: int = Field(
        default=1, ge=1, le=64, description="Concurrent engines, each with the replicas its run asks for."
    )
    start_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        le=7 * 86_400,
        description="Time limit for an engine's start, including downloads.",
    )
    dev_hot_reload: bool = Field(default=False, description="Allow plugins to be reloaded while the worker runs.")
    drain_budget_s: float = Field(default=60.0, ge=0, le=86_400, description="How long SIGTERM waits for running work.")


class SecretsSection(Section):
    backend: str = Field(
        default="",
        description="Source of secrets; empty: the provider if [cloud.secrets] allows any, else env.",
    )
    allow: list[str] = Field(
        default_factory=list[str],
        description="Secrets that executors may see; env reads NAME from ROLLOUT_SECRET_NAME, a provider adds"
        " them to [cloud.secrets] allowlist.",
    )

    @field_validator("allow")
    @classmethod
    def _names(cls, entries: list[str]) -> list[str]:
        if fault := value_faults(entries):
            raise ValueError(fault)
        return entries


class CloudFile(WithCloud):
    """Any configuration file, of whose other sections nothing is looked at."""

    model_config = ConfigDict(extra="ignore", defer_build=True)
    in_yaml: ClassVar[bool] = True
    secrets: SecretsSection = Field(default_factory=SecretsSection)


class TelemetryFile(Section):
    """Any configuration file, of whose other sections nothing is looked at."""

    model_config = ConfigDict(extra="ignore")
    telemetry: TelemetrySection = TelemetrySection()


class ComputeSection(Section):
    backend: str = Field(
        default="",
        description="Source of inventory and preemption notices: local, ec2 or gce; empty: that of [cloud] "
        "provider if its metadata service answers, else local.",
    )
    drain_on_rebalance: bool = Field(
        default=False,
        description="ec2: drain already at a rebalance recommendation.",
    )
    preemption_file: str = Field(default="", description="File whose appearance is also a preemption notice.")


class LoggingSection(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level to log."
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="Log format; auto: console on a terminal, else json."
    )


class CoordinatorSettings(WithCloud):
    storage: StorageSection = StorageSection()
    transport: TransportSection = TransportSection()
    objects: ObjectsSection = ObjectsSection()
    http: CoordinatorHttpSection = CoordinatorHttpSection()
    telemetry: TelemetrySection = TelemetrySection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _reachable(self) -> CoordinatorSettings:
        transport = self.transport
        wildcard = transport.listen_addr.rpartition(":")[0] in ("0.0.0.0", "[::]", "")
        if wildcard and not transport.advertise_addr and (transport.join_addr or transport.coordinator_addrs):
            raise ValueError(
                f'transport.listen_addr is "{transport.listen_addr}", which no other host can dial: set '
                "transport.advertise_addr to the HOST:PORT that workers and clients reach this coordinator at"
            )
        return self

    @model_validator(mode="after")
    def _page(self) -> CoordinatorSettings:
        if self.http.ui and self.http.ui_needs_login and not self.transport.join_addr:
            raise fault_at(
                "transport.join_addr",
                "is empty, and others can reach the live page: set it, so that they can log in with a token",
            )
        return self

    @model_validator(mode="after")
    def _bucket(self) -> CoordinatorSettings:
        provider = {"s3": "aws", "gcs": "gcp"}.get(self.objects.backend)
        if provider and self.cloud.provider != provider:
            raise fault_at("objects.backend", f'is "{self.objects.backend}": add [cloud] with provider = "{provider}"')
        if provider and not self.cloud.bucket:
            raise fault_at(
                f"cloud.{self.objects.backend}.bucket",
                f'is missing, and objects.backend is "{self.objects.backend}": name the bucket that objects live in',
            )
        return self

    @model_validator(mode="after")
    def _several_coordinators(self) -> CoordinatorSettings:
        if len(self.transport.coordinator_addrs) > 1:
            if self.storage.backend == "embedded":
                raise ValueError(
                    'transport.coordinator_addrs names several coordinators but storage.backend is "embedded", which '
                    'only one host reaches: use "postgres"'
                )
            if self.objects.backend == "fs" and not self.objects.shared:
                raise ValueError(
                    "transport.coordinator_addrs names several coordinators but [objects] is a private fs store: "
                    'use backend = "postgres", a bucket in [cloud], or a path that all mount with shared = true'
                )
        return self


class WorkerSettings(WithCloud):
    transport: TransportSection = TransportSection()
    objects: ObjectsSection = ObjectsSection()
    http: HttpSection = HttpSection()
    telemetry: TelemetrySection = TelemetrySection()
    worker: WorkerSection = WorkerSection()
    secrets: SecretsSection = SecretsSection()
    compute: ComputeSection = ComputeSection()
    logging: LoggingSection = LoggingSection()
    plugins: list[str] = Field(default_factory=list[str], description="Manifests of plugins to load at start.")
