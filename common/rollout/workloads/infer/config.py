"""The configuration of `rollout infer batch`: models and the rules that concern several keys.

Only `InferConfig` is loaded from a file (rollout.config.load, which adds file, line and nearest key to every error).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import FOLLOWED
from rollout.config.secret_names import VALUE, is_value
from rollout.config.section import Section, fault_at, raise_faults
from rollout.config.settings import DAY_MS
from rollout.model.errors import ConfigError
from rollout.workloads.engine_options import refused_options
from rollout.workloads.infer.honoured import ADAPTS, LATER, not_honoured
from rollout.workloads.json_form import short
from rollout.workloads.local_model import names_snapshot
from rollout.workloads.sections import (
    OUTPUT_FORMAT,
    BackendSection,
    OutputFormat,
    OutputSection,
    QueuedInput,
    RunSection,
    WorkersSection,
)


class ModelSection(Section):
    uri: str = Field(
        min_length=1,
        description="Local directory (copied to remote workers), its s3:// or gs:// URL, or Hugging Face name.",
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer in place of the model's: directory, URL or name."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face name.")
    lora: str | None = Field(
        default=None,
        min_length=1,
        description="LoRA adapter for rows that name none: directory, URL or Hugging Face name.",
    )
    loras: dict[str, str] = Field(
        default_factory=dict[str, str],
        max_length=256,
        description="Adapters by the names that rows use in `lora`, or in `model` of an OpenAI body.",
    )

    @property
    def adapters(self) -> tuple[tuple[str, str, str], ...]:
        """(name, uri, key) of each adapter; the run's own has no name."""
        own = () if self.lora is None else (("", self.lora, "model.lora"),)
        return (*own, *((name, uri, f"model.loras.{name}") for name, uri in self.loras.items()))


STRUCTURE = ("json_schema", "regex", "choice", "grammar")
"""Sampling keys that constrain the form of the text. At most one is set."""
_DEFAULTS = {"include_stop_str_in_output": False, "skip_special_tokens": True}


