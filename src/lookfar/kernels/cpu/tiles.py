"""Matrix tiles: some rows times 16 columns of weights, y[row, :16] = Σ x[row, k] · w[k, :16].

Weights are float32 numbers, but many could be written with fewer bits: those of a bfloat16 checkpoint, or of a
quantised one. They are read from memory in that form and widened in a register, to the same numbers. A tile adds in the
same order for every format and every number of rows, so the result of a row depends on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from lookfar.core.llvm import BYTE, LONG, SHORT, instruction
from lookfar.kernels.cpu.vectors import (
    HAS_HALF,
    INTS,
    LANES,
    TILE_ROWS,
    VECTOR,
    broadcast,
    call,
    load,
    load_at,
    loop,
    pointer,
    prefetch,
    store,
    vector,
)

# How the weights of a panel, 16 columns, lie in memory.
FLOAT32 = 0  # [k][16]
BFLOAT16 = 1  # [k][16] the upper halves of the numbers
FLOAT16 = 3  # [k][16]
UINT8 = 2  # for each group of k: [16] offsets, [16] units, [k of the group][16] numbers of units beyond the offset
GROUP = 32  # values of a column that share offset and unit, as in GGUF files
GROUP_BYTES = LANES * (4 + 4 + GROUP)
AHEAD = 4096  # bytes of weights that are fetched ahead

# Takes k, the weights there, and the sums before it; returns those after it.
Body = Callable[[Any, Any, Seq[Any]], Seq[Any]]
Widen = Callable[[Any, Any], Any]


def _tile(weights: Callable[[Any, Any, Any, Seq[Any], Body], Seq[Any]], strided: bool = False) -> Any:
    """Return a function that multiplies some rows with weights in one format.

    It takes the number of rows, one of `TILE_ROWS`; the addresses x, w and y; the length of the sum; three distances:
    between two k in x (`strided`: between two rows; the other distance is 1), between two k in w (of float32), and
    between two rows of y; and whether to add to y.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        rows, *others = arguments
        end = builder.append_basic_block("end")
        choice = builder.switch(rows, end)
        for count in TILE_ROWS:
            block = builder.append_basic_block(f"rows_{count}")
            choice.add_case(LONG(count), block)
            builder.position_at_end(block)
            _emit_tile(builder, count, others, weights, strided)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def typing(
        typing_context: Any,
        rows: Any,
        x: Any,
        w: Any,
        y: Any,
        length: Any,
        x_step: Any,
        w_step: Any,
        y_step: Any,
        add: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), emit

    return instruction(typing)


def _emit_tile(builder: ir.IRBuilder, rows: int, arguments: Seq[Any], weights: Any, strided: bool) -> None:
    x, w, y, length, x_step, w_step, y_step, add = arguments

    def body(k: Any, value: Any, sums: Seq[Any]) -> Seq[Any]:
        found = []
        for row, total in enumerate(sums):
            if strided:
                at = builder.add(builder.mul(x_step, LONG(row)), k)
            else:
                at = builder.add(builder.mul(k, x_step), LONG(row))
            factor = broadcast(builder, builder.load(pointer(builder, x, at), align=4))
            found.append(call(builder, "fma", factor, value, total))
        return found

    sums = weights(builder, (w, w_step), length, [vector(0.0)] * rows, body)
    places = [builder.mul(y_step, LONG(row)) for row in range(rows)]
    adds = builder.icmp_signed("!=", add, LONG(0))
    with builder.if_else(adds) as (then, otherwise):
        with then:
            for place, total in zip(places, sums, strict=True):
                store(builder, builder.fadd(load(builder, y, place), total), y, place)
        with otherwise:
            for place, total in zip(places, sums, strict=True):
                store(builder, total, y, place)


def _of_float32(fetch: bool) -> Any:
    def weights(builder: Any, where: Any, length: Any, start: Seq[Any], body: Body) -> Seq[Any]:
        w, w_step = where

        def one(k: Any, sums: Seq[Any]) -> Seq[Any]:
            place = builder.mul(k, w_step)
            if fetch:
                prefetch(builder, w, builder.mul(place, LONG(4)), AHEAD)
            return body(k, load(builder, w, place), sums)

        return loop(builder, length, start, one)

    return weights


def _of_halves(builder: Any, where: Any, length: Any, start: Seq[Any], body: Body, widen: Widen) -> Seq[Any]:
    """Read weights of two bytes, which `widen` turns into float32."""
    w, _ = where

    def one(k: Any, sums: Seq[Any]) -> Seq[Any]:
        place = builder.mul(k, LONG(2 * LANES))
        prefetch(builder, w, place, AHEAD)
        halves = load_at(builder, w, place, ir.VectorType(SHORT, LANES))
        return body(k, widen(builder, halves), sums)

    return loop(builder, length, start, one)


def _widen_bfloat16(builder: Any, halves: Any) -> Any:
    bits = builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(bits, VECTOR)


def _widen_float16(builder: Any, halves: Any) -> Any:
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def _of_uint8(builder: Any, where: Any, length: Any, start: Seq[Any], body: Body) -> Seq[Any]:
    w, _ = where

    def group(index: Any, sums: Seq[Any]) -> Seq[Any]:
        place = builder.mul(index, LONG(GROUP_BYTES))
        for line in range(0, GROUP_BYTES, 64):
            prefetch(builder, w, place, AHEAD + line)
        offsets = load_at(builder, w, place, VECTOR)
        units = load_at(builder, w, builder.add(place, LONG(4 * LANES)), VECTOR)
        numbers, first = builder.add(place, LONG(8 * LANES)), builder.mul(index, LONG(GROUP))

        def one(k: Any, sums: Seq[Any]) -> Seq[Any]:
            at = builder.add(numbers, builder.mul(k, LONG(LANES)))
            number = builder.sitofp(builder.zext(load_at(builder, w, at, ir.VectorType(BYTE, LANES)), INTS), VECTOR)
            return body(builder.add(first, k), call(builder, "fma", number, units, offsets), sums)

        return loop(builder, LONG(GROUP), sums, one)

    return loop(builder, builder.sdiv(length, LONG(GROUP)), start, group)


tile, tile_strided = _tile(_of_float32(True)), _tile(_of_float32(False), strided=True)
tile_bfloat16 = _tile(partial(_of_halves, widen=_widen_bfloat16))
tile_float16 = _tile(partial(_of_halves, widen=_widen_float16)) if HAS_HALF else tile_bfloat16  # then never used
tile_uint8 = _tile(_of_uint8)
