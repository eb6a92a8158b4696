"""Shared by the experiments of both papers: decode some prompts, count, write one JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import lookfar
from lookfar.bench.suites import Prompt, read_suite
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import add_up, is_natural
from lookfar.retrieval.draft_store import DraftStore
from lookfar.speculation.draft_state import DraftState


class Experiments:
    """A model, prompts, and the measured rows."""

    def __init__(self, description: str | None, sections: Mapping[str, Callable[[Experiments], None]]) -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--data", type=Path, required=True)
        parser.add_argument("--limit", type=int, default=20, help="prompts of each suite")
        parser.add_argument("--max-new-tokens", type=int, default=128)
        parser.add_argument("--model", default="demo")
        parser.add_argument("--device", default=None)
        parser.add_argument("--dtype", default="float32")
        parser.add_argument("--compile", action="store_true", help="on a GPU: faster steps")
        parser.add_argument("--only", default=",".join(sections))
        parser.add_argument("--out", type=Path, default=Path("."), help="a directory for the JSON file")
        self.options = parser.parse_args()
        self.sections = sections
        self.lm = lookfar.load(
            self.options.model,
            device=self.options.device,
            dtype=self.options.dtype,
            compile=self.options.compile,
            max_batch=1,
            strategy="auto",
        )
        self.rows: list[dict[str, Any]] = []
        self._expected: dict[str, list[list[int]]] = {}

    def run(self, name: str) -> None:
        """Run the sections that were asked for; the file is written after each of them."""
        on_gpu = self.lm.device.type == "cuda"
        record = {
            "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "dtype": self.options.dtype,
            "limit": self.options.limit,
            "max_new_tokens": self.options.max_new_tokens,
            "rows": self.rows,
        }
        for section in self.options.only.split(","):
            self.sections[section](self)
            (self.options.out / f"{name}.json").write_text(json.dumps(record, indent=1))

    def prompts(self, suite: str) -> list[Prompt]:
        return read_suite(suite, self.options.data, self.options.limit)

    def measure(
        self, section: str, suite: str, strategy: Any, store: DraftStore | None = None, **facts: Any
    ) -> dict[str, Any]:
        """Decode a suite, starting with an empty draft state but for the store, and add a row."""
        sampling = {key: facts[key] for key in ("temperature", "top_k") if key in facts}
        self.lm.forget()
        if store is not None:
            self.lm.draft_state = DraftState(store.vocab_size, store)
        done, seconds = [], 0.0
        prompts = self.prompts(suite)
        with progress_bar(f"{section}, {suite}", len(prompts)) as advance:
            for seed, prompt in enumerate(prompts):
                seeded = {"seed": seed} if sampling else {}
                began = perf_counter()
                done.append(
                    self.lm.generate(
                        prompt.ids(self.lm),
                        max_new_tokens=self.options.max_new_tokens,
                        strategy=strategy,
                        **seeded,
                        **sampling,
                    )
                )
                seconds += perf_counter() - began
                advance(1)
        outputs = [one.token_ids for one in done]
        key = f"{suite} {sampling}"
        expected = self._expected.setdefault(key, outputs)  # the first one runs without speculation
        natural = [one.stats for one, output in zip(done, expected, strict=True) if is_natural(output)]
        total, part = add_up(one.stats for one in done), add_up(natural)
        row = {
            "section": section,
            "suite": suite,
            **facts,
            "tokens_per_step": total.tokens_per_step,
            "natural_tokens_per_step": part.tokens_per_step if natural else None,
            "rows_per_step": total.rows_per_step,
            "tokens_per_second": total.tokens / seconds,
            "identical": sum(a == b for a, b in zip(outputs, expected, strict=True)),
            "outputs": len(outputs),
        }
        self.rows.append(row)
        print(" · ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        return row
