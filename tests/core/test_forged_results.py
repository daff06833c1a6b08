"""Results as a hostile worker sends them: each costs its own row, and no line, file or command beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout.model.item import Outcome
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.lines import InferWriter
from rollout.workloads.infer.payload import ChoiceResult, Payload, RowResult, encode_payload, encode_result
from rollout.workloads.job.outcome import record_of
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.job.writer import JobWriter
from rollout.workloads.json_form import JsonObject
from rollout.workloads.map.client.cluster import outcome_of
from rollout.workloads.map.lines import MapWriter
from rollout.workloads.output import OutputDirectory
from rollout.workloads.train.encode import FAULTS
from rollout.workloads.train.lines import TrainWriter
from rollout.workloads.train.report import Report
from rollout.workloads.train.segment import Result, Segment
from rollout.workloads.train.workload import Train
from rollout.workloads.values import encode
from test_infer_collect import config as infer_config

RUN = "01J00000000000000000000000"
NO_JSON = [
    b"", b"\xff", b"1\x00", b"{", b"1}", b'1\n{"row":3,"result":"forged"}', b"NaN", b"-Infinity", b"1e999",
    b"1" * 5000, b"[" * 300 + b"]" * 300, b"[" * 100_000, b'"\x1b[2J"', b'"a\nb"',
]  # fmt: skip


def entry(position: int, data: bytes, payload: bytes = b"{}") -> CommitEntry:
    return CommitEntry(position, position, 1, Outcome.DONE, data, payload, bytes([position]) * 32, accepted_ms=5)


def collected(place: Path, writer: Any, entries: list[CommitEntry]) -> tuple[dict[str, list[JsonObject]], JsonObject]:
    """(lines of each file, summary), which are the same when a command collects them and another goes on."""
    found: list[dict[str, bytes]] = []
    summary: JsonObject = {}
    for number, cut in enumerate((len(entries), 2)):
        directory = place / str(number)
        for half in (entries[:cut], entries[cut:]):
            with OutputDirectory.open(directory) as output:
                collector = Collector(output, RUN, writer(directory), total=len(entries))
                collector.add(half)
                collector.flush()
                summary = collector.finish("completed") if collector.cursor == len(entries) else {}
                assert not summary or collector.complete
                collector.close()
        found.append({name: (directory / name).read_bytes() for name in writer(directory).files})
    assert found[0] == found[1]
    files = {name: data.split(b"\n")[:-1] for name, data in found[0].items() if name.endswith(".jsonl")}
    return {name: [json.loads(line) for line in data] for name, data in files.items()}, summary


@pytest.mark.parametrize("data", NO_JSON)
def test_a_result_of_map_that_is_no_json(tmp_path: Path, data: bytes) -> None:
    forged = entry(1, data)
    files, summary = collected(
        tmp_path, lambda _: MapWriter({"function": "a:b", "code": {}}), [entry(0, b"7"), forged, entry(2, b"8")]
    )
    assert [(line["row"], line["result"]) for line in files["results.jsonl"]] == [(1, 7), (3, 8)]
    assert [(line["row"], line["code"]) for line in files["errors.jsonl"]] == [(2, "invalid_result")]
    assert summary["rows"]["completed"] == 2 and summary["rows"]["failed"] == 1
    outcome = outcome_of(forged)
    assert outcome.error is not None and outcome.error.code == "invalid_result"


@pytest.mark.parametrize(
    "value",
    ["ü\x1b", "\ud800", 1.5e300, -0.0, 10**300, None, [], {"b": 1, "a": [True, 0.1]}, "deep"],
)
def test_a_result_of_map_is_written_as_its_process_encoded_it(tmp_path: Path, value: Any) -> None:
    for _ in range(190 if value == "deep" else 0):
        value = [value]
    data = encode(value, "it")
    collected(tmp_path, lambda _: MapWriter({"function": "a:b", "code": {}}), [entry(0, data)])
    line = (tmp_path / "0/results.jsonl").read_bytes()
    assert line == b'{"row":1,"result":%s,"seconds":0.0,"attempts":1}\n' % data
    spaced = entry(0, b" " + data.replace(b",", b" ,\r\n") if b"," in data else data + b"\n")
    collected(tmp_path / "spaced", lambda _: MapWriter({"function": "a:b", "code": {}}), [spaced])
    assert (tmp_path / "spaced/0/results.jsonl").read_bytes() == line


GOOD: JsonObject = {"choices": [{"text": "a", "finish_reason": "stop", "tokens": 1}], "prompt_tokens": 1}
CHOICE: JsonObject = GOOD["choices"][0]


@pytest.mark.parametrize(
    "data",
    [
        *NO_JSON,
        *(
            json.dumps(value).encode()
            for value in (
                7, [], {}, {**GOOD, "choices": []}, {**GOOD, "choices": [3]}, {**GOOD, "prompt_tokens": True},
                {**GOOD, "tag": 5}, {**GOOD, "choices": [{**CHOICE, "text": None}]},
                {**GOOD, "choices": [{**CHOICE, "finish_reason": []}]}, {**GOOD, "choices": [{**CHOICE, "tokens": 1.5}]},
                {**GOOD, "choices": [{**CHOICE, "logprobs": {}}]}, {**GOOD, "choices": [{**CHOICE, "logprobs": [{}]}]},
                {**GOOD, "choices": [{**CHOICE, "logprobs": [{"token": "a", "logprob": 0, "top": [{"token": 3}]}]}]},
            )
        ),
    ],
)  # fmt: skip
def test_a_result_of_infer_that_is_none(tmp_path: Path, data: bytes) -> None:
    good = encode_result(RowResult((ChoiceResult("\ud800 fine", "stop", 3),), 2))
    sent = [good, data, good]
    entries = [
        entry(number, one, encode_payload(Payload({"prompt": "p", "id": number}, number, "a.jsonl", number + 1)))
        for number, one in enumerate(sent)
    ]
    files, summary = collected(tmp_path, lambda place: InferWriter(infer_config(place, openai=True)), entries)
    assert [line["id"] for line in files["completions.jsonl"]] == [0, 2]
    assert [(line["id"], line["code"]) for line in files["errors.jsonl"]] == [(1, "invalid_result")]
    assert [(line["custom_id"], line["error"] is None) for line in files["openai.jsonl"]] == [
        ("0", True), ("1", False), ("2", True),
    ]  # fmt: skip
    assert summary["rows"]["failed"] == 1


def good_segment(**change: Any) -> JsonObject:
    result = Result(step=2, steps=4, snapshot="ab", metrics=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    return json.loads(result.encode()) | change


@pytest.mark.parametrize(
    "value",
    [
        7, [], good_segment(step="2"), good_segment(more=1), good_segment(metrics=[7]),
        good_segment(metrics=[{"step": 1}]), good_segment(metrics=[{"step": 1, "loss": "1"}]),
        good_segment(evaluations=[{"step": 1, "loss": 1.0, "x": "\x1b"}]), good_segment(snapshot="../etc"),
        good_segment(stopping={"best_evaluation": {"step": 2}}), good_segment(report={"dataset": {"rows": "1"}}),
        good_segment(model=[]), good_segment(stopped=0),
    ],
)  # fmt: skip
def test_a_result_of_a_segment_that_is_none(tmp_path: Path, value: Any) -> None:
    report = {"dataset": Report(dict.fromkeys(FAULTS, "drop")).to_json()}
    steps = good_segment(model={"parameters": 9, "trained": 9, "state": "forged", "run_id": "forged"})
    entries = [
        entry(0, Result(report=report).encode(), Segment("prepare").encode()),
        entry(1, json.dumps(steps).encode(), Segment("segment", 0, 2).encode()),
        entry(2, json.dumps(value).encode(), Segment("segment", 2, 2).encode()),
    ]
    config = {"algorithm": {"kind": "sft"}, "model": {"uri": "tiny"}}
    files, summary = collected(tmp_path, lambda _: TrainWriter(config), entries)
    assert [line["step"] for line in files["metrics.jsonl"]] == [1, 2]
    assert [(line["first_step"], line["code"]) for line in files["errors.jsonl"]] == [(3, "invalid_result")]
    assert summary["run_id"] == RUN and summary["state"] == "completed" and summary["parameters"] == 9
    forged = replace(entries[2], payload=Segment("prepare").encode())
    assert not list(Train().remarks(forged))


SPEC = TrialSpec(id="ab" * 32, dataset="d", task="t", checksum="cd" * 32, dialect="harbor", agent="a", attempt=1)
TIME = "2026-01-02T03:04:05Z"
RECORD: JsonObject = {
    "trial": SPEC.id,
    "result": {
        "task_name": "t", "dataset_name": "d", "agent_name": "a", "attempt": 1, "task_git_commit_id": None,
        "reward": 1.0, "cost": 0.0, "error": None, "durations": {}, "timestamps": {"started_at": TIME, "ended_at": TIME},
    },
}  # fmt: skip


def of_result(**change: Any) -> JsonObject:
    return {**RECORD, "result": {**RECORD["result"], **change}}


@pytest.mark.parametrize(
    "data",
    [
        *NO_JSON,
        *(
            json.dumps(value).encode()
            for value in (
                {**RECORD, "trial": "cd" * 32}, {**RECORD, "files": "/etc/passwd"}, of_result(task_name="another"),
                of_result(agent_name="another"), of_result(reward=float("inf")),
                of_result(timestamps={"started_at": "2026-01-02T03:04:05", "ended_at": TIME}),
                of_result(timestamps={"started_at": "0001-01-01T00:00:00+23:00", "ended_at": TIME}),
            )
        ),
    ],
)  # fmt: skip
def test_a_record_of_a_trial_that_is_none(tmp_path: Path, data: bytes) -> None:
    found = record_of(entry(0, data, SPEC.encode()), SPEC)
    assert found is not None and found.result.error is not None and found.result.error.type == "internal_error"
    assert found.result.reward is None and TrialRecord.decode(found.encode()) == found
    other = SPEC.model_copy(update={"id": "cd" * 32, "attempt": 2})
    good = json.dumps({**of_result(attempt=2), "trial": other.id}).encode()
    job = {"name": "j", "agents": [{"name": "a", "execute": "true"}], "datasets": [{"path": "d"}]}
    entries = [entry(0, good, other.encode()), entry(1, data, SPEC.encode())]
    files, summary = collected(tmp_path, lambda _: JobWriter({"job": job}), entries)
    assert [(line["label"], line["record"]["result"]["reward"]) for line in files["trials.jsonl"]] == [
        ("d/t/a/2", 1.0), ("d/t/a/1", None),
    ]  # fmt: skip
    assert [(line["label"], line["type"]) for line in files["errors.jsonl"]] == [("d/t/a/1", "internal_error")]
    assert summary["rows"]["failed"] == 1


def test_a_record_of_a_trial_is_taken_as_it_is() -> None:
    found = record_of(entry(0, json.dumps(RECORD).encode(), SPEC.encode()), SPEC)
    assert found is not None and found.result.error is None and found.result.reward == 1.0
