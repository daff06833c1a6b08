"""Experiments as a user runs them, on this machine: facts, evidence, control, and what crashes leave."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from acceptance_cli import Cli, Finished, until
from cluster import Cluster
from rollout.workloads.experiment.contracts import SCHEMAS, json_schema
from rollout.workloads.experiment.facts import VOLATILE
from rollout.workloads.experiment.layout import CHAINS, PRUNED
from rollout_worker.sandboxes.local import host_capacity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "experiment.md"
FACTS = ("trials.jsonl", "metrics_long.jsonl", "events.jsonl", "variant_snapshots.jsonl")
AGENT = r"""
result() {
  printf '{"ids":{"run_id":"%s","trial_id":"%s","variant_id":"%s","task_id":"%s","repl_idx":%s},' \
    "$AGENTLAB_RUN_ID" "$AGENTLAB_TRIAL_ID" "$AGENTLAB_VARIANT_ID" "$AGENTLAB_TASK_ID" "$AGENTLAB_REPL_IDX"
  printf '"outcome":"%s","answer":"%s","metrics":{"n":%s}}' "$1" "$AGENTLAB_TASK_ID" "${2:-1}"
}
succeed() { result success "$1" > "$AGENTLAB_RESULT_PATH"; }
fail() { result failure "$1" > "$AGENTLAB_RESULT_PATH"; }
eval "$1"
"""
"""A variant's argument is what it does."""
WAIT = 'touch "$GATE/$AGENTLAB_TRIAL_ID"; while [ ! -e "$GATE/go" ]; do sleep 0.05; done; succeed'
SMALL = {"cpus": 0.25, "memory": "256M", "storage": "100M"}


@pytest.fixture
def gate() -> Iterator[Path]:
    """A directory that agents see: /tmp is theirs alone."""
    with tempfile.TemporaryDirectory(prefix="rollout-gate-", dir="/var/tmp") as name:
        yield Path(name)


