"""The contracts of an experiment, each a model from which its JSON Schema is derived.

A contract has no key that is not declared here. Objects of the user's own stand in `task`, `bindings`,
`dependencies.services`, `policy.sandbox.resources`, `answer` and the payload of events.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from rollout.config.section import Section
from rollout.config.wording import describe
from rollout.model.errors import InputError
from rollout.model.problems import problems
from rollout.workloads.json_form import JsonObject, canonical, parse_json

CONTRACT = "/agentlab/contract"
TASK_FILE = f"{CONTRACT}/in/trial_input.json"
"""Where the agent reads `AgentTask`."""
RESULT_FILE = f"{CONTRACT}/out/result.json"
"""Where the agent writes `AgentResult`."""
EVENTS_FILE = f"{CONTRACT}/out/events.jsonl"
"""Where the agent may write hook events: objects with `event_type`, one per line."""
AGENT = "/agentlab/agent"
"""Where the frozen artifact is in the sandbox."""
WORKSPACE = f"{CONTRACT}/workspace"
"""The default workspace of a task."""

RESULT_BYTES_MAX = 16 << 20
TASK_BYTES_MAX = 16 << 20
EVENTS_BYTES_MAX = 16 << 20
EVENTS_MAX = 10_000
METRICS_MAX = 1000
FILES_MAX = 1000
NAME_MAX = 200

_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Id = Annotated[str, Field(pattern=_ID)]
"""The id of an experiment or variant, which becomes the name of a directory."""
TaskId = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
TrialId = Annotated[str, Field(pattern=r"^trial_\d{6,}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Ref = Annotated[str, Field(pattern=r"^artifact://sha256/[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
Index = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z$")]
"""A time as in RFC 3339, in UTC."""
AgentOutcome = Literal["success", "failure", "missing", "error"]
Direction = Literal["maximize", "minimize"]
SCORE = "score"
"""The name of a trial's score among its metrics, and in a grade."""
MODEL = "engine.model"
"""The name of a variant's model among its bindings, in facts and in the report."""
PASS_RATE = "pass_rate"
PASS_RATE_NAMES = (PASS_RATE, "passed")
"""Names of a primary metric that mean the pass rate."""
SlotStatus = Literal["completed", "failed", "skipped_pruned", "cancelled"]
StatePolicy = Literal["isolate_per_trial", "persist_per_task", "accumulate"]
Comparison = Literal["paired", "unpaired", "none"]
ScheduleOrder = Literal["variant_sequential", "paired_interleaved", "randomized"]
NetworkMode = Literal["none", "full", "allowlist_enforced"]


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\0" in value or not path.parts:
        raise ValueError(f'must be a path below the workspace, not "{value[:80]}"')
    return value


def _workspace(value: str) -> str:
    """Raise ValueError if it is not an absolute path of a directory of which a snapshot can be taken."""
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or "\0" in value or len(path.parts) < 2:
        raise ValueError(f'must be the absolute path of a directory other than /, not "{value[:80]}"')
    return value


WorkspacePath = Annotated[str, AfterValidator(_workspace)]
FilePath = Annotated[str, Field(max_length=4096), AfterValidator(_relative)]
"""The path of a file, relative to the workspace."""


def _number(value: Any) -> Any:
    """Convert true and false to 1 and 0."""
    return float(value) if isinstance(value, bool) else value


Number = Annotated[float, BeforeValidator(_number)]
"""A finite number."""


