"""Sampled tokens, drawn on the device behind a step: the processors and the draw as one more graph.

Every row of a step may take its token at another place of the output, and so with other noise (see noise.py). The host
tells where in the device's memory each row's noise lies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from transformers import LogitsProcessorList

from lookfar.choose import NO_TOKEN, scores_of_all
from lookfar.gpu.best import best
from lookfar.gpu.captured import recorded
from lookfar.tree import Plan

if TYPE_CHECKING:
    from lookfar.sequence import Sequence

BLOCK = 2048  # tokens of the vocabulary divided by one program


@triton.jit
def divide_by_noise(chances, addresses, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0), tl.program_id(1)
    address = tl.load(addresses + row)
    if address != 0:  # otherwise nothing is drawn after this row
        noise = address.to(tl.pointer_type(tl.float32))
        token = block * BLOCK + tl.arange(0, BLOCK)
        at = chances + row.to(tl.int64) * width + token
        inside = token < width
        odds = tl.div_rn(tl.load(at, inside, 0.0), tl.load(noise + token, inside, 1.0))
        tl.store(at, odds, inside)


def draw(logits: torch.Tensor, processors: LogitsProcessorList | None, addresses: torch.Tensor) -> torch.Tensor:
    """[rows]: what `pick_all` draws after each row that has noise, without asking the host for anything."""
    chances = torch.softmax(scores_of_all(processors, logits), -1)
    no_number = chances[:, 0].isnan()  # softmax makes a row's numbers all or none
    rows, width = chances.shape
    divide_by_noise[(rows, triton.cdiv(width, BLOCK))](chances, addresses, width, BLOCK=BLOCK)
    return best(chances, 0)[:, 0].masked_fill(no_number, NO_TOKEN)


class Drawing:
    """The drawn tokens of a step's rows, for one shape of step and one list of processors."""

    def __init__(self, logits: torch.Tensor, processors: LogitsProcessorList | None, pool: Any) -> None:
        rows, self.width = logits.shape
        self.drawn = torch.zeros(rows, dtype=torch.int32, pin_memory=True)
        self._addresses = torch.zeros(rows, dtype=torch.int64, pin_memory=True)  # of each row's noise; 0: none
        self._noise: list[torch.Tensor] = []  # must not go before the tokens are drawn
        self._on_device = torch.zeros(rows, dtype=torch.int64, device=logits.device)

        def run() -> None:
            self._on_device.copy_(self._addresses, non_blocking=True)
            self.drawn.copy_(draw(logits, processors, self._on_device), non_blocking=True)

        _, self._replay = recorded(run, pool)

    def launch(self, plan: Plan, group: Seq[Sequence]) -> None:
        """Draw behind the rows of a step that was launched."""
        addresses = self._addresses.numpy()
        addresses[:] = 0
        self._noise.clear()
        for sequence, rows, start in zip(group, plan.sequences, accumulate(plan.lengths, initial=0), strict=False):
            if sequence.request.draws is not None and rows.complete:
                places = sequence.places(rows).tolist()
                noise = {place: sequence.request.draws.at(place, self.width) for place in dict.fromkeys(places)}
                first = start + rows.root_row
                addresses[first : first + len(places)] = [noise[place].data_ptr() for place in places]
                self._noise += noise.values()
        self._replay()
