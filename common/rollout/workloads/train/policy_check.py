"""Checks of reinforcement learning besides rows and models: the code of rewards, their models, and the tables of the
run's configuration that executors see."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.model.counts import counted, of_unit
from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import problems
from rollout.objects.tree import Tree as ObjectTree
from rollout.workloads.code import Code, holds, listed, read_code, shadowed
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.local_model import Bring, LocalModel, files_json, find_model, model_changes
from rollout.workloads.port import Tree
from rollout.workloads.train.base_config import TrainingSection
from rollout.workloads.train.memory import read_shapes
from rollout.workloads.train.policy_config import GenerationSection, GrpoSection, PolicySection
from rollout.workloads.train.policy_tasks import JOB, Tasks
from rollout.workloads.train.rollouts import ROLLOUT, SCORE
from rollout.workloads.train.rows import GIVEN
from rollout.workloads.train.vocabulary import same_tokens

MAP = "map"
"""The executor of code rewards."""
_OF_TRL = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments that TRL passes to rewards besides the columns, and that are not available here."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a run. `models` are by position in `reward`."""

    code: Code | None
    models: dict[int, LocalModel]

    @property
    def notes(self) -> Iterator[str]:
        if self.code is not None and self.code.new:
            yield f"new in the code directory, no part of this run: {listed(self.code.new, 3)}"
        if self.code is not None and (names := shadowed(self.code)):
            yield f"not imported, since Python's own library has modules of these names: {listed(names, 3)}"

    @property
    def trees(self) -> Iterator[Tree]:
        if self.code is not None:
            yield Tree(f"executors.{MAP}.code.manifest", self.code.directory, always=True, files=self.code.files)
        for place, model in self.models.items():
            if model.path is not None:
                yield Tree(f"reward_models.{place}.manifest", model.path)


def find_rewards(
    section: PolicySection,
    where: str,
    columns: Mapping[str, Collection[str]],
    leave_out: Collection[Path],
    began: ObjectTree | None,
    bring: Bring,
) -> Rewards:
    """Find the rewards. `columns` are those of each dataset's rows, where known. `leave_out` and `began` are those of
    `read_code`. Raises ConfigError with all faults."""
    faults: list[str] = []
    directory = Path(section.reward_code).expanduser() if section.reward_code else None
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{where}.reward_code: there is no directory {section.reward_code}")
    travels = False
    models: dict[int, LocalModel] = {}
    for place, reward in enumerate(section.reward):
        key = f"{where}.reward.{place}"
        try:
            if reward.function is not None:

                def check(file: Path, name: str, made: ast.stmt) -> None:
                    check_reward(file, name, made, columns)

                travels = holds(reward.function, directory, check, "reward_code") or travels
            elif reward.model is not None:
                models[place] = found = find_model(reward.model, key, None, bring)
                if found.path is not None and (shapes := read_shapes(found.path)) and "score.weight" not in shapes:
                    faults.append(
                        f"{key}: {reward.model} has no score.weight, and so is no reward model: name one that "
                        "`rollout train rm` or a trainer of sequence classification with one label has made"
                    )
        except InputError as error:
            faults.append(f"{key}: {error.message}")
        except ConfigError as error:
            faults.append(error.message if reward.function is None else f"{key}: {error.message}")
    if section.episode is not None:

        def check_class(file: Path, name: str, made: ast.stmt) -> None:
            check_environment(file, name, made, columns)

        try:
            travels = holds(section.episode.target, directory, check_class, "reward_code") or travels
        except ConfigError as error:
            faults.append(f"{where}.environment.class: {error.message}")
    code: Code | None = None
    if travels and not faults:
        try:
            root = directory or Path.cwd()
            code = read_code(root, [*leave_out, *_no_code(root)], began)
        except ConfigError as error:
            faults.append(f"{where}.reward_code: {error.message}" if section.reward_code else error.message)
    if faults:
        raise ConfigError(problems(faults))
    return Rewards(code, models)


