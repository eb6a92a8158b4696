"""How large the cache is made: as much as makes steps worth capturing, and no more than there is memory for."""

from __future__ import annotations

import torch

from lookfar.errors import CapacityError

SMALLEST = 1024  # cells of a slot
SHARE = 0.5  # of the free memory is taken without need; growing later means capturing anew
GIB = 1 << 30


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: what the driver has, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def cache_size(
    slots: int, cells: int, most_slots: int, cell_bytes: int, graph_bytes: int, free: int
) -> tuple[int, int]:
    """Slots and cells for at least what is asked for; `graph_bytes` are left for the steps."""
    generous = most_slots, max(SMALLEST, 1 << (cells - 1).bit_length())
    if generous[0] * (generous[1] + 1) * cell_bytes <= SHARE * free - graph_bytes:
        return generous
    cells = -(-cells // 64) * 64
    needed = slots * (cells + 1) * cell_bytes
    if needed > free - graph_bytes:
        raise CapacityError(
            f"The keys and values of {slots} sequences of {cells} tokens need {needed / GIB:.1f} GiB, and "
            f"{max(free - graph_bytes, 0) / GIB:.1f} GiB are free: lower max_batch, max_length or max_new_tokens."
        )
    return slots, cells
