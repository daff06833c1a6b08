"""Images in chats, on real engines: what `rollout infer batch` writes is what the model writes without it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from tiny_vision import make_tiny_vision, png

TOKENS = 12
RED, BLUE = png(255, 0, 0), png(0, 0, 255)


def chat(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if urls else text}]


def written_by_the_model(directory: Path, rows: list[list[bytes]]) -> list[tuple[str, int]]:
    """The greedy text of each prompt with these images, and the tokens of the prompt."""
    import io

    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(str(directory))
    processor: Any = AutoProcessor.from_pretrained(str(directory))
    found: list[tuple[str, int]] = []
    for images in rows:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": "What is it?"}]
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pictures = [Image.open(io.BytesIO(image)) for image in images] or None
        given = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)
        prompt = given["input_ids"].shape[1]
        found.append((processor.tokenizer.decode(ids[0][prompt:], skip_special_tokens=True), prompt))
    return found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("transformers", marks=pytest.mark.engine),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
    ],
)
def test_a_model_that_takes_images_writes_what_it_does_by_itself(cli: Cli, kind: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip(kind)
    make_tiny_vision(cli.directory / "tiny")
    (cli.directory / "data" / "images").mkdir(parents=True)
    (cli.directory / "data" / "images" / "red.png").write_bytes(RED)
    blue = "data:image/png;base64," + base64.b64encode(BLUE).decode()
    asked = [chat("images/red.png"), chat(blue), chat(), chat(blue, "images/red.png")]
    rows = [{"messages": messages} for messages in asked]
    rows.append({"messages": chat("data:image/png;base64," + base64.b64encode(RED[:40]).decode())})
    (cli.directory / "data" / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = cli.config(
        model={"uri": "./tiny"},
        backend={"kind": kind, "device": "cpu", "dtype": "float32", "max_model_len": 256},
        sampling={"temperature": 0, "max_tokens": TOKENS},
        input={"glob": "data/in.jsonl"},
    )
    done = cli.run("infer", "batch", "--config", str(config), timeout=300)
    assert done.code == 0, done
    lines = cli.completions()
    assert [line["messages"] for line in lines] == asked
    wanted = written_by_the_model(cli.directory / "tiny", [[RED], [BLUE], [], [BLUE, RED]])
    assert [(line["completion"], line["usage"]["prompt_tokens"]) for line in lines] == wanted
    assert len({text for text, _ in wanted}) == 4
    (error,) = [json.loads(line) for line in (cli.directory / "out" / "errors.jsonl").read_text().splitlines()]
    assert (error["row"], error["code"], error["attempts"]) == (5, "bad_request", 1)
