"""The configuration of `rollout serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import Setting
from rollout.config.secret_names import VALUE, is_value
from rollout.config.section import Section, fault_at, raise_faults
from rollout.config.settings import DAY_MS
from rollout.model.address import Address, parse_address
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import InferBackend, ModelSection, SamplingSection, check_together
from rollout.workloads.sections import WorkersSection


class ServedModel(ModelSection):
    follow: bool = Field(
        default=False,
        description='With `uri = "run:RUN"`: switch to each new snapshot without dropping a request.',
    )

    @model_validator(mode="after")
    def _followed(self) -> Self:
        if self.follow and not self.uri.startswith("run:"):
            raise fault_at("follow", 'needs a training run that goes on: uri = "run:RUN"')
        return self


class ServeSection(Section):
    listen_addr: Annotated[str, Setting("--listen", "HOST:PORT")] = Field(
        default="127.0.0.1:8000", description="Address for requests; port 0: any free port."
    )
    served_name: Annotated[str, Setting("--served-name", "NAME")] = Field(
        default="", description="Additional model name for clients; empty: only `model.uri`."
    )
    api_keys_env: str = Field(
        default="",
        description="Environment variable with the API keys, or the path of a file with names and limits; "
        "empty: no authentication.",
    )
    max_in_flight: int = Field(default=256, ge=1, le=65_536, description="Concurrent requests per engine.")
    max_queued: int = Field(
        default=1024, ge=0, le=1_000_000, description="Waiting requests; further ones get status 429."
    )
    queue_s: float = Field(
        default=30.0,
        ge=0,
        le=DAY_MS / 1000,
        description="How long a request waits before status 429 (all engines busy) or 503 (no engine).",
    )
    max_replicas: int = Field(default=16, ge=1, le=1024, description="Maximum number of engines.")
    replay: bool = Field(
        default=True,
        description="Continue a request on another engine when its engine or worker dies; false: fail it.",
    )
    allow_http_images: bool = Field(
        default=False, description="Let workers fetch images from http(s) URLs in requests."
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=DAY_MS / 1000, description="How long Ctrl-C waits for running requests."
    )
    orphan_s: float = Field(
        default=600.0,
        ge=0,
        le=DAY_MS / 1000,
        description="Time without a server after which engines and their run end; 0: never.",
    )
    root_path: str = Field(default="", description="Path below which a proxy serves requests, such as /llm.")
    tls_cert: str = Field(default="", description="PEM certificate chain for https.")
    tls_key: str = Field(default="", description="PEM private key for https.")
    dir: str = Field(
        default="serve",
        min_length=1,
        description="Directory of run-id and of a private cluster's state.",
    )

    @field_validator("listen_addr")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            parse_address(value, "listen_addr")
        except ConfigError as error:
            raise ValueError(error.message.removeprefix("listen_addr: ")) from error
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        faults: list[tuple[str, str]] = []
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            faults.append(("root_path", "must begin with a slash and end without one, such as /llm"))
        if is_value(self.api_keys_env):
            faults.append(("api_keys_env", VALUE))
        elif self.api_keys_env and not self.api_keys_env.isidentifier():
            faults.append(("api_keys_env", "is no name of an environment variable: letters, digits, _"))
        for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            path: str = getattr(self, key)
            if path and not Path(path).expanduser().is_file():
                faults.append((key, f"{path}: no such file"))
            elif path and not getattr(self, other):
                faults.append((key, f"needs {other}, too"))
        raise_faults(faults)
        return self

    @property
    def address(self) -> Address:
        return parse_address(self.listen_addr, "serve.listen_addr")


class ServeConfig(WithCloud):
    model: ServedModel
    backend: InferBackend = InferBackend()
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="Where a request says nothing; before what the model's generation_config.json suggests.",
    )
    serve: ServeSection = ServeSection()
    workers: WorkersSection = WorkersSection()

    @model_validator(mode="after")
    def _across(self) -> Self:
        check_together(self.model, self.backend, self.sampling)
        if self.sampling.json_schema is not None and isinstance(self.sampling.json_schema, str):
            raise ValueError("sampling.json_schema must be the schema itself, not a path")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model without those of its adapters; answers use the first."""
        return tuple(dict.fromkeys([self.serve.served_name or self.model.uri, self.model.uri]))

    @property
    def defaults(self) -> SamplingSection:
        """Sampling defaults for requests that set nothing. The engine decides how many tokens fit."""
        if "max_tokens" in self.sampling.model_fields_set:
            return self.sampling
        return self.sampling.model_copy(update={"max_tokens": 1 << 24})
