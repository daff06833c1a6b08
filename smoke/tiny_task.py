"""A task that a tiny model learns on one core in seconds: say a word backwards.

`trqk>` is asked and `kqrt` is right, all of it or nothing. Words are three to eight random letters, one token a letter.
Which words are held out is told by a hash of the word alone, so that no choice of rows, seed or size ever moves one from
what is asked into what is trained on.

`python smoke/tiny_task.py DIR` writes what docs/train.md begins with: a model with random weights, rows to train on, rows
and questions that are held out. `python smoke/tiny_task.py --right FILE` counts the right answers of a completions.jsonl.
`python smoke/tiny_task.py --sort DIR` writes what docs/rl.md begins with: the task is to sort five letters, and half of
what is demonstrated is wrong. `--recipe DIR` writes the same task as conversations, for docs/recipe.md.

Measured on one core, bare torch, batches of 32, from random weights to 95 % of held-out questions: words backwards with
86,000 parameters 450 steps in 4.5 s; sums of three digits, all numbers written backwards, with 84,000 parameters and
batches of 64 some 900 steps in 13 s; sums with only the result backwards not within 1,300 steps of 128 in 80 s.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from string import ascii_lowercase
from typing import Any

SHORTEST, LONGEST = 3, 8
ASK = ">"
"""Ends a question."""
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_HELD_OUT_OF_256 = 32
"""An eighth of all words."""


def held_out(word: str) -> bool:
    return sha256(word.encode()).digest()[0] < _HELD_OUT_OF_256


def words(count: int, seed: int, *, asked: bool = False) -> list[str]:
    """So many different ones; `asked`: of those that are held out, else of the others."""
    chance, found = random.Random(f"{seed} {asked}"), dict[str, None]()
    while len(found) < count:
        word = "".join(chance.choice(ascii_lowercase) for _ in range(chance.randint(SHORTEST, LONGEST)))
        if held_out(word) == asked:
            found[word] = None
    return list(found)


def rows(count: int, seed: int = 0, *, asked: bool = False) -> Iterator[dict[str, str]]:
    """Of supervised fine-tuning: prompt and completion."""
    for word in words(count, seed, asked=asked):
        yield {"prompt": word + ASK, "completion": word[::-1]}


def sorting(count: int, *, asked: bool = False) -> Iterator[dict[str, str]]:
    """Five letters of the first ten, and the same sorted, for a reward."""
    chance, found = random.Random(f"sort {asked}"), dict[str, None]()
    while len(found) < count:
        word = "".join(chance.choices(ascii_lowercase[:10], k=5))
        if held_out(word) == asked:
            found[word] = None
    return ({"prompt": word + ASK, "answer": "".join(sorted(word))} for word in found)


def careless(count: int) -> Iterator[dict[str, str]]:
    """Demonstrations: of words from `f` on three of four are sorted the wrong way round, of others one of four. A model
    that learns from them is right about half of the time, however long it is trained."""
    chance = random.Random("careless")
    for row in sorting(count):
        wrong = chance.random() < (0.75 if row["prompt"] >= "f" else 0.25)
        yield {"prompt": row["prompt"], "completion": row["answer"][::-1] if wrong else row["answer"]}


def write_rows(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def right_answers(completions: Path) -> tuple[int, int]:
    """(exactly right, asked) of a `completions.jsonl` of `rollout infer batch`."""
    found = [json.loads(line) for line in completions.read_text("utf-8").splitlines()]
    return sum(row["completion"] == row["prompt"].removesuffix(ASK)[::-1] for row in found), len(found)


def make_model(
    directory: Path, *, hidden: int = 64, layers: int = 2, dropout: float = 0.0, seed: int = 0, chat: bool = False
) -> int:
    """Write a Llama with random weights, and a tokenizer of one token a letter; how many parameters it has.

    `chat`: with a chat template, and with tokens for its roles and for `INSTRUCTION`.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    symbols = _SYMBOLS + (_CHAT_SYMBOLS if chat else [])
    _write_tokenizer(directory, symbols, chat_template=_CHAT_TEMPLATE if chat else None)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_SYMBOLS.index(EOS),
        pad_token_id=_SYMBOLS.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


