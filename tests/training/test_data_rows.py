"""Rows of training data: every shape, and every way to get one wrong, said with the file and the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import InputError
from rollout.model.problems import faults_of
from rollout.workloads.port import InputReader
from rollout.workloads.train.base_config import DatasetSection
from rollout.workloads.train.config import Kind
from rollout.workloads.train.data import Data, read_data
from rollout.workloads.train.rows import LossOn, PairRow, TextRow, UnpairedRow, content_of, parse_row

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def shape(kind: Kind, row: Any, loss_on: LossOn = "completion_only") -> list[Any]:
    return parse_row(kind, row, loss_on)


@pytest.mark.parametrize("kind", ["rm", "dpo", "ipo"])
def test_pairs_have_an_explicit_or_an_implicit_prompt(kind: Kind) -> None:
    assert shape(kind, {"prompt": "p", "chosen": "a", "rejected": "b"}) == [PairRow("p", "a", "b")]
    other = {"role": "assistant", "content": "go away"}
    row = {"chosen": [USER, ASSISTANT], "rejected": [USER, other], "margin": 2}
    assert shape(kind, row) == [PairRow([USER], [ASSISTANT], [other], 2)]


def test_a_reward_model_may_have_whole_texts() -> None:
    assert shape("rm", {"chosen": "a", "rejected": "b"}) == [PairRow(None, "a", "b")]


def test_kto_takes_a_pair_apart() -> None:
    assert shape("kto", {"prompt": "p", "chosen": "a", "rejected": "b"}) == [
        UnpairedRow("p", "a", True),
        UnpairedRow("p", "b", False),
    ]


def test_null_is_no_key() -> None:
    message = {"role": "assistant", "content": "hello", "tool_calls": None}
    row = {"prompt": None, "messages": [USER, message], "tools": None}
    assert shape("sft", row) == [TextRow([USER, ASSISTANT])]


def test_content_is_the_same_however_it_was_written() -> None:
    one = shape("sft", {"messages": [USER, ASSISTANT], "id": 7})[0]
    other = shape("sft", {"messages": [dict(reversed(USER.items())), ASSISTANT], "tools": None})[0]
    assert content_of(one) == content_of(other) != content_of(shape("sft", {"text": "hi"})[0])


def conversation(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
UNPAIRED = {"prompt": "p", "completion": "c", "label": True}
BROKEN: list[tuple[str, Any, str]] = [
    # ---- of no shape
    ("sft", 3, 'a row must be a JSON object with "prompt" and "completion", "messages", or "text", not a number'),
    ("sft", [], "not a list"),
    ("sft", {}, 'the row has no "prompt" and "completion", "messages", or "text" (it is empty)'),
    ("sft", {"Text": "a", "id": 3}, "(it has 'Text', 'id')"),
    ("sft", {"chosen": "a", "rejected": "b"}, "(it looks like a row for dpo)"),
    ("sft", PAIR, 'no "completion": add it (it looks like a row for dpo)'),
    ("sft", {"conversations": [{"from": "human", "value": "x"}]}, 'call that "messages"'),
    ("sft", {"prompt": "a"}, 'the row has "prompt" and no "completion": add it'),
    ("sft", {"text": "a", "messages": [USER]}, 'the row has "text" and "messages": keep one of them'),
    ("dpo", {"prompt": "p", "chosen": "a"}, 'the row has no "rejected": it needs "prompt", "chosen" and "rejected"'),
    ("dpo", {"prompt": "p"}, 'the row has no "chosen" and no "rejected"'),
    ("dpo", {"chosen": "a", "rejected": "b"}, 'the row has no "prompt": what chosen and rejected answer is needed'),
    ("ipo", {"prompt": "p", "completion": "c"}, "(it looks like a row for sft)"),
    ("ipo", UNPAIRED, "(it looks like a row for kto)"),
    ("rm", {"messages": [USER, ASSISTANT]}, "(it looks like a row for sft)"),
    ("rm", {"chosen": "a"}, 'it needs "chosen" and "rejected", with or without "prompt"'),
    ("kto", {"prompt": "p", "completion": "c"}, 'the row has no "label": it needs "prompt", "completion" and "label"'),
    ("kto", {"chosen": "a", "rejected": "b"}, 'the row has no "prompt"'),
    # ---- values of other types
    ("sft", {"text": 3}, '"text" must be a string, not a number'),
    ("sft", {"text": None}, "the row has no"),
    ("sft", {"prompt": 3, "completion": "c"}, '"prompt" must be a string or a list of messages, not a number'),
    ("sft", {"prompt": "p", "completion": {"a": 1}}, '"completion" must be a string or a list of messages, not an object'),
    ("sft", {"prompt": "p", "completion": [ASSISTANT]}, '"prompt" is a string and "completion" a list of messages: make'),
    ("sft", {"messages": "hi"}, '"messages" must be a list of messages, not a string'),
    ("sft", {**conversation(USER, ASSISTANT), "tools": "add"}, '"tools" must be a list, not a string'),
    ("dpo", {**PAIR, "chosen": [ASSISTANT]}, '"chosen" is a list of messages and "rejected" a string'),
    ("dpo", {**PAIR, "prompt": [USER]}, '"prompt" is a list of messages and "chosen" a string'),
    ("rm", {**PAIR, "margin": "1"}, '"margin" must be a number, not a string'),
    ("rm", {**PAIR, "margin": True}, '"margin" must be a number, not a boolean'),
    ("rm", {**PAIR, "margin": float("nan")}, '"margin" must be a finite number, not nan'),
    ("rm", {**PAIR, "margin": -1e39}, '"margin" must be a finite number of at most 1e+30, not -1e+39'),
    ("rm", {**PAIR, "margin": 10**400}, '"margin" must be a finite number of at most 1e+30, not 1000'),
    ("kto", {**UNPAIRED, "label": 1}, '"label" must be true or false, not a number'),
    ("kto", {**UNPAIRED, "label": "good"}, '"label" must be true or false, not a string'),
    ("kto", {**UNPAIRED, "label": None}, 'the row has no "label"'),
    # ---- messages
    ("sft", {"messages": []}, '"messages" is an empty list: it needs at least one message'),
    ("sft", conversation("hi"), '"messages": message 1 must be an object with "role" and "content", not a string'),
    ("sft", conversation({"content": "hi"}), '"messages": message 1 has no "role"'),
    ("sft", conversation({"from": "human", "value": "x"}), 'has no "role" (it has "from" and "value": rename them)'),
    ("sft", conversation(USER, {"role": "assistant"}), '"messages": message 2 has no "content"'),
    ("sft", conversation(USER, {"role": "gpt", "content": "x"}), 'the unknown role "gpt"; did you mean "assistant"?'),
    ("sft", conversation({"role": "critic", "content": "x"}), "roles are system, developer, user, assistant, tool, function"),
    ("sft", conversation({"role": 3, "content": "x"}), '"role" must be a string, not a number'),
    ("sft", conversation({"role": "user", "content": 3}), '"content" must be a string, not a number'),
    ("sft", conversation({"role": "user", "content": [{"type": "image"}]}), "a part that is not text: only text"),
    ("sft", conversation(USER), '"messages": the last message is of the user, not of the assistant: there is no answer'),
    ("sft", conversation(ASSISTANT), '"messages" has only an answer: put what it answers before it'),
    ("dpo", {"prompt": [USER], "chosen": [USER], "rejected": [ASSISTANT]}, '"chosen": the last message is of the user'),
    ("kto", {"prompt": [USER], "completion": [], "label": True}, '"completion" is an empty list'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "message"), BROKEN)
def test_what_is_wrong_with_a_row(kind: Kind, row: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        shape(kind, row)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "plain"}, "needs rows of messages"),
        ({"prompt": "p", "completion": "c"}, "needs rows of messages"),
        (conversation(USER), "no message is of the assistant"),
    ],
)
def test_rows_in_which_the_assistant_says_nothing(row: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shape("sft", row, "assistant_only")


# ---- files


def read(path: Path | list[str], kind: Kind = "sft", **more: Any) -> Data:
    paths = [str(path)] if isinstance(path, Path) else path
    section = DatasetSection.model_validate({"path": paths, **more})
    data = read_data(kind, section, InputReader(exclude=Path("out")), key=f"algorithm.{kind}.dataset")
    data.close()
    return data


GOOD = json.dumps({"prompt": "p", "completion": "c"}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the input is empty: no row in "),
        (b"\n \n", "the input is empty: no row in "),
        (GOOD + b"\n{\xff}\n", ":2: not UTF-8 at byte 1 of the line: save it as UTF-8"),
        ("{}".encode("utf-16"), ":1: it looks like UTF-16"),
        (GOOD + b"\n\n[1,\n", ":3: malformed JSON: the line ends before the list that begins at column 1 is closed"),
        (GOOD + b'\n{"text": "a", "text": "b"}\n', ":2: the key 'text' stands twice in one object: keep one"),
        (b'{"chosen": "a", "rejected": "b", "margin": NaN}', ":1: malformed JSON: NaN is no JSON number"),
        (GOOD[:-1] + b', "x": 1e999}', "the number 1e999 is too large"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read(path)
    assert message in error.value.message and str(path) in error.value.message


HALF = "a\ud83dc>"
SAYS_HALF: list[tuple[Kind, Any]] = [
    ("sft", {"text": HALF}),
    ("sft", {"prompt": HALF, "completion": "c"}),
    ("sft", {"prompt": "p", "completion": HALF}),
    ("sft", {"messages": [{"role": "user", "content": HALF}, ASSISTANT]}),
    ("sft", {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}, ASSISTANT]}),
    ("sft", {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": HALF}}]}]}),
    ("sft", {"messages": [USER, ASSISTANT], "tools": [{HALF: 1}]}),
    *(("dpo", {**PAIR, key: HALF}) for key in PAIR),
    ("kto", {**UNPAIRED, "completion": HALF}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row"), SAYS_HALF)
def test_half_of_a_surrogate_pair_is_refused_in_every_text(tmp_path: Path, kind: Kind, row: Any) -> None:
    path = tmp_path / "rows.jsonl"
    whole = json.loads(json.dumps(row).replace(json.dumps(HALF), json.dumps("\U0001f600")))
    path.write_text(f"{json.dumps({**whole, 'id': HALF})}\n{json.dumps(row)}\n")  # an id is not trained on
    with pytest.raises(InputError) as error:
        read(path, kind)
    what = "the text holds half of a surrogate pair, which is no Unicode: repair the escape"
    assert error.value.message == f"{path}:2: {what}"


def test_whether_some_row_is_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    assert not read(path).conversations
    path.write_bytes(GOOD + b"\n" + json.dumps(conversation(USER, ASSISTANT)).encode() + b"\n" + GOOD)
    assert read(path).conversations


def test_a_byte_order_mark_and_line_ends_of_windows_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD)
    assert read(path).rows == 2


def test_all_faults_of_all_files_at_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(GOOD + b'\n{"text": 3}\n' + GOOD + b'\n{"prompt": "p"}\n')
    with pytest.raises(InputError) as error:
        read(tmp_path)
    first, second = faults_of(error.value.message.replace(f"{tmp_path}/", ""))
    assert first.startswith('a.jsonl:2, b.jsonl:2 (2 rows): "text" ')
    assert second.startswith("a.jsonl:4, b.jsonl:4 (2 rows): ") and 'no "completion"' in second


def test_one_fault_of_many_rows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "p"}\n' * 999 + GOOD + b'\n{"prompt": "p"}\n{"prompt":')
    with pytest.raises(InputError) as error:
        read(tmp_path / "a.jsonl")
    head, rows, last = error.value.message.replace(f"{tmp_path}/", "").split("\n")
    assert head == "2 problems:"
    assert rows.startswith("  a.jsonl:1-999, 1001 (1,000 rows): ") and 'no "completion"' in rows
    assert last.startswith("  a.jsonl:1002: malformed JSON: ")


def test_files_patterns_and_directories_in_order(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("d/2.jsonl", "d/1.jsonl", "a.jsonl"):
        (tmp_path / name).write_bytes(GOOD + b"\n")
    (tmp_path / "d/3.jsonl.gz").write_bytes(gzip.compress(GOOD * 1 + b"\n" + GOOD))
    (tmp_path / "d/notes.txt").write_text("no rows")
    data = read([str(tmp_path / "a*.jsonl"), str(tmp_path / "d")])
    assert [Path(name).name for _, name in data.tables] == ["a.jsonl", "1.jsonl", "2.jsonl", "3.jsonl.gz"]
    assert [name for name, _ in data.files] == ["00000-a.jsonl", "00001-1.jsonl", "00002-2.jsonl", "00003-3.jsonl.gz"]
    assert data.rows == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none*.jsonl", "algorithm.sft.dataset.path: no file matches"),
        ("rows.json", "did you mean"),
        ("empty", "algorithm.sft.dataset.path: no .jsonl"),
    ],
)
def test_where_there_are_no_rows(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    with pytest.raises(InputError) as error:
        read([str(tmp_path / path)])
    assert message in error.value.message
