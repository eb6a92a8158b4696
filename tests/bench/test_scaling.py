"""The simulation of docs/scaling.md: its parts, and that the page shows what the result file has."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scaling
from scaling_fleet import fleet, requests
from scaling_ranks import Machine, interpolated, law, trees, windows

DOCS = Path(__file__).parent.parent.parent / "docs"
FLAT = Machine("flat", ((1, 4.0), (64, 4.0)), (0.0, 0.0), 0.0)


def test_values_between_measured_points() -> None:
    points = [(1, 1.0), (4, 2.0), (16, 4.0)]
    assert [interpolated(points, x) for x in (1, 2, 4, 8, 16, 99)] == [1.0, 1.5, 2.0, 3.0, 4.0, 4.0]


def test_ranks_cannot_be_faster_than_their_tokens_per_step() -> None:
    def accepted(rows: float) -> float:
        return interpolated([(1, 1.0), (256, 5.0)], rows)

    speeds = [trees(FLAT, ranks, accepted) for ranks in (1, 2, 4, 8)]
    for choice in speeds:
        assert choice.speed_up == pytest.approx(choice.tokens_per_step)
        assert choice.rows_of_rank <= 64
    assert [one.speed_up for one in speeds] == sorted(one.speed_up for one in speeds)
    assert speeds[0].rows_of_rank == speeds[0].rows == 64  # nothing is fed again by a single rank
    assert speeds[1].rows_of_rank < 64 + 1 < speeds[1].rows

    busy = Machine("busy", ((1, 4.0), (64, 256.0)), (0.0, 0.0), 1000.0)
    assert trees(busy, 8, accepted).setting == "none"  # an exchange that costs more than it brings


def test_windows_follow_the_law_of_the_paper() -> None:
    alpha, f = scaling.PAPER
    assert law(alpha, f, 5, 15) == pytest.approx(1.98, abs=0.01)
    for ranks in (1, 8):
        choice = windows(FLAT, ranks, alpha, f)
        assert choice.rows_of_rank <= 64
        assert choice.speed_up == pytest.approx(choice.tokens_per_step)
    assert windows(FLAT, 8, alpha, f).speed_up > windows(FLAT, 1, alpha, f).speed_up


def test_a_shared_store_helps_where_questions_come_back() -> None:
    rng = random.Random(0)
    texts = [([rng.randrange(1000) for _ in range(20)], [rng.randrange(1000) for _ in range(32)]) for _ in range(24)]
    asked = requests(texts, 24, 0.5, seed=1)
    assert len(asked) == 24
    assert len({tuple(prompt) for prompt, _ in asked}) < 20
    assert len({tuple(prompt) for prompt, _ in requests(texts, 24, 0.0, seed=1)}) == 24
    own, shared, alone = fleet(asked, 4, shared=False), fleet(asked, 4, shared=True), fleet(asked, 1, shared=True)
    assert own.tokens == shared.tokens == alone.tokens == 24 * 32
    assert alone.steps <= shared.steps < own.steps
    assert fleet(asked, 1, shared=False) == alone
    assert fleet(texts[:4], 4, shared=True).tokens_per_step == 1.0  # all at once: there was nothing to learn from


def test_plots_are_those_of_the_result_file() -> None:
    report = json.loads((DOCS / "results" / "scaling.json").read_text())
    page = (DOCS / "scaling.md").read_text()
    for name, drawing in scaling.plots(report).items():
        ElementTree.fromstring(drawing)
        assert (DOCS / "img" / name).read_text() == drawing + "\n", "run python benchmarks/scaling.py"
        assert f"img/{name}" in page


def test_tables_are_those_of_the_result_file() -> None:
    report = json.loads((DOCS / "results" / "scaling.json").read_text())
    page = (DOCS / "scaling.md").read_text()
    for made in (scaling.ranks_table(report), scaling.fleet_table(report)):
        assert made in page, "put the tables that benchmarks/scaling.py prints into the page"
