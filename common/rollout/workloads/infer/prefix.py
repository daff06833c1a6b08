"""Hints for dispatch, taken from the rows as they stream by: which share a prompt's beginning, and which are long.

Neither changes an item's id, its place or its result; both only say where and how early it is best begun.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from zlib import crc32

from rollout.workloads.infer.request import RowRequest

BLOCK = 256
"""Characters: prefixes are compared in steps of this, some 64 tokens. Shorter ones are not worth a detour."""
BLOCKS_MAX = 64
LOOK_AHEAD = 1024
"""Rows read ahead to see which beginnings come again."""
LOOK_AHEAD_BYTES = 8 << 20
REMEMBERED = 1 << 15
"""Beginnings remembered after their rows have gone by."""
KEYS = 1024
"""Affinity keys of a run: each has a queue in the coordinator, whatever the number of prefixes."""
GROUP = 4
"""Rows that make a beginning common enough to be preferred to a shorter one that more rows share."""


def cost_of(request: RowRequest, default: int) -> int:
    """Powers of four by which the row may generate more tokens than `default`, or less (negative)."""
    choices = request.sampling.n * max(1, len(request.prompts))
    return _power(request.sampling.max_tokens * choices) - _power(default)


def _power(tokens: int) -> int:
    return max(0, tokens.bit_length() - 1) // 2


def affinities(requests: Iterable[tuple[RowRequest, int]]) -> Iterator[str]:
    """For each row, in order, a key that rows with the same long beginning share; empty: no other row has its own.

    Empty as well for what most rows begin with: it is warm wherever they run. LOOK_AHEAD rows or LOOK_AHEAD_BYTES are
    read ahead; each request comes with its size in bytes.
    """
    ahead: deque[tuple[list[int], int]] = deque()
    counts: Counter[int] = Counter()
    past: OrderedDict[int, int] = OrderedDict()
    held = gone = 0

    def first() -> str:
        nonlocal held, gone
        blocks, size = ahead.popleft()
        held -= size
        key = _choose(blocks, counts, past, gone + len(ahead) + 1)
        gone += 1
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
            past[block] = past.pop(block, 0) + 1
        while len(past) > REMEMBERED:
            past.popitem(last=False)
        return key

    for request, size in requests:
        blocks = blocks_of(request)
        if not blocks and not ahead:
            gone += 1
            yield ""
            continue
        ahead.append((blocks, size))
        for block in blocks:
            counts[block] += 1
        held += size
        while len(ahead) > LOOK_AHEAD or held > LOOK_AHEAD_BYTES:
            yield first()
    while ahead:
        yield first()


def _choose(blocks: list[int], counts: Counter[int], past: OrderedDict[int, int], rows: int) -> str:
    """The longest beginning that GROUP of the `rows` so far share, or two if none."""
    for least in (GROUP, 2):
        for block in reversed(blocks):
            known = counts[block] + past.get(block, 0)
            if known >= least:
                return "" if 2 * known > max(rows, 2 * GROUP) else f"p{block % KEYS}"
    return ""


def blocks_of(request: RowRequest) -> list[int]:
    """A running hash at the end of each whole block of the prompt."""
    if request.prompts:
        first = request.prompts[0]
        text = first if isinstance(first, str) else " ".join(map(str, first[: BLOCK * BLOCKS_MAX]))
        text = text[: BLOCK * BLOCKS_MAX]
    else:
        text = _rendered(request)
    found: list[int] = []
    value = 0
    for at in range(BLOCK, len(text) + 1, BLOCK):
        value = crc32(text[at - BLOCK : at].encode("utf-8", "surrogatepass"), value)
        found.append(value)
    return found


def _rendered(request: RowRequest) -> str:
    """Enough of a conversation to compare: as any chat template would, role and text in turn."""
    parts: list[str] = []
    left = BLOCK * BLOCKS_MAX
    for message in request.messages or ():
        part = f"{message.get('role')}\n{message.get('content')}\n"[:left]
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    return "".join(parts)
