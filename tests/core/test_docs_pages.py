"""docs/cli.md and docs/configuration.md have each command, option and key where a reader looks, or linked from there;
the pages of docs/ have good links and are not too long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import config_page
import pages
import pytest
from config_page import Place
from rollout.workloads.train.config import SECTIONS, Kind
from test_cli_commands import ALL

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINK = re.compile(r"\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()]*)#([^()]+)\)")
NAME = re.compile(r"`([^`]+)`")
ACTING = [
    (name, command)
    for name, command, _ in ALL
    if not command.hidden and (not getattr(command, "commands", None) or command.invoke_without_command)
]


@dataclass
class Part:
    """Below a heading. `file`: the heading of level 2 above it."""

    file: str
    heading: str
    lines: list[str] = field(default_factory=list[str])

    def begins(self, text: str) -> Iterator[str]:
        return (line.removeprefix(text).removesuffix(".") for line in self.lines if line.startswith(text))

    def has_bullet(self, flag: str) -> bool:
        return any(re.match(rf"- `(?:-\w, )?{re.escape(flag)}[ =`,]", line) for line in self.lines)


def read(name: str) -> dict[str, Part]:
    """By anchor."""
    found, file, part = dict[str, Part](), "", Part("", "")
    for line in (DOCS / name).read_text().splitlines():
        if heading := re.fullmatch(r"#+ (.+)", line):
            file = heading[1] if line.startswith("## ") else file
            part = found.setdefault(pages.anchor(heading[1]), Part(file, heading[1]))
            if part.lines:
                number = sum(other.heading == heading[1] for other in found.values())
                part = found[f"{pages.anchor(heading[1])}-{number}"] = Part(file, heading[1])
        part.lines.append(line)
    return found


CLI, CONFIGURATION = read("cli.md"), read("configuration.md")


def names(text: str) -> list[str]:
    return [name.partition("=")[0].split()[0].rstrip(",") for name in NAME.findall(text)]


def explained(flag: str, part: Part) -> bool:
    """In the section of a command or of a group of options, or where its last lines lead."""
    if part.has_bullet(flag):
        return True
    keys = [
        one for start in ("Keys as options: ", "Keys of ") for line in part.begins(start) for one in line.split("; ")
    ]
    for one in keys:
        if (link := LINK.search(one)) and flag in names(LINK.sub("", one)):
            file = CONFIGURATION[link[3]].file
            return any(
                f"(`{flag}`)" in line for other in CONFIGURATION.values() if other.file == file for line in other.lines
            )
    twins = [link[3] for line in part.begins("Otherwise as ") if (link := LINK.match(line))]
    also = (one for line in part.begins("Also: ") for one in line.split("; "))
    return any(leads(flag, one) for one in also) or any(explained(flag, CLI[twin]) for twin in twins)


def leads(flag: str, one: str) -> bool:
    """Whether a part of the line "Also:" names the option, and what it names has it."""
    link = LINK.search(one)
    if link is None:
        return flag in names(one) and any(
            part.has_bullet(flag) for part in CLI.values() if part.file == "Shared options"
        )
    if one.startswith("["):
        return flag not in names(one[link.end() :]) and explained(flag, CLI[link[3]])
    return flag in names(one[: link.start()]) and explained(flag, CLI[link[3]])


@pytest.mark.parametrize(("name", "command"), ACTING, ids=[name for name, _ in ACTING])
def test_a_command_and_its_options_are_explained(name: str, command: Any) -> None:
    part = CLI[name.replace(" ", "-")]
    for one in command.params:
        if one.name in ("help", "version") or "completion" in one.name or getattr(one, "hidden", False):
            continue
        shown = next((opt for opt in one.opts if opt.startswith("--")), one.metavar or one.name)
        assert explained(shown, part), f"{name} {shown} is not in docs/cli.md: run python docs/generate.py"


def sections_of(file: str, name: str) -> list[Part]:
    """Those of docs/configuration.md that a reader of the section `name` of a file comes to."""
    return [part for part, _ in reached(file, name)]


def reached(file: str, name: str) -> list[tuple[Part, str]]:
    """(section, what `name` is called there)"""
    shown = f"`[{config_page.shown_name(name)}]`" if name else "Top level"
    here = [part for part in CONFIGURATION.values() if part.file == file]
    found = [(part, name) for part in here if part.heading == shown or part.heading.startswith(f"{shown} of ")]
    links = [link for part, _ in found for line in part.begins("As ") if (link := LINK.match(line))]
    for part in here:
        links += [link for line in part.begins(f"{shown}: as ") if (link := LINK.match(line))]
        links += [link for line in part.begins("[Shared sections]") for link in LINK.finditer(line) if link[1] == shown]
    found += [(part, link[1].strip("`[]")) for link in links for part in with_bases(CONFIGURATION[link[3]])]
    for above in ancestors(name) if not found else ():
        for part, to in reached(file, above):
            if (part.file, to) != (file, above):
                found += reached(part.file, name.replace(above, to, 1))
    return found


def ancestors(name: str) -> list[str]:
    """Nearest first."""
    words = name.removesuffix(".NAME").split(".")
    return [".".join(words[:count]) for count in range(len(words) - 1, 0, -1)]


def with_bases(part: Part) -> list[Part]:
    links = [link for line in part.begins("As ") if (link := LINK.match(line))]
    return [part, *(CONFIGURATION[link[3]] for link in links)]


def missing_keys(place: Place, parts: list[Part]) -> list[str]:
    keys = [one.alias or key for key, one in config_page.keys_of(place.model).items()]
    return [key for key in keys if not any(line.startswith(f"`{key}`|") for part in parts for line in part.lines)]


@pytest.mark.parametrize(("title", "model"), [(title, path) for title, path, _ in config_page.FILES])
def test_each_key_of_a_file_is_explained(title: str, model: str) -> None:
    whole = Place(title, "", config_page.load(model))
    faults = {place.name: missing_keys(place, sections_of(title, place.name)) for place in [whole, *whole.all_below()]}
    assert {name: keys for name, keys in faults.items() if keys} == {}


@pytest.mark.parametrize("kind", SECTIONS)
def test_each_key_of_an_algorithm_is_explained(kind: Kind) -> None:
    parts = [part for part in CONFIGURATION.values() if re.match(rf"`\[+algorithm\.(KIND|{kind})\b", part.heading)]
    for place in [top := Place("train.toml", f"algorithm.{kind}", SECTIONS[kind]), *top.all_below()]:
        last = place.name.removeprefix(top.name)
        own = [part for part in parts if re.sub(r"`?\[+|\]+`?.*", "", part.heading).endswith(last.removesuffix("[]"))]
        as_other = [place for place in ("dataset",) if last == f".eval_{place}"]
        own += [part for part in parts for other in as_other if f"KIND.{other}]" in part.heading]
        assert missing_keys(place, own) == [], place.name


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text(
        "# Two `words`\n[a](#two-words) [b](one.md#two-words) [c](#three)\n```\n[d](no.md)\n```\n"
    )
    assert pages.broken_links(tmp_path) == ["one.md:2: #three leads nowhere"]
    (fault,) = pages.over_budget(tmp_path, budget=8)
    assert "1 over the budget" in fault and pages.over_budget(tmp_path, budget=9) == []
