"""offload.toml: where tests run, how they are found and tried, and which reports are written.

Its keys are those of the public tool Offload, whose files work unchanged, and some of our own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal, Self

import pathspec
from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.declared import Setting
from rollout.config.section import Section, fault_at, raise_faults
from rollout.workloads.sections import QueuedRun

_ENV: Any = Field(default_factory=dict[str, str], description="Environment variables of the tests.")


def _strangers(section: Section, kind: str, tables: Mapping[str, frozenset[str]]) -> Iterator[tuple[str, str]]:
    """Yield keys that were set and belong to another `type` than `kind`."""
    for key in sorted(section.model_fields_set - tables[kind] - {"type", "env"}):
        owners = " or ".join(f'"{one}"' for one, keys in tables.items() if key in keys)
        yield key, f'means nothing with type = "{kind}"; it is of {owners}'


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words as a shell does: {error}") from error


def _number(value: Any) -> Any:
    """Convert a number that an option gives as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


_Typed = Annotated[float, BeforeValidator(_number)]


class OffloadSection(Section):
    """How many tests run at once, for how long, and where in a sandbox."""

    max_parallel: Annotated[int | None, Setting("--parallel", "N", on_resume="keep")] = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Concurrent batches; default: the cores of this machine, elsewhere 10.",
    )
    test_timeout_secs: Annotated[_Typed, Setting("--timeout", "SECONDS", on_resume="keep")] = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="Time limit of one attempt at a test, after which its process is killed.",
    )
    max_failures: Annotated[int, Setting("--maxfail", "N", on_resume="keep")] = Field(
        default=0, ge=0, le=1_000_000, description="Start no test after this many failures; 0: run all."
    )
    working_dir: str | None = Field(default=None, description="Directory of the project; default: that of the file.")
    sandbox_repo_root: str | None = Field(default=None, description="Directory of the project in a sandbox.")
    sandbox_project_root: str | None = Field(
        default=None, description="Directory in a sandbox where tests run; default: sandbox_repo_root."
    )
    sandbox_init_cmd: str | None = Field(
        default=None, description="Shell command that prepares a sandbox, once per content of the lock files."
    )
    post_patch_cmd: str | None = Field(default=None, description="Not supported: the whole tree is copied.")
    impatiently_requeue_batches: bool = Field(
        default=True,
        description="On a cluster, also run an overdue batch on an idle worker; the first result counts.",
    )
    max_parallel_collection: int = Field(
        default=0, ge=0, le=1024, description="Groups to collect concurrently; 0: as many as cores."
    )


ProviderType = Literal["local", "process", "bubblewrap", "docker", "podman", "kubernetes", "modal", "default"]
_COMMANDS = ("prepare_command", "create_command", "exec_command", "download_command", "destroy_command")
_CONTAINER = frozenset({"image", "dockerfile", "copy_dirs", "cpu_cores", "memory_gb", "timeout_secs"})
_OF_PROVIDER: dict[str, frozenset[str]] = {
    "local": frozenset({"working_dir", "shell"}),
    "process": frozenset({"copy_dirs", "timeout_secs"}),
    "bubblewrap": _CONTAINER,
    "docker": _CONTAINER,
    "podman": _CONTAINER,
    "kubernetes": _CONTAINER,
    "modal": _CONTAINER | {"include_cwd", "experimental_options"},
    "default": frozenset({*_COMMANDS, "working_dir", "timeout_secs", "copy_dirs", "cpu_cores"}),
}
"""Keys of [provider] that each type supports, besides `type` and `env`."""


