"""The drawings of docs/how-it-works.md, made with the decoding code: `python -m lookfar.bench.drawings docs/img`."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from html import escape
from pathlib import Path

import numpy as np

from lookfar.bench.plots import STYLE, colour_of
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import NO_TREE, DraftTree
from lookfar.drafters.base import Outcome
from lookfar.drafters.lookahead import Lookahead, LookaheadDrafter

CELL, GAP = 24, 6
WORDS = ("the", "cat", "sat", "on", "a", "mat", "lay", "hat", "dog")
EXAMPLE = DraftTree.from_paths([[1, 2, 3, 4], [1, 6, 3], [8, 2]])


def svg(width: float, height: float, title: str, parts: Seq[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(title)}">{STYLE}{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "ink") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def tree(of: DraftTree = EXAMPLE, accepted: Seq[int] = (0, 1, 2)) -> str:
    """Draw the draft tree of a step: shared prefixes once, accepted nodes filled."""
    across, down = 96, 44
    leaves = 0
    rows: dict[int, float] = {}
    for node in reversed(range(len(of))):
        below = [rows[child] for child in range(len(of)) if of.parents[child] == node]
        if below:
            rows[node] = sum(below) / len(below)
        else:
            rows[node], leaves = float(leaves), leaves + 1
    root = sum(rows[n] for n in range(len(of)) if of.parents[n] < 0) / max(int((of.parents < 0).sum()), 1)
    parts = []

    def place(node: int) -> tuple[float, float]:
        depth, row = (int(of.depths[node]), rows[node]) if node >= 0 else (0, root)
        return 50 + depth * across, 34 + (leaves - 1 - row) * down

    for node in range(len(of)):
        (x1, y1), (x2, y2) = place(int(of.parents[node])), place(node)
        parts.append(f'<line class="axis" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    for node in range(-1, len(of)):
        x, y = place(node)
        fill = "#1a7f4b" if node in accepted else "#64748b" if node < 0 else "#cbd5e1"
        parts.append(f'<rect x="{x - 32}" y="{y - 14}" width="64" height="28" rx="6" fill="{fill}"/>')
        ink = "#fff" if node in accepted or node < 0 else "#1d2430"
        word = WORDS[int(of.tokens[node])] if node >= 0 else WORDS[0]
        parts.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="{ink}">{word}</text>')
    width = 110 + int(of.depths.max()) * across
    return svg(width, leaves * down + 26, "A draft tree", parts)


def mask(plan: RequestPlan, names: Seq[str], cached: int = 3) -> str:
    """Draw which row (down) sees which key (across): cached tokens first, then the rows of the step."""
    visible = StepPlan([plan]).visible[0]
    rows = len(plan)
    left, top = 92.0, 74.0
    parts = []
    for r in range(rows):
        parts.append(text(left - 8, top + r * (CELL + 2) + 16, names[r], "end"))
        for c in range(cached + rows):
            sees = c < cached or bool(visible[r, c - cached])
            fill = colour_of(7 if c < cached else 0) if sees else "none"
            place = f'x="{left + c * (CELL + 2)}" y="{top + r * (CELL + 2)}" width="{CELL}" height="{CELL}"'
            parts.append(f'<rect class="grid" {place} rx="3" fill="{fill}"/>')
    for c in range(cached + rows):
        words = f"text {c + 1}" if c < cached else names[c - cached]
        x = left + c * (CELL + 2) + 16
        parts.append(f'<text class="dim" transform="translate({x},{top - 8}) rotate(-50)">{escape(words)}</text>')
    return svg(
        left + (cached + rows) * (CELL + 2) + 40, top + rows * (CELL + 2) + 8, "The attention mask of a step", parts
    )


def window(width: int = 5, ngram: int = 4) -> str:
    """Draw a full lookahead window: positions across, levels down. Dots: rows whose choices end an n-gram."""
    prompt = list(range(3, 30))
    drafter = LookaheadDrafter(Lookahead(window=width, ngram=ngram, guesses=0, from_prompt=False), prompt)
    for step in range(ngram - 2):  # the warm-up adds a level in each step
        choices = np.full(sum(map(len, drafter.levels)), step, np.int64)
        drafter.observe(prompt, Outcome([step], NO_TREE, np.zeros(1, np.int64), choices))
    rows = drafter.window_rows()
    parts = [text(10, 22, "positions after the last token →", "start", "dim")]

    def square(position: int, level: int, fill: str, dot: bool) -> None:
        x, y = 10 + position * (CELL + GAP), 36 + level * (CELL + GAP)
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" fill="{fill}"/>')
        if dot:
            parts.append(f'<circle cx="{x + CELL / 2}" cy="{y + CELL / 2}" r="4" fill="#fff"/>')

    square(0, 0, "#64748b", dot=False)
    row = 0
    for level, tokens in enumerate(drafter.levels):
        for _ in tokens:
            square(int(rows.offsets[row]), level, colour_of(level), bool(rows.wanted[row]))
            row += 1
    right = 40 + (int(rows.offsets.max()) + 1) * (CELL + GAP)
    return svg(max(right, 240), 46 + len(drafter.levels) * (CELL + GAP), "The lookahead window", parts)


def box(x: float, y: float, wide: float, words: str, fill: str, ink: str = "#fff") -> str:
    """Draw a box with a word in it."""
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="28" rx="6" fill="{fill}"/>'
        f'<text x="{x + wide / 2}" y="{y + 18}" text-anchor="middle" fill="{ink}">{escape(words)}</text>'
    )


def step() -> str:
    """Draw the loop: text, draft tokens, one forward pass, the model's choices, and back to the text."""
    parts = []
    stations = (
        ("text", "the", "#64748b"),
        ("draft tokens", "cat sat on …", "#cbd5e1"),
        ("one forward pass", "all rows at once", "#3b82f6"),
        ("the model's choices", "cat sat on a", "#1a7f4b"),
    )
    for number, (title, words, fill) in enumerate(stations):
        x = 10 + number * 158
        parts.append(text(x + 64, 26, title, kind="dim"))
        parts.append(box(x, 36, 128, words, fill, "#1d2430" if fill == "#cbd5e1" else "#fff"))
        if number:
            parts.append(f'<path class="axis" fill="none" d="M{x - 28},50h24m-6,-4l6,4l-6,4"/>')
    parts.append('<path class="axis" fill="none" d="M548,66v22H74v-20m-4,6l4,-6l4,6"/>')
    parts.append(text(311, 104, "accepted tokens and one more become part of the text", kind="dim"))
    return svg(622, 114, "One step", parts)


