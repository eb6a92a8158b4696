"""The size of the KV cache: large enough that graphs are rarely captured again, and never more than fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lookfar.errors import CapacityError

MIN_LENGTH = 1024  # positions of a slot
FREE_SHARE = 0.5  # of the free memory may be taken without need; growing later means capturing again
# Scores that are sampled on the device: a number of bytes, or a share of its memory, for a few copies of them.
SAMPLED_BYTES, SAMPLED_SHARE = 64 << 20, 0.001
GIB = 1 << 30


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated: free in the driver, and reserved by torch but unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@dataclass(frozen=True)
class MemoryBudget:
    """The free memory of a device, and the needs of the KV cache and of captured steps."""

    position_bytes: int  # of one KV position in all layers
    graph_bytes: int  # left for captured steps
    free: int

    def cache_size(self, slots: int, length: int, most: int) -> tuple[int, int]:
        """Return the slots and the length to allocate for at least what is asked for."""
        generous = most, max(MIN_LENGTH, 1 << (length - 1).bit_length())
        if generous[0] * (generous[1] + 1) * self.position_bytes <= FREE_SHARE * self.free - self.graph_bytes:
            return generous
        length = -(-length // 64) * 64
        needed, left = slots * (length + 1) * self.position_bytes, max(self.free - self.graph_bytes, 0)
        if needed > left:
            raise CapacityError(
                f"The KV cache of {slots} requests of {length} tokens needs {needed / GIB:.1f} GiB, and "
                f"{left / GIB:.1f} GiB are free: lower max_batch, max_length or max_new_tokens."
            )
        return slots, length


def sampled_bytes(device: torch.device) -> int:
    """Return how large the scores of a step may be that are sampled on the device, whole rows at once.

    Those of larger steps are sampled row by row, as they are needed.
    """
    if device.type != "cuda":
        return SAMPLED_BYTES
    return max(SAMPLED_BYTES, int(SAMPLED_SHARE * torch.cuda.get_device_properties(device).total_memory))
