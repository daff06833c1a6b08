"""What `rollout map` checks before it starts: the name of the function, its code, the settings, lanes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from rollout.model.errors import ConfigError, InputError
from rollout.workloads import code as map_code
from rollout.workloads.code import check_target, find_code, read_code
from rollout.workloads.map.call import Call
from rollout.workloads.map.config import RunSection
from rollout.workloads.map.failure import RowError, from_text, to_text
from rollout.workloads.map.plan import Planner, lane_of, map_spec, run_config

MODULE = """
from json import dumps as imported
import os as system
if True:
    def in_if(row): ...
def plain(row, more=1): ...
async def coroutine(row): ...
def two(a, b): ...
def none(): ...
class Whole:
    def __call__(self, row): ...
class Callless: ...
value = other = print
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    "name", ["imported", "system", "in_if", "plain", "coroutine", "Whole", "other", "Whole.method"]
)
def test_what_the_module_defines_is_found_without_running_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"package/__init__.py": "", "package/module.py": MODULE + "\n1 / 0\n"})
    found = find_code(f"package.module:{name}", tmp_path)
    assert found is not None and [name for name, _ in found.files] == ["package/__init__.py", "package/module.py"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("package.module:plian", "defines no 'plian'; did you mean plain?"),
        ("package.module:two", "module.py:8: two must take one argument"),
        ("package.module:none", "none must take one argument"),
        ("package.module:Callless", "class Callless has no __call__"),
        ("package.broken:f", "broken.py:1: "),
        ("pakage:f", "there is no module 'pakage'"),
        ("package/module.py:plain", "does not name a function as MODULE:FUNCTION: write package.module:plain"),
        ("package.module.plain", "write package.module:plain"),
        ("package.module:", "write package.module:in_if or "),
        ("nowhere.f:", "(module:function stands for function() in module.py)"),
    ],
)
def test_what_is_not_there_is_told(tmp_path: Path, target: str, said: str) -> None:
    write(tmp_path, {"package/__init__.py": "", "package/module.py": MODULE, "package/broken.py": "def f(:"})
    with pytest.raises(ConfigError) as caught:
        find_code(target, tmp_path)
    assert said in caught.value.message


def test_an_installed_module_needs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_code("json:dumps", None) is None
    with pytest.raises(ConfigError, match="--code absent: there is no such directory"):
        find_code("json:dumps", Path("absent"))
    check_target("a.b:C.d", tmp_path)


def test_what_does_not_travel(tmp_path: Path) -> None:
    kept = {"a.py": "", "data/labels.txt": "", "package/b.py": ""}
    left = dict.fromkeys(
        [".env", ".git/config", "__pycache__/a.pyc", "venv/x.py", "other/pyvenv.cfg", "other/lib.py", "out/results.jsonl",
         "rows.jsonl", "logs/x.log", "earlier/run-id", "earlier/results.jsonl", "big.bin",
         "run.log", "nohup.out", "led/owner.lock", "led/rollout.db"], "",
    )  # fmt: skip
    write(tmp_path, {**kept, **left, ".rolloutignore": "*.bin\nlogs/\n", ".gitignore": "*.py\n"})
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dead").symlink_to("nowhere")
    found = read_code(tmp_path, [tmp_path / "rows.jsonl", tmp_path / "out"])
    assert [name for name, _ in found.files] == sorted(kept)
    same = tmp_path / "elsewhere" / "x"
    write(same, kept)
    assert read_code(same).manifest == found.manifest


def test_neither_keys_of_this_host_nor_what_our_programs_keep_travel(tmp_path: Path) -> None:
    joined = ["data/tls/ca.pem", "data/tls/host.key.pem", "data/tls/host.pem", "data/tls/join.json", "ca.key.pem"]
    kept_by_programs = ["data/rollout.db", "data/rollout.db-wal", "data/object-store/a1/b", "data/object-cache/c",
                        "data/object-cache-trees/d/a.py", "data/scratch/e"]  # fmt: skip
    mine = ["a.py", "client/ca.pem", "data/labels.txt", "data/tls/notes.txt", "package/data/scratch/x.py"]
    write(tmp_path, dict.fromkeys([*joined, *kept_by_programs, *mine], ""))
    assert [name for name, _ in read_code(tmp_path).files] == mine


