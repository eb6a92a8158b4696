"""Forward hooks that treat single positions: such a model is decoded as transformers decodes it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookfar
from families import tiny_model
from helpers import random_prompts, reference
from lookfar import LM, LookfarWarning

PROMPT = random_prompts(12)[0]


def steer(_: Any, __: Any, output: Any) -> None:
    """Edit the last position, as activation steering does."""
    (output[0] if isinstance(output, tuple) else output)[:, -1] += 1.0


def test_a_hook_on_the_last_position_is_noticed_between_calls(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    before = lm.generate(PROMPT, max_new_tokens=20, budget=16).token_ids
    hook = llama.model.layers[0].register_forward_hook(steer)
    try:
        expected = reference(llama, PROMPT, 20)
        with pytest.warns(LookfarWarning, match="forward hooks"):
            assert lm.generate(PROMPT, max_new_tokens=20, budget=16).token_ids == expected
        lookfar.accelerate(llama)
        ids = torch.tensor([PROMPT], device=llama.device)
        with pytest.warns(LookfarWarning, match="forward hooks"):
            assert llama.generate(ids, max_new_tokens=20, pad_token_id=0)[0, 12:].tolist() == expected
    finally:
        hook.remove()
        lookfar.restore(llama)
    assert expected != before
    assert lm.generate(PROMPT, max_new_tokens=20, budget=16).token_ids == before


def test_a_hook_that_treats_all_rows_alike_may_say_so() -> None:
    model = tiny_model("llama")

    def scale(_: Any, __: Any, output: Any) -> Any:
        return output * 1.5

    scale.row_wise = True  # type: ignore[attr-defined]
    model.lm_head.register_forward_hook(scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LookfarWarning)
        assert LM(model).generate(PROMPT, max_new_tokens=20).token_ids == reference(model, PROMPT, 20)
