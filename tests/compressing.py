"""What the tests of compressors share: the table of algorithms, the table of frameworks, buckets, simulated ranks.

A new algorithm is a new row of ``ROWS``, a new framework a new row of ``FRAMEWORKS``. Ranks are simulated: their
payloads are added by the framework's own ``+``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from frameworks import examples, need, present
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Array, Chain, Compressor, Context, LowRank, Ops, Spec, TopK, parse
from hvdplus.compression.blocks import BlockSelection
from hvdplus.compression.integer import UNKNOWN, Integer, Measured
from hvdplus.compression.lowrank import most_square
from hvdplus.compression.topk2 import TopK2

EPSILON = 2.0**-23
"""float32's."""
TAIL_LEVELS = 2**30
"""Levels of the 32-bit lanes in which integer compressors send a tail, all ranks together."""

# -- frameworks --------------------------------------------------------------------------------------------------------


def _numpy() -> Ops:
    return NumpyOps()


def _torch() -> Ops:
    need("torch")
    from hvdplus.adapters.torch.ops import TorchOps

    return TorchOps()


def _device() -> Ops:
    """What PyTorch does on a GPU: there, or else on the CPU."""
    need("torch")
    import torch

    from hvdplus.adapters.torch.ops import DeviceOps

    return DeviceOps("cuda" if torch.cuda.is_available() else "cpu")


def _tensorflow() -> Ops:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():  # its imports warn about each other
        warnings.simplefilter("ignore")
        need("tensorflow")
        from hvdplus.adapters.tensorflow.ops import TensorFlowOps

        return TensorFlowOps()


class Framework(NamedTuple):
    """One that compressors run in."""

    make: Callable[[], Ops]
    """Its ``Ops``."""
    examples: int
    """How many examples a property gets: eager TensorFlow is slow."""
    long: int
    """Steps of a long run."""


FRAMEWORKS = {
    "numpy": Framework(_numpy, 30, 200),
    "torch": Framework(_torch, 12, 200),
    "tensorflow": Framework(_tensorflow, 3, 30),
    "torch on a device": Framework(_device, 3, 30),
}
OPS = {name: framework for name, framework in FRAMEWORKS.items() if present(name.partition(" ")[0])}
"""Those that tests run in."""

every_framework = pytest.mark.parametrize("framework", OPS)


@cache
def ops_of(framework: str) -> Ops:
    """One ``Ops`` of a framework."""
    return OPS[framework].make()


def asked(ops: Ops, compressor: Compressor, ctx: Context, grads: Sequence[Any]) -> Context:
    """``ctx``, with which ranks encode their ``grads`` (NumPy or the framework's) for the first time."""
    told = [compressor.ask(ops, ctx, _of(ops, grad)) for grad in grads] if compressor.asks else []
    return compressor.learn(ops, ctx, add(told) if told[0].shape[0] else told[0]) if told else ctx


def _of(ops: Ops, grad: Any) -> Any:
    return ops.from_numpy(grad) if isinstance(grad, np.ndarray) else grad


# -- algorithms --------------------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """One rank's round trip, in NumPy."""

    compressor: Compressor
    ctx: Context
    sent: np.ndarray
    arrived: np.ndarray

    @property
    def ranks(self) -> int:
        """World size."""
        return self.ctx.spec.ranks


class Row(NamedTuple):
    """What is promised of an algorithm."""

    level: str
    kept: Callable[[Trip], None]
    """Asserts what a round trip may lose."""
    sums: float
    """decode(Σ payload) = Σ decode(payload) within this, relative to the norms of what is added."""
    backlog: float = 0.0
    """‖residual‖ / ‖gradient‖ stays below this in error feedback on fresh smooth gradients; 0: it keeps no residual.
    Derived where rounding is all that is lost, measured elsewhere."""
    spiky: float = 0.0
    """The same where 99 % of a gradient's elements are zero."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """World sizes to try."""


def identical(trip: Trip) -> None:
    """Nothing is lost."""
    assert np.array_equal(trip.arrived, trip.sent)


def halved(trip: Trip) -> None:
    """Half a unit in float16's last place, of the mean; infinite beyond its range."""
    fits = np.abs(trip.sent) < 65520.0 * trip.ranks
    assert (np.abs(trip.sent - trip.arrived)[fits] <= half_bound(trip.sent, trip.ranks)[fits]).all()
    assert np.array_equal(trip.arrived[~fits], np.copysign(np.inf, trip.sent[~fits]))


def selected(trip: Trip) -> None:
    """A share of the blocks arrives as it was, the others as zeros; what is in no block arrives."""
    compressor, spec = trip.compressor, trip.ctx.spec
    assert isinstance(compressor, BlockSelection)
    count, chosen = blocks_of(compressor, spec)
    end = count * compressor.block
    assert np.array_equal(trip.arrived[end:], trip.sent[end:])
    x, y = (values[:end].reshape(count, compressor.block) for values in (trip.sent, trip.arrived))
    flushed = np.where(np.abs(x) < 2.0**-126, 0, x)  # denormal ones may be, in some frameworks
    whole, cleared = ((x == y) | (flushed == y)).all(axis=1), (y == 0).all(axis=1)
    assert (whole | cleared).all() and (whole & ~cleared).sum() <= chosen <= whole.sum()


def projected(trip: Trip) -> None:
    """Every matrix meets an orthogonal projection: what is lost stands at right angles to what arrives."""
    compressor, spec = trip.compressor, trip.ctx.spec
    assert isinstance(compressor, LowRank)
    assert np.array_equal(trip.arrived[spec.body :], trip.sent[spec.body :])
    for shape, x, y in tensors(spec, trip.sent, trip.arrived):
        if min(most_square(shape)) < 2 * compressor.rank:
            assert np.array_equal(x, y)
            continue
        assert norm(x - y) <= norm(x) * (1 + 1e-5) + 1e-37
        assert abs((x - y) @ y) <= 1e-5 * norm(x) ** 2 + 1e-70
        rank = np.linalg.matrix_rank(y.reshape(most_square(shape)), tol=1e-4 * norm(x) + 1e-37)
        assert rank <= compressor.rank


def nearest(trip: Trip) -> None:
    """At most half a step is lost of what is within the levels, never more than there is, and no sign turns."""
    lost, bound = np.abs(trip.sent - trip.arrived), nearest_bound(trip.compressor, trip.ctx, trip.sent)
    assert (lost <= bound).all()
    assert (np.sign(trip.arrived) * np.sign(trip.sent) >= 0).all()


def drawn(trip: Trip) -> None:
    """Less than a step is lost of what is within the levels; zero is exact, no sign turns; the tail goes to nearest."""
    body = trip.ctx.spec.body
    assert isinstance(trip.compressor, Integer)
    step, levels = step_of(trip.ctx.state[0][0]), trip.compressor.levels(trip.ranks)
    size = np.abs(trip.sent[:body])
    # One part in 2^22: x / step + u is rounded to float32 before it is cut.
    bound = np.maximum(step, size - levels * step) + size * 2 * EPSILON if step else size
    assert (np.abs(trip.sent - trip.arrived)[:body] <= bound).all()
    assert (np.sign(trip.arrived) * np.sign(trip.sent) >= 0).all()
    assert not trip.arrived[trip.sent == 0].any()
    lost = np.abs(trip.sent - trip.arrived)[body:]
    assert (lost <= nearest_bound(trip.compressor, trip.ctx, trip.sent)[body:]).all()


def signs(trip: Trip) -> None:
    """Every element arrives as its sign times the shared scale, or as zero where it is less than a 64th of that."""
    body, scale = trip.ctx.spec.body, step_of(trip.ctx.state[0][0])
    normal = np.abs(trip.sent[:body]) >= 2.0**-126  # some frameworks flush what is smaller
    expected = np.sign(trip.sent[:body]) * scale * (np.abs(trip.sent[:body]) > scale / 64)
    assert np.array_equal(trip.arrived[:body][normal], expected[normal])
    assert not trip.arrived[:body][trip.sent[:body] == 0].any()
    lost = np.abs(trip.sent - trip.arrived)[body:]
    assert (lost <= nearest_bound(trip.compressor, trip.ctx, trip.sent)[body:]).all()


