"""Rows: forms they take, and one message per way they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infer_input import check_input
from rollout.model.errors import InputError
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.request import parse_row, row_seed
from rollout.workloads.port import InputReader


def config(glob: str | list[str], **sections: Any) -> InferConfig:
    base = {"model": {"uri": "m"}, "input": {"glob": glob}, "output": {"dir": "o"}, "backend": {"kind": "mock"}}
    return InferConfig.model_validate({**base, **sections})


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "x"',
            "malformed JSON: the line ends before the object that begins at column 1 is closed: it was cut off",
        ),
        (
            '{"a": ["b", {"c]": 1}, ',
            r"the line ends before the list that begins at column 7 is closed: .*, or a ] is miss",
        ),
        ('{"prompt": "x', "the line ends before the string that begins at column 12 is closed"),
        ('{"prompt": "x" "y"}', "malformed JSON: a comma is missing at column"),
        ("[1]", "a row must be a JSON object such as .*, not a list"),
        ('{"prompt": NaN}', "NaN is no JSON number"),
        ("[" * 200_000, "nested too deeply"),
        ('{"text": "x"}', 'no "prompt", "messages", "embed" or "body"'),
        ('{"prompt": null}', 'no "prompt", "messages", "embed" or "body"'),
        ('{"prompt": 3}', '"prompt" must be a string, .* not a number'),
        ('{"prompt": "x", "messages": []}', 'both "prompt" and "messages"'),
        ('{"messages": []}', "is an empty list"),
        ('{"messages": ["x"]}', r'"messages\[0\]" must be an object'),
        ('{"messages": [{"content": "x"}]}', 'needs a "role"'),
        ('{"messages": [{"role": "user"}]}', "must be a string or a list of parts, not null"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "needs a url"),
        ('{"prompt": "x", "sampling": {"temprature": 1}}', 'unknown key "temprature"; did you mean "temperature"'),
        ('{"prompt": "x", "sampling": {"top_p": 2}}', '"sampling.top_p"'),
        ('{"prompt": "x", "sampling": {"max_tokens": "5"}}', '"sampling.max_tokens"'),
        ('{"prompt": "x", "sampling": {"json_schema": "a.json"}}', "must be the schema itself"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "x", "id": [1]}', '"id" must be a string or an integer'),
        ('{"body": {"prompt": "x"}}', '"custom_id"'),
        ('{"custom_id": "a", "url": "/v1/audio", "body": {}}', '"url" must be'),
        ('{"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "x"}}', '"body.messages" is missing'),
        ('{"custom_id": "a", "body": {"prompt": "x", "tools": []}}', '"body.tools" is not supported'),
        ('{"custom_id": "a", "body": {"prompt": "x", "stream": true}}', "does not stream"),
        ('{"custom_id": "a", "body": {"prompt": "x", "n": 0}}', '"body.n"'),
        ('{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}}', "needs"),
        ('{"custom_id": "a", "body": {"prompt": "x", "response_format": {"type": "grammar"}}}', "response_format"),
    ],
)
def test_bad_row_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(InputError, match=message) as error:
        check_input(config(str(path)))
    assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("id", {"prompt": "x", "id": "a"}),
        ("custom_id", {"body": {"prompt": "x"}, "custom_id": "a"}),
        ("custom_id", {"prompt": "x", "custom_id": "a"}),
    ],
)
def test_duplicate_id_across_files(tmp_path: Path, key: str, row: dict[str, Any]) -> None:
    write(tmp_path / "1.jsonl", row)
    path = write(tmp_path / "2.jsonl", {"prompt": "y"}, row)
    with pytest.raises(InputError, match=f"2.jsonl:2: .*{key}.* is used by .* already"):
        check_input(config(str(path.parent / "*.jsonl")))


def test_sampling_of_a_row() -> None:
    defaults = SamplingSection(temperature=0.5, max_tokens=10)
    plain = parse_row({"prompt": "x", "temperature": 30, "stop": "is data"}, defaults, "mock")
    assert plain.sampling == defaults and not plain.explicit_seed
    own = parse_row({"prompt": "x", "sampling": {"temperature": 0, "stop": "\n", "seed": 7}}, defaults, "mock")
    assert (own.sampling.temperature, own.sampling.stop, own.sampling.max_tokens) == (0, ["\n"], 10)
    assert row_seed(own, b"i" * 32) == 7
    assert row_seed(plain, b"i" * 32) != row_seed(plain, b"j" * 32)
    body = {"model": "gpt", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 2}
    body |= {
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_object"},
    }
    line = parse_row(
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}, defaults, "mock"
    )
    assert line.messages == ({"role": "user", "content": "hi"},)
    s = line.sampling
    assert (s.max_tokens, s.logprobs, s.n, s.json_schema, s.temperature) == (5, 3, 2, {"type": "object"}, 0.5)


def test_adapters_are_those_of_the_run(tmp_path: Path) -> None:
    loras = {"model": {"uri": "m", "loras": {"sql": "a"}}}
    row = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "model": "sql"}}
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "lora": "sql"}, row)
    assert check_input(config(str(path), **loras)).rows == 2
    write(path, {"prompt": "x"}, {"prompt": "x", "lora": "sqll"}, {"prompt": "x", "lora": 5})
    with pytest.raises(InputError) as error:
        check_input(config(str(path), **loras))
    first, second, *_ = error.value.message.splitlines()[1:]
    assert ":2: " in first and '"sql"' in first and ":3: " in second
    assert check_input(config(str(path))).rows == 3
    write(path, {**row, "body": {"prompt": "x", "model": "b"}})
    with pytest.raises(InputError, match="'b', and this run's model is \"m\""):
        check_input(config(str(path), **loras))


def test_parameters_beside_the_prompt_are_noted(tmp_path: Path) -> None:
    given = [{"prompt": "x", "max_tokens": 5, "n": 1}, {"prompt": "y", "max_tokens": 5, "seed": 2}, {"prompt": "z"}]
    notes: list[tuple[str, ...]] = []
    for chosen in (given, given[2:]):
        settings = config(str(write(tmp_path / "a.jsonl", *chosen)))
        source = rows.check_input(settings, InputReader(exclude=tmp_path / "out")).source
        assert source is not None
        with source:
            notes.append(tuple(source.notes))
    ((note,), none) = notes
    assert "max_tokens (2 rows), seed (1 row);" in note and " n " not in note and none == ()
