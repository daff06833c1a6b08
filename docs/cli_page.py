"""docs/cli.md, from the commands themselves. Options and paragraphs that many commands have are printed once."""

from __future__ import annotations

import importlib
import re
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import config_page
from cli_tasks import COMMON, ENVIRONMENT, GROUPS, INTRODUCTION, TASKS, compact, one_line
from rollout.cli.commands.standard import EVENTS, PLACE
from rollout.cli.program import command_of
from rollout.config.environment import OTHERS

PROGRAMS = [
    ("rollout", "rollout.cli.__main__:app"),
    ("rollout-coordinator", "rollout_coordinator.__main__:app"),
    ("rollout-worker", "rollout_worker.__main__:app"),
]
SHARED = 3
"""Commands that have an option in the same words, from which on it is printed once."""
LONG = 5
"""Words of a paragraph, from which on it is printed once."""
EVERYWHERE = (
    (re.compile(r"[;,]? ?[Kk]eys are only ever added(?=\.)"), ""),
    (re.compile(r"\.\.$"), "."),
    (re.compile(r"; 2 configuration or (?:input|usage)(?=[.;])"), ""),
    (re.compile(r"; 130 interrupted"), ""),
    (re.compile(r"--json(?: prints an object per line(?: with an `event`)?:|: an object per line,)"), "--json lines:"),
    (re.compile(r"--json prints an object per line(?=,)"), "--json lines"),
)
"""What the introduction says of every command, and shorter forms."""
DEFAULT = re.compile(r" Default: (.+?)\.$")
KINDS = {"str": "TEXT", "path": "PATH", "int": "N", "int range": "N"}
missing: list[str] = []
Option = tuple[str, str]
"""How it is written, what it means."""


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
    def anchor(self) -> str:
        return self.name.replace(" ", "-")

    @cached_property
    def options(self) -> list[Option]:
        found: list[Option] = []
        for param in self.node.params:
            if getattr(param, "hidden", False) or param.name in ("help", "version") or "completion" in param.name:
                continue
            shown, text = param.get_help_record(self.context) or (param.name, getattr(param, "help", "") or "")
            if not text.strip():
                missing.append(f"{self.name} {shown}")
            found.append(written(shown, text))
        return found

    @cached_property
    def paragraphs(self) -> list[str]:
        """Of its help, without what the page says once."""
        text = (self.node.help or "").strip().replace("\b\n", "")
        found: list[str] = []
        for paragraph in map(one_line, text.split("\n\n")):
            if paragraph != one_line(PLACE):
                found.append(compact(own_events(paragraph)))
        return found


def own_events(paragraph: str) -> str:
    """Of the events of a workload what is its own."""
    pattern = re.escape(one_line(EVENTS.format(unit="UNIT", rates="RATES", events="MORE")))
    pattern = pattern.replace("UNIT", r"(?P<unit>\w+)", 1).replace("UNIT", "(?P=unit)")
    found = re.fullmatch(pattern.replace("RATES", "(?P<rates>.+?)").replace("MORE", "(?P<more>.*?)"), paragraph)
    if found is None:
        for said, instead in EVERYWHERE:
            paragraph = said.sub(instead, paragraph)
        return paragraph
    rates, more = found["rates"].replace(", ", ","), found["more"].removeprefix(",")
    return f"[Events](#workload-options): UNITS `{found['unit']}`, RATES `{rates}`{' and' + more if more else ''}."


def written(shown: str, text: str) -> Option:
    """`--name <str>` as `--name TEXT`, `RUN <str>` as `RUN`; with a default of one word behind it, and without
    bounds."""
    meaning, _, bracket = text.partition("  [")
    facts = bracket.removesuffix("]").split("; ")
    default = next((fact.removeprefix("default: ") for fact in facts if fact.startswith("default: ")), "")
    if found := DEFAULT.search(meaning):
        meaning, default = meaning[: found.start()], found[1]
    if not shown.startswith("-"):
        return shown.partition(" <")[0].partition(" list")[0], meaning
    shown = re.sub(r"<(?:list\[)?([^\[\]]*?)\]?>", lambda kind: KINDS.get(kind[1], kind[1]), shown)
    if default and " " not in default and " /" not in shown:
        shown, default = f"{shown}={default}", ""
    meaning += f" Default: {default}." if default else ""
    return shown, meaning + (" Required." if "required" in facts else "")


def walk(name: str, node: typing.Any) -> Iterator[Command]:
    """A command and those below it, but hidden ones."""
    context = node.context_class(node, info_name=name)
    names = getattr(node, "list_commands", lambda _: [])(context)
    children = {child: found for child in names if not (found := node.get_command(context, child)).hidden}
    yield Command(name, node, context, children)
    for child, below in children.items():
        yield from walk(f"{name} {child}", below)


def flag(shown: str) -> str:
    """Its name alone, the long one."""
    words = shown.replace(",", "").split()
    return next((word.partition("=")[0] for word in words if word.startswith("--")), words[0])


