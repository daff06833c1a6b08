"""YAML as it is read here: the values of YAML 1.2, lines of keys, and everything that is wrong at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from located import places
from rollout.config.load import load_settings
from rollout.config.section import Section
from rollout.config.written import Flag, Text
from rollout.config.yaml import YamlError, parse_yaml
from rollout.model.errors import ConfigError


def values(text: str) -> dict[str, Any]:
    return parse_yaml(text)[0]


def faults(text: str) -> list[tuple[int, str]]:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    return caught.value.faults


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "NO", "y", "1:30", "2026-01-02", "0777x", "<", "="])
def test_words_that_yaml_1_1_takes_for_something_else_are_text(word: str) -> None:
    assert values(f"key: {word}") == {"key": word}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("1e-3", 0.001),
        ("0x1F", 31),
        ("0o17", 15),
        ("-4", -4),
    ],
)
def test_what_is_not_text(written: str, value: object) -> None:
    assert values(f"key: {written}") == {"key": value}


def test_lines_of_keys_and_items() -> None:
    _, lines = parse_yaml("a: 1\n\nb:\n  - c: 2\n    d: 3\n  - {e: 4}\n")
    assert lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 0, "c"): 4,
        ("b", 0, "d"): 5,
        ("b", 1): 6,
        ("b", 1, "e"): 6,
    }


def test_merged_keys_give_way_to_those_that_stand_there() -> None:
    text = "base: &base {a: 1, b: 2}\nother: &other {b: 3, c: 4}\nall:\n  a: 9\n  <<: [*base, *other]\n"
    parsed, lines = parse_yaml(text)
    assert parsed["all"] == {"a": 9, "b": 2, "c": 4}
    assert (lines["all", "a"], lines["all", "b"], lines["all", "c"]) == (4, 1, 2)


def test_an_anchor_may_be_set_anew() -> None:
    assert values("a: &x 1\nb: *x\nc: &x 2\nd: *x\n") == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_every_duplicate_key_is_told() -> None:
    assert faults("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        (2, 'the key "c" stands here and on line 2: keep one'),
        (3, 'the key "a" stands here and on line 1: keep one'),
    ]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("- a\n", 1, "the file must hold keys and values"),
        ("a:\n\t- 1\n", 2, "found character '\\t' that cannot start any token"),
        ("a: 1\nb: [1,\n", 3, "not valid YAML"),
        ("a: b: c\n", 1, "mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", 3, "a second document"),
        ("a: !!python/object/apply:os.system [id]\n", 1, "the tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !secret x\n", 1, "the tag !secret means nothing here"),
        ("? [1]\n: 2\n", 1, "a key must be plain text"),
        ("a: .nan\n", 1, '".nan" is no number'),
        ("a: 1e999\n", 1, '"1e999" is no number'),
        (f"a: {'9' * 5000}\n", 1, "is no number"),
        ("a: !!int\n", 1, '"" is no number'),
        ("a: *b\n", 1, "undefined alias"),
        ("a: &a [*a]\n", 1, "an alias (*name) inside the value it stands for"),
        ("a: 1\n<<: 3\n", 2, "<< takes a mapping"),
        (f"a: {'[' * 1500}\n", 1, "nested"),
        (f"a: {'[' * 150}{']' * 150}\n", 1, "nested more than 100 levels deep"),
    ],
)
def test_what_cannot_be_used(text: str, line: int, what: str) -> None:
    (found,) = faults(text)
    assert found[0] == line
    assert what in found[1]


def test_aliases_that_stand_for_billions_of_values_are_refused() -> None:
    levels = [f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(12)]
    (found,) = faults("\n".join(["a: &a [x]", *levels]))
    assert "more than 200,000 values" in found[1]


_TOKENS = [
    "a",
    ":",
    " ",
    "\n",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "&x",
    "*x",
    "!",
    "!!int",
    "'",
    '"',
    "|",
    "#",
    "? ",
    "---",
]
_TOKENS += [
    "%YAML 1.1\n",
    "<<",
    "\t",
    "1e5",
    "0x",
    "~",
    ".inf",
    "\\",
    "\u2028",
    "\ufeff",
    "=",
    "@",
    "2001-01-01",
    "\U0001f600",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(_TOKENS), max_size=14).map("".join))
def test_whatever_stands_in_a_file_is_read_or_told(text: str) -> None:
    try:
        parsed, lines = parse_yaml(text)
    except YamlError as error:
        assert error.faults
    else:
        assert set(parsed) == {place[0] for place in lines}


class Settings(Section):
    in_yaml: ClassVar[bool] = True
    text: Text = ""
    flag: Flag = False
    env: dict[str, Text] = {}


def load(tmp_path: Path, text: str, name: str = "c.yaml") -> Settings:
    path = tmp_path / name
    path.write_text(text)
    return load_settings(Settings, path, environ={})


def test_text_keeps_numbers_as_they_are_written(tmp_path: Path) -> None:
    found = load(tmp_path, "text: 1.10\nenv: {PORT: 8080, MODE: 0644, ON: yes, OFF: false}\n")
    assert found == Settings(text="1.10", env={"PORT": "8080", "MODE": "0644", "ON": "yes", "OFF": "false"})


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("off", False), ("No", False), ("true", True)])
def test_a_key_of_true_or_false_takes_the_words_of_yaml_1_1(tmp_path: Path, word: str, value: bool) -> None:
    assert load(tmp_path, f"flag: {word}\n").flag is value


def test_json_is_read_as_what_it_is_a_part_of(tmp_path: Path) -> None:
    assert load(tmp_path, '{"flag": true, "text": "a"}', "c.json") == Settings(flag=True, text="a")


def test_faults_of_values_have_their_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "flag: maybe\nfalg: true\nenv:\n  A: [1]\n")
    found = places(str(caught.value).replace(f"{tmp_path}/", ""))
    assert found == ["c.yaml:1: flag", "c.yaml:2: falg", "c.yaml:4: env.A"]
