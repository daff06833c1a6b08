"""Snapshots of workspaces, what differs between two, and patches that git applies."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from rollout.workloads.experiment.contracts import WorkspacePath
from rollout_worker.sandboxes.trees import Selection
from rollout_worker.trials import patches
from rollout_worker.trials.patches import Change, patch
from rollout_worker.trials.snapshots import Snapshot, compare, diff, take

Tree = dict[str, bytes | str]
"""Files by path; text: where a link leads."""


def build(tree: Tree, directory: Path, executable: frozenset[str] = frozenset()) -> Snapshot:
    directory.mkdir()
    for name, content in tree.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
            path.chmod(0o755 if name in executable else 0o644)
    return take(directory)


def patch_of(before: Snapshot, after: Snapshot, *trees: Tree) -> bytes:
    contents = {sha256(c).hexdigest(): c for tree in trees for c in tree.values() if isinstance(c, bytes)}
    changes: list[Change] = [
        (path, before.entries.get(path), after.entries.get(path)) for path in compare(before, after).all
    ]
    return patch(changes, contents.get)


def git_apply(text: bytes, directory: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    return subprocess.run(command, cwd=directory, input=text, env=environment, capture_output=True, check=False)


def files_of(snapshot: Snapshot) -> dict[str, tuple[str, bool, str]]:
    return {
        path: (entry.kind, bool(entry.mode & 0o100), entry.sha256)
        for path, entry in snapshot.entries.items()
        if entry.kind != "directory"
    }


def applies(old: Tree, new: Tree, executable: frozenset[str] = frozenset()) -> bytes:
    """The patch, which git made `new` from `old` with."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        before, after = build(old, top / "old"), build(new, top / "new", executable)
        text = patch_of(before, after, old, new)
        if text:
            done = git_apply(text, top / "old")
            assert done.returncode == 0, (done.stderr, text)
        assert files_of(take(top / "old")) == files_of(after)
        return text


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..", ".git") and len(name.encode()) < 200
)
lines = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"", b"\r", b"\xff", b"--- x", b"@@ -1 +1 @@", b"\\ No"]), max_size=30
)
contents = st.builds(lambda parts, end: b"\n".join(parts) + end, lines, st.sampled_from([b"", b"\n"]))
flat = st.dictionaries(names, contents, max_size=4)


@settings(max_examples=120, deadline=None)
@given(flat, flat, st.booleans())
def test_a_patch_makes_the_one_tree_from_the_other(old: Tree, new: Tree, executable: bool) -> None:
    applies(old, new, frozenset(new) if executable else frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_a_patch_of_long_files_applies_and_holds_little_beside_what_changed(seed: int) -> None:
    rng = random.Random(seed)
    old = [b"%d\n" % rng.randrange(50 if seed % 2 else 10**9) for _ in range(3000)]
    new = list(old)
    for _ in range(5):
        at = rng.randrange(len(new))
        new[at : at + rng.randrange(4)] = [b"new %d\n" % rng.randrange(10) for _ in range(rng.randrange(4))]
    text = applies({"f": b"".join(old)}, {"f": b"".join(new)})
    if seed % 2 == 0:
        assert text.count(b"\n") < 100


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": b"x\n"}, {"a": "b", "b": b"x\n"}),
        ({"a": "b"}, {"a": "c"}),
        ({"a": b"x\n"}, {"a/b": b"x\n"}),
        ({"a/b": b"x\n"}, {"a": b"x\n"}),
        ({}, {"empty": b"", "deep/er/f": b"no end"}),
        ({"a b": b"x\n", "t\tab": b"y"}, {"a b": b"y\n", "t\tab": b"x"}),
        ({"a": b"x"}, {}),
    ],
)
def test_kinds_and_names_that_are_unusual(old: Tree, new: Tree) -> None:
    applies(old, new)


def test_a_patch_for_another_tree_does_not_apply(tmp_path: Path) -> None:
    before, after = build({"a": b"1\n2\n3\n"}, tmp_path / "old"), build({"a": b"1\n3\n"}, tmp_path / "new")
    text = patch_of(before, after, {"a": b"1\n2\n3\n"}, {"a": b"1\n3\n"})
    (tmp_path / "new" / "a").write_bytes(b"other\n")
    assert git_apply(text, tmp_path / "new").returncode != 0
    assert (tmp_path / "new" / "a").read_bytes() == b"other\n"


