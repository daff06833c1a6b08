"""docs/configuration.md, from the settings models. A section that several places have is printed once and linked."""

from __future__ import annotations

import importlib
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pages import anchor
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rollout.config.declared import Setting
from rollout.config.section import Section
from rollout.workloads.job.config import AgentSection
from rollout.workloads.train.aliases import KEYS, Key
from rollout.workloads.train.config import SECTIONS, AlgorithmSection, PreferenceSection, TrainingSection
from rollout.workloads.train.policy_config import PolicySection, SandboxSection

TRAIN = "train.toml"
FILES = [
    ("coordinator.toml", "rollout.config.settings:CoordinatorSettings", "`rollout-coordinator run --config`."),
    ("worker.toml", "rollout.config.settings:WorkerSettings", "`rollout-worker run --config`."),
    ("rollout.toml", "rollout.client.target:ClientSettings", "`rollout` commands that start in its directory."),
    ("batch.toml", "rollout.workloads.infer.config:InferConfig", "`rollout infer batch --config`."),
    ("map.toml", "rollout.workloads.map.config:MapConfig", "`rollout map --config`."),
    ("serve.toml", "rollout.workloads.serve.config:ServeConfig", "`rollout serve --config`: [serve.md](serve.md)."),
    (
        "offload.toml",
        "rollout.workloads.test.config:TestConfig",
        "`rollout test run`, which finds it in the project: [test.md](test.md).",
    ),
    (
        "experiment.yaml",
        "rollout.workloads.experiment.config:ExperimentConfig",
        "`rollout experiment run`: [experiment.md](experiment.md).",
    ),
    (
        TRAIN,
        "rollout.workloads.train.config:TrainConfig",
        "`rollout train sft`, `rm`, `dpo`, `ipo`, `kto`, `grpo`, `ppo` and `fork`: [train.md](train.md).",
    ),
]
INTRODUCTION = """\
# Configuration reference

Written by `python docs/generate.py`. `job.yaml` is in [job.md](job.md).

Files are TOML unless named `.yaml`. An unknown key is an error with file, line and the nearest valid key. Relative
paths start at the current directory. The environment overrides any key as `ROLLOUT_<SECTION>__<KEY>`:

```
ROLLOUT_TRANSPORT__LISTEN_ADDR=0.0.0.0:50051 rollout-coordinator run
```

A run can resume with another file if only `[output]`, `[workers]` and marked keys differ. *Followed*: the new value
applies to work without a result. *Kept*: the run keeps its old value and says so. Any other difference makes a new run.

The column *value* shows the default, which is the first of several values; a type means that the key is unset by
default. An option in brackets sets the key.
"""
OF_JOBS = (AgentSection, SandboxSection)
"""Sections that docs/job.md describes."""
LONG = 8
"""Words of a meaning, from which on a file has it once for each key of that name."""
ALIKE = 5
"""Rows with the same values, from which on these are printed once."""
HEAD = ["key|value|meaning", "---|---|---"]
missing: list[str] = []


@dataclass(frozen=True)
class Place:
    """A section of a file. `setting`: of the section itself."""

    file: str
    name: str
    model: type[BaseModel]
    setting: Setting | None = None

    @property
    def key(self) -> str:
        """Of the section that it is below."""
        return self.name.removesuffix("[]").removesuffix(".NAME").rpartition(".")[2]

    def below(self) -> Iterator[Place]:
        if self.model is AlgorithmSection:
            yield Place(self.file, f"{self.name}.KIND", TrainingSection)
            return
        for key, one in self.model.model_fields.items():
            name, setting = f"{self.name}.{key}".lstrip("."), declared_setting(one)
            if (inner := model_of(one.annotation)) is not None and inner not in OF_JOBS:
                yield Place(self.file, name, inner, setting)
            elif (listed := listed_model(one.annotation)) is not None:
                yield Place(self.file, f"{name}[]", listed)
            elif (named := named_model(one.annotation)) is not None:
                yield Place(self.file, f"{name}.NAME", named)

    def all_below(self) -> Iterator[Place]:
        for one in self.below():
            yield one
            yield from one.all_below()


def shown_name(name: str) -> str:
    return f"[{name.removesuffix('[]')}]" if name.endswith("[]") else name


