"""Bad input, each kind: a message that says what to do, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sampling": {"temprature": 1}},
            'batch.toml:10: sampling.temprature: unknown key; did you mean "temperature"?',
        ),
        ({"sampling": {"max_tokens": "many"}}, 'sampling.max_tokens: must be an integer, not "many"'),
        ({"sampling": {"stream": True}}, "sampling.stream: must be"),
        ({"sampling": {"min_tokens": 99}}, "min_tokens (99) is larger than max_tokens (64)"),
        ({"workers": {"count": 0}}, "workers.count: must be at least 1, not 0"),
        ({"backend": {"kind": "vlm"}}, 'backend.kind: unknown backend "vlm"; known: mock, openai, transformers, vllm'),
        (
            {"backend": {"kind": "transformers"}, "model": {"uri": "./no/model"}},
            "model.uri: there is no directory ./no/model",
        ),
        ({"input": {"glob": "none/*.jsonl"}}, "input.glob: no file matches 'none/*.jsonl'"),
        ({"sampling": {"json_schema": "none.json"}}, "sampling.json_schema: cannot read none.json"),
    ],
)
def test_a_bad_configuration(cli: Cli, sections: dict[str, Any], message: str) -> None:
    cli.rows(3)
    done = cli.run("infer", "batch", "--config", str(cli.config(**sections)))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (cli.directory / "out").exists() or not (cli.directory / "out" / "run-id").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the input is empty"),
        ("\n\n", "the input is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "in.jsonl:2: malformed JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "in.jsonl:3:"),
        ("[1]\n", "in.jsonl:1: a row must be a JSON object"),
        (
            '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n',
            'in.jsonl:2: the id "x" is used by in.jsonl:1 already',
        ),
        ('{"prompt": "a", "sampling": {"heat": 1}}\n', "in.jsonl:1:"),
        (f'{{"prompt": "{"x" * (65 << 20)}"}}\n', "in.jsonl:1: the line is longer than 64 MiB"),
        ('\ufeff{"prompt": "\udce9"}\n', "in.jsonl:1: not UTF-8"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_input(cli: Cli, text: str, message: str) -> None:
    (cli.directory / "in.jsonl").write_text(text, "utf-8", errors="surrogateescape")
    config = str(cli.config())
    for args in (("infer", "batch", "--config", config), ("infer", "batch", "--dry-run", "--config", config)):
        done = cli.run(*args)
        assert (done.code, done.out) == (2, "")
        assert message in done.err


def test_an_unreadable_input(cli: Cli) -> None:
    (cli.directory / "in.jsonl").symlink_to("nowhere")
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 2 and "in.jsonl" in done.err
    (cli.directory / "in.jsonl").unlink()
    (cli.directory / "in.jsonl.gz").write_bytes(b"no gzip")
    done = cli.run("infer", "batch", "--config", str(cli.config(input={"glob": "in.jsonl.gz"})))
    assert done.code == 2 and "error [input_invalid]: in.jsonl.gz:1: " in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["infer", "batch"], "--config"),
        (["infer", "batch", "--config", "none.toml"], "none.toml: no such file"),
        (["infer", "batch", "--config", "batch.toml", "--resume", "x"], "no private cluster has run in out"),
        (["infer", "batch", "--config", "batch.toml", "--workers", "0"], "--workers"),
        (["infer", "batch", "--config", "batch.toml", "--detach"], "--detach needs a cluster"),
        (
            ["infer", "batch", "--config", "batch.toml", "--coordinator", "nohost"],
            "--coordinator: 'nohost' is not an address",
        ),
        (["infer", "batch", "--config", "batch.toml", "--coordinator", "h:1", "--tls-dir", "x"], "join --coordinator"),
        (["run", "list"], "which cluster? None is named"),
        (["run", "show", "x"], "which cluster? None is named"),
        (["workers", "--coordinator", "http://h:1"], "without a scheme"),
        (["join", "--coordinator", "h:1", "--token", "x"], "token"),
        (["frobnicate"], "frobnicate"),
        (["plan", "--config", "odd.toml"], "odd.toml: this is no known configuration"),
        (["model", "make-tiny", "batch.toml"], "is a file: name a directory"),
    ],
)
def test_wrong_usage(cli: Cli, args: list[str], message: str) -> None:
    cli.rows(1)
    cli.config()
    (cli.directory / "odd.toml").write_text("[odd]\n")
    done = cli.run(*args)
    assert done.code == 2, done
    assert message in done.err


def test_a_variable_of_the_environment_is_named(cli: Cli) -> None:
    cli.rows(1)
    cli.env["ROLLOUT_SAMPLING__MAX_TOKENS"] = "lots"
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 2 and "ROLLOUT_SAMPLING__MAX_TOKENS: sampling.max_tokens: " in done.err


def test_an_output_directory_of_another_run(cli: Cli) -> None:
    cli.rows(1)
    (cli.directory / "out").mkdir()
    (cli.directory / "out" / "run-id").write_text(ULID + "\n")
    other = "01ARZ3NDEKTSV4RRFFQ69G5FAW"
    done = cli.run("infer", "batch", "--config", str(cli.config()), "--resume", other)
    assert done.code == 2 and f" {ULID[-8:]}, not {other[-8:]}" in done.err
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 2 and f"out/run-id names run {ULID}" in done.err
    assert "--coordinator HOST:PORT or --context NAME\n" in done.err


def test_errors_as_json(cli: Cli) -> None:
    done = cli.run("infer", "batch", "--config", "none.toml", "--json")
    assert done.code == 2
    (event,) = done.events
    assert event["event"] == "error" and event["error"]["code"] == "config_invalid"


def test_dry_run_touches_nothing(cli: Cli) -> None:
    cli.rows(12)
    config = cli.config(workers={"count": 3})
    before = sorted(cli.directory.rglob("*"))
    done = cli.run("infer", "batch", "--config", str(config), "--dry-run")
    planned = cli.run("plan", "--config", str(config)).out.replace("  ", "").splitlines()[1:]
    assert (done.code, done.out.splitlines()) == (0, [*planned, "dry-run OK: model=mock inputs=12 workers=3"])
    done = cli.run("infer", "batch", "--config", str(config), "--dry-run", "--workers", "5", "--json")
    (event,) = done.events
    assert event.pop("plan")[0] == "model mock on backend mock"
    assert event == {"event": "dry_run", "model": "mock", "rows": 12, "workers": 5}
    assert sorted(cli.directory.rglob("*")) == before


def test_dry_run_needs_no_engine(cli: Cli) -> None:
    cli.rows(2)
    config = cli.config(model={"uri": "meta-llama/Llama-3"}, backend={"kind": "vllm"})
    done = cli.run("infer", "batch", "--config", str(config), "--dry-run")
    assert done.code == 0
    assert (
        "warning: meta-llama/Llama-3 is gated and HF_TOKEN" in done.out
        and "dry-run OK: model=meta-llama/Llama-3" in done.out
    )


def test_plan_knows_each_kind_of_file(cli: Cli) -> None:
    cli.rows(4)
    for name, text, kind in (
        ("c.toml", '[storage]\nbackend = "embedded"\n[transport]\nlisten_addr = "0.0.0.0:50051"\n', "coordinator"),
        ("w.toml", '[worker]\nslots = 2\n[transport]\ncoordinator_addrs = ["h:1"]\n', "worker"),
        (Path(cli.config()).name, None, "infer"),
    ):
        if text:
            (cli.directory / name).write_text(text)
        done = cli.run("plan", "--config", name)
        assert done.code == 0 and f"a valid {kind} configuration" in done.out
        plan = json.loads(cli.run("plan", "--config", name, "--json").out)
        assert plan["kind"] == kind and plan["ok"] is True and plan["plan"]
    (cli.directory / "w.toml").write_text("[worker]\nslots = 2\nroles = 3\n")
    done = cli.run("plan", "--config", "w.toml")
    assert done.code == 2 and "w.toml:3: worker.roles: " in done.err
    (cli.directory / "c.toml").write_text(
        "[storage]\n[transport]\nworker_self_fence_timeout_ms = 9000\nlisten_addr = '0.0.0.0:1'\n"
    )
    done = cli.run("plan", "--config", "c.toml")
    assert done.code == 2 and "coordinator_failure_timeout_ms (5000)" in done.err


def test_a_fault_of_the_program_is_one_line_and_a_file(cli: Cli) -> None:
    cli.rows(1)
    config = str(cli.config())
    cli.env |= {"TMPDIR": str(cli.directory), "PYTHONPATH": str(cli.directory)}
    (cli.directory / "sitecustomize.py").write_text(
        "import rollout.workloads.infer.workload as w\ndef check(*_, **__): raise ZeroDivisionError('oops')\nw.check_input = check\n"
    )
    done = cli.run("infer", "batch", "--config", config, "--dry-run")
    assert done.code == 1
    assert "error [internal]: " in done.err and "ZeroDivisionError: oops" in done.err
    (log,) = cli.directory.glob("rollout-error-*.log")
    assert "Traceback" in log.read_text()


def test_version_and_help(cli: Cli) -> None:
    assert cli.run("version").out.startswith("rollout ")
    assert cli.run("--version").out == cli.run("version").out
    assert "exactly once" in cli.run("infer", "batch", "--help").out