def test_what_a_patch_does_not_include_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "FILE_BYTES", 100)
    new: Tree = {"binary": b"\0", "large": b"x" * 200, "small": b"x\n"}
    text = patch_of(build({}, tmp_path / "old"), build(new, tmp_path / "new"), new)
    assert text.split(b"diff --git")[0] == b"# binary: binary\n# too large: large\n"
    assert git_apply(text, tmp_path / "old").returncode == 0
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["small"]
    monkeypatch.setattr(patches, "PATCH_BYTES", 10)
    assert b"# the patch is too large: small\n" in patch_of(take(tmp_path / "binary"), take(tmp_path / "new"), new)


@pytest.mark.parametrize("distinct", [1, 2, 40, 3000, 10**9])
def test_lines_that_repeat_are_compared_in_time(distinct: int) -> None:
    rng = random.Random(distinct)
    old, new = ([b"%d\n" % rng.randrange(distinct) for _ in range(20_000)] for _ in range(2))
    trees: tuple[Tree, Tree] = ({"f": b"".join(old)}, {"f": b"".join(new)})
    applies(*trees)


def test_a_manifest_is_read_as_it_was_written_and_depends_on_nothing_else(tmp_path: Path) -> None:
    tree: Tree = {"d/a": b"x", "link": "d/a", "z\n": b""}
    one, two = build(tree, tmp_path / "one"), build(dict(reversed(tree.items())), tmp_path / "two")
    os.utime(tmp_path / "two" / "d" / "a", (1, 1))
    assert one.manifest() == two.manifest()
    assert Snapshot.from_manifest(json.loads(one.manifest())) == one


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/../b", ""])
def test_a_manifest_whose_paths_lead_out_is_refused(path: str) -> None:
    row = {"path": path, "type": "directory", "mode": "0755"}
    value = {"exists": True, "entries": [row], "left_out": {"count": 0, "entries": []}}
    with pytest.raises(ValueError):
        Snapshot.from_manifest(value)


def test_what_was_left_out_of_a_snapshot_is_neither_added_nor_removed(tmp_path: Path) -> None:
    whole = build({"a": b"1", "big/b": b"2", "c": b"3"}, tmp_path / "whole")
    part = Snapshot({"a": whole.entries["a"]}, (("big", "too_many"),), 1)
    changes = compare(whole, part)
    assert (changes.removed, changes.unknown) == (("c",), ("big", "big/b"))
    found = json.loads(diff(whole, part, changes, ("0" * 64, "1" * 64)))
    assert (found["complete"], [row["path"] for row in found["removed"]]) == (False, ["c"])


def test_of_a_list_that_is_cut_off_nothing_is_known_to_be_removed(tmp_path: Path) -> None:
    whole = build({"a": b"1", "b": b"2"}, tmp_path / "whole")
    cut = Snapshot({"a": whole.entries["a"]}, (("x", "too_many"),), 5000)
    assert (compare(whole, cut).removed, compare(whole, cut).unknown) == ((), ("b",))


def test_modes_are_changes(tmp_path: Path) -> None:
    before = build({"a": b"x"}, tmp_path / "old")
    after = build({"a": b"x"}, tmp_path / "new", frozenset({"a"}))
    assert compare(before, after).modified == ("a",)
    assert applies({"a": b"x"}, {"a": b"x"}, frozenset({"a"})) == (
        b"diff --git a/a b/a\nold mode 100644\nnew mode 100755\n"
    )
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == 0o755
    shutil.rmtree(tmp_path / "new")


def test_patterns_of_a_selection() -> None:
    selection = Selection(("node_modules", "*.pyc", "build/*.o"), 1, 1, 1)
    ignored = [name for name in ("node_modules", "a/node_modules", "a/x.pyc", "build/x.o", "a/build/x.o", "modules")
               if selection.ignores(name)]  # fmt: skip
    assert ignored == ["node_modules", "a/node_modules", "a/x.pyc", "build/x.o"]


@pytest.mark.parametrize("path", ["/", "//", "/.", "relative", "/a/../..", "/a\0"])
def test_a_workspace_is_a_directory_below_the_root(path: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(WorkspacePath).validate_python(path)