def chained(trip: Trip) -> None:
    """The first part loses what it loses, and the second what it may lose of the first one's payload."""
    compressor = trip.compressor
    assert isinstance(compressor, Chain)
    first, outer, inner = parts(compressor, trip.ctx)
    payload = first.encode(ops_of("numpy"), outer, trip.sent)
    kept = first.decode(ops_of("numpy"), outer, payload)
    if compressor.second.name == "fp16":
        bound = half_bound(payload, trip.ranks)
    else:
        bound = nearest_bound(compressor.second, inner, payload)
    if compressor.second.name == "signsgd":
        values = np.abs(payload[: inner.spec.body])
        scale = step_of(inner.state[0][0])
        bound[: inner.spec.body] = np.where(values > scale / 64, np.abs(values - scale), values)
    lost = np.abs(kept - trip.arrived)
    if isinstance(first, BlockSelection):  # its payload holds the very elements
        limit = first.decode(ops_of("numpy"), outer, bound.astype(np.float32))
        assert (lost <= limit * (1 + 1e-5)).all()
        assert compressor.second.name == "signsgd" or (np.abs(trip.sent - trip.arrived) <= np.abs(trip.sent)).all()
    else:  # orthonormal bases carry errors over as they are
        assert norm(lost) <= norm(bound) * (1 + 1e-4) + 1e-5 * norm(trip.sent) + 1e-37
        assert norm(trip.sent - trip.arrived) <= norm(trip.sent) * (1 + 1e-5) + 1e-37


def half_bound(values: np.ndarray, ranks: int) -> np.ndarray:
    """What rounding values to float16, saturated and divided by a power of two, may lose of each."""
    size = np.abs(values.astype(np.float64))
    divisor = 1 << (ranks - 1).bit_length()
    bound = np.maximum(size * 2.0**-11, 2.0**-25)
    bound = np.minimum(size, bound + (size < divisor * 2.0**-13) * (divisor > 1) * divisor * 2.0**-25)
    beyond = size - 2.0**15  # magnitudes stop at HALF_LIMIT
    return np.where(size > 2.0**15, np.maximum(bound, beyond), bound) * (1 + 1e-6)


