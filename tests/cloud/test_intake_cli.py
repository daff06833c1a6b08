"""`[input] queue = true` as a user meets it: commands, files, queues of an emulated SQS."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from moto.sqs.responses import SQSResponse
from moto_locked import REGION, AwsEmulator
from pubsub_emulator import PROJECT, Pubsub

SCORING = """
import pathlib, time

def score(row):
    while row.get("wait") and not pathlib.Path(row["wait"]).exists():
        time.sleep(0.02)
    return "x" * row["long"] if "long" in row else 2 * row["n"]
"""


class Scene:
    """`map` on a private cluster, rows from a queue, results to another."""

    def __init__(self, directory: Path, aws: AwsEmulator) -> None:
        self.cli = Cli(directory, {name: str(directory / ".home") for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")})
        self.directory, self.aws = directory, aws
        self.rows, self.results = aws.queue(VisibilityTimeout="30"), aws.queue()
        (directory / "scoring.py").write_text(SCORING)

    def config(self, name: str = "map.toml", output: str = "out", **keys: dict[str, Any]) -> str:
        values: dict[str, dict[str, Any]] = {
            "function": {"name": "scoring:score"},
            "input": {"queue": True, "stop_when_empty_s": 2},
            "output": {"dir": output},
            "run": {"max_attempts": 1},
            "cloud": {"provider": "aws", "region": REGION, "endpoint_url": self.aws.endpoint},
            "cloud.sqs": {"queue_url": self.rows, "output_queue_url": self.results},
        }
        for section, given in keys.items():
            values[section.replace("__", ".")] = {**values.get(section.replace("__", "."), {}), **given}
        lines: list[str] = []
        for section, given in values.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]
        (self.directory / name).write_text("\n".join(lines) + "\n")
        return name

    def put(self, *rows: Any) -> None:
        for start in range(0, len(rows), 10):
            entries = [
                {"Id": str(n), "MessageBody": row if isinstance(row, str) else json.dumps(row)}
                for n, row in enumerate(rows[start : start + 10])
            ]
            self.aws.sqs.send_message_batch(QueueUrl=self.rows, Entries=entries)

    def left(self) -> tuple[int, int]:
        """(waiting, under a lease)"""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.aws.sqs.get_queue_attributes(QueueUrl=self.rows, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])

    def sent(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while messages := self.aws.sqs.receive_message(
            QueueUrl=self.results, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages", []):
            found += messages
        return found

    def lines(self, name: str, output: str = "out") -> list[dict[str, Any]]:
        path = self.directory / output / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def results_of(self, output: str = "out") -> list[Any]:
        return sorted(line["result"] for line in self.lines("results.jsonl", output))

    def start(self, *more: str) -> subprocess.Popen[str]:
        return self.cli.start("map", "--config", "map.toml", "--local", *more, together=True)


@pytest.fixture
def scene(tmp_path: Path, aws: AwsEmulator) -> Iterator[Scene]:
    found = Scene(tmp_path, aws)
    yield found
    for process in found.cli.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not found.cli.left_behind(), "every process to end")


def test_rows_come_from_a_queue_and_results_go_to_files_and_to_another(scene: Scene) -> None:
    scene.put(*({"n": n} for n in range(12)), "poison", {"long": 1_100_000, "n": 0})
    found = scene.cli.run("map", "--config", scene.config(), "--local", "--json")
    assert found.code == 0, found.out + found.err
    short = [line["result"] for line in scene.lines("results.jsonl") if isinstance(line["result"], int)]
    assert sorted(short) == [2 * n for n in range(12)]
    (bad,) = scene.lines("errors.jsonl")
    assert bad["code"] == "invalid_row" and bad["file"].startswith("message ") and bad["input"] == "poison"
    assert scene.left() == (0, 0)
    summary = json.loads((scene.directory / "out" / "summary.json").read_text())
    assert summary["state"] == "completed" and summary["rows"]["total"] == summary["rows"]["committed"] == 14
    sent = scene.sent()
    assert sorted(int(one["MessageAttributes"]["seq"]["StringValue"]) for one in sent) == list(range(14))
    (large,) = [body for one in sent if "too_large" in (body := json.loads(one["Body"]))]
    assert large["file"] == "out/results.jsonl"
    progress = [event for event in found.events if event["event"] == "progress"]
    assert progress[-1]["rows"] == 14 and {"intake", "waiting"} <= progress[-1].keys()

    scene.put({"n": 99})
    again = scene.cli.run("map", "--config", "map.toml", "--local")
    assert again.code == 0 and "is complete already" in again.out and "its intake has ended" in again.out
    assert sum(scene.left()) == 1  # the emulator may have leased it to a poll of the command before, which is gone


@pytest.mark.slow
def test_infer_takes_rows_from_a_queue_too(scene: Scene) -> None:
    scene.put(*({"prompt": f"row {n}", "id": n} for n in range(5)), {"embed": "one", "id": 5}, {"no": "prompt"})
    sections: dict[str, Any] = {"model": {"uri": "mock"}, "backend": {"kind": "mock"}}
    path = scene.directory / scene.config("batch.toml", **sections)
    text = path.read_text().replace('[function]\nname = "scoring:score"\n', "")
    path.write_text(text)
    found = scene.cli.run("infer", "batch", "--config", "batch.toml", "--local")
    assert found.code == 0, found.out + found.err
    assert sorted(line["id"] for line in scene.cli.completions()) == list(range(5))
    (vector,) = scene.lines("embeddings.jsonl")
    assert vector["id"] == 5 and len(vector["embedding"]) == vector["dimensions"]
    (bad,) = scene.lines("errors.jsonl")
    assert bad["code"] == "invalid_row" and bad["file"].startswith("message ") and scene.left() == (0, 0)


@pytest.mark.slow
def test_ctrl_c_drains_and_the_rest_stays_in_the_queue(scene: Scene) -> None:
    gate = scene.directory / "gate"
    scene.config(input={"stop_when_empty_s": 0})
    scene.put(*({"n": n, "wait": str(gate)} for n in range(80)))
    process = scene.start()
    until(lambda: scene.left()[0] <= 16, "64 rows to be taken")
    process.send_signal(signal.SIGINT)
    gate.touch()
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, out
    assert "no further message is taken" in out and "completed" in out
    taken = scene.results_of()
    assert len(taken) + sum(scene.left()) == 80 and len(taken) >= 60
    assert scene.left()[1] == 0, "what was received ahead is given back"
    assert json.loads((scene.directory / "out" / "summary.json").read_text())["rows"]["total"] == len(taken)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "twice"])
def test_however_a_command_ends_the_next_one_goes_on_and_no_row_is_there_twice(scene: Scene, how: str) -> None:
    gate = scene.directory / "gate"
    scene.config(cloud__sqs={"visibility_timeout_secs": 10})
    scene.put(*({"n": n} if n < 5 else {"n": n, "wait": str(gate)} for n in range(90)))
    process = scene.start()
    until(lambda: len(scene.lines("results.jsonl")) >= 1 or process.poll() is not None, "a result")
    if how == "killed":
        process.kill()
    else:
        process.send_signal(signal.SIGINT)
        until(lambda: scene.left()[1] == 0 or process.poll() is not None, "the drain to begin")
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    run_id = (scene.directory / "out" / "run-id").read_text()
    if how == "twice":
        assert process.returncode == 130 and "continue with: rollout map --config map.toml" in out, out
    gate.touch()
    again = scene.cli.run("map", "--config", "map.toml", "--local")
    assert again.code == 0, again.out + again.err
    assert (scene.directory / "out" / "run-id").read_text() == run_id
    if how == "killed":
        assert scene.results_of() == [2 * n for n in range(90)] and sum(scene.left()) == 0
    else:  # the intake had ended
        results = scene.results_of()
        assert len(set(results)) == len(results) and len(results) + sum(scene.left()) == 90


@pytest.mark.slow
def test_what_a_killed_command_could_not_delete_is_no_row_of_another_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        return 500, {"status": 500}, '{"__type": "InternalFailure", "message": "try again"}'

    for name, output in (("map.toml", "out"), ("other.toml", "other")):
        scene.config(name, output, cloud__sqs={"visibility_timeout_secs": 120})
    scene.put(*({"n": n} for n in range(30)))
    with monkeypatch.context() as patch:
        for name in ("delete_message", "delete_message_batch"):
            patch.setattr(SQSResponse, name, refused)
        process = scene.start()
        until(lambda: len(scene.lines("results.jsonl")) >= 5 or process.poll() is not None, "results")
        process.kill()
        process.communicate(timeout=60)
    assert sum(scene.left()) == 30
    again = scene.cli.run("map", "--config", "map.toml", "--local")
    assert again.code == 0, again.out + again.err
    assert sum(scene.left()) == 0 and scene.results_of() == [2 * n for n in range(30)]
    other = scene.cli.run("map", "--config", "other.toml", "--local")
    assert other.code == 0 and scene.results_of("other") == [], other.out + other.err


@pytest.mark.slow
def test_two_commands_share_a_queue_but_not_a_directory(scene: Scene) -> None:
    for name, output in (("map.toml", "one"), ("other.toml", "two")):
        scene.config(name, output)
    scene.put(*({"n": n} for n in range(200)))
    first = scene.start()
    second = scene.cli.start("map", "--config", "other.toml", "--local", together=True)
    until(lambda: (scene.directory / "one" / "run-id").exists(), "the first one to begin")
    refused = scene.cli.run("map", "--config", "map.toml", "--local")
    assert refused.code == 2 and "is being written by another command" in refused.err
    for process in (first, second):
        out, _ = process.communicate(timeout=110)
        assert process.returncode == 0, out
    assert scene.left() == (0, 0)
    assert sorted(scene.results_of("one") + scene.results_of("two")) == [2 * n for n in range(200)]


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"input": {"glob": "rows.jsonl"}}, [": input.queue: rows come from a queue or from files, not from both"]),
    ({"cloud__sqs": {"queue_url": ""}}, ["cloud.sqs.queue_url: is missing, and input.queue = true"]),
    (
        {"cloud__sqs": {"queue_url": ""}, "run": {"lane_key": "n", "concurrency": 1}},
        ["run.lane_key: the lanes of a run are known", "cloud.sqs.queue_url: is missing"],
    ),
    ({"input": {"queue": False, "glob": "rows.jsonl"}}, ["input.stop_when_empty_s: is of rows that arrive"]),
    (
        {"cloud__sqs": {"queue_url": "MISSING", "output_queue_url": "MISSING-2"}},
        ["sqs.queue_url", "sqs.output_queue_url"],
    ),
    ({"cloud__sqs": {"queue_url": "https://sqs.us-east-1.amazonaws.com/123456789012/rows"}}, ["us-east-1"]),
]


@pytest.mark.parametrize(("keys", "told"), BAD, ids=lambda value: value[0][:30] if isinstance(value, list) else "")
def test_what_is_wrong_is_told_at_its_place_before_anything_starts(
    scene: Scene, keys: dict[str, Any], told: list[str]
) -> None:
    missing = f"{scene.aws.endpoint}/123456789012/no-such-queue"
    given: dict[str, Any] = {
        section: {
            key: value.replace("MISSING", missing) if isinstance(value, str) else value for key, value in values.items()
        }
        for section, values in keys.items()
    }
    (scene.directory / "rows.jsonl").write_text("{}\n")
    found = scene.cli.run("map", "--config", scene.config(**given), "--local")
    assert found.code == 2, found.out + found.err
    for text in told:
        assert text in found.err
    assert found.err.count("map.toml:") >= len(told), found.err
    assert not (scene.directory / "out").exists()


@pytest.mark.slow
def test_rows_come_from_pubsub_and_results_go_to_a_topic(scene: Scene, pubsub: Pubsub) -> None:
    topic, subscription = pubsub.pair(ackDeadlineSeconds=10)
    output, results = pubsub.pair()
    rows = [{"data": base64.b64encode(json.dumps({"n": n}).encode()).decode()} for n in range(20)]
    pubsub.call("POST", f"topics/{topic}:publish", {"messages": [*rows, {"data": "bm8gSlNPTg=="}]})
    keys = {"topic": topic, "subscription": subscription, "output_topic": output, "endpoint_url": pubsub.endpoint}
    text = (scene.directory / scene.config(cloud={"provider": "gcp", "project": PROJECT})).read_text()
    text = text.partition("[cloud]")[0] + f'[cloud]\nprovider = "gcp"\nproject = "{PROJECT}"\n[cloud.pubsub]\n'
    (scene.directory / "map.toml").write_text(text + "".join(f'{key} = "{value}"\n' for key, value in keys.items()))
    found = scene.cli.run("map", "--config", "map.toml", "--local")
    assert found.code == 0, found.out + found.err
    assert scene.results_of() == [2 * n for n in range(20)] and len(scene.lines("errors.jsonl")) == 1
    sent: set[int] = set()
    while len(sent) < 21:
        for one in pubsub.call("POST", f"subscriptions/{results}:pull", {"maxMessages": 50})["receivedMessages"]:
            sent.add(int(one["message"]["attributes"]["seq"]))
    assert sent == set(range(21))