class SamplingSection(Section):
    """Sampling of every row. The `sampling` object of a row may override every key except `stream`."""

    temperature: float = Field(default=1.0, ge=0, le=100, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this probability mass."
    )
    top_k: int = Field(
        default=-1, ge=-1, lt=1 << 31, description="Sample from this many most probable tokens; -1 or 0: all."
    )
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Drop tokens below this share of the best token's probability."
    )
    max_tokens: int = Field(default=64, ge=1, le=1 << 24, description="Maximum number of generated tokens.")
    min_tokens: int = Field(
        default=0, ge=0, description="Tokens before an end of sequence or stop string takes effect."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 63,
        description="Base of each row's own seed; unset: still deterministic.",
    )
    stop: list[str] = Field(default_factory=list[str], max_length=32, description="Strings that end a completion.")
    n: int = Field(default=1, ge=1, le=256, description="Completions per row.")
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Alternatives to report per token; 0: only the chosen token."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted once from the score of every used token."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a token's score for every use."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=10, description="Divisor of the score of seen tokens; 1: off."
    )
    json_schema: dict[str, Any] | str | None = Field(
        default=None, description="JSON schema of every completion: a table, or a file's path."
    )
    ignore_eos: bool = Field(default=False, description="Continue after the end-of-sequence token.")
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Numbers from -100 to 100 to add to scores, by token id."
    )
    stop_token_ids: list[int] = Field(
        default_factory=list[int], max_length=128, description="Tokens that end a completion and are left out of it."
    )
    allowed_token_ids: list[int] | None = Field(
        default=None, min_length=1, description="The only tokens that may be generated."
    )
    bad_words: list[str] = Field(
        default_factory=list[str], max_length=1024, description="vllm: texts that are never generated."
    )
    include_stop_str_in_output: bool = Field(default=False, description="Keep the stop string in the text.")
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")
    regex: str | None = Field(
        default=None, min_length=1, description="Regular expression that every completion matches."
    )
    choice: list[str] | None = Field(
        default=None, min_length=1, max_length=1024, description="Texts to choose each completion from."
    )
    grammar: str | None = Field(
        default=None, min_length=1, description="Grammar of every completion, in Lark or GBNF notation."
    )
    stream: Literal[False] = Field(default=False, description="Always false: batch inference does not stream.")

    @property
    def later(self) -> frozenset[str]:
        """The keys of `LATER` that differ from their default."""
        return frozenset(key for key in LATER if getattr(self, key) not in (None, [], {}, _DEFAULTS.get(key)))

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty string cannot be a stop string: remove it")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not (token.isascii() and token.isdecimal()):
                raise ValueError(f"{short(token)} is no token id: write ids, as strings")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} must be from -100 to 100, not {bias}")
        return value

    @field_validator("stop_token_ids", "allowed_token_ids")
    @classmethod
    def _ids(cls, value: list[int] | None) -> list[int] | None:
        if value and not 0 <= min(value) <= max(value) < 1 << 31:
            raise ValueError("token ids are numbers from 0")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        return -1 if value == 0 else value

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        structures = [key for key in STRUCTURE if getattr(self, key) is not None]
        if len(structures) > 1:
            raise ValueError(f"{structures[0]} and {structures[1]} both say what form the text has: keep one")
        return self

    @model_validator(mode="after")
    def _tokens(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        return self


class InferInput(QueuedInput):
    model_in_rows: Literal["error", "ignore"] = Field(
        default="error",
        description="Handling of an OpenAI row with another `model` than uri or its last part; error: the row"
        " is unusable; ignore: run it.",
    )
    allow_http_images: bool = Field(
        default=False,
        description="Let workers fetch images from http(s) URLs in rows; with openai the server fetches them.",
    )


class InferOutput(OutputSection):
    format: OutputFormat = OUTPUT_FORMAT
    openai: bool = Field(
        default=False, description="Also write openai.jsonl: one OpenAI batch output line per row, errors included."
    )


class InferWorkers(WorkersSection):
    prefix_affinity: bool = Field(
        default=True, description="Send rows with a common prompt prefix to one worker, in sequence."
    )
    longest_first: bool = Field(
        default=True, description="Start rows with a larger max_tokens first; results keep the input order."
    )


class Price(Section):
    """The price of a model per million tokens, in any currency."""

    input: float = Field(ge=0, le=1e9, description="Price of 1,000,000 prompt tokens.")
    output: float = Field(ge=0, le=1e9, description="Price of 1,000,000 completion tokens.")


class InferBackend(BackendSection):
    tool_parser: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "vllm: its tool-call parser, such as hermes; default: the formats of Hermes, Qwen, Qwen3-Coder, "
            "Mistral and Llama 3."
        ),
    )
    # openai
    base_url: Annotated[str, FOLLOWED] = Field(
        default="", description="openai: URL of the server, such as http://localhost:8000/v1."
    )
    api_key_env: Annotated[str, FOLLOWED] = Field(
        default="",
        description="openai: the worker's environment variable with the key, or a name in [secrets] allow; "
        "empty: no key.",
    )
    requests_per_minute: Annotated[int | None, FOLLOWED] = Field(
        default=None, ge=1, le=1_000_000_000, description="openai: requests started per minute in the whole cluster."
    )
    tokens_per_minute: Annotated[int | None, FOLLOWED] = Field(
        default=None,
        ge=1,
        le=1_000_000_000_000,
        description="openai: prompt and completion tokens per minute in the whole cluster.",
    )
    max_in_flight: Annotated[int, FOLLOWED] = Field(
        default=128,
        ge=1,
        le=16_384,
        description="openai: concurrent requests in the whole cluster, reduced while the server answers 429 or 503.",
    )
    timeout_s: Annotated[float, FOLLOWED] = Field(
        default=600.0, gt=0, le=DAY_MS / 1000, description="openai: time limit of one request."
    )
    prices: Annotated[dict[str, Price], FOLLOWED] = Field(
        default_factory=dict[str, Price],
        description="openai: prices by the server's model name, for the cost in summary.json.",
    )

    @model_validator(mode="after")
    def _server(self) -> Self:
        if self.tool_parser and self.kind != "vllm":
            raise fault_at("tool_parser", 'needs backend.kind = "vllm"')
        given = self.model_fields_set & OF_SERVER
        if self.kind != SERVER:
            raise_faults((key, f'needs backend.kind = "{SERVER}"') for key in sorted(given))
            return self
        faults: list[tuple[str, str]] = []
        if fault := _url_fault(self.base_url):
            faults.append(("base_url", fault))
        if is_value(self.api_key_env):
            faults.append(("api_key_env", VALUE))
        elif self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            faults.append(("api_key_env", "is no name of an environment variable: letters, digits, _"))
        raise_faults(faults)
        return self


