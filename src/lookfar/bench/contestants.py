"""Who runs: our own strategies, and transformers' ways to decode, each timed step by step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers.generation.streamers import BaseStreamer

from lookfar.bench.records import Run
from lookfar.config import Budget, StrategySpec
from lookfar.memory import Memory
from lookfar.tree import ROOT, SequencePlan

if TYPE_CHECKING:
    from lookfar.lm import LM
    from lookfar.sequence import Sequence

BASELINES = ("generate", "prompt_lookup", "assisted")  # of transformers
UNKNOWN = 0  # rows of a step that it does not tell


@dataclass
class Contestant:
    """A name in the tables: "hf …" is transformers, whose `generate` gets the `arguments`; ours has a strategy."""

    name: str
    strategy: StrategySpec = None
    budget: Budget = None
    arguments: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None  # its own, so that nobody guesses from another one's answers

    def forget(self, lm: LM) -> None:
        self.memory = lm.empty_memory()

    def run(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        """Decode some prompts at once. Who they were is for the caller to fill in."""
        reset_peak(lm.device)
        done = self._ours(lm, prompts, new, seed, sampling) if self.strategy is not None else None
        done = done or self._transformers(lm, prompts, new, seed, sampling)
        done.peak_bytes = peak(lm.device)
        return done

    def _ours(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        assert self.memory is not None
        lm.engine.memory = self.memory
        steps: list[tuple[float, int, int]] = []
        guesses: dict[str, list[tuple[int, int]]] = {}
        began, first = perf_counter(), 0.0

        def on_step(sequence: Sequence, rows: SequencePlan, tokens: list[int], seconds: float) -> None:
            nonlocal first
            first = first or perf_counter() - began
            steps.append((seconds, len(rows) - rows.root_row, len(tokens)))
            count_guesses(guesses, rows, tokens)

        seeded = {"seed": seed} if sampling else {}
        done = lm.generate(
            list(prompts),
            max_new_tokens=new,
            strategy=self.strategy,
            budget=self.budget,
            on_step=on_step,
            **seeded,
            **sampling,
        )
        seconds = perf_counter() - began
        outputs = [one.token_ids for one in done]
        host = sum(one.stats.host_seconds for one in done)
        return Run("", [], self.name, len(prompts), 0, outputs, seconds, first, steps, guesses, host)

    def _transformers(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        ids, mask = left_padded(prompts, lm.device)
        clock = Clock() if len(prompts) == 1 else None  # transformers streams single texts only
        torch.manual_seed(seed)
        began = perf_counter()
        out = lm.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            pad_token_id=lm.model.generation_config.pad_token_id or 0,
            streamer=clock,
            **{"do_sample": bool(sampling)} | sampling | self.arguments,
        )
        seconds = perf_counter() - began
        outputs = [cut(row, lm) for row in out[:, ids.shape[1] :].tolist()]
        steps = clock.steps(began) if clock else [(seconds / max(map(len, outputs)), 1, 1)] * sum(map(len, outputs))
        if self.arguments:  # it guesses, and does not tell how much
            steps = [(took, UNKNOWN, tokens) for took, _, tokens in steps]
        first = steps[0][0] if steps else seconds
        return Run("", [], self.name, len(prompts), 0, outputs, seconds, first, steps)


class Clock(BaseStreamer):
    """Notes when tokens come out of `model.generate`."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append((perf_counter(), int(value.numel())))
        self._prompt_seen = True

    def end(self) -> None:
        pass

    def steps(self, began: float) -> list[tuple[float, int, int]]:
        starts = [began, *(moment for moment, _ in self.times)]
        return [(moment - start, 1, n) for start, (moment, n) in zip(starts, self.times, strict=False)]


def count_guesses(guesses: dict[str, list[tuple[int, int]]], rows: SequencePlan, tokens: list[int]) -> None:
    """Add what a step fed and accepted, by source and depth."""
    tree, node, accepted = rows.tree, ROOT, set()
    for token in tokens[:-1]:
        child = tree.child(node, token)
        if child is None:
            break
        accepted.add(child)
        node = child
    for place in range(len(tree)):
        depths = guesses.setdefault(tree.source(place), [])
        depth = int(tree.depths[place])
        depths += [(0, 0)] * (depth - len(depths))
        fed, right = depths[depth - 1]
        depths[depth - 1] = fed + 1, right + (place in accepted)


def left_padded(prompts: Seq[list[int]], device: torch.device, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as `generate` takes them, and what of that counts."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def cut(output: list[int], lm: LM) -> list[int]:
    """A row without what is behind its stop token."""
    stops = lm.model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    end = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
    return output[:end]


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """The most memory in use: of the device since the call began, or of this process now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
