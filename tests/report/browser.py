"""Headless Chromium, controlled through pipes by its DevTools protocol, without other packages.

`python -m tests.report.browser PAGE.html … --output FOLDER` takes screenshots of pages: light,
dark, and in the width of a phone.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-pipe",
)
TIMEOUT_SECONDS = 120.0
"""Longest time for an answer, on a busy machine."""
WIDE, PHONE = (1200, 900), (360, 740)


def find_chromium() -> str | None:
    """Return the path of an installed browser; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A tab of the browser, with a record of console messages and network requests."""

    def __init__(self, sending: int, receiving: int) -> None:
        self.sending, self.receiving = sending, receiving
        self.unread = b""
        self.count = 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        request = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            request["sessionId"] = self.session
        os.write(self.sending, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self.count:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.receiving], [], [], TIMEOUT_SECONDS)
            assert ready, "the browser does not answer"
            piece = os.read(self.receiving, 1 << 20)
            assert piece, "the browser has ended"
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(
        self,
        page: Path | str,
        *,
        size: tuple[int, int] = WIDE,
        dark: bool = False,
        scripts: bool = True,
    ) -> None:
        """Load a page, given by its file or address, and wait until it is complete."""
        self.events.clear()
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true in the page."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"timeout: {expression}\n{self.complaints()}"
            time.sleep(0.05)

    def give_file(self, selector: str, file: Path) -> None:
        """Choose a file in an input of the page, as a user would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file.resolve())])

    def complaints(self) -> list[str]:
        """Return console messages and errors of scripts."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def requests(self) -> list[str]:
        """Return requested URLs, except the page itself and data URLs."""
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def screenshot(self) -> bytes:
        """Return a screenshot of the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        screenshot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(screenshot["data"])


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it afterwards."""
    reading, sending = os.pipe()
    receiving, answering = os.pipe()
    # Numbers above 3 and 4, which the browser expects for its ends.
    inner = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (reading, answering)]
    os.close(reading)
    os.close(answering)

    def connect_ends() -> None:
        for end, number in zip(inner, (3, 4), strict=True):
            os.dup2(end, number)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,  # Python opens other files as not inheritable.
            preexec_fn=connect_ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in inner:
            os.close(end)
        try:
            browser = Browser(sending, receiving)
            yield browser
            browser.session = None
            browser.call("Browser.close")
            process.wait(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
            process.wait()
            os.close(sending)
            os.close(receiving)
            time.sleep(0.05)  # Child processes still write to the profile.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    executable = find_chromium()
    assert executable is not None, "Chromium is not installed"
    looks: dict[str, dict[str, Any]] = {
        "light": {},
        "dark": {"dark": True},
        "phone": {"size": PHONE},
    }
    with chromium(executable) as browser:
        for page in options.pages:
            for look, settings in looks.items():
                browser.open(page, **settings)
                (options.output / f"{page.stem}-{look}.png").write_bytes(browser.screenshot())
                print(page, look, browser.complaints(), browser.requests())


if __name__ == "__main__":
    main()
