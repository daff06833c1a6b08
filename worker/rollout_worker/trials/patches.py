"""Makes a patch between two states of a workspace, in git's unified format, for `git apply`.

It does not call git, whose output depends on version and configuration. Its time grows with the size of the files,
whatever they contain: matches are found by lines that are unique in both files (patience diff), and only short
stretches between them are compared line by line.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher

from rollout_worker.trials.snapshots import Entry

FILE_BYTES, PATCH_BYTES = 1 << 20, 16 << 20
"""Maximum bytes of a compared file, and of the whole patch; what exceeds them is named, and not included."""
_CONTEXT = 3
_SHORT = 64
_PASSES = 64
"""Maximum passes over the lines of a file; the rest becomes one change."""
_QUOTED = {0x07: "a", 0x08: "b", 0x09: "t", 0x0A: "n", 0x0B: "v", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_NO_NEWLINE = b"\\ No newline at end of file\n"
Lines = Sequence[bytes]
Match = tuple[int, int, int]
"""Start in one file, start in the other, and number of equal lines."""
Change = tuple[str, Entry | None, Entry | None]
"""A path, and its entries before and after."""


def patch(changes: Sequence[Change], read: Callable[[str], bytes | None]) -> bytes:
    """Return the patch. `changes` are ordered by path; `read` returns a file's bytes by hash, or None if they were not
    kept.

    It begins with lines, each starting with `#`, that name what the patch does not include, and why.
    """
    left, parts, size = list[bytes](), list[bytes](), 0
    for path, before, after in changes:
        if all(entry is None or entry.kind == "directory" for entry in (before, after)):
            continue
        made = _of_file(path, before, after, read)
        if isinstance(made, bytes) and size + len(made) > PATCH_BYTES:
            made = "the patch is too large"
        if isinstance(made, str):
            left.append(f"# {made}: ".encode() + _quoted("", path) + b"\n")
            continue
        size += len(made)
        parts.append(made)
    return b"".join([*left, *parts])


def _of_file(path: str, before: Entry | None, after: Entry | None, read: Callable[[str], bytes | None]) -> bytes | str:
    """Return the section of a file, or text that says why it is not included."""
    old, new = (_content(entry, read) for entry in (before, after))
    for content in (old, new):
        if isinstance(content, str):
            return content
    assert not isinstance(old, str) and not isinstance(new, str)
    if before is None or before.kind == "directory":
        return _section(path, None, _mode(after), b"", new)
    if after is None or after.kind == "directory":
        return _section(path, _mode(before), None, old, b"")
    if before.kind != after.kind:
        return _section(path, _mode(before), None, old, b"") + _section(path, None, _mode(after), b"", new)
    return _section(path, _mode(before), _mode(after), old, new)


def _content(entry: Entry | None, read: Callable[[str], bytes | None]) -> bytes | str:
    if entry is None or entry.kind == "directory":
        return b""
    if entry.kind == "link":
        return os.fsencode(entry.target)
    if entry.size > FILE_BYTES:
        return "too large"
    content = read(entry.sha256)
    if content is None:
        return "not kept"
    return "binary" if b"\0" in content else content


def _mode(entry: Entry | None) -> str:
    assert entry is not None
    return "120000" if entry.kind == "link" else "100755" if entry.mode & 0o100 else "100644"


def _section(path: str, old_mode: str | None, new_mode: str | None, old: bytes, new: bytes) -> bytes:
    """Return the section, empty if git sees no difference."""
    a, b = _quoted("a/", path), _quoted("b/", path)
    head = b"diff --git " + a + b" " + b + b"\n"
    if old_mode is None:
        head += f"new file mode {new_mode}\n".encode()
    elif new_mode is None:
        head += f"deleted file mode {old_mode}\n".encode()
    elif old_mode != new_mode:
        head += f"old mode {old_mode}\nnew mode {new_mode}\n".encode()
    elif old == new:
        return b""
    if old == new:
        return head
    tab = b"\t" if " " in path else b""
    head += b"--- " + (b"/dev/null" if old_mode is None else a + tab) + b"\n"
    head += b"+++ " + (b"/dev/null" if new_mode is None else b + tab) + b"\n"
    return head + b"".join(_hunks(_lines(old), _lines(new)))


def _quoted(prefix: str, path: str) -> bytes:
    """Quote a path as git does: with escapes, if it contains anything unusual."""
    raw = prefix.encode() + os.fsencode(path)
    if all(0x20 <= byte < 0x7F and byte not in (0x22, 0x5C) for byte in raw):
        return raw
    escaped = (
        f"\\{_QUOTED[byte]}" if byte in _QUOTED else chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"
        for byte in raw
    )
    return f'"{"".join(escaped)}"'.encode()


def _lines(content: bytes) -> Lines:
    """Split into lines with their ends; only a line feed ends a line."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


