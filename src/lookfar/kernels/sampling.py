"""Sampling on the device: softmax, division by each row's noise, and argmax, without asking the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookfar.kernels.topk import top_k

BLOCK = 2048  # tokens of the vocabulary that one program divides
NO_TOKEN = -1  # sampled where the scores are NaN


@triton.jit
def divide_by_noise(probabilities, addresses, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0), tl.program_id(1)
    address = tl.load(addresses + row)
    if address != 0:  # otherwise nothing is sampled after this row
        noise = address.to(tl.pointer_type(tl.float32))
        token = block * BLOCK + tl.arange(0, BLOCK)
        at = probabilities + row.to(tl.int64) * width + token
        inside = token < width
        divided = tl.div_rn(tl.load(at, inside, 0.0), tl.load(noise + token, inside, 1.0))
        tl.store(at, divided, inside)


def sample(scores: torch.Tensor, addresses: torch.Tensor) -> torch.Tensor:
    """[rows]: the token sampled from each row of scores, [rows, vocabulary].

    `addresses` holds where each row's noise lies in memory; 0: none, and the most likely token is returned.
    """
    probabilities = torch.softmax(scores, -1)
    is_nan = probabilities[:, 0].isnan()  # softmax makes all numbers of a row NaN, or none
    rows, width = probabilities.shape
    divide_by_noise[(rows, triton.cdiv(width, BLOCK))](probabilities, addresses, width, BLOCK=BLOCK)
    return top_k(probabilities, 0)[:, 0].masked_fill(is_nan, NO_TOKEN)