SERVER = "openai"
"""The kind of backend that forwards to a server."""
OF_SERVER = frozenset(InferBackend.model_fields) - frozenset(BackendSection.model_fields) - {"tool_parser"}


def _url_fault(url: str) -> str:
    """Return what is wrong with a server's address, or "". The address is not quoted if it may contain a key."""
    if not url:
        return f'backend.kind = "{SERVER}" needs the address of the server, such as "http://localhost:8000/v1"'
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.username is not None or parts.password is not None:
        return "holds a user name or password: name the variable that holds the key in api_key_env instead"
    if parts.query or parts.fragment:
        return "has a ? or #: give the address up to the path below which /chat/completions is, such as .../v1"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f'{url!r} is no http:// or https:// URL, such as "http://localhost:8000/v1"'
    return ""


class InferConfig(WithCloud):
    model: ModelSection
    sampling: SamplingSection = SamplingSection()
    input: InferInput
    output: InferOutput
    workers: InferWorkers = InferWorkers()
    backend: InferBackend = InferBackend()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _across(self) -> Self:
        check_together(self.model, self.backend, self.sampling)
        if self.backend.prices and self.model.uri not in self.backend.prices:
            raise ValueError(
                f"backend.prices has no price of model.uri {self.model.uri!r}: add the table "
                f"[backend.prices.{json.dumps(self.model.uri)}] with input and output, or remove backend.prices"
            )
        return self


def check_together(model: ModelSection, backend: BackendSection, sampling: SamplingSection) -> None:
    """Raise ValueError if the sections contradict each other or the engine cannot take these options."""
    options = refused_options(backend.kind, backend.engine)
    raise_faults([*((f"backend.engine.{name}", why) for name, why in options), *_adapter_faults(model, backend.kind)])
    if refused := not_honoured(backend.kind, sampling.later):
        raise ValueError(f'sampling.{refused[0]} is not supported by backend "{backend.kind}": remove it')
    if backend.tensor_parallel_size > 1 and backend.kind != "vllm":
        raise ValueError('backend.tensor_parallel_size needs backend.kind = "vllm"')
    if backend.kind == SERVER and backend.replicas != 1:
        raise ValueError(f'backend.replicas has no meaning with backend.kind = "{SERVER}": set max_in_flight')
    if backend.device == "cpu" and backend.tensor_parallel_size > 1:
        raise ValueError('backend.tensor_parallel_size needs GPUs but backend.device is "cpu"')
    if backend.max_model_len is not None and sampling.max_tokens >= backend.max_model_len:
        raise ValueError(
            f"sampling.max_tokens ({sampling.max_tokens}) leaves no room for a prompt in "
            f"backend.max_model_len ({backend.max_model_len})"
        )


def _adapter_faults(model: ModelSection, kind: str) -> Iterator[tuple[str, str]]:
    for name, uri, key in model.adapters:
        if kind not in ADAPTS:
            yield key, f'needs backend.kind = "vllm" or "transformers", not "{kind}"'
        elif names_snapshot(uri):
            yield key, "is a snapshot: write it with `rollout snapshot export ID --output DIR`, and name DIR"
        elif names_snapshot(model.uri):
            yield key, "needs model files: write model.uri with `rollout snapshot export ID --output DIR`, and name DIR"
        elif key != "model.lora" and not name:
            yield key, "has no name"


def load_schema(value: dict[str, Any] | str | None, what: str = "sampling.json_schema") -> dict[str, Any] | None:
    """Return the schema itself. Raises ConfigError if its file cannot be read or is not a JSON object."""
    if value is None or isinstance(value, dict):
        return value
    try:
        schema = json.loads(Path(value).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {value}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{what}: {value} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{what}: {value} must hold a JSON object")
    return schema  # pyright: ignore[reportUnknownVariableType]