def nearest_bound(compressor: Compressor, ctx: Context, values: np.ndarray) -> np.ndarray:
    """What rounding to the nearest level may lose of each value."""
    assert isinstance(compressor, Integer)
    spec, size = ctx.spec, np.abs(values.astype(np.float64))
    limits = []
    for part, exponent, levels in (
        (size[: spec.body], ctx.state[0][0], compressor.levels(spec.ranks)),
        (size[spec.body :], ctx.state[0][1], TAIL_LEVELS // spec.ranks),
    ):
        step = step_of(exponent)
        # Levels of the tail are float32 on the way, so the last of them may be one part in 2^24 off.
        limits.append(np.minimum(part, np.maximum(step / 2, part - levels * step * (1 - 2 * EPSILON))))
    return np.concatenate(limits) * (1 + 4 * EPSILON)


def wanted_step(levels: int) -> float:
    """Step that ``intB`` asks for, as a multiple of the root mean square; a power of two within sqrt(2) serves."""
    return max(2.2 * levels**0.575, 1.5 * levels ** (2 / 3)) / levels


def rounding_backlog(levels: int, stochastic: bool = False, octaves: float = 0.5) -> float:
    """‖residual‖ / ‖gradient‖ in error feedback on smooth gradients.

    Rounding to the nearest loses step / sqrt(12), stochastic rounding step / sqrt(6); the step is half an octave off
    what is asked for, or less, of the gradient with the residual u in it: u = c sqrt(1 + u²). (On so few levels that
    many values are clipped, a step that clips more rounds less: together they lose no more than this.)
    """
    lost = wanted_step(levels) * 2.0**octaves / math.sqrt(6 if stochastic else 12)
    return lost / math.sqrt(1 - lost**2)


def _excess(threshold: float) -> float:
    """E[max(0, |x| - threshold)²] of a standard Gaussian."""
    beyond = math.erfc(threshold / math.sqrt(2)) / 2
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * ((1 + threshold**2) * beyond - threshold * density)


def spiky_backlog(levels: int, stochastic: bool = False, steps: int = 60, share: float = 0.01) -> float:
    """The most of it after some steps, where a share of the elements is Gaussian and all others are zero.

    Elements that were hit keep what rounding left (drawn again and again, at worst half a step); what is beyond the
    levels is sent levels * step at a time. The worst of all steps within half an octave of what is asked for.
    """
    hit, found = 1 - (1 - share) ** steps, 0.0
    for off in np.linspace(-0.5, 0.5, 21):
        square = 0.0
        for _ in range(30):
            step = wanted_step(levels) * 2.0**off * math.sqrt(share * (1 + square))
            clipped = sum(_excess(k * levels * step) for k in range(1, 50))
            square = hit * step**2 / (4 if stochastic else 12) / share + clipped
        found = max(found, square**0.5)
    return found


BLOCKS = 1e-6
ROWS = {
    row.level: row
    for row in (
        Row("none", identical, 1e-6),
        Row("fp16", halved, 2.0**-10),
        Row("randomk:0.1:16", selected, BLOCKS, 2.6, 2.9),
        Row("randomk:0.3:7", selected, BLOCKS, 1.3, 1.5),
        Row("topk:0.1:16", selected, BLOCKS, 2.5, 2.4),
        Row("topk:0.4:5", selected, BLOCKS, 1.1, 1.1),
        Row("lowrank:1", projected, 1e-5, 5.8, 6.2),
        Row("lowrank:4", projected, 1e-5, 2.8, 2.9),
        Row("int2", nearest, 0, rounding_backlog(1), 1.6, ranks=(1,)),
        Row("int3", nearest, 0, rounding_backlog(1), 1.8, ranks=(1, 2)),
        Row("int4", nearest, 0, rounding_backlog(1), 1.9),
        Row("int5", nearest, 0, rounding_backlog(3), 1.4),
        Row("int8", nearest, 0, rounding_backlog(31), spiky_backlog(31)),
        Row("int8:stochastic", drawn, 0, rounding_backlog(31, True), spiky_backlog(31, True)),
        Row("int11", nearest, 0, rounding_backlog(255), spiky_backlog(255)),
        Row("int12", nearest, 0, rounding_backlog(511), spiky_backlog(511)),
        Row("int16", nearest, 0, rounding_backlog(8191), spiky_backlog(8191)),
        Row("qsgd:8", drawn, 0),
        Row("qsgd:4", drawn, 0),
        Row("terngrad", drawn, 0),
        Row("signsgd", signs, 0, 1.4, 2.8),
        Row("topk:0.1:16+int8", chained, BLOCKS, 2.5, 2.4),
        Row("topk:0.1:16+fp16", chained, 2.0**-10, 2.5, 2.4),
        Row("randomk:0.1:16+int4", chained, BLOCKS, 4.2, 5.6),
        Row("topk:0.1:16+signsgd", chained, BLOCKS, 4.5, 6),
        Row("lowrank:4+fp16", chained, 2.0**-9, 2.8, 3),
        Row("lowrank:4+int8", chained, 1e-5, 2.8, 3),
        Row("lowrank:1+int16", chained, 1e-5, 5.8, 6.2),
    )
}
LEVELS = tuple(ROWS)

every_level = pytest.mark.parametrize("level", LEVELS)


def levels_with(**traits: object) -> list[str]:
    """Levels whose compressors have these attributes."""
    return [level for level in LEVELS if all(getattr(parse(level), name) == value for name, value in traits.items())]


# -- buckets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A bucket and what its ranks computed."""

    spec: Spec
    steps: int = 0
    """Steps that the contexts have behind them."""
    seed: int = 0
    scale: float = 1.0

    def gradients(self, step: int = 0) -> list[np.ndarray]:
        """One float32 vector a rank."""
        rng = np.random.default_rng((self.seed, step))
        return [self.scale * rng.standard_normal(self.spec.size, np.float32) for _ in range(self.spec.ranks)]


# Large enough matrices that rank 4 compresses some, small enough tensors that some stay dense; a few are empty.
SHAPES = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
    st.tuples(st.integers(8, 24), st.integers(8, 24)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    st.tuples(st.integers(2, 10), st.integers(2, 10), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 10), st.integers(0, 10)),
)