def chain() -> str:
    """Draw two steps of a model with recurrent state: after a rejected draft, accepted tokens are fed again."""
    parts, grey, green, draft = [], "#64748b", "#1a7f4b", "#cbd5e1"
    lines = (
        ("step 1", (("the", grey), ("cat", green), ("sat", green), ("up", draft), ("late", draft))),
        ("step 2", (("the", grey), ("cat", grey), ("sat", grey), ("on", grey), ("a", green), ("mat", green))),
    )
    for number, (title, tokens) in enumerate(lines):
        y = 26 + number * 66
        parts.append(text(10, y + 18, title, "start", "dim"))
        for place, (word, fill) in enumerate(tokens):
            parts.append(box(70 + place * 76, y, 68, word, fill, "#1d2430" if fill == draft else "#fff"))
    parts.append(text(298, 70, "“up” is wrong: the state from before step 1 is put back", "start", "dim"))
    parts.append(text(70, 136, "fed again", "start", "dim"))
    parts.append(text(298, 136, "the model's choice after “sat”, then new draft tokens", "start", "dim"))
    return svg(640, 146, "Two steps of a draft chain", parts)


def noise() -> str:
    """Draw how a token is sampled: probabilities, divided by the noise of the position; the largest is chosen."""
    words, p, exponential = ("cat", "dog", "hat", "mat"), (0.5, 0.25, 0.15, 0.1), (1.9, 0.4, 0.9, 1.3)
    scores = [a / b for a, b in zip(p, exponential, strict=True)]
    parts = []
    for left, title, values in ((20, "p", p), (220, "noise of this position", exponential), (420, "p ÷ noise", scores)):
        parts.append(text(left, 20, title, "start", "dim"))
        for row, (word, value) in enumerate(zip(words, values, strict=True)):
            y, chosen = 30 + row * 26, left == 420 and value == max(values)
            fill = "#1a7f4b" if chosen else colour_of(0) if left != 220 else "#94a3b8"
            parts.append(text(left + 30, y + 14, word, "end"))
            wide = 110 * value / max(values)
            parts.append(f'<rect x="{left + 38}" y="{y}" width="{wide:.1f}" height="18" rx="3" fill="{fill}"/>')
            parts.append(text(left + 42 + wide, y + 14, f"{value:.2f}", "start", "dim"))
    return svg(620, 142, "Sampling with noise that belongs to a position", parts)


def every() -> dict[str, str]:
    """Return all drawings by file name."""
    rows = RequestPlan(np.array([0]), 3, tree=EXAMPLE)
    names = ["the", *(WORDS[token] for token in EXAMPLE.tokens)]
    return {
        "step.svg": step(),
        "tree.svg": tree(),
        "noise.svg": noise(),
        "mask.svg": mask(rows, names),
        "chain.svg": chain(),
        "window.svg": window(),
    }


if __name__ == "__main__":
    for name, drawing in every().items():
        (Path(sys.argv[1]) / name).write_text(drawing)
