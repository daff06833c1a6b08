"""Parquet files and datasets on disk: the same rows, faults and tokens as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from located import places
from rollout.model.errors import InputError
from rollout.workloads.port import InputReader
from rollout.workloads.train.base_config import DatasetSection
from rollout.workloads.train.config import SECTIONS, Kind
from rollout.workloads.train.data import Data, read_data
from rollout.workloads.train.dataset import Dataset
from rollout_worker.backends.tiny import CHAT_TEMPLATE, END, EOS, START, make_tokenizer
from rollout_worker.backends.training.prepare import Files, prepare
from transformers import PreTrainedTokenizerFast

CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(20)
]
# One message has a key more, which is null in every other message of a table.
CONVERSATIONS[3]["messages"][1]["name"] = "bot"
ROWS: dict[Kind, list[dict[str, Any]]] = {
    "sft": CONVERSATIONS,
    "dpo": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none", "margin": n / 2} for n in range(20)],
    "kto": [{"prompt": f"{n} is", "completion": f" {n}", "label": n % 3 > 0} for n in range(20)],
}


def write(directory: Path, form: str, rows: list[dict[str, Any]], name: str = "rows") -> Path:
    if form == "jsonl_path":
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet_path":
        path = directory / f"{name}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path = directory / name
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def read(kind: Kind, form: str, *paths: Path, **more: Any) -> Data:
    section = DatasetSection.model_validate({"kind": form, "path": [str(path) for path in paths], **more})
    data = read_data(kind, section, InputReader(exclude=Path("out")), key=f"algorithm.{kind}.dataset")
    data.close()
    return data


def placed(data: Data, root: Path) -> Files:
    """As a worker finds what has travelled."""
    for name, file in data.files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(file.read_bytes())
    return Files(data.kind, tuple(root / place for place, _ in data.tables))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token=EOS)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.mark.parametrize("kind", list(ROWS))
def test_the_same_content_gives_the_same_tokens_in_the_same_order(tmp_path: Path, tokenizer: Any, kind: Kind) -> None:
    settings = SECTIONS[kind].model_validate(
        {"base_model": "tiny", "dataset": "rows", "optimizer": {"lr": 1}, "budget": {"epochs": 1}}
    )
    found: dict[str, bytes] = {}
    contents: list[set[bytes]] = []
    for form in ("jsonl_path", "parquet_path", "dataset_path"):
        files = [write(tmp_path, form, ROWS[kind][:12], "a"), write(tmp_path, form, ROWS[kind][12:], "b")]
        data = read(kind, form, *files)
        contents.append(data.contents)
        made, report = prepare(kind, settings, placed(data, tmp_path / form), tokenizer)
        assert isinstance(made, Dataset)
        assert report.rows == 20 and made.rows == 20
        made.save(tmp_path / "tokens")
        found[form] = (tmp_path / "tokens").read_bytes()
    assert found["jsonl_path"] == found["parquet_path"] == found["dataset_path"]
    assert contents[0] == contents[1] == contents[2] and len(contents[0]) == 20


@pytest.mark.parametrize("form", ["jsonl_path", "parquet_path", "dataset_path"])
def test_the_same_faults_with_the_number_of_the_row(tmp_path: Path, form: str) -> None:
    rows: list[dict[str, Any]] = [dict(row) for row in ROWS["kto"]]
    rows[2]["label"] = rows[5]["prompt"] = rows[5]["completion"] = None
    path = write(tmp_path, form, rows)
    with pytest.raises(InputError) as error:
        read("kto", form, path)
    assert places(error.value.message) == [f"{path}:3", f"{path}:6"]
    assert 'no "label"' in error.value.message and 'no "prompt" and no "completion"' in error.value.message


def test_a_label_that_is_a_number_in_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet_path", [{**row, "label": int(row["label"])} for row in ROWS["kto"]])
    with pytest.raises(InputError, match=r':1-20 \(20 rows\): "label" '):
        read("kto", "parquet_path", path)


def test_a_directory_of_parquet_files(tmp_path: Path) -> None:
    write(tmp_path, "parquet_path", ROWS["kto"][:3], "1")
    write(tmp_path, "parquet_path", ROWS["kto"][3:], "0")
    data = read("kto", "parquet_path", tmp_path)
    assert [name for name, _ in data.files] == ["00000-0.parquet", "00001-1.parquet"] and data.rows == 20


def test_one_split_of_several(tmp_path: Path) -> None:
    one, other = (datasets.Dataset.from_list(rows) for rows in (ROWS["kto"][:5], ROWS["kto"][5:]))
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(tmp_path / "d")
    assert read("kto", "dataset_path", tmp_path / "d").rows == 5
    assert read("kto", "dataset_path", tmp_path / "d", split="test").rows == 15
    with pytest.raises(InputError, match=r'dataset.split: .*"dev".* train, test'):
        read("kto", "dataset_path", tmp_path / "d", split="dev")
    with pytest.raises(InputError, match="without splits"):
        read("kto", "dataset_path", tmp_path / "d/train", split="train")
    datasets.DatasetDict({"dev": one, "test": other}).save_to_disk(tmp_path / "e")
    with pytest.raises(InputError, match=r"set split to .*dev, test"):
        read("kto", "dataset_path", tmp_path / "e")


def test_what_was_cached_beside_a_dataset_does_not_travel(tmp_path: Path) -> None:
    path = write(tmp_path, "dataset_path", ROWS["kto"])
    (path / "cache-1234.arrow").write_bytes(b"of a map")
    names = [name for name, _ in read("kto", "dataset_path", path).files]
    assert names == ["00000-rows/data-00000-of-00001.arrow", "00000-rows/dataset_info.json", "00000-rows/state.json"]


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("parquet_path", "rows.jsonl", "it cannot be read as a parquet file"),
        ("dataset_path", "rows.jsonl", "is not what Dataset.save_to_disk writes: it has no dataset_info.json"),
        ("dataset_path", "none", "there is no such directory"),
        ("jsonl_path", "saved", 'saved is a dataset on disk: set kind = "dataset_path"'),
        ("dataset_path", "broken", "it cannot be read as a dataset"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, form: str, name: str, message: str) -> None:
    write(tmp_path, "jsonl_path", ROWS["kto"])
    write(tmp_path, "dataset_path", ROWS["kto"], "saved")
    broken = write(tmp_path, "dataset_path", ROWS["kto"], "broken")
    (broken / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(InputError, match=message):
        read("kto", form, tmp_path / name)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet_path", ROWS["kto"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r'needs the Python package pyarrow: pip install "rollout-engine\[parquet\]"'):
        read("kto", "parquet_path", path)
