"""Where kept noise lies in memory, for compiled code that looks it up for all requests of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lookfar.core.addresses import address_of, ints_at, longs_at
from lookfar.core.arrays import Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.plan import RowSampler

FOUND = -1
REDRAWS = 8  # in a step, beside one for each position: more would mean that noise is dropped before it is read


class NoiseAddresses:
    """The noise of one call by position: where that of its first request lies, and the places of requests in it."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        # [positions, 2] the address of the noise, 0 for none, and that of the places, 0 if each request has its own
        self._table: Ints = np.zeros((256, 2), np.int64)
        self._places: dict[int, Int32s] = {}
        self.table_address = address_of(self._table)

    def reach(self, end: int) -> None:
        """Have room for all positions before `end`: compiled code does not check it."""
        if end > len(self._table):
            self._table = np.append(self._table, np.zeros((end, 2), np.int64), 0)
            self.table_address = address_of(self._table)

    def set(self, position: int, address: int, places: range | dict[int, int]) -> None:
        """Note the noise of a position, of all requests in their order or of some."""
        self.reach(position + 1)
        self._places.pop(position, None)
        self._table[position] = address, 0
        if isinstance(places, dict):
            by_row: Int32s = np.full(self._batch, -1, np.int32)
            by_row[list(places)] = list(places.values())
            self._places[position] = by_row
            self._table[position, 1] = address_of(by_row)

    def drop(self, position: int) -> None:
        self._table[position] = 0
        self._places.pop(position, None)


def set_addresses(by_depth: Ints, samplers: Mapping[int, RowSampler], deepest: Ints, width: int) -> bool:
    """Set where the noise of the requests of a step lies: for the next token and for those up to `deepest` behind it.

    Requests are known by their rows in `by_depth`. False if their noise cannot be kept all at the same time; then each
    request has to ask for its own.
    """
    streams = [sampler.random for sampler in samplers.values()]
    positions = [sampler.num_emitted for sampler in samplers.values()]
    depths = deepest[list(samplers)]
    for stream, position, depth in zip(streams, positions, depths.tolist(), strict=True):
        stream.noise.use(stream.row, position + depth + 1, width)
    requests = np.array([list(samplers), [stream.row for stream in streams], positions, depths], np.int64)
    for _ in range(REDRAWS + int(depths.sum()) + len(streams)):
        tables = np.array([stream.noise.addresses.table_address for stream in streams])
        missing, position = read_addresses(by_depth, requests, tables, 4 * width)
        if missing == FOUND:
            return True
        streams[missing].noise.draw(position)
    return False


@jit
def read_addresses(by_depth, requests, tables, row_bytes):  # type: ignore[no-untyped-def]
    """Set the addresses of the noise of requests; return a request whose noise at a position is not kept, and that.

    `requests` are their rows in `by_depth`, their rows in the noise, their next positions, and how far they look ahead.
    """
    for i in range(len(tables)):
        place, row, position, depths = requests[:, i]
        table = longs_at(tables[i], (position + depths + 1, 2))
        for depth in range(depths + 1):
            address, places = table[position + depth]
            own = np.int64(ints_at(places, row + 1)[row]) if places else row
            if not address or own < 0:
                return i, position + depth
            by_depth[place, depth] = address + own * row_bytes
    return FOUND, 0
