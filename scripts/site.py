"""Builds the documents as a site with search and an API reference: ``make docs``, then open build/site/index.html.

The pages are README.md, the other documents beside it, and docs/; the reference comes from the docstrings. A link to a
file that is not a page (an example) leads to a copy of it. A link that leads nowhere fails the build. Nothing is
fetched from the network, neither while the site is built nor when it is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
MODULES = {
    "Opening a publisher or subscriber": "penstock.address",
    "The contract": "penstock.channel",
    "Bus": "penstock.bus",
    "Shared memory": "penstock.shm",
    "TCP": "penstock.tcp",
    "Journal": "penstock.journal.journal",
    "Queues of a journal": "penstock.journal.queue",
    "Broker's client": "penstock.broker.client.clients",
    "Client of calls": "penstock.calls.ask",
    "Server of calls": "penstock.calls.answer",
    "Gateway": "penstock.gateway.gateway",
    "Modules of a gateway": "penstock.gateway.module",
    "Bridge": "penstock.bridge.bridge",
    "Recordings as tables": "penstock.recording.tables",
    "Codecs of types": "penstock.types.codec",
    "Clock": "penstock.clock",
    "Errors": "penstock.errors",
}
CONFIGURATION = """
project = "Penstock"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Penstock"
highlight_language = "text"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["ref.python", "docutils", "misc.highlighting_failure"]
"""


def main() -> int:
    """Lay the pages out as Sphinx wants them, then build them. Gives the exit code."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES / "docs")
    shutil.copytree(ROOT / "examples", PAGES / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for page in ROOT.glob("*.md"):
        shutil.copy(page, PAGES / page.name)
    (PAGES / "conf.py").write_text(CONFIGURATION)
    (PAGES / "api").mkdir()
    for title, module in MODULES.items():
        options = ":members:\n   :inherited-members: Exception, str, tuple"  # these have no methods of ours
        directive = f"```{{eval-rst}}\n.. automodule:: {module}\n   {options}\n```"
        (PAGES / "api" / f"{module}.md").write_text(f"# {title}\n\n{directive}\n")
    (PAGES / "index.md").write_text((PAGES / "README.md").read_text() + _contents())
    (PAGES / "README.md").unlink()
    index = PAGES / "docs" / "README.md"
    index.write_text(index.read_text().replace("](../README.md)", "](../index.md)"))
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", "-b", "html", PAGES, SITE]
    return subprocess.call(command, cwd=ROOT)


def _contents() -> str:
    """The tree of pages at the side, in the order in which docs/README.md names them."""
    named = re.findall(r"\]\(([\w/]+)\.md\)", (ROOT / "docs" / "README.md").read_text())
    designs = sorted(page.stem for page in (ROOT / "docs" / "design").glob("*.md"))
    groups = {
        "Documents": ["docs/README", *(f"docs/{name}" for name in named if not name.startswith("design/"))],
        "Examples": sorted(str(page.relative_to(ROOT).with_suffix("")) for page in (ROOT / "examples").rglob("*.md")),
        "Design": ["ARCHITECTURE", *(f"docs/design/{page}" for page in designs)],
        "API": [f"api/{module}" for module in MODULES.values()],
        "Project": ["CONTRIBUTING", "CHANGELOG"],
    }
    trees = ""
    for title, pages in groups.items():
        trees += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{chr(10).join(pages)}\n```\n"
    return trees


if __name__ == "__main__":
    sys.exit(main())
