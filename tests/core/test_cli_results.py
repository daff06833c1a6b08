"""`rollout run results`: files of a run from its ledger alone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel
from rollout.cli import results
from rollout.cli.progress import Display
from rollout.cli.results import ResultsOf, output_section
from rollout.client.runs import Page
from rollout.config.section import Section
from rollout.model.errors import ConfigError
from rollout.model.item import Outcome
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.workload import Infer
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked, Totals, Workload

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Output(Section):
    dir: str
    upper: bool = False


class Settings(BaseModel):
    output: Output


class Lines:
    files = ("lines.txt",)

    def __init__(self, config: JsonObject) -> None:
        self._upper = config["output"]["upper"]

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        yield "lines.txt", (entry.data.upper() if self._upper else entry.data) + b"\n"

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary


class Third(Workload[Any, Checked]):
    name = "third"
    settings: ClassVar[type[BaseModel]] = Settings
    unit = "texts"
    result_files = ("lines.txt", "summary.json")
    output_of_rows: ClassVar[Any] = {"loud": {"upper": True}}

    def directory(self, settings: Any) -> Path:
        raise AssertionError("nobody asks")

    def check(self, settings: Any, reading: Any) -> Checked:
        raise AssertionError("the input need not be here")

    def plan(self, checked: Any, config: Any, start: int) -> Iterator[Any]:
        raise AssertionError("nothing is submitted")

    def writer(self, config: JsonObject) -> Any:
        return Lines(config)

    def describe(self, settings: Any, checked: Any) -> list[str]:
        return []


class Ledger:
    """A run of five texts, of which `committed` are."""

    def __init__(self, committed: int, state: str = "running", *, loud: bool = False) -> None:
        self.committed = committed
        self.loud = loud
        self.state = state
        self.asked: list[int] = []

    async def get(self, run_id: str) -> pb.RunStatus:
        spec = pb.RunSpec(run_id=RUN, workload="third", config=b"{}")
        return pb.RunStatus(
            spec=spec, state=self.state, submitted=5, sealed=True, cursor=self.committed, attempts=7, retried=2
        )

    async def item(self, run_id: str, place: list[int]) -> pb.ItemReply:
        return pb.ItemReply(payload=b'{"loud": 1}' if self.loud else b'"low"')

    async def watch(self, run_id: str, cursor: int, *, payloads: bool, status_only: bool) -> AsyncGenerator[Page, None]:
        self.asked.append(cursor)
        entries = [CommitEntry(n, n, 1, Outcome.DONE, b"t%d" % n, b"", b"") for n in range(cursor, 5)]
        yield Page(entries)
        raise AssertionError("what is committed later is not waited for")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "entries", lambda: {"third": None})
    monkeypatch.setattr(results, "load", lambda name: Third())


class Said(Display):
    def __init__(self) -> None:
        self.text = ""
        self.fields: dict[str, Any] = {}

    def note(self, message: str) -> None:
        self.text += message + "\n"

    def event(self, name: str, message: str, **fields: Any) -> None:
        self.note(message)
        self.fields = fields

    def progress(self, snapshot: Any) -> None:
        raise AssertionError


async def write(ledger: Ledger, directory: Path, *options: str) -> tuple[int, Said]:
    said = Said()
    return await ResultsOf(ledger, RUN, directory, said, options).write(), said  # type: ignore[arg-type]


async def test_what_is_committed_so_far_and_later_the_rest(tmp_path: Path) -> None:
    ledger, out = Ledger(2), tmp_path / "out"
    code, said = await write(ledger, out)
    assert code == 1 and "is running: 2 of 5 texts are in the files" in said.text and said.fields["complete"] is False
    assert (out / "lines.txt").read_text() == "t0\nt1\n"
    ledger.committed, ledger.state = 5, "completed"
    code, said = await write(ledger, out)
    assert code == 0 and said.fields["complete"] is True and ledger.asked == [0, 2]
    assert (out / "lines.txt").read_text() == "t0\nt1\nt2\nt3\nt4\n" and (out / "run-id").read_text() == RUN + "\n"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["attempts"] == {"total": 7, "retried": 2, "worker_lost": 0} and summary["state"] == "completed"
    assert (await write(ledger, out))[0] == 0 and ledger.asked == [0, 2], "nothing is read again"


async def test_the_shape_of_the_input_says_which_files_unless_the_person_does(tmp_path: Path) -> None:
    await write(Ledger(2, loud=True), tmp_path / "fits")
    assert (tmp_path / "fits" / "lines.txt").read_text() == "T0\nT1\n"
    await write(Ledger(2, loud=True), tmp_path / "told", "upper=false")
    assert (tmp_path / "told" / "lines.txt").read_text() == "t0\nt1\n"
    assert Infer().output_of_rows == {"body": {"openai": True}}


async def test_a_run_that_was_killed_has_what_it_committed(tmp_path: Path) -> None:
    code, said = await write(Ledger(3, "killed"), tmp_path)
    assert code == 1 and "`rollout run resume` goes on with it" in said.text


async def test_a_file_that_was_changed_is_written_anew(tmp_path: Path) -> None:
    await write(Ledger(2), tmp_path)
    (tmp_path / "lines.txt").write_text("mine")
    _, said = await write(Ledger(2), tmp_path)
    assert "it was" in said.text or "lines.txt" in said.text
    assert (tmp_path / "lines.txt").read_text() == "t0\nt1\n"


async def test_the_directory_of_another_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run-id").write_text("01ARZ3NDEKTSV4RRFFQ69G5FAA\n")
    with pytest.raises(ConfigError, match="belongs to run"):
        await write(Ledger(2), tmp_path)


async def test_keys_of_the_output_section_are_kept_with_the_directory(tmp_path: Path) -> None:
    await write(Ledger(1), tmp_path, "upper=true")
    await write(Ledger(2), tmp_path)
    assert (tmp_path / "lines.txt").read_text() == "T0\nT1\n"
    with OutputDirectory.open(tmp_path) as output:
        assert output.stored_config == {"output": {"dir": str(tmp_path), "upper": True}}


@pytest.mark.parametrize(
    ("option", "fault"),
    [("uper=true", "output.uper"), ("upper=maybe", "output.upper"), ("upper", "write KEY=VALUE")],
)
def test_a_key_that_the_section_does_not_have_is_named(tmp_path: Path, option: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        output_section(Third(), tmp_path, [option], {})


def test_a_workload_that_is_not_installed_is_named() -> None:
    status = SimpleNamespace(spec=SimpleNamespace(run_id=RUN, workload="theirs"))
    with pytest.raises(ConfigError, match=r"workload 'theirs', which is not installed here \(there are third\)"):
        results.workload_of(status)  # type: ignore[arg-type]
