"""The proposer for vLLM without vLLM: accepted tokens per step when recorded texts are decoded again.

    python benchmarks/vllm_replay.py --record texts.json --data DIR
    python benchmarks/vllm_replay.py texts.json --draft 5

Texts are decoded once, greedily, with the demo model. The replay hands their tokens to a proposer as vLLM would: rows
of one array, a draft for each row, and then the accepted tokens and the next one. Compared with copying after the
longest n-gram that occurred before, as vLLM's `ngram` does, with n from 4 to 2 and from 3 to 1; and with vLLM's
`suffix` at its default settings, if the package arctic-inference is installed (its part `suffix_decoding` suffices).
*Cold* starts without a store; *warm* is a second pass with the texts of the first. Also measures the time of a call for
batches of several sizes. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

numbers = itertools.count()  # of requests
SUITES = ("mt_bench", "gsm8k", "edit_eval", "humaneval", "xsum", "dolly")
Text = tuple[list[int], list[int]]  # prompt and output


class AnyProposer(Protocol):
    def propose(self, sampled: Any, lengths: Any, tokens: Any) -> list[list[int]]: ...


class NGram:
    """Copies what followed the first occurrence of the longest n-gram at the end of a row."""

    def __init__(self, longest: int, most: int = 4, least: int = 2) -> None:
        self.longest, self.sizes = longest, range(most, least - 1, -1)

    def propose(self, sampled: Any, lengths: Any, tokens: Any) -> list[list[int]]:
        return [self._draft(tokens[i, : lengths[i]].tolist()) if len(new) else [] for i, new in enumerate(sampled)]

    def _draft(self, ids: list[int]) -> list[int]:
        for n in self.sizes:
            tail = ids[-n:]
            for start in range(len(ids) - n):
                if ids[start : start + n] == tail:
                    return ids[start + n : start + n + self.longest]
        return []


class ArcticSuffix:
    """What vLLM's `suffix` method does with the suffix trees of arctic-inference; it knows the ids of requests."""

    def __init__(self, longest: int, depth: int = 24, factor: float = 1.0, least: float = 0.1) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.longest, self.depth = longest, depth
        self.limits = {"max_spec_tokens": longest, "max_spec_factor": factor, "min_token_prob": least}
        self.cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10_000)
        self.ids: list[int] = []  # of the requests in the rows

    def propose(self, sampled: Any, lengths: Any, tokens: Any) -> list[list[int]]:
        drafts = []
        for i, new in enumerate(sampled):
            request, end = self.ids[i], int(lengths[i])
            if request not in self.cache.active_requests:
                self.cache.start_request(request, tokens[i, : end - len(new)])
            self.cache.add_active_response(request, new)
            drafts.append(
                self.cache.speculate(request, tokens[i, max(0, end - self.depth) : end], **self.limits).token_ids
            )
        for request in list(self.cache.active_requests - set(self.ids)):
            self.cache.stop_request(request)
        return drafts


def vllm_config(longest: int, vocab_size: int = 49_152, max_model_len: int = 4096, **settings: Any) -> Any:
    """Return the parts of vLLM's configuration that the proposer reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, get_vocab_size=lambda: vocab_size, tokenizer=None, model=""
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
        additional_config={"lookfar": settings},
    )


class Replay:
    """Decodes recorded texts with a proposer, up to `batch` at once, as vLLM's model runner would."""

    def __init__(self, proposer: AnyProposer, batch: int, longest: int) -> None:
        self.proposer, self.batch, self.longest = proposer, batch, longest
        self.steps = self.tokens = self.drafted = 0
        self.seconds: list[float] = []
        self.ids: list[int] = []  # of the requests in the rows

    def run(self, texts: Seq[Text]) -> None:
        waiting = list(texts)
        width = max(len(prompt) + len(output) for prompt, output in texts) + 1
        rows = np.zeros((self.batch, width), np.int32)
        lengths = np.zeros(self.batch, np.int64)
        running: list[Text] = []
        drafts: list[list[int]] = []
        while waiting or running:
            while waiting and len(running) < self.batch:
                prompt, output = waiting.pop(0)
                place = len(running)
                rows[place, : len(prompt)], lengths[place] = prompt, len(prompt)
                running.append((prompt, output))
                self.ids.append(next(numbers))
                drafts.append([])
            sampled = [self._step(rows, lengths, i, *running[i], drafts[i]) for i in range(len(running))]
            if isinstance(self.proposer, ArcticSuffix):
                self.proposer.ids = list(self.ids)
            start = perf_counter()
            drafts = self.proposer.propose(sampled, lengths, rows)
            self.seconds.append(perf_counter() - start)
            assert all(len(draft) <= self.longest for draft in drafts)
            for i in reversed(range(len(running))):  # the last row moves to where one has finished
                if lengths[i] >= sum(map(len, running[i])):
                    last = len(running) - 1
                    rows[i], lengths[i] = rows[last], lengths[last]
                    running[i], drafts[i] = running[last], drafts[last]
                    self.ids[i] = self.ids[last]
                    self.ids.pop()
                    running.pop()
                    drafts.pop()

    def _step(
        self, rows: Any, lengths: Any, i: int, prompt: list[int], output: list[int], draft: list[int]
    ) -> list[int]:
        """Verify a draft; returns the accepted tokens and the next one."""
        at = int(lengths[i]) - len(prompt)
        right = 0
        while right < len(draft) and at + right < len(output) - 1 and draft[right] == output[at + right]:
            right += 1
        new = output[at : at + right + 1]
        rows[i, lengths[i] : lengths[i] + len(new)] = new
        lengths[i] += len(new)
        self.steps += 1
        self.tokens += len(new)
        self.drafted += len(draft)
        return new


