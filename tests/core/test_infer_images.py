"""Images that rows name: which are taken, what of them a row consists of, how they reach the engine."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from infer_input import check_input, planned
from rollout.model.errors import InputChangedError, InputError
from rollout.model.item import NewItem
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.images import IMAGE_MAX
from rollout.workloads.infer.payload import decode_payload
from rollout.workloads.infer.plan import plan
from rollout.workloads.infer.request import RowRequest, parse_row
from rollout.workloads.port import InputReader
from rollout_worker.backends.openai_format import estimated_tokens
from rollout_worker.executors.infer import with_all_images
from tiny_vision import png

RED, BLUE = png(255, 0, 0), png(0, 0, 255)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*urls: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]}


def config(directory: Path, *written: dict[str, Any], kind: str = "mock", **keys: Any) -> InferConfig:
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (directory / "red.png").write_bytes(RED)
    backend = {"kind": kind, **({"base_url": "http://localhost/v1"} if kind == "openai" else {})}
    values = {"model": {"uri": "m"}, "output": {"dir": str(directory / "out")}, "backend": backend}
    return InferConfig.model_validate({**values, "input": {"glob": str(directory / "in.jsonl"), **keys}})


def bytes_of(item: NewItem) -> bytes:
    assert isinstance(item.payload, bytes)
    return item.payload


def test_files_travel_with_their_rows_and_decide_their_ids(tmp_path: Path) -> None:
    settings = config(tmp_path, chat("red.png"), chat((tmp_path / "red.png").as_uri()), chat(data_url(RED)))
    first = planned(settings, "ab" * 32)
    assert [list(decode_payload(bytes_of(item)).images.values()) for item in first] == [[data_url(RED)]] * 2 + [[]]
    (tmp_path / "red.png").write_bytes(BLUE)
    second = planned(settings, "ab" * 32)
    assert [one.id == other.id for one, other in zip(first, second, strict=True)] == [False, False, True]


def test_a_file_that_changes_is_a_row_that_changes(tmp_path: Path) -> None:
    settings = config(tmp_path, chat("red.png"))
    before = check_input(settings).digest
    source = rows.check_input(settings, InputReader(exclude=tmp_path / "out")).source
    assert source is not None
    (tmp_path / "red.png").write_bytes(BLUE)
    with source, pytest.raises(InputChangedError):
        list(plan(settings, "ab" * 32, source.rows()))
    assert check_input(settings).digest != before


@pytest.mark.parametrize(
    "url",
    [
        "absent.png",
        "in.jsonl",
        ".",
        "large.png",
        "file://elsewhere/red.png",
        "ftp://host/red.png",
        "http://host/red.png",
        "data:text/plain;base64,eA==",
        "data:image/png;base64,%%",
        "data:image/png;base64,eHh4",
        "",
        5,
    ],
)
def test_what_is_no_image_is_a_fault_of_its_row(tmp_path: Path, url: Any) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.write(RED)
        file.truncate(IMAGE_MAX + 1)
    with pytest.raises(InputError) as refused:
        check_input(config(tmp_path, chat("red.png"), chat(url)))
    assert refused.value.context["line"] == 2


def test_web_servers_are_asked_where_that_is_allowed(tmp_path: Path) -> None:
    row = chat("https://host/red.png")
    assert check_input(config(tmp_path, row, allow_http_images=True)).rows == 1
    assert check_input(config(tmp_path, row, kind="openai")).rows == 1


def ready(row: dict[str, Any], files: dict[str, str], kind: str) -> RowRequest:
    request = parse_row(row, config_sampling(), kind)
    return asyncio.run(with_all_images(request, files, fetch=kind != "openai"))


def config_sampling() -> Any:
    return InferConfig.model_validate({"model": {"uri": "m"}, "input": {"glob": "x"}, "output": {"dir": "o"}}).sampling


def test_engines_get_data_and_servers_fetch_what_is_on_the_web() -> None:
    web = "http://127.0.0.1:9/red.png"
    body = {"custom_id": "a", "body": chat("red.png", web)}
    assert ready(body, {"red.png": data_url(RED)}, "openai").images == [data_url(RED), web]
    assert ready(chat("red.png"), {"red.png": data_url(RED)}, "mock").images == [data_url(RED)]


def test_an_image_counts_as_tokens_not_as_text() -> None:
    large = chat("data:image/png;base64," + "A" * 4_000_000)
    assert estimated_tokens(large, len(json.dumps(large)), 0) < 1_100
