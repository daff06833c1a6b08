"""What holds for all pages below docs/: links between them lead somewhere, and they have no more words than allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

BUDGET = 50_000
"""Words of all pages below docs/ and of the README beside it, as `wc -w` counts them."""
_LINK = re.compile(r"\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"#{1,6} +(.+?)\s*#*")
_NAMED = re.compile(r'<a id="([^"]+)"></a>')
_CODE = re.compile(r"(`+)(?:.+?)\1")


def over_budget(directory: Path, budget: int = BUDGET) -> list[str]:
    readme = directory.parent / "README.md"
    pages = [*_pages(directory), *([readme] if readme.exists() else [])]
    words = {page: len(page.read_text().split()) for page in pages}
    total = sum(words.values())
    if total <= budget:
        return []
    longest = ", ".join(f"{page.name} {count:,}" for page, count in Counter(words).most_common(5))
    over = f"{total - budget:,} over the budget of pages.py; the longest pages: {longest}"
    return [f"docs/ and README.md have {total:,} words, {over}"]


def broken_links(directory: Path) -> list[str]:
    """Links to files that are not there, and to headings that no page has; of this repository alone."""
    return [
        f"{page.relative_to(directory)}:{number}: {target} leads nowhere"
        for page in _pages(directory)
        for number, line in _prose(page)
        for target in _LINK.findall(_CODE.sub("`code`", line))
        if ":" not in target and not _found(page, target)
    ]


def _pages(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.md"))


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines outside blocks of code."""
    fence = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence:
            yield number, line


def _found(page: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    to = (page.parent / unquote(path)).resolve() if path else page
    return to.exists() and (not heading or to.suffix != ".md" or heading in _anchors(to))


@cache
def _anchors(page: Path) -> frozenset[str]:
    counts = Counter[str]()
    found: set[str] = set()
    for _, line in _prose(page):
        found.update(_NAMED.findall(line))
        if heading := _HEADING.fullmatch(line):
            name = anchor(heading[1])
            found.add(f"{name}-{counts[name]}" if counts[name] else name)
            counts[name] += 1
    return frozenset(found)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower()).replace(" ", "-")
    return "".join(letter for letter in text if letter.isalnum() or letter in "_-")
