"""Headless Chromium, spoken to through a pipe: what a page logs, fetches and looks like. Needs no package."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Page:
    """What was seen: console messages and exceptions, addresses that were asked for, and how to look further."""

    _send: Any
    said: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self._send("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Another window, light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", {"features": scheme})

    def move_mouse(self, x: float, y: float) -> None:
        """Put the mouse there."""
        self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})


@contextlib.contextmanager
def opened(path: Path, width: int = 1400, dark: bool = False) -> Iterator[Page]:
    """The file in a fresh browser, loaded."""
    assert CHROMIUM is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    words += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

    def pipes() -> None:  # the browser reads its descriptor 3 and writes 4
        low, high = os.dup(to_browser), os.dup(from_browser)
        os.dup2(low, 3)
        os.dup2(high, 4)

    # Its children may still be writing when it has ended.
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *words, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            with open(from_us, "wb", buffering=0) as out, open(to_us, "rb", buffering=0) as back:
                yield _loaded(_Talk(out, back), path, width, dark)
        finally:
            process.kill()
            process.wait()


class _Talk:
    """Messages of the DevTools protocol, each ended by a zero byte."""

    def __init__(self, out: Any, back: Any):
        self._out, self._back, self._rest, self._number = out, back, b"", 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if self.session is not None:
            message["sessionId"] = self.session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.read())

    def read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._back.read(65536)
            assert data, "the browser went away"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


def _loaded(talk: _Talk, path: Path, width: int, dark: bool) -> Page:
    target = talk.send("Target.createTarget", {"url": "about:blank"})["targetId"]
    talk.session = talk.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
    page = Page(_send=lambda method, parameters=None: _noted(page, talk, method, parameters))
    for domain in ("Page", "Runtime", "Log", "Network"):
        page._send(f"{domain}.enable")
    page.resize(width, dark=dark)
    talk.events.clear()
    page._send("Page.navigate", {"url": path.resolve().as_uri()})
    talk.wait_for("Page.loadEventFired")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page


def _noted(page: Page, talk: _Talk, method: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    answer = talk.send(method, parameters)
    for event in talk.events:
        kind, details = event.get("method"), event.get("params", {})
        if kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            page.said.append(json.dumps(details))
        elif kind == "Network.requestWillBeSent":
            page.asked_for.append(details["request"]["url"])
    talk.events[:] = [event for event in talk.events if event.get("method") == "Page.loadEventFired"]
    return answer
