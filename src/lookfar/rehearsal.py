"""The process that `compile_ahead` starts: it decodes a few tokens with a tiny model, to compile the host's code."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lookfar.core import compile_ahead
from lookfar.lm import LM
from lookfar.speculation.cost_curve import CostCurve


def tiny_model() -> LlamaForCausalLM:
    """Return a model with random weights whose steps take the same types of arrays as those of any other."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def rehearse() -> None:
    """Compile what decoding needs: greedy and sampled, one request and two."""
    for requests in (1, 2):
        lm = LM(tiny_model(), max_batch=requests)
        lm.engine.speculator.costs = CostCurve({1: 1.0, 8: 1.0, 16: 16.0})  # steps of a tiny model say nothing
        lm.warmup(requests=requests, length=128, sampling=True, prior=False)
        lm.generate(list(range(8)) * 4, max_new_tokens=24)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rehearse()
    compile_ahead.done()
