"""Recurrent and hybrid models with draft chains: step times by rows, and tokens per second with scripted drafts.

    python benchmarks/hybrid.py                          # on a GPU: shapes of 1 to 2 billion parameters
    python benchmarks/hybrid.py --device cpu --tokens 32 # the same layers, small

Random weights in float32, so that texts are equal and acceptance is that of the script: a draft of seven tokens is
right in 70 % of the steps and wrong from a random place on in the others. `generate`, lookfar without drafts and
lookfar with them decode the same prompt. Prints a table and one JSON line. Bounded by kernel launches: steps are not
captured, and several rows run transformers' chunked code (install its kernels for the model, if there are any).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence as Seq
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import lookfar
from lookfar.drafters.scripted import Scripted
from lookfar.engine.costs import own_cache, sample_step

ROWS = (1, 8, 16)
DRAFT, RIGHT = 7, 0.7
CONTEXT = 256
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model type, on a GPU, on a CPU instead
    "qwen3.5-like": (
        "qwen3_5_text",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 151936,
        },
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "vocab_size": 4096,
        },
    ),
    "falcon-h1-like": (
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
            "mamba_chunk_size": 128,  # without mamba_ssm, a step of several rows computes a whole chunk
            "vocab_size": 65536,
        },
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_chunk_size": 32,
            "vocab_size": 4096,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", default="float32", help="In half precision texts part, and drafts become wrong.")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--small", action="store_true", help="The small shapes; the default on a CPU.")
    options = parser.parse_args()
    small = options.small or options.device == "cpu"
    found = []
    for name in options.shapes.split(","):
        model = random_model(name, options.device, getattr(torch, options.dtype), small)
        found.append({"shape": name} | measure(model, options.tokens))
        del model
    show(found)
    print(json.dumps(found))


def random_model(name: str, device: str, dtype: torch.dtype, small: bool) -> PreTrainedModel:
    """Return a model with random weights of a shape."""
    model_type, large, tiny = SHAPES[name]
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**(large | tiny if small else large))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()


def measure(model: PreTrainedModel, tokens: int) -> dict[str, Any]:
    """Return step times in milliseconds, and tokens per second of the three methods."""
    lm = lookfar.LM(model, cuda_graphs=False)
    runner = lm.engine.runner
    cache = own_cache(runner, CONTEXT + max(ROWS))
    with sample_step(runner, cache, CONTEXT) as step:
        milliseconds = {rows: 1e3 * seconds(lambda rows=rows: step(rows)) for rows in ROWS}  # type: ignore[misc]
    prompt = [random.Random(0).randrange(model.config.vocab_size) for _ in range(64)]
    ids = torch.tensor([prompt], device=model.device)
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    began = perf_counter()
    text = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
    generate_rate = tokens / (perf_counter() - began)
    plain = lm.generate(prompt, max_new_tokens=tokens, strategy="none")
    drafts = often_right(prompt + text)
    lm.generate(prompt, max_new_tokens=16, strategy=drafts)  # compiles the host's code
    drafted = lm.generate(prompt, max_new_tokens=tokens, strategy=drafts)
    stats = drafted.stats
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mode": runner.model.support.mode,
        "milliseconds": milliseconds,
        "generate": generate_rate,
        "plain": plain.stats.tokens_per_second,
        "drafts": stats.tokens_per_second,
        "tokens_per_step": stats.tokens_per_step,
        "replayed_per_step": stats.replayed_rows / stats.steps,
        "equal": plain.token_ids == text and drafted.token_ids == text,
    }


def often_right(text: list[int]) -> Scripted:
    """Drafts from a known text that are right in `RIGHT` of the steps."""

    def script(ids: Seq[int]) -> list[list[int]]:
        rng = random.Random(len(ids))
        draft = text[len(ids) : len(ids) + DRAFT]
        if rng.random() > RIGHT and draft:
            place = rng.randrange(len(draft))
            draft[place] = (draft[place] + 1) % 1000
        return [draft] if draft else []

    return Scripted(script)


def seconds(run: Callable[[], None], times: int = 7) -> float:
    """Return the median time of some runs, after one more."""
    run()
    found = []
    for _ in range(times):
        began = perf_counter()
        run()
        found.append(perf_counter() - began)
    return median(found)


def show(found: list[dict[str, Any]]) -> None:
    table = Table(title="Draft chains on recurrent models")
    columns = ["shape", "parameters", "mode", *(f"{rows} rows, ms" for rows in ROWS), "generate, tok/s"]
    columns += ["no drafts, tok/s", "drafts, tok/s", "tokens/step", "replayed/step", "equal"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("shape", "mode") else "right")
    for one in found:
        times = [f"{one['milliseconds'][rows]:.2f}" for rows in ROWS]
        rates = [f"{one[name]:.1f}" for name in ("generate", "plain", "drafts")]
        steps = [f"{one[name]:.2f}" for name in ("tokens_per_step", "replayed_per_step")]
        size = f"{one['parameters'] / 1e6:,.0f} M"
        table.add_row(one["shape"], size, one["mode"], *times, *rates, *steps, "yes" if one["equal"] else "no")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
