"""Pages of the documentation are complete, lead somewhere, and are up to date where our own code makes them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import figures
import pytest
import tables
import transformers
import yaml

import lookfar
import model_table
from lookfar.bench.drawings import every
from lookfar.cli.manual import manual

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
URL = "https://github.com/lookfar-project/lookfar"
RAW = "https://raw.githubusercontent.com/lookfar-project/lookfar/main/"
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*sorted(DOCS.rglob("*.md")), *ROOT_PAGES]


def test_the_manual_names_every_option() -> None:
    assert (DOCS / "cli.md").read_text() == manual(), "run python -m lookfar.cli.manual > docs/cli.md"


@pytest.mark.slow
def test_the_page_of_models_is_current() -> None:
    page = (DOCS / "models.md").read_text()
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("the page is of another version of transformers")
    assert page == model_table.page(), "run python tests/model_table.py > docs/models.md"


def test_the_words_above_the_table_of_models() -> None:
    words = model_table.HEAD.partition("{counts}")[0]
    page = (DOCS / "models.md").read_text()
    version = re.search(r"with transformers ([\d.]+)\. It", page)
    assert version is not None
    assert page.startswith(words.replace("{version}", version[1])), "run python tests/model_table.py > docs/models.md"


@pytest.mark.parametrize("name", sorted(every()))
def test_drawings(name: str) -> None:
    drawing = every()[name]
    ElementTree.fromstring(drawing)
    assert (DOCS / "img" / name).read_text() == drawing, "run python -m lookfar.bench.drawings docs/img"
    assert f"img/{name}" in (DOCS / "how-it-works.md").read_text()


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text()
    assert text == tables.rendered(text), "run python benchmarks/tables.py"
    assert not re.search(r"^\s*<!-- value:", text, re.M), "a comment at the start of a line ends the paragraph"
    assert text.count("<!-- end -->") == text.count("<!-- table:") + text.count("<!-- value:")


def test_a_table_that_was_edited_by_hand_is_noticed() -> None:
    for page in ("README.md", "docs/benchmarks.md"):
        text = (ROOT / page).read_text()
        found = re.search(r"<!-- table: [\w-]+ -->\n(?:\|.*\n)+", text)
        assert found is not None
        edited = text.replace(found[0], found[0].replace("1", "7"))
        assert tables.rendered(edited) == text != edited


def test_every_table_and_figure_is_on_a_page() -> None:
    texts = "".join(page.read_text() for page in tables.PAGES)
    assert all(f"<!-- table: {name} -->\n|" in texts for name in tables.TABLES)
    assert all(f"<!-- value: {name} -->" in texts for name in tables.VALUES)


def test_every_report_has_its_command() -> None:
    for name in figures.COMMANDS:
        path = figures.RESULTS / f"{name}.json"
        if name not in figures.OWN_FILE and path.exists():
            about = tables.read(name)
            assert "benchmarks/" in about["command"]
            assert about["machine"]
            assert about["report"]
    for command in figures.COMMANDS.values():
        if command.startswith("python"):
            assert (ROOT / command.split()[1]).exists()


@pytest.mark.parametrize("name", sorted(tables.PLOTS))
def test_plots_are_those_of_the_result_files(name: str) -> None:
    drawing = tables.PLOTS[name]()
    ElementTree.fromstring(drawing)
    assert (DOCS / "img" / name).read_text() == drawing + "\n", "run python benchmarks/tables.py"
    assert any(f"img/{name}" in page.read_text() for page in tables.PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.partition("#")[0]
        for prefix in (f"{URL}/blob/main/", f"{URL}/tree/main/", RAW):
            if path.startswith(prefix):
                assert (ROOT / path.removeprefix(prefix)).exists(), f"{page.name} points to {target}"
        if path and "://" not in path:
            assert (page.parent / path).exists(), f"{page.name} points to {target}"


def test_the_readme_can_be_shown_by_a_package_index() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert all(target.startswith("https://") for target in targets)
    assert f"{RAW}docs/img/arriving.svg" in targets


def test_every_environment_variable_is_listed() -> None:
    """Names that the source reads or sets, and nothing else, are in the table."""
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"\bLOOKFAR_[A-Z_]+\b", source))
    named |= set(re.findall(r"""environ(?:\.get)?[\[(]\s*["'](\w+)["']""", source))
    named |= set(re.findall(r"""envvar="(\w+)\"""", source)) | set(re.findall(r'"(TORCHINDUCTOR_\w+)"', source))
    table = (DOCS / "environment.md").read_text().split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == named


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: lookfar\.(\w+)$", pages, re.M))
    assert set(lookfar.__all__) - {"__version__"} <= documented


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    found = set(re.findall(r"^\s+- (?:[^:#]+: )?([\w/-]+\.md)$", text, re.M))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert found == pages | {"contributing.md", "changelog.md"}, "add the page to nav in mkdocs.yml"


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("mkdocstrings") is None, reason="needs lookfar[docs]")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(https?:[^"'\s>]+)""", text)
        loaded += re.findall(r"""<link(?![^>]*canonical)[^>]*\shref=["']?(https?:[^"'\s>]+)""", text)
        assert not loaded, f"{page.name} loads {loaded}"
    reference = (tmp_path / "reference" / "models" / "index.html").read_text()
    assert "Tokens that each step emitted." in reference  # the comment beside a field


def test_templates_and_citation_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lookfar.__version__
    papers = [found["identifiers"][0]["value"] for found in citation["references"]]
    assert papers == ["arXiv:2402.02057", "arXiv:2312.12728"]
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        found = yaml.safe_load(template.read_text())
        assert template.name == "config.yml" or {"name", "description", "body"} <= found.keys()


@pytest.mark.slow
def test_readme_passes_the_type_checker_and_a_typing_error_does_not(tmp_path: Path) -> None:
    from mypy import api

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text("\n".join(blocks) + 'texts = [done.text for done in lm.generate(("a", "b"))]\n')
    wrong.write_text('import lookfar\nlm = lookfar.load("demo")\nlm.generate("x", max_new_tokenz=3)\n')
    options = ["--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "readme"), "--config-file", ""]
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
