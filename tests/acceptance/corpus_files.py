"""Files as people have them, good and bad: bytes as programs write them, and what becomes of them.

In code, not as files: line ends, byte order marks and the bytes of other encodings are part of the case.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from backports import zstd

Json = dict[str, Any]


@dataclass(frozen=True)
class Good:
    """`rows`: of each row of the output what it has at least. `options`: of [input]."""

    name: str
    data: bytes | Callable[[Path], object]
    rows: Sequence[Json]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Bad:
    """`faults`: line or row (None: of the file), and words of the message."""

    name: str
    data: bytes | Callable[[Path], object]
    faults: Sequence[tuple[int | None, str]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def chat(custom_id: str, **body: Any) -> Json:
    asked = {"messages": [{"role": "user", "content": "What is the weather like in Paris today?"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def table(columns: Mapping[str, Any], **how: Any) -> Callable[[Path], object]:
    return lambda path: parquet.write_table(pa.table(dict(columns)), path, **how)


def cut_table(path: Path) -> None:
    table({"prompt": ["a", "b"]})(path)
    path.write_bytes(path.read_bytes()[:-20])


def dataset(splits: Mapping[str, Mapping[str, list[Any]]]) -> Callable[[Path], object]:
    """As `DatasetDict.save_to_disk` writes it."""

    def write(path: Path) -> None:
        path.mkdir()
        (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
        for name, columns in splits.items():
            (path / name).mkdir()
            found = pa.table(dict(columns))
            out = io.BytesIO()
            with pa.ipc.new_stream(out, found.schema) as stream:
                stream.write_table(found)
            (path / name / "data-00000-of-00001.arrow").write_bytes(out.getvalue())
            state = {
                "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
                "_split": name,
                "_indices_data_files": None,
            }
            (path / name / "state.json").write_text(json.dumps(state))
            (path / name / "dataset_info.json").write_text("{}")

    return write


def workbook() -> bytes:
    """What Excel writes, as far as a reader of lines sees: a zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("[Content_Types].xml", "<Types/>")
    return out.getvalue()


PROMPTS = jsonl({"prompt": "a"}, {"prompt": "b"})
AB = [{"prompt": "a"}, {"prompt": "b"}]
NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)

