"""`rollout infer batch` on a server with OpenAI's interface, from its command to its files."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow.parquet as parquet
import pytest
from acceptance_cli import Cli, until
from openai_server import OpenAIServer, refused, serving

KEY = "sesame-server-4711"


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving(OpenAIServer()) as found:
        yield found


def config(cli: Cli, server: OpenAIServer, **sections: dict[str, Any]) -> str:
    backend = {"kind": "openai", "base_url": server.url, **sections.pop("backend", {})}
    return str(cli.config(model={"uri": "m"}, backend=backend, **sections))


def children(cli: Cli, name: str) -> list[psutil.Process]:
    listed = [(process, " ".join(process.info["cmdline"] or [])) for process in psutil.process_iter(["cmdline"])]
    return [process for process, line in listed if f"{name} run --config" in line and str(cli.directory) in line]


def check(cli: Cli, count: int) -> None:
    """Every row once, in input order, with its own answer."""
    found = cli.completions()
    assert [row["n"] for row in found] == list(range(count))
    assert all(row["completion"] == f"echo of {row['prompt']}" for row in found)


def error_lines(cli: Cli) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cli.directory / "out" / "errors.jsonl").read_text().splitlines()]


def test_rows_of_every_form_and_a_bad_one(cli: Cli, server: OpenAIServer) -> None:
    body = {"messages": [{"role": "user", "content": "own"}], "reasoning_effort": "low", "verbosity": "high"}
    rows: list[dict[str, Any]] = [
        {"prompt": "plain"},
        {"messages": [{"role": "user", "content": "chat"}]},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "vector"}},
        {"prompt": "bad"},
    ]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.fault = lambda text, nth: refused(400, "I do not like it") if text == "bad" else ""
    done = cli.run("infer", "batch", "--config", config(cli, server, output={"openai": True}))
    assert done.code == 0, done
    assert [row["completion"] for row in cli.completions()] == ["echo of plain", "echo of chat", "echo of own"]
    answers = map(json.loads, (cli.directory / "out" / "openai.jsonl").read_text().splitlines())
    kinds = [row["response"]["body"]["object"] for row in answers if row["response"]]
    assert kinds == ["text_completion", "chat.completion", "chat.completion", "list"]
    (vector,) = map(json.loads, (cli.directory / "out" / "embeddings.jsonl").read_text().splitlines())
    assert (vector["id"], vector["embedding"]) == ("e", [0.5, -1.0])
    (error,) = error_lines(cli)
    assert (error["code"], error["attempts"]) == ("bad_request", 1) and "I do not like it" in error["message"]
    assert {"model": "m", **body} in [asked.body for asked in server.asked]


def test_a_worker_that_is_killed_in_a_storm_loses_no_row(cli: Cli, server: OpenAIServer) -> None:
    draws = random.Random(2)
    faults = [
        "cut",
        "half",
        "garbage",
        "twice",
        "late",
        refused(429, retry_after_ms="10"),
        refused(429),
        refused(503),
        refused(500),
    ]
    server.fault = lambda text, nth: draws.choice(faults) if nth < 3 and draws.random() < 0.2 else ""
    server.delay_s = 0.2
    cli.rows(400)
    process = cli.start("infer", "batch", "--config", config(cli, server, backend={"max_in_flight": 20}))
    cli.wait_for_rows(40, process)
    children(cli, "rollout_worker")[0].kill()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    check(cli, 400)
    assert error_lines(cli) == []


@pytest.mark.slow
def test_client_and_coordinator_are_killed_and_the_table_has_each_row_once(cli: Cli, server: OpenAIServer) -> None:
    server.fault = lambda text, nth: refused(429, retry_after_ms="10") if nth == 0 and text.endswith("7") else ""
    server.delay_s = 0.05
    cli.rows(200)
    path = config(cli, server, backend={"max_in_flight": 4}, output={"format": "parquet"})
    table = cli.directory / "out" / "completions.parquet"
    client = cli.start("infer", "batch", "--config", path)
    cli.wait_for_rows(20, client)
    client.kill()
    client.wait()
    assert not table.exists()
    again = cli.start("infer", "batch", "--config", path)
    cli.wait_for_rows(80, again)
    children(cli, "rollout_coordinator")[0].kill()
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, out + err
    check(cli, 200)
    assert error_lines(cli) == []
    assert [row["n"] for row in parquet.read_table(table).to_pylist()] == list(range(200))


def test_a_limit_holds_over_all_workers_and_when_one_is_lost(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(80)
    path = config(cli, server, backend={"requests_per_minute": 600}, workers={"count": 3})
    process = cli.start("infer", "batch", "--config", path)
    cli.wait_for_rows(20, process)
    for worker in children(cli, "rollout_worker")[:2]:
        worker.kill()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    check(cli, 80)
    assert server.asked[-1].at - server.asked[0].at >= 0.9 * (len(server.asked) - 1) * 60 / 600


def test_a_worker_that_is_cut_off_sends_nothing_more_until_it_is_back(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(120)
    process = cli.start("infer", "batch", "--config", config(cli, server, backend={"requests_per_minute": 600}))
    cli.wait_for_rows(10, process)
    (coordinator,) = children(cli, "rollout_coordinator")
    coordinator.suspend()
    try:
        until(lambda: logged(cli, "worker_fenced"), "the fence")
        time.sleep(0.5)  # what the server was asked just before
        before = len(server.asked)
        time.sleep(2)
        assert len(server.asked) == before < 120
    finally:
        coordinator.resume()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    check(cli, 120)
    assert error_lines(cli) == [] and set(server.counts.values()) == {1}


def logged(cli: Cli, event: str) -> bool:
    return any(event in path.read_text(errors="replace") for path in cli.directory.rglob("worker-*.jsonl"))


def test_a_server_that_is_away_for_a_while_is_waited_for_and_people_hear_of_it(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(200)
    server.delay_s = 0.05
    process = cli.start("infer", "batch", "--config", config(cli, server, backend={"max_in_flight": 4}), together=True)
    cli.wait_for_rows(10, process)
    server.now(server.stop())
    assert process.stdout is not None
    said = next((line for line in process.stdout if "cannot be reached" in line), "")
    assert "go on by themselves" in said
    server.now(server.start())
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    check(cli, 200)
    assert error_lines(cli) == []


def test_the_key_is_sent_and_is_written_nowhere(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(5)
    cli.env["SERVER_KEY"] = KEY
    server.fault = lambda text, nth: refused(400, f"I know {KEY}") if text == "row 3" else ""
    done = cli.run("infer", "batch", "--config", config(cli, server, backend={"api_key_env": "SERVER_KEY"}))
    assert done.code == 0, done
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {KEY}"}
    assert error_lines(cli)[0]["message"].endswith("I know ***")
    for path in (path for path in cli.directory.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in done.out + done.err


def test_a_key_that_is_refused_in_the_middle_ends_the_run_and_costs_no_row(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(30)
    server.fault = lambda text, nth: refused(401, "the key has expired") if len(server.asked) > 10 else ""
    path = config(cli, server, backend={"max_in_flight": 4})
    done = cli.run("infer", "batch", "--config", path)
    assert done.code == 1 and "the key has expired" in done.err + done.out
    server.fault = lambda text, nth: ""
    again = cli.run("infer", "batch", "--config", path)
    assert again.code == 0, again
    check(cli, 30)


def test_nobody_is_there(cli: Cli, server: OpenAIServer) -> None:
    cli.rows(3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        done = cli.run("infer", "batch", "--config", config(cli, server, backend={"base_url": url}))
    assert done.code == 1 and "cannot be reached" in done.err + done.out
    assert cli.completions() == [] and error_lines(cli) == []
    done = cli.run("infer", "batch", "--config", config(cli, server))  # with the right address, in the same directory
    assert done.code == 0 and "backend.base_url" in done.err + done.out
    check(cli, 3)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"base_url": ""}, "base_url"),
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "http://me:secret@localhost/v1"}, "api_key_env"),
        ({"api_key_env": "sk-abcdefghijklmnopqrstuvwxyz012345"}, "api_key_env"),
        ({"api_key_env": "NO_SUCH_KEY"}, "export NO_SUCH_KEY="),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"requests_per_minute": "many"}, "requests_per_minute"),
        ({"kind": "mock"}, "base_url"),
    ],
)
def test_bad_settings_end_before_anything_starts(
    cli: Cli, server: OpenAIServer, backend: dict[str, Any], said: str
) -> None:
    cli.rows(1)
    done = cli.run("infer", "batch", "--config", config(cli, server, backend=backend))
    assert done.code == 2 and said in done.err, done
    assert "secret@" not in done.err and "sk-abc" not in done.err
    assert not server.asked and not (cli.directory / "out" / "run-id").exists()