class ProviderSection(Section):
    """Where tests run."""

    type: ProviderType = Field(
        default="local",
        description="Where tests run; local: in the project's directory; default: through your own commands; "
        "others: in sandboxes with a copy.",
    )
    env: dict[str, str] = _ENV
    working_dir: str | None = Field(
        default=None, description="Working directory of the tests (local) or the commands (default)."
    )
    shell: str | None = Field(default=None, description="Not supported.")
    image: str | None = Field(default=None, description="Image of the sandboxes.")
    dockerfile: str | None = Field(default=None, description="Dockerfile of the sandboxes' image.")
    include_cwd: bool = Field(default=True, description="modal: no effect; the project is always copied.")
    copy_dirs: list[str] = Field(
        default_factory=list[str],
        description='Additional directories as "HERE:THERE": relative to the project, and absolute in a sandbox.',
    )
    cpu_cores: float | None = Field(default=None, gt=0, le=1024, description="Cores of a sandbox.")
    memory_gb: float | None = Field(default=None, gt=0, le=65_536, description="Memory of a sandbox, in GiB.")
    timeout_secs: float = Field(
        default=3600.0, gt=0, le=30 * 86_400, description="Time limit of a sandbox and of a command."
    )
    experimental_options: dict[str, Any] = Field(default_factory=dict[str, Any], description="Not supported.")
    prepare_command: str | None = Field(
        default=None, description="default: command that runs once and prints an image id last."
    )
    create_command: str | None = Field(
        default=None, description="default: command that prints a sandbox id; may use {image_id}."
    )
    exec_command: str | None = Field(default=None, description="default: command that runs {command} in {sandbox_id}.")
    download_command: str | None = Field(
        default=None, description="default: command that copies {paths} out of {sandbox_id}."
    )
    destroy_command: str | None = Field(default=None, description="default: command that removes {sandbox_id}.")

    @field_validator("copy_dirs")
    @classmethod
    def _pairs(cls, value: list[str]) -> list[str]:
        for one in value:
            here, _, there = one.rpartition(":")
            if not here or not there.startswith("/") or there.strip("/") in ("", "..") or "/.." in there:
                raise ValueError(f'{one!r} is not "HERE:THERE", such as "../data:/data"')
        return value

    @property
    def copies(self) -> list[tuple[str, str]]:
        """(local directory, its path in a sandbox) of each copied directory."""
        return [(here, there.rstrip("/")) for here, _, there in (one.rpartition(":") for one in self.copy_dirs)]

    @model_validator(mode="after")
    def _keys_of_type(self) -> Self:
        raise_faults(_strangers(self, self.type, _OF_PROVIDER))
        if self.type == "default":
            needed = ("create_command", "exec_command", "destroy_command")
            raise_faults((key, 'is needed with type = "default"') for key in needed if getattr(self, key) is None)
        return self


FrameworkType = Literal["pytest", "cargo", "nextest", "vitest", "jest", "go", "default"]
_OF_JS = frozenset({"command", "run_args", "test_id_format", "paths"})
_OF_RUST = frozenset({"package", "features", "bin", "include_ignored", "test_id_format", "run_args"})
_OF_FRAMEWORK: dict[str, frozenset[str]] = {
    "pytest": frozenset({"paths", "command", "python", "run_args", "extra_args", "markers", "test_id_format"}),
    "cargo": _OF_RUST,
    "nextest": _OF_RUST,
    "vitest": _OF_JS,
    "jest": _OF_JS,
    "go": frozenset({"command", "run_args", "paths"}),
    "default": frozenset({"discover_command", "run_command", "result_file", "working_dir", "test_id_format"}),
}


class FrameworkSection(Section):
    """How tests are found and run."""

    type: FrameworkType = Field(default="pytest", description="Test framework; nextest means cargo.")
    paths: list[str] | None = Field(
        default=None, description="pytest, vitest, jest, go: paths to search; default: the framework's."
    )
    command: str | None = Field(
        default=None,
        description='pytest, vitest, jest, go: command, such as "uv run pytest"; default: the project\'s.',
    )
    python: str | None = Field(
        default=None, description="pytest: interpreter; default: .venv/bin/python, else python on the PATH."
    )
    run_args: str | None = Field(default=None, description="Arguments for runs, not for discovery.")
    extra_args: list[str] = Field(default_factory=list[str], description="pytest: arguments for discovery and runs.")
    markers: str | None = Field(default=None, description="pytest: expression of marks, as for -m.")
    test_id_format: str | None = Field(
        default=None, description='Id of a test in JUnit XML, such as "{classname} {name}"; pytest needs none.'
    )
    package: str | None = Field(default=None, description="cargo: package of the workspace.")
    features: list[str] = Field(default_factory=list[str], description="cargo: features.")
    bin: str | None = Field(default=None, description="cargo: binary.")
    include_ignored: bool = Field(default=False, description="cargo: also run tests marked #[ignore].")
    discover_command: str | None = Field(
        default=None, description="default: command that prints one id per line; may use the group's {filters}."
    )
    run_command: str | None = Field(
        default=None, description="default: command that runs {tests} and may write JUnit XML to {result_file}."
    )
    result_file: str | None = Field(default=None, description="default: JUnit XML file of run_command.")
    working_dir: str | None = Field(default=None, description="default: working directory of the commands.")

    @property
    def kind(self) -> str:
        return "cargo" if self.type == "nextest" else self.type

    @field_validator("command", "run_args")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        _split(value or "")
        return value

    @model_validator(mode="after")
    def _keys_of_type(self) -> Self:
        raise_faults(_strangers(self, self.type, _OF_FRAMEWORK))
        if self.type == "default":
            needed = ("discover_command", "run_command")
            raise_faults((key, 'is needed with type = "default"') for key in needed if not getattr(self, key))
        if self.python is not None and self.command is not None:
            raise fault_at("python", "command says it already: remove one of them")
        return self


