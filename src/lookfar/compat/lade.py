"""The interface of `lade` (Lookahead Decoding, Fu et al. 2024): `augment_all`, `config_lade` and `USE_LADE=1`.

As there, `augment_all` changes `generate` of every model of the process; `restore_all` undoes it. Unlike there, any
architecture, batches, logits processors and sampling work, and the text is that of `model.generate`.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from lookfar.drafters.lookahead import Lookahead
from lookfar.errors import LookfarWarning
from lookfar.integrations.transformers.loop import generate
from lookfar.integrations.transformers.state import last_stats
from lookfar.models.stock_loop import STOCK_LOOP, stock_loop

CONFIG_MAP: dict[str, Any] = {"log": []}
SUMMARY = "==========================ACCELERATION===SUMMARY======================================"


def config_lade(
    WINDOW_SIZE: int | None = None,  # noqa: N803
    LEVEL: int | None = None,  # noqa: N803
    DEBUG: int | None = None,  # noqa: N803
    GUESS_SET_SIZE: int | None = None,  # noqa: N803
    ALWAYS_FWD_ONE: int | None = None,  # noqa: N803
    SPLIT_FLAG: int | None = None,  # noqa: N803
    DIST_WORKERS: int | None = None,  # noqa: N803
    POOL_FROM_PROMPT: bool | None = None,  # noqa: N803
    backend: str = "nccl",
    USE_FLASH: bool | None = None,  # noqa: N803
) -> None:
    """Set the window, the n-gram size and the number of n-grams to verify, for all models; others keep their values.

    `DEBUG` prints a summary after each answer and keeps it for `log_history`. `USE_FLASH`, `ALWAYS_FWD_ONE` and
    `SPLIT_FLAG` concern that implementation and have no effect here.
    """
    given = {
        "WINDOW_SIZE": WINDOW_SIZE,
        "LEVEL": LEVEL,
        "DEBUG": DEBUG,
        "GUESS_SET_SIZE": GUESS_SET_SIZE,
        "POOL_FROM_PROMPT": POOL_FROM_PROMPT,
    }
    changed = CONFIG_MAP | {key: value for key, value in given.items() if value is not None}
    _strategy(changed)  # checks the settings
    CONFIG_MAP.update(changed, log=[])
    if DIST_WORKERS is not None and DIST_WORKERS > 1:
        warnings.warn("DIST_WORKERS above 1 is not supported: one device decodes.", LookfarWarning, stacklevel=2)


def augment_all() -> None:
    """Let every model decode with lookahead while the environment says `USE_LADE=1`."""
    if not hasattr(GenerationMixin._sample, STOCK_LOOP):
        stock = GenerationMixin._sample

        def loop(self: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
            return _decode(self, input_ids, **prepared)

        setattr(loop, STOCK_LOOP, stock)
        GenerationMixin._sample = loop


def restore_all() -> None:
    """Undo `augment_all`."""
    GenerationMixin._sample = getattr(GenerationMixin._sample, STOCK_LOOP, GenerationMixin._sample)


def log_history(clear: bool = False) -> None:
    """Print the totals of all answers since `config_lade`."""
    generated = sum(entry[0] for entry in CONFIG_MAP["log"])
    steps = sum(entry[1] for entry in CONFIG_MAP["log"])
    if clear:
        CONFIG_MAP["log"] = []
    ratio = generated / steps if steps else 0
    print("LADE LOG - OVERALL GEN: ", generated, " STEPS: ", steps, " AVG COMPRESS RATIO: ", ratio)


def save_log(log_dir: str | os.PathLike[str]) -> None:
    """Write the log to a file: a list of [tokens, steps, tokens per step], as JSON."""
    Path(log_dir).write_text(json.dumps(CONFIG_MAP["log"]))


def _strategy(config: dict[str, Any]) -> Lookahead:
    """Return the settings, with the defaults of `lade`."""
    return Lookahead(
        window=config.get("WINDOW_SIZE", 60),
        ngram=config.get("LEVEL", 8),
        guesses=config.get("GUESS_SET_SIZE", 60),
        from_prompt=bool(config.get("POOL_FROM_PROMPT", False)),
    )


def _decode(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
    if not int(os.environ.get("USE_LADE", 0)):
        return stock_loop(model)(model, input_ids, **prepared)
    out = generate(model, input_ids, strategy=_strategy(CONFIG_MAP), **prepared)
    stats = last_stats(model)
    if CONFIG_MAP.get("DEBUG") and stats.steps:
        ratio = round(stats.tokens_per_step, 2)
        print(f"\n{SUMMARY}")
        print("Generated tokens: ", stats.tokens, "Total steps: ", stats.steps, " Compression ratio: ", ratio)
        print("=" * len(SUMMARY))
        CONFIG_MAP["log"].append([stats.tokens, stats.steps, ratio])
    return out
