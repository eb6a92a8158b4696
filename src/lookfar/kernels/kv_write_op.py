"""Writing the rows of a step to the KV cache, as a torch operator."""

from __future__ import annotations

import torch

from lookfar.kernels import reference


@torch.library.custom_op("lookfar::write_kv", mutates_args=("keys", "values"))
def write_kv(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write each row's keys and values, [1, heads, rows, dim], to its slot and position.

    An operator, so that compilers leave it as it is: for several rows the code that they generate for the
    reference takes two to four times as long.
    """
    if keys.device.type == "cuda":
        from lookfar.kernels.kv_move import write_rows

        write_rows(new_keys, new_values, keys, values, slots, positions)
    else:
        reference.write_kv(new_keys, new_values, keys, values, slots, positions)


@write_kv.register_fake
def _(new_keys: torch.Tensor, *_: torch.Tensor) -> None:
    return None
