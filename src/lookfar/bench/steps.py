"""The cost of a step by its rows: for a model, or for random weights of a known shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from markupsafe import Markup
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from lookfar.bench import plots
from lookfar.bench.curve import HEADINGS, NO_CURVE, CurveCheck
from lookfar.bench.plots import Axes
from lookfar.core.progress import progress_bar
from lookfar.engine.costs import own_cache, sample_step
from lookfar.errors import CapacityError, ConfigError
from lookfar.pages import render
from lookfar.runners.base import ModelRunner

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048)
FLAT = 1.2  # a step that costs at most this many times one row counts as flat
MAX_SECONDS = 1.0  # spent on one point
CHART_WIDTH = 480

SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-3-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "qwen2.5-7b": lambda: Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step, and their lower bound."""

    model: str
    device: str
    runner: str  # how steps were run
    milliseconds: dict[int, dict[int, float]]  # context → rows → milliseconds
    weight_bytes: int  # read by every step
    bandwidth: float  # bytes per second, measured

    @property
    def floor(self) -> float:
        """The milliseconds that reading the weights takes."""
        return 1e3 * self.weight_bytes / self.bandwidth

    def share(self, context: int) -> float:
        """Return the floor divided by the time of one row; 1 is the best possible."""
        return self.floor / self.milliseconds[context][1]

    def critical(self, context: int) -> int:
        """Return the most rows that cost about as much as one row."""
        curve = self.milliseconds[context]
        return max(rows for rows, cost in curve.items() if cost <= FLAT * curve[1])

    def as_dict(self) -> dict[str, Any]:
        found = {
            str(c): {"critical_rows": self.critical(c), "share_of_floor": self.share(c)} for c in self.milliseconds
        }
        return asdict(self) | {"floor_milliseconds": self.floor, "by_context": found}


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights: a known shape, or a config file."""
    if shape in SHAPES:
        config = SHAPES[shape]()
    elif Path(shape).exists():
        try:
            config = AutoConfig.from_pretrained(shape)
        except Exception as error:
            raise ConfigError(f"{shape} is not a config that transformers can read.") from error
    else:
        raise ConfigError(f"Unknown shape {shape!r}: use {', '.join(SHAPES)}, or a config file.")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), progress_bar(f"Making random weights of {shape}"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def measure_steps(runner: ModelRunner, name: str, contexts: Seq[int] = CONTEXTS, rows: Seq[int] = ROWS) -> StepCosts:
    """Time steps in the shape of a tree or of a chain, after contexts of several lengths."""
    model = runner.model
    most = runner.limits.rows or max(rows)
    sizes = [n for n in rows if n <= most]
    limit = model.support.max_positions
    contexts = [c for c in contexts if limit is None or c + max(sizes) <= limit]
    if not contexts or 1 not in sizes:
        raise ConfigError(f"The model has positions for {limit} tokens only: give smaller contexts.")
    try:
        cache = own_cache(runner, max(contexts) + max(sizes))
        found: dict[int, dict[int, float]] = {}
        with progress_bar("Measuring steps", len(contexts) * len(sizes)) as advance:
            for context in contexts:
                found[context] = {}
                with sample_step(runner, cache, context) as step:
                    for size in sizes:
                        found[context][size] = 1e3 * _seconds(partial(step, size))
                        advance(1)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError("There is no memory for these steps: give a smaller shape or contexts.") from error
    on_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return StepCosts(name, device, runner.name, found, weight_bytes(model.model), bandwidth(model.device))


def steps_page(costs: StepCosts, curve: CurveCheck | None = None) -> str:
    """Return a self-contained page with the curve, the table, and the cost curve in use."""
    curves = list(costs.milliseconds.values())
    return render(
        "steps.html",
        model=costs.model,
        runner=costs.runner,
        device=costs.device,
        facts=_facts(costs),
        chart=Markup(_chart(costs)),
        contexts=list(costs.milliseconds),
        rows=[[rows, *(f"{one[rows]:.2f}" for one in curves)] for rows in curves[0]],
        headings=HEADINGS,
        curve=curve.table() if curve is not None else [],
        drift=f"{curve.drift:.2f}" if curve is not None else "",
        no_curve=NO_CURVE,
    )


def _facts(costs: StepCosts) -> list[tuple[str, str]]:
    """Return the figures at the top of the page, for the shortest context."""
    context = min(costs.milliseconds)
    return [
        ("floor", f"{costs.floor:.2f} ms"),
        ("one row", f"{costs.milliseconds[context][1]:.2f} ms"),
        ("of the floor", f"{costs.share(context):.0%}"),
        ("nearly free", f"{costs.critical(context)} rows"),
    ]


def _chart(costs: StepCosts) -> str:
    series = {f"context {c}": [(float(r), ms) for r, ms in curve.items()] for c, curve in costs.milliseconds.items()}
    rows = [rows for rows, _ in next(iter(series.values()))]
    floor = [(rows[0], costs.floor), (rows[-1], costs.floor)]
    axes = Axes("rows", "ms", log=True, width=CHART_WIDTH)
    return plots.lines(f"A step of {costs.model}", series, axes, dashed=[floor])


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a step reads: all but an input embedding that is not the output one too."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return int(total - (0 if tied else embedding.weight.numel() * embedding.weight.element_size()))


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device reads from its memory."""
    size = (4 << 30) if device.type == "cuda" else (512 << 20)
    block = torch.ones(size // 4, device=device)
    return size / _seconds(lambda: float(block.sum()))


def _seconds(run: Callable[[], Any]) -> float:
    """Return the median time of up to seven runs, after a warm-up."""
    run()
    times: list[float] = []
    while len(times) < 7 and sum(times) < MAX_SECONDS:
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return median(times)
