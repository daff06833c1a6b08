"""The workload `train`: a chain of segments, each from one snapshot to the next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from rollout.model.counts import counted, of_unit
from rollout.model.errors import ConfigError, InputError, OtherRunError
from rollout.model.item import NewItem
from rollout.model.problems import problems
from rollout.model.run import END_ON_FAILURE, RunSpec
from rollout.objects.tree import Tree as ObjectTree
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, lookup, parse_result, short
from rollout.workloads.local_model import (
    Bring,
    LocalModel,
    cached_directory,
    files_json,
    find_model,
    local_directory,
    model_changes,
    names_snapshot,
    refuse_unless_reward_model,
    refuse_unless_whole_model,
    taken_for_hub,
    tree_digest,
    with_tokenizer,
)
from rollout.workloads.port import Checked, FailedRun, Fetch, FoundSnapshot, InputReader, Tree, Workload, input_section
from rollout.workloads.train.base_config import ModelSection
from rollout.workloads.train.config import SftSection, TrainConfig, TrainingSection
from rollout.workloads.train.data import Data, read_both
from rollout.workloads.train.digest import TrainDigest
from rollout.workloads.train.health import Watch
from rollout.workloads.train.lines import (
    ERRORS,
    EVALUATIONS,
    METRICS,
    REPORT,
    SUMMARY,
    TrainWriter,
    how_to_go_on,
    outcome,
    refusal_of,
)
from rollout.workloads.train.memory import read_shapes, unadapted
from rollout.workloads.train.model_output import CURVES, Maker, draw_curves, leave_model
from rollout.workloads.train.places import MODEL, misplaced, read_of
from rollout.workloads.train.plan import items, segments_of, steps_at_most
from rollout.workloads.train.policy_check import (
    Rewards,
    check_reward_tokens,
    find_rewards,
    policy_changes,
    policy_counts,
    policy_lines,
    policy_notes,
    policy_tables,
    tokens_of,
)
from rollout.workloads.train.policy_config import GenerationSection, PolicySection
from rollout.workloads.train.policy_tasks import Tasks, find_tasks
from rollout.workloads.train.preview import Preview, preview, size
from rollout.workloads.train.report import report_lines
from rollout.workloads.train.retention import retention
from rollout.workloads.train.rollouts import ROLLOUT
from rollout.workloads.train.samples import ONLINE, SAMPLES
from rollout.workloads.train.segment import Result, Segment, done
from rollout.workloads.train.start import begin_with, start_table
from rollout.workloads.train.templates import read_template
from rollout.workloads.train.vocabulary import vocabulary_fault


@dataclass(kw_only=True)
class TrainChecked(Checked):
    """`preview` is that of a dry run. `tokens` is the directory of the tokenizer, if it is on this host."""

    steps: int
    rows: int
    model: LocalModel
    preview: Preview | None = None
    tokens: Path | None = None


@dataclass(frozen=True, slots=True)
class _Models:
    """The models of `base_model` and `reference`. `template` is the text of a file, or the name of one of ours."""

    model: LocalModel
    tokenizer: Path | None = None
    tokenizer_tree: str = ""
    reference: LocalModel | None = None
    template: str | None = None

    def places(self) -> Iterator[tuple[str, Path]]:
        """Yield (what it is, path) for those that are local directories."""
        reference = self.reference.path if self.reference is not None else None
        named = (("base model", self.model.path), ("tokenizer", self.tokenizer), ("reference", reference))
        return ((f"the {name}", path) for name, path in named if path is not None)

    def config(self, section: ModelSection) -> JsonObject:
        """Return `model` of a run's configuration, with the tokenizer, as workers look for it."""
        files = files_json(self.model)
        return with_tokenizer(files, section.tokenizer, section.revision, self.tokenizer, self.tokenizer_tree)


@dataclass(slots=True)
class _Faults:
    """Collects faults, to report them all at once."""

    messages: list[str] = field(default_factory=list[str])

    def add(self, key: str, text: str) -> None:
        self.messages.append(f"{key}: {text}")


