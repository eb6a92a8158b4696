"""The kernels against their PyTorch references: on a GPU as they are, on a CPU through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import DEVICE
from lookfar.core.arrays import Int32s
from lookfar.core.packed_kv import alike
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kernels import reference
from lookfar.kernels.attention import CHUNK, MIDDLE, SMALL, attend, chunks_for
from lookfar.kernels.gemv import gemv
from lookfar.kernels.in_order_linear import TILES, in_order_linear
from lookfar.kernels.kv_move import KVMover, write_rows
from lookfar.kernels.linear_op import linear
from lookfar.kernels.row_sum import row_sums
from lookfar.kernels.row_table import MAX_PATH, WIDTH, RowTable, max_tiles, step_arrays
from lookfar.kernels.topk import top_k
from lookfar.kvcache.base import KVState
from lookfar.kvcache.slots import SlotKVCache

pytestmark = pytest.mark.slow

POSITIONS = 420
LAST_BITS = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def random_tree(nodes: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = [[]]
    while len(paths) <= nodes:
        paths.append([*paths[rng.integers(len(paths))], len(paths)])
    return DraftTree.from_paths(paths[1:])


def table_of(plans: list[RequestPlan], rows: int, window: int = 0, chunk: int = 0) -> Int32s:
    tables = np.full((1, rows + max_tiles(rows, len(plans)), WIDTH), -7, np.int32)
    arrays = step_arrays(np.full((4, rows), -7, np.int64), tables, [(window, chunk)])
    assert RowTable(arrays, POSITIONS - 1).fill(StepPlan(plans), range(len(plans)))
    return tables


def tensors(
    plans: list[RequestPlan],
    rows: int,
    group: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    positions: int = POSITIONS,
):  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    query = random(1, rows, group * heads, k_dim).transpose(1, 2)
    keys, values = random(len(plans) + 1, heads, positions, k_dim), random(len(plans) + 1, heads, positions, v_dim)
    return query, keys, values, random(group * heads)


HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter knows no bfloat16


@pytest.mark.parametrize(
    ("dtype", "group", "heads", "dims", "cached", "nodes", "options"),
    [
        (torch.float32, 3, 3, (64, 64), [10, 0], [5, 7], {}),
        (torch.float32, 4, 2, (16, 16), [300, 97, 5], [20, 31, 2], {}),
        (torch.float32, 4, 2, (8, 24), [300, 97, 5], [20, 31, 2], {"window": 40, "softcap": 5.0, "sinks": True}),
        (torch.float32, 1, 2, (80, 80), [390], [5], {"chunk": 64}),
        (torch.float32, 71, 1, (16, 16), [300], [20], {}),  # more query heads than a tile has room for
        (torch.float32, 2, 1, (16, 16), [200], [80], {"window": 100}),
        (torch.float32, 2, 1, (16, 16), [124], [30], {}),  # rows of one tile whose far keys end at different places
        (torch.float32, 2, 1, (16, 16), [2900], [4], {"positions": 3000}),  # chunks of two sizes
        (torch.float32, 1, 1, (16, 16), [6000], [2], {"positions": 6100}),  # and of three
        (torch.float32, 2, 1, (128, 128), [300], [9], {}),  # wide rows, taken in smaller blocks
        (HALF, 2, 1, (192, 256), [300], [9], {}),
        (HALF, 4, 1, (32, 32), [600], [58], {"positions": 700}),
        (HALF, 4, 2, (64, 64), [300, 97, 5], [20, 31, 2], {"sinks": True}),
    ],
)
def test_kernels_and_references_agree(
    dtype: torch.dtype,
    group: int,
    heads: int,
    dims: tuple[int, int],
    cached: list[int],
    nodes: list[int],
    options: dict[str, float],
) -> None:
    plans = [RequestPlan(np.arange(3), c, tree=random_tree(n, n)) for c, n in zip(cached, nodes, strict=True)]
    used = sum(map(len, plans))
    rows = used + 3
    table = torch.from_numpy(table_of(plans, rows, int(options.get("window", 0)), int(options.get("chunk", 0))))
    query, keys, values, sinks = tensors(
        plans, rows, group, heads, *dims, dtype, int(options.get("positions", POSITIONS))
    )
    rest = (
        table[:, None].to(DEVICE),
        sinks if "sinks" in options else None,
        dims[0] ** -0.5,
        options.get("softcap", 0.0),
    )
    found, expected = attend(query, keys, values, *rest), reference.attend(query, keys, values, *rest)
    assert (found - expected).abs().max() < LAST_BITS[dtype] * max(1, expected.abs().max())
    assert not found[0, used:].any()  # padding


def test_chunks_cover_every_key_once() -> None:
    sizes = [CHUNK] * SMALL.value + [2 * CHUNK] * MIDDLE.value + [8 * CHUNK] * 10
    for keys in range(1, sum(sizes), 331):
        ends = np.cumsum(sizes)
        assert chunks_for(keys) == int(np.searchsorted(ends, keys)) + 1
    assert chunks_for(0) == 0


def test_the_reference_attends_like_torch() -> None:
    """A tree without branches is causal attention."""
    plans = [RequestPlan(np.arange(6), 20)]
    query, keys, values, _ = tensors(plans, 6, 2, 2, 16, 16, torch.float32)
    found = reference.attend(
        query, keys, values, torch.from_numpy(table_of(plans, 6))[:, None].to(DEVICE), None, 0.25, 0.0
    )
    k, v = (x[:1, :, :26].repeat_interleave(2, 1) for x in (keys, values))
    mask = torch.arange(26) <= torch.arange(20, 26)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, k, v, mask.to(DEVICE), scale=0.25)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("cached", [3, 40, 95, 300])
def test_a_row_is_the_same_to_the_last_bit_whatever_lies_beside_it(cached: int) -> None:
    """The row of a token after a path: as a node among others, and as the last token of a later step."""
    path = list(range(1, 9))
    wrong = [[90 + i, 80 + i, 70 + i] for i in range(12)]
    tree = DraftTree.from_paths([*wrong[:5], path, *wrong[5:]])
    last = 4 + len(tree) - 1  # behind the last token's row
    branched = RequestPlan(np.arange(4), cached, tree=tree)
    straight = RequestPlan(np.arange(4 + len(path)), cached)
    other = RequestPlan(np.arange(3), 77)
    # The same keys and values, and the same query, wherever the layout puts them.
    node_of, node = {}, -1
    for token in path:
        child = tree.child(node, token)
        assert child is not None
        node_of[token], node = child, child
    rows = 64
    query, keys, values, _ = tensors([branched, other], rows, 3, 2, 64, 64, HALF)
    keys2, values2, query2 = keys.clone(), values.clone(), query.clone()
    for depth, token in enumerate(path):
        here, there = cached + 4 + node_of[token], cached + 4 + depth
        keys2[1, :, there], values2[1, :, there] = keys[0, :, here], values[0, :, here]
    keys2[1, :, : cached + 4], values2[1, :, : cached + 4] = keys[0, :, : cached + 4], values[0, :, : cached + 4]
    keys2[0], values2[0] = keys[1], values[1]
    row, later = 4 + node_of[path[-1]], len(other) + 4 + len(path) - 1
    query2[:, :, later] = query[:, :, row]
    assert row <= last
    tables = [
        torch.from_numpy(table_of(plans, rows))[:, None].to(DEVICE) for plans in ([branched, other], [other, straight])
    ]
    one = attend(query, keys, values, tables[0], None, 0.125, 0.0)[0, row]
    two = attend(query2, keys2, values2, tables[1], None, 0.125, 0.0)[0, later]
    assert torch.equal(one, two)


@pytest.mark.parametrize("cached", [40, 700])
def test_a_row_is_the_same_to_the_last_bit_in_steps_of_any_size(cached: int) -> None:
    sizes = (1, 2, 64, 130)
    plans = [RequestPlan(np.zeros(1, np.int64), cached, tree=random_tree(rows - 1, rows)) for rows in sizes]
    query, keys, values, _ = tensors(plans[:1], max(sizes), 3, 1, 64, 64, HALF, cached + max(sizes))
    found = []
    for plan, rows in zip(plans, sizes, strict=True):
        tables = np.zeros((1, rows + max_tiles(rows, 1), WIDTH), np.int32)
        RowTable(step_arrays(np.zeros((4, rows), np.int64), tables, [(0, 0)]), cached).fill(StepPlan([plan]), [0])
        table = torch.from_numpy(tables)[:, None].to(DEVICE)
        found.append(attend(query[:, :, :rows], keys, values, table, None, 0.125, 0.0)[0, 0])
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("vocabulary", [30, 5000, 49152])
@pytest.mark.parametrize("top", [0, 8, 24])
def test_the_best_tokens(vocabulary: int, top: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # ties
    logits[1] -= 9.0  # all negative
    logits[2, :] = float("-inf")
    logits[2, ::2] = torch.randn(len(logits[2, ::2]))
    logits = logits.to(dtype).to(DEVICE)
    found, expected = top_k(logits, top), reference.top_k(logits, top)
    assert torch.equal(found[:, 0], expected[:, 0])
    values = found[:, 1 + top :].contiguous().view(torch.float32)
    assert torch.equal(values, expected[:, 1 + top :].contiguous().view(torch.float32))
    ids = found[:, 1 : 1 + top].long()
    assert torch.equal(logits.float().gather(1, ids), values)
    assert all(len(set(row)) == top for row in ids.tolist())
    in_order = np.argsort(-logits.float().cpu().numpy(), axis=1, kind="stable")  # the first of equal ones comes first
    assert (ids.cpu().numpy() == in_order[:, :top]).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_best_tokens_of_special_logits(dtype: torch.dtype) -> None:
    logits = torch.full((3, 2000), -1.0)
    logits[0, 1500], logits[0, 30] = 0.0, -0.0  # equal: the first one
    logits[1, 7], logits[1, 1999] = float("nan"), float("inf")
    logits[2] = float("-inf")
    found = top_k(logits.to(dtype).to(DEVICE), 2).cpu()
    assert found[:, 1:3].tolist() == [[30, 1500], [1999, 0], [0, 1]]
    assert found[:, 3:].contiguous().view(torch.float32)[1:].tolist() == [[float("inf"), -1.0], [float("-inf")] * 2]


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 512), (21, 700), (3, 2048)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_row_times_a_matrix(outputs: int, inputs: int, with_bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=rng).to(DEVICE, HALF) for shape in ((1, 1, inputs), (outputs, inputs), (outputs,))
    )
    found = gemv(x, weight, bias if with_bias else None)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert found.shape == (1, 1, outputs)
    assert found.dtype == HALF
    assert torch.allclose(found.double(), expected, rtol=LAST_BITS[HALF], atol=LAST_BITS[HALF])


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 512), (70, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_in_order(outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    rng, most = torch.Generator().manual_seed(0), 2 * max(tiles.rows for tiles in TILES.values()) + 1
    x, weight, bias = (
        torch.randn(*shape, generator=rng).to(DEVICE, dtype)
        for shape in ((most, inputs), (outputs, inputs), (outputs,))
    )
    given = bias if with_bias else None
    found = in_order_linear(x, weight, given)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < LAST_BITS[dtype]
    for rows in (1, 2, 17, 65):
        part = in_order_linear(x[:rows], weight, given)
        # NumPy, with which the interpreter multiplies, has an order of its own for each size of a tile.
        assert torch.equal(part, found[:rows]) if DEVICE != "cpu" else torch.allclose(part, found[:rows], atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (4096, 14336)])  # libraries split the sums of the second
def test_a_linear_layer_has_the_same_bits_for_all_numbers_of_rows(outputs: int, inputs: int) -> None:
    rng = torch.Generator(DEVICE).manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=rng, device=DEVICE, dtype=HALF) for n in (512, outputs))
    expected = in_order_linear(x, weight, None)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        assert torch.equal(linear(x[None, :rows], weight, None, exact=True)[0], expected[:rows])


@pytest.mark.parametrize("width", [576, 1024, 7])
def test_sums_of_rows(width: int) -> None:
    x = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = row_sums(x, 1 / width)
    assert torch.allclose(found, x.mean(-1), atol=1e-6)
    assert torch.equal(row_sums(x[:1, :1], 1 / width), found[:1, :1])


def test_rows_are_written_and_moved_and_slots_copied() -> None:
    """All are compared with the cache's own way."""
    cache, expected = SlotKVCache(2, 64), SlotKVCache(2, 64)
    new = torch.randn(2, 1, 3, 7, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for one in (cache, expected):
        for number in range(2):
            one.buffers.layer(number).lazy_initialization(*new)
        one.allocate()
        assert one.import_kv(one.allocate()[0], KVState([(x[:, :, :4], x[:, :, :4]) for x in new], 4)) == 4
    slots, positions = torch.tensor([1, 1, 0, 0, 0, 1, 1]), torch.tensor([4, 5, 9, 0, 64, 6, 7])
    for number in range(2):
        ours, theirs = cache.buffers.layers[number], expected.buffers.layers[number]
        write_rows(new[0], new[1], ours.keys, ours.values, slots.to(DEVICE), positions.to(DEVICE))
        theirs.keys[slots, :, positions] = new[0, 0].transpose(0, 1)
        theirs.values[slots, :, positions] = new[1, 0].transpose(0, 1)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    if DEVICE == "cpu":
        return  # the interpreter has no pointers to many buffers
    moves = torch.full((2, 1 + 2 * MAX_PATH), -1, dtype=torch.int32, device=DEVICE)
    moves[1, :4], moves[1, 1 + MAX_PATH : 4 + MAX_PATH] = torch.tensor([1, 5, 6, 7]), torch.tensor([4, 5, 6])
    mover = KVMover(cache.buffers.tensors())
    mover.move(moves)
    expected.commit(1, 0, [1, 2, 3])
    expected.apply_moves()
    for length in (6, 41):
        mover.copy(1, 0, length)
        expected._copy(1, 0, length)
    for start, end in ((0, 3), (2, 41)):
        groups = alike(expected.buffers.tensors())
        packed = mover.pack(1, start, end)
        assert packed.length == end - start
        for block, group in zip(packed.blocks, groups, strict=True):
            assert torch.equal(block, torch.stack([buffer[1, :, start:end] for buffer in group]))
        mover.unpack(0, packed.part(1, packed.length))
        for buffer, part in zip(expected.buffers.tensors(), [one for b in packed.blocks for one in b], strict=True):
            buffer[0, :, : packed.length - 1] = part[:, 1:]
    mover.apply({1: ([3, 7, 9, *range(20, 60)], range(2, 45))})
    expected._moves[1] = [3, 7, 9, *range(20, 60)], range(2, 45)
    expected.apply_moves()
    for ours, theirs in zip(cache.buffers.layers, expected.buffers.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
