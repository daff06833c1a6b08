"""A policy learns from the verifiers of job tasks: its exact match on prompts that were held out."""

from __future__ import annotations

from pathlib import Path

import pytest
from acceptance_cli import Cli
from job_files import make_task
from policy_tasks import exact_match_of, problems, supervised

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

AGENT = """
import json, os, urllib.request
with open(os.environ["ROLLOUT_INSTRUCTION_PATH"]) as file:
    messages = [{"role": "user", "content": file.read()}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"messages": messages}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer, open("/app/answer.txt", "w") as file:
    file.write(json.load(answer)["choices"][0]["message"]["content"])
"""
TOML = 'version = "1.0"\ndialect = "rollout"\n[environment]\ncpus = 0.1\nmemory = "128M"\n'
VERIFIER = '[ "$(cat /app/answer.txt)" = {} ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'
MARGIN = 0.15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tasks_raise_the_exact_match_on_what_was_held_out(tmp_path: Path, seed: int) -> None:
    start = supervised(tmp_path, seed)
    for row in problems(64):
        files = {"instruction.md": row["prompt"], "tests/test.sh": VERIFIER.format(row["answer"])}
        make_task(tmp_path / "tasks" / row["answer"], TOML, files=files)
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (tmp_path / "train.toml").write_text(f"""
[algorithm]
kind = "grpo"
[algorithm.grpo]
base_model = {{ uri = "{start.model}", chat_template = "plain.jinja" }}
num_generations = 8
prompts_per_step = 8
max_completion_length = 8
max_length = 64
optimizer = {{ lr = 2e-4, schedule = "constant" }}
budget.max_steps = 20
device = "cpu"
seed = {seed}
[algorithm.grpo.environment]
kind = "job"
path = "tasks"
sandbox = {{ type = "process" }}
agent = {{ name = "asker", execute = '''#!/usr/bin/env python3{AGENT}''' }}
[output]
dir = "out"
model = true
""")
    env = {"XDG_STATE_HOME": str(tmp_path / ".state"), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    done = Cli(tmp_path, env).run("train", "grpo", "--config", "train.toml", timeout=3000)
    assert done.code == 0, done.err
    learnt = exact_match_of(tmp_path / "out" / "model", problems(500, held=True))
    print(f"job tasks, seed {seed}: {start.level:.1%} right before, {learnt:.1%} after 20 steps")
    assert learnt > start.level + MARGIN, (start.level, learnt)
