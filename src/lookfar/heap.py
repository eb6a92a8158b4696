"""A heap of candidates by score, the best on top, in a flat array."""

from __future__ import annotations

from lookfar.jit import jit


@jit
def push(heap, size, scores, candidate):  # type: ignore[no-untyped-def]
    place = size
    while place > 0:
        above = (place - 1) // 2
        if scores[heap[above]] >= scores[candidate]:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = candidate
    return size + 1


@jit
def pop(heap, size, scores):  # type: ignore[no-untyped-def]
    top, last = heap[0], heap[size - 1]
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and scores[heap[below + 1]] > scores[heap[below]]:
            below += 1
        if scores[heap[below]] <= scores[last]:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = last
    return top, size