# ---- which lines differ


def _hunks(old: Lines, new: Lines) -> Iterator[bytes]:
    for group in _groups(_changed(old, new)):
        first_old, first_new = max(0, group[0][0] - _CONTEXT), max(0, group[0][2] - _CONTEXT)
        last_old, last_new = min(len(old), group[-1][1] + _CONTEXT), min(len(new), group[-1][3] + _CONTEXT)
        yield f"@@ -{_range(first_old, last_old)} +{_range(first_new, last_new)} @@\n".encode()
        at = first_old
        for old_from, old_to, new_from, new_to in group:
            yield from _marked(b" ", old[at:old_from])
            yield from _marked(b"-", old[old_from:old_to])
            yield from _marked(b"+", new[new_from:new_to])
            at = old_to
        yield from _marked(b" ", old[at:last_old])


def _range(first: int, last: int) -> str:
    count = last - first
    return f"{first + (1 if count else 0)},{count}"


def _marked(mark: bytes, lines: Lines) -> Iterator[bytes]:
    for line in lines:
        yield mark + (line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE)


Changed = tuple[int, int, int, int]
"""Lines of one file, from and to, that became lines of the other, from and to."""


def _groups(changed: Sequence[Changed]) -> Iterator[list[Changed]]:
    """Group changes whose context would touch into one hunk."""
    group = list[Changed]()
    for one in changed:
        if group and one[0] - group[-1][1] > 2 * _CONTEXT:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _changed(old: Lines, new: Lines) -> list[Changed]:
    found, at_old, at_new = list[Changed](), 0, 0
    for in_old, in_new, count in (*_matches(old, new), (len(old), len(new), 0)):
        if in_old > at_old or in_new > at_new:
            found.append((at_old, in_old, at_new, in_new))
        at_old, at_new = in_old + count, in_new + count
    return found


def _matches(old: Lines, new: Lines) -> Iterator[Match]:
    """Yield matches in order; neighbours may touch."""
    waiting, budget = [(0, len(old), 0, len(new))], _PASSES * (len(old) + len(new))
    while waiting:
        old_from, old_to, new_from, new_to = waiting.pop()
        if old_from == old_to or new_from == new_to:
            continue
        if (same := _common(old, new, old_from, old_to, new_from, new_to)) > 0:
            yield old_from, new_from, same
            waiting.append((old_from + same, old_to, new_from + same, new_to))
            continue
        if old_to - old_from <= _SHORT and new_to - new_from <= _SHORT:
            matcher = SequenceMatcher(None, old[old_from:old_to], new[new_from:new_to], autojunk=False)
            yield from ((old_from + a, new_from + b, size) for a, b, size in matcher.get_matching_blocks() if size)
            continue
        budget -= old_to - old_from + new_to - new_from
        anchors = _anchors(old[old_from:old_to], new[new_from:new_to]) if budget > 0 else []
        if not anchors:
            yield from _common_end(old, new, old_from, old_to, new_from, new_to)
            continue
        places = [(old_from + a, new_from + b) for a, b in anchors]
        starts, ends = [(old_from, new_from), *places], [*places, (old_to, new_to)]
        for (a, b), (c, d) in reversed(list(zip(starts, ends, strict=True))):
            waiting.append((a, c, b, d))


def _common(old: Lines, new: Lines, old_from: int, old_to: int, new_from: int, new_to: int) -> int:
    """Return the number of lines in the common prefix."""
    most = min(old_to - old_from, new_to - new_from)
    return next((n for n in range(most) if old[old_from + n] != new[new_from + n]), most)


def _common_end(old: Lines, new: Lines, old_from: int, old_to: int, new_from: int, new_to: int) -> Iterator[Match]:
    most = min(old_to - old_from, new_to - new_from)
    same = next((n for n in range(most) if old[old_to - 1 - n] != new[new_to - 1 - n]), most)
    if same:
        yield old_to - same, new_to - same, same


def _anchors(old: Lines, new: Lines) -> list[tuple[int, int]]:
    """Return the longest sequence of lines that are unique in both files and have the same order in both."""
    in_old, in_new = Counter(old), Counter(new)
    places = {line: number for number, line in enumerate(new) if in_new[line] == 1}
    pairs = [(number, places[line]) for number, line in enumerate(old) if in_old[line] == 1 and line in places]
    tops, last, before = list[int](), list[int](), dict[int, int]()  # of piles: their top, and the pair it is of
    for index, (_, place) in enumerate(pairs):
        pile = bisect_left(tops, place)
        if pile:
            before[index] = last[pile - 1]
        if pile == len(tops):
            tops.append(place)
            last.append(index)
        else:
            tops[pile], last[pile] = place, index
    found = list[tuple[int, int]]()
    index = last[-1] if last else None
    while index is not None:
        found.append(pairs[index])
        index = before.get(index)
    return found[::-1]
