"""A headless Chromium driven over the WebDriver protocol, with nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
)  # fmt: skip
AVAILABLE = shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


class Browser:
    """A context: one window."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        self._size = (width, height)

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-browser-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_for_driver()
        arguments = [*FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={self._size[0]},{self._size[1]}"]
        options = {"goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")}}
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self._session = f"/session/{answer['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._call("DELETE", self._session)
        self._driver.terminate()
        self._driver.wait(30)
        self._folder.cleanup()

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("chromedriver did not start")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", method=method,
            data=None if method in ("GET", "DELETE") else json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, timeout: float = 40) -> Any:
        """The first true value that a script returns."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.1)
        raise TimeoutError(f"never true: {script}\n{self.log()}")

    def resize(self, width: int, height: int) -> None:
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, on: bool = True) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme])

    def touch(self, *way: tuple[float, float]) -> None:
        """Drag a finger over these points of the window, as a touch screen reports it: the browser may scroll by it."""
        self._cdp("Emulation.setTouchEmulationEnabled", enabled=True)
        for at, (x, y) in enumerate(way):
            kind = "touchStart" if at == 0 else "touchMove"
            self._cdp("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self._cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self._cdp("Emulation.setTouchEmulationEnabled", enabled=False)

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, path: Path, whole: bool = True, height: int | None = None) -> None:
        """The whole page, or what the window shows, or only the upper ``height`` pixels of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        clip = {}
        if height is not None:
            width = self.run("return window.innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        shot = self._cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def log(self) -> list[Any]:
        """What the console said."""
        try:
            return list(self._call("POST", f"{self._session}/se/log", {"type": "browser"}))
        except AssertionError:
            return []
