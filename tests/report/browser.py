"""Chromium without a window, driven over its own DevTools protocol: pipes, and nothing to install.

`python -m tests.report.browser PAGE.html … --output FOLDER` takes pictures of pages: light, dark,
and as wide as a phone.
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
PATIENCE = 120.0
"""Seconds that an answer may take on a busy machine."""
WIDE, PHONE = (1200, 900), (360, 740)


def find_chromium() -> str | None:
    """The browser that is installed, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One tab. What pages write to the console, and ask the network for, is kept."""

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
        asked = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            asked["sessionId"] = self.session
        os.write(self.sending, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self.count:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.receiving], [], [], PATIENCE)
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
        """Load a page, a file or an address, and wait until all of it is there."""
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
        """Of JavaScript, evaluated in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until JavaScript in the page is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never: {expression}\n{self.complaints()}"
            time.sleep(0.05)

    def give_file(self, selector: str, file: Path) -> None:
        """Choose a file in an input of the page, as a person does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        found = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=found, files=[str(file.resolve())])

    def complaints(self) -> list[str]:
        """What stands in the console, and what a script failed of."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def requests(self) -> list[str]:
        """What was asked for beside the page and what it holds itself."""
        asked = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended with all it has started."""
    theirs, sending = os.pipe()
    receiving, answering = os.pipe()
    # Above 3 and 4, where the browser expects its ends.
    inner = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (theirs, answering)]
    os.close(theirs)
    os.close(answering)

    def in_place() -> None:
        for end, place in zip(inner, (3, 4), strict=True):
            os.dup2(end, place)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,  # Nothing else is inherited: Python opens files that way.
            preexec_fn=in_place,
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
            process.wait(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
            os.close(sending)
            os.close(receiving)
            time.sleep(0.05)  # Its helpers write to the profile a moment longer.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path())
    asked = parser.parse_args()
    found = find_chromium()
    assert found is not None, "there is no Chromium here"
    looks: dict[str, dict[str, Any]] = {
        "light": {},
        "dark": {"dark": True},
        "phone": {"size": PHONE},
    }
    with chromium(found) as browser:
        for page in asked.pages:
            for look, options in looks.items():
                browser.open(page, **options)
                (asked.output / f"{page.stem}-{look}.png").write_bytes(browser.screenshot())
                print(page, look, browser.complaints(), browser.requests())


if __name__ == "__main__":
    main()
