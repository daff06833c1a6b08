"""The data of a training run as a user meets it: told before the first step, refused with exit code 2, mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli
from rollout_worker.backends.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROWS: list[dict[str, Any]] = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    return directory


def write(cli: Cli, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> None:
    (cli.directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def configure(cli: Cli, model: Path, **more: Any) -> str:
    keys = {
        "model_name_or_path": str(model), "dataset": "rows.jsonl", "eval_dataset": "eval.jsonl",
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 2, "logging_steps": 1,
        "output_dir": "out", "save_steps": 2, **more,
    }  # fmt: skip
    lines = ["[algorithm]", 'kind = "sft"', "[algorithm.sft]", *(f"{key} = {json.dumps(keys[key])}" for key in keys)]
    path = cli.directory / "train.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def processes(cli: Cli) -> list[str]:
    own = str(cli.directory)
    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline", "cwd"])
        if own in str(process.info["cwd"]) or own in " ".join(process.info["cmdline"] or [])
    ]


@pytest.mark.slow
def test_data_that_cannot_be_used_and_the_same_command_when_it_is_mended(cli: Cli, model: Path) -> None:
    config = configure(cli, model)
    write(cli, [*ROWS[:2], {"prompt": "7", "completion": "9"}], "eval.jsonl")
    empty = {"prompt": "nothing", "completion": ""}
    write(cli, [*ROWS[:5], empty, *ROWS[5:], empty, {"prompt": " 7" * 1100, "completion": " 8"}])

    refused = cli.run("train", "sft", "--config", config, timeout=120)
    assert refused.code == 2, refused
    assert "\n  rows.jsonl:6, 14 (2 rows): empty_completion: " in refused.err
    assert "\n  rows.jsonl:15: too_long, more than max_length = 1,024 tokens: " in refused.err
    assert 'rows.too_long = "drop" or "keep"' in refused.err and "fork" not in refused.out
    assert not (cli.directory / "out/metrics.jsonl").read_bytes() and not processes(cli)

    write(cli, ROWS)
    done = cli.run("train", "sft", "--config", config, timeout=120)
    assert done.code == 0, done
    report = json.loads((cli.directory / "out/data-report.json").read_text())
    assert report["dataset"]["rows"] == report["dataset"]["kept"] == 12 and report["overlap"] == 2
    assert "warning: 2 of the 3 rows of eval_dataset are in dataset too" in done.out
    told = f"dataset: 12 rows: 12 kept, 0 dropped; {report['dataset']['tokens']} tokens"
    assert 0 <= done.out.index(told) < done.out.index("completed:")
    assert len((cli.directory / "out/metrics.jsonl").read_text().splitlines()) == 2


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(cli: Cli, model: Path) -> None:
    config = configure(cli, model, use_peft=True, lora_r=4)
    write(cli, ROWS[:2], "eval.jsonl")
    write(cli, ROWS)
    before = sorted(path.name for path in cli.directory.iterdir())
    said = cli.run("train", "sft", "--config", config, "--dry-run", "--json", timeout=60)
    assert said.code == 0, said
    lines = [json.loads(line) for line in said.out.splitlines()]
    found = next(line for line in lines if line["event"] == "dry_run")
    assert (found["rows"], found["steps"], found["step_rows"], found["segments"]) == (12, 2, 4, 2)
    assert found["data"]["dataset"]["kept"] == 12 and found["data"]["eval_dataset"]["tokens"] > 0
    assert found["template"] == {"name": ""}, "none of the rows is a conversation"
    assert found["parameters"] > 459_392 > found["trained"] > 0 and found["snapshot_bytes"] == 12 * found["trained"]
    assert found["memory_bytes"]["total"] > found["memory_bytes"]["weights"] >= 4 * 459_392
    assert found["config"]["algorithm"]["sft"]["optimizer"]["lr"] == 1e-3
    assert sum(line.get("message") == "counting tokens" for line in lines) <= 1
    assert any("logging_steps is left out" in line.get("message", "") for line in lines)
    assert sorted(path.name for path in cli.directory.iterdir()) == before
