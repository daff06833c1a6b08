"""The examples of docs/map.md, as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from PIL import Image

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "map.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def example(number: int, cli: Cli) -> list[tuple[str, str]]:
    """Its blocks; the files among them are written."""
    text = PAGE.split(f"## Example {number}:")[1].split("\n## ")[0]
    blocks = [(kind, body) for kind, body in BLOCK.findall(text)]
    for _, body in blocks:
        if named := re.match(r"# file: (\S+)\n", body):
            (cli.directory / named[1]).write_text(body)
    return blocks


def command_of(blocks: list[tuple[str, str]]) -> list[str]:
    (found,) = [body for kind, body in blocks if kind == "sh"]
    return shlex.split(found.replace("\\\n", " "))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_score_a_file(cli: Cli) -> None:
    blocks = example(1, cli)
    (cli.directory / "rows.jsonl").write_text(next(body for kind, body in blocks if kind == "json"))
    finished = cli.run(*command_of(blocks)[1:])
    assert finished.code == 0, finished.err
    shown = [body for kind, body in blocks if kind == ""]
    said = [json.loads(line) for line in shown[0].splitlines()]
    found = read(cli.directory / "out" / "results.jsonl")
    assert [(line["row"], line["result"]) for line in found] == [(line["row"], line["result"]) for line in said]
    (error,) = read(cli.directory / "out" / "errors.jsonl")
    told = json.loads(shown[1])
    assert error.keys() == told.keys() and error["traceback"].startswith(told["traceback"].removesuffix(" ..."))
    assert error["attempts"] >= told["attempts"]  # a row may have been given back unbegun, to be evenly spread
    differs = {"traceback": "", "seconds": 0.0, "attempts": 0}
    assert error | differs == told | differs


class Api(BaseHTTPRequestHandler):
    """Answers, but not at first for every third question, and notes how many it had at once."""

    lock = threading.Lock()
    at_once = most = 0
    asked: dict[int, int] = {}

    def do_POST(self) -> None:
        cls = type(self)
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["question"]
        with cls.lock:
            cls.at_once += 1
            cls.most = max(cls.most, cls.at_once)
            cls.asked[question] = cls.asked.get(question, 0) + 1
            busy = question % 3 == 0 and cls.asked[question] == 1
        time.sleep(0.02)
        with cls.lock:
            cls.at_once -= 1
        body = json.dumps({"answer": question * 2}).encode()
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_call_an_api_a_few_rows_at_a_time(cli: Cli, api: str) -> None:
    cli.env["API_URL"] = api
    blocks = example(2, cli)
    rows = [{"question": n} for n in range(40)]
    (cli.directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = cli.run(*command_of(blocks)[1:])
    assert finished.code == 0, finished.err
    found = read(cli.directory / "answers" / "results.jsonl")
    assert [(line["row"], line["result"]) for line in found] == [(n + 1, {"answer": 2 * n}) for n in range(40)]
    assert Api.most <= 2
    assert [Api.asked[n] for n in range(40)] == [2 if n % 3 == 0 else 1 for n in range(40)]


@pytest.mark.slow
def test_many_rows_at_once_with_async_def(cli: Cli) -> None:
    blocks = example(3, cli)
    (cli.directory / "questions.jsonl").write_text("".join(f'{{"question": "q{n}"}}\n' for n in range(100)))
    finished = cli.run(*command_of(blocks)[1:])
    assert finished.code == 0, finished.err
    found = read(cli.directory / "asked" / "results.jsonl")
    assert [line["result"] for line in found] == [{"answer": f"Q{n}"} for n in range(100)]


@pytest.mark.slow
def test_resize_images_with_a_class_that_loads_once(cli: Cli) -> None:
    blocks = example(4, cli)
    images = cli.directory / "images"
    images.mkdir()
    for n in range(6):
        Image.new("RGB", (100 + 20 * n, 100), "blue").save(images / f"{n}.png")
    (images / "6.png").write_text("no image")
    program, *arguments = command_of(blocks)
    assert program == "python"
    process = cli.start(*arguments, program=sys.executable)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[0] == "0.png 64 64" and lines[5] == "5.png 64 32" and "UnidentifiedImageError" in lines[6]
    assert sorted(path.name for path in (cli.directory / "small").iterdir()) == [f"{n}.png" for n in range(6)]
