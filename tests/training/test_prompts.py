"""Rows to prompts: token ids with what asks for an answer, columns for rewards, and prompts that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from located import places
from rollout.model.errors import AttemptError
from rollout.workloads.json_form import dump_line
from rollout.workloads.train.config import SECTIONS
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.report import report_lines
from rollout_worker.backends.tiny import CHAT_TEMPLATE, END, EOS, START, make_tokenizer
from rollout_worker.backends.training import tokens as counting
from rollout_worker.backends.training.prepare import Files, Positions, prepared
from rollout_worker.backends.training.prepare_prompts import check_reward_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

USER = {"role": "user", "content": "1 and 2"}


def make(*, eos: bool = False) -> Any:
    """`eos`: the tokenizer puts it behind every text."""
    raw = make_tokenizer()
    if eos:
        raw.post_processor = TemplateProcessing(f"$A {EOS}", special_tokens=[(EOS, raw.token_to_id(EOS))])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make()


def given(**more: Any) -> dict[str, Any]:
    base = {"base_model": "tiny", "dataset": "rows", "optimizer": {"lr": 1}, "budget": {"epochs": 1}}
    return {**base, "reward": ["a:b"], "max_length": 40, "max_completion_length": 16, **more}


class Case:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.jsonl"

    def prepare(self, tokenizer: Any, rows: list[Any], /, **more: Any) -> tuple[list[Prompt], dict[str, Any]]:
        self.path.write_bytes(b"".join(map(dump_line, rows)))
        positions, settings = more.pop("positions", None), SECTIONS["grpo"].model_validate(given(**more))
        files, made = Files("jsonl_path", (self.path,), identity=str(rows)), self.path.with_name("made")
        cache = self.path.with_name("cache")

        def make() -> tuple[int, dict[str, Any]]:
            return prepared("grpo", settings, files, tokenizer, made, cache, positions=positions)

        units, report = make()
        assert make() == (units, report), "the second comes from the cache"
        prompts = Prompts(made)
        assert units == len(prompts) == report["sequences"]
        return [prompts[place] for place in range(units)], report


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_texts_conversations_and_columns(tokenizer: Any, case: Case) -> None:
    rows = [{"prompt": "1 and 2 is", "answer": 3}, {"prompt": [USER], "level": {"of": [1, None]}}]
    (text, chat), report = case.prepare(tokenizer, rows)
    assert (text.number, text.prompt, text.columns) == (1, "1 and 2 is", {"answer": 3, "level": None})
    assert tokenizer.decode(text.ids) == "1 and 2 is"
    assert (chat.number, chat.prompt, chat.columns) == (2, [USER], {"level": {"of": [1, None]}, "answer": None})
    asked = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.ids) == asked and asked.endswith("assistant\n")
    assert report["rows"] == report["kept"] == 2 and report["supervised_tokens"] == 0
    (line,) = report_lines("dataset", report)
    tokens = len(text.ids) + len(chat.ids)
    assert line == f"dataset: 2 rows: 2 kept, 0 dropped; {tokens} tokens; the longest sequence has {len(chat.ids)}"


def test_what_the_tokenizer_appends_is_no_part_of_a_prompt(tokenizer: Any, case: Case) -> None:
    row = {"prompt": "1 and 2 is"}
    assert case.prepare(make(eos=True), [row])[0][0].ids == case.prepare(tokenizer, [row])[0][0].ids


@pytest.mark.parametrize(
    ("positions", "allowed"),
    [(None, "24 tokens that max_completion_length leaves of max_length"),
     (Positions(30, False), "14 tokens that max_completion_length leaves of the model's positions")],
)  # fmt: skip
def test_prompts_that_leave_no_room(tokenizer: Any, case: Case, positions: Any, allowed: str) -> None:
    rows = [{"prompt": "7"}, {"prompt": " 7" * 25}]
    with pytest.raises(AttemptError) as error:
        case.prepare(tokenizer, rows, positions=positions)
    assert error.value.error_code == "invalid_data"
    assert error.value.message.startswith(f"rows.jsonl:2: too_long, more than the {allowed}")
    kept, report = case.prepare(tokenizer, rows, positions=positions, rows={"too_long": "drop"})
    assert [one.number for one in kept] == [1] and report["faults"]["too_long"]["rows"] == 1


def test_completions_longer_than_the_context(tokenizer: Any, case: Case) -> None:
    with pytest.raises(AttemptError, match=r"max_completion_length = 16 .*: the model has 16"):
        case.prepare(tokenizer, [{"prompt": "7"}], positions=Positions(16, True))


def test_rows_that_cannot_be_prompts(tokenizer: Any, case: Case) -> None:
    answered = [USER, {"role": "assistant", "content": "3"}]
    with pytest.raises(AttemptError) as error:
        case.prepare(tokenizer, [{"prompt": ""}, {"prompt": answered}, {"completion": "x"}])
    assert places(error.value.message) == ['rows.jsonl:2: "prompt"', "rows.jsonl:3", "rows.jsonl:1"]
    assert 'has no "prompt"' in error.value.message and "has no token" in error.value.message


def test_a_dry_run_counts_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr(counting, "read_tokenizer", lambda name: tokenizer)
    (tmp_path / "rows.jsonl").write_bytes(dump_line({"prompt": "1 and 2"}))
    files = {"kind": "jsonl_path", "files": [[str(tmp_path / "rows.jsonl"), "rows.jsonl"]], "manifest": ""}
    asked = {"kind": "ppo", "settings": given(), "datasets": {"dataset": files}, "tokenizer": "t", "model": None}
    assert counting.counted(asked)["data"]["dataset"]["sequences"] == 1


def test_a_reward_model_of_another_tokenizer(tokenizer: Any) -> None:
    other = make()
    check_reward_tokenizer(tokenizer, other, "rm")
    other.add_tokens(["<more>"])
    with pytest.raises(AttemptError, match=r"reward: rm .*tokenizer") as error:
        check_reward_tokenizer(tokenizer, other, "rm")
    assert error.value.error_code == "invalid_data"