def write(
    cli: Cli, name: str = "e", /, *, do: str = "succeed", other: str = "fail", tasks: int = 2, **keys: Any
) -> str:
    """An experiment of the variants `a`, which does `do`, and `b`, which does `other`; `keys` lie over it."""
    (cli.directory / "agent").mkdir(exist_ok=True)
    (cli.directory / "agent" / "agent.sh").write_text(AGENT)
    row = keys.pop("row", {})
    rows = [{"task_id": f"t{n}", **row} for n in range(tasks)]
    (cli.directory / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    policy = {"timeout_ms": 60_000, "sandbox": {"mode": keys.pop("mode", "process"), "resources": SMALL}}
    values: dict[str, Any] = {
        "experiment": {"id": name},
        "dataset": {"path": "tasks.jsonl"},
        "design": {"replications": 1, "max_concurrency": 2, **keys.pop("design", {})},
        "baseline": {"variant_id": "a", "args": [do], "bindings": {"k": [1]}},
        "variant_plan": [{"variant_id": "b", "args": [other]}],
        "runtime": {
            "command": ["sh", "/agentlab/agent/agent.sh"],
            "agent": {"artifact": "agent"},
            "env": keys.pop("env", {}),
            "policy": policy,
        },
    }
    path = cli.directory / f"{name}.yaml"
    path.write_text(json.dumps({**values, **keys}))
    return path.name


ASKS = r"""
import json, os, sys, urllib.request as http
task = json.load(open(os.environ["AGENTLAB_TASK_PATH"]))
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["task"]["ask"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = http.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
said = json.load(http.urlopen(asked))["choices"][0]["message"]["content"]
outcome = "success" if said.endswith(task["task"]["ask"]) else "failure"
json.dump({"ids": task["ids"], "outcome": outcome, "answer": said}, open(os.environ["AGENTLAB_RESULT_PATH"], "w"))
"""
"""An agent that asks its model: the mock repeats what it is asked, as far as it may."""


def test_variants_are_models_on_engines_of_the_cluster(cli: Cli) -> None:
    def model(variant: str, tokens: int) -> dict[str, Any]:
        engine = {"model": {"uri": "m"}, "backend": {"kind": "mock"}, "sampling": {"max_tokens": tokens}}
        return {"variant_id": variant, "engine": engine}

    path = write(cli, baseline=model("a", 1), variant_plan=[model("b", 9)], row={"ask": "grey or blue"})
    (cli.directory / "agent" / "agent.sh").write_text(f"exec python3 - <<'EOF'\n{ASKS}\nEOF\n")
    run(cli, "run", path)
    trials = rows(cli.directory / ".lab/runs/e")
    assert [(one["variant_id"], one["outcome"]) for one in trials] == [("a", "failure"), ("b", "success")] * 2
    manifest = json.loads((cli.directory / ".lab/runs/e/facts/run_manifest.json").read_text())
    assert [one["model"] for one in manifest["variants"]] == ["m", "m"]
    assert all(one["tokens_out"] > 0 for one in trials)
    path = write(cli, "bad", baseline=model("a", 1) | {"max_parallel_trials": 1}, mode="docker")
    done = run(cli, "run", path, code=2)
    assert "baseline.max_parallel_trials" in done.err and "baseline.engine" in done.err


def test_an_agent_is_a_function(cli: Cli) -> None:
    code = (
        "def solve(row, width=0):\n    return {'outcome': 'success', 'metrics': {'wide': width}} if width else False\n"
    )
    (cli.directory / "solving.py").write_text(code)
    variants = [{"variant_id": "b", "bindings": {"width": 3}}]
    policy = {"sandbox": {"mode": "process", "resources": SMALL}}
    keys = {"baseline": {"variant_id": "a"}, "variant_plan": variants}
    path = write(cli, **keys, runtime={"function": "solving:solve", "policy": policy})
    run(cli, "run", path)
    found = cli.directory / ".lab/runs/e"
    assert [one["outcome"] for one in rows(found)] == ["failure", "success"] * 2
    assert {one["metric_value"] for one in rows(found, "metrics_long.jsonl") if one["metric_name"] == "wide"} == {3}
    path = write(cli, "bad", **keys, runtime={"function": "solving:solv", "command": "x", "policy": policy})
    assert "experiment.yaml" not in (done := run(cli, "run", path, code=2)).err and "bad.yaml:1" in done.err
    path = write(cli, "worse", **keys, runtime={"function": "solving:solv", "policy": policy})
    assert "runtime.function" in run(cli, "run", path, code=2).err


def run(cli: Cli, *words: str, code: int = 0) -> Finished:
    done = cli.run("experiment", *words)
    assert done.code == code, done
    return done


def directory(cli: Cli, name: str = "e") -> Path:
    return cli.directory / ".lab" / "runs" / name


def rows(run: Path, name: str = "trials.jsonl") -> list[dict[str, Any]]:
    path = run / "facts" / name  # made with the first row
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stable(run: Path) -> dict[str, list[str]]:
    """Facts without what may differ, as bytes would be compared."""
    return {
        name: [json.dumps({key: value for key, value in row.items() if key not in VOLATILE}) for row in rows(run, name)]
        for name in FACTS
    }


def control(run: Path) -> dict[str, Any]:
    path = run / "runtime" / "run_control.json"
    found = json.loads(path.read_text()) if path.exists() else {"status": "", "active_trials": {}}
    if found["status"]:
        jsonschema.validate(found, json_schema("run_control_v2"))
    return found


@pytest.mark.parametrize("provider", ["process", "bubblewrap"])
def test_benchmark_adaptation_per_task_image_artifact_and_grading(cli: Cli, provider: str) -> None:
    """003, test 9. `process` has no images: there all tasks have the same."""
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    grader = 'test "$(cat out)" = "$(cat $AGENTLAB_GRADING_DIR/wanted)" && score=1 || score=0\n'
    grader += 'echo "{\\"score\\": $score, \\"lines\\": 1}" > $AGENTLAB_GRADE_PATH; exit $((3 * (1 - score)))'
    (cli.directory / "grading").mkdir()
    (cli.directory / "grading" / "wanted").write_text("right\n")
    file = write(
        cli,
        do="echo right > out; succeed",
        other="echo wrong > out; succeed",
        mode=provider,
        row={"image": "python:3.12-slim"},
        grading={"command": grader, "assets": "grading"},
    )
    if provider == "bubblewrap":
        values = json.loads((cli.directory / file).read_text())
        values["runtime"]["agent"]["image_source"] = "per_task"
        values["runtime"]["policy"]["sandbox"]["provider_config"] = {"image": "host"}
        (cli.directory / file).write_text(json.dumps(values))
    run(cli, "run", file)
    found = rows(directory(cli))
    columns = ("variant_id", "task_id", "status", "score", "passed", "grade_exit_status", "exit_status", "image")
    image = "python:3.12-slim" if provider == "bubblewrap" else None
    assert [tuple(row[name] for name in columns) for row in found] == [
        ("a", "t0", "completed", 1.0, True, 0, 0, image),
        ("b", "t0", "completed", 0.0, False, 3, 0, image),
        ("a", "t1", "completed", 1.0, True, 0, 0, image),
        ("b", "t1", "completed", 0.0, False, 3, 0, image),
    ]
    trial = directory(cli) / "trials" / "trial_000001"
    assert json.loads((trial / "grade.json").read_text()) == {"score": 1, "lines": 1}
    assert json.loads((trial / "result.json").read_text())["answer"] == "t0"
    evidence = [
        json.loads(one) for one in (directory(cli) / "evidence/evidence_records.jsonl").read_text().splitlines()
    ]
    assert [one["ids"]["trial_id"] for one in evidence] == [row["trial_id"] for row in found]
    for one in evidence:
        jsonschema.validate(one, json_schema("evidence_record_v1"))
        for name, ref in one["evidence"].items():
            digest = ref.rpartition("/")[2]
            assert (directory(cli) / f"evidence/artifacts/{digest[:2]}/{digest}").is_file(), name
    scores = (directory(cli) / "benchmark" / "scores.jsonl").read_text().splitlines()
    assert [json.loads(one)["score"] for one in scores] == [1.0, 0.0, 1.0, 0.0]


def test_parallel_and_serial_facts_are_equal(cli: Cli) -> None:
    """003, test 8: with one, two and four workers."""
    found: list[dict[str, list[str]]] = []
    for workers in (1, 2, 4):
        file = write(
            cli, do='echo x > out; succeed 2; sleep "0.$((AGENTLAB_REPL_IDX * 3))"', design={"replications": 2}
        )
        run(cli, "run", file, "--name", f"w{workers}", "--workers", str(workers))
        found.append(stable(directory(cli, f"w{workers}")))
    assert found[0] == found[1] == found[2]
    assert [len(found[0][name]) for name in FACTS] == [8, 8, 0, 4]


def test_concurrency_cap_is_honoured(cli: Cli, gate: Path) -> None:
    """003, test 5: as many as may are in flight, of all variants and of each."""
    file = write(cli, do=WAIT, other=WAIT, tasks=4, design={"max_concurrency": 3}, env={"GATE": str(gate)})
    values = json.loads((cli.directory / file).read_text())
    values["variant_plan"][0]["max_parallel_trials"] = 1
    (cli.directory / file).write_text(json.dumps(values))
    process = cli.start("experiment", "run", file)
    until(lambda: len(list(gate.iterdir())) == 3, "three trials to run")
    until(lambda: len(control(directory(cli))["active_trials"]) == 3, "them to be told of")
    active = control(directory(cli))["active_trials"]
    assert sorted(one["variant_id"] for one in active.values()) in (["a", "a", "a"], ["a", "a", "b"])
    assert all(one["worker_id"] and one["started_at"] for one in active.values())
    assert len(list(gate.iterdir())) == 3
    (gate / "go").touch()
    assert process.wait(90) == 0
    assert control(directory(cli))["active_trials"] == {}


def test_a_host_with_room_for_fewer_trials_than_may_run_at_once_runs_fewer_and_warns(cli: Cli) -> None:
    """003, edge case 12."""
    alone = f"runtime.policy.sandbox.resources.cpus={host_capacity().cpus}"
    done = run(cli, "run", write(cli, do="sleep 0.5; succeed", tasks=1), "--set", alone, "--json")
    assert "room for 1 of these trials" in done.event("remark")["text"]
    assert "design.max_concurrency is 2" in done.event("remark")["text"]
    trials = [json.loads(path.read_text())["timestamps"] for path in directory(cli).glob("trials/*/trial.json")]
    first, second = sorted((one["agent_execution_started_at"], one["agent_execution_ended_at"]) for one in trials)
    assert first[1] <= second[0]


def test_pause_and_resume_with_several_active_workers(cli: Cli, gate: Path) -> None:
    """003, test 6."""
    file = write(cli, do=WAIT, other=WAIT, tasks=3, env={"GATE": str(gate)})
    process = cli.start("experiment", "run", file, "--workers", "2")
    until(lambda: len(list(gate.iterdir())) == 2, "two trials to run")
    described, report = (json.loads(run(cli, verb, "e", "--json").out) for verb in ("describe", "recover"))
    assert f"pid {process.pid} " in described["held_by"]
    assert (report["held_by"], report["next"], report["damaged"]) == (described["held_by"], "", [])
    run(cli, "pause", "e", "--label", "lunch")
    until(lambda: control(directory(cli))["status"] == "paused", "the control file to say so")
    assert control(directory(cli))["pause"]["label"] == "lunch"
    (gate / "go").touch()
    until(lambda: len(rows(directory(cli))) >= 1, "what ran first to be committed")
    assert len(list(gate.iterdir())) == 3  # and nothing else was begun
    run(cli, "resume", "e")
    assert process.wait(90) == 0
    assert [row["status"] for row in rows(directory(cli))] == ["completed"] * 6
    assert control(directory(cli))["pause"] is None


def test_facts_are_equal_when_workers_are_killed(cli: Cli, gate: Path) -> None:
    """A lost worker is no attempt: its trials begin again, and nothing of that is in the facts."""
    file = write(cli, do=WAIT, other=WAIT, env={"GATE": str(gate)})
    process = cli.start("experiment", "run", file, "--name", "struck", "--workers", "2")
    until(lambda: len(list(gate.iterdir())) == 2, "two trials to run")
    workers = [one for one in psutil.process_iter(["cmdline"]) if is_worker(one.info["cmdline"] or [], cli)]
    assert len(workers) >= 2
    for worker in workers:
        worker.kill()
    until(lambda: not any(worker.is_running() for worker in workers), "them to end")
    (gate / "go").touch()
    assert process.wait(120) == 0
    run(cli, "run", file, "--name", "calm")
    assert stable(directory(cli, "struck")) == stable(directory(cli, "calm"))
    assert [row["attempt"] for row in rows(directory(cli, "struck"))] == [1] * 4


def is_worker(command: list[str], cli: Cli) -> bool:
    return "rollout_worker" in command and any(str(cli.directory) in word for word in command)


def test_facts_that_were_cut_are_told_of_and_written_anew(cli: Cli) -> None:
    run(cli, "run", write(cli))
    before, path = stable(directory(cli)), directory(cli) / "facts" / "trials.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    for verb in ("describe", "recover"):
        report = json.loads(run(cli, verb, "e", "--json").out)
        assert [line.partition(" ")[0] for line in report["damaged"]] == [".lab/runs/e/facts/trials.jsonl"]
    run(cli, "continue", "e")
    assert stable(directory(cli)) == before
    assert json.loads(run(cli, "describe", "e", "--json").out)["damaged"] == []


@pytest.mark.slow
def test_crash_and_continue(cli: Cli, gate: Path) -> None:
    """003, test 7, and edge case 7: orphans begin again, and facts are those of a run that was never cut off."""
    write(cli, "whole", tasks=2, env={"GATE": str(gate)}, do=WAIT, other="fail")
    (gate / "go").touch()
    run(cli, "run", "whole.yaml")
    (gate / "go").unlink()
    before = {path.name for path in gate.iterdir()}
    file = write(cli, "whole", tasks=2, env={"GATE": str(gate)}, do=WAIT, other="fail")
    for name in before:
        (gate / name).unlink()
    process = cli.start("experiment", "run", file, "--name", "cut")
    until(lambda: any(gate.iterdir()) and control(directory(cli, "cut"))["active_trials"] != {}, "a trial to run")
    process.kill()
    process.communicate()
    report = json.loads(run(cli, "recover", "cut", "--json").out)
    assert report["active_trials"] and report["committed"] < 4 and report["next"]
    described = json.loads(run(cli, "describe", "cut", "--json").out)
    assert (described["status"], described["committed"]) == ("interrupted", len(rows(directory(cli, "cut"))))
    shutil.rmtree(directory(cli, "cut") / "trials")
    (gate / "go").touch()
    assert "damaged" not in run(cli, "continue", "cut").err
    assert stable(directory(cli, "cut")) == stable(directory(cli, "whole"))
    assert control(directory(cli, "cut"))["status"] == "completed"


def test_a_variant_that_fails_in_a_row_is_pruned_and_its_trials_in_flight_finish(cli: Cli, gate: Path) -> None:
    """003, test 4. What finishes behind the prune point is evidence."""
    there = 'while [ ! -e "$GATE/%s" ]; do sleep 0.05; done'
    do = f"""touch "$GATE/$AGENTLAB_TASK_ID"
    case $AGENTLAB_TASK_ID in
      t0) exit 3;;
      t1) {there % "t2"}; exit 3;;
      *) {there % "go"}; succeed;;
    esac"""
    variants = [{"variant_id": "b", "args": [do], "max_parallel_trials": 2}]
    pruning = {"pruning": {"max_consecutive_failures": 2}}
    file = write(cli, tasks=4, variant_plan=variants, policy=pruning, env={"GATE": str(gate)})
    process = cli.start("experiment", "run", file, "--concurrent", "4")
    until(lambda: len(rows(directory(cli))) >= 4, "the second failure to be committed")
    (gate / "go").touch()
    assert process.wait(90) == 0
    found = [row for row in rows(directory(cli)) if row["variant_id"] == "b"]
    assert [row["status"] for row in found] == ["failed", "failed", "skipped_pruned", "skipped_pruned"]
    assert [row["classification"] for row in found] == ["agent_execution_failed"] * 2 + [None] * 2
    progress = json.loads((directory(cli) / "runtime" / "schedule_progress.json").read_text())
    jsonschema.validate(progress, json_schema("schedule_progress_v1"))
    assert (progress["pruned_variants"], progress["consecutive_failures"]) == ([1], {"0": 0, "1": 2})
    behind = [json.loads(one) for one in (directory(cli) / PRUNED).read_text().splitlines()]
    assert [one["ids"]["trial_id"] for one in behind] == ["trial_000006"]
    jsonschema.validate(behind[0], json_schema("evidence_record_v1"))


def test_a_chain_hands_its_workspace_on_one_trial_at_a_time(cli: Cli) -> None:
    """003, edge case 11."""
    count = "echo x >> log; succeed $(wc -l < log)"
    file = write(cli, do=count, other=count, design={"replications": 3}, policy={"state_policy": "persist_per_task"})
    run(cli, "run", file, "--workers", "2")
    found = [row["metric_value"] for row in rows(directory(cli), "metrics_long.jsonl")]
    assert found == [1.0, 2.0, 3.0] * 4
    states = (directory(cli) / "evidence" / "task_chain_states.jsonl").read_text().splitlines()
    assert len(states) == 12 and json.loads(states[0])["workspace_ref"].startswith("artifact://sha256/")


def test_a_malformed_result_or_grade_is_a_typed_outcome(cli: Cli) -> None:
    """003, edge case 8: each is a variant of one run, and is committed in its place."""
    grade = "succeed; echo 'printf \\047%s\\047 > $AGENTLAB_GRADE_PATH' > grade.sh"
    wrong = {
        "missing": ("true", "agent_result_missing"),
        "half": ("printf '{\"outcome\": ' > $AGENTLAB_RESULT_PATH", "agent_result_invalid"),
        "large": ("truncate -s 20M $AGENTLAB_RESULT_PATH", "agent_result_invalid"),
        "crash": ("succeed; exit 7", "agent_execution_failed"),
        "nan": (grade % '{"score": NaN}', "verifier_reward_invalid"),
        "half-grade": (grade % '{"score": ', "verifier_reward_invalid"),
        "no-score": (grade % '{"style": 1}', "verifier_reward_invalid"),
        "no-grade": ("succeed; echo true > grade.sh", "verifier_reward_missing"),
    }
    good = grade % '{"score": 1}'
    variants = [{"variant_id": name, "args": [do]} for name, (do, _) in wrong.items()]
    run(cli, "run", write(cli, do=good, tasks=1, variant_plan=variants, grading={"command": "sh grade.sh"}))
    found = {row["variant_id"]: (row["status"], row["classification"]) for row in rows(directory(cli))}
    expected = {name: ("failed", classification) for name, (_, classification) in wrong.items()}
    assert found == {"a": ("completed", None), **expected}


@pytest.mark.slow
def test_killing_cancels_what_did_not_end_and_keeps_facts(cli: Cli, gate: Path) -> None:
    file = write(cli, do="succeed", other=WAIT, env={"GATE": str(gate)})
    process = cli.start("experiment", "run", file)
    until(lambda: len(list(gate.iterdir())) == 2 and len(rows(directory(cli))) == 1, "two to run, and one to be done")
    run(cli, "kill", "e", "--reason", "enough")
    assert process.wait(90) == 1
    found = rows(directory(cli))
    assert found[0]["status"] == "completed"
    assert len(found) < 4 and {row["status"] for row in found} == {"completed"}
    assert control(directory(cli))["status"] == "killed"
    run(cli, "run", file, "--name", "e", code=2)
    assert json.loads(run(cli, "describe", "e", "--json").out)["status"] == "killed"
    (gate / "go").touch()
    run(cli, "run", file)
    run(cli, "continue", "e")
    for name in ("e", "e-2"):
        assert [row["status"] for row in rows(directory(cli, name))] == ["completed"] * 4


@pytest.mark.slow
def test_two_controllers_command_one_run_at_once(cli: Cli, gate: Path) -> None:
    """The engine takes one command after the other: whichever comes last holds, and the control file says so."""
    file = write(cli, do=WAIT, other=WAIT, env={"GATE": str(gate)})
    process = cli.start("experiment", "run", file)
    until(lambda: len(list(gate.iterdir())) == 2, "two trials to run")
    commands = [cli.start("experiment", verb, "e") for verb in ("pause", "resume", "pause", "kill", "kill")]
    for killing in commands[-2:]:
        out, err = killing.communicate(timeout=90)
        assert killing.returncode == 0, (out, err)
    assert {one.wait(90) for one in commands[:-2]} <= {0, 1, 2}
    run(cli, "kill", "e")  # once more: the resume may have come last, and takes a killed run back
    assert process.wait(90) == 1
    assert control(directory(cli))["status"] == "killed"


@pytest.mark.slow
def test_on_a_cluster(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trees, artifacts and facts travel; control reaches the cluster that the directory names."""
    with Cluster(tmp_path_factory.mktemp("nodes")) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        cluster.add_worker().wait_event("worker_ready")
        file = write(cli, grading={"command": "echo '{\"score\": 1}' > $AGENTLAB_GRADE_PATH"})
        done = cli.run("experiment", "run", file, *cluster.operator())
        assert done.code == 0, done
        assert [row["score"] for row in rows(directory(cli))] == [1.0] * 4
        report = json.loads(run(cli, "recover", "e", "--json").out)
        assert (report["state"], report["committed"], report["collected"]) == ("completed", 4, 4)


@pytest.mark.slow
def test_the_same_command_begins_another_run_once_one_is_complete(cli: Cli) -> None:
    file = write(cli, tasks=1)
    run(cli, "run", file)
    run(cli, "run", file)
    assert {path.name for path in directory(cli).parent.iterdir()} == {"e", "e-2"}
    assert stable(directory(cli)) == stable(directory(cli, "e-2"))
    run(cli, "run", file, "--set", "design.seed=3", "--name", "e", code=2)


def test_a_smoke_trial_without_a_result_stops_everything(cli: Cli) -> None:
    done = run(cli, "run", write(cli, do="exit 1"), "--smoke", code=2)
    assert "agent_execution_failed" in done.err
    done = run(cli, "run", write(cli, primary_metric={"name": "nn"}), "--smoke", code=2)
    assert "primary_metric.name" in done.err and "did you mean n?" in done.err
    assert not directory(cli).exists()


def test_a_dry_run_says_what_the_size_can_show(cli: Cli) -> None:
    done = run(cli, "run", write(cli), "--dry-run", "--effect", "0.2", "--json")
    event = done.event("dry_run")
    assert (event["trials"], event["variants"], event["tasks"]) == (4, 2, 2)
    assert any("96 tasks" in line for line in event["plan"])
    assert not directory(cli).exists()
    assert "--effect" in run(cli, "run", write(cli), "--dry-run", "--effect", "20", code=2).err


def test_the_example_of_the_documentation_runs_and_is_described(cli: Cli) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    file, agent = (next(text for kind, text in blocks if kind == wanted) for wanted in ("yaml", "python"))
    grade = "import json, os\njson.dump({'score': 1}, open(os.environ['AGENTLAB_GRADE_PATH'], 'w'))\n"
    texts = {"experiment.yaml": file, "agent/agent.py": agent, "grading/grade.py": grade}
    for name, text in {**texts, "tasks.jsonl": '{"task_id": "t1"}\n'}.items():
        (cli.directory / name).parent.mkdir(exist_ok=True)
        (cli.directory / name).write_text(text)
    small = [f"runtime.policy.sandbox.resources.{name}={value}" for name, value in SMALL.items()]
    words = [word for one in ["design.replications=1", *small] for word in ("--set", one)]
    run(cli, "run", "experiment.yaml", "--provider", "process", *words)
    assert [row["score"] for row in rows(directory(cli, "fix-bugs"))] == [1.0, 1.0]
    described = json.loads(run(cli, "describe", "@last", "--json").out)
    assert (described["status"], described["committed"], described["total_slots"]) == ("completed", 2, 2)
    assert run(cli, "schema").out.split() == ["experiment_v1_0", *SCHEMAS]
    assert json.loads(run(cli, "schema", "agent_result_v1").out) == json_schema("agent_result_v1")
    run(cli, "schema", "nothing", code=2)
    run(cli, "describe", "nothing", code=2)
    manifest = json.loads((directory(cli, "fix-bugs") / "facts" / "run_manifest.json").read_text())
    jsonschema.validate(manifest, json_schema("run_manifest_v1"))


@pytest.mark.slow
def test_a_fork_takes_committed_slots_over_and_runs_the_others(cli: Cli) -> None:
    run(cli, "run", write(cli, do="echo x > out; succeed 1"))
    run(cli, "fork", "e", "--from", "trial_000003", "--set", "baseline.args=[succeed 7]", "--name", "forked")
    before, after = stable(directory(cli)), stable(directory(cli, "forked"))
    assert before["trials.jsonl"][:2] == after["trials.jsonl"][:2]
    assert [row["metric_value"] for row in rows(directory(cli, "forked"), "metrics_long.jsonl")] == [1.0, 1.0, 7.0, 1.0]
    assert len({row["run_id"] for row in rows(directory(cli, "forked"))}) == 1
    made = json.loads((directory(cli, "forked") / "manifest.json").read_text())["forked_from"]
    assert (made["run_id"], made["slots"]) == (rows(directory(cli))[0]["run_id"], 2)
    manifest = json.loads((directory(cli, "forked") / "facts" / "run_manifest.json").read_text())
    assert manifest["forked_from"] == {"run_id": made["run_id"], "slots": 2}
    records = (directory(cli, "forked") / "evidence" / "evidence_records.jsonl").read_text().splitlines()
    assert [json.loads(one)["ids"]["trial_id"] for one in records] == [f"trial_00000{n}" for n in (1, 2, 3, 4)]
    assert (directory(cli, "forked") / "trials" / "trial_000001" / "result.json").exists()
    progress = json.loads((directory(cli, "forked") / "runtime" / "schedule_progress.json").read_text())
    assert [one["schedule_index"] for one in progress["completed_slots"]] == [0, 1, 2, 3]
    run(cli, "fork", "e", "--from", "9", code=2)
    run(cli, "fork", "e", "--from", "2", "--set", "design.order=variant_sequential", code=2)


@pytest.mark.slow
def test_chains_go_on_in_forks_and_replays(cli: Cli) -> None:
    """Each trial counts how many have worked on its workspace; the third of the variant b fails, so nothing of it is
    handed on."""
    count = "echo x >> log; succeed $(wc -l < log)"
    other = f'{count}; [ "$AGENTLAB_REPL_IDX" != 2 ] || exit 1'
    keys = {"design": {"replications": 4}, "policy": {"state_policy": "persist_per_task"}}
    run(cli, "run", write(cli, do=count, other=other, tasks=1, **keys))
    before = stable(directory(cli))
    for trial in ("trial_000001", "trial_000003", "trial_000008"):
        assert "workspace_pre_ref: the same" in run(cli, "replay", "e", trial).out
    for first, name in (("trial_000003", "early"), ("trial_000007", "late")):
        run(cli, "fork", "e", "--from", first, "--name", name)
        assert stable(directory(cli, name))["metrics_long.jsonl"] == before["metrics_long.jsonl"]
        assert len((directory(cli, name) / CHAINS).read_text().splitlines()) == 7
    run(cli, "fork", "e", "--from", "2", "--set", "policy.state_policy=accumulate", code=2)
    shutil.rmtree(directory(cli) / "evidence" / "artifacts")
    assert "cannot be had" in run(cli, "replay", "e", "trial_000003", code=2).err


@pytest.mark.slow
def test_a_replay_says_whether_a_trial_leaves_the_same(cli: Cli) -> None:
    run(
        cli,
        "run",
        write(cli, do="echo x > out; succeed", other="cat /proc/sys/kernel/random/uuid > out; fail", tasks=1),
    )
    done = run(cli, "replay", "e", "trial_000001")
    assert "result: the same" in done.out and "workspace_post_ref: the same" in done.out
    done = run(cli, "replay", "e", "trial_000002", code=1)
    assert "result: the same" in done.out and "workspace_post_ref: differs" in done.out
    assert len(rows(directory(cli))) == 2  # the run's own facts are as they were
    run(cli, "replay", "e", "trial_000009", code=2)
    (cli.directory / "agent" / "agent.sh").write_text("another")
    run(cli, "replay", "e", "trial_000001", code=2)
