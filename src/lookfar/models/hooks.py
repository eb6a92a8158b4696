"""Forward hooks of a model, which may read or change single positions of a text."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

WEIGHT_HOOKS = (BasePruningMethod, SpectralNorm, WeightNorm)  # they compute a weight and see no activations


def has_position_hooks(model: nn.Module) -> bool:
    """Whether a module has a forward hook that may depend on positions.

    A hook that edits the last position of the input, for instance, would edit a draft token. A hook that treats every
    row alike can say so with an attribute `row_wise = True`. Hooks of transformers only record outputs.
    """
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                harmless = isinstance(hook, WEIGHT_HOOKS) or getattr(hook, "row_wise", False)
                if not harmless and not getattr(hook, "__module__", "").startswith("transformers."):
                    return True
    return False
