"""The random numbers of sampling, known before they are needed.

`torch.multinomial` draws one sample as argmax(p / q), with q exponentially distributed and drawn for the whole
vocabulary of all sequences at once. So the noise belongs to a place of the output, whatever is chosen there, and the
place's token is a function of its logits: a draft tree can be verified under sampling as it is under argmax, and
guesses can be ranked with the noise that they will meet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from lookfar.arrays import Floats

KEPT_BYTES = 256 << 20  # noise kept for sequences that lag behind; what is dropped can be drawn again
AHEAD = 8  # places that guesses are ranked for; as many behind them are made ready while a GPU works
AHEAD_BYTES = 64 << 20


class Noise:
    """The noise of one call with `batch` sequences, in the order in which `generate` would draw it."""

    def __init__(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.batch = batch
        self.source = generator if generator is not None else default_generator(device)
        self.device = self.source.device
        self._ahead = torch.Generator(self.device)
        self._states = [self.source.get_state()]  # of the generator before each place
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._heads = [0] * batch  # the place where each sequence is
        self.width = 0  # of the vocabulary, known when the first logits are
        self.ahead = 0  # places that are looked at before they are there
        self.coming: Floats = np.zeros((batch, 0, 0), np.float32)  # [batch, places modulo their number, vocabulary]
        self._buffer = torch.empty(0)  # the same
        self._copied = [0] * batch  # up to which place each sequence has its noise in `coming`

    def at(self, place: int, row: int, width: int) -> torch.Tensor:
        """The noise for one place of one sequence, [vocabulary]."""
        self.width = width
        return self._draw(place)[row]

    def go_on(self, row: int, place: int) -> None:
        """A sequence is at `place` now: what lies behind all of them is needed no more."""
        self._heads[row] = place
        for old in [old for old in self._kept if old < min(self._heads)]:
            del self._kept[old]

    def look_ahead(self, row: int) -> None:
        """See to it that the noise of a sequence's next places is in `coming`."""
        if not self.coming.shape[2]:
            self.ahead = min(AHEAD, AHEAD_BYTES // (8 * self.batch * self.width))
            shape, pinned = (self.batch, 2 * self.ahead, self.width), self.device.type == "cuda"
            self._buffer = torch.zeros(shape, pin_memory=pinned)
            self.coming = self._buffer.numpy()
        self._copy(row, self._heads[row] + self.ahead)

    def prepare(self, row: int) -> None:
        """Begin to do so for the next steps. The device is waited for before those, so nothing has to be here."""
        if self.ahead and self.device.type == "cuda":
            self._copy(row, self._heads[row] + 2 * self.ahead, wait=False)

    def _copy(self, row: int, end: int, wait: bool = True) -> None:
        """Copy the noise of a sequence's places up to `end` to the host, as far as it is not there."""
        for place in range(max(self._copied[row], self._heads[row]), end):
            to = self._buffer[row, place % (2 * self.ahead)]
            to.copy_(self._draw(place)[row], non_blocking=not wait)
        self._copied[row] = max(self._copied[row], end)

    def settle(self, steps: int) -> None:
        """Leave the generator where plain decoding in so many steps would have left it."""
        for place in range(len(self._states) - 1, steps):
            self._draw(place)
        self.source.set_state(self._states[steps])

    def _draw(self, place: int) -> torch.Tensor:
        """The noise of all sequences at a place, [batch, vocabulary]."""
        if place in self._kept:
            self._kept.move_to_end(place)
            return self._kept[place]
        while True:
            drawing = min(place, len(self._states) - 1)
            self._ahead.set_state(self._states[drawing])
            noise = torch.empty(self.batch, self.width, device=self.device).exponential_(1, generator=self._ahead)
            if drawing == len(self._states) - 1:
                self._states.append(self._ahead.get_state())
            self._kept[drawing] = noise
            while len(self._kept) > 1 and len(self._kept) * noise.nbytes > KEPT_BYTES:
                self._kept.popitem(last=False)
            if drawing == place:
                return noise


@dataclass(frozen=True, slots=True)
class Draws:
    """One sequence's share of the noise."""

    noise: Noise
    row: int

    def at(self, place: int, width: int) -> torch.Tensor:
        return self.noise.at(place, self.row, width)

    def go_on(self, place: int) -> None:
        self.noise.go_on(self.row, place)

    def prepare(self) -> None:
        self.noise.prepare(self.row)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    module.init()
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator
