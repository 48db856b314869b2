"""Every link of the documents leads somewhere, and every page of docs can be reached from README.md and from docs/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
IMAGE = re.compile(r'<img src="([^"]+)"')
ANCHOR = re.compile(r"""<a (?:id|name)=["']([^"']+)["']""")


def prose(page: Path) -> str:
    """The page without its code blocks and without code inside of sentences."""
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", " ", code[0]), FENCE.sub("", page.read_text()))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor ("" for none) of each link that stays inside of the project."""
    for target in LINK.findall(prose(page)) + IMAGE.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield ((page.parent / file).resolve() if file else page), anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page, made from its headings as GitHub makes them."""
    found: set[str] = set(ANCHOR.findall(page.read_text()))
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(page: Path) -> list[str]:
    """The links of ``page`` whose file or anchor does not exist."""
    wrong = []
    for target, anchor in links(page):
        if not target.exists():
            wrong.append(str(target))
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{target.name}#{anchor}")
    return wrong


def reached(start: Path) -> set[Path]:
    """The pages that a reader finds who begins at ``start`` and follows links."""
    found: set[Path] = set()
    queue = [start]
    while queue:
        page = queue.pop()
        if page not in found:
            found.add(page)
            queue += [target for target, _ in links(page) if target.suffix == ".md" and target.exists()]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize(
    "start", [ROOT / "README.md", ROOT / "docs" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_page_is_reached(start: Path) -> None:
    assert sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - reached(start)) == []


def test_the_index_names_every_page_of_docs() -> None:
    """One click: a page that can be reached only from another page is found by few."""
    named = {target for target, _ in links(ROOT / "docs" / "README.md")}
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "README.md"}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - named) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# What is it, `x`?\n\n## Twice\n\n## Twice\n")
    page.write_text("[a](other.md) [b](other.md#what-is-it-x) [c](other.md#twice-1) [d](https://example.org/)\n")
    assert broken(page) == []
    assert reached(page) == {page, other}
    page.write_text("[a](none.md) [b](other.md#none)\n\n```\n[not a link](nowhere.md)\n```\n`f[0](x)`\n")
    assert broken(page) == [str(tmp_path / "none.md"), "other.md#none"]
