"""Names, paths and hub ids → an `LM`, with every way to fail told in one sentence."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from lookfar.config import Budget, StrategySpec, check_budget, parse_strategy
from lookfar.demo import demo_model
from lookfar.errors import ConfigError, LookfarError, ModelError, first_sentence
from lookfar.lm import LM
from lookfar.progress import bar
from lookfar.support import causal_class


def load(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    strategy: StrategySpec = None,
    budget: Budget = None,
    pack: bool | None = None,
    capture: bool | None = None,
    compile: bool = False,
    exact: bool = False,
    store: str | os.PathLike[str] | None = None,
    remember: bool = True,
    max_batch: int = 8,
    max_length: int | None = None,
) -> LM:
    """Load "demo", a directory or a hub name.

    `device`: a torch device, or "auto" to spread the model with accelerate; by default the GPU if there is one.
    `dtype`: a torch dtype or its name; by default the checkpoint's own on a GPU, float32 on a CPU.
    Without `strategy` and `budget`, what `lookfar tune` found for this model and machine is used, or `"auto"`.
    The rest is as for `LM`.
    """
    from lookfar.bench.tune import find_profile

    parse_strategy(strategy or "auto")  # a mistake here should not cost a model's loading
    check_budget(budget)
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config, where = read_config(name)
    causal_class(config)
    with quiet(), bar(f"Loading {name}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where)
            model = AutoModelForCausalLM.from_pretrained(where, dtype=_dtype(dtype, device), device_map=_device(device))
        except LookfarError:
            raise
        except Exception as error:  # transformers, safetensors and tokenizers raise whatever they like
            raise ModelError(f"{name} cannot be loaded: {first_sentence(error)}.") from error
    lm = LM(
        model,
        tokenizer,
        strategy=strategy or "auto",
        budget=budget,
        pack=pack,
        capture=capture,
        compile=compile,
        exact=exact,
        store=store,
        remember=remember,
        max_batch=max_batch,
        max_length=max_length,
    )
    if strategy is None and budget is None and (tuned := find_profile(lm.engine.steps)) is not None:
        lm.strategy, lm.budget = tuned.strategies, tuned.budget
    return lm


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of a model and the size of its vocabulary, without the weights."""
    config, where = read_config(name)
    causal_class(config)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(where)
    except Exception as error:
        raise ModelError(f"{name} has no tokenizer that can be loaded: {first_sentence(error)}.") from error
    return tokenizer, int(config.get_text_config(decoder=True).vocab_size)


def read_config(name: str) -> tuple[PreTrainedConfig, str]:
    """The config of "demo", a directory, a config file or a hub name, and what to load the model from."""
    where = str(demo_model()) if name == "demo" else name
    path = Path(where)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{name} is a directory without a config.json: give the directory of a saved transformers model."
        )
    if not path.exists() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
        raise ModelError(f"{name} does not exist: give a directory, a hub name or demo.")
    try:
        with quiet(), bar(f"Looking for {name}"):
            return AutoConfig.from_pretrained(where), where
    except Exception as error:
        raise ModelError(f"{name} is not a model that transformers can find: {first_sentence(error)}.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its bars and notices: the messages are ours."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            transformers.logging.enable_progress_bar()


def _dtype(dtype: str | torch.dtype | None, device: str) -> Any:
    if dtype is None:
        return torch.float32 if device == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"Unknown dtype {dtype!r}: use auto, float32, float16, bfloat16 or float64.")
        return found
    return dtype


def _device(device: str) -> Any:
    if device == "auto":
        return "auto"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"Device {device!r} cannot be used here: {first_sentence(error)}.") from None
    return {"": found}