class GroupSection(Section):
    """Tests that are found, tried and run alike."""

    retry_count: int = Field(default=0, ge=0, le=100, description="Retries of a failed test.")
    filters: str = Field(
        default="",
        description="""Arguments of the framework that select the group's tests, such as "-m 'not slow'".""",
    )
    schedule_individual: bool = Field(default=False, description="Run each test in its own batch.")
    split_scopes: bool = Field(
        default=False, description="Split tests that share fixtures if they exceed a fair share of time."
    )

    @field_validator("filters")
    @classmethod
    def _words(cls, value: str) -> str:
        _split(value)
        return value

    @property
    def words(self) -> list[str]:
        return shlex.split(self.filters)


class ReportSection(Section):
    """What is written."""

    output_dir: Annotated[str, Setting("--output", "DIR")] = Field(
        default="test-results", min_length=1, description="Directory of the results, relative to the project."
    )
    junit: bool = Field(default=True, description="Write JUnit XML.")
    junit_file: str = Field(default="junit.xml", min_length=1, description="Name of the JUnit file.")
    fail_on_flaky: bool = Field(default=False, description="Exit with 3 if tests were flaky and none failed.")
    slow_secs: float = Field(default=10.0, gt=0, le=86_400, description="Seconds from which a test is listed as slow.")
    download_globs: list[str] = Field(
        default_factory=list[str],
        description="Files such as `shots/**/*.png` to copy from the project's copy to output_dir/downloads "
        "after each batch.",
    )
    download_globs_failure_only: bool = Field(
        default=False, description="Copy them only from batches with a failed test."
    )

    @field_validator("download_globs")
    @classmethod
    def _relative(cls, value: list[str]) -> list[str]:
        for one in value:
            if not one.strip() or one.startswith("/") or ".." in one.split("/"):
                raise ValueError(f"{one!r} must be relative to the directory that tests run in")
            try:
                pathspec.GitIgnoreSpec.from_lines([f"/{one}"])
            except ValueError as error:
                raise ValueError(f"{one!r} is no pattern of files") from error
        return value

    @field_validator("junit_file")
    @classmethod
    def _name(cls, value: str) -> str:
        if "/" in value or value in (".", ".."):
            raise ValueError("must be the name of a file in output_dir, without a directory")
        return value


class HistorySection(Section):
    """The durations of earlier tests, from which batches are made."""

    record_history: Literal["always", "flag"] = Field(
        default="always", description="When to record runs; flag: only with --record-history."
    )
    path: str | None = Field(default=None, description="Database file; default: history.db in output_dir.")
    reservoir_size: int = Field(default=20, ge=1, le=10_000, description="Durations to keep per test and outcome.")
    default_duration_secs: float = Field(
        default=1.0, gt=0, le=86_400, description="Expected duration of a test that never ran."
    )


class CheckpointSection(Section):
    """Not supported: trees are identified by content, and only new content is transferred."""

    build_inputs: list[str] = Field(default_factory=list[str], description="Not supported.")


class QuarantineEntry(Section):
    """A test that may fail until a given day."""

    id: str = Field(min_length=1, description="Id of the test; * matches any text.")
    until: date = Field(description="Last day of the quarantine, such as 2026-12-31.")
    reason: str = Field(default="", description="Reason, for readers.")


class RunSection(QueuedRun):
    """How the run is carried out."""

    name: Annotated[str, Setting("--name", "NAME", on_resume="keep")] = Field(
        default="", max_length=200, description="Name for use in commands; default: the output directory's."
    )


class TestConfig(Section):
    __test__ = False

    offload: OffloadSection = OffloadSection()
    provider: ProviderSection = ProviderSection()
    framework: FrameworkSection = FrameworkSection()
    groups: dict[str, GroupSection] = Field(
        default_factory=lambda: {"all": GroupSection()},
        min_length=1,
        description="Groups of tests, collected separately; default: one group with every test.",
    )
    report: ReportSection = ReportSection()
    history: HistorySection = HistorySection()
    quarantine: list[QuarantineEntry] = Field(
        default_factory=list[QuarantineEntry], description="Tests whose failures are reported without failing the run."
    )
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()

    def unsupported(self) -> Iterator[str]:
        """Yield a line for each key that was set and has no effect."""
        path = self.history.path
        given: list[tuple[str, object, str]] = [
            ("checkpoint.build_inputs", self.checkpoint.build_inputs, "of a tree only what is new travels"),
            ("offload.post_patch_cmd", self.offload.post_patch_cmd, "the whole tree travels, and no patch"),
            ("provider.experimental_options", self.provider.experimental_options, "they are modal's own"),
            ("provider.shell", self.provider.shell, "tests are started without a shell"),
            ("history.path", path is not None and path.endswith(".jsonl"), "a database is kept in output_dir"),
        ]
        for key, value, why in given:
            if value:
                yield f"{key} is not supported and has no effect: {why}"
