"""Vector instructions for compiled host code, written in LLVM's language; softmax, SiLU and squares made of them.

A vector holds 16 float32 values: one register with AVX-512, two with AVX2, four with NEON. All functions take
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

from llvmlite import ir
from numba import config as numba_config, types
from numba.core.codegen import get_host_cpu_features

from lookfar.core.llvm import BYTE, FLOAT, INT, IS_ARM, LONG, external, instruction

LANES = 16
# Of the processor that numba compiles for; NUMBA_CPU_FEATURES may name another one than this.
REQUESTED = getattr(numba_config, "CPU_FEATURES", None)
FEATURES: list[str] = (get_host_cpu_features() if REQUESTED is None else REQUESTED).split(",")  # type: ignore[no-untyped-call]
HAS_HALF = IS_ARM or "+f16c" in FEATURES  # reads float16
HAS_FMA = IS_ARM or "+fma" in FEATURES  # otherwise every product would be a call of the C library
# The rows of a tile: their sums and one vector of weights fit into the registers.
WIDE = "+avx512f" in FEATURES
TILE_ROWS = (1, 2, 4, 8, 12, 16) if WIDE else (1, 2, 4, 6)

VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
ADDRESS = types.int64


def vector(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def call(builder: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    """Call an LLVM intrinsic that takes and returns vectors."""
    function = external(builder, f"llvm.{name}.v{LANES}f32", VECTOR, *[VECTOR] * len(arguments))
    return builder.call(function, arguments)


def broadcast(builder: ir.IRBuilder, value: Any) -> Any:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def pointer(builder: ir.IRBuilder, address: Any, index: Any) -> Any:
    """Return a pointer to a float."""
    return builder.gep(builder.inttoptr(address, FLOAT.as_pointer()), [index])


def load(builder: ir.IRBuilder, address: Any, index: Any) -> Any:
    return builder.load(builder.bitcast(pointer(builder, address, index), VECTOR.as_pointer()), align=4)


def store(builder: ir.IRBuilder, value: Any, address: Any, index: Any) -> None:
    builder.store(value, builder.bitcast(pointer(builder, address, index), VECTOR.as_pointer()), align=4)


def loop(builder: ir.IRBuilder, count: Any, start: Seq[Any], body: Callable[[Any, Seq[Any]], Seq[Any]]) -> Seq[Any]:
    """Emit a loop of at least one round that carries vectors from round to round; returns the last ones."""
    before = builder.block
    inside = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.branch(inside)
    builder.position_at_end(inside)
    index, carried = builder.phi(LONG), [builder.phi(VECTOR) for _ in start]
    index.add_incoming(LONG(0), before)
    for phi, value in zip(carried, start, strict=True):
        phi.add_incoming(value, before)
    found = body(index, carried)
    following = builder.add(index, LONG(1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(carried, found, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return found


def load_at(builder: ir.IRBuilder, address: Any, offset: Any, kind: Any) -> Any:
    """Load a vector of some type, `offset` bytes behind an address."""
    place = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(place, align=1)


def prefetch(builder: ir.IRBuilder, address: Any, offset: Any, ahead: int) -> None:
    """Fetch the cache line `offset` and `ahead` bytes behind an address."""
    kind = BYTE.as_pointer()
    function = external(builder, "llvm.prefetch.p0", ir.VoidType(), kind, INT, INT, INT)
    place = builder.inttoptr(builder.add(address, builder.add(offset, LONG(ahead))), kind)
    builder.call(function, [place, INT(0), INT(3), INT(1)])  # for reading, to the first-level cache


def _exp(builder: ir.IRBuilder, x: Any) -> Any:
    """Return exp(x) to the last bit or two: 2ⁿ times a polynomial in what is left of x."""
    x = call(builder, "maxnum", call(builder, "minnum", x, vector(88.0)), vector(-87.3))
    n = call(builder, "floor", call(builder, "fma", x, vector(1.44269504088896341), vector(0.5)))
    r = call(builder, "fma", n, vector(-0.693359375), x)
    r = call(builder, "fma", n, vector(2.12194440e-4), r)
    p = vector(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = call(builder, "fma", p, r, vector(coefficient))
    p = call(builder, "fma", p, builder.fmul(r, r), builder.fadd(r, vector(1.0)))
    bits = builder.shl(
        builder.add(builder.fptosi(n, INTS), ir.Constant(INTS, [127] * LANES)), ir.Constant(INTS, [23] * LANES)
    )
    return builder.fmul(p, builder.bitcast(bits, VECTOR))


@instruction
def softmax(typing_context: Any, scores: Any, count: Any, sums: Any) -> Any:
    """scores[i, lane] = exp(scores[i, lane] − their maximum over i), and sums[lane] = Σ of them over i.

    −inf stands for a score that does not count.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        scores, count, sums = arguments

        def highest(i: Any, carried: Seq[Any]) -> Seq[Any]:
            return [call(builder, "maxnum", carried[0], load(builder, scores, builder.mul(i, LONG(LANES))))]

        (top,) = loop(builder, count, [vector(-3e38)], highest)

        def exponentials(i: Any, carried: Seq[Any]) -> Seq[Any]:
            place = builder.mul(i, LONG(LANES))
            score = load(builder, scores, place)
            counts = builder.fcmp_ordered(">", score, vector(float("-inf")))
            value = builder.select(counts, _exp(builder, builder.fsub(score, top)), vector(0.0))
            store(builder, value, scores, place)
            return [builder.fadd(carried[0], value)]

        (total,) = loop(builder, count, [vector(0.0)], exponentials)
        store(builder, total, sums, LONG(0))
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 3), emit


@instruction
def gated_silu(typing_context: Any, gate: Any, up: Any, count: Any) -> Any:
    """gate[i] = gate[i] / (1 + exp(−gate[i])) · up[i] for `count` vectors."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        gate, up, count = arguments

        def body(i: Any, carried: Seq[Any]) -> Seq[Any]:
            place = builder.mul(i, LONG(LANES))
            value = load(builder, gate, place)
            below = builder.fadd(_exp(builder, builder.fsub(vector(-0.0), value)), vector(1.0))
            store(builder, builder.fmul(builder.fdiv(value, below), load(builder, up, place)), gate, place)
            return []

        loop(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 3), emit


@instruction
def sum_of_squares(typing_context: Any, values: Any, count: Any) -> Any:
    """Σ values[i]² over `count` vectors."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        values, count = arguments

        def body(i: Any, carried: Seq[Any]) -> Seq[Any]:
            value = load(builder, values, builder.mul(i, LONG(LANES)))
            return [call(builder, "fma", value, value, carried[0])]

        (squares,) = loop(builder, count, [vector(0.0)], body)
        parts = [builder.extract_element(squares, INT(lane)) for lane in range(LANES)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(one, other) for one, other in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    return types.float32(ADDRESS, ADDRESS), emit
