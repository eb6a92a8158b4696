"""Sampling noise: the random numbers of a call, known before they are needed.

`torch.multinomial` draws one sample as argmax(p / q), where q is exponentially distributed and drawn for the whole
vocabulary of all rows of a batch at once. The noise q therefore belongs to a position of the output, whatever token is
chosen there, and the token is a function of the logits and the noise. A draft tree can be verified under sampling just
as under argmax, and drafts can be ranked with the noise that they will meet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from lookfar.core.arrays import Floats
from lookfar.core.locks import fork_safe_lock
from lookfar.sampling.noise_addresses import NoiseAddresses
from lookfar.sampling.noise_draws import NoiseDraws

# Noise that is kept for requests that lag behind; dropped noise is drawn again when needed. The requests of a batch are
# soon a hundred positions apart, so on a GPU it may be more, as a share of its free memory.
KEPT_BYTES, KEPT_SHARE = 256 << 20, 0.1
LOOK_AHEAD = 8  # positions that drafts are ranked for; as many behind them are prefetched while a GPU works
LOOK_AHEAD_BYTES = 64 << 20
MAX_COPIED = 4  # requests whose noise is copied from a GPU
NEVER = 1 << 62  # the next position of a request that has ended


@dataclass(frozen=True, slots=True)
class KeptNoise:
    """Noise of one position, of all requests of a call or of some."""

    noise: torch.Tensor  # [requests, vocabulary]
    places: range | dict[int, int]  # by request, its place in `noise`
    drawn: torch.Tensor  # [positions, requests, vocabulary]: what was drawn at once
    index: int  # of the position in it
    address: int  # in memory
    row_bytes: int

    @classmethod
    def of(cls, drawn: torch.Tensor, index: int, places: range | dict[int, int]) -> KeptNoise:
        noise = drawn[index]
        return cls(noise, places, drawn, index, noise.data_ptr(), noise.stride(0) * noise.element_size())


_borrowed: WeakValueDictionary[int, SamplingNoise] = WeakValueDictionary()  # by the id of the generator
_borrowing = fork_safe_lock()


class SamplingNoise:
    """The noise of one call with `batch` requests, in the order in which `generate` would draw it.

    A call borrows the state of its generator and puts it back where `generate` would leave it, unless the generator was
    seeded or used meanwhile. While another call has borrowed the same generator, a call draws a seed from the generator
    instead, so concurrent calls get streams of their own.
    """

    def __init__(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.batch = batch
        self.source = generator if generator is not None else default_generator(device)
        self.device = self.source.device
        self._draws = NoiseDraws(self.device)
        self._states: list[torch.Tensor] = []  # of the generator before each position
        self._kept: OrderedDict[int, KeptNoise] = OrderedDict()  # by position, least recently used first
        self._most = KEPT_BYTES
        self._asked = self.device.type != "cuda"  # whether it is known if there is memory for more
        self._kept_bytes = 0
        self.addresses = NoiseAddresses(batch)
        self._heads = [0] * batch  # the next position of each request
        self._begun = [False] * batch  # whether a request has asked for noise, or still waits for its turn
        self._first_head, self._num_first = 0, batch  # the least of them, and how many requests are there
        self._num_running = batch
        self._used = 0  # positions that tokens were chosen at
        self.width = 0  # of the vocabulary, known with the first logits
        self.look_ahead = 0  # positions whose noise is looked at early
        self.upcoming: Floats = np.zeros(
            (batch, 0, 0), np.float32
        )  # [batch, positions modulo their number, vocabulary]
        self._buffer = torch.empty(0)  # the same memory
        self._copied = [0] * batch  # up to which position each request has its noise in `upcoming`

    def start(self) -> None:
        """Take the random stream of this call from the generator."""
        with _borrowing:
            if self._states:
                return
            owner = _borrowed.setdefault(id(self.source), self)
            if owner is self:
                self._states.append(self.source.get_state())
            else:
                seed = torch.empty((), dtype=torch.int64, device=self.device).random_(generator=self.source)
                self._states.append(self._draws.seed(int(seed)))

    def finish(self, steps: int | None = None) -> None:
        """Leave the generator where `generate` leaves it after so many steps; by default those that were taken."""
        self.start()
        steps = self._used if steps is None else steps
        while len(self._states) <= steps:
            self.draw(len(self._states) - 1)
        with _borrowing:
            if _borrowed.get(id(self.source)) is self:
                if torch.equal(self.source.get_state(), self._states[0]):  # otherwise it was seeded or used meanwhile
                    self.source.set_state(self._states[steps])
                del _borrowed[id(self.source)]

    def at(self, position: int, row: int, width: int) -> torch.Tensor:
        """Return the noise for one position of one request, [vocabulary]."""
        self.width = width
        self._used = max(self._used, position + 1)
        return self._noise_of(position, row)

    def find(self, row: int, positions: range, width: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return where the noise for some positions of one request lies, and what has to be kept until it is read."""
        self.width = width
        self._used = max(self._used, positions.stop)
        found = [self._find(position, row) for position in positions]
        return [kept.address + kept.places[row] * kept.row_bytes for kept in found], [kept.noise for kept in found]

    def use(self, row: int, end: int, width: int) -> None:
        """Note that a request needs its noise at its next positions, before `end`."""
        self.width = width
        self._used = max(self._used, end)
        self._begun[row] = True
        self.addresses.reach(end)

    def advance(self, row: int, position: int) -> None:
        """Note that a request is at `position` now; noise that no request needs any more is dropped."""
        was_first, self._heads[row] = self._heads[row] == self._first_head, position
        self._num_first -= was_first and position > self._first_head
        if not self._num_first:
            self._first_head = min(self._heads)
            self._num_first = self._heads.count(self._first_head)
            for old in [old for old in self._kept if old < self._first_head]:
                self._drop(old)

    def release(self, row: int) -> None:
        """Note that a request has ended, so that no noise is kept for it."""
        self._num_running -= self._heads[row] != NEVER
        self.advance(row, NEVER)

    @property
    def is_known(self) -> bool:
        """Whether drafts are ranked with it: noise on a GPU has to be copied, which pays for a few requests only."""
        return self.width > 0 and (self.device.type == "cpu" or self._num_running <= MAX_COPIED)

    def fetch(self, row: int) -> None:
        """Copy the noise of a request's next positions into `upcoming`."""
        if not self.upcoming.shape[2]:
            self.look_ahead = min(LOOK_AHEAD, LOOK_AHEAD_BYTES // (8 * self.batch * self.width))
            shape, pinned = (self.batch, 2 * self.look_ahead, self.width), self.device.type == "cuda"
            self._buffer = torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
            self.upcoming = self._buffer.numpy()
        self._copy(row, self._heads[row] + self.look_ahead)

    def prefetch(self, row: int) -> None:
        """Start copying the noise of later positions; the device is waited for before they are read."""
        if self.look_ahead and self.device.type == "cuda" and self.is_known:
            self._copy(row, self._heads[row] + 2 * self.look_ahead, wait=False)

    def _copy(self, row: int, end: int, wait: bool = True) -> None:
        if self._heads[row] == NEVER:
            return
        position, size = max(self._copied[row], self._heads[row]), 2 * self.look_ahead
        while position < end:
            kept, count = self._find(position, row), 1
            while position + count < end and (position + count) % size:  # those drawn with it are copied with it
                behind = self._kept.get(position + count)
                if behind is None or behind.drawn is not kept.drawn:
                    break
                count += 1
            to = self._buffer[row, position % size : position % size + count]
            to.copy_(kept.drawn[kept.index : kept.index + count, kept.places[row]], non_blocking=not wait)
            position += count
        self._copied[row] = max(self._copied[row], end)

    def _noise_of(self, position: int, row: int) -> torch.Tensor:
        """Return the noise of one request at a position, [vocabulary]."""
        kept = self._find(position, row)
        return kept.noise[kept.places[row]]

    def _find(self, position: int, row: int) -> KeptNoise:
        """Return noise of a position that one request is among."""
        self._begun[row] = True
        kept = self._kept.get(position)
        if kept is None or row not in kept.places:
            kept = self.draw(position)
        self._kept.move_to_end(position)
        return kept

    def draw(self, position: int) -> KeptNoise:
        """Draw the noise of all requests at a position, after that of positions before it where it is new."""
        self.start()
        while True:
            first = min(position, len(self._states) - 1)
            is_new = first == len(self._states) - 1
            count = self._draws.positions(self.batch, self.width) if is_new else 1
            noise, states = self._draws.draw(self._states[first], (count, self.batch, self.width))
            if is_new:
                self._states += states
            for index in range(count):
                self._keep(first + index, KeptNoise.of(noise, index, range(self.batch)))
                self._kept.move_to_end(first + index)
            self._make_room(min(position, first + count - 1))
            if position < first + count:
                return self._kept[position]

    def _keep(self, position: int, kept: KeptNoise) -> None:
        before = self._kept.get(position)
        self._kept_bytes += kept.noise.nbytes - (before.noise.nbytes if before is not None else 0)
        self._kept[position] = kept
        self.addresses.set(position, kept.address, kept.places)

    def _drop(self, position: int) -> None:
        self._kept_bytes -= self._kept.pop(position).noise.nbytes
        self.addresses.drop(position)

    def _make_room(self, position: int) -> None:
        """Keep no more noise than allowed, that of `position` in any case.

        Requests that wait for their turn need the noise of all positions, which is too much for a large call, so theirs
        is dropped first. Running requests are at different positions: one drawing serves all that have it before them.
        """
        if self._kept_bytes > self._most and not self._asked:
            free, _ = torch.cuda.mem_get_info(self.device)
            self._most, self._asked = max(self._most, int(KEPT_SHARE * free)), True
        if self._kept_bytes <= self._most:
            return
        self._kept.move_to_end(position)
        for place, kept in list(self._kept.items()):
            if self._kept_bytes <= self._most:
                return
            rows = [row for row in kept.places if self._begun[row] and self._heads[row] <= place]
            if len(rows) < len(kept.noise):
                fewer = kept.noise[[kept.places[row] for row in rows]]
                self._keep(place, KeptNoise.of(fewer[None], 0, {row: at for at, row in enumerate(rows)}))
        while self._kept_bytes > self._most and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))


@dataclass(frozen=True, slots=True)
class RandomStream:
    """One request's row of the noise."""

    noise: SamplingNoise
    row: int

    def at(self, position: int, width: int) -> torch.Tensor:
        return self.noise.at(position, self.row, width)

    def addresses(self, positions: range, width: int) -> tuple[list[int], list[torch.Tensor]]:
        return self.noise.find(self.row, positions, width)

    def advance(self, position: int) -> None:
        self.noise.advance(self.row, position)

    def release(self) -> None:
        self.noise.release(self.row)

    def prefetch(self) -> None:
        self.noise.prefetch(self.row)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that `torch.manual_seed` seeds for a device."""
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
