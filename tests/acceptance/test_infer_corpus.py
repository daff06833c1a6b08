"""Small files as people have them, good and bad, through `rollout infer batch`, with what is expected of each.

Files of other programs are in `corpus_files`, rows of every form in `corpus/`.

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
from corpus_files import BAD, GOOD, Bad, Good, place
from rollout.model.errors import InputError
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.input_lines import json_of
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
        assert choices[0]["finish_reason"] == want.get("finish_reason", "tool_calls"), where
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


def checked(case: Good | Bad, directory: Path) -> list[Any]:
    """The file's rows, as they would be submitted. InputError."""
    values = {"input": {"glob": str(place(case, directory)), **case.options}, "model": {"uri": "m"}}
    config = InferConfig.model_validate({**values, "backend": {"kind": "mock"}, "output": {"dir": "out"}})
    found = rows.check_input(config, InputReader(exclude=directory / "out"))
    assert found.source is not None
    with found.source as source:
        return [json_of(line) for line in source.rows()]


def has(row: dict[str, Any], want: dict[str, Any]) -> bool:
    return want.items() <= {"id": row.get("custom_id"), **row}.items()


def by_name(cases: list[Any]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", by_name(GOOD))
def test_a_file_of_another_program_is_read(case: Good, tmp_path: Path) -> None:
    read = checked(case, tmp_path)
    assert len(read) == len(case.rows)
    assert all(has(row, want) for row, want in zip(read, case.rows, strict=True)), read


def told(case: Bad, message: str) -> bool:
    """Whether each of its faults is in the message, at its place."""
    return all(
        re.search(rf"(?m){re.escape(case.name)}{f':{line}: ' if line else '(?!:[0-9])'}.*{re.escape(word)}", message)
        or (line is None and re.search(rf"(?m){re.escape(word)}.*{re.escape(case.name)}", message))
        for line, word in case.faults
    )


@pytest.mark.parametrize("case", by_name(BAD))
def test_a_file_that_cannot_be_used_is_refused_with_the_place(case: Bad, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        checked(case, tmp_path)
    assert told(case, caught.value.message), caught.value.message
    lines = re.findall(rf"(?m){re.escape(case.name)}:(\d+): ", caught.value.message)
    assert [int(line) for line in lines] == [line for line, _ in case.faults if line]


PLAIN = [case for case in GOOD if case.options.keys() <= {"model_in_rows"}]


def test_files_of_other_programs_run_together(cli: Cli) -> None:
    names = [place(case, cli.directory).name for case in PLAIN]
    config = cli.config(input={"glob": names, "model_in_rows": "ignore"}, sampling={"max_tokens": 3})
    done = cli.run("infer", "batch", "--config", str(config))
    assert done.code == 0, done
    want = [row for case in PLAIN for row in case.rows]
    assert all(has(row, expect) for row, expect in zip(cli.completions(), want, strict=True))


def test_faults_of_all_files_are_told_at_once(cli: Cli) -> None:
    alone = [case for case in BAD if not case.options and not any("input is empty" in why for _, why in case.faults)]
    names = [place(case, cli.directory).name for case in alone]
    done = cli.run("infer", "batch", "--config", str(cli.config(input={"glob": names})))
    assert done.code == 2 and not (cli.directory / "out").exists()
    assert [case.name for case in alone if not told(case, done.err)] == []


TRANSFORMERS = pytest.param("transformers", "", "engine", marks=pytest.mark.engine)
VLLM = pytest.param("vllm", "", "engine(?!-embed)", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])
POOLING = pytest.param(
    "vllm", 'engine = { runner = "pooling" }', "engine-embed", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]
)


@pytest.mark.parametrize(("kind", "options", "files"), [TRANSFORMERS, VLLM, POOLING])
def test_a_real_engine_gives_what_is_asked_for(cli: Cli, kind: str, options: str, files: str) -> None:
    """Rows that only vLLM takes otherwise have an expectation of their own."""
    pytest.importorskip("torch")
    pytest.importorskip(kind)
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(cli.directory / "tiny")
    names = [name for name in NAMES if re.match(files, name)]
    for name in names:
        shutil.copy(CORPUS / f"{name}.jsonl", cli.directory)
    more = [case for case in PLAIN if files != "engine-embed"]
    config = cli.config(
        model={"uri": "./tiny"},
        backend={"kind": kind, "device": "cpu", "max_model_len": 256},
        sampling={"max_tokens": 16},
        input={
            "glob": [*(f"{name}.jsonl" for name in names), *(place(case, cli.directory).name for case in more)],
            "on_bad_row": "skip",
            "model_in_rows": "ignore",
        },
        output={"openai": True},
    )
    config.write_text(config.read_text().replace("[backend]", f"[backend]\n{options}"))
    done = cli.run("infer", "batch", "--config", str(config), timeout=300)
    assert done.code == 0, done
    want = list(chain.from_iterable(expected(name).get(kind, expected(name)["transformers"]) for name in names))
    found = answers(cli)
    for line, row in zip(found[: len(want)], want, strict=True):
        compare(line, row)
    assert [line["error"] for line in found[len(want) :]] == [None for case in more for _ in case.rows]