def ref_of(sha256: str) -> str:
    """Return the reference to an artifact by its hash."""
    return f"artifact://sha256/{sha256}"


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Contract(Section):
    """`bytes_max`: of one document, encoded."""

    bytes_max: ClassVar[int] = 64 << 20

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Decode a document. Raises InputError with all faults, each as `key: what`."""
        if len(raw) > cls.bytes_max:
            raise InputError(f"it is larger than {cls.bytes_max >> 20} MiB")
        try:
            value = parse_json(raw)
        except ValueError as error:
            raise InputError(str(error)) from None
        if not isinstance(value, dict):
            raise InputError("it must be an object")
        return cls.of(cast("JsonObject", value))

    @classmethod
    def of(cls, value: JsonObject) -> Self:
        """Validate a parsed value as `decode` does."""
        try:
            return cls.model_validate(value, strict=True)
        except ValidationError as error:
            raise InputError(problems(faults_in(error))) from None

    def to_json(self) -> JsonObject:
        """Return the keys in the order of the contract, without missing ones."""
        return self.model_dump(mode="json", exclude_none=True)

    def encode(self) -> bytes:
        """Encode the document as a file."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """Hash of its canonical JSON."""
        return sha256_of(canonical(self.to_json()))


def faults_in(error: ValidationError) -> list[str]:
    """Return each fault as `key: what`, in the order of the keys."""
    found: list[str] = []
    for entry in error.errors(include_url=False):
        key = ".".join(map(str, entry["loc"]))
        strange = entry["type"] == "extra_forbidden"
        what = "unknown key" if strange else describe(cast("JsonObject", entry), key, "an object")
        found.append(f"{key}: {what}" if key else what)
    return found


class Ids(Contract):
    run_id: Name
    trial_id: TrialId
    variant_id: Id
    task_id: TaskId
    repl_idx: Index


# ---- runner to agent


class Network(Contract):
    mode: NetworkMode = "none"
    allowed_hosts: list[Name] = Field(default_factory=list[Name])


class SandboxPolicy(Contract):
    mode: Name = Field(description="The provider of sandboxes, such as process, bubblewrap or docker.")
    image: str | None = None
    resources: JsonObject | None = None


class TrialPolicy(Contract):
    timeout_ms: int = Field(ge=1)
    network: Network = Network()
    sandbox: SandboxPolicy


class Dependencies(Contract):
    services: JsonObject | list[Any] | None = None


class AgentTask(Contract):
    """agent_task_v1: what an agent is given."""

    bytes_max: ClassVar[int] = TASK_BYTES_MAX

    schema_version: Literal["agent_task_v1"] = "agent_task_v1"
    ids: Ids
    task: JsonObject
    bindings: JsonObject
    dependencies: Dependencies = Dependencies()
    policy: TrialPolicy


class Chain(Contract):
    """Trials that work on one workspace, one after the other. `position`: of this one, from 0: the workspace of 0 is
    the task's own, and that of another is what its predecessor left."""

    chain_id: Name
    state_policy: StatePolicy
    position: Index


class EvidencePolicy(Contract):
    """What the snapshots of a workspace hold, and what is kept of it; what is beyond a bound is left out, and named.

    `ignore`: patterns (`fnmatch`) beside those of every experiment; one without a slash matches names at any depth, one
    with a slash whole paths.
    """

    ignore: list[Name] = Field(
        default_factory=list[Name], max_length=FILES_MAX, description="Patterns of files to leave out."
    )
    file_mb: int = Field(default=16, ge=1, le=4096, description="Size limit of one file.")
    workspace_mb: int = Field(default=256, ge=1, le=65536, description="Size limit of a snapshot's files.")
    max_files: int = Field(
        default=20_000, ge=1, le=1_000_000, description="Maximum number of files, links and directories."
    )
    kept_mb: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="Limit of changed contents kept per trial; a chain of trials keeps all.",
    )


class TrialInput(Contract):
    """trial_input_v1: what a worker is given of a trial, beside the job's configuration. `payload` of it is the
    `contract` of a `TrialSpec`."""

    bytes_max: ClassVar[int] = TASK_BYTES_MAX

    schema_version: Literal["trial_input_v1"] = "trial_input_v1"
    schedule_index: Index
    ids: Ids
    task: JsonObject
    bindings: JsonObject = Field(default_factory=JsonObject)
    dependencies: Dependencies = Dependencies()
    policy: TrialPolicy
    workspace: WorkspacePath = Field(default=WORKSPACE, description="In the sandbox.")
    chain: Chain | None = None
    evidence: EvidencePolicy = EvidencePolicy()

    def payload(self) -> JsonObject:
        """Return the payload without the id of the run, which is unknown when trials are planned."""
        value = self.to_json()
        del value["ids"]["run_id"]
        return value

    @classmethod
    def of_payload(cls, value: JsonObject, run_id: str) -> Self:
        """Decode the payload of a trial. Raises InputError."""
        ids: Any = value.get("ids")
        return cls.of({**value, "ids": {**ids, "run_id": run_id}} if isinstance(ids, dict) else value)

    def agent_task(self) -> AgentTask:
        return AgentTask(
            ids=self.ids,
            task=self.task,
            bindings=self.bindings,
            dependencies=self.dependencies,
            policy=self.policy,
        )


# ---- agent to runner


class Objective(Contract):
    name: Name
    value: Number
    direction: Direction | None = None