class Train(Workload[TrainConfig, TrainChecked]):
    name = "train"
    settings = TrainConfig
    sections = frozenset(TrainConfig.model_fields)
    unit = "segments"
    measure = "tokens"
    result_files = (METRICS, SUMMARY, SAMPLES, REPORT, EVALUATIONS, ERRORS, CURVES)

    def __init__(self) -> None:
        self._watch = Watch({})
        self._here = False  # workers are started on this machine

    def works_here(self) -> None:
        self._here = True

    def check_host(self, settings: TrainConfig) -> None:
        wanted = ["torch", "transformers", "accelerate"]
        if settings.generation is not None and settings.generation.backend == "vllm":
            wanted.append("vllm")
        missing = [name for name in wanted if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"training needs the Python packages {', '.join(missing)} on this host: pip install "
                '"rollout-engine[train]", or send the run to a cluster that has them: --coordinator HOST:PORT'
            )

    def host_notes(self, settings: TrainConfig) -> list[str]:
        if settings.algorithm.settings.device != "cuda" or any(True for g in _GPUS for _ in Path("/dev").glob(g)):
            return []
        key = f"algorithm.{settings.algorithm.kind}.device"
        return [
            f'warning: {key} = "cuda", and this host shows no GPU: remove it, or send the run to a cluster that has '
            "one: --coordinator HOST:PORT"
        ]

    def check(self, settings: TrainConfig, reading: InputReader) -> TrainChecked:
        if reading.without_results:
            raise OtherRunError("nothing was trained in it")
        kind, section = settings.algorithm.kind, settings.algorithm.settings
        where, faults = f"algorithm.{kind}", _Faults()
        models = _find_models(section, where, faults, reading.directory)
        found: tuple[Data, Data | None] | None = None
        tasks: Tasks | None = None
        try:
            if isinstance(section, PolicySection):
                tasks = find_tasks(section, where, reading.tell, here=self._here)
            found = read_both(kind, section, reading, where)
        except (ConfigError, InputError) as error:
            faults.messages.append(error.message)
        steps = 0
        if found is not None:
            steps = steps_at_most(settings, found[0].rows)
            _check_steps(section, found[0].rows, steps, where, faults)
        inputs = [*(models.places() if models is not None else ()), *_read(found)]
        rewards = self._rewards(settings, reading, found, [path for _, path in inputs], faults)
        if models is not None:
            base = models.tokenizer or models.model.path
            for place, one in rewards.models.items():
                faults.messages += check_reward_tokens(base, one.path, f"{where}.reward.{place}")
            inputs += ((f"reward model {one.uri}", one.path) for one in rewards.models.values() if one.path is not None)
            faults.messages += misplaced(self.directory(settings), settings.output.model, inputs)
        if faults.messages or models is None or found is None:
            if found is not None:
                found[0].close()
            raise InputError(problems(faults.messages))
        data, evaluation = found
        dumped = section.model_dump(mode="json")
        dumped["base_model"]["chat_template"] = models.template
        model, tables = models.config(section.base_model), JsonObject()
        if isinstance(section, PolicySection):
            generation = settings.generation or GenerationSection()
            dumped["importance_sampling_correction"] = generation.correction(section)
            tables = policy_tables(section, generation, model, models.template, rewards, tasks)
        overlap = len(data.contents) if evaluation else 0
        config: JsonObject = {
            "schema": 1,
            "algorithm": {"kind": kind, "settings": dumped},
            "model": model,
            "reference_model": files_json(models.reference) if models.reference is not None else None,
            "dataset": data.config(),
            "eval_dataset": evaluation.config() if evaluation else None,
            "evaluation": {"digest": evaluation.report.digest, "overlap": overlap} if evaluation else {},
            "steps": steps,
            "start": start_table(settings),
            "snapshots": settings.snapshots.model_dump(mode="json"),
            "input": input_section(section.dataset.patterns, data.report),
            "output": settings.output.model_dump(mode="json"),
            "workers": settings.workers.model_dump(mode="json"),
            "run": settings.run.model_dump(mode="json"),
            **tables,
        }
        uris = {"model": section.base_model.uri, "reference_model": models.reference.uri if models.reference else ""}
        uris |= {f"reward_models.{place}": one.uri for place, one in rewards.models.items()}
        checked = TrainChecked(
            config=config,
            total=sum(1 for _ in segments_of(config)),
            source=data.source,
            trees=(
                *_trees(models, data, evaluation, draws=bool(tables)),
                *rewards.trees,
                *(tasks.trees if tasks else ()),
            ),
            keep={_CODE: rewards.code.tree.to_bytes().decode()} if rewards.code else {},
            notes=(
                *settings.notes,
                *_taken_for_hub(models, where),
                *_overlap(overlap, evaluation),
                *rewards.notes,
                *(tasks.notes if tasks else ()),
                *policy_notes(section),
            ),
            snapshots=(*(k for k, uri in uris.items() if names_snapshot(uri)), *(("start",) if settings.start else ())),
            steps=steps,
            rows=data.rows,
            model=models.model,
            tokens=models.tokenizer or models.model.path,
            may_be_fewer=may_be_fewer(config),
        )
        if reading.index is None:  # nothing will be submitted
            datasets = {"dataset": data} | ({"eval_dataset": evaluation} if evaluation else {})
            try:
                checked.preview = preview(
                    kind, section, models.template, models.model, models.tokenizer, datasets, reading,
                    settings.generation or GenerationSection(),
                )  # fmt: skip
            except InputError:
                checked.close()
                raise
            if counted := checked.preview.data.get("dataset"):
                # Rows are dropped and packed: steps are of the sequences that are left.
                checked.steps = config["steps"] = steps_at_most(settings, counted["sequences"])
                self.finalize(checked)
        return checked

    def _rewards(
        self, settings: TrainConfig, reading: InputReader, found: tuple[Data, Data | None] | None,
        inputs: Sequence[Path], faults: _Faults,
    ) -> Rewards:  # fmt: skip
        """Return the rewards of an algorithm that generates samples; others have none."""
        section = settings.algorithm.settings
        if not isinstance(section, PolicySection):
            return Rewards(None, {})
        where = f"algorithm.{settings.algorithm.kind}"
        data, evaluation = found or (None, None)
        columns = {"dataset": data.columns} if data is not None else {}
        columns |= {"eval_dataset": evaluation.columns} if evaluation is not None else {}
        kept = reading.kept.get(_CODE)
        began = ObjectTree.from_bytes(kept.encode()) if kept else None
        try:
            return find_rewards(section, where, columns, [*inputs, self.directory(settings)], began, reading.directory)
        except ConfigError as error:
            faults.messages.append(error.message)
            return Rewards(None, {})

    def plan(self, checked: TrainChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        return items(config, start)

    def found(self, checked: TrainChecked, key: str, snapshot: FoundSnapshot) -> None:
        if key == "start":
            begin_with(checked.config, snapshot)
        elif key.startswith(_REWARD_MODELS):
            what = _key_of(checked, key)
            refuse_unless_reward_model(snapshot.config, what)
            if wrong := list(check_reward_tokens(checked.tokens, tokens_of(snapshot.config["model"]), what)):
                raise ConfigError(problems(wrong))
        else:
            refuse_unless_whole_model(snapshot.config, _key_of(checked, key))
        super().found(checked, key, snapshot)
        if key == "model":
            checked.tokens = checked.tokens or tokens_of(snapshot.config["model"])
            if drawn := lookup(checked.config, f"executors.{ROLLOUT}.model"):
                drawn.update(snapshot=snapshot.id, content_id=snapshot.id)

    def snapshot_of(self, entry: CommitEntry) -> JsonObject | None:
        result = done(entry, "segment")
        return None if result is None else asdict(result)

    def another_run(self, run: str, changes: Sequence[str]) -> str:
        """More steps, another rate and the like: a fork goes on under other settings."""
        if not all(change.startswith(("algorithm.", "steps:")) for change in changes):
            return super().another_run(run, changes)
        return (
            f"{super().another_run(run, changes)}. That one may go on with what this run has learnt, for more steps "
            f"too: `rollout train fork {run} --step N --config FILE`, or --resume snapshot:ID; `rollout snapshot list "
            f"--run {run}` has both"
        )

    def finalize(self, checked: TrainChecked) -> None:
        checked.total = sum(1 for _ in segments_of(checked.config))

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        """Return the spec of a run that ends with its first failed segment, because nothing can follow it."""
        samples = config["algorithm"]["kind"] in ONLINE
        policies = (END_ON_FAILURE, *retention(config["snapshots"], samples=samples))
        return replace(super().spec(run_id, config), policies=policies)

    def writer(self, config: JsonObject) -> TrainWriter:
        return TrainWriter(config)

    async def finished(
        self, fetch: Fetch, config: JsonObject, directory: Path, summary: JsonObject, tell: Callable[[str], None]
    ) -> list[str]:
        made = await asyncio.to_thread(draw_curves, directory)  # of a run that failed, they show where it went wrong
        if summary["state"] == "completed" and config["output"]["model"] and summary["final_snapshot"]:
            maker = Maker(summary["run_id"], summary["final_snapshot"])
            made += await leave_model(fetch, maker, config, directory / MODEL, tell)
        return made

    def outcome(self, summary: JsonObject) -> str:
        return outcome(summary)

    def failed(self, summary: JsonObject) -> FailedRun:
        """Return what to do about a failed run. Without a snapshot the fault may be in its configuration or data, and
        nothing is lost by a new run."""
        found = FailedRun(refusal=refusal_of(summary), without_results=not summary.get("final_snapshot"))
        final = found.without_results or summary[self.unit]["failed"]
        return replace(found, recovery_hint=how_to_go_on(summary)) if final else found

    def remarks(self, entry: CommitEntry) -> Iterable[tuple[str, str, JsonObject]]:
        """Yield the report of the data before the first step, and warnings that a policy learns nothing as they
        appear."""
        prepared = done(entry, "prepare")
        if (result := done(entry, "segment")) is not None:
            for one in self._watch.add(result.metrics):
                fields: JsonObject = {"after_step": result.step, "code": one.code, "text": one.text}
                yield "warning", f"warning: after step {result.step}: {one.text}", fields
        if prepared is not None:
            report = prepared.report
            lines = [line for name, one in report.items() for line in report_lines(name, one)]
            self._watch = Watch({})
            yield "data_report", "\n".join(lines), report

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        if section in ("model", "reference_model"):
            return model_changes(old, new, section)
        if section in ("executors", "reward_models"):
            return policy_changes(section, old, new)
        if section == "algorithm":
            return _settings_changed(old, new)
        if section in ("dataset", "eval_dataset"):
            return []  # `input` and `evaluation` say what changed
        if section == "evaluation":
            return ["eval_dataset: its rows are others"] if old.get("digest") != new.get("digest") else []
        if section == "start" and (old["uri"], old["step"]) != (new["uri"], new["step"]):
            began, now = (f"{one['uri']}, step {one['step'] or 'of the last snapshot'}" for one in (old, new))
            return [f"start: it began with {began}, and not with {now}"]
        return None

    def describe(self, settings: TrainConfig, checked: TrainChecked) -> list[str]:
        section = settings.algorithm.settings
        every = settings.snapshots.every_steps
        shown = checked.preview
        about = f" of about {size(shown.memory.host)}" if shown and shown.memory else ""
        share = f"{section.minibatch_size} x {section.gradient_accumulation} x {section.devices} devices"
        if isinstance(section, PolicySection):
            share = f"{section.num_generations} samples of each"
        packed = isinstance(section, SftSection) and section.packed
        what = "sequences" if packed else "prompts" if isinstance(section, PolicySection) else "rows"
        exact = section.budget.max_steps is not None or (shown and shown.data)
        most = "" if exact else "at most "  # rows may be packed, and some left out
        lines = [
            f"{settings.algorithm.kind} of {section.base_model.uri}",
            f"{counted(checked.rows, 'row')}; {most}{counted(checked.steps, 'step')} of "
            f"{of_unit(section.step_rows, what)} ({share})",
            f"{most}{counted(checked.total, 'segment')}: the first turns the rows into tokens, each other takes up to "
            f"{every:,} steps and ends with a snapshot{about}; the last {settings.snapshots.keep_last} stay",
            *(policy_lines(section, settings.generation) if isinstance(section, PolicySection) else ()),
        ]
        if shown:
            lines += shown.lines()
        lines += [
            f"writes {METRICS}, {_samples(section)}{REPORT} and {SUMMARY} to {settings.output.dir}",
            self.describe_workers(settings),
            "the configuration as it is used:",
            *(f"  {line}" for line in _flat(_used(settings))),
        ]
        return lines

    def dry_run(self, settings: TrainConfig, checked: TrainChecked) -> JsonObject:
        section = settings.algorithm.settings
        return {
            "algorithm": settings.algorithm.kind,
            "model": section.base_model.uri,
            "minibatch": section.minibatch_size,
            "dataset": ",".join(section.dataset.patterns),
            "rows": checked.rows,
            "steps": checked.steps,
            "step_rows": section.step_rows,
            "segments": checked.total,
            **(policy_counts(section) if isinstance(section, PolicySection) else {}),
            **(checked.preview.to_json() if checked.preview else {}),
            "config": _used(settings),
        }

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        Segment.decode(payload)
        return json.loads(payload), ""

    def digest(self, config: JsonObject) -> TrainDigest:
        return TrainDigest()

    def item_output(self, data: bytes) -> Any:
        found: Any = parse_result(data, finite=False)
        if not isinstance(found, list):  # of `verify` it is one
            Result.decode(data)
        return cast(Any, found)


def may_be_fewer(config: JsonObject) -> bool:
    """Return whether there may be fewer rows: the first item counts those that are packed or dropped."""
    packs = lookup(config, "algorithm.settings.packing.kind") not in (None, "off")
    drops = "drop" in lookup(config, "algorithm.settings.rows").values()
    return lookup(config, "algorithm.settings.budget.max_steps") is None and (packs or drops)


def _samples(section: TrainingSection) -> str:
    return f"{SAMPLES}, " if isinstance(section, PolicySection) else ""


def _key_of(checked: TrainChecked, table: str) -> str:
    """Return the user's name for the table."""
    names = {"model": "base_model.uri", "reference_model": "reference"}
    name = names.get(table) or f"reward.{table.removeprefix(_REWARD_MODELS)}.model"
    return f"algorithm.{checked.config['algorithm']['kind']}.{name}"


_CODE = "code_tree"
"""Key under which a run keeps the manifest of its rewards' code."""
_REWARD_MODELS = "reward_models."


def _find_models(section: TrainingSection, where: str, faults: _Faults, bring: Bring) -> _Models | None:
    base = section.base_model
    found: dict[str, LocalModel | None] = {"model": None, "reference": None}
    wanted = [("model", base.uri, f"{where}.base_model.uri", base.revision)]
    if section.compared not in ("base", "free"):
        wanted.append(("reference", section.compared, f"{where}.reference", None))
    for name, uri, key, revision in wanted:
        try:
            found[name] = find_model(uri, key, revision, bring)
        except ConfigError as error:
            faults.messages.append(error.message)
    tokenizer: Path | None = None
    template: str | None = None
    try:
        if base.tokenizer is not None:
            what = f"{where}.base_model.tokenizer"
            tokenizer = bring(base.tokenizer, what) or local_directory(base.tokenizer, what)
    except ConfigError as error:
        faults.messages.append(error.message)
    try:
        if base.chat_template is not None:
            template = read_template(base.chat_template, f"{where}.base_model.chat_template")
    except ConfigError as error:
        faults.messages.append(error.message)
    model = found["model"]
    if model is None:
        return None
    _check_tokenizer(model, tokenizer, base, where, faults)
    _check_adapter(model, section, where, faults)
    tree = tree_digest(tokenizer)[0].hex() if tokenizer is not None else ""
    if base.tokenizer is not None:
        other = tree or f"hub:{base.tokenizer}"
        model = replace(model, content_id=blake3(f"{model.content_id} {other}".encode()).hexdigest())
    return _Models(model, tokenizer, tree, found["reference"], template)


_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files that show that a host has a GPU: of NVIDIA, AMD, Windows."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def _check_tokenizer(
    model: LocalModel, tokenizer: Path | None, base: ModelSection, where: str, faults: _Faults
) -> None:
    key = "uri" if base.tokenizer is None else "tokenizer"
    place = f"{where}.base_model.{key}"
    directory = tokenizer if base.tokenizer is not None else model.path
    if directory is None:
        return
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        missing = f"{directory} has no tokenizer (such as {_TOKENIZER_FILES[0]})"
        faults.add(place, f"{missing}: set base_model.tokenizer" if key == "uri" else missing)
    elif model.path is not None and (fault := vocabulary_fault(model.path, directory)):
        faults.add(place, fault)