@st.composite
def cases(draw: st.DrawFn, ranks: tuple[int, ...]) -> Case:
    """Several tensors of one to four dimensions, perhaps a tail."""
    spec = Spec(
        tuple(draw(st.lists(SHAPES, min_size=1, max_size=4))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(ranks)),
        draw(st.sampled_from((0, 1, 23))),
    )
    return Case(spec, draw(st.integers(0, 3)), draw(st.integers(0, 10**6)), draw(st.sampled_from((1e-3, 1.0, 1e3))))


def for_many(level: str, framework: str, check: Callable[[Case], None]) -> None:
    """Check a property on as many cases as the framework's speed allows; the same ones on every machine."""
    ops_of(framework)
    examples(OPS[framework].examples)(given(cases(ROWS[level].ranks))(check))()


# -- simulated ranks ---------------------------------------------------------------------------------------------------


def add(parts: Sequence[Array]) -> Array:
    """What a ring does."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def after_steps(ops: Ops, compressor: Compressor, case: Case) -> Context:
    """The context after ``case.steps`` steps."""
    ctx = compressor.init(ops, case.spec)
    for step in range(1, case.steps + 1):
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in case.gradients(step)]
        ctx = compressor.advance(ops, ctx, add(payloads))
    return ctx


def once(ops: Ops, compressor: Compressor, ctx: Context, grad: np.ndarray) -> tuple[np.ndarray, Array]:
    """Encode and decode on one rank: (what arrives, the payload)."""
    payload = compressor.encode(ops, ctx, ops.from_numpy(grad))
    return ops.to_numpy(compressor.decode(ops, ctx, payload)), payload


def trip_of(ops: Ops, compressor: Compressor, ctx: Context, grad: np.ndarray) -> tuple[Trip, Array]:
    """As ``once``, with all that is needed to judge it."""
    arrived, payload = once(ops, compressor, ctx, grad)
    assert arrived.shape == grad.shape and arrived.dtype == np.float32
    return Trip(compressor, in_numpy(ops, ctx), grad, arrived), payload


def in_numpy(ops: Ops, ctx: Context) -> Context:
    """A context's copy in NumPy."""
    return ctx._replace(state=tuple(ops.to_numpy(array) for array in ctx.state))


def out_of_numpy(ops: Ops, ctx: Context) -> Context:
    """A NumPy context's copy in a framework."""
    return ctx._replace(state=tuple(ops.from_numpy(array) for array in ctx.state))


def bits_of(ops: Ops, ctx: Context) -> list[bytes]:
    """A context's state, bit for bit."""
    return [ops.to_numpy(array).tobytes() for array in ctx.state]


# -- reading -----------------------------------------------------------------------------------------------------------


def norm(values: np.ndarray) -> float:
    """Euclidean norm in float64: squares of 1e30 overflow in float32."""
    return float(np.linalg.norm(np.asarray(values, np.float64)))


def tensors(spec: Spec, *vectors: np.ndarray) -> list[tuple[Any, ...]]:
    """(shape, that tensor's part of every vector), for all of a bucket's tensors, in float64."""
    ends = np.cumsum(spec.sizes)
    cut = [np.split(vector.astype(np.float64), ends)[:-1] for vector in vectors]
    return list(zip(spec.shapes, *cut, strict=True))


