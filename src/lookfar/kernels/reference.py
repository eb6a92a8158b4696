"""PyTorch references of the kernels, for tests and for machines without a GPU."""

from __future__ import annotations

import torch

from lookfar.kernels.row_table import KV_LEN, PREFIX_LEN, SLOT, TREE_PATH, WINDOW_START


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend with queries [1, heads, rows, dim] to buffers [slots, kv heads, positions, dim] → [1, rows, heads, dim].

    `table` is a row table, [1, 1, rows + tiles, columns].
    """
    rows = query.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    entry = table[0, 0, :rows].long()
    slot, prefix_len, kv_len, window_start = (
        entry[:, column, None] for column in (SLOT, PREFIX_LEN, KV_LEN, WINDOW_START)
    )
    key = torch.arange(int(kv_len.max()), device=query.device)[None]
    on_path = entry[:, TREE_PATH:].gather(1, (key - prefix_len).clamp(0, entry.shape[1] - TREE_PATH - 1))
    position = torch.where(key < prefix_len, key, on_path).clamp(0, keys.shape[2] - 1)
    visible = (key < kv_len) & (key >= window_start)  # [rows, keys]
    k, v = (buffer[slot, :, position].to(exact) for buffer in (keys, values))  # [rows, keys, kv heads, dim]
    q = query[0].transpose(0, 1).to(exact)
    q = q.reshape(rows, keys.shape[1], -1, q.shape[-1])  # [rows, kv heads, group, dim]
    scores = torch.einsum("rhgd,rkhd->rhgk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        beside = sinks.to(exact).view(1, *q.shape[1:3], 1).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, beside], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[1]]  # padding sees nothing
    mixed = torch.einsum("rhgk,rkhd->rhgd", weights, v)
    return mixed.flatten(1, 2)[None].to(query.dtype)


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, 1 + 2k]: the top token of each row, its k top tokens, and the bits of their logits."""
    scores = logits.float()  # as transformers compares them
    columns = [scores.argmax(-1, keepdim=True).int()]
    if k:
        values, ids = scores.topk(min(k, scores.shape[-1]), -1)
        columns += [ids.int(), values.view(torch.int32)]
    return torch.cat(columns, -1)


def write_kv(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write each row's keys and values, [1, heads, rows, dim], to its slot and position."""
    keys[slots, :, positions] = new_keys[0].transpose(0, 1)
    values[slots, :, positions] = new_values[0].transpose(0, 1)
