"""The status page in a real browser: it fits, refreshes itself, follows the person's theme, and needs no script.

`make page-check` runs it and keeps the screenshots, in build/page-check.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Page, find_chromium, open_page
from http_front import HttpFront

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium-headless-shell"),
    pytest.mark.processes,
]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(247, 248, 249)", "rgb(15, 18, 21)"
UNTIL_REFRESHED = """
new Promise((done) => {
  const main = document.querySelector("main");
  new MutationObserver((_, observer) => { observer.disconnect(); done(document.querySelector("#fresh").textContent); })
    .observe(main, { childList: true });
})
"""


async def check_views(page: Page, url: str, folder: Path) -> None:
    """No width scrolls sideways, and each theme is its own."""
    for width in (360, 700, 1240):
        for scheme, background in (("light", LIGHT), ("dark", DARK)):
            await page.look(width, 900, scheme)
            await page.open(url)
            assert await page.value(OVERFLOW) == 0, f"{width} wide"
            assert await page.value(BACKGROUND) == background
            (folder / f"{width}-{scheme}.png").write_bytes(await page.picture())


async def check_theme_button(page: Page, url: str) -> None:
    """auto, light, dark, and it is remembered."""
    await page.look(1240, 900, "dark")
    await page.open(url)
    seen = []
    for _ in range(3):
        seen.append((await page.value("document.querySelector('#theme').textContent"), await page.value(BACKGROUND)))
        await page.value("document.querySelector('#theme').click()")
    assert seen == [("auto", DARK), ("light", LIGHT), ("dark", DARK)]
    await page.value("document.querySelector('#theme').click()")
    await page.open(url)
    assert await page.value(BACKGROUND) == LIGHT
    await page.value("localStorage.clear()")


async def test_it_fits_refreshes_itself_and_needs_no_script(front: HttpFront, tmp_path: Path) -> None:
    await front.start()
    for number in range(3):
        await front.post(CHAT, {"X-Request-Id": f"request-{number}" + "-long" * 20}, messages=MESSAGES)
    assert CHROMIUM is not None
    async with open_page(CHROMIUM, tmp_path / "profile") as page:
        await check_views(page, front.url, tmp_path)
        await check_theme_button(page, front.url)
        await page.open(front.url)
        assert await page.value(UNTIL_REFRESHED)
        assert await page.value("document.querySelector('#fresh').textContent") == "live"
        assert await page.value("!document.querySelector('#rate').hidden")
        assert page.complaints == []
        await page.call("Emulation.setScriptExecutionDisabled", value=True)
        await page.open(front.url)
        assert await page.value("document.querySelectorAll('.fall tr').length") > 5
        assert await page.value("document.querySelector('#theme').hidden")
        assert page.complaints == []
