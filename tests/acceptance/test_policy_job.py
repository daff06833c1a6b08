"""Job tasks as the environment of a policy, as a user trains on them: an agent in a sandbox asks the policy at the
address that it is given, and the verifier's reward is the reward."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from job_files import make_task
from rollout.workloads.train.segment import timeless
from rollout_worker.backends.tiny import make_tiny
from train_kills import QUICK
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ASK = """
import json, os, time, urllib.request
def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 12}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
with open(os.environ["ROLLOUT_INSTRUCTION_PATH"]) as file:
    messages = [{"role": "user", "content": file.read()}]
ask([{"role": "user", "content": "a title"}])
messages.append(ask(messages))
"""
AGAIN = """
messages += [{"role": "user", "content": "again"}]
messages.append(ask(messages))
with open("/app/answer.txt", "w") as file:
    file.write(messages[-1]["content"])
"""
VERIFIER = "echo $(( $(wc -c < /app/answer.txt) % 5 )) > /logs/verifier/reward.txt\n"
HELD = f"""{ASK}
open("/marks/asked", "a").write(json.dumps(messages[-1]["content"]) + "\\n")
while os.path.exists("/marks/hold"):
    time.sleep(0.05)
{AGAIN}"""
TOML = 'version = "1.0"\ndialect = "rollout"\n[environment]\ncpus = 0.1\nmemory = "128M"\n'


def write(
    directory: Path,
    *,
    script: str = ASK + AGAIN,
    sandbox: str = "",
    verifier: str = VERIFIER,
    more: str = "",
    prompts: int = 2,
    trials: int = 8,
) -> None:
    for number in range(4):
        task = directory / ("held" if number == 3 else f"tasks/say-{number}")
        toml = TOML + ("[verifier]\ntimeout_sec = 2\n" if "sleep" in verifier else "")
        make_task(task, toml, files={"instruction.md": f"say {number}", "tests/test.sh": verifier})
    (directory / "train.toml").write_text(f"""
[algorithm]
kind = "grpo"
[algorithm.grpo]
base_model.uri = "model"
num_generations = 2
prompts_per_step = {prompts}
max_completion_length = 60
max_length = 240
optimizer = {{ lr = 1e-3 }}
budget.max_steps = 2
device = "cpu"
seed = 7
{more}
[algorithm.grpo.environment]
kind = "job"
path = "tasks"
eval_path = "held"
n_concurrent_trials = {trials}
sandbox = {{ type = "process"{sandbox} }}
[algorithm.grpo.environment.agent]
name = "asker"
execute = '''
#!/usr/bin/env python3
{script}'''
[output]
dir = "out"
""")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(directory: Path) -> list[Any]:
    """What has to be the same, whatever was killed."""
    out = directory / "out"
    summary = json.loads((out / "summary.json").read_text())
    same = [summary[key] for key in ("state", "weights_hash", "tokens", "tier")]
    metrics = [timeless(line) for line in lines(out / "metrics.jsonl")]
    return [same, metrics, *((out / name).read_bytes() for name in ("samples.jsonl", "eval.jsonl"))]


@pytest.mark.slow
def test_a_directory_of_tasks_trains_the_policy_that_its_agent_asks(cli: Cli) -> None:
    make_tiny(cli.directory / "model")
    write(cli.directory, trials=1)  # fewer than there are
    done = cli.run("train", "grpo", "--config", "train.toml", timeout=300)
    assert done.code == 0, done.err
    samples = lines(cli.directory / "out" / "samples.jsonl")
    assert [one["step"] for one in samples] == [1] * 4 + [2] * 4
    tokens = AutoTokenizer.from_pretrained(cli.directory / "model")
    for one in samples:
        assert one["prompt"] == [{"role": "user", "content": f"say {one['number'] - 1}"}]
        text = tokens.decode(one["completion_ids"])
        assert text.count("<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n") == 1 and "a title" not in text
        assert one["reward"] == one["rewards"]["environment"] in range(5)
    assert {one["reward"] for one in samples} != {0.0}
    (evaluated,) = lines(cli.directory / "out" / "eval.jsonl")
    assert evaluated["reward"] in range(5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_in_the_midst_of_trials_it_ends_in_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    for directory in (calm, struck):
        (directory / "marks").mkdir(parents=True)
        make_tiny(directory / "model")
        mount = f', mounts = [{{ type = "bind", source = "{directory / "marks"}", target = "/marks" }}]'
        write(directory, script=HELD, sandbox=mount)
    done = Cli(calm, cli.env, cli.started).run("train", "grpo", "--config", "train.toml", timeout=600)
    assert done.code == 0, done.err
    (struck / "marks" / "hold").touch()
    with (
        tempfile.TemporaryDirectory(prefix="rj-", ignore_cleanup_errors=True) as root,
        Cluster(Path(root), transport=QUICK) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        for worker in [cluster.add_worker() for _ in range(2)]:
            worker.wait_event("worker_ready")
        command = Cli(struck, cli.env, cli.started).start(
            "train", "grpo", "--config", "train.toml", *cluster.operator()
        )

        def asked() -> int:
            path = struck / "marks" / "asked"
            return len(path.read_text().splitlines()) if path.exists() else 0

        until(lambda: asked() >= 4, "all trials of the first step", 300)
        for worker in cluster.workers:
            worker.kill()
            worker.start()
        until(lambda: asked() >= 8, "them to be tried again", 300)
        (struck / "marks" / "hold").unlink()
        out, err = command.communicate(timeout=600)
        assert command.returncode == 0, (out, err)
    assert result(struck) == result(calm)
    said = (struck / "marks" / "asked").read_text().splitlines()
    assert len(set(said[:8])) == 4, "what was drawn before the kill is found"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["stop", "drop_group", "zero"])
def test_a_verifier_that_never_ends(cli: Cli, policy: str) -> None:
    make_tiny(cli.directory / "model")
    hangs = "grep -q 1 /tmp/instruction.md && sleep 1000\n" + VERIFIER
    write(cli.directory, verifier=hangs, more=f'on_reward_error = "{policy}"', prompts=3)
    done = cli.run("train", "grpo", "--config", "train.toml", timeout=300)
    if policy == "stop":
        assert done.code == 1
        (error,) = lines(cli.directory / "out" / "errors.jsonl")
        assert error["code"] == "reward_failed" and "task say-1: " in error["message"], error
        assert "verifier_timeout" in error["message"]
        return
    assert done.code == 0, done.err
    samples = lines(cli.directory / "out" / "samples.jsonl")
    faulty = [one["reward"] for one in samples if one["number"] == 2]
    assert faulty == ([] if policy == "drop_group" else [0.0] * 4) and len(samples) == 8 + len(faulty)