def _check_adapter(model: LocalModel, section: TrainingSection, where: str, faults: _Faults) -> None:
    directory = model.path or cached_directory(model)
    if section.lora is None or directory is None:
        return
    try:
        config: JsonObject = json.loads((directory / "config.json").read_bytes())
        fault = unadapted(section.lora, read_shapes(directory), config)
    except InputError as error:
        faults.messages.append(error.message)
        return
    if fault:
        faults.add(f"{where}.lora.target_modules", fault)


def _check_steps(section: TrainingSection, rows: int, steps: int, where: str, faults: _Faults) -> None:
    if isinstance(section, PolicySection) and section.prompts_per_step > rows:
        faults.add(
            f"{where}.prompts_per_step",
            f"a step takes {counted(section.prompts_per_step, 'prompt')}, and the data has {rows:,}: lower it",
        )
    elif section.step_rows > rows:
        faults.add(
            f"{where}.minibatch_size",
            f"a step takes {counted(section.step_rows, 'row')} ({section.minibatch_size} x "
            f"{section.gradient_accumulation} of gradient_accumulation x {section.devices} devices), and the data has "
            f"{rows:,}: lower one of them",
        )
    if not steps:
        faults.add(
            f"{where}.budget.epochs",
            f"{section.budget.epochs} of {counted(rows, 'row')} is not one row: raise it, or set max_steps",
        )
    elif section.optimizer.warmup_steps > steps:
        faults.add(
            f"{where}.optimizer.warmup_steps",
            f"is {section.optimizer.warmup_steps}, more than all {steps:,} steps of the run: the rate would never "
            "reach lr",
        )


