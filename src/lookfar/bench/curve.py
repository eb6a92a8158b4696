"""The cost curve in use, next to fresh measurements of the same steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lookfar.core.progress import progress_bar
from lookfar.engine.costs import CONTEXT, kept_costs, measure_steps, own_cache
from lookfar.runners.base import ModelRunner

NO_CURVE = "No cost curve is kept for this model and machine: lm.warmup() or the first request measures it."


@dataclass(frozen=True)
class CurveCheck:
    """Milliseconds of a step by its rows: as the row budget believes, and as measured now."""

    kept: dict[int, float]
    fresh: dict[int, float]  # sizes that would take too long are left out
    visits: dict[int, float]  # real steps that refined each point

    @property
    def drift(self) -> float:
        """By how much all steps are slower now than the curve says: the median ratio."""
        return median(fresh / self.kept[rows] for rows, fresh in self.fresh.items())

    def ratio(self, rows: int) -> float | None:
        """Return the fresh time divided by the kept one."""
        return self.fresh[rows] / self.kept[rows] if rows in self.fresh else None

    def shape(self, rows: int) -> float | None:
        """Return the ratio without the drift: 1 where the row budget is right about what more rows cost."""
        ratio = self.ratio(rows)
        return None if ratio is None else ratio / self.drift

    def table(self) -> list[list[str]]:
        """Return the rows of a table, with the headings of `HEADINGS`."""
        return [
            [
                str(rows),
                f"{kept:.2f} ms",
                f"{self.fresh[rows]:.2f} ms" if rows in self.fresh else "–",
                *("–" if value is None else f"{value:.2f}" for value in (self.ratio(rows), self.shape(rows))),
                f"{self.visits[rows]:.0f}",
            ]
            for rows, kept in self.kept.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": {rows: self.ratio(rows) for rows in self.kept}, "drift": self.drift}


HEADINGS = ("rows", "in use", "now", "now ÷ in use", "without drift", "real steps")


def check_curve(runner: ModelRunner) -> CurveCheck | None:
    """Measure the steps of the kept cost curve again; None if none is kept."""
    known = kept_costs(runner)
    if known is None:
        return None
    kept = known.curve.as_measured()
    with progress_bar("Measuring the cost curve"):
        fresh = measure_steps(runner, own_cache(runner, CONTEXT + max(kept)), list(kept)).as_measured()
    visits = {int(rows): float(steps) for rows, steps in zip(known.curve.rows, known.curve.visits, strict=True)}
    return CurveCheck(
        {rows: 1e3 * seconds for rows, seconds in kept.items()},
        {rows: 1e3 * seconds for rows, seconds in fresh.items()},
        visits,
    )
