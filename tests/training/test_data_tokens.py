"""Rows to tokens: what is learnt, and each fault with its policy and its counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import AttemptError
from rollout.workloads.json_form import dump_line
from rollout.workloads.train.config import SECTIONS, Kind
from rollout.workloads.train.dataset import Dataset
from rollout.workloads.train.encode import FAULTS
from rollout.workloads.train.report import Place, listed, report_lines
from rollout.workloads.train.templates import NAMES, find_template
from rollout_worker.backends.tiny import CHAT_TEMPLATE, END, EOS, START, make_tokenizer
from rollout_worker.backends.training import prepare as preparing
from rollout_worker.backends.training import tokens as counting
from rollout_worker.backends.training.prepare import Files, Positions, positions_of, prepare, prepared
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

BOS = "<s>"
MARKED = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
)
UNSTOPPED = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")


def make(*, bos: bool = False, eos: bool = False, template: str = CHAT_TEMPLATE) -> Any:
    """`bos`, `eos`: the tokenizer puts them before and behind every text."""
    raw = make_tokenizer()
    raw.add_special_tokens([BOS])
    if eos:
        raw.post_processor = TemplateProcessing(f"$A {EOS}", special_tokens=[(EOS, raw.token_to_id(EOS))])
    if bos:
        raw.post_processor = TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, raw.token_to_id(BOS))])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, bos_token=BOS if bos else None)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make()


def settings(kind: Kind, **more: Any) -> Any:
    base = {"base_model": "tiny", "dataset": "rows", "optimizer": {"lr": 1}, "budget": {"epochs": 1}}
    return SECTIONS[kind].model_validate({**base, **more})


class Case:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.jsonl"

    def prepare(self, kind: Kind, tokenizer: Any, rows: list[Any], /, **more: Any) -> tuple[Dataset, dict[str, Any]]:
        self.path.write_bytes(b"".join(map(dump_line, rows)))
        files = Files("jsonl_path", (self.path,))
        positions = more.pop("positions", None)
        data, report = prepare(kind, settings(kind, **more), files, tokenizer, positions=positions)
        assert isinstance(data, Dataset)
        return data, report.to_json()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def texts(tokenizer: Any, data: Dataset, row: int = 0, which: int = 0) -> tuple[str, str]:
    """(all, what is learnt)"""
    ids, learnt, _ = data.sequence(row, which)
    return tokenizer.decode(ids), tokenizer.decode([token for token, one in zip(ids, learnt, strict=True) if one])


# ---- what is learnt


USER, ASSISTANT = {"role": "user", "content": "What is 7?"}, {"role": "assistant", "content": "It is 7."}
PROMPT = f"{START}user\nWhat is 7?{END}\n{START}assistant\n"


@pytest.mark.parametrize(
    ("row", "loss_on", "whole", "learnt"),
    [
        ({"prompt": "7 is", "completion": " 7"}, "completion_only", f"7 is 7{EOS}", f" 7{EOS}"),
        ({"prompt": "7 is", "completion": " 7"}, "all", f"7 is 7{EOS}", f"7 is 7{EOS}"),
        ({"text": f"7 is 7{EOS}"}, "completion_only", f"7 is 7{EOS}", f"7 is 7{EOS}"),
        ({"messages": [USER, ASSISTANT]}, "completion_only", f"{PROMPT}It is 7.{END}\n", f"It is 7.{END}\n"),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            "completion_only",
            f"{PROMPT}It is 7.{END}\n",
            f"It is 7.{END}\n",
        ),
        ({"messages": [USER, ASSISTANT]}, "all", f"{PROMPT}It is 7.{END}\n", f"{PROMPT}It is 7.{END}\n"),
        ({"messages": [USER, ASSISTANT] * 2}, "assistant_only", f"{PROMPT}It is 7.{END}\n" * 2, f"It is 7.{END}" * 2),
        (
            {"messages": [USER, ASSISTANT] * 2},
            "completion_only",
            f"{PROMPT}It is 7.{END}\n" * 2,
            f"It is 7.{END}\n",
        ),
    ],
)
def test_what_is_learnt(case: Case, tokenizer: Any, row: Any, loss_on: str, whole: str, learnt: str) -> None:
    data, report = case.prepare("sft", tokenizer, [row], loss_on={"kind": loss_on})
    assert texts(tokenizer, data) == (whole, learnt)
    supervised = len(tokenizer(learnt)["input_ids"]) - (whole == learnt)  # nothing comes before the first
    assert (report["tokens"], report["supervised_tokens"]) == (len(tokenizer(whole)["input_ids"]), supervised)


def test_both_sides_of_a_pair_count(case: Case, tokenizer: Any) -> None:
    rows = [{"prompt": "7 is", "chosen": " 7", "rejected": " eight", "margin": 0.5}] * 2
    data, report = case.prepare("dpo", tokenizer, rows)
    assert [texts(tokenizer, data, 1, which)[1] for which in (0, 1)] == [f" 7{EOS}", f" eight{EOS}"]
    lengths = [len(tokenizer(text)["input_ids"]) for text in (f"7 is 7{EOS}", f"7 is eight{EOS}")]
    prompt = len(tokenizer("7 is")["input_ids"])
    assert report["tokens"] == 2 * sum(lengths) == len(data.ids)
    assert report["supervised_tokens"] == 2 * (sum(lengths) - 2 * prompt)
    assert report["longest"] == max(lengths) and (data.rows, data.width, data.margins[0]) == (2, 2, 0.5)


def test_a_pair_for_kto_is_two_rows_of_one_number(case: Case, tokenizer: Any) -> None:
    row = {"prompt": "7 is", "chosen": " 7", "rejected": " eight"}
    data, report = case.prepare("kto", tokenizer, [row, {"prompt": "8 is", "completion": " 8", "label": True}])
    assert data.labels.tolist() == [1, 0, 1] and data.numbers.tolist() == [1, 1, 2] and report["rows"] == 3


# ---- faults


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
GOOD = {"prompt": "7 is", "completion": " 7"}
PAIR = {"prompt": "7 is", "chosen": " 7", "rejected": " eight"}
FAULTY: dict[str, tuple[Kind, Any, Any, dict[str, Any], dict[str, Any]]] = {
    # fault: (algorithm, a good row, a row that has it, more settings, more of the tokenizer)
    "no_supervised_token": ("sft", GOOD, {"prompt": " the work" * 9, "completion": " 7"}, {"max_length": 8}, {}),
    "stop_token_outside": (
        "sft", {"messages": [USER, {"role": "assistant", "content": ""}]}, {"messages": [USER, ASSISTANT]},
        {"loss_on": {"kind": "assistant_only"}}, {"template": UNSTOPPED},
    ),
    "merged_at_seam": ("sft", GOOD, {"prompt": "the coordi", "completion": "nator"}, {}, {}),
    "two_bos": ("sft", GOOD, {"prompt": f"{BOS}7 is", "completion": " 7"}, {}, {"bos": True}),
    "too_long": ("sft", GOOD, {"prompt": "7 is", "completion": " the work" * 9}, {"max_length": 8}, {}),
    "empty_completion": ("sft", GOOD, {"prompt": "7 is", "completion": ""}, {}, {}),
    "message_ignored": (
        "sft", {"messages": [USER, ASSISTANT]}, {"messages": [USER, {**ASSISTANT, "tool_calls": [CALL]}]}, {}, {},
    ),
    "tools_ignored": (
        "sft", {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], "tools": [CALL]}, {}, {},
    ),
    "identical_pair": ("dpo", PAIR, {**PAIR, "rejected": " 7"}, {}, {}),
}  # fmt: skip
ALONE = {"stop_token_outside": "no_supervised_token"}  # what the good row has: nothing that is learnt ends outside


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_with_a_fault_is_dropped_kept_or_refused(case: Case, fault: str) -> None:
    kind, good, bad, more, of_tokenizer = FAULTY[fault]
    tokenizer, rows = make(**of_tokenizer), [good, bad, good]
    others = dict.fromkeys(FAULTS, "keep")
    for policy, kept in (("drop", 2), ("keep", 3)):
        data, report = case.prepare(kind, tokenizer, rows, rows={**others, fault: policy}, **more)
        found = report["faults"][fault]
        assert (found["rows"], found["policy"], found["first"], found["first_rows"]) == (
            1,
            policy,
            ["rows.jsonl:2"],
            [2],
        )
        assert (report["rows"], report["kept"], report["dropped"]) == (3, kept, 3 - kept)
        assert report["kept"] + report["dropped"] == report["rows"] and data.rows == kept
        cut = fault in ("too_long", "no_supervised_token") and policy == "keep"
        assert report["truncated"] == cut and (not cut or report["longest"] == 8)
        assert f"1 with {fault}" in "\n".join(report_lines("dataset", report))
    with pytest.raises(AttemptError) as error:
        case.prepare(kind, tokenizer, rows, rows={**others, fault: "error"}, **more)
    assert error.value.error_code == "invalid_data" and not error.value.retry
    assert error.value.message.startswith(f"rows.jsonl:2: {fault}") and f'rows.{fault} = "drop"' in error.value.message


@pytest.mark.parametrize("row", [GOOD, {"text": "7 is 7"}, {"text": f"7 is 7{EOS}"}])
def test_a_tokenizer_that_appends_the_end_of_sequence_changes_no_token(case: Case, tokenizer: Any, row: Any) -> None:
    appends = make(eos=True)
    assert appends("7")["input_ids"] == tokenizer(f"7{EOS}")["input_ids"]
    assert texts(appends, case.prepare("sft", appends, [row])[0]) == texts(
        tokenizer, case.prepare("sft", tokenizer, [row])[0]
    )
    pair = {"prompt": "7 is", "chosen": " 7", "rejected": " eight"}
    data, _ = case.prepare("dpo", appends, [pair])
    assert [texts(appends, data, 0, which)[1] for which in (0, 1)] == [f" 7{EOS}", f" eight{EOS}"]


@pytest.mark.parametrize(
    ("row", "remedy", "mended"),
    [
        (("7 is ", "seven"), "let the completion begin with the space that ends the prompt", ("7 is", " seven")),
        (("the coordi", "nator"), "begin the completion with a space", ("the coordi", " nator")),
    ],
)
def test_the_remedy_of_a_merged_seam_is_one_that_helps(
    case: Case, tokenizer: Any, row: tuple[str, str], remedy: str, mended: tuple[str, str]
) -> None:
    with pytest.raises(AttemptError, match=rf"rows.jsonl:1: merged_at_seam: [^:]+: {remedy}, or set"):
        case.prepare("sft", tokenizer, [{"prompt": row[0], "completion": row[1]}])
    case.prepare("sft", tokenizer, [{"prompt": mended[0], "completion": mended[1]}])


@pytest.mark.parametrize("loss_on", ["completion_only", "assistant_only"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_a_tool_is_learnt_or_told(case: Case, name: str, loss_on: str) -> None:
    """Ours of families without tools drop it: nothing of the answer would be learnt but its end."""
    tokenizer = make()
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    more = {"loss_on": {"kind": loss_on}, "base_model": {"uri": "tiny", "chat_template": name}, "max_length": 4096}
    rows = dict.fromkeys(("stop_token_outside", "merged_at_seam", "empty_completion"), "keep")
    row = {"messages": [USER, answer], "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    if "tool_calls" not in find_template(tokenizer, name).marked_texts[0]:
        with pytest.raises(AttemptError) as error:
            case.prepare("sft", tokenizer, [row], rows=rows, **more)
        assert "message_ignored" in error.value.message and "tools_ignored" in error.value.message
    else:
        data, report = case.prepare("sft", tokenizer, [row], rows=rows, **more)
        assert '"add"' in texts(tokenizer, data)[1] and not report["faults"]["message_ignored"]["rows"]


def test_words_that_a_template_leaves_out_are_told(case: Case) -> None:
    silent = CHAT_TEMPLATE.replace("message['content']", "(message['content'] if message['role'] != 'system' else '')")
    assert silent != CHAT_TEMPLATE
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(AttemptError, match=r"rows.jsonl:2: message_ignored"):
        case.prepare(
            "sft", make(template=silent), [{"messages": [USER, ASSISTANT]}, {"messages": [system, USER, ASSISTANT]}]
        )
    parts = {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is 7?"}]}
    first = CHAT_TEMPLATE.replace(
        "message['content']", "(message['content'] if message['content'] is string else message['content'][0].text)"
    )
    with pytest.raises(AttemptError, match=r"rows.jsonl:1: message_ignored"):
        case.prepare("sft", make(template=first), [{"messages": [parts, ASSISTANT]}])


def test_a_row_has_no_more_tokens_than_the_model_has_positions(case: Case, tokenizer: Any) -> None:
    small = positions_of(GPT2Config(n_positions=12))
    rows = [GOOD, {"prompt": "7 is", "completion": " the work" * 9}, GOOD]
    with pytest.raises(AttemptError) as error:
        case.prepare("sft", tokenizer, rows, positions=small)
    what = "too_long, more tokens than the model has positions: 12 (max_position_embeddings): shorten it ("
    assert error.value.message.startswith(f"rows.jsonl:2: {what}") and "raise" not in error.value.message
    packing = {"kind": "best_fit", "max_seq_len": 64}
    data, report = case.prepare("sft", tokenizer, rows, positions=small, packing=packing, rows={"too_long": "keep"})
    assert (report["longest"], report["truncated"]) == (12, 1) and data.units == 1, "each row has positions of its own"
    with pytest.raises(AttemptError, match=r"rows.jsonl:2: too_long, .*max_length = 9 "):
        case.prepare("sft", tokenizer, rows, positions=small, max_length=9)


def test_positions_that_are_computed_have_no_end(case: Case, tokenizer: Any) -> None:
    made_for = positions_of(LlamaConfig(max_position_embeddings=12))
    rows = [GOOD, {"prompt": "7 is", "completion": " the work" * 9}]
    _, report = case.prepare("sft", tokenizer, rows, positions=made_for)
    told = f"  the longest sequence has {report['longest']} tokens, and the model was made for 12 "
    assert report_lines("dataset", report)[-1].startswith(told) and report["longest"] > 12
    assert not case.prepare("sft", tokenizer, rows[:1], positions=made_for)[1]["notes"]


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [("sft", GOOD, True), ("dpo", PAIR, True), ("rm", PAIR, False), ("sft", {"messages": [USER, ASSISTANT]}, False)],
)
def test_a_tokenizer_without_an_end_of_sequence_is_told_of(case: Case, kind: Kind, row: Any, told: bool) -> None:
    endless = make()
    endless.eos_token = None
    _, report = case.prepare(kind, endless, [row])
    assert ["does not learn to stop" in note for note in report["notes"]] == [True] * told


def test_by_default_every_fault_is_told_at_once(case: Case, tokenizer: Any) -> None:
    empty, long = {"prompt": "7 is", "completion": ""}, {"prompt": "7 is", "completion": " 7" * 30}
    merged = {"prompt": "the coordi", "completion": "nator"}
    with pytest.raises(AttemptError) as error:
        case.prepare("sft", tokenizer, [empty, GOOD, long, empty, empty, merged], max_length=20)
    head, *lines = error.value.message.split("\n")
    assert head == "3 problems:"
    assert [line.strip().partition(": ")[0] for line in lines] == [
        "rows.jsonl:6", "rows.jsonl:3", "rows.jsonl:1, 4-5 (3 rows)",
    ]  # fmt: skip
    assert "max_length = 20 " in lines[1]


def test_a_row_that_is_dropped_for_one_fault_is_not_refused_for_another(case: Case, tokenizer: Any) -> None:
    long = {"prompt": " the work" * 9, "completion": " 7"}  # too long, and cut off before its completion
    _, report = case.prepare("sft", tokenizer, [GOOD, long], rows={"too_long": "drop"}, max_length=8)
    assert report["dropped"] == report["faults"]["no_supervised_token"]["rows"] == 1
    with pytest.raises(AttemptError, match=r"rows.jsonl:2: no_supervised_token"):
        case.prepare("sft", tokenizer, [GOOD, long], rows={"too_long": "keep"}, max_length=8)


def test_an_empty_turn_among_others_is_an_empty_completion(case: Case) -> None:
    silent = {"role": "assistant", "content": ""}
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"messages": [USER, silent, USER, ASSISTANT]}]
    with pytest.raises(AttemptError, match=r"rows.jsonl:2: empty_completion"):
        case.prepare("sft", make(template=MARKED), rows, loss_on={"kind": "assistant_only"})


def test_nothing_is_left(case: Case, tokenizer: Any) -> None:
    with pytest.raises(AttemptError, match="no row is left to train on: all 1 are dropped"):
        case.prepare("sft", tokenizer, [{"prompt": "7 is", "completion": ""}], rows={"empty_completion": "drop"})


def test_rows_that_the_template_cannot_render_are_told_together(case: Case) -> None:
    tokenizer = make(template="{{ raise_exception('no such role') }}")
    with pytest.raises(AttemptError) as error:
        case.prepare("sft", tokenizer, [GOOD, *[{"messages": [USER, ASSISTANT]}] * 3])
    assert error.value.message.startswith("rows.jsonl:2-4 (3 rows): ") and "no such role" in error.value.message


@pytest.mark.parametrize("error", [TypeError("no text"), IndexError("beyond"), Exception("no unknown token")])
def test_rows_that_the_tokenizer_cannot_take_are_told_together(case: Case, tokenizer: Any, error: Exception) -> None:
    class Strict:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            if any("odd" in text for text in texts):
                raise error
            return tokenizer(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    with pytest.raises(AttemptError) as failed:
        case.prepare("sft", Strict(), [GOOD, {"text": "odd"}, {"text": "odder"}, GOOD])
    what = f"the tokenizer cannot take it: {type(error).__name__}: {error}"
    assert failed.value.message == f"rows.jsonl:2-3 (2 rows): {what}"
    assert (failed.value.error_code, failed.value.retry) == ("invalid_data", False)


def test_a_fault_of_the_host_is_no_fault_of_a_row(case: Case, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(preparing.Encoder, "encode_many", none_left)
    with pytest.raises(MemoryError):
        case.prepare("sft", tokenizer, [GOOD])


def test_a_template_that_writes_the_prompt_otherwise_before_an_answer_is_a_fault(case: Case) -> None:
    thinking = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with pytest.raises(AttemptError, match=r"rows.jsonl:1: merged_at_seam: "):
        case.prepare("sft", make(template=thinking), [{"messages": [USER, ASSISTANT]}])


def test_rows_are_listed_by_their_runs_and_cut_where_they_are_too_many() -> None:
    lines = [1, 2, 3, 7, 9, 10]
    assert listed([Place(n, "a.jsonl", n) for n in lines], 99) == "a.jsonl:1-3, 7, 9-10 (6 rows)"
    assert listed([Place(1, "a", 4), Place(2, "b", 4), Place(3, "b", 5)], 99) == "a:4, b:4-5 (3 rows)"
    many = listed([Place(n, "a.jsonl", n) for n in range(1, 2000, 2)], 400)
    assert many.startswith("a.jsonl:1, 3, 5, ") and many.endswith("more of 1,000 rows") and 400 < len(many) < 450


def test_all_kinds_of_faults_of_many_rows_fit_into_one_error(case: Case, tokenizer: Any) -> None:
    bad = [GOOD, FAULTY["empty_completion"][2], GOOD, FAULTY["merged_at_seam"][2], GOOD, FAULTY["too_long"][2]]
    bad += [FAULTY["no_supervised_token"][2], {"messages": [USER, ASSISTANT]}]
    with pytest.raises(AttemptError) as error:
        case.prepare("sft", make(template="{{ raise_exception('no such role') }}"), bad * 400, max_length=8)
    faults = [
        line.rpartition(" rows: ")[2].partition(": ")[0].partition(",")[0]
        for line in error.value.message.split("\n")[1:]
    ]
    assert faults == [
        "the chat template cannot render it",
        "no_supervised_token",
        "merged_at_seam",
        "too_long",
        "empty_completion",
    ]
    assert error.value.message.count("more of 400 rows") == 4 and len(error.value.message) < 4000


def test_a_dry_run_finds_the_same_faults_in_all_of_its_datasets(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "read_tokenizer", lambda _: tokenizer)
    for name, rows in (("a", [GOOD]), ("b", [GOOD, FAULTY["empty_completion"][2]])):
        (tmp_path / name).write_bytes(b"".join(map(dump_line, rows)))

    def counted(*names: str) -> Any:
        datasets = {
            name: {"kind": "jsonl_path", "files": [[str(tmp_path / name), f"{name}.jsonl"]], "manifest": ""}
            for name in names
        }
        asked = {
            "kind": "sft",
            "settings": settings("sft").model_dump(mode="json"),
            "tokenizer": "",
            "model": None,
            "datasets": datasets,
        }
        return counting.counted(asked)

    found = counted("a")
    assert found["data"]["a"]["kept"] == 1 and found["template"] == "the tokenizer's chat template"
    found = counted("a", "b")
    assert found["code"] == "invalid_data" and found["error"].startswith("b.jsonl:2: empty_completion: ")


# ---- once


def test_what_was_tokenised_once_is_taken_from_the_host(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(dump_line(GOOD) * 3)
    cache, made = tmp_path / "cache", tmp_path / "tokens"
    files = Files("jsonl_path", (path,), ("rows.jsonl",), "id of the content")
    units, report = prepared("sft", settings("sft"), files, tokenizer, made, cache)
    tokens = made.read_bytes()

    def never(*_: Any) -> Any:
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "prepare", never)
        assert prepared("sft", settings("sft", seed=9), files, tokenizer, made, cache) == (units, report)
        assert made.read_bytes() == tokens
        for other in (
            lambda: prepared("sft", settings("sft", max_length=99), files, tokenizer, made, cache),
            lambda: prepared(
                "sft", settings("sft"), Files("jsonl_path", files.paths, files.names, "other"), tokenizer, made, cache
            ),
            lambda: prepared("sft", settings("sft"), files, make(bos=True), made, cache),
            lambda: prepared("sft", settings("sft"), files, tokenizer, made, cache, positions=Positions(9, True)),
            lambda: prepared("sft", settings("sft"), files, make(template=MARKED), made, cache),
        ):
            with pytest.raises(AssertionError, match="tokenised again"):
                other()
    kept = next(cache.glob("*/tokens"))
    kept.write_bytes(b"damaged" + tokens[7:])
    assert prepared("sft", settings("sft"), files, tokenizer, made, cache) == (units, report)
    assert made.read_bytes() == tokens and kept.read_bytes() == tokens, "what was damaged is made again"


def test_the_cache_has_a_size(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(dump_line(GOOD) * 3)
    monkeypatch.setattr(preparing, "CACHE_MAX", 4000)
    for n in range(4):
        files = Files("jsonl_path", (path,), ("rows.jsonl",), f"content {n}")
        prepared("sft", settings("sft"), files, tokenizer, tmp_path / "tokens", tmp_path / "cache")
    assert 1 <= len(list((tmp_path / "cache").iterdir())) < 4
