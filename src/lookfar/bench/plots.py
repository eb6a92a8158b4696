"""Small charts as SVG, for pages and docs. They bring their own colours and adapt to dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from html import escape

COLOURS = ("#3b82f6", "#f59e0b", "#14b8a6", "#a855f7", "#ef4444", "#84cc16", "#ec4899", "#64748b")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 56, 16, 40, 56
STYLE = """<style>
.ink{fill:#1d2430}.dim{fill:#6b7485}.axis{stroke:#9aa3b2;stroke-width:1}.grid{stroke:#d6dbe4;stroke-width:1}
@media (prefers-color-scheme:dark){.ink{fill:#e8ebf1}.dim{fill:#98a1b3}.axis{stroke:#5b6475}.grid{stroke:#3a4252}}
text{font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}</style>"""


@dataclass(frozen=True)
class Axes:
    """The names of the axes, whether x is logarithmic, where y begins, and the width of the chart."""

    x_name: str = ""
    y_name: str = ""
    log: bool = False
    base: float = 0.0
    width: int = WIDTH


class Chart:
    """A frame with axes; marks are added in data coordinates."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], axes: Axes) -> None:
        self.title, self.log, self.width = title, axes.log, axes.width
        self.height = HEIGHT  # and more where the legend takes several lines
        self.x_range, self.y_range = x, (y[0], y[1] if y[1] > y[0] else y[0] + 1)
        self.parts: list[str] = []
        for value in ticks(*self.y_range):
            at = self.y(value)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.text(LEFT - 6, at + 4, short(value), "end", "dim")
        bottom = HEIGHT - BOTTOM
        self.parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.right}" y1="{bottom}" y2="{bottom}"/>')
        if axes.x_name:
            self.text((LEFT + self.right) / 2, HEIGHT - 22, axes.x_name, "middle", "dim")
        if axes.y_name:
            self.text(LEFT - 44, TOP - 8, axes.y_name, "start", "dim")

    @property
    def right(self) -> int:
        return self.width - RIGHT

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return LEFT + (value - low) / ((high - low) or 1) * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "ink") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def bar(self, left: float, right: float, value: float, colour: str, hint: str) -> None:
        """Draw a bar between two places in pixels."""
        top, base = self.y(value), self.y(max(self.y_range[0], 0))
        self.parts.append(
            f'<rect x="{left:.1f}" y="{min(top, base):.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{abs(base - top):.1f}" fill="{colour}"><title>{escape(hint)}</title></rect>'
        )

    def line(self, points: Seq[tuple[float, float]], colour: str, dots: bool = True, dash: str = "") -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        for x, y in points if dots else ():
            place, hint = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"', f"{short(x)}: {short(y)}"
            self.parts.append(f'<circle {place} r="3" fill="{colour}"><title>{hint}</title></circle>')

    def x_ticks(self, values: Seq[float]) -> None:
        for value in values:
            self.text(self.x(value), HEIGHT - BOTTOM + 16, short(value), "middle", "dim")

    def legend(self, names: Seq[str]) -> None:
        at = float(LEFT)
        for i, name in enumerate(names):
            room = 26 + 6.8 * len(name)
            if at > LEFT and at + room > self.width + RIGHT:
                at, self.height = LEFT, self.height + 16
            place = f'x="{at:.0f}" y="{self.height - 14}"'
            self.parts.append(f'<rect {place} width="10" height="10" fill="{colour_of(i)}"/>')
            self.text(at + 14, self.height - 5, name)
            at += room

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">{STYLE}<text class="ink title" x="{LEFT - 44}" y="18">'
            f"{escape(self.title)}</text>{''.join(self.parts)}</svg>"
        )


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    y_name: str = "",
    mark: float | None = None,
    width: int = WIDTH,
) -> str:
    """Draw one group of bars for each key, and a dashed line at `mark`."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    highest = max((v for values in groups.values() for v in values.values()), default=1.0)
    chart = Chart(title, (0, 1), (0, 1.1 * max(highest, mark or 0)), Axes(y_name=y_name, width=width))
    room = (chart.right - LEFT) / max(len(groups), 1)
    each = 0.8 * room / max(len(names), 1)
    for g, (group, values) in enumerate(groups.items()):
        start = LEFT + g * room + 0.1 * room
        for i, name in enumerate(names):
            if name in values:
                left = start + i * each
                chart.bar(left, left + 0.92 * each, values[name], colour_of(i), f"{group}, {name}: {values[name]:.3g}")
                if each > 24 and values[name]:  # narrower bars show their values on hover only
                    chart.text(left + each / 2, chart.y(values[name]) - 4, f"{values[name]:.2f}", "middle", "dim")
        chart.text(start + 0.4 * room, HEIGHT - BOTTOM + 16, group, "middle")
    if mark is not None:
        at = chart.y(mark)
        chart.parts.append(
            f'<line class="axis" stroke-dasharray="4 3" x1="{LEFT}" x2="{chart.right}" y1="{at}" y2="{at}"/>'
        )
    chart.legend(names)
    return chart.svg()


def lines(
    title: str,
    series: Mapping[str, Seq[tuple[float, float]]],
    axes: Axes = Axes(),  # noqa: B008
    dots: bool = True,
    mark: float | None = None,
    dashed: Seq[Seq[tuple[float, float]]] = (),
) -> str:
    """Draw lines over common axes, an upright line at `mark`, and `dashed` lines in the colours of the others."""
    points = [point for line in (*series.values(), *dashed) for point in line]
    if not points:
        return ""
    xs, highest = sorted({x for x, _ in points}), max(y for _, y in points)
    base, log = axes.base, axes.log
    chart = Chart(title, (xs[0], xs[-1]), (base, base + 1.08 * (highest - base)), axes)
    powers = [2.0**i for i in range(math.ceil(math.log2(xs[0])), math.floor(math.log2(xs[-1])) + 1)] if log else []
    chart.x_ticks(powers or ticks(xs[0], xs[-1]))
    for i, line in enumerate(series.values()):
        chart.line(line, colour_of(i), dots)
    for i, line in enumerate(dashed):
        chart.line(line, colour_of(i), dots=False, dash="5 4")
    if mark is not None:
        at = chart.x(mark)
        chart.parts.append(
            f'<line class="axis" stroke-dasharray="4 3" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        chart.text(at + 4, TOP + 10, short(mark), kind="dim")
    chart.legend(list(series))
    return chart.svg()


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers between two."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / about))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:g}" if abs(value) < 10 else f"{round(value, 1):g}"
