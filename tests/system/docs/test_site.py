"""The documentation as a whole: every page is in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import re
import runpy
from importlib.resources import files
from pathlib import Path

import pytest
from support.pages import ROOT

import stobatch

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "results/README.md")] + PAGES
LINK = re.compile(r"\]\(([^)\s]+)\)")


def navigation() -> list[str]:
    """Return the pages that mkdocs.yml names; plain text, so that no test needs a package of the site."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    lines = [line for line in nav.splitlines() if not line.strip().startswith("#")]
    return re.findall(r"(?:- |: )([\w/.-]+\.md)$", "\n".join(lines), re.M)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_decision_is_in_its_index() -> None:
    index = (DOCS / "decisions" / "index.md").read_text()
    assert LINK.findall(index) == [page.name for page in sorted((DOCS / "decisions").glob("0*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the names that headings get: small letters and digits, spaces as hyphens, nothing else.

    >>> sorted(anchors(DOCS / "tutorial.md"))[:2]
    ['1-plan-before-data', '2-train']
    """
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)
    }


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        place = (page.parent / target).resolve() if target else page
        if not place.is_file() or (anchor and anchor not in anchors(place)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](gone.md) [b](#one-thing) [c](#another) [d](page.md#one-thing)\n")
    assert broken(page) == ["gone.md", "#another"]


def test_a_list_after_a_line_of_text_is_a_list_on_the_site() -> None:
    hooks = runpy.run_path(str(DOCS / "site_hooks.py"))
    text = "Things:\n- one\n  more\n- two\n\n```sh\ncat\n- no item\n```\n1. first\n2. second\n"
    expected = "Things:\n\n- one\n  more\n- two\n\n```sh\ncat\n- no item\n```\n\n1. first\n2. second"
    assert hooks["separate_lists"](text) == expected


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {stobatch.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("package", ["stobatch", "stobatch_recipes"])
def test_a_package_ships_its_types(package: str) -> None:
    assert (files(package) / "py.typed").is_file()
