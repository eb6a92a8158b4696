"""The picture of the README: one answer, decoded token by token and with draft tokens, at its measured speed.

    python benchmarks/picture.py                # decode, write docs/results/picture.json, draw docs/img/arriving.svg
    python benchmarks/tables.py                 # only draw, from the file

Left: `model.generate`. Right: lookfar with `strategy="auto"` and an empty draft state. Both decode the same prompt in
float32 on the same machine, in turn, `--rounds` times; the picture shows the round with the median time of each. The
tokens have to be the same. One second of the picture is one second of the run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
RESULT, PICTURE = DOCS / "results" / "picture.json", DOCS / "img" / "arriving.svg"
PROMPT = "Write a Python class for a stack with push, pop and peek."

WIDTH, PANEL, LEFT, TOP, LINE, CHAR = 840, 396, 14, 74, 17, 7.2
COLUMNS, PAUSE = 52, 2.5  # characters of a line; seconds for which the finished texts stay
STYLE = """<style>
svg{--ink:#1d2430;--dim:#6b7485;--card:#f6f8fa;--edge:#d6dbe4;--bar:#9aa3b2;--go:#1a7f4b}
@media (prefers-color-scheme:dark){
svg{--ink:#e8ebf1;--dim:#98a1b3;--card:#161b22;--edge:#30363d;--bar:#5b6475;--go:#3fb97a}}
text{font:13px system-ui,sans-serif;fill:var(--ink)}text.dim{fill:var(--dim)}
text.head{font-weight:600;font-size:15px}
text.code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.card{fill:var(--card);stroke:var(--edge)}
.a{fill:#3b82f6;fill-opacity:.2}.b{fill:#f59e0b;fill-opacity:.26}.c{fill:#14b8a6;fill-opacity:.24}
.track{fill:var(--edge)}.slow{fill:var(--bar)}.fast{fill:var(--go)}
"""


@dataclass(frozen=True)
class Arrival:
    """The tokens that one step added to the text."""

    seconds: float  # since the call
    tokens: list[str]


@dataclass(frozen=True)
class Recording:
    """One prompt, decoded in two ways."""

    prompt: str
    command: str
    machine: str
    torch: str
    generate: list[Arrival]
    lookfar: list[Arrival]


def record(prompt: str, new: int, rounds: int) -> Recording:
    """Decode the prompt in turn, and return the round with the median time of each way."""
    import torch

    import lookfar

    lm = lookfar.load("demo", device="cpu", dtype="float32", max_batch=1)
    lm.warmup()
    ids = lm.chat_ids([{"role": "user", "content": prompt}])
    slow, fast = [], []
    for _ in range(rounds):
        slow.append(_by_transformers(lm, ids, new))
        fast.append(_by_lookfar(lm, ids, new))
    assert all(_tokens(one) == _tokens(slow[0]) for one in (*slow, *fast)), "the outputs differ"
    middle = [sorted(way, key=lambda one: one[-1].seconds)[rounds // 2] for way in (slow, fast)]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return Recording(prompt, "python benchmarks/picture.py", machine, torch.__version__, *middle)


def _tokens(arrivals: list[Arrival]) -> list[str]:
    return [token for arrival in arrivals for token in arrival.tokens]


def _by_transformers(lm: Any, ids: list[int], new: int) -> list[Arrival]:
    """Run `model.generate` with a streamer that notes when each token comes."""
    import torch
    from transformers.generation import BaseStreamer

    found: list[Arrival] = []
    start = perf_counter()

    class Clock(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:  # the prompt comes first
                found.append(Arrival(perf_counter() - start, [lm.tokenizer.decode(value.flatten())]))

        def end(self) -> None:
            pass

    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    lm.model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, streamer=Clock())
    return found


def _by_lookfar(lm: Any, ids: list[int], new: int) -> list[Arrival]:
    found: list[Arrival] = []
    lm.forget()
    start = perf_counter()

    def note(output: Any) -> None:
        found.append(Arrival(perf_counter() - start, [lm.tokenizer.decode([token]) for token in output.tokens]))

    lm.generate(ids, max_new_tokens=new, on_step=note)
    return found


def read() -> Recording:
    found = json.loads(RESULT.read_text())
    arrivals = {name: [Arrival(**one) for one in found[name]] for name in ("generate", "lookfar")}
    return Recording(**found | arrivals)


def draw(of: Recording) -> str:
    """Return the picture: both texts appear at the recorded times, again and again."""
    length = of.generate[-1].seconds + PAUSE
    lines = 1 + max(_places(of.lookfar)[-1][1], _places(of.generate)[-1][1])
    bottom = TOP + lines * LINE + 10
    css = [".s{animation:none 0s infinite both}"]
    parts = [f'<text x="{LEFT}" y="22" class="dim">Prompt: {escape(of.prompt)}</text>']
    for number, (title, kind, arrivals) in enumerate(
        (("model.generate", "slow", of.generate), ("lookfar: the same text, in fewer steps", "fast", of.lookfar))
    ):
        left = LEFT + number * (PANEL + 20)
        parts.append(f'<rect class="card" x="{left}" y="34" width="{PANEL}" height="{bottom - 34}" rx="8"/>')
        parts.append(f'<text class="head" x="{left + 12}" y="58">{escape(title)}</text>')
        css += _appearing(kind, arrivals, length)
        parts += _text(kind, arrivals, left + 12)
        parts += _footer(kind, arrivals, left, bottom + 20)
        css += _bar(kind, arrivals[-1].seconds, length)
    still = "@media (prefers-reduced-motion:reduce){.s,.slow,.fast{animation:none!important;opacity:1!important}}"
    style = f"{STYLE}{''.join(css)}{still}</style>"
    label = f"The same answer from model.generate and from lookfar, as the tokens arrive. Prompt: {of.prompt}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(label)}">{style}{"".join(parts)}</svg>'
    )


def _places(arrivals: list[Arrival]) -> list[tuple[int, int, int, str]]:
    """Return the pieces of text with their step, line and column; lines break at words where they are too long."""
    pieces: list[tuple[int, int, int, str]] = []
    line = column = 0
    for step, arrival in enumerate(arrivals):
        for token in arrival.tokens:
            if column and column + len(token.rstrip()) > COLUMNS:
                line, column, token = line + 1, 0, token.lstrip(" ")
            for number, piece in enumerate(token.split("\n")):
                if number:
                    line, column = line + 1, 0
                if piece:
                    pieces.append((step, line, column, piece))
                    column += len(piece)
    return pieces


def _text(kind: str, arrivals: list[Arrival], left: float) -> list[str]:
    """Return one group for each step: its tokens on a common colour."""
    groups: dict[int, list[str]] = {}
    for step, line, column, piece in _places(arrivals):
        x, y, wide = left + column * CHAR, TOP + line * LINE + 12, len(piece) * CHAR
        mine = groups.setdefault(step, [])
        if kind == "fast":
            place = f'x="{x:.1f}" y="{y - 12}" width="{wide:.1f}" height="{LINE - 1}"'
            mine.append(f'<rect class="{"abc"[step % 3]}" {place}/>')
        if shown := piece.strip(" "):
            x += (len(piece) - len(piece.lstrip(" "))) * CHAR
            fit = f'textLength="{len(shown) * CHAR:.1f}" lengthAdjust="spacingAndGlyphs"'
            mine.append(f'<text class="code" x="{x:.1f}" y="{y}" {fit}>{escape(shown)}</text>')
    return [f'<g class="s {kind[0]}{step}">{"".join(drawn)}</g>' for step, drawn in groups.items()]


def _appearing(kind: str, arrivals: list[Arrival], length: float) -> list[str]:
    """Return the rules by which each step appears at its time and stays until the end."""
    rules = []
    for step, arrival in enumerate(arrivals):
        at = 100 * arrival.seconds / length
        name = f"{kind[0]}{step}"
        rules.append(f"@keyframes {name}{{0%,{at:.2f}%{{opacity:0}}{at + 0.01:.2f}%,100%{{opacity:1}}}}")
        rules.append(f".{name}{{animation-name:{name};animation-duration:{length:.2f}s}}")
    return rules


def _footer(kind: str, arrivals: list[Arrival], left: float, y: float) -> list[str]:
    """Return a bar that fills while the text is decoded, and the totals."""
    seconds, tokens = arrivals[-1].seconds, len(_tokens(arrivals))
    said = f"{tokens} tokens in {len(arrivals)} steps, {seconds:.1f} s"
    place = f'x="{left}" y="{y - 9}" height="6" rx="3"'
    return [
        f'<rect class="track" {place} width="150"/><rect class="{kind}" {place} width="150"/>',
        f'<text class="dim" x="{left + 164}" y="{y - 1}">{said}</text>',
    ]


def _bar(kind: str, seconds: float, length: float) -> list[str]:
    at = 100 * seconds / length
    return [
        f"@keyframes {kind}{{0%{{transform:scaleX(0)}}{at:.2f}%,100%{{transform:scaleX(1)}}}}",
        f".{kind}{{animation:{kind} {length:.2f}s linear infinite;transform-box:fill-box;transform-origin:left}}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = record(options.prompt, options.max_new_tokens, options.rounds)
    RESULT.write_text(json.dumps(asdict(found), indent=1) + "\n")
    PICTURE.write_text(draw(found) + "\n")
    for name in ("generate", "lookfar"):
        way = getattr(found, name)
        print(f"{name}: {len(_tokens(way))} tokens, {len(way)} steps, {way[-1].seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
