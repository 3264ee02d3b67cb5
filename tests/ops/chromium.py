"""A headless Chromium, driven over its own debugging protocol."""

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "Chromium is not installed (Debian package chromium)"
PATIENCE_S = 90.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


class Tab:
    """One page. ``complaints`` has what the console, the loader and the security policy said."""

    def __init__(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._wire = wire
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._wire.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            return await self._answers[number]

    async def value(self, script: str) -> Any:
        """What a script comes to."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Return when the script comes to something true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.value(script):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """A key goes down and up."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        async for message in self._wire:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told.get("result", {"error": told.get("error")}))
            elif told["method"] == "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[int]:
    """A browser of one's own; the port at which it is driven."""
    command = [str(PROGRAM), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield _port(folder / "profile" / "DevToolsActivePort", process, folder / "chromium.log")
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def new_tab(port: int) -> AsyncIterator[Tab]:
    """An empty tab of the browser at ``port``."""
    base = f"http://127.0.0.1:{port}/json"
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{base}/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as wire:
            tab = Tab(wire)
            for domain in ("Page", "Runtime", "Log", "Accessibility"):
                await tab.call(f"{domain}.enable")
            await tab.call("Page.bringToFront")
            try:
                yield tab
            finally:
                await tab.close()
        async with session.get(f"{base}/close/{target['id']}"):
            pass


def _port(path: Path, process: "subprocess.Popen[bytes]", log: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not (written := _text(path)):
        assert process.poll() is None, _text(log)
        assert time.monotonic() < deadline, _text(log)
        time.sleep(0.05)
    return int(written.splitlines()[0])


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
