"""A binary max-heap of node indices in a flat array: the highest score first, and of equal ones the lowest index."""

from __future__ import annotations

from lookfar.core.jit import jit


@jit
def precedes(scores, node, other):  # type: ignore[no-untyped-def]
    return scores[node] > scores[other] or (scores[node] == scores[other] and node < other)


@jit
def push(heap, size, scores, node):  # type: ignore[no-untyped-def]
    """Insert a node and return the new size."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        if precedes(scores, heap[above], node):
            break
        heap[place] = heap[above]
        place = above
    heap[place] = node
    return size + 1


@jit
def pop(heap, size, scores):  # type: ignore[no-untyped-def]
    """Remove the node with the highest score and return it with the new size."""
    top, last = heap[0], heap[size - 1]
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and precedes(scores, heap[below + 1], heap[below]):
            below += 1
        if precedes(scores, last, heap[below]):
            break
        heap[place] = heap[below]
        place = below
    heap[place] = last
    return top, size