@dataclass
class Shared:
    """`usual`: options that many commands have, in the words that most use. `first`: of an option that some have, the
    command whose section has it."""

    usual: dict[str, Option]
    places: dict[tuple[str, str, str], str] = field(default_factory=config_page.keys_with_options)
    first: dict[tuple[str, str, str | None], str] = field(default_factory=dict[tuple[str, str, str | None], str])
    twins: dict[frozenset[Option], str] = field(default_factory=dict[frozenset[Option], str])

    @classmethod
    def of(cls, commands: list[Command]) -> Shared:
        counted = Counter(option for one in commands for option in one.options)
        usual: dict[str, Option] = {}
        for option, times in counted.most_common():
            if times >= SHARED:
                usual.setdefault(flag(option[0]), option)
        return cls(
            {name: usual[name] for name in dict.fromkeys([*COMMON, *(n for group in GROUPS for n in group.options)])}
        )

    def place_of(self, option: Option, command: str) -> str | None:
        """A link to the key that the option sets."""
        return self.places.get((" ".join(command.split()[:2]), flag(option[0]), option[1]))

    def lines(self) -> Iterator[str]:
        printed: set[str] = set()
        for group in GROUPS:
            yield from [f"### {group.title}", "", *([group.text, ""] if group.text else [])]
            options = [self.usual[name] for name in group.options if name not in printed]
            place = self.place_of(options[0], "rollout infer")
            if place is None:
                yield from [*map(item, options), ""]
            else:
                yield from [f"Keys of {place}: {', '.join(f'`{shown}`' for shown, _ in options)}.", ""]
            printed |= set(group.options)
        yield from ["### Common options", "", *(item(self.usual[name]) for name in COMMON if name not in printed), ""]

    def taken(self, one: Command) -> Iterator[str]:
        """The lines of the options of a command."""
        groups: list[str] = []
        left = dict.fromkeys(one.options)
        fits = {group: [self.usual[name] for name in group.options if self.usual[name] in left] for group in GROUPS}
        for group in sorted(GROUPS, key=lambda group: len(group.options) - 2 * len(fits[group])):
            has = [option for option in fits[group] if option in left]
            if len(has) * 2 >= len(group.options):
                without = [f"`{name}`" for name in group.options if self.usual[name] not in left]
                more = f" without {', '.join(without)}" if without else ""
                groups.append(f"[{group.name}](#{group.anchor}){more}")
                left = {option: None for option in left if option not in has}
        if (
            twin := self.twins.setdefault(frozenset(one.options), one.name)
        ) != one.name and twin in self.first.values():
            yield from [f"Otherwise as {link(twin)}.", ""]
            return
        common = [f"`{name}`" for name, option in self.usual.items() if option in left]
        left = {option: None for option in left if option not in self.usual.values()}
        again: dict[str, list[str]] = {}
        of_keys: dict[str, list[str]] = {}
        for option in left:
            place = self.place_of(option, one.name)
            if (first := self.first.setdefault((*option, place), one.name)) != one.name:
                again.setdefault(first, []).append(f"`{flag(option[0])}`")
            elif place:
                of_keys.setdefault(place, []).append(f"`{option[0]}`")
            else:
                yield item(option)
        yield ""
        if of_keys:
            listed = [f"{', '.join(names)} of {place}" for place, names in of_keys.items()]
            yield from [f"Keys as options: {'; '.join(listed)}.", ""]
        parts = [", ".join(common)] if common else []
        parts += [
            *groups,
            *(f"{', '.join(names)} as {link(first)}" for first, names in again.items()),
        ]
        yield from [f"Also: {'; '.join(parts)}.", ""] if parts else []


def link(command: str) -> str:
    return f"[`{command.removeprefix('rollout ')}`](#{command.replace(' ', '-')})"


def item(option: Option) -> str:
    return f"- `{option[0]}`: {option[1]}"


def describe(one: Command, shared: Shared, said: dict[str, str]) -> Iterator[str]:
    """`said`: the long paragraphs so far, and which command has each."""
    yield from [f"### `{one.name}`", ""]
    for paragraph in one.paragraphs:
        first = said.setdefault(paragraph, one.name) if len(paragraph.split()) > LONG else one.name
        if first == one.name:
            yield from [paragraph, ""]
    lines = list(shared.taken(one))
    yield from lines if lines[0] else lines[1:]


def load(path: str) -> typing.Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def page() -> str:
    commands = [one for name, path in PROGRAMS for one in walk(name, command_of(load(path), name))]
    known = {one.name: one for one in commands if one.acts}
    grouped = {name for task in TASKS for name in task.commands}
    missing.extend(one.name for one in commands if not (one.node.help or "").strip())
    missing.extend(f"{name} (in no task of cli_tasks.py)" for name in known if name not in grouped)
    shared = Shared.of(commands)
    said: dict[str, str] = {}
    lines = [*INTRODUCTION.splitlines(), "", "## Shared options", "", *shared.lines()]
    for task in TASKS:
        lines += [f"## {task.title}", "", *task.text.strip().splitlines(), ""]
        lines += [line for name in task.commands if name in known for line in describe(known[name], shared, said)]
    lines += [*ENVIRONMENT.splitlines(), "", *(f"- `{name}`: {text}" for name, text in OTHERS.items()), ""]
    return "\n".join(lines)
