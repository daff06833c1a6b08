"""`rollout infer batch` on real vLLM, on the CPU, as a user runs it (make test-vllm)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
ROLLOUT = [sys.executable, "-m", "rollout.cli"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([*ROLLOUT, "model", "make-tiny", str(directory)], check=True, timeout=120)
    return directory


def rows(count: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for at in range(count):
        row: dict[str, Any] = {"id": f"row-{at}", "prompt": f"What is {at} times 8?", "tag": at}
        if at % 10 == 3:
            row = {"id": f"row-{at}", "messages": [{"role": "user", "content": f"Say {at}."}]}
        if at % 10 == 4:
            row["sampling"] = {"json_schema": SCHEMA, "max_tokens": 120}
        if at % 10 == 5:
            row["sampling"] = {"n": 2, "logprobs": 1}
        out.append(row)
    return out


def write_batch(tmp_path: Path, tiny: Path, inputs: list[dict[str, Any]], **sampling: Any) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inputs))
    keys = {"temperature": 0.8, "max_tokens": 24, "seed": 7, **sampling}
    config = tmp_path / "batch.toml"
    config.write_text(
        "\n".join(
            [
                f"[model]\nuri = {json.dumps(str(tiny))}",
                "[sampling]",
                *(f"{key} = {json.dumps(value)}" for key, value in keys.items()),
                f"[input]\nglob = {json.dumps(str(tmp_path / 'in.jsonl'))}",
                f"[output]\ndir = {json.dumps(str(tmp_path / 'out'))}",
                '[backend]\nkind = "vllm"\ndtype = "float32"\nmax_model_len = 256\nmax_num_seqs = 16',
            ]
        )
    )
    return config


def infer(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*ROLLOUT, "infer", "batch", "--config", str(config), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def left_behind(directory: Path) -> list[str]:
    """Processes that still hold something below `directory`."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            named = str(directory) in " ".join(process.cmdline()) or str(directory) in process.cwd()
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_batch(tmp_path: Path, tiny: Path) -> None:
    inputs = rows(60)
    inputs[50] = {"id": "row-50", "prompt": "far too long " * 500}
    config = write_batch(tmp_path, tiny, inputs)
    done = infer(config)
    assert done.returncode == 0, done.stdout + done.stderr
    completions = lines(tmp_path / "out" / "completions.jsonl")
    assert [line["id"] for line in completions] == [f"row-{at}" for at in range(60) if at != 50]
    assert all(line["completion"] or line["finish_reason"] == "stop" for line in completions)
    by_id = {line["id"]: line for line in completions}
    # Random weights may spend all their tokens on white space; what ended by itself is what the schema says.
    shaped = [by_id[f"row-{at}"] for at in range(4, 60, 10)]
    ended = [json.loads(line["completion"]) for line in shaped if line["finish_reason"] == "stop"]
    assert ended and all(value["colour"] in ("red", "green") for value in ended)
    assert len(by_id["row-5"]["completions"]) == 2 and by_id["row-5"]["logprobs"]
    assert by_id["row-3"]["messages"] and by_id["row-1"]["tag"] == 1
    (error,) = lines(tmp_path / "out" / "errors.jsonl")
    assert (error["id"], error["code"], error["attempts"]) == ("row-50", "prompt_too_long", 1)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["rows"]["completed"] == 59 and summary["tokens"]["completion"] > 0
    assert left_behind(tmp_path) == []


def test_unknown_arguments_of_the_engine(tmp_path: Path, tiny: Path) -> None:
    config = write_batch(tmp_path, tiny, rows(1))
    with config.open("a") as file:
        file.write("\nengine = { block_size = 16, kv_cache_dtyp = 'auto', max_batched_tokens = 64 }\n")
    done = infer(config)
    assert done.returncode == 2
    assert "backend.engine.kv_cache_dtyp" in done.stderr and "kv_cache_dtype?" in done.stderr
    assert "backend.engine.max_batched_tokens" in done.stderr and "block_size" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_killed_and_continued(tmp_path: Path, tiny: Path) -> None:
    """The same command after kill -9 of everything gives what an undisturbed run gives."""
    config = write_batch(tmp_path, tiny, rows(400), max_tokens=64)
    command = [*ROLLOUT, "infer", "batch", "--config", str(config)]
    collected = tmp_path / "out" / "completions.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 240
        while not (collected.exists() and collected.stat().st_size):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline, "no row in four minutes"
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    before = (tmp_path / "out" / "run-id").read_text()
    done = infer(config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "run-id").read_text() == before
    assert [line["id"] for line in lines(collected)] == [f"row-{at}" for at in range(400)]
    assert left_behind(tmp_path) == []


READ_CALLS = """
import json, sys
from rollout.model.errors import AttemptError
from rollout.workloads.infer.tools import Tools
from rollout_worker.backends.vllm_tools import ToolReader
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
function = {"name": "now", "parameters": {"type": "object"}}
found = [ToolReader("pythonic", tokenizer)("[now(a=1), now()]", Tools(({"type": "function", "function": function},)))]
for name in ("pythonik", "deepseek_v3"):
    try:
        ToolReader(name, tokenizer)
    except AttemptError as error:
        found.append(error.message)
print(json.dumps(found))
"""


def test_parsers_of_vllm_read_calls(tiny: Path) -> None:
    """In a process of its own: to import vLLM warns, which a test may not."""
    done = subprocess.run(
        [sys.executable, "-c", READ_CALLS, str(tiny)], check=True, capture_output=True, text=True, timeout=200
    )
    (text, calls), unknown, unsuitable = json.loads(done.stdout.splitlines()[-1])
    assert text == "" and [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("now", {"a": 1}),
        ("now", {}),
    ]
    assert "pythonic" in unknown and "deepseek_v3" in unsuitable
