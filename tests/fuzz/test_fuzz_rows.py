"""The JSONL reader: whatever the bytes, rows that can be written again, or an InputError that names file and line."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from fuzz_budget import budget
from hostile_messages import Feed, damage
from hypothesis import example, given
from hypothesis import strategies as st
from rollout.cli.boundary import USAGE, exit_code_of
from rollout.model.errors import InputError
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig, SamplingSection
from rollout.workloads.infer.request import sampling_json
from rollout.workloads.input_lines import MAX_LINE
from rollout.workloads.json_form import canonical, dump_line
from rollout.workloads.port import InputReader

SAMPLING = SamplingSection()

numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, True, False, None]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(
    st.sampled_from(["", "user", "a", "\x00", "\ud800", "\ufeff", "\u2028", "x" * 3000]), st.text(max_size=10)
)
values = st.recursive(
    numbers | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=6
)
message = st.fixed_dictionaries({}, optional={"role": texts, "content": values, "name": values})
sampling = st.dictionaries(st.sampled_from([*SamplingSection.model_fields, "nonsense"]), values, max_size=3)
body = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(message, max_size=2) | values,
        "prompt": values,
        "max_tokens": values,
        "stop": values,
        "seed": values,
        "response_format": values,
        "logprobs": values,
        "top_logprobs": values,
        "n": values,
        "model": values,
        "stream": values,
        "tools": values,
    },
)
row = st.one_of(
    st.fixed_dictionaries({"prompt": texts}, optional={"id": values, "sampling": sampling, "extra": values}),
    st.fixed_dictionaries(
        {"messages": st.lists(message, max_size=3)}, optional={"id": values, "sampling": sampling | values}
    ),
    st.fixed_dictionaries({"body": body | values}, optional={"custom_id": values, "url": values, "method": values}),
    values,
)
RAW = (
    b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"{", b"[" * 100_000, b'{"prompt":' * 50_000, b'{"prompt": "a", "x": 1e999}',
    b'{"prompt": "a", "x": -1e999}', b'{"prompt": "a", "x": NaN}', b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\x00"}', b'{"prompt": "a"}\r', b"\r", b"\x00",
    b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt": "a", "sampling": {"temperature": 1e999}}',
)  # fmt: skip
lines = st.lists(
    st.one_of(row.map(lambda r: json.dumps(r).encode()), row.map(lambda r: json.dumps(r, ensure_ascii=False).encode("utf-8", "surrogatepass")), st.sampled_from(RAW)),
    max_size=4,
)  # fmt: skip


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def read(path: Path) -> list[Any] | InputError:
    """What the client does with a file before anything starts, and with each row later."""
    config = InferConfig.model_validate({"model": {"uri": "m"}, "input": {"glob": str(path)}, "output": {"dir": "o"}})
    try:
        checked = rows.check_input(config, InputReader(exclude=Path("o")))
    except InputError as error:
        assert exit_code_of(error) == USAGE and str(path) in error.message
        if "the input is empty" not in error.message:
            assert re.search(re.escape(str(path)) + r":\d+: ", error.message), error.message
        return error
    assert checked.source is not None
    with checked.source as source:
        found = [rows.row_of(line) for line in source.rows()]
    assert len(found) == checked.report.rows > 0
    for one in found:
        request = rows.request_of(one, SAMPLING, "mock")
        again = json.loads(dump_line(one.fields), parse_constant=refuse)
        assert again == one.fields
        json.loads(
            canonical([request.content, sampling_json(request.sampling)]).decode("utf-8", "surrogatepass"),
            parse_constant=refuse,
        )
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@budget(80)
@given(lines)
@example([b'{"prompt": "a", "x": 1e999}'])
@example([b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}"])
@example([b'{"prompt": "a", "sampling": {"temperature": 1e999}}'])
@example([b'{"prompt": "a", "sampling": {"json_schema": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}}"])
def test_any_rows(directory: Path, found: list[bytes]) -> None:
    path = directory / "in.jsonl"
    path.write_bytes(b"\n".join(found))
    read(path)


@budget(40)
@given(lines, st.sampled_from([".jsonl", ".gz", ".zst"]), st.binary(min_size=40, max_size=40))
def test_damaged_and_cut_files(directory: Path, found: list[bytes], suffix: str, data: bytes) -> None:
    content = b"\n".join([b'{"prompt": "first"}', *found, b'{"prompt": "last"}'])
    if suffix == ".gz":
        content = gzip.compress(content)
    elif suffix == ".zst":
        content = zstd.compress(content)
    path = directory / f"in{suffix}"
    path.write_bytes(damage(Feed(data), content))
    read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_anywhere_never_ends_early_in_silence(directory: Path, suffix: str) -> None:
    content = b'{"prompt": "a"}\n' * 50
    packed = gzip.compress(content) if suffix == ".gz" else zstd.compress(content)
    path = directory / f"cut{suffix}"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        assert isinstance(read(path), InputError), f"cut at {length} of {len(packed)}"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_takes_bounded_memory(directory: Path, suffix: str) -> None:
    """80 MiB of zeroes without a line end, from a few kilobytes: reading stops at the longest line there may be."""
    path = directory / f"bomb{suffix}"
    piece = bytes(1 << 20)
    if suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(80):
                file.write(piece)
    else:
        compressor = zstd.ZstdCompressor()
        path.write_bytes(b"".join([*(compressor.compress(piece) for _ in range(80)), compressor.flush()]))
    tracemalloc.start()
    try:
        assert isinstance(read(path), InputError)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_window_larger_than_memory_is_refused(directory: Path) -> None:
    path = directory / "window.zst"
    # Magic, a descriptor without single segment, a window of 2^41 bytes, and a last empty raw block (RFC 8878).
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00")
    assert isinstance(read(path), InputError)
