"""A headless Chromium for tests, spoken to over two pipes in the Chrome DevTools Protocol.

It needs no package: messages are JSON, each ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage"),
    *("--mute-audio", "--hide-scrollbars", "--remote-debugging-pipe"),
)
SECONDS = 60  # for one answer
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39}
RENUMBER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""What starts the browser: it moves the two pipes to the descriptors that the browser reads."""


def chromium() -> str | None:
    """The browser's path; None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser: `with Browser(folder) as page: page.open(file)`.

    `events` holds what the page said since `open`: errors, exceptions, requests.
    """

    def __init__(self, profile: Path) -> None:
        path = chromium()
        assert path, "no Chromium is installed: ask chromium() first"
        self.events: list[dict[str, Any]] = []
        self._number, self._rest, self._session = 0, b"", ""
        self._process, self._write, self._read = _start(path, profile)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the browser and waits for it."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's answer; what the page says meanwhile is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(SECONDS)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def open(self, file: Path, hash: str = "") -> None:
        """Loads a file and waits until its scripts have run."""
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=file.resolve().as_uri() + hash)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send(
            *("Runtime.evaluate",), expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> None:
        """Waits until a JavaScript condition holds."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never became true: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key pressed and released where the focus is."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that the selector finds."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        mouse = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **mouse)

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and whether the reader prefers dark pages."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        found = self.send("Page.printToPDF", preferCSSPageSize=True)
        return base64.b64decode(found["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what a policy forbade."""
        self._drain()
        found = []
        for event in self.events:
            said, name = event.get("params", {}), event.get("method")
            if name == "Runtime.exceptionThrown":
                found.append(str(said["exceptionDetails"]))
            elif name == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
                found.append(str(said["args"]))
            elif name == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(said["entry"]["text"])
            elif name == "Page.javascriptDialogOpening":
                found.append(f"a dialog opened: {said['message']}")
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for, without what stands inside it."""
        self._drain()
        asked = (e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent")
        addresses = [said["request"]["url"] for said in asked]
        return [url for url in addresses if not url.startswith(("data:", "blob:"))]

    def _drain(self) -> None:
        self.run("new Promise((done) => setTimeout(done, 50))")

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {seconds} s"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":
                self._dismiss()
        return message

    def _dismiss(self) -> None:
        """A page waits while a dialog of `alert` is open; its answer is of no interest."""
        message = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
        message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")


def _start(path: str, profile: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """The browser, the pipe it reads and the one it writes."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
    command = [sys.executable, "-c", RENUMBER, *map(str, theirs), path, *FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=theirs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out, *theirs):
        os.close(end)
    return process, ours_out, ours_in