def step_of(exponent: int) -> float:
    """Distance between two levels."""
    return 0.0 if exponent <= UNKNOWN else 2.0 ** int(exponent)


def parts(chain: Chain, ctx: Context) -> tuple[Compressor, Context, Context]:
    """(first part, its context, the second's), cut as ``Chain.init`` says: first the one, then the other, by side."""
    count = len(chain.first.init(ops_of("numpy"), ctx.spec).state)
    layout = chain.first.layout(ctx.spec, ctx.side)
    inner_spec = ctx.spec._replace(shapes=((layout.values,),), tail=layout.precise)
    inner_state = ctx.state[count:][ctx.side : ctx.side + 1]
    return chain.first, ctx._replace(state=ctx.state[:count]), Context(inner_spec, 0, inner_state)


def lanes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The integers in packed words, read with Python's own integers: a sum of q 2^(jB) has one signed digit a lane.

    Lanes of 8 and 16 bits follow the elements' order, others hold a stretch of elements each.
    """
    per_word = 8 * words.itemsize // bits
    table = np.zeros((words.size, per_word), np.int64)
    for row, word in enumerate(words.tolist()):
        for lane in range(per_word):
            table[row, lane] = digit = (word + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
            word = (word - digit) >> bits
        assert word == 0, "the lanes are all there is"
    read = (table if bits in (8, 16) else table.T).ravel()
    assert not read[count:].any()
    return read[:count]


class Heard(NamedTuple):
    """What stands in an integer compressor's payload."""

    body: np.ndarray
    tail: np.ndarray
    measured: np.ndarray
    """As in ``integer.Measured``, of one run: loudness, the tail's, ranks heard, the tail's, clipped, ..."""


def heard_in(compressor: Integer, spec: Spec, payload: np.ndarray) -> Heard:
    """Take an integer payload apart."""
    bits, word = compressor.bits(spec.ranks), 8 * payload.itemsize
    end = -(-spec.body // (word // bits))
    assert payload.size == end + -(-spec.tail // (word // 32)) + len(Measured._fields)
    count = len(Measured._fields)
    return Heard(lanes(payload[:end], bits, spec.body), lanes(payload[end:-count], 32, spec.tail), payload[-count:])


def off_orthonormal(basis: np.ndarray) -> float:
    """How far the columns of (b, n, r) matrices are from orthonormal: the largest element of QᵀQ - I."""
    wide = np.asarray(basis, np.float64)
    gram = wide.swapaxes(-1, -2) @ wide
    return float(np.abs(gram - np.eye(wide.shape[-1])).max(initial=0.0))


def blocks_of(compressor: BlockSelection, spec: Spec) -> tuple[int, int]:
    """(blocks of a bucket, how many of them a step sends); (0, 0) where sending some would save nothing."""
    count = spec.body // compressor.block
    chosen = max(1, round(compressor.share * count))
    rides_along = {TopK: count, TopK2: count + 1}.get(type(compressor), 1)
    return (count, chosen) if chosen * compressor.block + rides_along < count * compressor.block else (0, 0)


def groups(spec: Spec, rank: int) -> dict[tuple[int, int], list[int]]:
    """Matrix view -> tensors, for those that ``lowrank`` compresses, in its order."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, shape in enumerate(spec.shapes):
        if 2 * rank <= min(most_square(shape)):
            found.setdefault(most_square(shape), []).append(number)
    return found


# -- gradients of several kinds ----------------------------------------------------------------------------------------


def low_rank(rng: np.random.Generator, shape: tuple[int, ...], rank: int, scale: float) -> np.ndarray:
    """A tensor whose matrix view has exactly ``rank``, flat."""
    rows, columns = most_square(shape)
    return scale * (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))).ravel()


def _sparse(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size) * (rng.random(size) < 0.01)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, size: rng.standard_normal(size),
    "laplace": lambda rng, size: rng.laplace(size=size),
    "sparse": _sparse,
}
"""Distributions of gradients' elements; ``sparse``: 99 % are zero."""
