"""Pages that are made by our own code are up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lookfar.bench.drawings import every
from lookfar.cli.manual import manual

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
import tables  # noqa: E402


def test_the_manual_names_every_option() -> None:
    assert (DOCS / "cli.md").read_text() == manual(), "run python -m lookfar.cli.manual > docs/cli.md"


@pytest.mark.parametrize("name", sorted(every()))
def test_drawings(name: str) -> None:
    drawing = every()[name]
    ElementTree.fromstring(drawing)
    assert (DOCS / "img" / name).read_text() == drawing, "run python -m lookfar.bench.drawings docs/img"
    assert f"img/{name}" in (DOCS / "how-it-works.md").read_text()


def test_tables_are_those_of_the_result_files() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    assert page == tables.rendered(page), "run python benchmarks/tables.py"
    assert all(f"<!-- table: {name} -->\n|" in page for name in tables.TABLES)


@pytest.mark.parametrize("name", sorted(tables.PLOTS))
def test_plots_are_those_of_the_result_files(name: str) -> None:
    drawing = tables.PLOTS[name]()
    ElementTree.fromstring(drawing)
    assert (DOCS / "img" / name).read_text() == drawing + "\n", "run python benchmarks/tables.py"
    assert f"img/{name}" in (DOCS / "benchmarks.md").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
