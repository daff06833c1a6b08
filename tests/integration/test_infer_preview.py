"""What `rollout infer preview` says of rows, with a real tokenizer in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.model import resolve_model
from rollout.workloads.infer.plan import resolve_config
from rollout.workloads.infer.preview import Preview, preview
from rollout.workloads.infer.rendered import prompt_detail
from rollout.workloads.json_form import JsonObject
from rollout.workloads.source import NO_ROWS

pytest.importorskip("transformers")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "tiny")
    return tmp_path


def settings(rows: list[Any], **sections: Any) -> InferConfig:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"uri": "tiny"},
        "backend": {"kind": "transformers", "max_model_len": 200},
        "sampling": {"max_tokens": 150},
        "input": {"glob": "rows.jsonl", "on_bad_row": "skip"},
        "output": {"dir": "out"},
    }
    return InferConfig.model_validate({key: value | sections.get(key, {}) for key, value in config.items()})


def run_config(found: InferConfig) -> JsonObject:
    return resolve_config(found, NO_ROWS, resolve_model(found))


@pytest.mark.usefixtures("place")
def test_prompts_are_rendered_and_their_tokens_counted() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "sampling": {"max_tokens": 8}}
    found = preview(settings([chat, {"no": "prompt"}, {"prompt": "word " * 30}, {"prompt": "word " * 300}]), 1, print)
    assert found.rows == 3 and [one["row"] for one in found.prompts] == [1]
    assert found.prompts[0]["text"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    counted = found.statistics()
    assert counted is not None and (counted["min"], counted["total"]) == (found.tokens[0], sum(found.tokens))
    assert [(one["line"], one["max_tokens"]) for one in found.cut] == [(3, 150)]
    assert [one["line"] for one in found.too_long] == [4]
    assert json.loads(json.dumps(found.to_json()))["too_long"]["rows"] == 1
    assert not Path("out").exists()


@pytest.mark.usefixtures("place")
def test_every_prompt_of_a_row_is_counted() -> None:
    body = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": [[5, 6, 7], [8]]}}
    found = preview(settings([body, {"embed": ["hello", "hello"]}]), 0, print)
    assert list(found.tokens[:2]) == [3, 1] and found.tokens[2] == found.tokens[3]
    sent = settings(
        [body], backend={"kind": "openai", "base_url": "http://localhost:1/v1"}, model={"tokenizer": "tiny"}
    )
    assert list(preview(sent, 0, print).tokens) == [3, 1]


@pytest.mark.usefixtures("place")
def test_rows_without_a_prompt_and_tokenizers_that_cannot_be_had() -> None:
    template = json.loads((Path("tiny") / "tokenizer_config.json").read_text())
    for file in ("chat_template.jinja",):
        (Path("tiny") / file).unlink(missing_ok=True)
    (Path("tiny") / "tokenizer_config.json").write_text(json.dumps(template | {"chat_template": None}))
    found = preview(settings([{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "y"}]), 0, print)
    assert [(one["line"], one["code"]) for one in found.refused] == [(1, "bad_request")] and len(found.tokens) == 1
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        preview(settings([{"prompt": "x"}], backend={"kind": "mock"}), 0, print)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path("tiny") / name).unlink()
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        preview(settings([{"prompt": "x"}]), 0, print)


@pytest.mark.usefixtures("place")
def test_item_show_has_the_prompt_as_the_run_made_it_or_says_why_not() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "id": 7}
    config = run_config(settings([chat]))
    shown = prompt_detail(config, chat)
    (prompt,) = shown.value["prompts"]
    assert prompt["text"] == shown.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert shown.value["limit"] == 200 and f"{prompt['tokens']} tokens of the 200" in shown.title
    (Path("tiny") / "tokenizer.json").write_text("{}")
    absent = [
        (config, "changed since the run was made"),
        (run_config(settings([chat], model={"uri": "org/absent"})), "not in the Hugging Face cache"),
        (run_config(settings([chat], backend={"kind": "mock"})), "model.tokenizer"),
        ({**config, "model": {**config["model"], "path": "/nowhere/tiny"}}, "/nowhere/tiny"),
    ]
    for of_run, why in absent:
        value = prompt_detail(of_run, chat).value
        assert value["prompts"] == [] and why in value["why"]


def test_percentiles_are_nearest_ranks_and_of_many_rows_the_first_are_named() -> None:
    found = Preview(rows=200, limit=150)
    for n in range(1, 201):
        found.add({"at": {"row": n, "file": "f", "line": n, "max_tokens": 1}, "tokens": n})
    assert found.statistics() == {"min": 1, "median": 100, "p99": 198, "max": 200, "total": 20_100}
    assert (found.counts["too_long"], len(found.too_long)) == (51, 10)
    assert "  and 41 more" in list(found.lines())