INSTRUCTION = "Sort the letters: "
"""Before the word, in a conversation."""
_SYMBOLS = [PAD, EOS, UNKNOWN, ASK, *ascii_lowercase]
_USER, _ASSISTANT = "<|user|>", "<|assistant|>"
_CHAT_SYMBOLS = [_USER, _ASSISTANT, INSTRUCTION]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _write_tokenizer(directory: Path, symbols: list[str], chat_template: str | None) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([symbol for symbol in symbols if symbol.startswith("<")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{INSTRUCTION}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
    } | ({"chat_template": chat_template} if chat_template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def write_all(directory: Path, *, dropout: float = 0.0) -> int:
    """DIR/model, train.jsonl, eval.jsonl and questions.jsonl: how many parameters the model has."""
    asked = list(rows(200, asked=True))
    write_rows(directory / "train.jsonl", rows(10_000))
    write_rows(directory / "eval.jsonl", asked)
    write_rows(directory / "questions.jsonl", ({"prompt": row["prompt"]} for row in asked))
    return make_model(directory / "model", hidden=96, dropout=dropout)


def write_tasks(directory: Path, asked: Iterable[dict[str, str]]) -> None:
    """A job task for each prompt: the agent leaves its answer in /app/answer.txt, and all of it or nothing is right."""
    for row in asked:
        task = directory / row["prompt"].removesuffix(ASK)
        files = {
            "task.toml": 'version = "1.0"\ndialect = "rollout"\n[environment]\ncpus = 0.1\nmemory = "128M"\n',
            "instruction.md": row["prompt"],
            "environment/Dockerfile": "FROM debian:12\n",
            "tests/test.sh": f'[ "$(cat /app/answer.txt)" = {row["answer"]} ]\n'
            "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        }
        for name, text in files.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text, "utf-8")


def write_sorting(directory: Path) -> int:
    """DIR/model, demonstrations.jsonl, prompts.jsonl and prompts-eval.jsonl, the first of these as tasks and tasks-eval
    too, and a chat template that adds nothing: how many parameters the model has."""
    write_tasks(directory / "tasks", sorting(200))
    write_tasks(directory / "tasks-eval", sorting(40, asked=True))
    (directory / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}", "utf-8")
    write_rows(directory / "demonstrations.jsonl", careless(8_000))
    write_rows(directory / "prompts.jsonl", sorting(4_000))
    write_rows(directory / "prompts-eval.jsonl", sorting(200, asked=True))
    return make_model(directory / "model")


def write_recipe(directory: Path, tasks: int = 60) -> int:
    """DIR/model, demonstrations.jsonl, prompts.jsonl and tasks.jsonl, of words that are held out: how many parameters
    the model has."""

    def question(row: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": INSTRUCTION + row["prompt"].removesuffix(ASK)}]

    shown = (
        {"prompt": question(row), "completion": [{"role": "assistant", "content": row["completion"]}]}
        for row in careless(8_000)
    )
    asked = (
        {"task_id": row["prompt"].removesuffix(ASK), "messages": question(row), "answer": row["answer"]}
        for row in sorting(tasks, asked=True)
    )
    write_rows(directory / "demonstrations.jsonl", shown)
    write_rows(directory / "prompts.jsonl", (row | {"prompt": question(row)} for row in sorting(4_000)))
    write_rows(directory / "tasks.jsonl", asked)
    return make_model(directory / "model", chat=True)


if __name__ == "__main__":
    if sys.argv[1] == "--right":
        print("{} of {} right".format(*right_answers(Path(sys.argv[2]))))
    elif sys.argv[1] == "--sort":
        print(
            f"{sys.argv[2]}: a model of {write_sorting(Path(sys.argv[2])):,} parameters, 8000 demonstrations, 4000 prompts"
        )
    elif sys.argv[1] == "--recipe":
        parameters = write_recipe(Path(sys.argv[2]))
        print(f"{sys.argv[2]}: a model of {parameters:,} parameters, 8000 demonstrations, 4000 prompts, 60 tasks")
    else:
        print(
            f"{sys.argv[1]}: a model of {write_all(Path(sys.argv[1])):,} parameters, 10000 rows, 200 that are held out"
        )
