"""Collecting: fields, order, and nothing lost or doubled wherever it is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from rollout.model.errors import ProtocolError, StorageError
from rollout.model.item import Failure, Outcome
from rollout.workloads.collector import Attempts, Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.lines import InferWriter, cost_of
from rollout.workloads.infer.payload import ChoiceResult, Payload, RowResult, encode_payload, encode_result
from rollout.workloads.infer.request import sampling_json
from rollout.workloads.infer.workload import Infer
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Totals

RUN = "01J00000000000000000000000"
OTHER = "01J00000000000000000000001"
FILES = ("completions.jsonl", "errors.jsonl", "summary.json")


def config(directory: Path, **more: Any) -> JsonObject:
    found = InferConfig.model_validate(
        {"model": {"uri": "m"}, "input": {"glob": "x"}, "output": {"dir": str(directory), **more}}
    )
    return {
        "model": {"uri": "m", "content_id": "ab" * 32},
        "sampling": sampling_json(found.sampling),
        "backend": {"kind": "mock"},
        "input": {"rows": 5},
        "output": found.output.model_dump(),
    }


def opened(out: OutputDirectory, run: str, settings: JsonObject) -> Collector:
    return Collector(out, run, InferWriter(settings), total=settings["input"]["rows"], measure="tokens")


def entry(position: int, row: JsonObject | None = None, **more: Any) -> CommitEntry:
    choices = more.pop("choices", (ChoiceResult(f"text {position}", "stop", 3),))
    return CommitEntry(
        position=position,
        seq=position,
        attempt=more.pop("attempt", 1),
        outcome=more.pop("outcome", Outcome.DONE),
        data=encode_result(RowResult(choices, 2)),
        payload=encode_payload(Payload(row or {"prompt": f"p{position}"}, position, "a.jsonl", position + 1)),
        id=bytes([position]) * 32,
        accepted_ms=1_716_330_669_123 + position,
        duration_ms=10,
        units_in=2,
        units_out=3,
        **more,
    )


def test_cost_of_a_run_with_prices(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings["backend"] = {"kind": "openai", "prices": {"m": {"input": 1.5, "output": 2.0}}}
    with OutputDirectory.open(tmp_path) as out:
        collector = opened(out, RUN, settings)
        collector.add([entry(0), entry(1)])
        assert collector.finish("completed")["cost"] == {"prompt": 6e-06, "completion": 1.2e-05, "total": 1.8e-05}


def test_a_cost_that_is_not_known_is_no_number(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert Infer().cost(settings, Totals(done=1)) == ""
    settings["backend"] = {"kind": "openai", "prices": {"m": {"input": 1.0, "output": 1.0}}}
    assert (found := cost_of(settings, Totals(done=1))) is not None and found["total"] is None
    assert Infer().cost(settings, Totals(done=1)).startswith("not known")
    assert Infer().cost(settings, Totals(done=1, units_in=2_000_000)) == "2"


def lines(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_fields(tmp_path: Path) -> None:
    with OutputDirectory.open(tmp_path) as out:
        collector = opened(out, RUN, config(tmp_path))
        collector.add(
            [
                entry(0, {"prompt": "hello", "tag": "demo", "usage": "mine"}),
                entry(1, {"prompt": "hello", "id": "p-1", "sampling": {"temperature": 0}}),
                entry(2, outcome=Outcome.FAILED, attempt=5, tries=3, failure=Failure("bad_request", "no")),
                entry(3, choices=(ChoiceResult("a", "stop", 1, []), ChoiceResult("\ud800", "length", 2, []))),
            ]
        )
        summary = collector.finish(
            "completed",
            started_ms=1_716_330_660_000,
            ended_ms=1_716_330_670_000,
            attempts=Attempts(total=6, retried=2, worker_lost=1),
        )
        collector.close()
    first, second, third = lines(tmp_path / "completions.jsonl")
    assert first["id"] == "00" * 32 and first["tag"] == "demo" and first["input"] == {"usage": "mine"}
    assert first["prompt"] == "hello" and first["completion"] == "text 0" and first["finish_reason"] == "stop"
    assert first["completion_blob_id"] == blake3(b"text 0").hexdigest()
    assert first["generated_at"] == "2024-05-21T22:31:09.123Z"
    assert (first["model_uri"], first["model_content_id"]) == ("m", "ab" * 32)
    assert first["sampling_params"]["temperature"] == 1.0
    assert second["id"] == "p-1" and second["sampling_params"]["temperature"] == 0
    assert [choice["text"] for choice in third["completions"]] == ["a", "\ud800"]
    (error,) = lines(tmp_path / "errors.jsonl")
    assert (error["code"], error["message"], error["attempts"], error["row"]) == ("bad_request", "no", 3, 3)
    assert error["file"] == "a.jsonl" and error["line"] == 3 and error["input"] == {"prompt": "p2"}
    assert summary["rows"] == {
        "total": 5,
        "committed": 4,
        "completed": 3,
        "failed": 1,
        "invalid": 0,
        "cancelled": 0,
        "skipped": 0,
    }
    assert summary["rows_per_s"] == 0.4 and summary["attempts"] == {"total": 6, "retried": 2, "worker_lost": 1}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_openai_lines(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    row = {"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with OutputDirectory.open(tmp_path) as out:
        collector = opened(out, RUN, config(tmp_path, openai=True))
        token = {"token": "a", "logprob": -1.0, "top": []}
        collector.add([entry(0, row, choices=(ChoiceResult("a", "stop", 1, [token]),))])
        collector.add([entry(1, row, outcome=Outcome.FAILED, failure=Failure("bad_request", "no"))])
        collector.finish("completed")
        collector.close()
    (line,) = lines(tmp_path / "completions.jsonl")
    assert line["id"] == "c1" and line["messages"] == body["messages"] and "body" not in line
    good, bad = lines(tmp_path / "openai.jsonl")
    choice = good["response"]["body"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "a"}
    assert choice["logprobs"]["content"][0]["logprob"] == -1.0
    assert bad["error"]["code"] == "bad_request" and bad["custom_id"] == "c1"


@pytest.mark.parametrize(
    ("row", "identity", "kept"),
    [
        ({"custom_id": "c", "id": "i", "body": {"prompt": "p"}}, "c", {"custom_id": "c", "input": {"id": "i"}}),
        ({"custom_id": "c", "id": "i", "prompt": "p"}, "i", {"custom_id": "c"}),
        ({"custom_id": "c", "prompt": "p"}, "c", {"custom_id": "c"}),
    ],
)
def test_a_row_with_two_ids_keeps_both(tmp_path: Path, row: JsonObject, identity: str, kept: JsonObject) -> None:
    ((_, data),) = InferWriter(config(tmp_path)).lines(entry(0, row))
    line = json.loads(data)
    assert line["id"] == identity and {key: line.get(key) for key in kept} == kept


@pytest.mark.parametrize(("section", "there"), [({"embeddings": True}, True), ({"queue": "q"}, True), ({}, False)])
def test_a_run_whose_rows_may_ask_for_embeddings_has_their_file(
    tmp_path: Path, section: JsonObject, *, there: bool
) -> None:
    assert ("embeddings.jsonl" in Infer().writer({**config(tmp_path), "input": section}).files) is there


def test_files_that_cannot_be_emptied_are_not_saved_afterwards(tmp_path: Path) -> None:
    """Else the next flush fails of a closed file, and nobody hears that the directory is gone."""
    with OutputDirectory.open(tmp_path / "out") as out:
        collector = opened(out, RUN, config(tmp_path))
        collector.add([entry(0)])
        (tmp_path / "out").rename(tmp_path / "moved")
        with pytest.raises(StorageError, match="No such file or directory"):
            collector.restart()
        collector.flush()
        collector.close()


def test_what_is_not_written_yet_does_not_count_as_saved(tmp_path: Path) -> None:
    """A second Ctrl-C says how many rows are in the directory, and leaves at once."""
    with OutputDirectory.open(tmp_path) as out:
        collector = opened(out, RUN, config(tmp_path))
        collector.add([entry(0), entry(1)])
        collector.flush()
        collector.add([entry(2)])
        assert (collector.cursor, collector.saved) == (3, 2) and len(lines(tmp_path / FILES[0])) == 2
        collector.close()
        assert opened(out, RUN, config(tmp_path)).saved == 2


def test_gap_and_repeat(tmp_path: Path) -> None:
    with OutputDirectory.open(tmp_path) as out:
        collector = opened(out, RUN, config(tmp_path))
        collector.add([entry(0), entry(1)])
        collector.add([entry(0), entry(1), entry(2)])
        assert collector.cursor == 3
        with pytest.raises(ProtocolError, match="jumps from 3 to 4"):
            collector.add([entry(4)])
        collector.close()
