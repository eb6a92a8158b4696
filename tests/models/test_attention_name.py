"""The attention of a config while steps of several threads run."""

from __future__ import annotations

import copy
import pickle

from transformers import LlamaConfig

from lookfar.models.attention_name import FlatName, attention_replaced, own_attention


def config(own: str) -> LlamaConfig:
    made = LlamaConfig()
    made._attn_implementation = own
    return made


def test_the_last_step_puts_the_own_name_back() -> None:
    one = config("flex_attention")
    padded, flat = attention_replaced(one, "sdpa"), attention_replaced(one, FlatName("sdpa"))
    with padded:
        assert one._attn_implementation == "sdpa"
        flat.__enter__()
        assert one._attn_implementation == "lookfar_sdpa"
        assert own_attention(one) == "flex_attention"
        with attention_replaced(one, "sdpa"):
            assert one._attn_implementation == "lookfar_sdpa"  # which serves a padded step as well
    assert one._attn_implementation == "lookfar_sdpa"
    flat.__exit__(None, None, None)
    assert one._attn_implementation == own_attention(one) == "flex_attention"


def test_a_copy_gets_the_own_name() -> None:
    one = config("eager")
    with attention_replaced(one, FlatName("eager")):
        for made in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(made._attn_implementation) is str
            assert made._attn_implementation == "eager"
