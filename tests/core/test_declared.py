"""What a settings model declares of a key: option, argument, help, bounds, and what a run that goes on makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from rollout.cli.program import command_of
from rollout.cli.work_command import Typed, work_command
from rollout.config.declared import FOLLOWED, KEPT, Setting, on_resume
from rollout.config.section import Section
from rollout.model.errors import ConfigError


class What(Section):
    name: Annotated[str, Setting("THING")] = Field(description="A thing.")
    files: Annotated[str | list[str], Setting("--input", "FILE")] = Field(description="Files.")
    bad: Annotated[Literal["error", "skip"], Setting("--bad")] = Field(default="error", description="Bad rows.")


class How(Section):
    tries: Annotated[int, Setting("--tries", on_resume="follow", stored="limits.tries")] = Field(
        default=3, ge=0, le=9, description="Tries."
    )
    fast: Annotated[bool, Setting("--fast", on_resume="keep")] = Field(default=False, description="Fast.")
    label: Annotated[str, KEPT] = Field(default="", description="Label.")
    limit: Annotated[int, FOLLOWED] = Field(default=0, description="Limit.")
    plain: int = Field(default=0, description="Plain.")


class Both(Section):
    what: What
    how: How = How()


def called(*words: str) -> Any:
    app, seen = typer.Typer(), []

    @app.command()
    @work_command(Both, without=["detach"])
    def act(typed: Typed, config: Annotated[Path | None, typer.Option("--config", help="File.")] = None) -> None:
        """Act."""
        if config is None:
            typed.require()
        seen.append((typed.given, typed.words("act", config=config), typed.shared))

    command_of(app, "rollout")(list(words), standalone_mode=False)
    return seen[0]


def test_options_become_dotted_keys_and_the_words_to_repeat_them() -> None:
    given, words, shared = called("x", "--input", "a", "--input", "b", "--tries", "0", "--fast", "--workers", "2")
    assert given == {
        "what.name": "x", "what.files": ["a", "b"], "what.bad": None, "how.tries": 0, "how.fast": True,
    }  # fmt: skip
    assert words == ("rollout", "act", "x", "--input", "a", "--input", "b", "--tries", "0", "--fast")
    assert shared["workers"] == 2 and "detach" not in shared


def test_what_is_required_and_not_given_is_told_at_once_unless_there_is_a_file() -> None:
    with pytest.raises(ConfigError, match="THING and --input must be given, or a file"):
        called()
    assert called("--config", "f")[1] == ("rollout", "act", "--config", "f")


def test_bounds_are_of_the_command_line_too() -> None:
    with pytest.raises(Exception, match="9"):
        called("x", "--input", "a", "--tries", "10")


def test_a_new_value_is_kept_followed_or_makes_another_run() -> None:
    assert on_resume(Both, "keep") == {"how.fast": "--fast", "how.label": "how.label"}
    assert on_resume(Both, "follow") == {"limits.tries": "--tries", "how.limit": "how.limit"}


def test_a_section_may_keep_what_follows_elsewhere() -> None:
    class Other(Section):
        how: Annotated[How, KEPT] = How()

    assert on_resume(Other, "follow") == {}
    assert on_resume(Other, "keep").keys() == {"limits.tries", "how.fast", "how.label", "how.limit"}
    assert on_resume(Both, "follow").keys() == {"limits.tries", "how.limit"}