def _no_code(root: Path) -> Iterator[Path]:
    """Yield paths that are not code: configurations, which may change while a run stays the same, and models."""
    yield from root.glob("*.toml")
    for pattern in ("*/*.safetensors", "*/*/*.safetensors"):
        yield from {path.parent for path in root.glob(pattern)}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_reward(file: Path, name: str, made: ast.stmt, columns: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if the text of `made` shows that it cannot be called as TRL calls rewards."""
    called, skipped = made, 0
    if isinstance(made, ast.ClassDef):
        methods = _methods(made)
        if "__call__" not in methods:
            if _is_plain(made):
                raise ConfigError(f"{file}:{made.lineno}: class {name} has no __call__, which is called for each group")
            return
        called, skipped = methods["__call__"], 1
    if isinstance(called, Function):
        _check_arguments(f"{file}:{called.lineno}", name, called, skipped, GIVEN, columns)
        if strange := sorted(_required(called, skipped) & _OF_TRL):
            place = f"{file}:{called.lineno}"
            raise ConfigError(
                f"{place}: {name} needs {listed(strange, 3)} of TRL's trainer, which is not there: remove it"
            )


def check_environment(file: Path, name: str, made: ast.stmt, columns: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if the text of `made` shows that it does not make an environment
    (rollout_worker.environments)."""
    place = f"{file}:{made.lineno}"
    if isinstance(made, Function):
        if not made.decorator_list and (needed := sorted(_required(made, 0))):
            raise ConfigError(f"{place}: {name} is called without arguments, and needs {listed(needed, 3)}")
        return
    if not isinstance(made, ast.ClassDef):
        return
    methods = _methods(made)
    lacking = [one for one in ("reset", "step") if one not in methods]
    if lacking and _is_plain(made):
        raise ConfigError(f"{place}: class {name} has no method {' and no method '.join(lacking)}")
    if needed := sorted(_required(methods["__init__"], 1)) if "__init__" in methods else []:
        raise ConfigError(f"{place}: {name} is made without arguments, and its __init__ needs {listed(needed, 3)}")
    if "reset" in methods:
        reset = methods["reset"]
        _check_arguments(f"{file}:{reset.lineno}", f"{name}.reset", reset, 1, ("prompt",), columns)
    if "step" in methods and not methods["step"].decorator_list:
        arguments = methods["step"].args
        positional = len(arguments.posonlyargs) + len(arguments.args)
        needs = len(_required(methods["step"], 1))
        if needs > 1 or (positional < 2 and arguments.vararg is None):
            raise ConfigError(
                f"{file}:{methods['step'].lineno}: {name}.step must take one argument, the text of the completion"
            )


def _methods(made: ast.ClassDef) -> dict[str, Function]:
    return {one.name: one for one in made.body if isinstance(one, Function)}


def _is_plain(made: ast.ClassDef) -> bool:
    """Return whether the class inherits no methods."""
    return not made.bases and not made.keywords and not made.decorator_list


def _required(called: Function, skipped: int) -> set[str]:
    """Return arguments without a default. `skipped` is 1 for a method, because of `self`."""
    arguments = called.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = {one.arg for one in positional[skipped : len(positional) - len(arguments.defaults)]}
    return required | {
        one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    }


def _check_arguments(
    place: str, name: str, called: Function, skipped: int, given: tuple[str, ...],
    columns: Mapping[str, Collection[str]],
) -> None:  # fmt: skip
    """Raise ConfigError if it cannot be called by name with those of `given` and the columns."""
    if called.decorator_list:
        return
    arguments = called.args
    if only := [one.arg for one in arguments.posonlyargs[skipped:]]:
        raise ConfigError(f"{place}: {name} takes {listed(only, 3)} by position, and is called by name")
    if arguments.kwarg is None:
        named = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        every = sorted(set[str]().union(*columns.values()))
        missing = [one for one in (*given, *every) if one not in named]
        if missing:
            raise ConfigError(f"{place}: {name} is also given {listed(missing, 3)}: add **columns to what it takes")
    for dataset, known in columns.items():
        if unknown := sorted(_required(called, skipped).difference(given, known, _OF_TRL)):
            has = f"columns are {listed(sorted(known), 5)}" if known else 'they have "prompt" alone'
            raise ConfigError(f"{place}: {name} needs {listed(unknown, 3)}, which no row of {dataset} has: {has}")


def check_reward_tokens(base: Path | None, reward: Path | None, key: str) -> Iterator[str]:
    """Yield faults of a reward model whose tokens differ from the policy's, as far as local files show."""
    if base is not None and reward is not None and not same_tokens(base, reward):
        yield (
            f"{key}: {reward} has another tokenizer than {base}, whose tokens it would not understand: name a reward "
            "model that was trained from the same base"
        )


def policy_tables(
    section: PolicySection, generation: GenerationSection | None, model: JsonObject, template: str | None,
    rewards: Rewards, tasks: Tasks | None,
) -> JsonObject:  # fmt: skip
    """Return the tables. `model` is that of the run's configuration, `template` that of `read_template`."""
    used = (generation or GenerationSection()).resolved(section)
    code: JsonObject = {} if rewards.code is None else {"manifest": rewards.code.manifest}
    drawn = {"model": {**model}, "backend": used.backend_table(section), "groups_at_once": used.groups_at_once}
    tables: JsonObject = {ROLLOUT: {**drawn, "placement": used.placement}}
    if section.environment is not None:
        tables[ROLLOUT]["chat_template"] = template
    if section.runs_code:
        tables[MAP] = {"function": SCORE, "code": code}
    if tasks is not None:
        tables[JOB] = tasks.table
    return {
        "generation": used.model_dump(mode="json"),
        "reward_models": {str(place): files_json(one) for place, one in rewards.models.items()},
        "executors": tables,
    }


def identity_of(config: JsonObject) -> list[JsonObject | str]:
    """Return what else the results of such a run depend on; empty for other runs."""
    if "generation" not in config:
        return []
    drawn = {key: config["generation"][key] for key in ("backend", "dtype", "engine")}
    models = {place: one["content_id"] for place, one in config["reward_models"].items()}
    return [drawn, models, config["executors"].get(MAP, {}), config["executors"].get(JOB, {})]


# ---- for people


def policy_counts(section: PolicySection) -> JsonObject:
    """Return the maximum counts of a step."""
    turns = 0
    if section.environment is not None:
        turns = section.environment.max_turns + 1
    if section.tasks is not None:
        turns *= section.num_generations  # each sample has a trial and turns of its own
    return {
        "items_per_step": section.prompts_per_step * (1 + bool(section.functions) + turns),
        "samples_per_step": section.samples,
        "tokens_per_step": section.samples * section.max_completion_length,
        "updates_per_step": section.updates,
    }


def policy_lines(section: PolicySection, generation: GenerationSection | None) -> Iterator[str]:
    counts, used = policy_counts(section), (generation or GenerationSection()).resolved(section)
    scored = ", each with one that scores it" if section.functions else ""
    environment = section.environment
    if section.tasks is not None:
        scored += f", each sample with a trial and {of_unit(section.tasks.max_turns, 'turns')} of it, at most"
    elif environment is not None:
        scored += f", and one for each of {of_unit(environment.max_turns, 'turns')} of {environment.class_}, at most"
    yield (
        f"a step: {counted(section.prompts_per_step, 'item')} of {of_unit(section.num_generations, 'samples')}{scored};"
        f" at most {counts['tokens_per_step']:,} tokens drawn; {counted(section.updates, 'update')} of "
        f"{of_unit(section.samples // section.num_minibatches, 'samples')}"
    )
    where = (
        "by turns with training"
        if used.placement == "colocated"
        else "on workers with " + ", ".join(f"{name}={value}" for name, value in sorted(used.require_labels.items()))
    )
    yield f"samples are drawn by {used.backend} in {used.dtype}, {where}; rewards: " + ", ".join(
        f"{name} x {weight:g}" for name, weight in section.weights.items()
    )


def policy_notes(section: TrainingSection) -> Iterator[str]:
    """Yield notes about settings that work badly together."""
    if not isinstance(section, GrpoSection) or section.importance_sampling_level != "sequence":
        return
    if section.loss_type != "grpo":
        yield (
            f'warning: importance_sampling_level = "sequence" with loss_type = "{section.loss_type}" weighs samples by '
            'their lengths: GSPO has loss_type = "grpo"'
        )


def policy_changes(section: str, old: JsonObject, new: JsonObject) -> list[str]:
    """Return changes of `executors` and `reward_models`, without those that are reported elsewhere."""
    if section == "reward_models":
        places = sorted({*old, *new})
        return [
            change
            for place in places
            if place in old and place in new
            for change in model_changes(old[place], new[place], f"reward.{place}.model")
        ]
    changes: list[str] = []
    if lookup(old, JOB) != lookup(new, JOB):
        changes.append("environment.path: its tasks, or what works at them, were changed since")
    if lookup(old, f"{MAP}.code") != lookup(new, f"{MAP}.code"):
        changes += [
            "reward_code: a file of the rewards' code was changed, added or removed since; what they do not need can "
            "be listed in .rolloutignore (or else .gitignore) there"
        ]
    return changes


def tokens_of(model: JsonObject) -> Path | None:
    """Return the path on this host of the tokenizer of a model in a run's configuration, if it is here."""
    places = [Path(text) for key in ("tokenizer_path", "path") if (text := model.get(key))]
    return next((place for place in places if place.is_dir()), None)
