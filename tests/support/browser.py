"""A headless Chromium, driven through its DevTools socket: no driver, no further package."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S, WAIT_S = 60.0, 40.0


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class PageError(AssertionError):
    """What a script in the page threw."""


class Browser:
    """One browser with one tab. What the page complains of is kept in `complaints`."""

    def __init__(self, process: subprocess.Popen[bytes], session: aiohttp.ClientSession, ws: Any):
        self._process, self._session, self._ws = process, session, ws
        self._ids, self._answers = itertools.count(1), dict[int, asyncio.Future[Any]]()
        self._reader = asyncio.create_task(self._read())
        self.complaints: list[str] = []

    @classmethod
    async def start(cls, path: str, profile: Path) -> "Browser":
        process = subprocess.Popen(
            [
                path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-dev-shm-usage", "--disable-background-networking",
                "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        session = aiohttp.ClientSession()
        told, end = profile / "DevToolsActivePort", time.monotonic() + START_S
        while not (told.exists() and told.read_text().count("\n")):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                await session.close()
                raise RuntimeError("the browser did not start")
            await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with session.get(f"http://127.0.0.1:{port}/json") as response:
            (tab,) = [t for t in json.loads(await response.read()) if t["type"] == "page"]
        ws = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        browser = cls(process, session, ws)
        for domain in ("Page", "Runtime", "Log"):
            await browser.call(f"{domain}.enable")
        return browser

    async def close(self) -> None:
        self._reader.cancel()
        await self._ws.close()
        await self._session.close()
        self._process.terminate()
        self._process.wait()

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._ws.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            return await self._answers[number]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise PageError(found["exceptionDetails"].get("exception", {}).get("description"))
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = WAIT_S) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not await self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never came true in {seconds} s: {script}"
            await asyncio.sleep(0.03)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key by its name, pressed and let go."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, selector: str, text: str) -> None:
        """Focus a field and type into it, over what stands there."""
        await self.run(f"document.querySelector({selector!r}).select()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({selector!r}).click()")

    async def text(self, selector: str) -> str:
        return await self.run(f"document.querySelector({selector!r})?.textContent ?? ''")

    async def resize(self, width: int, height: int, *, dark: bool = False, scale: int = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[wanted])

    async def screenshot(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._ws:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(PageError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", "?"))
            elif told["method"] == "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
