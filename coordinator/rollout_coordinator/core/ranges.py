"""Sets of integers as sorted, disjoint, non-adjacent ranges: a million contiguous results cost two numbers."""

from __future__ import annotations

from bisect import bisect_right


class Ranges:
    __slots__ = ("hi", "lo")

    def __init__(self) -> None:
        self.lo: list[int] = []
        self.hi: list[int] = []  # inclusive

    def __contains__(self, n: int) -> bool:
        i = bisect_right(self.lo, n) - 1
        return i >= 0 and n <= self.hi[i]

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether any number of [first, last] is included."""
        i = bisect_right(self.lo, last) - 1
        return i >= 0 and self.hi[i] >= first

    def add(self, first: int, last: int) -> None:
        """Add [first, last], which must not overlap the existing ranges."""
        lo, hi = self.lo, self.hi
        if hi and hi[-1] + 1 == first:
            hi[-1] = last
            return
        i = bisect_right(lo, first)
        left = i > 0 and hi[i - 1] + 1 == first
        right = i < len(lo) and lo[i] == last + 1
        if left and right:
            hi[i - 1] = hi[i]
            del lo[i], hi[i]
        elif left:
            hi[i - 1] = last
        elif right:
            lo[i] = first
        else:
            lo.insert(i, first)
            hi.insert(i, last)

    def add_many(self, numbers: list[int]) -> None:
        """Add distinct numbers in any order."""
        if len(numbers) < 2:
            for number in numbers:
                self.add(number, number)
            return
        first, last = min(numbers), max(numbers)
        if last - first + 1 == len(numbers):
            self.add(first, last)
            return
        ordered = sorted(numbers)
        first = last = ordered[0]
        for n in ordered[1:]:
            if n != last + 1:
                self.add(first, last)
                first = n
            last = n
        self.add(first, last)

    def advance(self, cursor: int) -> int:
        """Return the first missing number at or after `cursor`; ranges before it are dropped."""
        lo, hi = self.lo, self.hi
        while lo and lo[0] <= cursor:
            cursor = max(cursor, hi[0] + 1)
            del lo[0], hi[0]
        return cursor

    def forget(self, before: int) -> None:
        """Drop the numbers below `before`."""
        lo, hi = self.lo, self.hi
        while lo and hi[0] < before:
            del lo[0], hi[0]
        if lo and lo[0] < before:
            lo[0] = before

    def __len__(self) -> int:
        return len(self.lo)