# From OpenAI's guide to function calling.
OPENAI_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"}},
            "required": ["location"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
# From Mistral's.
MISTRAL_TOOL = {
    "type": "function",
    "function": {
        "name": "retrieve_payment_status",
        "description": "Get payment status of a transaction",
        "parameters": {
            "type": "object",
            "properties": {"transaction_id": {"type": "string", "description": "The transaction id."}},
            "required": ["transaction_id"],
        },
    },
}
# From Qwen's, with a unit that is null in Python's way of making schemas.
QWEN_TOOL = {
    "type": "function",
    "function": {
        "name": "get_temperature_date",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string"},
                "date": {"type": "string", "description": 'The date as "Year-Month-Day".'},
                "unit": {"anyOf": [{"enum": ["celsius", "fahrenheit"]}, {"type": "null"}], "default": None},
            },
            "required": ["location", "date"],
        },
    },
}
CALLED = [
    {"role": "user", "content": "What is the weather like in Paris today?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"location": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 14}'},
]

GOOD = [
    # CSV and TSV
    Good("bom.csv", "\ufeffprompt,tag\r\na,x\r\nb,y\r\n".encode(), [{"prompt": "a", "tag": "x"}, {"prompt": "b"}]),
    Good("newlines.csv", b'prompt,tag\n"a\nsecond line",x\nb,"y\r\nz"\n', [{"prompt": "a\nsecond line"}, {"tag": "y\r\nz"}]),
    Good("quotes.csv", b'prompt\n"say ""a"", then b"\n', [{"prompt": 'say "a", then b'}]),
    Good("blank-lines.csv", b"prompt\n\na\n\n\nb", AB),
    Good("empty-cells.csv", b"prompt,tag,score\na,,\nb,x,0.50\n", [{"prompt": "a"}, {"tag": "x", "score": "0.50"}]),
    Good("numbers.csv", b"id,prompt,zip\n007,a,01234\n1e5,b,1\n", [{"id": "007", "zip": "01234"}, {"id": "1e5"}]),
    Good("words.csv", "prompt,größe\nÜbersetze: 猫,ß\n".encode(), [{"prompt": "Übersetze: 猫", "größe": "ß"}]),
    Good("UPPER.CSV", b"prompt\r\na\r\nb\r\n", AB),
    Good("long-cell.csv", b'prompt,text\na,"' + b"word, " * 40_000 + b'"\n', [{"prompt": "a"}]),
    Good("packed.csv.gz", gzip.compress(b"prompt\na\nb\n"), AB),
    Good("packed.csv.zst", zstd.compress(b"prompt\na\nb\n"), AB),
    Good("plain.tsv", b'prompt\ttag\na, b\t"x\ty"\n', [{"prompt": "a, b", "tag": "x\ty"}]),
    Good("columns.csv", b"n,question\n1,a\n2,b\n", [{"id": "1", "prompt": "a"}, {"id": "2"}], {"columns": {"question": "prompt", "n": "id"}}),
    Good("export.txt", b"prompt\na\nb\n", AB, {"format": "csv"}),
    # JSON Lines
    Good("bom.jsonl", b"\xef\xbb\xbf" + PROMPTS, AB),
    Good("crlf.jsonl", PROMPTS.replace(b"\n", b"\r\n"), AB),
    Good("no-final-newline.jsonl", PROMPTS[:-1], AB),
    Good("blank-lines.jsonl", b"\n" + PROMPTS.replace(b"\n", b"\n\n  \n"), AB),
    Good("packed.jsonl.gz", gzip.compress(PROMPTS), AB),
    Good("members.jsonl.gz", gzip.compress(PROMPTS[:16]) + gzip.compress(PROMPTS[16:]), AB),
    Good("packed.jsonl.zst", zstd.compress(PROMPTS), AB),
    Good("misnamed.jsonl", gzip.compress(PROMPTS), AB),
    Good("separators.jsonl", jsonl({"prompt": "a\u2028b\u0085c"}), [{"prompt": "a\u2028b\u0085c"}]),
    Good("escapes.jsonl", b'{"prompt": "\\ud83d\\ude00 caf\\u00e9"}\n', [{"prompt": "😀 café"}]),
    Good("big-numbers.jsonl", b'{"prompt": "a", "n": 12345678901234567890123}\n', [{"n": 12345678901234567890123}]),
    Good("ids.jsonl", jsonl({"id": 7, "prompt": "a"}, {"id": "x-7", "prompt": "b"}), [{"id": 7}, {"id": "x-7"}]),
    Good("nested.jsonl", jsonl({"prompt": "a", "meta": {"of": [1, {"x": None}]}}), [{"meta": {"of": [1, {"x": None}]}}]),
    Good("human-eval.jsonl", jsonl({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}), [{"task_id": "HumanEval/0"}]),
    Good("gsm8k.jsonl", jsonl({"question": "a", "answer": "#### 1"}), [{"prompt": "a", "answer": "#### 1"}], {"columns": {"question": "prompt"}}),
    Good("named.jsonl", jsonl({"messages": [{"role": "user", "name": "ann", "content": "a"}]}), [{"messages": [{"role": "user", "name": "ann", "content": "a"}]}]),
    Good("parts.jsonl", jsonl({"id": "in-parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}), [{"id": "in-parts"}]),
    # Lines of batch files, as their makers' guides have them
    Good("openai-batch.jsonl", jsonl(chat("request-1", model="gpt-4o-mini", max_tokens=16), chat("request-2", model="gpt-4o-mini", max_tokens=16)), [{"id": "request-1"}, {"id": "request-2"}], {"model_in_rows": "ignore"}),
    Good("vllm-batch.jsonl", jsonl(chat("vllm-1", max_completion_tokens=16, guided_choice=["yes", "no"])), [{"id": "vllm-1"}]),
    Good("openai-tools.jsonl", jsonl(chat("t-openai", tools=[OPENAI_TOOL], max_tokens=16)), [{"id": "t-openai"}]),
    Good("mistral-tools.jsonl", jsonl(chat("t-mistral", tools=[MISTRAL_TOOL], tool_choice="auto", parallel_tool_calls=False, max_tokens=16)), [{"id": "t-mistral"}]),
    Good("qwen-tools.jsonl", jsonl(chat("t-qwen", tools=[QWEN_TOOL, OPENAI_TOOL], tool_choice="none", max_tokens=16)), [{"id": "t-qwen"}]),
    Good("tool-results.jsonl", jsonl(chat("t-results", messages=CALLED, tools=[OPENAI_TOOL], max_tokens=16)), [{"id": "t-results"}]),
    Good("azure-batch.jsonl", jsonl({**chat("azure-1", max_tokens=16), "url": "/chat/completions"}), [{"id": "azure-1"}]),
    # Parquet, datasets
    Good("nested.parquet", table({"prompt": ["a"], "meta": [{"of": [1, 2], "x": {"y": "z"}}]}), [{"meta": {"of": [1, 2], "x": {"y": "z"}}}]),
    Good("chats.parquet", table({"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}), [{"messages": [{"role": "user", "content": "a"}]}, {}]),
    Good("types.parquet", table({"prompt": ["a"], "at": [NOON], "sum": [decimal.Decimal("1.50")], "raw": [b"\x00\x01"], "on": [NOON.date()]}), [{"at": "2026-01-02T12:00:00+00:00", "sum": "1.50", "raw": "AAE=", "on": "2026-01-02"}]),
    Good("groups.parquet", table({"prompt": ["a", "b"]}, row_group_size=1, compression="zstd"), AB),
    Good("categories.parquet", table({"prompt": pa.array(["a", "b"]).dictionary_encode(), "tag": pa.array(["x", None], pa.large_string())}), [{"prompt": "a", "tag": "x"}, {"prompt": "b"}]),
    Good("index.parquet", table({"prompt": ["a"], "__index_level_0__": [5]}), [{"__index_level_0__": 5}]),
    Good("parted", dataset({"train": {"prompt": ["a", "b"]}, "test": {"prompt": ["c"]}}), AB),
    Good("parted-test", dataset({"train": {"prompt": ["a"]}, "test": {"prompt": ["c"]}}), [{"prompt": "c"}], {"split": "test"}),
]  # fmt: skip

BAD = [
    # CSV and TSV
    Bad("semicolons.csv", b"prompt;tag\na;x\n", [(1, "';'")]),
    Bad("utf-16.csv", "prompt,tag\na,x\n".encode("utf-16"), [(1, "UTF-16")]),
    Bad("latin-1.csv", "prompt\na\ncafé\n".encode("latin-1"), [(3, "UTF-8")]),
    Bad("open-quote.csv", b'prompt,tag\na,"x\nb,y\n', [(2, "quote")]),
    Bad("more-cells.csv", b"prompt,tag\na,x\nb, or c,y\n", [(3, "cells")]),
    Bad("same-header.csv", b"prompt,prompt\na,b\n", [(1, "prompt")]),
    Bad("nameless.csv", b"prompt,,\na,,\n", [(1, "2, 3")]),
    Bad("no-header.csv", b"What is a lease?\nWhat is an epoch?\n", [(2, "columns")]),
    Bad("header-alone.csv", b"prompt,tag\n", [(None, "the input is empty")]),
    Bad("workbook.csv", workbook(), [(1, "Excel")]),
    Bad("column-missing.csv", b"question\na\n", [(1, "qestion")], {"columns": {"qestion": "prompt"}}),
    # JSON Lines
    Bad("empty.jsonl", b"", [(None, "the input is empty")]),
    Bad("blank.jsonl", b"\n \n", [(None, "the input is empty")]),
    Bad("array.json", json.dumps([{"prompt": "a"}, {"prompt": "b"}]).encode(), [(1, "jq")]),
    Bad("pretty.json", json.dumps([{"prompt": "a"}], indent=2).encode(), [(1, "jq")]),
    Bad("python.jsonl", b"{'prompt': 'a'}\n", [(1, "JSON")]),
    Bad("trailing-comma.jsonl", b'{"prompt": "a",}\n', [(1, "JSON")]),
    Bad("nan.jsonl", b'{"prompt": "a", "score": NaN}\n', [(1, "NaN")]),
    Bad("twice.jsonl", b'{"prompt": "a", "prompt": "b"}\n', [(1, "prompt")]),
    Bad("cut.jsonl", PROMPTS + b'{"prompt": "c', [(3, "JSON")]),
    Bad("cut.jsonl.gz", gzip.compress(PROMPTS * 500)[:-12], [(971, "complete")]),
    Bad("unpacked.jsonl.gz", PROMPTS, [(1, "gzip")]),
    Bad("utf-16.jsonl", PROMPTS.decode().encode("utf-16"), [(1, "UTF-16")]),
    Bad("latin-1.jsonl", '{"prompt": "café"}\n'.encode("latin-1"), [(1, "UTF-8")]),
    Bad("same-ids.jsonl", jsonl({"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}), [(2, "id")]),
    Bad("page.jsonl", b"<!DOCTYPE html>\n<html>404</html>\n", [(1, "JSON"), (2, "JSON")]),
    Bad("pointer.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", [(1, "git lfs pull")]),
    Bad("share-gpt.jsonl", jsonl({"conversations": [{"from": "human", "value": "a"}]}), [(1, "messages")]),
    Bad("alpaca.jsonl", jsonl({"instruction": "a", "input": "", "output": "b"}), [(1, "columns")]),
    Bad("mistyped.jsonl", jsonl({"promt": "a"}), [(1, "promt")]),
    Bad("roles.jsonl", jsonl({"messages": [{"from": "human", "value": "a"}]}), [(1, "role")]),
    # Batch lines for others
    Bad("other-model.jsonl", jsonl(chat("r", model="gpt-4o-mini")), [(1, "model_in_rows")]),
    Bad("anthropic-batch.jsonl", jsonl({"custom_id": "r", "params": {"model": "claude", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}}), [(1, "body")]),
    Bad("responses.jsonl", jsonl({"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"input": "a"}}), [(1, "/v1/responses")]),
    Bad("audio.jsonl", jsonl(chat("r", messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}])), [(1, "messages[0].content")]),
    Bad("anthropic-tools.jsonl", jsonl(chat("r", tools=[{"name": "get_weather", "input_schema": {"type": "object"}}])), [(1, "tools[0]")]),
    Bad("responses-tools.jsonl", jsonl(chat("r", tools=[{"type": "function", "name": "get_weather", "parameters": {}}])), [(1, "tools[0]")]),
    # Parquet, datasets
    Bad("cut.parquet", cut_table, [(None, "parquet")]),
    Bad("parquet.jsonl", b"PAR1" + bytes(40), [(1, "parquet")]),
    Bad("text.parquet", b"prompt\na\n", [(None, "parquet")]),
    Bad("no-row.parquet", table({"prompt": pa.array([], pa.string())}), [(None, "the input is empty")]),
    Bad("no-prompt.parquet", table({"text": ["a", "b"]}), [(1, "prompt"), (2, "prompt")]),
    Bad("null-prompt.parquet", table({"prompt": ["a", None]}), [(2, "prompt")]),
    Bad("nan.parquet", table({"prompt": ["a"], "score": [float("nan")]}), [(1, "score")]),
    Bad("column-missing.parquet", table({"question": ["a"]}), [(None, "qestion")], {"columns": {"qestion": "prompt"}}),
    Bad("parted-other", dataset({"train": {"prompt": ["a"]}}), [(None, "train")], {"split": "test"}),
]  # fmt: skip


def place(case: Good | Bad, directory: Path) -> Path:
    path = directory / case.name
    if isinstance(case.data, bytes):
        path.write_bytes(case.data)
    else:
        case.data(path)
    return path
