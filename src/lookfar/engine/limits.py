"""Whether a request fits the model, the runner and the memory: checked before anything is decoded."""

from __future__ import annotations

import psutil

from lookfar.engine.request import Request
from lookfar.errors import CapacityError, ConfigError
from lookfar.models.binding import BoundModel
from lookfar.runners.base import ModelRunner
from lookfar.runners.cuda_graph.memory import GIB, free_memory
from lookfar.speculation.row_budget import MAX_ROWS, max_draft_rows


def check_request(request: Request, runner: ModelRunner, max_length: int | None) -> None:
    """Refuse a request that cannot fit."""
    if max_length is not None and request.decoded_length > max_length:
        ours = max_length != runner.model.support.max_positions
        prompt, new = request.decoded_length - request.max_new_tokens, request.max_new_tokens
        fix = "shorten the prompt" if prompt >= max_length else "lower max_new_tokens or shorten the prompt"
        raise CapacityError(
            f"The prompt has {prompt} tokens and max_new_tokens is {new}, but {prompt + new} do not fit in {max_length}"
            + (
                f", the max_length: raise it, {fix}."
                if ours
                else f", the most that this model has positions for: {fix}."
            )
        )
    _check_rows(request, runner)
    for strategy in request.strategies:
        strategy.check(runner.model)


def _check_rows(request: Request, runner: ModelRunner) -> None:
    """Refuse strategies whose steps would not fit."""
    limits = runner.limits
    window = sum(strategy.max_rows for strategy in request.strategies if strategy.uses_window)
    if limits.rows is not None and window >= limits.rows:
        raise ConfigError(
            f"A step has room for {limits.rows} rows here and the window of this strategy takes {window + 1}: "
            "use a smaller window."
        )
    rows = 1 + max(window, max_draft_rows(request.strategies, request.budget))
    if rows <= 2 * MAX_ROWS:
        return
    needed = rows * _row_bytes(runner.model, len(request.prompt) + rows)
    free = free_memory(runner.model.device) if runner.model.device.type == "cuda" else _free_host_memory()
    if needed > free / 2:
        raise ConfigError(
            f"A step of {rows} rows needs about {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free: "
            "give the strategy smaller settings."
        )


def _row_bytes(model: BoundModel, length: int) -> int:
    """Estimate what a row takes: its logits, twice, and its line of the attention mask, for one head and in float32."""
    return 4 * (2 * model.vocab_size + length)


def _free_host_memory() -> int:
    return int(psutil.virtual_memory().available)
