"""Every command of the three programs: its help, its options, its place in the documentation."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout.cli import groups
from rollout.cli.program import command_of
from rollout.config.environment import OTHERS
from rollout.config.secret_names import SECRET_PREFIX

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "rollout": "rollout.cli.__main__",
    "rollout-coordinator": "rollout_coordinator.__main__",
    "rollout-worker": "rollout_worker.__main__",
}
BRACKETS = re.compile(r"\[[a-z_.]+\]")


def commands() -> Iterator[tuple[str, Any, Any]]:
    """(how it is called, the command, its context)"""
    for program, module in PROGRAMS.items():
        root = command_of(importlib.import_module(module).app, program)
        yield from below(program, root, None)


def below(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    context = command.context_class(command, info_name=name.split()[-1], parent=parent, **command.context_settings)
    yield name, command, context
    for child in getattr(command, "list_commands", lambda _: [])(context):
        yield from below(f"{name} {child}", command.get_command(context, child), context)


ALL = list(commands())


@pytest.mark.parametrize(("name", "command", "context"), ALL, ids=[name for name, _, _ in ALL])
def test_help_says_what_is_written(name: str, command: Any, context: Any) -> None:
    text = " ".join(command.get_help(context).split())
    assert "-h, --help" in text and "--version" in text
    written = [command.help or "", *(getattr(parameter, "help", "") or "" for parameter in command.params)]
    for wanted in BRACKETS.findall(" ".join(written)):
        assert wanted in text, f"{name} -h leaves out {wanted}"
    for parameter in command.params:
        assert (getattr(parameter, "help", "") or "").strip(), f"{name} {parameter.name} has no help"


def test_lists_of_commands_are_not_cut() -> None:
    for name, command, context in ALL:
        if getattr(command, "commands", None):
            listed = command.get_help(context).partition("\nCommands:\n")[2]
            assert listed and "..." not in listed and max(map(len, listed.splitlines())) <= 80, name


def test_the_words_of_other_tools_lead_to_a_command_that_there_is() -> None:
    known = {name: command for name, command, _ in ALL}
    for group, instead in groups.INSTEAD.items():
        for line, words in instead.items():
            called = next(name for name in sorted(known, key=len, reverse=True) if f"{line} ".startswith(f"{name} "))
            options = {option for parameter in known[called].params for option in parameter.opts}
            assert {word for word in line.split() if word.startswith("--")} <= options, line
            for word in words:
                assert f"{group} {word}" not in known, f"{group} {word} is a command"
                assert groups.instead_of(group, word) == line, f"{group} {word} means two commands"


def test_a_word_of_another_tool_is_answered() -> None:
    _, run, context = next(one for one in ALL if one[0] == "rollout run")
    for word, said in (("status", "`rollout run show`"), ("help", "`rollout run -h`"), ("lst", "Did you mean 'list'?")):
        with pytest.raises(Exception, match=re.escape(said)):
            run.resolve_command(context, [word, "x"])


def test_every_variable_that_is_no_key_is_known() -> None:
    used: set[str] = set()
    for package in ("common/rollout", "coordinator/rollout_coordinator", "worker/rollout_worker"):
        for path in (ROOT / package).rglob("*.py"):
            used |= set(re.findall(r"\"(ROLLOUT_[A-Z]+(?:_[A-Z]+)*)\"", path.read_text()))
    assert {name for name in used if not name.startswith(SECRET_PREFIX)} - set(OTHERS) == set()
    page = (ROOT / "docs/cli.md").read_text()
    assert [name for name in OTHERS if name not in page] == []


def test_help_of_the_program_imports_no_command_and_no_workload() -> None:
    """Half a second of every `rollout --help` and of every completion was theirs."""
    code = "import sys, rollout.cli.__main__ as m; sys.argv = ['rollout', '--help']\ntry: m.main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert not modules & {"pydantic", "structlog", "rich.console", "grpc", "asyncio", "rollout.cli.commands.run"}
    assert not {name for name in modules if name.startswith("rollout.workloads.") and name.endswith(".workload")}
