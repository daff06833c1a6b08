"""Writes docs/configuration.md and docs/cli.md from the settings models and the commands themselves, and docs/cloud-iam.md
from deploy/iam.yaml.

python docs/generate.py           write them
python docs/generate.py --check   exit 1 if they differ from what is committed, or something has no description
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cli_tasks import ENVIRONMENT, INTRODUCTION, REFERENCE, TASKS
from iam_page import page as iam_page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rollout.cli.program import command_of
from rollout.config.declared import Setting
from rollout.config.environment import OTHERS
from rollout.workloads.job.config import AgentSection
from rollout.workloads.train.aliases import KEYS, Key
from rollout.workloads.train.config import SECTIONS, AlgorithmSection, TrainingSection
from rollout.workloads.train.policy_config import PolicySection, SandboxSection

HERE = Path(__file__).resolve().parent
FILES = [
    ("coordinator.toml", "rollout.config.settings:CoordinatorSettings", "`rollout-coordinator run --config`"),
    ("worker.toml", "rollout.config.settings:WorkerSettings", "`rollout-worker run --config`"),
    ("rollout.toml", "rollout.client.target:ClientSettings", "`rollout` commands that are started in its directory"),
    ("batch.toml", "rollout.workloads.infer.config:InferConfig", "`rollout infer batch --config`"),
    ("map.toml", "rollout.workloads.map.config:MapConfig", "`rollout map --config`"),
    (
        "serve.toml",
        "rollout.workloads.serve.config:ServeConfig",
        "`rollout serve --config`; [serve.md](serve.md) explains it",
    ),
    (
        "offload.toml",
        "rollout.workloads.test.config:TestConfig",
        "`rollout test run`, which finds it in the project; [test.md](test.md) explains it",
    ),
    (
        "experiment.yaml",
        "rollout.workloads.experiment.config:ExperimentConfig",
        "`rollout experiment run`, as YAML; [experiment.md](experiment.md) explains it",
    ),
    (
        "train.toml",
        "rollout.workloads.train.config:TrainConfig",
        "`rollout train sft --config`, and by `rm`, `dpo`, `ipo`, `kto`, `grpo`, `ppo` and `fork`; [train.md](train.md) explains it",
    ),
]
PROGRAMS = [
    ("rollout", "rollout.cli.__main__:app"),
    ("rollout-coordinator", "rollout_coordinator.__main__:app"),
    ("rollout-worker", "rollout_worker.__main__:app"),
]
missing: list[str] = []
SHARED = 3
"""Commands that have an option in the same words, from which on it is told once."""
LONG = 12
"""Words of a paragraph, from which on it is told once."""


def load(path: str) -> typing.Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


OF_JOBS = (AgentSection, SandboxSection)
"""Sections that docs/job.md describes."""


def model_of(annotation: object) -> type[BaseModel] | None:
    """The settings model behind `annotation`, also inside an Optional."""
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def listed_model(annotation: object) -> type[BaseModel] | None:
    """The settings model of the tables that a list has."""
    (inner, *_) = typing.get_args(annotation) if typing.get_origin(annotation) is list else (None,)
    return model_of(inner)


def named_model(annotation: object) -> type[BaseModel] | None:
    """The settings model of the tables that a table has, by any name."""
    (*_, inner) = typing.get_args(annotation) if typing.get_origin(annotation) is dict else (None,)
    return model_of(inner)


def type_name(annotation: object) -> str:
    if listed_model(annotation) is not None:
        return "list of tables"
    if named_model(annotation) is not None:
        return "tables"
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f'`"{a}"`' if isinstance(a, str) else f"`{a}`" for a in typing.get_args(annotation))
    if annotation is type(None):
        return "none"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(type_name(a) for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (list, dict):
        inner = ", ".join(type_name(one) for one in typing.get_args(annotation))
        return f"{typing.get_origin(annotation).__name__}[{inner}]"
    return str(annotation).replace("typing.", "").replace("|", "\\|")


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None else f"`{json.dumps(value, default=str)}`"


def section(
    model: type[BaseModel], name: str, lines: list[str], base: type[BaseModel] = BaseModel, of: Setting | None = None
) -> None:
    """Keys of `model` that are not the same in `base`, and sections below it. `of`: of the section itself."""
    if model is AlgorithmSection:
        return algorithms(name, lines)
    rows, nested = [], []
    for key, field in model.model_fields.items():
        if same(field, base.model_fields.get(key)):
            continue
        key = field.alias or key
        inner = model_of(field.annotation)
        if inner is not None and inner not in OF_JOBS:
            nested.append((f"{name}.{key}" if name else key, inner, declared_setting(field)))
            continue
        if not field.description and name:
            missing.append(f"{name}.{key}")
        if (listed := listed_model(field.annotation)) is not None:
            nested.append((f"{name}.{key}[]" if name else f"[{key}]", listed, None))
        if (named := named_model(field.annotation)) is not None:
            nested.append((f"{name}.{key}.NAME" if name else f"{key}.NAME", named, None))
        meaning = f"{field.description or ''}{setting_of(field, of)}"
        kind, default = type_name(field.annotation), default_of(field)
        if inner is not None or named_model(field.annotation) is not None:
            kind, default = "table" if inner is not None else kind, "unset"
        rows.append(f"| `{key}` | {kind} | {default} | {meaning} |")
    if rows:
        lines += [
            f"### `[{name}]`" if name else "### Top level",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [*rows, ""]
    for inner_name, inner, setting in nested:
        section(inner, inner_name, lines, of=setting)
    return None


def declared_setting(field: FieldInfo) -> Setting | None:
    return next((one for one in field.metadata if isinstance(one, Setting)), None)


def setting_of(field: FieldInfo, of: Setting | None) -> str:
    """The option, and what becomes of a new value when a run goes on. `of`: of the key's section."""
    setting = declared_setting(field) or Setting()
    if of is not None and setting.on_resume == "follow":
        setting = replace(setting, on_resume=of.on_resume, parts=frozenset())
    option = f" Option: `{setting.option}`." if setting.option.startswith("-") else ""
    if setting.parts:
        return (
            f"{option} *Followed:* {', '.join(f'`{part}`' for part in sorted(setting.parts))}; the others are *kept*."
        )
    return option + {"refuse": "", "keep": " *Kept.*", "follow": " *Followed.*"}[setting.on_resume]


