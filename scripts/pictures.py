"""Takes the pictures of the documents from a running demo: ``make pictures`` writes docs/pictures.

The page is seen by a headless Chromium, the terminal is ``penstock top`` with its colours, drawn by rich as SVG.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.monitor.browser import Browser  # noqa: E402 - found by the line above

PICTURES = ROOT / "docs" / "pictures"
PENSTOCK = [sys.executable, "-m", "penstock"]
COLUMNS, WARM_UP_S = 112, 15.0


def main() -> int:
    """Run a demo for half a minute with shared memory of its own, and look at it."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-pictures-") as folder:
        environment = os.environ | {"PENSTOCK_SHM_DIR": f"{folder}/shm", "PENSTOCK_LOG": ""}
        Path(folder, "shm").mkdir(mode=0o700)
        command = [*PENSTOCK, "demo", "--no-spark", "--seconds", "40", "--directory", f"{folder}/data"]
        demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        assert demo.stdout is not None
        try:
            page = next(found[0] for line in demo.stdout if (found := re.findall(r"http://[\d.:]+\S*", line)))
            time.sleep(WARM_UP_S)  # the plots are of the last seconds
            _page(page)
            _terminal([*PENSTOCK, "top", "--count", "4", "--every", "0.5", "--sort", "rate"], environment)
        finally:
            demo.terminate()
            demo.communicate()
    return 0


def _page(address: str) -> None:
    """The page in the lowest window in which its graph and its list are not cut, without the empty space below."""
    with Browser(1400, 900) as browser:
        browser.open(address)
        time.sleep(6)
        if not any(_fits(browser, height) for height in range(800, 1300, 10)):
            raise SystemExit("the page of the demo does not fit into a window of 1300 pixels")
        bottom = browser.run("return Math.ceil(document.querySelector('footer').getBoundingClientRect().bottom)")
        browser.screenshot(PICTURES / "page.png", whole=False, height=bottom)


def _fits(browser: Browser, height: int) -> bool:
    """Whether a window of this height shows the whole graph and the whole list of channels."""
    browser.resize(1400, height)
    parts = "['graph', 'channel-list'].map(name => document.getElementById(name))"
    return bool(browser.run(f"return {parts}.every(part => part.scrollHeight <= part.clientHeight)"))


def _terminal(command: list[str], environment: dict[str, str]) -> None:
    """What the command shows at last on a terminal of ``COLUMNS``."""
    main_end, terminal = pty.openpty()
    size = environment | {"COLUMNS": str(COLUMNS), "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=size)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main_end, 65536):
            shown += part
    except OSError:
        pass  # how Linux tells that the last writer of a terminal has gone
    process.wait()
    os.close(main_end)
    last = re.split(rb"\x1b\[H|\x1b\[2J|\x1b\[\d+A", shown)[-1].decode()
    text = re.sub(r"\x1b\[\?\d+[hl]|\x1b\[\d*[JKG]|\x1b\[2K", "", last).replace("\r", "")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115 - kept by the console
    console.print(Text.from_ansi(text.strip("\n")))
    console.save_svg(str(PICTURES / "top.svg"), title="penstock top")


if __name__ == "__main__":
    sys.exit(main())
