"""Small files as people have them, good and bad, through `rollout infer batch`: each in `corpus/` with what is expected.

`NAME.expected.json`: the exit code of a run of that file alone, and for each engine what becomes of each row: `texts`
of its choices, or what they `match`, or its error's `code` and what the message `names`.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import struct
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from rollout.model.errors import InputError
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.port import InputReader

CORPUS = Path(__file__).parent / "corpus"
NAMES = [path.stem for path in sorted(CORPUS.glob("*.jsonl"))]


def expected(name: str) -> dict[str, Any]:
    return json.loads((CORPUS / f"{name}.expected.json").read_text("utf-8"))


def answers(cli: Cli) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cli.directory / "out" / "openai.jsonl").read_text("utf-8").splitlines()]


def compare(line: dict[str, Any], want: dict[str, Any]) -> None:
    where = f"{line['custom_id']}: {line}"
    if "code" in want:
        assert line["error"] and line["error"]["code"] == want["code"], where
        assert all(name in line["error"]["message"] for name in want["names"]), where
        return
    assert line["error"] is None, where
    body = line["response"]["body"]
    if "vectors" in want:
        found = [one["embedding"] for one in body["data"]]
        assert want.get("base64", False) == isinstance(found[0], str), where
        vectors = [vector_of(one) for one in found]
        assert [len(vectors), len(vectors[0])] == want["vectors"], where
        assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-6) for vector in vectors), where
        return
    choices = body["choices"]
    if "calls" in want:
        functions = [call["function"] for call in choices[0]["message"]["tool_calls"]]
        assert [[one["name"], json.loads(one["arguments"])] for one in functions] == want["calls"], where
        assert choices[0]["finish_reason"] == "tool_calls", where
        return
    assert [choice["index"] for choice in choices] == list(range(len(choices))), where
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    if "texts" in want:
        assert texts == want["texts"], where
    if "match" in want:
        assert all(re.fullmatch(want["match"], text) for text in texts), where
    if "finish" in want:
        assert {choice["finish_reason"] for choice in choices} == {want["finish"]}, where
    if "tokens" in want:
        assert body["usage"]["completion_tokens"] == want["tokens"], where


def vector_of(embedding: Any) -> list[float]:
    if not isinstance(embedding, str):
        return embedding
    data = base64.b64decode(embedding)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_alone_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    values = {"model": {"uri": "m"}, "input": {"glob": str(CORPUS / f"{name}.jsonl")}, "output": {"dir": "out"}}
    config = InferConfig.model_validate({**values, "backend": {"kind": "mock"}})
    want = expected(name)
    faulty = [at for at, row in enumerate(want["mock"], 1) if row.get("code") == "invalid_row"]
    try:
        rows.check_input(config, InputReader(exclude=tmp_path)).close()
        told: list[int] = []
    except InputError as error:
        told = [int(line) for line in re.findall(rf"{name}\.jsonl:(\d+): ", error.message)]
    assert (told, want["exit"]) == (faulty, 2 if faulty else 0)


def test_every_row_gets_what_it_asks_for_or_its_fault(cli: Cli) -> None:
    shutil.copytree(CORPUS, cli.directory / "corpus")
    files = {"glob": "corpus/*.jsonl"}
    config = str(cli.config(input={**files, "on_bad_row": "skip"}, output={"openai": True}))
    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0, done
    want = list(chain.from_iterable(expected(name)["mock"] for name in NAMES))
    found = answers(cli)
    assert len(found) == len(want)
    for line, row in zip(found, want, strict=True):
        compare(line, row)
    vectors = sum("vectors" in row for row in want)
    assert len((cli.directory / "out" / "embeddings.jsonl").read_text("utf-8").splitlines()) == vectors
    assert json.loads((cli.directory / "out" / "summary.json").read_text())["embeddings"] == {"rows": vectors}
    refused = cli.run("infer", "batch", "--config", str(cli.config("strict.toml", input=files, output={"dir": "o2"})))
    assert refused.code == 2 and not (cli.directory / "o2").exists()


@pytest.mark.engine
def test_a_real_engine_gives_the_form_that_is_asked_for(cli: Cli) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(cli.directory / "tiny")
    names = [name for name in NAMES if "transformers" in expected(name)]
    for name in names:
        shutil.copy(CORPUS / f"{name}.jsonl", cli.directory)
    config = cli.config(
        model={"uri": "./tiny"},
        backend={"kind": "transformers", "device": "cpu"},
        sampling={"max_tokens": 16},
        input={"glob": [f"{name}.jsonl" for name in names], "on_bad_row": "skip"},
        output={"openai": True},
    )
    done = cli.run("infer", "batch", "--config", str(config))
    assert done.code == 0, done
    want = list(chain.from_iterable(expected(name)["transformers"] for name in names))
    for line, row in zip(answers(cli), want, strict=True):
        compare(line, row)
