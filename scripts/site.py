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
READY = "penstock.gateway.modules"  # their docstrings tell all: the methods are those of every module
#: The pages of the API reference: a title, and modules or, after a colon, single names of a module.
REFERENCE = {
    "Opening a publisher or subscriber": ["penstock:publisher", "penstock:subscriber", "penstock.address"],
    "The contract": ["penstock.channel"],
    "Messages, batches and drafts": ["penstock._core:Message", "penstock._core:Batch", "penstock._core:Draft"],
    "Bus": ["penstock.bus"],
    "Shared memory": ["penstock.shm"],
    "TCP": ["penstock.tcp"],
    "Journal": ["penstock.journal.journal"],
    "Queues of a journal": ["penstock.journal.queue"],
    "Broker": [
        "penstock.broker.server:Server",
        "penstock.broker.limits:Limits",
        "penstock.broker.connection:ConnectionLimits",
    ],
    "Broker's client": [
        "penstock.broker.client.clients",
        "penstock.broker.client.publisher:Publisher",
        "penstock.broker.client.subscriber:Subscriber",
    ],
    "NATS": ["penstock.nats", "penstock.nats.publishing:Publisher", "penstock.nats.subscribing:Subscriber"],
    "Client of calls": ["penstock.calls.ask"],
    "Server of calls": ["penstock.calls.answer"],
    "Gateway": ["penstock.gateway.gateway"],
    "Modules of a gateway": ["penstock.gateway.module"],
    "Ready modules of a gateway": [READY],
    "Bridge": ["penstock.bridge.bridge"],
    "Spark": ["penstock.spark", "penstock.spark.batches:arrow_batches"],
    "Spark: payloads to columns": ["penstock.spark.decode"],
    "Spark: pipelines": ["penstock.spark.pipelines"],
    "Spark: the lake": ["penstock.spark.lake"],
    "Monitor": ["penstock.monitor.service:Service"],
    "Recordings as tables": ["penstock.recording.tables"],
    "Codecs of types": ["penstock.types.codec"],
    "Clock": ["penstock.clock"],
    "Errors": ["penstock.errors"],
}
#: Of a class whose other public methods are for the rest of its room: what a program calls.
METHODS = {"penstock.broker.server:Server": "run, start, stop, reload, close"}
#: What a module offers and another page describes.
ELSEWHERE = {"penstock.spark.pipelines": "archive, Archived, compact, history, read_all"}
CONFIGURATION = """
project = "Penstock"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Penstock"
highlight_language = "text"
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]
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
    for title, names in REFERENCE.items():
        text = "\n\n".join(_ready() if names == [READY] else [_directive(name) for name in names])
        (PAGES / "api" / f"{_page(names)}.md").write_text(f"# {title}\n\n{text}\n")
    (PAGES / "index.md").write_text((PAGES / "README.md").read_text() + _contents())
    (PAGES / "README.md").unlink()
    index = PAGES / "docs" / "README.md"
    index.write_text(index.read_text().replace("](../README.md)", "](../index.md)"))
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", "-b", "html", PAGES, SITE]
    return subprocess.call(command, cwd=ROOT)


def _page(names: list[str]) -> str:
    """The name of the page that begins with these modules or names."""
    return names[0].replace(":", ".")


def _directive(name: str) -> str:
    """A module with all of its public names, or one name of it."""
    module, _, one = name.partition(":")
    kind = "automodule" if not one else "autoclass" if one[0].isupper() else "autofunction"
    # the classes named last have no methods of ours
    options = f":members: {METHODS.get(name, '')}\n   :inherited-members: Exception, str, tuple"
    if kind == "autofunction":
        options = ""
    elif module in ELSEWHERE:
        options += f"\n   :exclude-members: {ELSEWHERE[module]}"
    return f"```{{eval-rst}}\n.. {kind}:: {f'{module}.{one}' if one else module}\n   {options}\n```"


def _ready() -> list[str]:
    """The docstring of each ready module, under the name by which a gateway's file finds it."""
    names = sorted(path.stem for path in (ROOT / "src" / "penstock" / "gateway" / "modules").glob("[a-z]*.py"))
    modules = [READY, *(f"{READY}.{name}" for name in names)]
    return [f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n```" for name in modules]


def _contents() -> str:
    """The tree of pages at the side, in the order in which docs/README.md names them."""
    named = re.findall(r"\]\(([\w/]+)\.md\)", (ROOT / "docs" / "README.md").read_text())
    designs = sorted(page.stem for page in (ROOT / "docs" / "design").glob("*.md"))
    groups = {
        "Documents": ["docs/README", *(f"docs/{name}" for name in named if not name.startswith("design/"))],
        "Examples": sorted(str(page.relative_to(ROOT).with_suffix("")) for page in (ROOT / "examples").rglob("*.md")),
        "Design": ["ARCHITECTURE", *(f"docs/design/{page}" for page in designs)],
        "API": [f"api/{_page(names)}" for names in REFERENCE.values()],
        "Project": ["CONTRIBUTING", "CHANGELOG"],
    }
    trees = ""
    for title, pages in groups.items():
        trees += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{chr(10).join(pages)}\n```\n"
    return trees


if __name__ == "__main__":
    sys.exit(main())
