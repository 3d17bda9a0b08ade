"""A headless Chromium that is spoken to through a pipe, so that nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


@dataclass
class Browser:
    """One tab; every message of the page's console and of the browser's log is kept."""

    to: int
    back: int
    session: str = ""
    messages: list[str] = field(default_factory=list)
    _count: int = 0
    _rest: bytes = b""

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and wait for its answer."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        os.write(self.to, json.dumps(command | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer)
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self.back, 1 << 20)
            assert more, "the browser has gone"
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(json.dumps(event["params"]))

    def show(self, page: Path | str, width: int, scheme: str) -> None:
        """Open a page, a file or an address, as a screen of this width and colour scheme shows it."""
        mobile = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, out: Path, height: int | None = None) -> Path:
        """The whole page, or its first so many pixels."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        out.write_bytes(base64.b64decode(taken["data"]))
        return out


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    there, to = os.pipe()
    back, here = os.pipe()

    # Chromium reads commands from file 3 and answers on file 4.
    placed = f'exec "$0" "$@" 3</dev/fd/{there} 4>/dev/fd/{here}'
    process = subprocess.Popen(
        ["sh", "-c", placed, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(there, here),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there)
    os.close(here)
    try:
        browser = Browser(to, back)
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            browser.ask(f"{domain}.enable")
        yield browser
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)
