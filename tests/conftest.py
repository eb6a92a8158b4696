"""Tiny random models, and what transformers itself decodes with them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

if os.environ.get("LOOKFAR_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU; said before torch imports triton

import hypothesis
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from families import DEVICE, tiny_model
from lookfar.engine import Engine
from lookfar.model import BoundModel

transformers.logging.set_verbosity_error()
hypothesis.settings.register_profile("lookfar", deadline=None)  # the first call may compile
hypothesis.settings.load_profile("lookfar")
torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much on a busy machine


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


def random_prompts(*lengths: int, seed: int = 0, vocab: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def random_state() -> torch.Tensor:
    """Of the generator that sampling uses."""
    return torch.cuda.get_rng_state() if DEVICE.startswith("cuda") else torch.get_rng_state()


@pytest.fixture(autouse=True, scope="session")
def costs_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost curves of tiny models belong into no user's cache."""
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookfar.costs.cache_dir", lambda: folder)
        patch.setattr("lookfar.bench.tune.cache_dir", lambda: folder)
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def engine(llama: PreTrainedModel) -> Engine:
    return Engine(BoundModel(llama), prefill_rows=16)
