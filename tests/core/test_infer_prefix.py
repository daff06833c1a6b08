"""What the plan says of a row besides the row: with which others it belongs, and whether it is long."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from infer_input import planned
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.prefix import BLOCK, KEYS, affinities, cost_of
from rollout.workloads.infer.request import RowRequest, parse_row

SAMPLING = SamplingSection()


def keys_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(affinities((parse_row(row, SAMPLING, "mock"), len(json.dumps(row))) for row in rows))


def document(n: int, blocks: int = 3) -> str:
    return "".join(f"document {n}, word {k}. " for k in range(100))[: blocks * BLOCK]


def test_rows_that_begin_alike_share_a_key_and_others_have_none() -> None:
    rows = [{"prompt": f"{document(n % 5)}Question {n}?"} for n in range(40)] + [{"prompt": document(99)}]
    found = keys_of(rows)
    assert found[:5] == found[5:10] and len(set(found[:40])) == 5 and "" not in found[:40]
    assert found[40] == "", "nobody else's"


def test_what_all_begin_with_is_no_reason_to_go_anywhere() -> None:
    system = {"role": "system", "content": document(0)}
    rows = [{"messages": [system, {"role": "user", "content": f"Question {n}"}]} for n in range(50)]
    assert set(keys_of(rows)) == {""}


def test_below_a_common_beginning_the_longer_one_counts() -> None:
    rows = [{"prompt": document(0) + document(1 + n % 4) + f"Question {n}"} for n in range(40)]
    assert len(set(keys_of(rows))) == 4


def test_short_rows_have_no_key() -> None:
    assert set(keys_of([{"prompt": "the same short prompt"}] * 100)) == {""}


def test_a_beginning_is_remembered_when_its_rows_have_gone_by() -> None:
    rows = [{"prompt": document(n) + "x"} for n in range(3000)]
    again = [{"prompt": document(0) + "y"}]
    assert keys_of(rows + again)[-1] != ""


def test_keys_are_few() -> None:
    rows = [{"prompt": document(n // 2) + str(n)} for n in range(4000)]
    found = Counter(keys_of(rows))
    assert len(found) <= KEYS and "" not in found


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_one_key_per_row_whatever_the_rows(shapes: list[tuple[int, int]]) -> None:
    rows = [{"prompt": document(n, blocks) + "?"} for n, blocks in shapes]
    found = keys_of(rows)
    assert len(found) == len(rows)
    assert all(not key for key, (_, blocks) in zip(found, shapes, strict=True) if blocks == 0)


def test_cost_is_counted_in_powers_of_four_around_the_default() -> None:
    def cost(tokens: int, n: int = 1) -> int:
        return cost_of(RowRequest(SamplingSection(max_tokens=tokens, n=n), ("p",)), 64)

    assert [cost(t) for t in (64, 100, 255, 256, 1024, 16, 15, 1)] == [0, 0, 0, 1, 2, -1, -2, -3]
    assert cost(64, n=4) == 1


def config(tmp_path: Path, rows: list[dict[str, Any]], **workers: Any) -> InferConfig:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"model": {"uri": "m"}, "input": {"glob": str(path)}, "output": {"dir": "o"}, "workers": workers}
    return InferConfig.model_validate(sections)


def test_hints_change_no_id_no_payload_and_no_order_and_can_be_turned_off(tmp_path: Path) -> None:
    rows = [{"prompt": document(n % 3) + str(n), "sampling": {"max_tokens": 64 << (n % 4)}} for n in range(30)]
    model = "ab" * 32
    hinted = planned(config(tmp_path, rows), model)
    plain = planned(config(tmp_path, rows, prefix_affinity=False, longest_first=False), model)
    assert [(i.id, i.payload) for i in hinted] == [(i.id, i.payload) for i in plain]
    assert {i.spec for i in plain} == {plain[0].spec} and plain[0].spec.affinity == "" and plain[0].spec.cost == 0
    assert len({i.spec.affinity for i in hinted}) == 3 and {i.spec.cost for i in hinted} == {0, 1}
    only = planned(config(tmp_path, rows, prefix_affinity=False), model)
    assert {i.spec.affinity for i in only} == {""} and {i.spec.cost for i in only} == {0, 1}


def test_a_resume_plans_the_rest(tmp_path: Path) -> None:
    rows = [{"prompt": document(n % 3) + str(n)} for n in range(30)]
    settings_, model = config(tmp_path, rows), "ab" * 32
    assert [i.id for i in planned(settings_, model, start=11)] == [i.id for i in planned(settings_, model)][11:]
