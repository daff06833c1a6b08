"""Tables of docs/benchmarks.md. Each command that measures something writes a section of its own and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


def write_section(name: str, lines: Iterable[str], page: Path = PAGE) -> None:
    """Put `lines` between the comments `<!-- NAME -->` and `<!-- end of NAME -->` of `page`, in place of what is there.

    ValueError where the page has no such section.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} has no section between {begin} and {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    body = "\n".join(lines).strip("\n")
    page.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}")
