"""Hints for dispatch, computed while rows stream by: which rows share a prompt prefix, and which generate long texts.

Hints never change an item's id, place or result, only where and how early it should start.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from zlib import crc32

from rollout.workloads.infer.request import RowRequest

BLOCK = 256
"""Prefixes are compared in blocks of this many characters, about 64 tokens. Shorter ones are not worth a hint."""
BLOCKS_MAX = 64
LOOK_AHEAD = 1024
"""Rows read ahead to find shared prefixes."""
LOOK_AHEAD_BYTES = 8 << 20
REMEMBERED = 1 << 15
"""Prefixes remembered after their rows have passed."""
KEYS = 1024
"""Affinity keys of a run. Each has a queue in the coordinator, so their number is bounded."""
GROUP = 4
"""Rows that must share a prefix for it to be preferred to a shorter one that more rows share."""


def cost_of(request: RowRequest, default: int) -> int:
    """Return the power of four by which the row may generate more tokens than `default`, negative for fewer."""
    choices = request.sampling.n * max(1, len(request.prompts))
    return _power(request.sampling.max_tokens * choices) - _power(default)


def _power(tokens: int) -> int:
    return max(0, tokens.bit_length() - 1) // 2


def affinities(requests: Iterable[tuple[RowRequest, int]]) -> Iterator[str]:
    """Yield, for each row in order, a key shared by rows with the same long prefix, or "" if no other row has it.

    The key is also empty for a prefix of most rows, which is cached wherever they run. LOOK_AHEAD rows or
    LOOK_AHEAD_BYTES are read ahead; each request comes with its size in bytes.
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
    """Choose the longest prefix that GROUP of the `rows` so far share, or two rows if there is none."""
    for least in (GROUP, 2):
        for block in reversed(blocks):
            known = counts[block] + past.get(block, 0)
            if known >= least:
                return "" if 2 * known > max(rows, 2 * GROUP) else f"p{block % KEYS}"
    return ""


def blocks_of(request: RowRequest) -> list[int]:
    """Return a running hash at the end of each full block of the prompt."""
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
    """Render enough of a conversation to compare it: role and text in turn, as chat templates do."""
    parts: list[str] = []
    left = BLOCK * BLOCKS_MAX
    for message in request.messages or ():
        part = f"{message.get('role')}\n{message.get('content')}\n"[:left]
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    return "".join(parts)