def same(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (field.annotation, field.description, default_of(field)) == (
        other.annotation,
        other.description,
        default_of(other),
    )


def algorithms(name: str, lines: list[str]) -> None:
    """What the sections of all algorithms have stands once."""
    kind = AlgorithmSection.model_fields["kind"]
    lines += [f"### `[{name}]`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `kind` | {type_name(kind.annotation)} | {default_of(kind)} | {kind.description} |", ""]
    lines += [f"`[{name}.KIND]`, where KIND is that of `[{name}]`, has these keys for every algorithm:", ""]
    section(TrainingSection, f"{name}.KIND", lines)
    lines += ["What one algorithm has of its own, or with another default:", ""]
    policies = [one for one, model in SECTIONS.items() if issubclass(model, PolicySection)]
    for one, model in SECTIONS.items():
        if one == policies[0]:
            lines += [f"Of {' and '.join(policies)}, KIND is either:", ""]
            section(PolicySection, f"{name}.KIND", lines, base=TrainingSection)
        section(model, f"{name}.{one}", lines, base=PolicySection if one in policies else TrainingSection)


def names_of_trl() -> list[str]:
    lines = [
        "### TRL's names",
        "",
        "`[algorithm.KIND]` takes the names of TRL's configuration, so that one can be pasted. A key that is given under both names is an error, and so is one that asks for what is not done here.",
        "",
        "| TRL's name | here |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {trl_meaning(key)} |" for name, key in sorted(KEYS.items()) if key.place]
    lines += [
        "",
        "These change no result: they are left out, and a note says so.",
        "",
        "| TRL's name | what is done |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {key.note} |" for name, key in sorted(KEYS.items()) if key.note and not key.place]
    lines += [
        "",
        "These are refused, unless they are off or have the value in brackets.",
        "",
        "| TRL's name | what to do instead |",
        "|---|---|",
    ]
    refused = [(name, key) for name, key in sorted(KEYS.items()) if not key.note and not key.place]
    return [*lines, *(f"| `{name}`{fine(key)} | {key.instead} |" for name, key in refused), ""]


def trl_meaning(key: Key) -> str:
    place = f"`{key.place[1:] if key.place.startswith('/') else key.place}`"
    values = ", ".join(
        f"`{json.dumps(theirs)}` is {'the default' if ours is None else f'`{json.dumps(ours)}`'}"
        for theirs, ours in key.values.items()
    )
    return f"{place}: {values}" if values else place


def fine(key: Key) -> str:
    off = (False, "", 0, [], {}, "no", "none")
    shown = [value for value in key.fine if value not in off]
    return f" (`{json.dumps(shown[0])}`)" if shown else ""


def configuration() -> str:
    lines = [
        "# Configuration reference",
        "",
        "Written by `python docs/generate.py`; a test keeps it complete. Files are TOML. Unknown keys are errors with file, line and the nearest valid key.",
        "Any value can be overridden by the environment: `ROLLOUT_<SECTION>__<KEY>`, e.g. `ROLLOUT_TRANSPORT__LISTEN_ADDR=0.0.0.0:50051`. One that no program knows is an error; one that is another program's is let be. Relative paths are relative to the current directory.",
        "",
        "When a run goes on, its file may differ from the one that it was started with in `[output]` and `[workers]`; in keys marked *followed*, whose new value holds for what has no result yet; and in keys marked *kept*, of which the run keeps its own value, and says so. Any other change makes it another run.",
        "",
    ]
    for title, path, used_by in FILES:
        lines += [f"## {title}", "", f"Read by {used_by}.", ""]
        section(load(path), "", lines)
    lines += names_of_trl()
    return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """By duck type: typer brings a click of its own in some versions."""

    name: str
    node: typing.Any
    context: typing.Any
    children: dict[str, typing.Any]

    @property
    def acts(self) -> bool:
        return not self.children or self.node.invoke_without_command

    @property
    def options(self) -> list[tuple[str, str]]:
        return options_of(self.node, self.context)


def walk(name: str, node: typing.Any) -> Iterator[Command]:
    """A command and those below it, but hidden ones."""
    context = node.context_class(node, info_name=name)
    names = getattr(node, "list_commands", lambda _: [])(context)
    children = {child: found for child in names if not (found := node.get_command(context, child)).hidden}
    yield Command(name, node, context, children)
    for child, below in children.items():
        yield from walk(f"{name} {child}", below)


def describe(one: Command, shared: set[tuple[str, str]], said: dict[str, str]) -> list[str]:
    """`said`: the long paragraphs so far, and which command has each."""
    text = (one.node.help or "").strip().replace("\b\n", "")
    lines = [f"## `{one.name}`", "", *paragraphs(one.name, text, said)]
    lines += [f"- `{one.name} {child}`: {node.get_short_help_str(120)}" for child, node in one.children.items()]
    lines += ["", "```", one.node.get_usage(one.context), "```", ""]
    missing.extend([] if text else [one.name])
    missing.extend(f"{one.name} {shown}" for shown, text in one.options if not text.strip())
    rows = [f"| `{shown}` | {text} |" for shown, text in one.options if (shown, text) not in shared]
    if rows:
        lines += ["| option | meaning |", "|---|---|", *rows, ""]
    if again := [f"`{shown.split()[0]}`" for shown, text in one.options if (shown, text) in shared]:
        lines += [f"[Shared options](#shared-options): {', '.join(again)}.", ""]
    return lines


def options_of(node: typing.Any, context: typing.Any) -> list[tuple[str, str]]:
    """(how it is written, what it means), as cells of a table."""
    found = []
    for param in node.params:
        if getattr(param, "hidden", False):
            continue
        shown, text = param.get_help_record(context) or (param.name, getattr(param, "help", "") or "")
        if "--help" not in shown and "--version" not in shown and "completion" not in shown:
            found.append((shown.replace("|", "\\|"), text.replace("|", "\\|")))
    return found


def paragraphs(name: str, text: str, said: dict[str, str]) -> list[str]:
    """What an earlier command says in the same words is not said again."""
    lines: list[str] = []
    others: dict[str, None] = {}
    for paragraph in text.split("\n\n"):
        first = said.setdefault(paragraph, name) if len(paragraph.split()) > LONG else name
        if first == name:
            lines += [paragraph, ""]
        else:
            others[f"[`{first}`](#{anchor(first)})"] = None
    return [*lines, f"The rest is as of {' and '.join(others)}.", ""] if others else lines


def anchor(name: str) -> str:
    return name.replace(" ", "-")


def cli() -> str:
    commands = [one for name, path in PROGRAMS for one in walk(name, command_of(load(path), name))]
    known = {one.name: one for one in commands if one.acts}
    grouped = {name for task in TASKS for name in task.commands}
    ungrouped = [name for name in known if name not in grouped and not name.endswith(" version")]
    missing.extend(f"{name} (in no task of cli_tasks.py)" for name in ungrouped)
    lines = [*INTRODUCTION.splitlines(), ""]
    for task in TASKS:
        lines += [
            f"## {task.title}",
            "",
            *task.text.strip().splitlines(),
            "",
            "| command | what it does |",
            "|---|---|",
        ]
        for name in task.commands:
            if name in known:
                node = known[name].node
                usage = node.get_usage(known[name].context).removeprefix("Usage: ").replace("[OPTIONS]", "")
                usage = " ".join(usage.replace("|", "\\|").split())
                lines.append(f"| [`{usage}`](#{anchor(name)}) | {node.get_short_help_str(160)} |")
        lines.append("")
    lines += [*ENVIRONMENT.splitlines(), "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()]
    counted = Counter(option for one in commands for option in one.options if option[0].startswith("-"))
    shared = {option for option, times in counted.items() if times >= SHARED}
    lines += ["", "# Complete reference", "", REFERENCE, "", "## Shared options", ""]
    lines += ["Several commands have these, and list them by name.", "", "| option | meaning |", "|---|---|"]
    lines += [f"| `{shown}` | {text} |" for shown, text in sorted(shared)] + [""]
    said: dict[str, str] = {}
    return "\n".join([*lines, *(line for one in commands for line in describe(one, shared, said))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    pages = {"configuration.md": configuration(), "cli.md": cli(), "cloud-iam.md": iam_page()}
    for path, text in ((HERE / name, text) for name, text in pages.items()):
        text = "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            path.write_text(text)
    for name in missing:
        print(f"no description: {name}")
    if stale:
        print("run `python docs/generate.py`; these differ:", *stale)
    return 1 if stale or missing else 0


if __name__ == "__main__":
    sys.exit(main())
