"""ALiBi models (bloom, mpt, falcon) in tree form.

They add a bias that grows with the key's index in the cache. In a tree step the index is not the key's position, so
during a forward pass a hook on each block reads the model's own bias table at the keys' positions. The hooks are
torch's own and are removed after the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from transformers import PreTrainedModel

from lookfar.models.masks import LayerKind, StepMasks

# family → the block's argument that carries the bias
BIAS_ARGUMENT = {"bloom": "alibi", "falcon": "alibi", "mpt": "position_bias"}


def uses_alibi(config: Any) -> bool:
    """Whether the family biases its attention by the index of the key."""
    return config.model_type in ("bloom", "mpt") or (config.model_type == "falcon" and bool(config.alibi))


@contextmanager
def positions_as_bias(model: PreTrainedModel, masks: StepMasks) -> Iterator[None]:
    """Let every block of `model` read its bias at the keys' positions while the context is open."""
    argument = BIAS_ARGUMENT[model.config.model_type]
    base = model.base_model
    blocks = base.blocks if model.config.model_type == "mpt" else base.h

    made: dict[str, Any] = {}  # the same for all blocks
    thread = get_ident()

    def hook(block: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if get_ident() != thread:
            return args, kwargs  # another caller's forward pass
        if not made:
            bias = _read_at(kwargs[argument], masks)
            made.update({argument: bias, "attention_mask": _mask(model.config, masks, bias, args[0].dtype)})
        return args, kwargs | made

    hook.row_wise = True  # type: ignore[attr-defined] # see hooks.py
    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _mask(config: Any, masks: StepMasks, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the step's mask in the form that the family's blocks take."""
    invisible = ~masks.of(LayerKind()).to(bias.device)
    if config.model_type == "mpt":
        return invisible
    hidden = torch.finfo(dtype).min
    if config.model_type == "falcon":
        # As in the model: the scaled bias is part of the mask.
        scale = (config.hidden_size // config.num_attention_heads) ** 0.5
        return torch.masked_fill(bias / scale, invisible, hidden)
    return torch.zeros(invisible.shape, dtype=dtype, device=bias.device).masked_fill(invisible, hidden)


def _read_at(table: torch.Tensor, masks: StepMasks) -> torch.Tensor:
    """Read the bias table, whose last axis is the key's index, at the keys' positions.

    bloom [batch × heads, 1, keys], falcon [batch, heads, 1, keys], mpt [heads, 1, longest] (one request a forward).
    """
    positions = masks.key_positions.to(table.device)  # [batch, keys]
    batch, keys = positions.shape
    if table.dim() == 4:
        return table.gather(3, positions[:, None, None].expand(*table.shape[:3], keys))
    if table.shape[0] % batch == 0 and table.shape[-1] == keys:
        return table.gather(2, positions.repeat_interleave(table.shape[0] // batch, 0)[:, None])
    # mpt counts back from the end of a table as long as the longest text: its last step is the slope.
    slope = table[..., -1:] - table[..., -2:-1]  # [heads, 1, 1]
    return (positions - positions.max())[:, None] * slope
