"""What is special to chains: the first part's payload is the second one's bucket."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compressing import (
    LEVELS,
    Case,
    add,
    after_steps,
    asked,
    every_framework,
    heard_in,
    in_numpy,
    norm,
    once,
    ops_of,
    parts,
    tensors,
    wanted_step,
)

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import (
    QSGD,
    Chain,
    Compressor,
    Half,
    IntB,
    LowRank,
    NoCompression,
    RandomK,
    SignSGD,
    Spec,
    TernGrad,
    TopK,
    parse,
)
from hvdplus.compression.integer import Integer
from hvdplus.compression.ops import HALF_LIMIT

CHAINS = [level for level in LEVELS if "+" in level]
every_chain = pytest.mark.parametrize("level", CHAINS)
SPEC = Spec(((20, 16), (12, 10), (7,)), ranks=2, tail=9)


def chain(level: str) -> Chain:
    """Parse what is a chain."""
    compressor = parse(level)
    assert isinstance(compressor, Chain)
    return compressor


# -- from words and from objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("topk:0.05+int8", Chain(TopK(share=0.05), IntB(8))),
        ("topk:0.1:16+int4:stochastic", Chain(TopK(share=0.1, block=16), IntB(4, stochastic=True))),
        ("lowrank:2+fp16", Chain(LowRank(2), Half())),
        ("lowrank+int16", Chain(LowRank(), IntB(16))),
        ("randomk:0.01+int4", Chain(RandomK(share=0.01), IntB(4))),
        (" topk:0.05 + int8 ", Chain(TopK(share=0.05), IntB(8))),
        ("topk:0.1+signsgd", Chain(TopK(share=0.1), SignSGD())),
    ],
)
def test_built_from_objects_or_from_words(text: str, built: Chain) -> None:
    assert parse(text) == built
    assert parse(text).name == built.name
    assert parse(built.name) == built and hash(parse(built.name)) == hash(built)
    ops = NumpyOps()
    ctx = built.init(ops, SPEC)
    grad = Case(SPEC).gradients()[0]
    assert np.array_equal(built.encode(ops, ctx, grad), parse(text).encode(ops, ctx, grad))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("topk:0.05+int8+fp16", "a chain has two parts. Received: 3"),
        ("int8+topk:0.05", "int8 cannot begin a chain"),
        ("fp16+int8", "fp16 cannot begin a chain"),
        ("none+int8", "none cannot begin a chain"),
        ("topk:0.05+none", "none cannot end a chain"),
        ("topk:0.05+lowrank:4", "lowrank:4 cannot end a chain"),
        ("topk:0.05+topk:0.1", "topk:0.1 cannot end a chain"),
        ("topk:0.05+qsgd:8", "qsgd:8 cannot end a chain"),
        ("topk:0.05+terngrad", "terngrad cannot end a chain"),
        ("topk:2+int8", "at 'topk:2'.*share of the gradient"),
        ("topk:0.05+int99", "at 'int99'.*2 to 16 bits"),
        ("topk:0.05+in8", "at 'in8'.*Unknown compression"),
        ("topkk+int8", "at 'topkk'.*Unknown compression"),
        ("topk:x+int8", "at 'topk:x'.*a share such as 0.05"),
        ("topk:0.1+", "at ''.*Unknown compression"),
        ("+int8", "at ''.*Unknown compression"),
        ("+", "at ''.*Unknown compression"),
    ],
)
def test_errors_point_at_the_part(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse(text)
    assert str(refused.value).startswith(f"Bad compression {text!r}")


@pytest.mark.parametrize("second", [NoCompression(), LowRank(2), QSGD(), TernGrad(), TopK(share=0.1)])
def test_what_cannot_end_a_chain(second: Compressor) -> None:
    with pytest.raises(ValueError, match=f"{second.name} cannot end a chain"):
        Chain(LowRank(4), second)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [NoCompression(), Half(), IntB(8), QSGD(), Chain(LowRank(2), Half())])
def test_what_cannot_begin_a_chain(first: Compressor) -> None:
    with pytest.raises(ValueError, match="cannot begin a chain") as refused:
        Chain(first, IntB(8))  # type: ignore[arg-type]
    assert first.name in str(refused.value)


@every_chain
def test_a_chain_is_what_its_parts_are(level: str) -> None:
    compressor = chain(level)
    first, second = compressor.first, compressor.second
    assert compressor.name == level == f"{first.name}+{second.name}"
    assert compressor.keeps_residual and compressor.needs_finite_check and not compressor.may_overflow
    assert compressor.kind == second.kind and compressor.sides == first.sides
    assert compressor.uses_products == first.uses_products
    assert compressor.asks == (first.asks or second.asks)
    assert compressor.memory_passes > first.memory_passes
    for part in (first, second):
        assert part.learns == "nothing" or part.learns in compressor.learns
        assert part.paper in compressor.paper


# -- what happens on the way -------------------------------------------------------------------------------------------


@every_framework
@every_chain
def test_the_second_part_encodes_the_first_ones_payload(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), chain(level)
    spec = SPEC
    ctx = after_steps(ops, compressor, Case(spec, 3))
    count = len(compressor.first.init(ops, spec).state)
    grad = ops.from_numpy(Case(spec, 0, 5).gradients()[0])
    outer = ctx._replace(state=ctx.state[:count])
    between = compressor.first.encode(ops, outer, grad)
    layout = compressor.first.layout(spec, ctx.side)
    assert ops.to_numpy(between).size == sum(layout)
    inner = ctx._replace(
        spec=spec._replace(shapes=((layout.values,),), tail=layout.precise),
        side=0,
        state=ctx.state[count:][ctx.side : ctx.side + 1],
    )
    expected = compressor.second.encode(ops, inner, between)
    payload = compressor.encode(ops, ctx, grad)
    assert ops.to_numpy(payload).tobytes() == ops.to_numpy(expected).tobytes()
    decoded = compressor.first.decode(ops, outer, compressor.second.decode(ops, inner, payload))
    assert ops.to_numpy(compressor.decode(ops, ctx, payload)).tobytes() == ops.to_numpy(decoded).tobytes()
    assert compressor.payload_bytes(spec, ctx.side) == compressor.second.payload_bytes(inner.spec)


@every_framework
@pytest.mark.parametrize("level", [level for level in CHAINS if isinstance(chain(level).second, Integer)])
def test_every_phase_has_a_step_of_its_own(level: str, framework: str) -> None:
    """``lowrank`` sends factors of two sizes in turn: one scale for both would be wrong for each."""
    ops, compressor = ops_of(framework), chain(level)
    ctx = compressor.init(ops, SPEC)
    count = len(compressor.first.init(ops, SPEC).state)
    assert len(ctx.state) == count + compressor.sides
    for step in range(4):
        before = in_numpy(ops, ctx)
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in Case(SPEC).gradients(step)]
        ctx = compressor.advance(ops, ctx, add(payloads))
        for side in range(compressor.sides):
            was, now = before.state[count + side], in_numpy(ops, ctx).state[count + side]
            if side == before.side:
                assert now[3] == was[3] + 1 and now[0] != -127
            else:
                assert np.array_equal(was, now)


@every_framework
@every_chain
def test_what_the_first_part_wants_precise_is_precise(level: str, framework: str) -> None:
    """Dense tensors and the tail: to a millionth in integers, to float16 in float16, never on a few levels."""
    ops, compressor = ops_of(framework), chain(level)
    ctx = after_steps(ops, compressor, Case(SPEC, 3))
    grad = Case(SPEC, 0, 5).gradients()[0]
    arrived, payload = once(ops, compressor, ctx, grad)
    off = norm(arrived[SPEC.body :] - grad[SPEC.body :]) / norm(grad[SPEC.body :])
    assert off <= (1e-5 if isinstance(compressor.second, Integer) else 2.0**-11)
    if isinstance(compressor.second, Integer):
        _, _, inner = parts(compressor, in_numpy(ops, ctx))
        contributors = heard_in(compressor.second, inner.spec, ops.to_numpy(payload))
        assert contributors.tail.size == compressor.first.layout(SPEC, ctx.side).precise >= SPEC.tail


@every_framework
@pytest.mark.parametrize("level", ["lowrank:4+int8", "lowrank:4+fp16", "topk:0.1:16+int8", "lowrank:1+int16"])
def test_a_first_step_asks_for_what_both_parts_need(level: str, framework: str) -> None:
    """The step of the side, or the blocks: at once nearly as good as the first part alone, which chooses its own blocks
    where the second part has asked."""
    ops, compressor = ops_of(framework), chain(level)
    spec, rng = Spec(((24, 16),), tail=6), np.random.default_rng(2)
    matrix = (rng.standard_normal((24, 1)) @ rng.standard_normal((1, 16))).ravel()
    grad = np.concatenate([matrix, rng.standard_normal(6)]).astype(np.float32)
    ctx = compressor.init(ops, spec)
    first = compressor.first.init(ops, spec)
    for side in range(compressor.sides):
        ctx = asked(ops, compressor, ctx._replace(side=side), [grad])
        arrived, _ = once(ops, compressor, ctx, grad)
        alone, _ = once(ops, compressor.first, first._replace(side=side), grad)
        assert norm(arrived - alone) <= 0.05 * norm(grad)


@every_framework
@pytest.mark.parametrize("level", [level for level in CHAINS if "lowrank" in level])
def test_rounding_does_not_spoil_the_bases(level: str, framework: str) -> None:
    """Of a matrix that stays the same, after some steps: what rounding loses is all that is lost.

    Of integers, step / sqrt(12) of every element of a factor, whose step serves both matrices: it follows from the root
    mean square of both together, and an orthonormal basis carries the error over as it is. The basis is a rounded
    factor too, off by as much for the same reason. (Of so few elements there is a quarter more by chance.)
    """
    ops, compressor = ops_of(framework), chain(level)
    assert isinstance(compressor.first, LowRank)
    rng, spec = np.random.default_rng(2), Spec(((24, 20), (16, 16)))
    grad = np.concatenate(
        [(rng.standard_normal((n, 1)) @ rng.standard_normal((1, m))).ravel() for n, m in spec.shapes]
    ).astype(np.float32)
    ctx = compressor.init(ops, spec)
    for _ in range(8):
        arrived, payload = once(ops, compressor, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
    for shape, x, y in tensors(spec, grad, arrived):
        lost = 2e-3 * norm(x)
        if isinstance(compressor.second, Integer):
            share = sum(side / sum(sides) for side, sides in zip(shape, zip(*spec.shapes, strict=True), strict=True))
            lost = 1.25 * wanted_step(compressor.second.levels(1)) * math.sqrt(2 / 12 * share) * norm(grad)
        assert norm(x - y) <= lost


# -- float16 at the end ------------------------------------------------------------------------------------------------


@every_framework
@pytest.mark.parametrize("ranks", [*range(1, 14), 21, 32, 64])
def test_no_sum_of_saturated_halves_overflows(framework: str, ranks: int) -> None:
    """Magnitudes stop at 2^15, and are divided by N or more, so that no sum overflows, however the ring adds; the rest
    stays behind."""
    ops, compressor = ops_of(framework), Chain(TopK(share=0.5, block=2), Half())
    spec = Spec(((8,),), ranks=ranks)
    ctx = compressor.init(ops, spec)
    grad = np.array([1e30, -1e30, 2e5, -7e4, 1.0, 1e30, 1.0, 1.0], np.float32)
    payload = compressor.encode(ops, ctx, ops.from_numpy(grad))
    halves = ops.to_numpy(payload)
    with np.errstate(over="ignore"):
        in_turn = halves
        for _ in range(ranks - 1):
            in_turn = in_turn + halves  # as a ring does: rounded to float16 at every rank
    assert np.isfinite(in_turn).all()
    left = ops.to_numpy(compressor.remain(ops, ctx, ops.from_numpy(grad), payload))
    arrived = ops.to_numpy(compressor.decode(ops, ctx, payload))
    assert norm(left + arrived - grad) <= 1e-6 * norm(grad)
    assert np.abs(arrived[:4]).tolist() == [HALF_LIMIT] * 4


def test_a_part_that_saturates_is_not_narrow() -> None:
    """Alone, float16 is sent again in full width where it overflows; in a chain, the residual takes the rest."""
    assert Half().may_overflow and not Half(saturate=True).may_overflow
    built = Chain(LowRank(4), Half())
    assert built.second == Half(saturate=True) and not built.may_overflow
    assert parse("lowrank:4+fp16") == built
    assert parse("fp16").may_overflow, "a level of its own is untouched"


def test_too_many_ranks_are_an_error_of_the_whole_chain() -> None:
    compressor = chain("lowrank:4+int4")
    for ranks in (8, 100):
        spec = SPEC._replace(ranks=ranks)
        fewest = math.ceil(math.log2(ranks + 1)) + 1
        for refuse in (lambda s: compressor.init(NumpyOps(), s), compressor.payload_bytes):
            with pytest.raises(ValueError, match=rf"int4 .*{ranks} ranks.* {fewest}\b"):
                refuse(spec)
