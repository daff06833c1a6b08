"""Item ids, what a resume may change, and what a model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infer_input import check_input, planned
from rollout.cli.checking import verdict
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.model import resolve_model
from rollout.workloads.infer.payload import decode_payload
from rollout.workloads.infer.plan import resolve_config
from rollout.workloads.infer.request import item_id, parse_row
from rollout.workloads.infer.workload import Infer
from rollout.workloads.invalid import invalid_of
from rollout.workloads.resume import (
    changed_limits,
    describe_changes,
    describe_recorded,
    resumed_config,
    with_limits,
)

INFER = Infer()
LOCKED = [
    "6bc5dc76c8aa31de3af477871e792b24692e4bb9bf3c62b02e17ab794ef437af",
    "62d59fa298c73d692e9d421718b70eac5e8037401db3626f6859587f2b1b2cd5",
    "8952822b7088e25f3d1d6cf0d7e8e656012693115f59b6152276e230ee52c64e",
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, **sections: Any) -> InferConfig:
    base = {"model": {"uri": "m"}, "input": {"glob": str(path)}, "output": {"dir": "o"}, "backend": {"kind": "mock"}}
    return InferConfig.model_validate({**base, **sections})


def resolved(found: InferConfig) -> dict[str, Any]:
    return json.loads(json.dumps(resolve_config(found, check_input(found), resolve_model(found))))


def ids(found: InferConfig) -> list[bytes]:
    return [item.id for item in planned(found, resolve_model(found).content_id)]


def test_ids_change_with_all_that_changes_the_result(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "tag": 1}, {"prompt": "x", "tag": 1}, {"prompt": "y"})
    base = ids(config(path))
    assert len(set(base)) == 3
    assert base == ids(config(path))
    assert base == ids(config(path, output={"dir": "elsewhere"}, workers={"count": 4}))
    assert not set(base) & set(ids(config(path, sampling={"seed": 1})))
    assert not set(base) & set(ids(config(path, model={"uri": "other"})))
    write(path, {"prompt": "x", "tag": 2}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "y"})
    changed = ids(config(path))
    assert changed[0] == base[0] and changed[1] != base[1] and changed[2] == base[2]


def test_ids_change_with_adapters(tmp_path: Path) -> None:
    body = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "model": "b"}}
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "lora": "a"}, body)
    two = ids(config(path, model={"uri": "m", "loras": {"a": "one", "b": "two"}}))
    other = ids(config(path, model={"uri": "m", "loras": {"a": "one", "b": "another"}}))
    assert two[0] != other[0] and two[1] != other[1]
    request = parse_row({"prompt": "x"}, SamplingSection(), "mock")
    assert len({item_id("ab" * 32, request, 0, name) for name in ("", "a", "b")}) == 3


def test_adapters_of_the_model_travel_and_their_files_are_compared(tmp_path: Path) -> None:
    adapters = {name: tmp_path / name for name in ("own", "a")}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    given = {"uri": str(tmp_path / "tiny"), "lora": str(adapters["own"]), "loras": {"x/y.z": str(adapters["a"])}}
    settings = config(write(tmp_path / "a.jsonl", {"prompt": "x"}), model=given, backend={"kind": "transformers"})
    for directory in adapters.values():
        directory.mkdir()
    with pytest.raises(ConfigError, match=r"model.lora: .*adapter_config.json"):
        resolve_model(settings)
    for directory in adapters.values():
        (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.lora: .*adapter_model"):
        resolve_model(settings)
    for directory in adapters.values():
        (directory / "adapter_model.bin").touch()
    old = resolved(settings)
    assert [tree.key for tree in resolve_model(settings).trees("model")] == [
        "model.manifest", "model.adapters.0.manifest", "model.adapters.1.manifest",
    ]  # fmt: skip
    assert [one["name"] for one in old["model"]["adapters"].values()] == ["", "x/y.z"]
    (adapters["a"] / "adapter_config.json").write_text('{"r": 4}')
    (change,) = describe_changes(INFER, old, resolved(settings))
    assert change.startswith("model.lora: the files of an adapter")


def test_the_id_is_locked(tmp_path: Path) -> None:
    """A change here orphans every open run: bump SCHEMA_VERSION and say so in the changelog."""
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})
    assert ids(config(path))[0].hex() == "c6397c3a48a24a85911ab9e89e93e67534aeb582980550c37cf523e6a14d4485"


def test_ids_of_openai_rows_are_locked() -> None:
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1}, "user": "u", "response_format": {"type": "json_object"},
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi"}], "sampling": {"stop": "a", "seed": 3, "json_schema": {}}},
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ["x"], "n": 2, "logprobs": 1}},
        {"custom_id": "a", "url": "/v1/chat/completions", "body": chat},
    ]
    requests = [parse_row(row, SamplingSection(max_tokens=5), "mock") for row in rows]
    assert [item_id("ab" * 32, request, at).hex() for at, request in enumerate(requests)] == LOCKED
    later = parse_row(rows[1] | {"body": rows[1]["body"] | {"stop_token_ids": [5]}}, SamplingSection(), "mock")
    assert item_id("ab" * 32, later, 1).hex() != LOCKED[1] and later.sampling.later == {"stop_token_ids"}


def test_payload_is_the_row_as_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"tag": [1], "prompt": "é", "a": None})
    (item,) = planned(config(path), "00" * 32)
    payload = decode_payload(item.payload)  # type: ignore[arg-type]
    assert list(payload.row) == ["tag", "prompt", "a"] and payload.row["prompt"] == "é"
    assert (payload.index, payload.file, payload.line) == (0, str(path), 1)
    assert [item.id for item in planned(config(path), "00" * 32, start=1)] == []


def test_changes_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"})
    old = resolved(config(path))
    assert describe_changes(INFER, old, resolved(config(path, output={"dir": "p"}, workers={"count": 9}))) == []
    assert describe_changes(INFER, old, resolved(config(path, sampling={"temperature": 0.5}))) == [
        "sampling.temperature: 1.0 -> 0.5"
    ]
    assert describe_changes(INFER, old, resolved(config(path, model={"uri": "n"}))) == ["model.uri: 'm' -> 'n'"]
    arrival = resolved(config(path, run={"order": "arrival"}))
    assert describe_changes(INFER, old, arrival) == []
    assert describe_recorded(INFER, old, arrival) == ["run.order: the run keeps 'schedule', not 'arrival'"]
    named = resolved(config(path, run={"name": "n"}))
    assert describe_recorded(INFER, old, named) == ["run.name: the run keeps '', not 'n'"]
    assert describe_recorded(INFER, named, old) == [], "no name was asked for"
    limited = resolved(config(path, run={"timeout_ms": 5, "max_attempts": 7}))
    changed = changed_limits(INFER, old, limited)
    assert describe_changes(INFER, old, limited) == describe_recorded(INFER, old, limited) == []
    assert changed == {"run.max_attempts": (3, 7), "run.timeout_ms": (0, 5)}
    assert INFER.limits(with_limits(old, changed)) == (5, 7, 3, 1000)
    slower = resolved(config(path, backend={"kind": "mock", "delay_ms": 5}))
    assert describe_changes(INFER, old, slower) == describe_recorded(INFER, old, slower) == []
    assert changed_limits(INFER, old, slower) == {"backend.delay_ms": (0.0, 5.0)}
    write(path, {"prompt": "x"}, {"prompt": "z"})
    new = resolved(config(path))
    assert describe_changes(INFER, old, new) == [f"input: the rows of {path} changed"]
    assert describe_changes(INFER, old, new, changed="row 2 (a:2) is another than before") == [
        "input: row 2 (a:2) is another than before"
    ]


def test_of_the_arguments_of_an_engine_those_that_change_no_result_may_change(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})
    before = {"max_num_batched_tokens": 512, "swap_space": 4, "quantization": "fp8"}
    old = resolved(config(path, backend={"kind": "vllm", "engine": before}))
    new = resolved(
        config(path, backend={"kind": "vllm", "engine": {"max_num_batched_tokens": 256, "quantization": "awq"}})
    )
    kept = {"max_num_batched_tokens": 256, "quantization": "fp8"}
    assert changed_limits(INFER, old, new) == {"backend.engine": (before, kept)}
    assert describe_recorded(INFER, old, new) == ["backend.engine.quantization: the run keeps 'fp8', not 'awq'"]
    other = resolved(config(path, backend={"kind": "vllm", "engine": before | {"quantization": "awq"}}))
    assert changed_limits(INFER, old, other) == {} == changed_limits(INFER, old, old)


def test_a_renamed_input_is_the_same_input(tmp_path: Path) -> None:
    old = resolved(config(write(tmp_path / "a.jsonl", {"prompt": "x"})))
    assert describe_changes(INFER, old, resolved(config(write(tmp_path / "b.jsonl", {"prompt": "x"})))) == []


def test_opening_again_sends_the_same_config(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})
    old, new = resolved(config(path)), resolved(config(path, output={"dir": "p"}, run={"priority": 3}))
    resumed = resumed_config(INFER, old, new)
    assert resumed["output"]["dir"] == "p"
    assert INFER.spec("0" * 26, old) == INFER.spec("0" * 26, resumed)


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})

    def model(uri: str, **more: Any) -> Any:
        return resolve_model(config(path, model={"uri": uri, **more}, backend={"kind": "transformers"}))

    directory = tmp_path / "model"
    with pytest.raises(ConfigError, match="no directory"):
        model(str(directory))
    directory.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model(str(directory))
    (directory / "config.json").write_text("{}")
    first = model(str(directory))
    assert first.path == directory and model(str(directory)) == first
    (directory / "config.json").write_text("{ }")
    assert model(str(directory)).content_id != first.content_id
    hub = model("org/model")
    assert hub.path is None and hub.content_id != model("org/model", revision="v2").content_id
    ref = tmp_path / "hub" / "models--org--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    assert model("org/model").commit == "a" * 40
    with pytest.raises(ConfigError, match="is a file"):
        model(str(path))


def test_a_row_left_out_is_an_item_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\nno\n{"custom_id": "c", "body": {"prompt": "p", "model": "other"}}\n')
    found = config(path, input={"glob": str(path), "on_bad_row": "skip"})
    items = planned(found, "00")
    bad = [invalid_of(item.payload) for item in items if isinstance(item.payload, bytes)]
    assert [row and (row.line, row.fault[:15]) for row in bad] == [
        None, (2, "malformed JSON:"), (3, '"body.model" is'),
    ]  # fmt: skip
    assert bad[1] and bad[1].input == "no" and bad[2] and bad[2].input["custom_id"] == "c"
    assert [item.id for item in planned(found, "00", start=1)] == [item.id for item in items[1:]]
    assert len(set(ids(config(path, input={"glob": str(path), "on_bad_row": "skip", "model_in_rows": "ignore"})))) == 3


def test_a_plan_names_the_files_and_what_this_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})
    server = {"kind": "openai", "base_url": "http://localhost/v1", "api_key_env": "NO_SUCH_KEY"}
    found = config(path, output={"dir": "o", "format": "parquet"}, backend=server)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    planned = verdict(INFER, found, tell=lambda text: None)
    assert "writes completions.jsonl, completions.parquet, errors.jsonl and summary.json to o" in planned.plan
    assert [note for note in planned.notes if "NO_SUCH_KEY" in note]


def test_variables_of_the_chat_template_change_the_id(tmp_path: Path) -> None:
    def one(**body: Any) -> bytes:
        asked = {"messages": [{"role": "user", "content": "x"}], **body}
        return ids(config(write(tmp_path / "a.jsonl", {"custom_id": "c", "body": asked})))[0]

    plain = one()
    assert plain == one(metadata={"a": 1}, store=True, user="u", model="m", stream=False)
    assert len({plain, one(reasoning_effort="low"), one(chat_template_kwargs={"enable_thinking": False})}) == 3
