"""The arguments of a compiled step: tables of numbers and addresses, which cost compiled code nothing to pass on.

(An array counts its users. With several threads that alone would take longer than a small product.)
"""

from __future__ import annotations

import numpy as np

from lookfar.kernels.cpu.vectors import TILE_ROWS

BLOCK = TILE_ROWS[-1]  # rows of a block: as many as the largest tile has
SIZES = np.array([min(size for size in TILE_ROWS if size >= rows) for rows in range(1, BLOCK + 1)])

# About a step: sizes, then addresses.
(
    HIDDEN,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    INNER,
    VOCAB,
    ROWS,
    REQUESTS,
    LOGIT_ROWS,
    TOP_K,
    NUM_LAYERS,
    SLOT_STEP,
    HEAD_STEP,
    SCRATCH_STEP,
    COUNTERS,  # of the barrier, and of the work that is taken in each phase
    LAYERS,  # [layers, LAYER_COLUMNS]
    REQUEST_TABLE,  # [requests, REQUEST_COLUMNS]
    VISIBLE,  # bytes: [rows, rows] of each request, which rows of the step each row sees
    SEEN_FROM,  # [kinds of layers, rows] the first position that each row sees
    POSITIONS,  # [rows]
    COS,  # [rows, head dim]
    SIN,
    STATES,  # [rows, hidden] the embeddings, and in the end the hidden states
    BLOCKS,  # rows in blocks
    QKV_ROWS,  # [rows, queries and keys and values]
    INNER_BLOCKS,  # the attention's outputs and the MLP's inner states, in blocks
    SCRATCH,  # of each thread
    CHOSEN,  # [logit rows] the rows whose logits are wanted
    FINAL_NORM,
    HEAD,
    HEAD_FORMAT,
    LOGITS,  # [logit rows, vocabulary], both padded
    TOP_IDS,  # [logit rows, top k] 32-bit
    TOP_LOGITS,
    STEP_COLUMNS,
) = range(35)

# About a layer: addresses of packed weights, of vectors (0: none) and of KV buffers, its kind of attention, and the
# formats of the weights.
(
    QKV,
    OUT,
    GATE,
    UP,
    DOWN,
    NORM,
    MLP_NORM,
    Q_NORM,
    K_NORM,
    Q_BIAS,
    K_BIAS,
    V_BIAS,
    KEYS,
    VALUES,
    KIND,
    FORMATS,  # of the five matrices, in their order: see tiles.py
    LAYER_COLUMNS,
) = (*range(16), 20)

# About a request: its first row, its rows, its cached tokens, its slot, and where its part of VISIBLE begins.
FIRST, COUNT, CACHED, SLOT, SEES, REQUEST_COLUMNS = range(6)
PHASES = 8  # of a layer, each of which ends when all threads are done


def padded(rows: int) -> int:
    """Return the rows of all blocks together."""
    full = rows // BLOCK * BLOCK
    return full + (int(SIZES[rows - full - 1]) if rows > full else 0)


def num_counters(layers: int) -> int:
    return 1 + PHASES * layers + 3  # the phases of the logits


def scratch_size(head_dim: int, keys: int) -> int:
    """Return the vectors that a thread needs for itself."""
    return max(2 * head_dim + 1 + keys, 2 * BLOCK)
