"""The same attention in plain PyTorch: what the kernels are compared with, and what runs where there is no GPU."""

from __future__ import annotations

import torch

from lookfar.gpu.table import DIRECT, LOW, PATH, SEEN, SLOT


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Queries [1, heads, rows, dim] against buffers [slots, key heads, cells, dim] → [1, rows, heads, dim]."""
    rows = query.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    about = table[0, 0, :rows].long()
    slot, direct, seen, low = (about[:, column, None] for column in (SLOT, DIRECT, SEEN, LOW))
    key = torch.arange(int(seen.max()), device=query.device)[None]
    on_path = about[:, PATH:].gather(1, (key - direct).clamp(0, about.shape[1] - PATH - 1))
    cell = torch.where(key < direct, key, on_path).clamp(0, keys.shape[2] - 1)
    sees = (key < seen) & (key >= low)  # [rows, keys]
    k, v = (buffer[slot, :, cell].to(exact) for buffer in (keys, values))  # [rows, keys, key heads, dim]
    q = query[0].transpose(0, 1).to(exact)
    q = q.reshape(rows, keys.shape[1], -1, q.shape[-1])  # [rows, key heads, group, dim]
    scores = torch.einsum("rhgd,rkhd->rhgk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
    if sinks is not None:
        beside = sinks.to(exact).view(1, *q.shape[1:3], 1).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, beside], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[1]]  # padding sees nothing
    mixed = torch.einsum("rhgk,rkhd->rhgd", weights, v)
    return mixed.flatten(1, 2)[None].to(query.dtype)


def best(logits: torch.Tensor, top: int) -> torch.Tensor:
    """[rows, 1 + 2 × top]: the choice of each row, its best tokens, and the bits of their logits."""
    scores = logits.float()  # as transformers compares them
    columns = [scores.argmax(-1, keepdim=True).int()]
    if top:
        values, ids = scores.topk(min(top, scores.shape[-1]), -1)
        columns += [ids.int(), values.view(torch.int32)]
    return torch.cat(columns, -1)
