"""The configuration of grpo and ppo: faults with their places, what a user of TRL pastes, the code of rewards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from job_files import TASK, make_task
from located import places
from rollout.config.load import load_settings, located
from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.workloads.port import FoundSnapshot, InputReader, check_only
from rollout.workloads.resume import describe_changes
from rollout.workloads.train import preview as previewing
from rollout.workloads.train.config import SECTIONS, Kind, TrainConfig
from rollout.workloads.train.files import table_rows
from rollout.workloads.train.memory import count, estimate
from rollout.workloads.train.plan import items
from rollout.workloads.train.policy_config import GenerationSection, PolicySection
from rollout.workloads.train.workload import Train

BASE = (
    'base_model.uri = "tiny"\ndataset = "rows.jsonl"\noptimizer.lr = 1e-3\nbudget.max_steps = 6\nprompts_per_step = 2\n'
)
REST = BASE + 'reward = ["rewards:exact"]\n'
TAIL = '[output]\ndir = "out"\n'
EXACT = "def exact(prompts, completions, answer, **columns):\n    return [0.0]\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(previewing, "find_spec", lambda name: None)


def load(section: str, kind: Kind = "grpo", tail: str = TAIL) -> TrainConfig:
    Path("c.toml").write_text(f'[algorithm]\nkind = "{kind}"\n[algorithm.{kind}]\n' + section + tail)
    return load_settings(TrainConfig, "c.toml", environ={})


def policy(section: str, kind: Kind = "grpo", tail: str = TAIL) -> PolicySection:
    found = load(section, kind, tail).algorithm.settings
    assert isinstance(found, PolicySection)
    return found


def faults(section: str, kind: Kind = "grpo", tail: str = TAIL) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(section, kind, tail)
    lines = error.value.message.split("\n")
    return [line.strip() for line in (lines[1:] if lines[0].endswith("problems:") else lines)]


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("grpo", "num_generations = 1", "num_generations: must be at least 2, not 1"),
        ("grpo", "num_generations = 3\nnum_minibatches = 4", "num_minibatches: the 6 samples of a step (2 of"),
        ("grpo", 'devices = 3\nstrategy = "ddp"', "devices: the 16 samples of an update"),
        ("grpo", "gradient_accumulation = 2", "gradient_accumulation: follows from the other keys"),
        ("grpo", "max_completion_length = 1024", "max_completion_length: is 1,024 of the 1,024 tokens"),
        ("grpo", "temperature = 0", "temperature: must be more than 0"),
        ("grpo", "lag = -1", "lag: must be at least 0"),
        ("grpo", 'loss_type = "sapo"', 'loss_type: must be "grpo", "bnpo", "dapo", "dr_grpo" or "cispo"'),
        ("grpo", 'loss_type = "cispo"', "epsilon_high: is the bound of the ratio"),
        ("grpo", 'loss_type = "cispo"\nepsilon_high = 5.0\ndelta = 9.0', "delta: has no meaning with loss_type"),
        ("grpo", "delta = 0.5", "delta: must be more than 1"),
        ("grpo", 'beta = 0.1\nreference = "free"', "reference: beta = 0.1 needs something to compare with"),
        ("grpo", 'reference = "other"', "reference: has no meaning with beta = 0"),
        ("ppo", 'kl_coef = 0\nreference = "other"', "reference: has no meaning with kl_coef = 0"),
        ("grpo", 'rows.too_long = "keep"', "rows.too_long: a prompt that is cut off asks something else"),
        ("grpo", 'rows.identical_pair = "drop"', "rows.identical_pair: is of rows with completions"),
        ("grpo", 'on_reward_error = "skip"', 'on_reward_error: must be "stop", "drop_group" or "zero"'),
        ("grpo", 'importance_sampling_correction = "mask"', "importance_sampling_correction: must be "),
        ("grpo", "kl_coef = 0.1", "kl_coef: unknown key"),
        ("ppo", "beta = 0.1", "beta: unknown key"),
        ("ppo", 'value = "heads"', 'value: must be "head" or "model"'),
        ("ppo", "gamma = 0", "gamma: must be more than 0"),
        ("ppo", "lam = 1.5", "lam: must be at most 1"),
        ("grpo", 'packing = "best_fit"', "packing: unknown key"),
        ("grpo", "num_generation = 4", 'num_generation: unknown key; did you mean "num_generations"?'),
        ("grpo", "top_p = 0.9", "top_p: is not done here: the engine's log-probabilities would be"),
        ("grpo", "top_k = 50", "top_k: is not done here: the engine's log-probabilities would be"),
    ],
)  # fmt: skip
def test_a_fault_has_its_place(kind: Kind, line: str, message: str) -> None:
    (said,) = faults(line + "\n" + REST, kind)
    assert message in said and said.startswith("c.toml:")


def test_rules_across_keys_are_told_together() -> None:
    given = "num_minibatches = 3\nmax_completion_length = 2000\ngradient_accumulation = 2\nbeta = 0.1\n"
    said = faults(given + 'reference = "free"\n' + REST)
    assert [line.partition(": ")[2].partition(":")[0].removeprefix("algorithm.grpo.") for line in said] == [
        "num_minibatches", "max_completion_length", "gradient_accumulation", "reference",
    ]  # fmt: skip
    assert [line.partition(" ")[0] for line in said] == [f"c.toml:{line}:" for line in (4, 5, 6, 8)]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("[]", "reward: must not be empty"),
        ("[{ weight = 1.0 }]", "reward.0: give function or model, one of them"),
        ('[{ function = "a:b", model = "m" }]', "reward.0: give function or model, one of them"),
        ('["a:f", "b:f"]', 'reward.1: another reward is called "f" too'),
        ('[{ function = "a:b", weigth = 1.0 }]', 'weigth: unknown key; did you mean "weight"?'),
        ('[{ model = "m" }]\nreward_code = "src"', "reward_code: has no meaning without a function"),
        ('[{ model = "m" }]\ndynamic_sampling = 2', "dynamic_sampling: does not go together with a reward model"),
    ],
)
def test_faults_of_rewards(reward: str, message: str) -> None:
    (said,) = faults(f"reward = {reward}\n{BASE}")
    assert said.startswith("c.toml:") and message in said


ENV = 'environment = { kind = "multi_turn", class = "games:Env" }\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('environment = { class = "games:Env" }', "environment.kind: is missing"),
        ('environment = { kind = "multi_turn" }', "environment.class: is missing"),
        ('environment = { kind = "multi_turn", class = "games:Env", max_turns = 0 }', "environment.max_turns: must be at"),
        ('environment = { kind = "multi_turn", class = "games:Env", turns = 2 }', "environment.turns: unknown key"),
        (ENV + 'reward = ["a:environment"]', 'reward.0: the reward of the environment is called "environment"'),
        ('reward_code = "src"', "reward: must not be empty: name a function or a reward model, or give an environment"),
    ],
)  # fmt: skip
def test_faults_of_an_environment(line: str, message: str) -> None:
    assert any(said.startswith("c.toml:") and message in said for said in faults(f"{line}\n{BASE}"))


AGENT = 'agent = { name = "mine", execute = "true" }'
JOB = f'environment = {{ kind = "job", path = "tasks", {AGENT} }}\n'
NO_ROWS = BASE.replace('dataset = "rows.jsonl"\n', "")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (JOB + BASE, "dataset: the tasks of environment.path are the rows: remove it"),
        (JOB + NO_ROWS + 'eval_dataset = "rows.jsonl"\n', "eval_dataset: the tasks of environment.eval_path are the rows"),
        (JOB.replace('path = "tasks", ', "") + NO_ROWS, "environment.path: is missing"),
        (JOB.replace(f", {AGENT}", "") + NO_ROWS, "environment.agent: is missing"),
        (JOB.replace('name = "mine", execute = "true"', 'name = "oracle"') + NO_ROWS, "environment.agent: oracle asks no"),
        (JOB.replace('name = "mine", execute = "true"', 'name = "nop"') + NO_ROWS, "environment.agent: nop asks no model"),
        (JOB.replace('name = "mine", execute = "true"', 'name = "aider", model_name = "a/b"') + NO_ROWS,
         "environment.agent: asks the policy that is trained: remove model_name"),
        (JOB.replace("kind", 'class = "a:B", kind') + NO_ROWS, 'environment.class: has no meaning with kind = "job"'),
        (ENV.replace(" }", ', path = "tasks" }') + BASE, 'environment.path: has no meaning with kind = "multi_turn"'),
        (JOB.replace(" }\n", ', sandbox.type = "docker" }\n') + NO_ROWS, "environment.sandbox.type: "),
        (JOB.replace(" }\n", ', sandbox.type = "bubblewarp" }\n') + NO_ROWS, 'did you mean "bubblewrap"?'),
        (JOB.replace("execute", "exekute") + NO_ROWS, "environment.agent.exekute: unknown key"),
    ],
)  # fmt: skip
def test_faults_of_tasks_as_an_environment(section: str, message: str) -> None:
    assert any(said.startswith("c.toml:") and message in said for said in faults(section))


def test_an_environment_gives_a_reward() -> None:
    read = policy(ENV + BASE)
    assert (read.judges, read.weights, read.reward_code) == (["environment"], {"environment": 1.0}, None)
    assert SECTIONS["grpo"].model_validate(read.model_dump(mode="json")) == read
    both = policy(ENV.replace(" }", ", weight = 0.5 }") + 'reward = [{ model = "rm" }, "a:f"]\n' + BASE)
    assert both.judges == ["f", "environment"] and both.weights == {"rm": 1.0, "f": 1.0, "environment": 0.5}


def test_rewards_by_name_and_as_tables() -> None:
    models = '"run:my-rm", { model = "./models/rm/", weight = 0.5, name = "taste" }, { model = "org/rm" }'
    read = policy(f'reward = ["a.b:exact", {models}]\n' + BASE)
    assert [(one.name, one.weight) for one in read.reward] == [
        ("exact", 1.0), ("run:my-rm", 1.0), ("taste", 0.5), ("rm", 1.0)
    ]  # fmt: skip
    assert read.functions == ["a.b:exact"] and read.reward_models == ["run:my-rm", "./models/rm/", "org/rm"]
    assert policy('reward = "a:f"\n' + BASE).functions == ["a:f"]
    assert SECTIONS["grpo"].model_validate(read.model_dump(mode="json")) == read, "a worker reads what was written out"


@pytest.mark.parametrize(
    ("kind", "generation", "message"),
    [
        ("sft", "", "generation: sft draws no samples: remove this section"),
        ("grpo", 'placement = "separate"', "generation.require_labels: "),
        ("grpo", 'require_labels = { a = "b" }', "generation.require_labels: has no meaning with placement"),
        ("grpo", 'engine = { dtype = "float16" }', "generation.engine.dtype: is a key of [generation] itself"),
        ("grpo", "engine = { max_num_sequences = 4 }", "generation.engine.max_num_sequences: is no key of an engine"),
        ("grpo", "engine = { max_num_seqs = 0 }", "generation.engine.max_num_seqs: must be at least 1, not 0"),
        ("grpo", "engine = { fail_rate = 0.5 }", "generation.engine.fail_rate: is no key of an engine"),
        ("grpo", 'backend = "sglang"', 'generation.backend: must be "transformers" or "vllm"'),
        ("grpo", "top_p = 0.9", "generation.top_p: is not done here: the engine's log-probabilities would be"),
        ("grpo", "frequency_penalty = 0.5", "generation.frequency_penalty: is not done here"),
    ],
)
def test_faults_of_generation(kind: Kind, generation: str, message: str) -> None:
    section = REST if kind == "grpo" else BASE.replace("prompts_per_step = 2\n", "")
    (said,) = faults(section, kind, f"[generation]\n{generation}\n{TAIL}")
    assert said.startswith("c.toml:") and message in said


# ---- TRL


GRPO = """
model_name_or_path = "tiny"
dataset_name = "prompts.jsonl"
learning_rate = 1e-6
num_train_epochs = 1
per_device_train_batch_size = 4
gradient_accumulation_steps = 4
steps_per_generation = 8
num_generations = 8
max_completion_length = 512
temperature = 1.0
top_p = 1.0
top_k = 0
repetition_penalty = 1.0
beta = 0.0
epsilon = 0.2
epsilon_high = 0.28
loss_type = "dapo"
scale_rewards = true
reward_funcs = ["rewards:exact", "rewards:short"]
reward_weights = [1.0, 0.1]
use_vllm = true
vllm_mode = "colocate"
vllm_gpu_memory_utilization = 0.3
vllm_tensor_parallel_size = 1
vllm_importance_sampling_mode = "token_truncate"
vllm_importance_sampling_clip_max = 2.0
mask_truncated_completions = true
log_completions = true
multi_objective_aggregation = "sum_then_normalize"
sapo_temperature_neg = 1.05
entropy_coef = 0.0
bf16 = true
logging_steps = 10
output_dir = "out"
max_length = 2048
"""
PPO = """
sft_model_path = "tiny"
reward_model_path = "rm"
dataset_name = "prompts.jsonl"
total_episodes = 1000
per_device_train_batch_size = 8
gradient_accumulation_steps = 2
num_mini_batches = 4
num_ppo_epochs = 2
response_length = 53
stop_token = "eos"
temperature = 0.7
kl_coef = 0.1
cliprange = 0.1
learning_rate = 3e-6
output_dir = "out"
"""


def test_a_configuration_of_trls_grpo() -> None:
    read = load(GRPO, tail="")
    section = read.algorithm.settings
    assert isinstance(section, PolicySection) and read.generation is not None
    found = section.model_dump(exclude_unset=True)
    batch = {"minibatch_size": 4, "prompts_per_step": 4, "num_minibatches": 2, "num_generations": 8}
    assert {key: found[key] for key in batch} == batch, "32 samples a step, an update every 4 of 8 calls"
    assert found["scale_rewards"] == "group" and found["epsilon_high"] == 0.28 and section.updates == 2
    assert [(one.function, one.weight) for one in section.reward] == [("rewards:exact", 1.0), ("rewards:short", 0.1)]
    assert (section.importance_sampling_correction, section.importance_sampling_cap) == ("token_truncate", 2.0)
    engine = {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 1}
    assert read.generation.model_dump(exclude_unset=True) == {"backend": "vllm", "engine": engine}
    assert [note.partition(" ")[0] for note in read.notes] == [
        "log_completions", "sapo_temperature_neg", "logging_steps"
    ]  # fmt: skip
    assert "use_bias_correction_kl" in load(GRPO.replace("beta = 0.0", "beta = 0.1"), tail="").notes[-1]
    said = load(GRPO.replace("beta = 0.0", "beta = 0.1\nuse_bias_correction_kl = false"), tail="").notes
    assert not any(note.startswith("beta") for note in said)


def test_without_vllm_its_keys_say_nothing() -> None:
    read = load(GRPO.replace("use_vllm = true", "use_vllm = false"), tail="")
    assert read.generation is None and "importance_sampling_correction" not in read.algorithm.settings.model_fields_set


def test_a_configuration_of_trls_ppo() -> None:
    said = faults(PPO, "ppo", tail="")
    assert "total_episodes: is not done here: set budget.max_steps" in said[-1] and "budget: is missing" in said[0]
    section = policy(PPO.replace("total_episodes = 1000", "budget.max_steps = 10"), "ppo", tail="")
    assert (section.prompts_per_step, section.num_minibatches, section.num_iterations) == (16, 4, 2)
    assert (section.max_completion_length, section.epsilon, section.reward_models) == (53, 0.1, ["rm"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("per_device_train_batch_size = 3", "per_device_train_batch_size: makes a step of 3 samples, which"),
        ("generation_batch_size = 12\nper_device_train_batch_size = 8", "generation_batch_size: is no multiple of the 8"),
        ("steps_per_generation = 3\ngradient_accumulation_steps = 2", "steps_per_generation: makes 3 calls a step"),
        ("steps_per_generation = 3\ngeneration_batch_size = 8", "steps_per_generation: makes 24 samples a step, and"),
        ("steps_per_generation = 2\nsave_steps = 100", "save_steps: counts updates of the optimiser in TRL, of which a step"),
        ("prompts_per_step = 4\ngradient_accumulation_steps = 2", "gradient_accumulation_steps: follows from the other"),
        ('per_device_train_batch_size = "8"', "per_device_train_batch_size: must be a whole number of at least 1"),
        ("reward_weights = [1.0, 2.0]", "reward_weights: must be a list of 1 numbers"),
        ('reward_funcs = ["a:b"]', "reward_funcs: is TRL's name of reward, which is given too"),
        ('use_vllm = true\nvllm_mode = "server"', 'vllm_mode: set placement = "separate"'),
        ("use_bias_correction_kl = true\nbeta = 0.1", "use_bias_correction_kl: is not done here"),
        ("off_policy_mask_threshold = 0.5", "off_policy_mask_threshold: is not done here: use"),
        ("min_p = 0.1", "min_p: is not done here"),
    ],
)  # fmt: skip
def test_what_is_refused_of_trl_has_its_line(line: str, message: str) -> None:
    (said,) = faults(line + "\n" + REST.replace("prompts_per_step = 2\n", ""))
    assert said.startswith("c.toml:") and f"algorithm.grpo.{message}" in said


# ---- what the files say


def written(section: str = REST, kind: Kind = "grpo", tail: str = TAIL, rewards: str = EXACT) -> TrainConfig:
    """With files that fit."""
    Path("rows.jsonl").write_text('{"prompt": "p", "answer": "c"}\n' * 4)
    Path("rewards.py").write_text(rewards)
    for name, vocabulary in (("tiny", {"a": 0, "b": 2}), ("same", {"a": 0, "b": 2}), ("other", {"a": 0, "c": 2})):
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.json").write_text('{"vocab_size": 3, "max_position_embeddings": 64}')
        Path(name, "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
        Path(name, "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    shutil.copytree("same", "bare", dirs_exist_ok=True)
    header = b'{"lm_head.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    Path("bare", "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return load(section, kind, tail)


def check(section: str = REST, **more: Any) -> str:
    settings = written(section, **more)
    with pytest.raises(RolloutError) as error, located(Path("c.toml"), TrainConfig):
        check_only(Train(), settings)
    assert isinstance(error.value, ConfigError | InputError)
    return error.value.message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def exact(:\n", "rewards.py:1: invalid syntax"),
        ("def exakt(prompts, completions, **columns): ...", "rewards.py defines no 'exact'; did you mean exakt?"),
        ("def exact(prompts, completions): ...", "rewards.py:1: exact is also given completion_ids, answer: add **columns"),
        ("\ndef exact(completions, label, **columns): ...", "rewards.py:2: exact needs label, which no row of dataset has"),
        ("def exact(completions, *, log_metric, **columns): ...", "rewards.py:1: exact needs log_metric of TRL's trainer"),
        ("def exact(completions, /, **columns): ...", "rewards.py:1: exact takes completions by position"),
        ("class exact:\n    pass", "rewards.py:1: class exact has no __call__"),
        ("class exact:\n    def __call__(self, label, **columns): ...", "rewards.py:2: exact needs label"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_be_called(code: str, message: str) -> None:
    assert message in check(rewards=code)


@pytest.mark.parametrize(
    "code",
    [
        "async def exact(completions, answer=None, **columns): ...",
        "class exact:\n    def __init__(self): ...\n    def __call__(self, completions, **columns): ...",
        "import functools\n@functools.cache\ndef exact(x): ...",
        "exact = lambda **columns: []",
    ],
)
def test_rewards_that_can_be_called_or_may_be(code: str) -> None:
    check_only(Train(), written(rewards=code))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('reward = ["nowhere:f"]', "there is no module 'nowhere' in the current directory"),
        ('reward = ["exact"]', "'exact' does not name a function as MODULE:FUNCTION"),
        ('reward = ["rewards:exact"]\nreward_code = "src"', "c.toml:10: algorithm.grpo.reward_code: there is no directory"),
        ('reward = [{ model = "./none" }]', "c.toml:9: algorithm.grpo.reward.0: there is no directory ./none"),
        ('reward = [{ model = "other" }]', "c.toml:9: algorithm.grpo.reward.0: other has another tokenizer than tiny"),
        ('reward = [{ model = "bare" }]', "c.toml:9: algorithm.grpo.reward.0: bare has no score.weight"),
    ],
)  # fmt: skip
def test_a_reward_that_is_not_there(line: str, message: str) -> None:
    assert message in check(f"{BASE}{line}\n")


GAME = "class Env:\n    def reset(self, {reset}): ...\n    def step(self, {step}): ...\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Game: ...", "rewards.py defines no 'Env'"),
        ("class Env:\n    def step(self, completion): ...", "rewards.py:1: class Env has no method reset"),
        ("class Env: ...", "rewards.py:1: class Env has no method reset and no method step"),
        (GAME.format(reset="prompt", step="text"), "rewards.py:2: Env.reset is also given answer: add **columns"),
        (GAME.format(reset="label, **columns", step="text"), "rewards.py:2: Env.reset needs label, which no row of"),
        (GAME.format(reset="**columns", step="text, more"), "rewards.py:3: Env.step must take one argument"),
        (GAME.format(reset="**columns", step="*, text"), "rewards.py:3: Env.step must take one argument"),
        ("class Env:\n    def __init__(self, level): ...\n    def reset(self, **c): ...\n    def step(self, a): ...",
         "rewards.py:1: Env is made without arguments, and its __init__ needs level"),
        ("def Env(level): ...", "rewards.py:1: Env is called without arguments, and needs level"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_played(code: str, message: str) -> None:
    said = check(BASE + ENV.replace("games", "rewards"), rewards=code)
    assert message in said and said.startswith("c.toml:9: algorithm.grpo.environment.class: ")


def test_tasks_are_the_rows_and_travel() -> None:
    for name in ("tasks/b", "tasks/a", "held"):
        make_task(Path(name))
    make_task(Path("tasks/c"), without=("instruction.md",))
    make_task(Path("tasks/d"), TASK["task.toml"] + "[agnet]\n")
    both = JOB.replace(", agent", ', eval_path = "held", sandbox = { type = "process" }, agent') + NO_ROWS
    said = check(both)
    missing, unknown = places(said)
    assert missing.endswith("path: tasks/c/instruction.md") and unknown.endswith("tasks/d/task.toml:3: agnet")
    for name in ("c", "d"):
        shutil.rmtree(f"tasks/{name}")
    found = checked(written(both))
    table = found.config["executors"]["job"]
    assert [list(table["tasks"][name]) for name in ("dataset", "eval_dataset")] == [["a", "b"], ["held"]]
    (agent,) = table["job"]["agents"]
    assert (agent["name"], table["job"]["environment"]["type"]) == ("mine", "process")
    trees = {tree.key.rpartition(".")[2]: tree.path for tree in found.trees if ".job.trees." in tree.key}
    assert table["trees"].keys() == trees.keys() == {table["tasks"]["eval_dataset"]["held"]["checksum"]}
    rows = list(table_rows("tasks_path", "tasks", Path("tasks")))
    text = TASK["instruction.md"]
    assert rows == [{"prompt": [{"role": "user", "content": text}], "task": name} for name in ("a", "b")]
    Path("tasks/a/instruction.md").write_text("other")
    changes = describe_changes(Train(), found.config, checked(written(both)).config)
    assert any("environment.path: its tasks" in change for change in changes)


@pytest.mark.parametrize(
    "code",
    [GAME.format(reset="**columns", step="text, more=1"), "class Env(Base): ...", "Env = adapted()", "def Env(): ..."],
)
def test_an_environment_travels_with_its_code(code: str) -> None:
    config = checked(written(BASE + ENV.replace("games", "rewards"), rewards=code)).config
    tables = config["executors"]
    assert tables["map"]["code"]["manifest"] and tables["rollout"]["chat_template"] is None


def test_more_prompts_than_there_are() -> None:
    said = check(REST.replace("prompts_per_step = 2", "prompts_per_step = 5"))
    assert places(said) == ["c.toml:8: algorithm.grpo.prompts_per_step"]


def test_faults_of_rows_rewards_and_models_together() -> None:
    settings = written(REST.replace('"tiny"', '"./none"'), rewards="def exact(:\n")
    Path("rows.jsonl").write_text('{"answer": 1}\n{"prompt": "a", "completions": []}\n{"prompt": 7}\n')
    with pytest.raises(InputError) as error:
        check_only(Train(), settings)
    for part in (
        "6 problems",
        'rows.jsonl:1: the row has no "prompt"',
        'rows.jsonl:2: the row has "completions", by which name',
        'rows.jsonl:3: "prompt" must be a string or a list of messages',
        "there is no directory ./none",
        "rewards.py:1: invalid syntax",
    ):
        assert part.partition(" ")[0] == "6" or part in error.value.message


# ---- the run


def checked(settings: TrainConfig, **more: Any) -> Any:
    found = Train().check(settings, InputReader(exclude=Path("out"), index=Path("../index"), **more))
    found.close()
    return found


def test_the_tables_of_executors() -> None:
    rewards = 'reward = [{ function = "rewards:exact" }, { model = "same", weight = 0.5 }]\n'
    generation = '[generation]\nplacement = "separate"\nrequire_labels = ["role=draw"]\nengine = { max_num_seqs = 4 }\n'
    found = checked(written(BASE + rewards + 'precision = "bf16"\n', tail=generation + TAIL))
    config = found.config
    assert config["executors"]["rollout"] == {
        "model": config["model"],
        "backend": {"kind": "transformers", "dtype": "bfloat16", "device": None, "max_num_seqs": 4},
        "groups_at_once": 1,
        "placement": "separate",
    }, "an engine of its own has devices of its own"
    code = config["executors"]["map"]["code"]["manifest"]
    assert config["executors"]["map"]["function"] == "rollout_worker.scoring:answer" and len(code) == 64
    assert config["generation"]["require_labels"] == {"role": "draw"}
    assert config["algorithm"]["settings"]["importance_sampling_correction"] == "off"
    assert list(config["reward_models"]) == ["1"] and config["reward_models"]["1"]["uri"] == "same"
    trees = {tree.key: [name for name, _ in tree.files or ()] for tree in found.trees}
    assert trees.pop("executors.map.code.manifest") == ["rewards.py"], "no model, no configuration, no data"
    assert trees.keys() == {
        "dataset.manifest", "model.manifest", "executors.rollout.model.manifest", "reward_models.1.manifest"
    }  # fmt: skip
    vllm = checked(written(tail='[generation]\nbackend = "vllm"\n' + TAIL)).config
    assert vllm["algorithm"]["settings"]["importance_sampling_correction"] == "sequence_mask"
    drawn = vllm["executors"]["rollout"]
    assert drawn["backend"]["gpu_memory_utilization"] == 0.3 and drawn["backend"]["max_model_len"] == 1024
    assert drawn["placement"] == "colocated"


def test_changed_code_is_another_run() -> None:
    began = checked(written())
    first = [item.id for item in items(began.config, 0)]
    assert [item.id for item in items(checked(written()).config, 0)] == first
    Path("c2.toml").write_text("")  # a configuration is no code
    assert checked(written(), kept=began.keep).config == began.config
    Path("rewards.py").write_text(EXACT.replace("0.0", "1.0"))
    settings = load(REST)
    with pytest.raises(InputError, match=r"changed: rewards\.py"):
        checked(settings, kept=began.keep)
    changed = checked(settings)
    assert not {item.id for item in items(changed.config, 0)}.intersection(first)
    (said,) = describe_changes(Train(), began.config, changed.config)
    assert said.startswith("reward_code: a file of the rewards' code was changed")


def test_where_samples_are_drawn_is_no_other_run() -> None:
    separate = '[generation]\nplacement = "separate"\nrequire_labels = { a = "b" }\n'
    began, now = checked(written()).config, checked(written(tail=separate + TAIL)).config
    assert [item.id for item in items(began, 0)] == [item.id for item in items(now, 0)]
    assert describe_changes(Train(), began, now) == []


def snapshot(kind: str, tokenizer: str, **settings: Any) -> FoundSnapshot:
    path = str(Path(tokenizer).absolute())
    config = {"algorithm": {"kind": kind, "settings": settings}, "model": {"path": path, "uri": tokenizer}}
    return FoundSnapshot("ab" * 32, "run", config, {})


def test_models_that_are_snapshots() -> None:
    given = BASE.replace('"tiny"', '"run:sft"') + 'reward = ["run:rm"]\n'
    workload, found = Train(), checked(written(given))
    assert found.snapshots == ("model", "reward_models.0")
    workload.found(found, "model", snapshot("sft", "tiny"))
    assert found.config["executors"]["rollout"]["model"]["snapshot"] == found.config["model"]["snapshot"] == "ab" * 32
    for wrong, message in (
        (snapshot("sft", "tiny"), "algorithm.grpo.reward.0.model: the snapshot is of sft, and no reward model"),
        (snapshot("rm", "tiny", lora={"r": 1}), "algorithm.grpo.reward.0.model: the snapshot holds an adapter"),
        (snapshot("rm", "other"), "algorithm.grpo.reward.0.model: .*other has another tokenizer than .*tiny"),
    ):
        with pytest.raises(ConfigError, match=message):
            workload.found(found, "reward_models.0", wrong)
    workload.found(found, "reward_models.0", snapshot("rm", "same"))
    assert found.config["reward_models"]["0"]["snapshot"] == "ab" * 32


def test_a_dry_run_says_what_a_step_is() -> None:
    settings, workload = written(REST + "num_generations = 4\nnum_minibatches = 2\nnum_iterations = 3\n"), Train()
    found = check_only(workload, settings)
    counts = workload.dry_run(settings, found)
    assert {key: counts[f"{key}_per_step"] for key in ("items", "samples", "tokens", "updates")} == {
        "items": 4, "samples": 8, "tokens": 2048, "updates": 6
    }  # fmt: skip
    assert counts["step_rows"] == 2 and counts["config"]["generation"]["dtype"] == "float32"
    lines = workload.describe(settings, found)
    assert lines[1] == "4 rows; 6 steps of 2 prompts (4 samples of each)"
    assert lines[3].startswith("a step: 2 items of 4 samples, each with one that scores it; at most 2,048 tokens drawn")
    assert 'importance_sampling_correction = "off"' in "\n".join(lines)


def test_memory_of_values_and_of_an_engine_by_turns() -> None:
    shapes = {"model.embed_tokens.weight": (3, 4), "lm_head.weight": (3, 4)}
    config = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = "num_generations = 2\nmax_length = 8\nmax_completion_length = 4\n"
    head, model = (policy(f'{sizes}value = "{value}"\n' + REST, "ppo") for value in ("head", "model"))
    assert [count("ppo", one, shapes, config) for one in (head, model)] == [(28, 28), (40, 40)]
    engine = estimate("ppo", head, shapes, config, GenerationSection()).generation
    assert engine == 4 * (28 + 2 * 2 * (2 * 8)), "its weights; keys and values of 2 numbers for each of 16 tokens"
    apart = GenerationSection(placement="separate", require_labels={"a": "b"})
    assert estimate("ppo", head, shapes, config, apart).generation == 0