def compare(
    texts: dict[str, list[Text]], longest: int, batch: int, factor: float = 1.0, **settings: Any
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per step and draft tokens per step of each suite and method."""
    from lookfar.integrations.vllm import Proposer

    report: dict[str, dict[str, list[float]]] = {}
    for suite, found in texts.items():
        ours = Proposer(vllm_config(longest, **settings))
        ours.load_model(None)
        passes: list[tuple[str, Any]] = [("ngram 4 to 2", NGram(longest)), ("ngram 3 to 1", NGram(longest, 3, 1))]
        if find_spec("arctic_inference"):
            suffix = ArcticSuffix(longest, factor=factor)
            passes += [("suffix, cold", suffix), ("suffix, warm", suffix)]
        passes += [("lookfar, cold", ours), ("lookfar, warm", ours)]
        for name, proposer in passes:
            replay = Replay(proposer, batch, longest)
            replay.run(found)
            report.setdefault(name, {})[suite] = [replay.tokens / replay.steps, replay.drafted / replay.steps]
            ours.texts.learn_all()
        assert not ours.counts.failures
    return report


def time_calls(texts: Seq[Text], longest: int) -> dict[str, float]:
    """Return the median microseconds of a call, by batch size."""
    from lookfar.integrations.vllm import Proposer

    report = {}
    for batch in (1, 16, 64):
        ours = Proposer(vllm_config(longest))
        ours.load_model(None)
        for name, proposer in (
            ("lookfar", ours),
            *((("suffix", ArcticSuffix(longest)),) if find_spec("arctic_inference") else ()),
        ):
            replay = Replay(proposer, batch, longest)
            replay.run([texts[i % len(texts)] for i in range(max(batch, 8))])
            report[f"{name}, batch {batch}"] = 1e6 * float(np.median(replay.seconds[: len(replay.seconds) // 2]))
        assert not ours.counts.failures
    return report


def record(path: Path, data: Path, limit: int, new: int) -> None:
    """Decode prompts with the demo model and keep their tokens."""
    from prompts import read_prompts

    import lookfar

    lm = lookfar.load("demo", dtype="float32", budget=8, strategy="auto")
    texts = {}
    for suite in SUITES:
        prompts = read_prompts(lm, data / f"{suite}.jsonl", limit)
        done = lm.generate(prompts, max_new_tokens=new)
        texts[suite] = [[prompt, each.token_ids] for prompt, each in zip(prompts, done, strict=True)]
        path.write_text(json.dumps(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="?", help="a file of recorded texts")
    parser.add_argument("--record", type=Path, help="make such a file first")
    parser.add_argument("--data", type=Path, help="the folder of the prompts to record")
    parser.add_argument("--limit", type=int, default=7, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=112)
    parser.add_argument("--draft", type=int, default=5, help="the most draft tokens (K)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--min-probability", type=float, default=0.1)
    parser.add_argument("--suffix-factor", type=float, default=1.0, help="`max_spec_factor` of vLLM's suffix method")
    options = parser.parse_args()
    path = options.record or options.texts
    if path is None:
        parser.error("give a file of texts, or --record FILE --data DIR")
    if options.record:
        record(path, options.data, options.limit, options.max_new_tokens)
    texts = {suite: [(p, o) for p, o in found] for suite, found in json.loads(path.read_text()).items()}
    settings = {"factor": options.suffix_factor, "min_probability": options.min_probability}
    report = compare(texts, options.draft, options.batch, **settings)
    table = Table("tokens (drafted) per step", *texts, title=f"K = {options.draft}, batches of {options.batch}")
    for name, cells in report.items():
        table.add_row(name, *(f"{tokens:.2f} ({drafted:.1f})" for tokens, drafted in cells.values()))
    Console(width=120).print(table)
    calls = time_calls([text for found in texts.values() for text in found], options.draft)
    print(json.dumps({"draft": options.draft, "batch": options.batch, "cells": report, "call_us": calls}))


if __name__ == "__main__":
    main()
