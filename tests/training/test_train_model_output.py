"""`model/` and `curves.png` of a completed run: made once, made again where they are missing, and never over what is
somebody else's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import IncompleteError, NotFoundError
from rollout.snapshots.tar import pack
from rollout.workloads.train.model_output import (
    Maker,
    _draw,  # pyright: ignore[reportPrivateUsage]
    draw_curves,
    leave_model,
)

CONFIG = {"model": {"uri": "base", "path": None, "snapshot": ""}, "algorithm": {"settings": {}}}
RUN = "01J00000000000000000000000"
CONFIG: dict[str, Any] = {
    "model": {"path": "base", "uri": "base", "snapshot": ""},
    "algorithm": {"settings": {}},
}


class Left:
    """A run that is completed, with its snapshot in a store."""

    def __init__(self, place: Path) -> None:
        state = place / "state"
        (state / "model").mkdir(parents=True)
        (state / "model" / "config.json").write_text("{}")
        (state / "model.safetensors").write_bytes(b"weights")
        manifest = {"format": 1, "kind": "train_state", "algorithm": "sft"}
        (state / "manifest.json").write_text(json.dumps(manifest))
        self._archive = place / "state.tar"
        self.maker = Maker(RUN, pack(state, self._archive).id.hex())
        self.output = place / "out"
        self.output.mkdir()
        self.model = self.output / "model"
        self.said: list[str] = []
        self.fetched = 0

    async def fetch(self, snapshot: bytes, path: Path) -> None:
        assert snapshot.hex() == self.maker.snapshot
        self.fetched += 1
        path.with_name("state.tar.partial").write_bytes(b"")
        if not self._archive.exists():
            raise NotFoundError("no such object")
        shutil.copyfile(self._archive, path)

    def prune(self) -> None:
        self._archive.unlink()

    async def write(self) -> list[str]:
        return await leave_model(self.fetch, self.maker, CONFIG, self.model, self.said.append)

    @property
    def there(self) -> list[str]:
        return sorted(path.name for path in self.output.iterdir())

    def whole(self) -> bool:
        return (self.model / "model.safetensors").read_bytes() == b"weights" and (self.model / "config.json").exists()


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


async def test_a_model_that_is_whole_is_left_and_nothing_is_fetched_for_it(left: Left) -> None:
    assert await left.write() == [str(left.model)]
    assert await left.write() == []
    assert (left.fetched, left.there, left.whole(), left.said) == (1, ["model"], True, [])


@pytest.mark.parametrize("harm", ["cut", "lacking", "of another run", "of another snapshot"])
async def test_what_is_not_whole_is_made_again_and_kept_aside(left: Left, harm: str) -> None:
    await left.write()
    mark = left.model / ".made-by.json"
    if harm == "cut":
        (left.model / "model.safetensors").write_bytes(b"wei")
    elif harm == "lacking":
        (left.model / "config.json").unlink()
    elif harm == "of another run":
        mark.write_text(mark.read_text().replace(RUN, RUN[:-1] + "1"))
    else:
        mark.write_text(mark.read_text().replace(left.maker.snapshot, "0" * 64))
    (left.model / "notes").write_text("of a person")
    assert await left.write() == [str(left.model)]
    aside = left.output / f"model.{RUN[:-1] + '1' if harm == 'of another run' else RUN}"
    assert left.whole() and (aside / "notes").exists() and not (left.model / "notes").exists()
    assert left.there == ["model", aside.name] and str(aside) in left.said[0]


@pytest.mark.parametrize("kind", ["directory", "link", "link to nothing", "file"])
async def test_what_the_run_did_not_write_is_moved_aside_whatever_it_is(left: Left, kind: str, tmp_path: Path) -> None:
    own = left.model if kind == "directory" else tmp_path / "own"
    if kind == "file":
        left.model.write_text("of a person")
    else:
        own.mkdir()
        (own / "weights").write_text("of a person")
        if kind != "directory":
            left.model.symlink_to(own if kind == "link" else tmp_path / "nowhere")
    (left.output / "model.unknown").mkdir()
    assert await left.write() == [str(left.model)]
    aside = left.output / "model.unknown.2"
    assert left.whole() and not left.model.is_symlink()
    assert left.there == ["model", "model.unknown", "model.unknown.2"]
    assert aside.is_symlink() == kind.startswith("link")
    assert kind != "file" or aside.read_text() == "of a person"
    assert kind == "file" or ((aside if kind == "directory" else own) / "weights").exists()


async def test_what_a_killed_command_left_of_it_is_gone(left: Left) -> None:
    scratch = left.output / f".model-{RUN}"
    (scratch / "state").mkdir(parents=True)
    await left.write()
    assert left.whole() and left.there == ["model"]


async def test_without_its_snapshot_it_cannot_be_made_and_what_is_there_stays(left: Left) -> None:
    left.prune()
    left.model.mkdir()
    with pytest.raises(IncompleteError, match=rf"out/model cannot be written: snapshot {left.maker.snapshot[:12]} of"):
        await left.write()
    assert left.there == ["model"]


def test_what_is_not_committed_is_dashed_and_one_point_is_a_dot(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    lines: list[Any] = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 9.0, "committed": False},
    ]
    _draw(axes, lines, "loss", "train", "C0")
    _draw(axes, [{"step": 2, "loss": 1.5}], "loss", "eval", "C1")
    _draw(axes, [], "loss", "nothing", "C1")
    assert [(one.get_label(), one.get_linestyle(), one.get_marker(), list(one.get_xdata())) for one in axes.lines] == [
        ("train", "-", "", [1, 2]), ("train, not committed", "--", "", [2, 3]), ("eval", "-", "o", [2]),
    ]  # fmt: skip


def test_curves_are_drawn_again_where_they_are_missing_or_older_than_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics, curves = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    assert draw_curves(tmp_path) == []
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    assert draw_curves(tmp_path) == [str(curves)]
    assert draw_curves(tmp_path) == []
    curves.unlink()
    assert draw_curves(tmp_path) == [str(curves)]
    later = curves.stat().st_mtime_ns + 10**9
    os.utime(metrics, ns=(later, later))
    assert draw_curves(tmp_path) == [str(curves)]
