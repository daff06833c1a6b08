"""Chromium for the tests of pages, through Playwright, and what holds of every page: nothing is fetched from elsewhere,
no script of the page fails, it fits its window, and axe finds no fault.

The browser is that of $CHROMIUM, else the first of NAMES on PATH, else what `install_browser.py` has brought, else the
test is skipped.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

GIVEN = "CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OWN = Path(sys.prefix) / "browser" / "chromium"
OWN_LIBRARIES = OWN.parent / "lib"
PHONE, DESK = 390, 1200
"""Widths of windows, in CSS pixels."""
Scheme = Literal["light", "dark"]


def find_chromium() -> str | None:
    given = os.environ.get(GIVEN)
    found = given or next((found for name in NAMES if (found := shutil.which(name))), None)
    return found or (str(OWN) if OWN.is_file() else None)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser of its own; the test is skipped where there is none."""
    api: Any = pytest.importorskip("playwright.async_api", reason="no Playwright: `pip install playwright`")
    program = find_chromium()
    if program is None:
        pytest.skip(f"no Chromium: install it (Debian: `apt-get install chromium`), or name one in ${GIVEN}")
    async with api.async_playwright() as playwright:
        # Its own sandbox needs what containers and root lack; it opens pages of the tests alone.
        libraries = {"LD_LIBRARY_PATH": str(OWN_LIBRARIES)} if program == str(OWN) else {}
        try:
            made = await playwright.chromium.launch(
                executable_path=program, args=["--no-sandbox"], env={**os.environ, **libraries}
            )
        except api.Error as error:
            if program != str(OWN):
                raise
            pytest.skip(f"the Chromium that was brought does not start on this machine: {error}")
        try:
            yield made
        finally:
            await made.close()


@dataclass(slots=True)
class Opened:
    """`requests`: URLs of all that it asked for. `errors`: what its scripts raised."""

    page: Page
    requests: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])

    def strangers(self, own: str) -> list[str]:
        """Requests for what is not below the URL `own`."""
        return [url for url in self.requests if not url.startswith(own)]

    async def overflow(self) -> int:
        """By how many pixels the page is wider than its window: then it scrolls sideways."""
        return await self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")

    async def brightness(self) -> float:
        """Of the background of the page, from 0 to 1."""
        color: str = await self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        parts = [float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3]]
        return sum(parts) / (3 * 255)

    async def axe(self) -> list[str]:
        """What axe finds wrong, a line each."""
        axe: Any = pytest.importorskip("axe_playwright_python.async_playwright")
        found = await axe.Axe().run(self.page)
        return [
            f"{one['id']} ({one['impact']}): {node['html'][:200]}"
            for one in found.response["violations"]
            for node in one["nodes"]
        ]

    async def tab_to(self, text: str, most: int = 200) -> None:
        """Press Tab until the focus is on what has this text. AssertionError: it is not reached, or not visible."""
        for _ in range(most):
            await self.page.keyboard.press("Tab")
            focused: tuple[str, int] = await self.page.evaluate(_FOCUSED)
            if focused[0] == text:
                assert focused[1] > 0, f"nothing shows that the focus is on {text!r}"
                return
        raise AssertionError(f"Tab does not lead to {text!r}")


_FOCUSED = """() => {
  const at = document.activeElement;
  return [at.textContent.trim(), parseFloat(getComputedStyle(at).outlineWidth) || 0];
}"""


@asynccontextmanager
async def opened(
    browser: Browser, url: str, *, width: int = DESK, height: int = 900, scheme: Scheme = "light", script: str = ""
) -> AsyncIterator[Opened]:
    """`url` in a window of its own. `script` runs before those of the page."""
    async with await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    ) as context:
        found = Opened(await context.new_page())
        context.on("request", lambda request: found.requests.append(request.url))
        await context.add_init_script(script)
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        await found.page.goto(url)
        yield found