def load(path: str) -> typing.Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


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
    if model_of(annotation) is not None or named_model(annotation) is not None:
        return "table"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " ".join(f"`{json.dumps(one)}`" for one in arguments)
    if isinstance(annotation, type) and not arguments:
        return annotation.__name__
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(type_name(one) for one in arguments if one is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(arguments[0])
    if (origin := typing.get_origin(annotation)) in (list, dict):
        return f"{'list' if origin is list else 'dict'}[{','.join(map(type_name, arguments))}]"
    return str(annotation).replace("typing.", "").replace("|", "\\|")


def value_of(one: FieldInfo) -> str:
    """The default where that says enough, else the type."""
    kind = type_name(one.annotation)
    if one.is_required():
        return f"{kind}, required"
    default = one.get_default(call_default_factory=True)
    if default is None or default in ([], {}) or isinstance(default, BaseModel) or kind == "table":
        return f"unset {kind}" if kind.startswith("`") else kind
    shown = f"`{json.dumps(default, default=str)}`"
    others = [choice for choice in kind.split() if choice != shown] if kind.startswith("`") else []
    return " ".join([shown, *others])


def row(key: str, one: FieldInfo, of: Setting | None, base: FieldInfo | None = None, said: str = "") -> str:
    """`base`: the key where the page has it already. `said`: a link to where it has the meaning."""
    option, mark = setting_of(one, of)
    alike = base is not None and (one.description, value_of(one)) == (base.description, value_of(base))
    meaning = "The same." if alike and option else f"As in {said}." if said else one.description or ""
    shown = " ".join(filter(None, [meaning, f"(`{option}`)" if option else "", mark]))
    return "|".join([f"`{one.alias or key}`", value_of(one), shown.replace("|", "\\|")])


def table(rows: list[str]) -> list[str]:
    """Values that all rows have stand above it."""
    found = {row.split("|")[1] for row in rows}
    value = found.pop()
    if found or len(rows) < ALIKE or " " not in value:
        return [*HEAD, *rows]
    alike = [row.replace(f"|{value}|", "|", 1) for row in rows]
    return [f"Values of each key: {value.replace(' ', ', ')}.", "", "key|meaning", "---|---", *alike]


def declared_setting(one: FieldInfo) -> Setting | None:
    return next((found for found in one.metadata if isinstance(found, Setting)), None)


def setting_of(one: FieldInfo, of: Setting | None) -> tuple[str, str]:
    """The option, and what becomes of a new value when a run goes on. `of`: of the key's section."""
    setting = declared_setting(one) or Setting()
    if of is not None and setting.on_resume == "follow":
        setting = replace(setting, on_resume=of.on_resume, parts=frozenset())
    option = setting.option if setting.option.startswith("-") else ""
    if setting.parts:
        return option, f"*Followed:* {', '.join(f'`{part}`' for part in sorted(setting.parts))}; others are *kept*."
    return option, {"refuse": "", "keep": "*Kept.*", "follow": "*Followed.*"}[setting.on_resume]


def same(one: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and _shown(one) == _shown(other)


def _shown(one: FieldInfo) -> tuple[object, ...]:
    return one.annotation, one.description, value_of(one), declared_setting(one)


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Keys that hold values, not sections."""
    found = model.model_fields.items()
    return {key: one for key, one in found if (inner := model_of(one.annotation)) is None or inner in OF_JOBS}


def follows(model: type[BaseModel]) -> bool:
    return any((declared_setting(one) or Setting()).on_resume == "follow" for one in model.model_fields.values())


@dataclass(frozen=True)
class Home:
    """Where a model that several places have is printed. `file`: "" if files share it."""

    file: str
    name: str
    title: str

    @property
    def link(self) -> str:
        return f"[`[{shown_name(self.name)}]`](#{anchor(self.title)})"


@dataclass
class Page:
    homes: dict[type[BaseModel], Home] = field(default_factory=dict[type[BaseModel], Home])
    lines: list[str] = field(default_factory=list[str])
    said: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])
    """By file, key and meaning: the heading above it."""

    def find_homes(self, places: list[Place]) -> None:
        users: dict[type[BaseModel], list[Place]] = {}
        for place in places:
            for model in bases(place.model):
                users.setdefault(model, []).append(place)
        titles: set[str] = set()
        for model, used in sorted(users.items(), key=lambda one: len(one[0].__mro__)):
            derived = [one for one in users if one is not model and issubclass(one, model) and users[one] == used]
            exact = any(place.model is model for place in used)
            if len(used) < 2 or derived or not (exact or len(keys_of(model)) > 1):
                continue
            files = list(dict.fromkeys(place.file for place in used))
            name = used[0].name
            title = f"`[{shown_name(name if keys_of(model) else name.rpartition('.')[0])}]`"
            title += f" of {' and '.join(files)}" if title in titles and keys_of(model) else ""
            titles.update([title] if keys_of(model) else [])
            self.homes[model] = Home(files[0] if len(files) == 1 else "", name, title)

    def home_of(self, place: Place) -> tuple[type[BaseModel], Home] | None:
        """Elsewhere than in `place` itself."""
        found = next(((one, self.homes[one]) for one in bases(place.model) if one in self.homes), None)
        return None if found is None or (found[1].file, found[1].name) == (place.file, place.name) else found

    def section(self, place: Place, base: type[BaseModel] = BaseModel, title: str = "", lead: str = "") -> None:
        """Keys that are not the same in `base`, and sections below. `lead`: a link to what else there is."""
        if place.model is AlgorithmSection:
            return self.algorithms(place.name)
        if base is BaseModel and (found := self.home_of(place)) is not None:
            base, home = found
            lead = home.link + (", but *followed* keys are *kept*" if place.setting and follows(place.model) else "")
        rows: list[str] = []
        heading = title or f"`[{shown_name(place.name)}]`"
        first = f"### {heading}" not in self.lines
        for key, one in keys_of(place.model).items():
            if not same(one, there := base.model_fields.get(key)):
                meaning = one.description or ""
                said = self.said.get((place.file, key, meaning), "") if len(meaning.split()) >= LONG else ""
                if first:
                    self.said.setdefault((place.file, key, meaning), f"[{heading}](#{anchor(heading)})")
                rows.append(row(key, one, place.setting, there, said))
                missing.extend([] if one.description else [f"{place.file} {place.name}.{key}"])
        if rows:
            self.lines += [f"### {heading}", ""]
            self.lines += [f"As {lead}, and:", ""] if lead else []
            self.lines += [*table(rows), ""]
        elif lead:
            self.lines += [f"`[{shown_name(place.name)}]`: as {lead}.", ""]
        for one in place.below():
            if not same(place.model.model_fields[one.key], base.model_fields.get(one.key)):
                self.section(one)
        return None

    def file(self, title: str, model: type[BaseModel], used_by: str) -> None:
        self.lines += [f"## {title}", "", f"Read by {used_by}", ""]
        whole, shared = Place(title, "", model), dict[str, str]()
        for one in whole.below():
            found = self.home_of(one)
            if found is not None and found[0] is one.model and found[1].name == one.name:
                shared[one.name] = found[1].link
        if shared:
            self.lines += [f"[Shared sections](#shared-sections): {', '.join(shared.values())}.", ""]
        if keys := keys_of(model):
            self.lines += ["### Top level", "", *HEAD, *(row(key, one, None) for key, one in keys.items()), ""]
        for one in whole.below():
            if one.name not in shared:
                self.section(one)

    def shared(self) -> None:
        self.lines += ["## Shared sections", ""]
        homes = [(model, home) for model, home in self.homes.items() if not home.file and "." not in home.name]
        for model, home in sorted(homes, key=lambda one: one[1].name):
            base = next((one for one in bases(model)[1:] if one in self.homes), BaseModel)
            lead = self.homes[base].link if base is not BaseModel else ""
            self.section(Place("", home.name, model), base, home.title, lead)

    def algorithms(self, name: str) -> None:
        """What the sections of all algorithms have stands once."""
        kind = AlgorithmSection.model_fields["kind"]
        self.lines += [f"### `[{name}]`", "", *HEAD, row("kind", kind, None), ""]
        self.lines += [f"Every algorithm has these keys in `[{name}.KIND]`, where KIND is its `kind`:", ""]
        self.section(Place(TRAIN, f"{name}.KIND", TrainingSection))
        self.lines += ["These keys belong to some algorithms, or have other defaults there:", ""]
        told: dict[type[BaseModel], None] = {}
        for one, model in SECTIONS.items():
            base = next(base for base in (PreferenceSection, PolicySection, TrainingSection) if issubclass(model, base))
            if base is not TrainingSection and base not in told:
                told[base] = None
                users = [user for user, other in SECTIONS.items() if issubclass(other, base)]
                self.section(
                    Place(TRAIN, f"{name}.KIND", base),
                    TrainingSection,
                    f"`[{name}.KIND]` of {' and '.join(', '.join(users).rsplit(', ', 1))}",
                )
            self.section(Place(TRAIN, f"{name}.{one}", model), base)


def bases(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and those that it extends, if they have keys."""
    return [
        one
        for one in model.__mro__
        if issubclass(one, BaseModel)
        and one not in (BaseModel, Section, PolicySection, TrainingSection)
        and one.model_fields
    ]


def names_of_trl() -> list[str]:
    lines = [
        "## TRL's names",
        "",
        "`[algorithm.KIND]` accepts the names of TRL's configuration. A key under both names is an error.",
        "",
    ]
    lines += listed({name: trl_meaning(key) for name, key in KEYS.items() if key.place})
    ignored = sorted(name for name, key in KEYS.items() if key.note and not key.place)
    lines += ["These change no result. A note says why each is ignored:", "", f"{', '.join(map(code, ignored))}.", ""]
    lines += ["These are refused, unless they are off or have the value in brackets:", ""]
    refused = {name: key for name, key in KEYS.items() if not key.note and not key.place}
    marks = {name: fine(key) for name, key in refused.items()}
    return [*lines, *listed({name: key.instead for name, key in refused.items()}, marks)]


def code(name: str) -> str:
    return f"`{name}`"


def listed(meanings: dict[str, str], marks: dict[str, str] | None = None) -> list[str]:
    """Names with one meaning stand together."""
    names: dict[str, list[str]] = {}
    for name, meaning in sorted(meanings.items()):
        names.setdefault(meaning, []).append(f"`{name}`{(marks or {}).get(name, '')}")
    return [*(f"- {', '.join(same)}: {meaning}" for meaning, same in names.items()), ""]


def trl_meaning(key: Key) -> str:
    place = f"`{key.place[1:] if key.place.startswith('/') else key.place}`"
    values = ", ".join(
        f"`{json.dumps(theirs)}` is {'the default' if ours is None else f'`{json.dumps(ours)}`'}"
        for theirs, ours in key.values.items()
    )
    return f"{place}; {values}" if values else place


def fine(key: Key) -> str:
    off = (False, "", 0, [], {}, "no", "none")
    shown = [value for value in key.fine if value not in off]
    return f" (`{json.dumps(shown[0])}`)" if shown else ""


def read_files() -> tuple[list[tuple[str, type[BaseModel], str]], Page]:
    files = [(title, load(path), used_by) for title, path, used_by in FILES]
    made = Page()
    made.find_homes([one for title, model, _ in files for one in Place(title, "", model).all_below()])
    return files, made


def keys_with_options() -> dict[tuple[str, str, str], str]:
    """By command, option and meaning: a link to the file or the shared section that has the key."""
    found: dict[tuple[str, str, str], str] = {}
    files, made = read_files()
    for title, whole, used_by in files:
        command = " ".join(used_by.strip("`").split()[:2]).rstrip("`:,.")
        top = Place(title, "", whole)
        for place in [top, *top.all_below()]:
            for key, one in keys_of(place.model).items():
                homes = [(model, made.homes[model]) for model in bases(place.model) if model in made.homes]
                home = next((home for model, home in homes if same(one, model.model_fields.get(key))), None)
                name, to = (f"`[{home.name}]`", home.title) if home and not home.file else (title, title)
                link = f"[{name}](configuration.md#{anchor(to)})"
                found.setdefault((command, setting_of(one, None)[0], one.description or ""), link)
    return found


def page() -> str:
    files, made = read_files()
    made.lines += [*INTRODUCTION.splitlines(), ""]
    made.shared()
    for title, model, used_by in files:
        made.file(title, model, used_by)
    return "\n".join([*made.lines, *names_of_trl()])
