"""Parquet files and datasets on disk as input."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from input_rows import opened, rows
from rollout.model.errors import InputChangedError, InputError
from rollout.workloads import tables
from rollout.workloads.input_lines import json_of


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(*patterns: str, **form: Any) -> list[Any]:
    return [value for _, value in rows(*patterns, **form)]


def faults(*patterns: str, **form: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        opened(*patterns, **form).check(json_of)
    head, *lines = error.value.message.split("\n")
    return [line.strip() for line in lines if line.startswith("  ")] or [head]


def write(name: str, columns: dict[str, Any], **options: Any) -> str:
    parquet.write_table(pa.table(columns), name, **options)
    return name


def test_rows_keep_their_order_over_groups_and_files() -> None:
    write("a.parquet", {"n": list(range(5000))}, row_group_size=700)
    write("b.parquet", {"n": [5000, 5001]})
    found = rows("*.parquet")
    assert [value["n"] for _, value in found] == list(range(5002))
    assert (found[0][0], found[4999][0], found[5000][0]) == ("a.parquet:1", "a.parquet:5000", "b.parquet:1")


def test_types_that_json_has_stay_and_nulls_are_no_keys() -> None:
    row = {"i": 2**63 - 1, "f": 0.1, "b": False, "s": "é\u2028", "l": [1, None], "o": {"x": [{"y": None, "z": 1}]}}
    parquet.write_table(pa.Table.from_pylist([row, {}, {**row, "o": {"x": None}}]), "a.parquet")
    assert values("a.parquet") == [{**row, "o": {"x": [{"z": 1}]}}, {}, {**row, "o": {}}]


def test_types_that_json_has_not_are_text() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901)
    write(
        "a.parquet",
        {
            "ns": pa.array([moment], pa.timestamp("ns")),
            "utc": pa.array([moment.replace(tzinfo=UTC)], pa.timestamp("ms", "UTC"), safe=False),
            "inside": pa.array([[{"at": moment}]], pa.list_(pa.struct([("at", pa.timestamp("ns"))]))),
            "day": [date(2026, 1, 2)],
            "time": pa.array([time(3, 4, 5)], pa.time64("ns")),
            "decimal": [Decimal("1.50")],
            "bytes": [b"\x00\xff"],
            "took": pa.array([timedelta(seconds=1.5)], pa.duration("ns")),
            "half": pa.array([0.5], pa.float16()),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "kind": pa.array(["x"]).dictionary_encode(),
        },
    )
    assert values("a.parquet") == [
        {
            "ns": "2026-01-02T03:04:05.678901",
            "utc": "2026-01-02T03:04:05.678000+00:00",
            "inside": [{"at": "2026-01-02T03:04:05.678901"}],
            "day": "2026-01-02",
            "time": "03:04:05",
            "decimal": "1.50",
            "bytes": "AP8=",
            "took": 1.5,
            "half": 0.5,
            "map": {"k": 1},
            "kind": "x",
        }
    ]


def test_columns_become_keys() -> None:
    write("a.parquet", {"question": ["Why?"], "n": [1]})
    write("b.parquet", {"prompt": ["Why?"]})
    assert values("a.parquet", columns={"question": "prompt"}) == [{"prompt": "Why?", "n": 1}]
    assert [fault.split(": ")[0] for fault in faults("*.parquet", columns={"question": "n"})] == [
        "a.parquet",
        "b.parquet",
    ]


def test_what_json_cannot_hold_is_a_fault_of_its_row() -> None:
    text = pa.array([b"x", b"\xff", b"NaN", b"y"]).view(pa.string())
    stamps = pa.array([0, 0, 0, 1], pa.timestamp("ns"))
    write("a.parquet", {"f": [float("nan"), 1.0, 2.0, 3.0], "s": text})
    write("b.parquet", {"at": stamps})
    found = faults("*.parquet")
    assert [fault.split(": ")[0] for fault in found] == ["a.parquet:1", "a.parquet:2", "b.parquet:4"]
    assert "'f'" in found[0]


def test_files_that_are_cut_or_something_else() -> None:
    write("a.parquet", {"s": [str(n) for n in range(20_000)]}, row_group_size=5000)
    whole = Path("a.parquet").read_bytes()
    Path("b.parquet").write_bytes(whole[:-9])
    Path("c.parquet").write_text('{"prompt": "x"}\n')
    Path("d.parquet").write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    found = faults("*.parquet")
    assert [fault.split(":")[0] for fault in found] == ["b.parquet", "c.parquet", "d.parquet"]


def test_a_file_that_changes_between_the_readings_is_found_and_a_resume_starts_where_it_was() -> None:
    write("a.parquet", {"n": list(range(3000))})
    with opened("a.parquet") as source:
        source.check(json_of)
        assert [json_of(line)["n"] for line in source.rows(2998)] == [2998, 2999]
        write("a.parquet", {"n": [*range(2999), -1]})
        with pytest.raises(InputChangedError, match=r"row 3000 \(a\.parquet:3000\) is another"):
            list(source.rows())


def test_batches_are_small_where_rows_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BYTES", 10_000)
    write("a.parquet", {"s": [f"{n}" * 1000 for n in range(100)]})
    sizes: list[int] = []
    read = tables._Rows.of  # pyright: ignore[reportPrivateUsage]

    def of(self: Any, batch: Any) -> Any:
        sizes.append(batch.num_rows)
        return read(self, batch)

    monkeypatch.setattr(tables._Rows, "of", of)  # pyright: ignore[reportPrivateUsage]
    assert len(values("a.parquet")) == 100
    assert 1 <= max(sizes) < 20


def test_datasets_on_disk() -> None:
    data = datasets.Dataset.from_list([{"q": f"{n}", "at": datetime(2026, 1, 1)} for n in range(2500)])
    data.save_to_disk("one", num_shards=3)
    datasets.DatasetDict({"train": data.select(range(2)), "test": data}).save_to_disk("several")
    assert [value["q"] for value in values("one")] == [str(n) for n in range(2500)]
    assert rows("several", columns={"q": "prompt"}) == [
        (f"several/train:{n + 1}", {"prompt": str(n), "at": "2026-01-01T00:00:00"}) for n in range(2)
    ]
    assert len(values("several", split="test")) == 2500
    assert len(values("*", kind="dataset")) == 2502
    assert [fault.split(":")[0] for fault in faults("one", "several", split="dev")] == ["input.split"] * 2
    Path("a.jsonl").write_text("{}")
    assert [fault.split(":")[0] for fault in faults("a.jsonl", split="dev")] == ["input.split"]


def test_a_dataset_that_is_damaged() -> None:
    data = datasets.Dataset.from_list([{"q": f"{n}"} for n in range(3000)])
    for name in ("a", "b", "c"):
        data.save_to_disk(name)
    arrow = Path("a/data-00000-of-00001.arrow")
    arrow.write_bytes(arrow.read_bytes()[:15_000])
    Path("b/data-00000-of-00001.arrow").unlink()
    Path("c/state.json").write_text("{}")
    assert [fault.split(":")[0] for fault in faults("a", "b", "c")] == ["a", "b", "c"]


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.parquet", {"n": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r'a\.parquet needs .* pip install "rollout-engine\[parquet\]"'):
        opened("a.parquet").check(json_of)
