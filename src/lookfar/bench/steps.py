"""What a step costs by its rows: for a model, or for random weights of a known shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from lookfar.answers import Steps
from lookfar.cache import SlotCache
from lookfar.costs import tree_plan
from lookfar.errors import CapacityError, ConfigError
from lookfar.progress import bar
from lookfar.successors import TOP

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048)
FLAT = 1.2  # a step may cost so many times what one row costs and still count as flat
PATIENCE = 1.0  # seconds for one point, after which one measurement has to do

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
    """Milliseconds of a step, and what bounds them."""

    model: str
    device: str
    steps: str  # how they were run
    milliseconds: dict[int, dict[int, float]]  # context → rows → milliseconds
    weight_bytes: int  # read by every step
    bandwidth: float  # bytes a second, measured

    @property
    def floor(self) -> float:
        """Milliseconds that reading the weights takes."""
        return 1e3 * self.weight_bytes / self.bandwidth

    def share(self, context: int) -> float:
        """How much of the floor one row reaches; 1 would be the floor itself."""
        return self.floor / self.milliseconds[context][1]

    def critical(self, context: int) -> int:
        """The most rows that still cost about what one row does."""
        curve = self.milliseconds[context]
        return max(rows for rows, cost in curve.items() if cost <= FLAT * curve[1])

    def as_dict(self) -> dict[str, Any]:
        found = {
            str(c): {"critical_rows": self.critical(c), "share_of_floor": self.share(c)} for c in self.milliseconds
        }
        return asdict(self) | {"floor_milliseconds": self.floor, "by_context": found}


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights: a known shape, or a config file."""
    if shape in SHAPES:
        config = SHAPES[shape]()
    elif Path(shape).exists():
        try:
            config = AutoConfig.from_pretrained(shape)
        except Exception as error:
            raise ConfigError(f"{shape} is no config that transformers can read.") from error
    else:
        raise ConfigError(f"Unknown shape {shape!r}: use {', '.join(SHAPES)}, or a config file.")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), bar(f"Making random weights of {shape}"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def measure_steps(steps: Steps, name: str, contexts: Seq[int] = CONTEXTS, rows: Seq[int] = ROWS) -> StepCosts:
    """Time steps in the shape of a tree, after contexts of several lengths."""
    model = steps.model
    most = steps.room.rows or max(rows)
    sizes = [n for n in rows if n <= most]
    limit = model.support.max_positions
    contexts = [c for c in contexts if limit is None or c + max(sizes) <= limit]
    if not contexts or 1 not in sizes:
        raise ConfigError(f"The model has positions for {limit} tokens only: give smaller contexts.")
    try:
        cache = SlotCache(1, -(-(max(contexts) + max(sizes)) // 64) * 64)
        found: dict[int, dict[int, float]] = {}
        with bar("Measuring steps", len(contexts) * len(sizes)) as advance:
            for context in contexts:
                found[context] = {}
                for size in sizes:
                    found[context][size] = 1e3 * _seconds(partial(_step, steps, cache, size, context))
                    advance(1)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError("There is no memory for these steps: give a smaller shape or contexts.") from error
    on_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return StepCosts(name, device, steps.name, found, weight_bytes(model.model), bandwidth(model.device))


def _step(steps: Steps, cache: SlotCache, rows: int, context: int) -> None:
    steps.start(tree_plan(rows, context, steps.model.vocab_size), cache, (), TOP)()


def weight_bytes(model: PreTrainedModel) -> int:
    """What a step reads of the weights: all of them, but of an input embedding that is no output one nearly nothing."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return int(total - (0 if tied else embedding.weight.numel() * embedding.weight.element_size()))


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads from its memory."""
    size = (4 << 30) if device.type == "cuda" else (512 << 20)
    block = torch.ones(size // 4, device=device)
    return size / _seconds(lambda: float(block.sum()))


def _seconds(run: Callable[[], Any]) -> float:
    """The median of up to seven, after one to warm up."""
    run()
    times: list[float] = []
    while len(times) < 7 and sum(times) < PATIENCE:
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return median(times)