class ArtifactFile(Contract):
    path: FilePath
    logical_name: Name | None = None
    mime_type: Name | None = None


class Checkpoint(Contract):
    path: FilePath
    step: Index | None = None
    epoch: Number | None = None


class ErrorReport(Contract):
    error_type: Name | None = None
    message: str | None = None
    stack: str | None = None


Metrics = Annotated[dict[Name, Number], Field(max_length=METRICS_MAX)]


class AgentResult(Contract):
    """agent_result_v1: what an agent leaves. `ids`, where they are there, are those it was given."""

    bytes_max: ClassVar[int] = RESULT_BYTES_MAX

    schema_version: Literal["agent_result_v1"] = "agent_result_v1"
    ids: Ids
    outcome: AgentOutcome
    answer: Any = None
    metrics: Metrics = Field(default_factory=dict)
    objective: Objective | None = None
    artifacts: list[ArtifactFile] = Field(default_factory=list[ArtifactFile], max_length=FILES_MAX)
    checkpoints: list[Checkpoint] = Field(default_factory=list[Checkpoint], max_length=FILES_MAX)
    error: ErrorReport | None = None


class TrialOutcome(Contract):
    """outcome.json, which the worker makes of a trial whatever its agent left: the result, validated and normalised.

    `exit_status` None: the command did not end by itself. `grade_exit_status` None: there was no grader, or it did not
    end by itself. `grade`: what it left.
    """

    schema_version: Literal["trial_outcome_v1"] = "trial_outcome_v1"
    outcome: AgentOutcome
    exit_status: int | None = None
    grade_exit_status: int | None = None
    answer_sha256: Sha256 | None = None
    metrics: Metrics = Field(default_factory=dict)
    objective: Objective | None = None
    artifacts: list[ArtifactFile] = Field(default_factory=list[ArtifactFile], max_length=FILES_MAX)
    checkpoints: list[Checkpoint] = Field(default_factory=list[Checkpoint], max_length=FILES_MAX)
    error: ErrorReport | None = None


class HookEvent(Contract):
    """A line of `EVENTS_FILE`. What else the line holds becomes its payload."""

    event_type: Name
    payload: JsonObject = Field(default_factory=JsonObject)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        if isinstance(data, dict) and "payload" not in data:
            values = cast("JsonObject", data)
            rest = {key: value for key, value in values.items() if key != "event_type"}
            return {**{key: values[key] for key in values if key == "event_type"}, "payload": rest}
        return data  # pyright: ignore[reportUnknownVariableType]


# ---- evidence


class EvidenceRuntime(Contract):
    executor: Literal["local_docker", "local_process", "remote"]
    exit_status: int | None = None
    duration_ms: Index | None = None


class EvidenceRefs(Contract):
    """`incomplete`: why one of those that every trial has is not there, such as a sandbox that was lost."""

    trial_input_ref: Ref
    trial_output_ref: Ref | None = None
    workspace_pre_ref: Ref | None = None
    workspace_post_ref: Ref | None = None
    diff_incremental_ref: Ref | None = None
    diff_cumulative_ref: Ref | None = None
    patch_incremental_ref: Ref | None = None
    patch_cumulative_ref: Ref | None = None
    stdout_ref: Ref | None = None
    stderr_ref: Ref | None = None
    hook_events_ref: Ref | None = None
    grade_ref: Ref | None = None
    incomplete: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        missing = [name for name in _OF_EVERY_TRIAL if getattr(self, name) is None]
        if missing and not self.incomplete:
            raise ValueError(f"{missing[0]} is missing, and `incomplete` does not say why")
        return self


_OF_EVERY_TRIAL = (
    "trial_output_ref",
    "workspace_pre_ref",
    "workspace_post_ref",
    "diff_incremental_ref",
    "diff_cumulative_ref",
    "patch_incremental_ref",
    "patch_cumulative_ref",
)


class EvidencePaths(Contract):
    """Relative to the directory of the run."""

    trial_dir: str
    trial_input: str
    trial_output: str | None = None
    stdout: str | None = None
    stderr: str | None = None


class EvidenceRecord(Contract):
    """evidence_record_v1: a line of evidence_records.jsonl."""

    schema_version: Literal["evidence_record_v1"] = "evidence_record_v1"
    ids: Ids
    runtime: EvidenceRuntime
    evidence: EvidenceRefs
    paths: EvidencePaths


# ---- the run


