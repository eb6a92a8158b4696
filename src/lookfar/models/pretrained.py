"""Names, directories and hub ids → a transformers model and its tokenizer; every failure is one sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lookfar.core.progress import progress_bar
from lookfar.errors import ConfigError, LookfarError, LookfarWarning, ModelError, first_sentence
from lookfar.models.demo import demo_model
from lookfar.models.mismatch import mismatch
from lookfar.models.quiet import quiet
from lookfar.models.support import loaded_class, takes_media


def load_pretrained(
    name: str, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Load "demo", a directory or a hub name: a model, and its tokenizer or the processor that holds one.

    `device` is a torch device, or "auto" to spread the model with accelerate; by default the GPU if there is one.
    `dtype` is a torch dtype or its name; by default the checkpoint's own on a GPU, float32 on a CPU.
    """
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config, where = read_config(name)
    auto, model_class = loaded_class(config)
    with quiet(), progress_bar(f"Loading {name}"):
        try:
            reads_media = takes_media(config, model_class)
            tokenizer = _processor(where) if reads_media else AutoTokenizer.from_pretrained(where)
            model, found = auto.from_pretrained(
                where, dtype=_dtype(dtype, device), device_map=_device_map(device), output_loading_info=True
            )
        except LookfarError:
            raise
        except Exception as error:  # transformers, safetensors and tokenizers raise many types
            if "ignore_mismatched_sizes" in str(error):
                raise ModelError(f"{name} cannot be loaded: {mismatch(where, auto, config)}.") from error
            raise ModelError(f"{name} cannot be loaded: {first_sentence(error)}.") from error
    if missing := sorted(found["missing_keys"]):
        some = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        warnings.warn(
            f"The checkpoint lacks weights that config.json asks for ({some}), and transformers has made random ones: "
            "use the config.json that came with the weights.",
            LookfarWarning,
            stacklevel=3,
        )
    return model, tokenizer


def _processor(where: str) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Return the processor of a multimodal model, or its tokenizer if the processor needs a package that is missing."""
    try:
        return AutoProcessor.from_pretrained(where)
    except (ImportError, OSError, ValueError) as error:
        tokenizer = AutoTokenizer.from_pretrained(where)
        warnings.warn(f"Prompts can hold text only: {first_sentence(error)}.", LookfarWarning, stacklevel=4)
        return tokenizer


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer of a model and the size of its vocabulary, without loading the weights."""
    config, where = read_config(name)
    loaded_class(config)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(where)
    except Exception as error:
        raise ModelError(f"The tokenizer of {name} cannot be loaded: {first_sentence(error)}.") from error
    return tokenizer, int(config.get_text_config(decoder=True).vocab_size)


def read_config(name: str) -> tuple[PreTrainedConfig, str]:
    """Return the config of "demo", a directory, a config file or a hub name, and what to load the model from."""
    where = str(demo_model()) if name == "demo" else name
    path = Path(where)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{name} is a directory without a config.json: give the directory of a saved transformers model."
        )
    if path.suffix == ".gguf" and path.is_file():
        raise ModelError(
            f"{name} is a GGUF file, and lookfar decodes models of transformers: "
            "give the directory or the hub name of the model that it was made from."
        )
    if not path.exists() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
        raise ModelError(f"{name} does not exist: give a directory, a hub name or demo.")
    try:
        with quiet(), progress_bar(f"Looking for {name}"):
            return AutoConfig.from_pretrained(where), where
    except Exception as error:
        raise ModelError(f"{name} is not a model that transformers can find: {first_sentence(error)}.") from error


def _dtype(dtype: str | torch.dtype | None, device: str) -> Any:
    if dtype is None:
        return torch.float32 if device == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"Unknown dtype {dtype!r}: use auto, float32, float16, bfloat16 or float64.")
        return found
    return dtype


def _device_map(device: str) -> Any:
    return "auto" if device == "auto" else {"": available_device(device)}


def available_device(device: str) -> torch.device:
    """Return a device; raises a `ConfigError` if this machine does not have it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"Device {device!r} is not available: {first_sentence(error)}.") from None
    return found
