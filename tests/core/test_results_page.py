"""Commands that measure write their own section of docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_page import PAGE, write_section


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n<!-- a -->\nold\n<!-- end of a -->\n\nby hand\n\n<!-- b -->\nkept\n<!-- end of b -->\n")
    return path


def test_a_section_is_replaced_and_the_rest_stays(page: Path) -> None:
    write_section("a", ["new", "lines"], page)
    written = page.read_text()
    assert "<!-- a -->\n\nnew\nlines\n\n<!-- end of a -->\n\nby hand" in written
    assert "old" not in written and "kept" in written
    write_section("a", ["new", "lines"], page)
    assert page.read_text() == written


def test_a_page_without_the_section_is_refused(page: Path) -> None:
    with pytest.raises(ValueError, match="no section"):
        write_section("c", ["x"], page)


@pytest.mark.parametrize("name", ["targets", "engines", "peers", "faults", "soak"])
def test_the_page_has_every_section(name: str) -> None:
    text = PAGE.read_text()
    assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end of {name} -->") == 1