@contextmanager
def standard_output(into: int) -> Generator[None]:
    stdout = os.dup(1)
    os.dup2(into, 1)
    os.close(into)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def test_the_file_that_the_output_goes_to_is_no_part_of_the_code(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "said.txt": ""})
    with standard_output(os.open(tmp_path / "said.txt", os.O_WRONLY)):
        found = read_code(tmp_path)
    assert [name for name, _ in found.files] == ["a.py"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only /proc tells where a pipe leads")
def test_nor_is_one_that_it_goes_to_through_pipes(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "said.txt": ""})
    with (tmp_path / "said.txt").open("w") as said, subprocess.Popen(["cat"], stdin=PIPE, stdout=said) as last:
        assert last.stdin is not None
        with last.stdin, subprocess.Popen(["cat"], stdin=PIPE, stdout=last.stdin) as first:
            assert first.stdin is not None
            with first.stdin, standard_output(os.dup(first.stdin.fileno())):
                found = read_code(tmp_path)
    assert [name for name, _ in found.files] == ["a.py"]


def test_a_run_goes_on_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.py": "1", "b.py": "2", "data/labels.txt": "", "run.sh": ""})
    began = read_code(tmp_path)
    write(tmp_path, {"again.jsonl": "x" * 99, "package/c.py": "", "data/run-id": "", ".rolloutignore": "b.py"})
    monkeypatch.setattr(map_code, "MAX_BYTES", 50)  # of what travels
    found = read_code(tmp_path, began=began.tree)
    assert (found.files, found.manifest) == (began.files, began.manifest)
    assert found.new == ("again.jsonl", "package/c.py")
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "b.py").unlink()
    with pytest.raises(
        ConfigError, match=r"changed: a\.py, run\.sh \(its executable bit\); gone: b\.py\. Change it back, or"
    ):
        read_code(tmp_path, began=began.tree)


def test_code_that_is_too_large_says_what_makes_it_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_code, "MAX_BYTES", 1 << 20)
    write(tmp_path, {"a.py": "", "images/raw/x": "x" * (2 << 20)})
    with pytest.raises(ConfigError, match=r"2 MiB in 2 files.*Largest: images/raw/ 2 MiB.*\.rolloutignore"):
        read_code(tmp_path)


def test_settings_take_units_and_know_what_belongs_together() -> None:
    run = RunSection.model_validate({"timeout": "1.5 min", "memory": "2GiB", "retry_backoff": "200ms"})
    assert (run.timeout, run.memory, run.retry_backoff) == (90.0, 2048.0, 0.2)
    for wrong in ({"timeout": "soon"}, {"memory": "2 apples"}, {"lane_key": "x"}, {"gpus": -1}):
        with pytest.raises(ValueError, match=r"60s|2GiB|concurrency|greater"):
            RunSection.model_validate(wrong)


def test_items_carry_limits_lanes_and_an_identity_of_all_that_counts() -> None:
    run = RunSection.model_validate({"timeout": 2, "memory": 64, "gpus": 1, "concurrency": 3, "lane_key": "model"})
    config = run_config(Call("m:f"), "ab", run) | {"lanes": ["a", "b"]}
    item = Planner(config).item(4, b'{"model":"a"}', "a")
    assert dict(item.spec.resources) == {"gpus": 1.0, "memory_mib": 64.0, "slots": 1.0} and item.spec.lane == "a"
    assert item.spec.timeout_ms == 32_000
    others = [
        Planner(config).item(5, b'{"model":"a"}'), Planner(config).item(4, b'{"model":"b"}'),
        Planner(config | {"function": "m:g"}).item(4, b'{"model":"a"}'),
        Planner(config | {"code": {"manifest": "cd"}}).item(4, b'{"model":"a"}'),
    ]  # fmt: skip
    assert len({item.id, *(other.id for other in others)}) == 5
    spec = map_spec("01J00000000000000000000000", config)
    assert spec.max_in_flight == 0 and [(lane.name, lane.max_in_flight) for lane in spec.lanes] == [("a", 3), ("b", 3)]


@pytest.mark.parametrize(("row", "lane"), [({"k": "x"}, "x"), ({"k": 3}, "3"), ({"k": True}, "true")])
def test_lanes(row: Any, lane: str) -> None:
    assert lane_of(row, "k") == lane


@pytest.mark.parametrize(
    "row", [3, {}, {"k": None}, {"k": 1.5}, {"k": []}, {"k": ""}, {"k": "x" * 300}, {"k": "\ud800"}]
)
def test_rows_that_name_no_lane(row: Any) -> None:
    with pytest.raises(InputError, match="'k'"):
        lane_of(row, "k")


@pytest.mark.parametrize(
    "error",
    [RowError("exception", "ValueError", "a: b\nc", "File x"), RowError("exception", "a.B", "", ""), RowError("lost", "lost", "no type", "")],
)  # fmt: skip
def test_an_error_comes_out_as_it_went_in(error: RowError) -> None:
    text = error.message if error.code == "lost" else to_text(error.type, error.message, error.traceback)
    assert from_text(error.code, text) == error
