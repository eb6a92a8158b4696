"""`load`: names, directories and hub ids → an `LM`."""

from __future__ import annotations

import os

import torch

from lookfar.drafters.registry import StrategySpec, parse_strategy
from lookfar.lm import LM
from lookfar.models.pretrained import load_pretrained
from lookfar.profiles import find_profile
from lookfar.sharing.share import Share
from lookfar.speculation.row_budget import Budget, check_budget


def load(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    strategy: StrategySpec = None,
    budget: Budget = None,
    pack: bool | None = None,
    cuda_graphs: bool | None = None,
    compile: bool = False,
    exact: bool | None = None,
    store: str | os.PathLike[str] | None = None,
    share: str | Share | None = None,
    remember: bool = True,
    max_batch: int = 8,
    max_length: int | None = None,
    prefill_chunk: int = 512,
) -> LM:
    """Load "demo", a directory or a hub name.

    `device` is a torch device, or "auto" to spread the model with accelerate; by default the GPU if there is one.
    `dtype` is a torch dtype or its name; by default the checkpoint's own on a GPU, float32 on a CPU. Without `strategy`
    and `budget`, the result of `lookfar tune` for this model and machine is used, or "auto". `share` is the URL of a
    Redis or Valkey server, redis://user:password@host, through which replicas share their draft stores
    (docs/scaling.md). The rest is as for `LM`.
    """
    parse_strategy(strategy or "auto")  # a mistake here should not cost the loading of a model
    check_budget(budget)
    sharing = Share(share) if isinstance(share, str) else share
    model, tokenizer = load_pretrained(name, device, dtype)
    lm = LM(
        model,
        tokenizer,
        strategy=strategy or "auto",
        budget=budget,
        pack=pack,
        cuda_graphs=cuda_graphs,
        compile=compile,
        exact=exact,
        store=store,
        remember=remember,
        max_batch=max_batch,
        max_length=max_length,
        prefill_chunk=prefill_chunk,
    )
    if sharing is not None:
        sharing.attach(lm.store)
    if strategy is None and budget is None and (tuned := find_profile(lm.engine.runner)) is not None:
        lm.strategy, lm.budget = tuned.strategies, tuned.budget
    return lm
