"""Shared by the benchmarks: prompts from jsonl files, and the output of `model.generate`."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import lookfar
from lookfar.bench import suites


def read_prompts(lm: lookfar.LM, path: Path, limit: int) -> list[list[int]]:
    """Return the token ids of the first prompts of a file."""
    return [prompt.ids(lm) for prompt in suites.read_prompts(path, limit)]


def generate(lm: lookfar.LM, prompt: list[int], new: int, seed: int = 0, **arguments: Any) -> tuple[list[int], float]:
    """Run `model.generate`; return the new tokens and the seconds. Greedy, unless other arguments ask for sampling."""
    ids = torch.tensor([prompt], device=lm.device)
    start = perf_counter()
    torch.manual_seed(seed)
    arguments = {"do_sample": bool(arguments), **arguments}
    out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **arguments)
    return out[0, len(prompt) :].tolist(), perf_counter() - start


def parse_arguments(text: str) -> dict[str, Any]:
    """Turn `temperature=0.7,top_k=0` into generation arguments."""
    pairs = [pair.split("=", 1) for pair in text.split(",") if pair]
    return {key: json.loads(value) for key, value in pairs}
