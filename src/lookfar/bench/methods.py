"""Methods to measure: our own strategies and the decoding modes of transformers, each timed step by step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import psutil
import torch
from transformers.generation.streamers import BaseStreamer

from lookfar.bench.records import Run
from lookfar.drafters.registry import StrategySpec
from lookfar.engine.outputs import StepOutput
from lookfar.lm import LM
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.row_budget import Budget

BASELINES = ("generate", "prompt_lookup", "assisted")  # of transformers
UNKNOWN_ROWS = 0  # of a step whose rows transformers does not report


@dataclass
class Method:
    """A way to decode. "hf …" is transformers, whose `generate` gets the `arguments`; ours has a strategy."""

    name: str
    strategy: StrategySpec = None
    budget: Budget = None
    arguments: dict[str, Any] = field(default_factory=dict)
    state: DraftState | None = None  # its own, so that no method drafts from another one's answers

    def forget(self, lm: LM) -> None:
        """Start with an empty draft state."""
        self.state = lm.new_draft_state(lm.draft_state.sources.vocab_size)

    def run(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        """Decode some prompts at once. The caller fills in which ones they were."""
        reset_peak(lm.device)
        run = self._lookfar if self.strategy is not None else self._transformers
        done = run(lm, prompts, new, seed, sampling)
        done.peak_bytes = peak(lm.device)
        return done

    def _lookfar(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        assert self.state is not None
        lm.draft_state = self.state
        steps: list[tuple[float, int, int]] = []
        drafts: dict[str, list[tuple[int, int]]] = {}
        began, first = perf_counter(), 0.0

        def on_step(output: StepOutput) -> None:
            nonlocal first
            first = first or perf_counter() - began
            steps.append((output.seconds, output.num_rows, len(output.tokens)))
            count_drafts(drafts, output)

        if sampling:
            sampling = {"seed": seed, **sampling}
        done = lm.generate(
            list(prompts),
            max_new_tokens=new,
            strategy=self.strategy,
            budget=self.budget,
            on_step=on_step,
            **sampling,
        )
        seconds = perf_counter() - began
        outputs = [one.token_ids for one in done]
        host = sum(one.stats.host_seconds for one in done)
        return Run("", [], self.name, len(prompts), 0, outputs, seconds, first, steps, drafts, host)

    def _transformers(self, lm: LM, prompts: Seq[list[int]], new: int, seed: int, sampling: dict[str, Any]) -> Run:
        ids, mask = left_padded(prompts, lm.device)
        clock = TokenClock() if len(prompts) == 1 else None  # transformers streams single texts only
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
        if self.arguments:  # it drafts, and does not report how much
            steps = [(took, UNKNOWN_ROWS, tokens) for took, _, tokens in steps]
        first = steps[0][0] if steps else seconds
        return Run("", [], self.name, len(prompts), 0, outputs, seconds, first, steps)


class TokenClock(BaseStreamer):
    """Records when tokens come out of `model.generate`."""

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


def count_drafts(drafts: dict[str, list[tuple[int, int]]], output: StepOutput) -> None:
    """Add the verified and the accepted draft tokens of a step, by source and depth."""
    if output.fed is None:
        return
    tree, accepted = output.fed.tree, set(output.accepted)
    for node in range(len(tree)):
        depths = drafts.setdefault(tree.source(node), [])
        depth = int(tree.depths[node])
        depths += [(0, 0)] * (depth - len(depths))
        verified, right = depths[depth - 1]
        depths[depth - 1] = verified + 1, right + (node in accepted)


def left_padded(prompts: Seq[list[int]], device: torch.device, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as `generate` takes them, and their attention mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def cut(output: list[int], lm: LM) -> list[int]:
    """Return a row up to and including its stop token."""
    stops = lm.model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    end = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
    return output[:end]


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Return the peak memory of the device since the call began, or the memory of this process now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
