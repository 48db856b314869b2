"""Every test that the documents name as a proof exists, and those that `make test` leaves out are told as such."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import guarantees

from tests import promises

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PLACED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PATH = re.compile(r"\btests/[\w/]*\w\.py\b")
NAME = re.compile(r"\btest_\w+(?:\.py)?")
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
KNOWN = {path.name for path in FILES}
KNOWN |= {name for path in FILES for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}


def missing(text: str) -> list[str]:
    """What ``text`` names and nobody finds: files, tests in their files, tests by name alone."""
    wrong = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    for file, name in PLACED.findall(text):
        path = ROOT / file
        if not path.exists() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            wrong.append(f"{file}::{name}")
    return wrong + sorted(set(NAME.findall(text)) - KNOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    assert missing(text) == []
    if page.parent.name == "rooms" or page.name in ("security.md", "guarantees.md"):
        assert NAME.search(text), "a page with promises names what shows them"


def test_what_is_not_there_is_found() -> None:
    assert missing("`tests/docs/test_proofs.py::test_every_test_that_is_named_exists`, test_proofs.py") == []
    for text in ("`tests/docs/test_proofs.py::test_not_there`", "test_not_there", "test_nothing.py", "tests/docs/not.py"):
        assert missing(text), text


def test_the_page_is_written_from_the_table() -> None:
    """If this fails: python scripts/guarantees.py."""
    before = guarantees.PAGE.read_text()
    assert guarantees.page(before, guarantees.TABLE.read_text()) == before


def test_every_test_of_the_table_exists() -> None:
    assert len(promises.promised()) > 30
    assert missing(" ".join(f"`{place}`" for place in promises.promised())) == []


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("order = [{ says = 'by position' }]", "without a test"),
        ("order = [{ says = 'none', promise = false, shown = ['a.py::test_a'] }]", "no promise"),
        ("order = []", "no answer"),
        ("", "no answer"),
        ("order = [{ says = 'by position', shown = ['a.py::test_a'] }]\nodrer = []", "odrer is no question"),
    ],
)
def test_a_cell_without_its_test_is_refused(answer: str, wrong: str) -> None:
    head = "[[questions]]\nname = 'order'\ntitle = 'order'\n[[reaches]]\ntitle = 'a'\n"
    with pytest.raises(ValueError, match=wrong):
        list(guarantees.cells(head + answer))


@pytest.mark.parametrize("set_", [True, False])
def test_a_proof_that_is_skipped_fails(set_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NO_SKIPS", "1" if set_ else "")
    for name, wanted in ((min(promises.promised()), set_), ("tests/docs/test_proofs.py::test_none", False)):
        report = pytest.TestReport(f"{name}[x]", ("", 0, ""), {}, "skipped", ("", 0, "no root"), "call")
        promises.checked(report)
        assert report.failed == wanted, name
        assert ("no root" in str(report.longrepr)) and (report.failed or report.skipped)
    report = pytest.TestReport(min(promises.promised()), ("", 0, ""), {}, "skipped", ("", 0, "docs/reaches.md: x"), "setup")
    assert promises.checked(report).skipped, "on a reach that does not have it nothing is promised"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_make_test_leaves_out_is_told(page: Path) -> None:
    for line in page.read_text().splitlines():
        if "tests/stress" in line:
            assert "make stress" in line, f"{page.name}: {line}"
