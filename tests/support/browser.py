"""A headless Chromium, spoken to over its own debugging protocol. One page."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BOUND_S = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session = ""
        self._loaded = False
        self.complaints: list[str] = []
        """Exceptions, failed loads, and whatever the page's policy refused."""

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(BOUND_S):
            while True:
                answer = await self._hear()
                if answer.get("id") == number:
                    assert "error" not in answer, (method, answer["error"])
                    return dict(answer["result"])

    async def open(self, url: str) -> None:
        """Returns once everything is loaded."""
        self._loaded = False
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(BOUND_S):
            while not self._loaded:
                await self._hear()

    async def value(self, expression: str) -> Any:
        """What JavaScript says; promises are waited for."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def look(self, width: int, height: int, scheme: str) -> None:
        """A window of this size whose person prefers `scheme`, light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self) -> bytes:
        """The whole page, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def _hear(self) -> dict[str, Any]:
        event: dict[str, Any] = await self._socket.receive_json()
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(str(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(event["params"]["entry"]["text"])
        return event


@asynccontextmanager
async def open_page(chromium: str, folder: Path) -> AsyncIterator[Page]:
    """`folder` takes the browser's profile."""
    process = await asyncio.create_subprocess_exec(
        chromium,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # it may be a script that starts the browser, and that starts more
    )
    try:
        url = await _devtools_url(process)
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            await page.attach()
            yield page
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _devtools_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(BOUND_S):
        while line := await process.stderr.readline():
            said += line
            if line.startswith(b"DevTools listening on "):
                return line.decode().split()[-1]
    raise AssertionError(f"the browser ended: {said.decode(errors='replace')[-2000:]}")
