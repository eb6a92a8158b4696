"""The Python blocks of the pages run with the demo model. Blocks that need something else are marked as `py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lookfar

pytestmark = pytest.mark.real

DOCS = Path(__file__).parent.parent / "docs"
NOT_HERE = {
    "generation.md": "run by tests/test_real.py",
    "writing-a-drafter.md": "run by tests/drafters/test_writing_a_drafter.py",
    "scaling.md": "needs a Redis server",
    "vllm.md": "needs vLLM",
    "architecture.md": "shows a part of a function",
    "parallel.md": "needs several processes",
}


def blocks(page: Path) -> list[str]:
    return [part.split("```")[0] for part in page.read_text().split("```python\n")[1:]]


RUN = [page for page in sorted(DOCS.rglob("*.md")) if page.name not in NOT_HERE and blocks(page)]


@pytest.fixture
def shared_demo(demo: lookfar.LM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load the demo model once for all pages, unless a page gives options."""
    load = lookfar.load

    def load_once(name: str, **options: Any) -> lookfar.LM:
        return demo if options.keys() <= {"device"} else load(name, **options)

    monkeypatch.setattr(lookfar, "load", load_once, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def demo() -> lookfar.LM:
    return lookfar.load("demo", device="cpu")


@pytest.mark.usefixtures("shared_demo")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_blocks_run_in_order(page: Path, demo: lookfar.LM) -> None:
    session: dict[str, object] = {}
    try:
        with torch.random.fork_rng():
            for number, block in enumerate(blocks(page), 1):
                exec(compile(block, f"{page.name}, block {number}", "exec"), session)
    finally:
        lookfar.restore(demo.model)


def test_pages_with_blocks_are_run() -> None:
    assert {"index", "quickstart", "strategies", "draft-store", "cpu", "structured-output", "migrating"} <= {
        page.stem for page in RUN
    }
