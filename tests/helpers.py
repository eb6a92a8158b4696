"""What tests of several packages share: prompts, reference outputs, tokenizers and drafters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from families import DEVICE, WINDOW
from lookfar.core.plan import RequestPlan
from lookfar.drafters.base import Strategy
from lookfar.drafters.scripted import Scripted
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.request import Request
from lookfar.lm import LM
from lookfar.models.binding import BoundModel
from lookfar.runners import create_runner
from lookfar.runners.cuda_graph.runner import CudaGraphRunner
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.draft_state import DraftState
from lookfar.testing import run_requests


def reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The new tokens that `model.generate` returns."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def flat_lm(model: PreTrainedModel, **options: Any) -> LM:
    """An LM with flat steps, on a CPU too."""
    lm = LM(model, prefill_chunk=16, **options)
    if DEVICE == "cpu":
        steps = CudaGraphRunner(lm.engine.runner.model)
        assert not steps.why_unavailable()
        lm.engine.runner = steps
    return lm


def random_prompts(*lengths: int, seed: int = 0, vocab: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def random_state() -> torch.Tensor:
    """The state of the generator that sampling uses."""
    return torch.cuda.get_rng_state() if DEVICE.startswith("cuda") else torch.get_rng_state()


def eager_engine(
    model: PreTrainedModel, state: DraftState | None = None, costs: CostCurve | None = None, **limits: int | None
) -> Engine:
    """An engine without CUDA graphs; `limits` are those of `EngineConfig`."""
    runner = create_runner(BoundModel(model), cuda_graphs=False)
    return Engine(runner, EngineConfig(**limits), state, costs)  # type: ignore[arg-type]


def rows_of(engine: Engine, requests: Seq[Request]) -> list[RequestPlan]:
    """Decode requests; the rows of every step that emitted tokens."""
    seen: list[RequestPlan] = []
    run_requests(engine, requests, lambda output: seen.append(output.fed) if output.fed is not None else None)
    return seen


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, so that a character can be split over tokens and steps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def oracle(texts: list[list[int]]) -> Strategy:
    """Right continuations behind wrong ones: most steps accept rows that are not neighbours.

    Some drafts are longer than the sliding window, so that a row does not see all of its own branch.
    """

    def script(ids: Seq[int]) -> list[list[int]]:
        rest = next(text for text in texts if text[: len(ids)] == list(ids))[len(ids) :]
        rng = random.Random(len(ids))
        wrong = rest[:1] + [(token + 1) % 90 for token in rest[1:4]]
        return [[rng.randrange(90) for _ in range(3)], wrong, rest[: rng.randint(1, WINDOW + 3)]]

    return Scripted(script)


def partly_right(texts: list[list[int]], right: float = 0.7) -> Strategy:
    """Drafts whose tokens are right with some probability, so that some are accepted in part and some as a whole."""

    def script(ids: Seq[int]) -> list[list[int]]:
        rest = next((text[len(ids) :] for text in texts if text[: len(ids)] == list(ids)), [])[:6]
        rng = random.Random(len(ids))
        drafts = [[t if rng.random() < right else rng.randrange(5, 90) for t in rest] for _ in range(2)]
        return [draft for draft in drafts if draft]

    return Scripted(script)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
