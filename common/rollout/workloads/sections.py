"""Sections that the configuration files of most workloads have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.cloud.url import BucketUrl
from rollout.config.cores import WORKERS_MAX, auto_count
from rollout.config.declared import FOLLOWED, KEPT, Setting
from rollout.config.section import Section, fault_at
from rollout.config.settings import DAY_MS
from rollout.model.errors import ConfigError
from rollout.model.item import ItemSpec
from rollout.workloads.staging import output_bucket, staging_directory

ON_BAD_ROW: Any = Field(
    default="error",
    description="Handling of unusable rows; error: report all and start nothing; skip: write them to "
    "errors.jsonl as invalid_row. Default: error; skip for a queue and with follow.",
)


Format = Literal["auto", "jsonl", "csv", "tsv", "parquet", "dataset"]
"""Format of an input file."""

FORMAT: Any = Field(
    default="auto",
    description=(
        "File format; auto: by the ending (.parquet, .csv, .tsv), else jsonl; dataset: directories of Hugging "
        "Face's Dataset.save_to_disk."
    ),
)


class InputSection(Section):
    glob: str | list[str] = Field(
        description=(
            "Paths, patterns or s3:// and gs:// URLs of input files, plain, .gz or .zst, sorted within each pattern."
        )
    )

    on_bad_row: Literal["error", "skip"] = ON_BAD_ROW

    @field_validator("glob")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        patterns = [value] if isinstance(value, str) else value
        if not patterns or not all(pattern.strip() for pattern in patterns):
            raise ValueError("name at least one file or pattern, such as data/prompts/*.jsonl")
        return value

    @property
    def patterns(self) -> list[str]:
        return [self.glob] if isinstance(self.glob, str) else list(self.glob)


def _pairs(value: Any) -> Any:
    """Parse `a=b,c=d`, as typed, as a table. Raises ValueError."""
    if not isinstance(value, str):
        return value
    pairs = [one.partition("=") for one in value.split(",")]
    for column, _, key in pairs:
        if not column or not key:
            raise ValueError(f'{value!r} must be columns with the keys of rows: "question=prompt,number=id"')
    if len({column for column, _, _ in pairs}) < len(pairs):
        raise ValueError(f"{value!r} names a column twice")
    return {column: key for column, _, key in pairs}


class QueuedInput(InputSection):
    """Of a workload whose rows are of any format, or arrive from a queue."""

    format: Annotated[Format, Setting("--format")] = FORMAT
    split: Annotated[str | None, Setting("--split", "NAME")] = Field(
        default=None, description="Split to read from a dataset that has several."
    )
    columns: Annotated[dict[str, str], BeforeValidator(_pairs), Setting("--columns", "COLUMN=KEY,...")] = Field(
        default_factory=dict[str, str],
        description='Keys of rows by column: question=prompt,number=id, in TOML { question = "prompt", number'
        ' = "id" }; other columns keep their names.',
    )
    limit: Annotated[int, Setting("--limit", "N")] = Field(
        default=0, ge=0, description="Use only the first N rows; 0: all."
    )
    sample: Annotated[int, Setting("--sample", "N")] = Field(
        default=0, ge=0, description="Use only N random rows, in input order; 0: all."
    )
    sample_seed: Annotated[int, Setting("--sample-seed", "N")] = Field(
        default=0, ge=0, lt=1 << 63, description="Seed of `sample`."
    )
    queue: bool = Field(
        default=False, description="Receive rows from the queue of [cloud], one per message, instead of `glob`."
    )
    follow: Annotated[bool, Setting("--follow")] = Field(
        default=False,
        description="Keep running and take rows added later, in new files or at the end of files.",
    )
    stop_when_empty_s: Annotated[float, Setting("--stop-when-empty", "SECONDS")] = Field(
        default=0.0,
        ge=0,
        le=30 * DAY_MS / 1000,
        description="With `queue` or `follow`: end after this long without new rows; 0: only on Ctrl-C.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_files(cls, values: Any) -> Any:
        given = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
        return {**given, "glob": []} if given.get("queue") is True and "glob" not in given else cast(Any, values)

    @field_validator("glob")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        return value if value == [] else super()._not_empty(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.queue and self.patterns:
            raise fault_at("queue", "rows come from a queue or from files, not from both: remove it, or `glob`")
        if not self.queue and not self.patterns:
            raise fault_at("glob", "name at least one file or pattern, such as data/prompts/*.jsonl")
        if self.limit and self.sample:
            raise fault_at("sample", "limit and sample exclude each other: remove one")
        of_files = ("format", "columns", "split", "limit", "sample", "sample_seed", "follow")
        for key in of_files if self.queue else ():
            if key in self.model_fields_set:
                raise fault_at(key, "is of files, and rows come from a queue: remove it")
        for key in ("limit", "sample") if self.follow else ():
            if getattr(self, key):
                raise fault_at(key, "is a part of what is there, and follow takes all that comes: remove one")
        if self.stop_when_empty_s and not self.queue and not self.follow:
            what = "is of rows that arrive from a queue, or in files that are followed"
            raise fault_at("stop_when_empty_s", f"{what}: set queue = true, or follow = true")
        return self

    @field_validator("columns")
    @classmethod
    def _one_column_a_key(cls, value: dict[str, str]) -> dict[str, str]:
        for key, times in Counter(value.values()).items():
            if times > 1:
                raise ValueError(f'{times} columns become the key "{key}" of a row: name one')
        return value

    @property
    def skips_bad_rows(self) -> bool:
        """Whether bad rows are skipped: by default a bad message must not stop an intake."""
        if (self.queue or self.follow) and "on_bad_row" not in self.model_fields_set:
            return True
        return self.on_bad_row == "skip"


class OutputPlace(Section):
    """[output]: `dir`, on disk or in a bucket."""

    dir: str = Field(min_length=1)

    @field_validator("dir")
    @classmethod
    def _place(cls, value: str) -> str:
        try:
            output_bucket(value)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return value

    @property
    def bucket(self) -> BucketUrl | None:
        """The bucket, with a slash at its end; None if `dir` is a path."""
        return output_bucket(self.dir)

    @property
    def directory(self) -> Path:
        """The local directory. Raises ConfigError if this account has none to collect in."""
        bucket = self.bucket
        return Path(self.dir) if bucket is None else staging_directory(bucket)


class OutputSection(OutputPlace):
    dir: str = Field(
        min_length=1,
        description="Directory or s3:// or gs:// URL for run-id, results, errors.jsonl and summary.json.",
    )


OutputFormat = Literal["jsonl", "parquet"]

OUTPUT_FORMAT: Any = Field(
    default="jsonl",
    description="parquet: also write results as parquet when the run completes.",
)


class WorkersSection(Section):
    count: Annotated[int, BeforeValidator(auto_count)] = Field(
        default=1,
        ge=1,
        le=WORKERS_MAX,
        description='Workers to start when no coordinator is named; "auto": one per core.',
    )


class QueuedRun(Section):
    """A run among others."""

    name: Annotated[str, KEPT] = Field(
        default="", description="Name for use in commands; default: the output directory's."
    )
    priority: Annotated[int, KEPT] = Field(
        default=0, ge=-1000, le=1000, description="A higher priority gets a larger share of the workers."
    )


class RunSection(QueuedRun):
    """How a run is carried out, not what it does."""

    max_attempts: Annotated[int, FOLLOWED] = Field(
        default=3, ge=1, le=100, description="Attempts at a row before it goes to errors.jsonl."
    )
    max_worker_lost: Annotated[int, FOLLOWED] = Field(
        default=3, ge=1, le=100, description="Workers that a row may crash before it fails."
    )
    order: Annotated[Literal["schedule", "arrival"], KEPT] = Field(
        default="schedule", description="Order of results; schedule: as in the input; arrival: as they finish."
    )
    timeout_ms: Annotated[int, FOLLOWED] = Field(
        default=0, ge=0, le=30 * DAY_MS, description="Time limit of one attempt; 0: none."
    )
    max_in_flight: Annotated[int, KEPT] = Field(
        default=0, ge=0, le=1_000_000_000, description="Concurrent rows in the whole cluster; 0: no limit."
    )

    def item_spec(self) -> ItemSpec:
        """Return the spec that all items share."""
        return ItemSpec(
            timeout_ms=self.timeout_ms, max_attempts=self.max_attempts, max_worker_lost=self.max_worker_lost
        )


_SPEED = frozenset(
    {
        "async_scheduling", "block_size", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes",
        "data_parallel_size", "disable_custom_all_reduce", "disable_log_stats", "distributed_executor_backend",
        "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "long_prefill_token_threshold", "max_cudagraph_capture_size",
        "max_long_partial_prefills", "max_num_batched_tokens", "max_num_partial_prefills", "max_num_seqs",
        "max_parallel_loading_workers", "num_gpu_blocks_override", "pipeline_parallel_size", "swap_space",
        "tensor_parallel_size",
    }
)  # fmt: skip
"""Arguments of vLLM that affect speed and memory, but not answers."""


class BackendSection(Section):
    kind: Literal["vllm", "transformers", "openai", "mock"] | str = Field(
        default="vllm",
        min_length=1,
        description="Inference engine, built in or registered; openai: a server.",
    )
    # mock
    delay_ms: Annotated[float, FOLLOWED] = Field(default=0.0, ge=0, le=DAY_MS, description="mock: time per row.")
    jitter_ms: Annotated[float, FOLLOWED] = Field(
        default=0.0, ge=0, le=DAY_MS, description="mock: additional time per row, at most."
    )
    token_ms: Annotated[float, FOLLOWED] = Field(default=0.0, ge=0, le=DAY_MS, description="mock: time per word.")
    concurrency: Annotated[int, FOLLOWED] = Field(default=64, ge=1, le=65_536, description="mock: concurrent rows.")
    fail_rate: Annotated[float, FOLLOWED] = Field(
        default=0.0, ge=0, le=1, description="mock: share of attempts that fail."
    )
    fail_match: Annotated[str, FOLLOWED] = Field(
        default="", description="mock: text in a prompt that makes its row always fail."
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="mock: seed of completions and failures.")
    # engines
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto", description="Data type of the weights."
    )
    device: Annotated[Literal["cpu", "cuda"] | None, FOLLOWED] = Field(
        default=None, description="Unset: cuda if the worker has it, else cpu."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, le=1 << 30, description="Maximum tokens of prompt and completion together."
    )
    max_num_seqs: Annotated[int | None, FOLLOWED] = Field(
        default=None, ge=1, le=65_536, description="Concurrent sequences; default: 32 on CPU, 256 on GPU."
    )
    gpu_memory_utilization: Annotated[float | None, FOLLOWED] = Field(
        default=None, gt=0, le=1, description="vllm: share of GPU memory."
    )
    tensor_parallel_size: Annotated[int, FOLLOWED] = Field(default=1, ge=1, le=64, description="vllm: GPUs per engine.")
    replicas: Annotated[Annotated[int, Field(ge=1, le=64)] | Literal["auto"], FOLLOWED] = Field(
        default=1,
        description="Engines per worker, each with its own GPUs; auto: as many as the GPUs allow.",
    )
    enforce_eager: Annotated[bool | None, FOLLOWED] = Field(
        default=None, description="vllm: capture no graphs; default: true on CPU."
    )
    cpu_kvcache_gib: Annotated[int, FOLLOWED] = Field(
        default=1, ge=1, le=1 << 20, description="vllm on CPU: size of the key-value cache."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that the model brings along.")
    engine: Annotated[dict[str, Any], Setting(on_resume="follow", parts=_SPEED)] = Field(
        default_factory=dict[str, Any], description="Additional arguments of the engine."
    )