def _read(found: tuple[Data, Data | None] | None) -> Iterator[tuple[str, Path]]:
    data, evaluation = found or (None, None)
    if data is not None:
        yield from read_of("the dataset", data)
    if evaluation is not None:
        yield from read_of("the evaluation set", evaluation)


def _taken_for_hub(models: _Models, where: str) -> Iterator[str]:
    for key, model in (("base_model.uri", models.model), ("reference", models.reference)):
        if model is not None and (text := taken_for_hub(model)):
            yield f"{where}.{key}: {text}"


def _overlap(count: int, evaluation: Data | None) -> tuple[str, ...]:
    if not count or evaluation is None:
        return ()
    rows = f"{count:,} of the {counted(evaluation.report.rows, 'row')} of eval_dataset are in dataset too"
    return (f"warning: {rows}: evaluations will look better than they are",)


def _trees(models: _Models, data: Data, evaluation: Data | None, *, draws: bool) -> Iterator[Tree]:
    """Yield the trees. `draws` means that another executor needs the model too."""
    tables = ("model", f"executors.{ROLLOUT}.model") if draws else ("model",)
    yield Tree("dataset.manifest", Path(data.tables[0][1]), always=True, files=data.files)
    if evaluation:
        yield Tree("eval_dataset.manifest", Path(evaluation.tables[0][1]), always=True, files=evaluation.files)
    for table in tables:
        if models.model.path is not None:
            yield Tree(f"{table}.manifest", models.model.path)
        if models.tokenizer is not None:
            yield Tree(f"{table}.tokenizer_manifest", models.tokenizer)
    if models.reference is not None and models.reference.path is not None:
        yield Tree("reference_model.manifest", models.reference.path)


