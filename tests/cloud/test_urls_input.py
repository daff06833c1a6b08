"""Objects as input: what patterns name, copies by version, and what is told."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_bucket import MemoryBucket, MemoryStore
from rollout.cloud.bucket import Digest
from rollout.cloud.url import BucketUrl, parse_url
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, InputChangedError, InputError, StorageFullError
from rollout.workloads import buckets, remote_files
from rollout.workloads.input_lines import Line
from rollout.workloads.remote_directory import bring_directory
from rollout.workloads.remote_glob import matching
from rollout.workloads.source import Source


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(buckets, "open_bucket", store.open_bucket)
    return store


@pytest.fixture
def bucket(store: MemoryStore) -> MemoryBucket:
    return store.bucket()


def opened(tmp_path: Path, *patterns: str, tell: Callable[[str], None] = lambda _: None, own: str = "") -> Source:
    return Source.open(
        patterns,
        exclude=tmp_path / "out",
        spool=tmp_path / "spool",
        tell=tell,
        own=BucketUrl("s3", "memory", own) if own else None,
    )


def read(source: Source) -> list[bytes]:
    lines: list[bytes] = []

    def keep(line: Line) -> None:
        lines.append(line.raw)

    source.check(keep)
    return lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S3://b0b/x", "write s3://b0b/x"),
        ("gcs://b0b/x", "write gs://b0b/x"),
        ("s3:///x", "names no bucket"),
        ("s3://b*b/x", "no name of a bucket"),
    ],
)
def test_what_looks_like_a_url_and_is_none_is_told_with_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        parse_url(text)


PATTERNS = [
    "a/*.jsonl", "a/**/*.jsonl", "**/*.jsonl", "*/x?.jsonl", "a/[xy]1.jsonl", "a/[!x]*.jsonl", "a/.h/*.jsonl", "*/*",
    "a/**", "**/d/**/x1.jsonl", "a/*/deep/*.jsonl", "[ab]/x1.jsonl", "a/x[1-2].jsonl", "*.jsonl", "a/.*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_pattern_names_the_same_objects_as_files(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    import glob

    names = "a/x1.jsonl a/x2.jsonl a/y1.jsonl a/.h/x.jsonl a/.hid.jsonl a/d/x1.jsonl a/d/deep/z.jsonl b/x1.jsonl top.jsonl a/b"
    for name in names.split():
        bucket.put(name, b"{}\n")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    on_disk = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())  # noqa: PTH207
    assert sorted({blob.key async for blob in matching(bucket, pattern, lambda _: None)}) == on_disk


ODD = "rows/a rows//b rows/../c rows/./d rows/x//../e rows/x/.. rows//../"
ODD_PATTERNS = [
    ("rows/**", ODD),
    ("rows/*", "rows/a"),
    ("rows/*/*", "rows//b rows/../c rows/./d rows/x/.."),
    ("rows//*", "rows//b"),
    ("rows/../*", "rows/../c"),
    ("**/b", "rows//b"),
]


@pytest.mark.parametrize(("pattern", "keys"), ODD_PATTERNS)
async def test_names_that_are_empty_or_dots_are_names_as_any_other(
    bucket: MemoryBucket, pattern: str, keys: str
) -> None:
    for name in ODD.split():
        bucket.put(name, b"{}\n")
    bucket.put("rows/", b"")  # a directory, as some tools show it
    assert sorted([blob.key async for blob in matching(bucket, pattern, lambda _: None)]) == sorted(keys.split())


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [("rows/**", "rows/.h rows/.d/x"), ("rows/*", "rows/.h"), ("rows/*/*", "rows/.d/"), ("rows/.*", ""), ("*/a", "")],
)
async def test_hidden_names_that_are_left_out_are_named(bucket: MemoryBucket, pattern: str, left_out: str) -> None:
    for name in ("rows/a", "rows/.h", "rows/.d/x", "rows/.d/"):
        bucket.put(name, b"" if name.endswith("/") else b"{}\n")
    hidden: list[str] = []
    [blob async for blob in matching(bucket, pattern, lambda _: None, hidden.append)]
    assert sorted(hidden) == sorted(left_out.split())


def test_a_note_names_what_is_hidden(bucket: MemoryBucket, tmp_path: Path) -> None:
    for name in ("rows/a", "rows/.h", "rows/.i"):
        bucket.put(name, b"1\n")
    with opened(tmp_path, "s3://memory/rows/**") as source:
        assert [file.name for file in source.files] == ["s3://memory/rows/a"]
        assert "s3://memory/rows/.h and 1 more" in source.notes[0]
    with pytest.raises(InputError, match=r"no object matches .*s3://memory/rows/\.h"):
        opened(tmp_path, "s3://memory/rows/?h")


async def test_only_what_is_below_the_fixed_part_is_listed(bucket: MemoryBucket) -> None:
    [blob async for blob in matching(bucket, "data/2026/part-*.jsonl", lambda _: None)]
    assert bucket.asked == [("list", "data/2026/part-")]


def test_objects_and_files_are_read_in_the_order_of_the_patterns(bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("in/b.jsonl", b"3\n")
    bucket.put("in/a.jsonl.gz", gzip.compress(b"1\n2\n"))
    (tmp_path / "local.jsonl").write_text("0\n")
    source = opened(tmp_path, str(tmp_path / "local.jsonl"), "s3://memory/in/*", "s3://memory/in/b.jsonl")
    with source:
        assert read(source) == [b"0", b"1", b"2", b"3"]
        assert [file.name for file in source.files][1:] == ["s3://memory/in/a.jsonl.gz", "s3://memory/in/b.jsonl"]
        assert "s3://memory/in/b.jsonl" in source.notes[0]  # named twice, read once


def test_the_same_version_is_not_copied_again(bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", b"1\n")
    bucket.put("b.jsonl", b"2\n")
    opened(tmp_path, "s3://memory/*.jsonl").close()
    bucket.put("b.jsonl", b"3\n")
    bucket.asked.clear()
    with opened(tmp_path, "s3://memory/*.jsonl") as source:
        assert read(source) == [b"1", b"3"]
    assert [key for what, key in bucket.asked if what == "read"] == ["b.jsonl"]
    assert len(list((tmp_path / "spool").rglob("*.object"))) == 2


def test_a_damaged_copy_is_made_anew(bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", b"1\n")
    opened(tmp_path, "s3://memory/a.jsonl").close()
    next((tmp_path / "spool").rglob("*.object")).write_bytes(b"2\n")
    with opened(tmp_path, "s3://memory/a.jsonl") as source:
        assert read(source) == [b"1"]


def test_a_number_that_is_no_hash_of_the_body_stops_nothing(bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", b"1\n")
    bucket.digests["a.jsonl"] = Digest("0" * 32)
    with opened(tmp_path, "s3://memory/a.jsonl") as source:
        assert read(source) == [b"1"]
    assert [key for what, key in bucket.asked if what == "read"] == ["a.jsonl"] * 2


def test_an_object_that_changes_while_it_is_copied_is_told(bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", b"1\n" * (1 << 20))

    def change(what: str, key: str) -> None:
        if what == "read":
            bucket.before = lambda what, key: None
            bucket.put("a.jsonl", b"2\n")

    bucket.before = change
    with pytest.raises(InputChangedError, match=r"s3://memory/a\.jsonl changed while it was copied"):
        opened(tmp_path, "s3://memory/a.jsonl")


@pytest.mark.parametrize("becomes", [b"2\n", None])
def test_an_object_that_changes_after_the_check_is_told(
    bucket: MemoryBucket, tmp_path: Path, becomes: bytes | None
) -> None:
    bucket.put("a.jsonl", b"1\n")
    with opened(tmp_path, "s3://memory/a.jsonl") as source:
        source.check(lambda line: None, index=tmp_path / "index")
        if becomes is None:
            del bucket.objects["a.jsonl"]
        else:
            bucket.put("a.jsonl", becomes)
        with pytest.raises(InputChangedError, match=r"s3://memory/a\.jsonl (is another object|was deleted)"):
            source.verify_objects()


def test_everything_that_is_wrong_is_told_at_once(store: MemoryStore, bucket: MemoryBucket, tmp_path: Path) -> None:
    bucket.put("rows/first.jsonl", b"1\n")
    patterns = [
        "s3://nowhere/a",
        "s3://memory/rows/frist.jsonl",
        "s3://memory/rows",
        "s3://memory/no/*.jsonl",
        "S3://m/x",
    ]
    with pytest.raises(InputError) as raised:
        opened(tmp_path, *patterns, str(tmp_path / "none.jsonl"))
    said = raised.value.message
    for part in (
        "there is no bucket s3://nowhere",
        "did you mean s3://memory/rows/first.jsonl?",
        "it is a directory; name its files, such as s3://memory/rows/*",
        "no object matches 's3://memory/no/*.jsonl'",
        "write s3://m/x",
        "none.jsonl",
    ):
        assert part in said, said


def test_what_runs_write_is_left_out_of_wildcards(bucket: MemoryBucket, tmp_path: Path) -> None:
    for key in ("in/a.jsonl", "in/run-id", "in/errors.jsonl", "mine/completions.jsonl", "mine/b.jsonl"):
        bucket.put(key, b"1\n")
    with opened(tmp_path, "s3://memory/*/*", own="mine/") as source:
        assert [file.name for file in source.files] == ["s3://memory/in/a.jsonl", "s3://memory/mine/b.jsonl"]
        assert "left out what a run writes" in source.notes[0]
    with opened(tmp_path, "s3://memory/*/errors.jsonl") as source:
        assert [file.name for file in source.files] == ["s3://memory/in/errors.jsonl"]
    with pytest.raises(InputError, match="is what this run writes"):
        opened(tmp_path, "s3://memory/mine/completions.jsonl", own="mine/")


def test_progress_counts_bytes_and_a_stop_is_heard_within_a_file(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_TELL_S", 0.0)
    bucket.put("a.jsonl", b"1\n" * (4 << 20))
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if "2.0 of 8.0 MiB" in text:
            raise InputError("interrupted")

    with pytest.raises(InputError, match="interrupted"):
        opened(tmp_path, "s3://memory/a.jsonl", tell=tell)
    assert told[-1] == "copying 1 file from buckets: 2.0 of 8.0 MiB"
    assert list((tmp_path / "spool").rglob("*.part")) == []


def test_a_stop_is_heard_while_nothing_comes(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    async def forever(key: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(bucket, "head", forever)
    asked = 0

    def tell(text: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise InputError("interrupted")

    with pytest.raises(InputError, match="interrupted"):
        opened(tmp_path, "s3://memory/a.jsonl", tell=tell)


def test_a_full_disk_is_told(bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("a.jsonl", b"1\n")

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageFullError):
        opened(tmp_path, "s3://memory/a.jsonl")


# ---- directories


def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = "s3://memory/models/m") -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = bring_directory(text, "model.uri", CloudSection(), lambda _: None)
    assert found is not None
    return found


def test_a_directory_is_brought_once_and_again_when_it_changed(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("models/m/config.json", b"{}")
    bucket.put("models/m/deep/weights", b"w" * 3_000_000)
    bucket.put("models/m2/config.json", b"another")
    first = bring(tmp_path, monkeypatch)
    assert sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()) == [
        "config.json",
        "deep/weights",
    ]
    assert (first / "deep/weights").read_bytes() == b"w" * 3_000_000
    bucket.asked.clear()
    assert bring(tmp_path, monkeypatch) == first
    assert not [key for what, key in bucket.asked if what == "read"]
    bucket.put("models/m/config.json", b"[]")
    assert (bring(tmp_path, monkeypatch, "s3://memory/models/m/") / "config.json").read_bytes() == b"[]"


def test_files_of_a_directory_that_were_brought_before_a_stop_are_not_brought_again(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("models/m/a", b"1")
    bucket.put("models/m/b", b"2")

    def fail(what: str, key: str) -> None:
        if what == "read" and key.endswith("b") and ("read", "models/m/a") in bucket.asked:
            raise ConfigError("no permission")

    bucket.before = fail
    with pytest.raises(ConfigError, match=r"model\.uri: no permission"):
        bring(tmp_path, monkeypatch)
    bucket.before = lambda what, key: None
    bucket.asked.clear()
    bring(tmp_path, monkeypatch)


@pytest.mark.parametrize("key", ["models/m//x", "models/m/../x", "models/m/./x", "models/m/x/"])
def test_what_cannot_be_a_file_of_a_directory_is_named(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    bucket.put("models/m/config.json", b"{}")
    bucket.put("models/m/.hidden", b"{}")
    bucket.put("models/m/", b"")
    bring(tmp_path, monkeypatch)
    bucket.put(key, b"1")
    with pytest.raises(ConfigError, match=rf"model\.uri: s3://memory/{key} cannot be a file"):
        bring(tmp_path, monkeypatch)


def test_a_directory_with_nothing_in_it_is_told(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"model\.uri: there is nothing below s3://memory/models/m/"):
        bring(tmp_path, monkeypatch)


def test_a_bucket_that_is_silent_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tries take minutes."""
    monkeypatch.setattr(buckets, "SILENT_S", 0.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        section = CloudSection.model_validate({"provider": "aws", "region": "eu-central-1", "endpoint_url": url})
        told: list[str] = []
        asked = buckets.BlockingBuckets(section)

        def tell(text: str) -> None:
            told.append(text)
            if len(told) == 4:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            asked.run(lambda opened: opened.of(BucketUrl("s3", "mute", "")), tell)
        asked.close()
    assert [text for text in told if text] == ["waiting for s3://mute/: no answer yet, trying for up to three minutes"]