class ActiveTrial(Contract):
    """`control`: what the worker said last of how far it is."""

    worker_id: str
    schedule_idx: Index
    variant_id: Id
    started_at: Time
    control: JsonObject | None = None


class Pause(Contract):
    label: str
    requested_at: Time
    requested_by: str | None = None


class RunControl(Contract):
    """run_control_v2: runtime/run_control.json."""

    schema_version: Literal["run_control_v2"] = "run_control_v2"
    run_id: Name
    status: Literal["running", "paused", "interrupted", "killed", "completed", "failed"]
    active_trials: dict[TrialId, ActiveTrial]
    pause: Pause | None
    updated_at: Time

    def to_json(self) -> JsonObject:
        values = self.model_dump(mode="json", exclude_none=True)
        return {name: values.get(name) for name in type(self).model_fields}


class Slot(Contract):
    """Of the schedule: places in the lists of variants and tasks, and the replication, all from 0."""

    variant_idx: Index
    task_idx: Index
    repl_idx: Index


class CompletedSlot(Contract):
    schedule_index: Index
    trial_id: TrialId
    status: SlotStatus


class ScheduleProgress(Contract):
    """schedule_progress_v1: runtime/schedule_progress.json."""

    schema_version: Literal["schedule_progress_v1"] = "schedule_progress_v1"
    run_id: Name
    total_slots: Index
    next_schedule_index: Index
    next_trial_index: Index
    schedule: list[Slot]
    completed_slots: list[CompletedSlot]
    pruned_variants: list[Index]
    consecutive_failures: dict[Annotated[str, Field(pattern=r"^\d+$")], Index]
    use_container: bool


class ManifestDesign(Contract):
    comparison: Comparison
    order: ScheduleOrder
    replications: int = Field(ge=1)
    seed: int
    max_concurrency: int = Field(ge=1)


class ManifestVariant(Contract):
    variant_id: Id
    baseline: bool
    image: str | None
    bindings: JsonObject
    model: str | None = None
    """As `engine.model.uri` has it."""
    model_id: str | None = None
    """Content id of that model; "": its files are not here."""


class PrimaryMetric(Contract):
    name: Name
    direction: Direction

    def is_score(self, *, graded: bool, objective: str | None) -> bool:
        """Return whether a trial's score is this metric: by its name, or, without a grader, as the agent's
        `objective`."""
        return self.name == SCORE or (not graded and objective == self.name)

    def is_lowest_score(self, *, graded: bool, objective: str | None) -> bool:
        """Return whether the lowest score is the best. The score has the metric's direction only if it is the metric:
        where fewer `steps` are better, a higher score still is."""
        return self.direction == "minimize" and self.is_score(graded=graded, objective=objective)


class Thresholds(Contract):
    """`passed`: a score from here on counts as passed; `pass` in the file."""

    pass_: Number = Field(alias="pass")
    non_inferiority_margin: Number | None = None


class ForkedFrom(Contract):
    """`slots`: how many of the other run's were taken over, from the first."""

    run_id: Name
    slots: Index


class RunManifest(Contract):
    """run_manifest_v1: facts/run_manifest.json."""

    schema_version: Literal["run_manifest_v1"] = "run_manifest_v1"
    run_id: Name
    experiment_id: Id
    name: str
    created_at: Time
    resolved_digest: Sha256
    rollout_version: str
    design: ManifestDesign
    baseline: Id
    variants: list[ManifestVariant] = Field(min_length=1)
    tasks: Index
    total_slots: Index
    state_policy: StatePolicy
    primary_metric: PrimaryMetric
    thresholds: Thresholds
    volatile_fields: list[Name]
    graded: bool = False
    """Whether trials have a grader, whose `score` is theirs."""
    forked_from: ForkedFrom | None = None

    def to_json(self) -> JsonObject:
        return self.model_dump(mode="json", by_alias=True)


SCHEMAS: dict[str, type[Contract]] = {
    "agent_task_v1": AgentTask,
    "agent_result_v1": AgentResult,
    "trial_input_v1": TrialInput,
    "trial_outcome_v1": TrialOutcome,
    "evidence_record_v1": EvidenceRecord,
    "run_control_v2": RunControl,
    "schedule_progress_v1": ScheduleProgress,
    "run_manifest_v1": RunManifest,
}


def json_schema(name: str) -> JsonObject:
    """Return the JSON Schema (draft 2020-12) of one of `SCHEMAS`. Raises KeyError if there is no such contract."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMAS[name].model_json_schema()}
