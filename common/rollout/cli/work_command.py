"""Commands of workloads: options from a settings model (`rollout.config.declared`) and options of all workloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from pydantic import BaseModel

from rollout.cli.options import (
    CoordinatorOption,
    DetachOption,
    DryRunOption,
    JsonOption,
    NameOption,
    ResumeOption,
    TlsDirOption,
    WorkersOption,
    chosen,
)
from rollout.cli.work_options import Options
from rollout.client.target import find_target
from rollout.config.declared import Declared, declared
from rollout.config.load import located
from rollout.model.errors import ConfigError
from rollout.workloads.port import Workload


def _shared(
    name: NameOption = "",
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    resume: ResumeOption = None,
    workers: WorkersOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    json: JsonOption = False,
) -> None: ...


_SHARED = inspect.signature(_shared, eval_str=True).parameters


@dataclass(frozen=True, slots=True)
class Typed:
    """Typed options. `given` maps dotted keys of the settings to values; `shared` is as in `Options`."""

    model: type[BaseModel]
    given: dict[str, Any]
    shared: dict[str, Any]

    def words(self, *command: str, config: Path | None = None) -> tuple[str, ...]:
        """Return the command with its options, without those that every workload's command takes."""
        arguments: list[str] = []
        options: list[str] = []
        for one in declared(self.model):
            value: Any = self.given.get(one.key)
            for item in cast("list[Any]", value) if isinstance(value, list) else [value] if value is not None else []:
                if one.is_argument:
                    arguments.append(str(item))
                else:
                    options += [one.setting.option] if item is True else [one.setting.option, str(item)]
        file = ("--config", str(config)) if config is not None else ()
        return ("rollout", *command, *arguments, *file, *options)

    @property
    def names_cluster(self) -> bool:
        """Whether a cluster is named; otherwise workers are started on this machine."""
        return bool(find_target(list(self.shared["coordinators"]), self.shared["tls_dir"], chosen().selector).addresses)

    def require(self) -> None:
        """Raise ConfigError if a required option is missing and no file is given."""
        needed = [one for one in declared(self.model) if one.setting.option and one.field.is_required()]
        if absent := [one.shown for one in needed if not self.given.get(one.key)]:
            raise ConfigError(f"{' and '.join(absent)} must be given, or a file that says it with --config")

    def run(
        self, workload: Workload[Any, Any], settings: BaseModel, words: Sequence[str], config: Path | None, **more: Any
    ) -> NoReturn:
        """Run the workload and exit. `more` are fields of `Options` that this command alone takes."""
        from rollout.cli.session import run_workload  # brings grpc

        with located(config, self.model):
            raise typer.Exit(run_workload(workload, settings, Options(words=tuple(words), **self.shared, **more)))


def work_command(model: type[BaseModel], without: Iterable[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Give a command the options of `model` and the shared ones, except `without`.

    Its function takes `typed` first, then its own options; an own option replaces another of the same name.
    """
    left_out = frozenset(without)

    def wrap(function: Callable[..., None]) -> Any:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        own.pop("typed")
        own = {name: one for name, one in own.items() if name not in left_out}
        of_model = {_name(one): one for one in declared(model) if one.setting.option}
        of_model = {name: one for name, one in of_model.items() if name not in {*own, *left_out}}
        shared = [name for name in _SHARED if name not in {*own, *of_model, *left_out}]

        def command(**values: Any) -> None:
            given = {one.key: values.pop(name) for name, one in of_model.items()}
            given = {key: None if value is False or value == [] else value for key, value in given.items()}
            options = {name: values.pop(name) for name in shared}
            if "workers" in options and "workers" in model.model_fields:
                given["workers.count"] = options["workers"]
            if "coordinator" in options:
                options["coordinators"] = tuple(options.pop("coordinator") or ())
            function(Typed(model, given, options), **values)

        of_command = [_parameter(name, one) for name, one in of_model.items()]
        arguments = [one for one in of_command if of_model[one.name].is_argument]
        options = [one for one in of_command if not of_model[one.name].is_argument]
        parameters = [*arguments, *own.values(), *options, *(_SHARED[name] for name in shared)]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        )
        command.__name__, command.__doc__, command.__annotations__ = function.__name__, function.__doc__, {}
        return command

    return wrap


def _name(one: Declared) -> str:
    return one.key.replace(".", "_") if one.is_argument else one.setting.option.lstrip("-").replace("-", "_")


def _parameter(name: str, one: Declared) -> inspect.Parameter:
    """Return a typer parameter. The model checks values; bounds of whole numbers are set here too, so that help shows
    them."""
    setting, kinds = one.setting, set(getattr(one.field.annotation, "__args__", ())) | {one.field.annotation}
    metavar = setting.metavar or "|".join(map(str, one.choices)) or None
    if one.is_argument:
        info, kind = typer.Argument(metavar=setting.option, help=one.help, show_default=False), str | None
    elif bool in kinds:
        info, kind = typer.Option(setting.option, help=one.help), bool
    else:
        low, high = (one.bound("ge"), one.bound("le")) if int in kinds else (None, None)
        info = typer.Option(setting.option, metavar=metavar, help=one.help, min=low, max=high)
        numbers = [kind for kind in (int, float) if kind in kinds and not one.reads_text]
        kind = list[str] | None if list[str] in kinds else numbers[0] | None if numbers else str | None
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
