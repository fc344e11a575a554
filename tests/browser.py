"""A headless Chromium, driven over its debugging pipe: no further package, no port, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: No sandbox of its own, since tests may run as root; nothing but the project's own pages is opened.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--remote-debugging-pipe", "--remote-allow-origins=*", "--window-size=1280,900",
)  # fmt: skip
SECONDS = 60


def executable() -> str:
    """The browser; tests that need one fail where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "no Chromium on the PATH: install one (Debian: apt-get install chromium) or leave out -m browser"
    return found


class Page:
    """One tab: opens files, runs JavaScript, keeps what the console says."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing, self._count = reading, writing, 0
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and gives its result."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(SECONDS)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._reading], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {seconds} s"
            data = os.read(self._reading, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path, fragment: str = "") -> float:
        """Opens a file; gives the seconds until it was loaded."""
        # The same file with another fragment would not be loaded again.
        self._load("about:blank")
        start = time.monotonic()
        self._load(path.resolve().as_uri() + fragment)
        self.run("1")
        return time.monotonic() - start

    def _load(self, url: str) -> None:
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive(SECONDS)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, pressed and let go."""
        named = {"Tab": 9, "Enter": 13, "ArrowDown": 40}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        codes = {"windowsVirtualKeyCode": named[key]} if key in named else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **codes)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **codes)

    def dark(self, on: bool) -> None:
        """What the user prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with one tab, ended in the end."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        command = ["bash", "-c", script, "bash", executable(), *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, pass_fds=(to_browser[0], from_browser[1]), stderr=subprocess.DEVNULL)
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Page(from_browser[0], to_browser[1])
        finally:
            os.close(to_browser[1])
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])
