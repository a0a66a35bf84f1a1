"""A headless Chromium for tests, driven over the DevTools protocol through a pair of pipes: no client library.

`browser()` is a context manager, `Browser.page(url)` a tab. Every request that a tab makes is noted. Where there is no
Chromium (Debian: `apt install chromium`), `needs_chromium` skips and says so.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt install chromium)")
WAIT_S = 60.0  # a slow machine may take its time
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """The process and its message pipe."""

    def __init__(self, profile: str) -> None:
        assert PROGRAM is not None
        read_theirs, self._write = os.pipe()
        self._read, write_theirs = os.pipe()
        command = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'  # the browser reads at 3 and writes at 4
        arguments = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(read_theirs), str(write_theirs), *arguments],
            pass_fds=(read_theirs, write_theirs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_theirs)
        os.close(write_theirs)
        self._serials = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        serial = next(self._serials)
        message = {"id": serial, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_S
        while True:
            answer = self._next(end - time.monotonic())
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == serial:
                assert "error" not in answer, answer["error"]
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def pump(self, seconds: float) -> None:
        """Take in events for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if (message := self._next(left)) is not None:
                self.events.append(message)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def page(self, url: str, **how: Any) -> Page:
        return Page(self, url, **how)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._read)
        os.close(self._write)


class Page:
    """One tab, in a context of its own: storage is shared with no other."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        ])  # fmt: skip
        self.go(url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.old = true")
        self.call("Page.reload")
        self.until("window.old !== true && document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of an expression."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, code: str, seconds: float = WAIT_S) -> Any:
        """Once an expression is true: its value."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page may be between two documents
                if found := self.run(code):
                    return found
            assert time.monotonic() < end, f"never true: {code}; the page says: {self.text()[-800:]!r}"
            self._browser.pump(0.05)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is seen of it."""
        box = self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect(); "
            "return r.width ? [r.x + r.width / 2, r.y + r.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, alt: bool = False, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        named = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        how = {"key": key, "windowsVirtualKeyCode": code, "modifiers": (1 if alt else 0) + (8 if shift else 0)}
        text = {"text": named} if named and not alt else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **how, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def shot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _mine(self, method: str) -> list[dict[str, Any]]:
        self._browser.pump(0.05)
        events = self._browser.events
        return [e["params"] for e in events if e.get("method") == method and e.get("sessionId") == self._session]

    def requests(self) -> list[dict[str, Any]]:
        """All that it has asked for: url, method, headers."""
        return [event["request"] for event in self._mine("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Exceptions of scripts, and errors that the browser logged (a policy that was broken, say)."""
        thrown = [str(event["exceptionDetails"]) for event in self._mine("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self._mine("Log.entryAdded")]
        return thrown + [str(entry["text"]) for entry in logged if entry["level"] == "error"]

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="quire-chromium-", ignore_cleanup_errors=True) as profile:
        opened = Browser(profile)
        try:
            yield opened
        finally:
            opened.close()
