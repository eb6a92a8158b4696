"""Top-k over the vocabulary in two small kernels; torch's own takes ten times as long for a few rows.

A logit and the place of its token are one integer, the *key*: the bits of the logit in the order of its values, then
the place, counted backwards. So no two keys are equal, the largest one is the top logit with the first of its tokens,
and one reduction finds both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tokens of the vocabulary that one program reads: with one warp, no reduction has to synchronize


@triton.jit
def order_bits(bits, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn the bits of floats, as signed integers, into integers with the order of the floats, and back."""
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def top_of_block(  # type: ignore[no-untyped-def]
    logits, keys, stride, width, blocks, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, NONE: tl.constexpr
):
    """Find the top keys of a block; `NONE` where there are no more tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inside = block * BLOCK + place < width
    logit = tl.load(logits + row.to(tl.int64) * stride + block * BLOCK + place, inside, 0.0)
    logit = tl.where(logit == logit, tl.where(logit == 0.0, 0.0, logit), float("-inf"))  # -0 equals 0, NaN is least
    logit = logit.to(logits.dtype.element_ty)
    bits = logit.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(keys.dtype.element_ty)
    left = tl.where(inside, (order_bits(bits, BITS) << BITS) | ((1 << BITS) - 1 - place.to(bits.dtype)), NONE)
    to = keys + (row * blocks + block) * K
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        tl.store(to + k, best)
        left = tl.where(left == best, NONE, left)


@triton.jit
def top_of_row(  # type: ignore[no-untyped-def]
    keys,
    logits,
    out,
    found,
    KEEP: tl.constexpr,
    K: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    NONE: tl.constexpr,
):
    """Combine the results of the blocks to [top token, `KEEP` top tokens, the bits of their logits]."""
    row = tl.program_id(0)
    entry, last = tl.arange(0, PAD), (1 << BITS) - 1
    keys += row * found
    key = tl.load(keys + entry, entry < found, NONE)
    # Entries are sorted by block and, where logits are equal, by token: their own place decides among equal ones.
    left = tl.where(key == NONE, NONE, (key | last) - entry.to(key.dtype))
    to = out + row * (1 + 2 * KEEP)
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        at = last - (best & last)
        first = (at // K * BLOCK + last - (tl.load(keys + at, best != NONE, 0) & last)).to(tl.int32)
        if k == 0:
            tl.store(to, first)
        if KEEP > 0:
            bits = order_bits(best >> BITS, BITS)
            if BITS == 16:
                logit = bits.to(tl.int16).to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
                bits = logit.to(tl.int32, bitcast=True)
            tl.store(to + 1 + k, first)
            tl.store(to + 1 + KEEP + k, bits.to(tl.int32))
        left = tl.where(left == best, NONE, left)


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, 1 + 2k]: the top token of each row, its k top tokens, and the bits of their logits."""
    rows, width = logits.shape
    blocks, most, bits = triton.cdiv(width, BLOCK), max(k, 1), 8 * logits.element_size()
    keys = torch.empty(rows, blocks, most, dtype=torch.int32 if bits == 16 else torch.int64, device=logits.device)
    out = torch.empty(rows, 1 + 2 * k, dtype=torch.int32, device=logits.device)
    layout: dict[str, Any] = {"K": most, "BLOCK": BLOCK, "BITS": bits, "NONE": torch.iinfo(keys.dtype).min}
    top_of_block[(rows, blocks)](logits, keys, logits.stride(0), width, blocks, **layout, num_warps=1)
    pad = triton.next_power_of_2(blocks * most)
    top_of_row[(rows,)](keys, logits, out, blocks * most, KEEP=k, PAD=pad, **layout)
    return out
