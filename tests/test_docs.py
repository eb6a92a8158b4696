"""Pages that are made by our own code are up to date."""

from __future__ import annotations

import sys
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

import model_table
from lookfar.bench.drawings import every
from lookfar.cli.manual import manual

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
import tables  # noqa: E402


def test_the_manual_names_every_option() -> None:
    assert (DOCS / "cli.md").read_text() == manual(), "run python -m lookfar.cli.manual > docs/cli.md"


@pytest.mark.slow
def test_the_page_of_models_is_current() -> None:
    page = (DOCS / "models.md").read_text()
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("the page is of another version of transformers")
    assert page == model_table.page(), "run python tests/model_table.py > docs/models.md"


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


@pytest.mark.slow
def test_readme_passes_the_type_checker_and_a_typing_error_does_not(tmp_path: Path) -> None:
    import re

    from mypy import api

    blocks = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.S)
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text("\n".join(blocks) + 'texts = [done.text for done in lm.generate(("a", "b"))]\n')
    wrong.write_text('import lookfar\nlm = lookfar.load("demo")\nlm.generate("x", max_new_tokenz=3)\n')
    options = ["--strict", "--cache-dir", str(DOCS.parent / ".mypy_cache" / "readme"), "--config-file", ""]
    said, _, failed = api.run([*options, str(right)])
    assert not failed, said
    said, _, failed = api.run([*options, str(wrong)])
    assert failed
    assert 'did you mean "max_new_tokens"' in said


def test_options_are_arguments_of_transformers_or_our_own() -> None:
    from transformers import GenerationConfig, GenerationMixin

    from lookfar.options import GenerateOptions
    from lookfar.sampling.params import CONSTRAINTS

    known = set(vars(GenerationConfig())) | set(signature(GenerationMixin.generate).parameters)
    ours = {"strategy", "budget", "seed", "generator", "reuse", "presence_penalty", "frequency_penalty", *CONSTRAINTS}
    assert set(GenerateOptions.__annotations__) - known == ours