def _used(settings: TrainConfig) -> JsonObject:
    """Return the configuration with defaults, without missing sections."""
    used: JsonObject = settings.model_dump(mode="json", exclude_none=True)
    section = settings.algorithm.settings
    if isinstance(section, PolicySection):
        generation = settings.generation or GenerationSection()
        used["generation"] = generation.resolved(section).model_dump(mode="json", exclude_none=True)
        used["algorithm"][settings.algorithm.kind]["importance_sampling_correction"] = generation.correction(section)
    return used


def _flat(value: JsonObject) -> Iterator[str]:
    return (f"{key} = {json.dumps(inner)}" for key, inner in _leaves("", value))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for everything that is not a table, in order."""
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, inner in cast(JsonObject, value).items():
        yield from _leaves(f"{prefix}.{key}" if prefix else key, inner)


_SOURCES = ("dataset.", "eval_dataset.")
"""Keys that may differ if the rows are the same."""


def _settings_changed(old: JsonObject, new: JsonObject) -> list[str]:
    if old["kind"] != new["kind"]:
        return [f"algorithm.kind: {short(old['kind'])} -> {short(new['kind'])}"]
    before, after = (dict(_leaves("", one["settings"])) for one in (old, new))
    return [
        f"algorithm.{new['kind']}.{key}: {short(before.get(key))} -> {short(after.get(key))}"
        for key in dict.fromkeys([*after, *before])
        if before.get(key) != after.get(key) and not key.startswith(_SOURCES)
    ]
