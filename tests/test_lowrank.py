"""What is special to ``lowrank``: quality near the best that rank can do, orthonormal bases, views, changes of rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compressing import LEVELS, Case, add, every_framework, low_rank, norm, off_orthonormal, once, ops_of, tensors
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.compression import Chain, Compressor, Context, LowRank, Ops, Spec, parse
from hvdplus.compression.lowrank import most_square

LOWRANK = tuple(level for level in LEVELS if isinstance(parse(level), LowRank))
every_lowrank = pytest.mark.parametrize("level", LOWRANK)


def bases_of(ops: Ops, ctx: Context) -> list[np.ndarray]:
    """Q (b, m, r) and P (b, n, r) of every group of equal-shaped matrices."""
    return [ops.to_numpy(array) for array in ctx.state if len(array.shape) == 3]


def steep(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(a full-rank matrix whose singular values halve from one to the next, those values)."""
    small = min(rows, columns)
    u = np.linalg.qr(rng.standard_normal((rows, small)))[0]
    v = np.linalg.qr(rng.standard_normal((columns, small)))[0]
    spectrum = 2.0 ** -np.arange(small)
    return scale * (u * spectrum) @ v.T, spectrum


# -- quality, not only identities --------------------------------------------------------------------------------------


@every_framework
@every_lowrank
def test_matrices_of_that_rank_are_recovered_each_of_them(level: str, framework: str) -> None:
    """The same matrices, step after step and without a residual: once the bases are warm nothing is lost.

    Several equal-shaped matrices of very different size share a bucket: normalised together by one norm, as a known
    implementation does at rank 1, most of them would stay lost.
    """
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(11)
    shapes = ((24, 16), (24, 16), (7,), (24, 16), (24, 16), (3, 3, 8, 16), (16, 8, 3, 3))
    for rank in {1, compressor.rank}:
        pieces = [
            rng.standard_normal(7) if len(shape) == 1 else low_rank(rng, shape, rank, scale)
            for shape, scale in zip(shapes, (1.0, 1e-25, 1.0, 1e4, 1e-3, 1.0, 1e2), strict=True)
        ]
        spec, grad = Spec(shapes, tail=3), np.concatenate([*pieces, np.ones(3)]).astype(np.float32)
        ctx = compressor.init(ops, spec)
        for step in range(6):
            arrived, payload = once(ops, compressor, ctx, grad)
            ctx = compressor.advance(ops, ctx, payload)
            for _, x, y in tensors(spec, grad, arrived):
                assert step < 4 or norm(x - y) <= 1e-5 * norm(x), "in both sides"


@every_framework
@every_lowrank
def test_full_rank_matrices_come_near_the_best_that_rank_can_do(level: str, framework: str) -> None:
    """The error after some steps is within 2 % of the truncated singular value decomposition's."""
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(12)
    spec = Spec(((20, 12),) * 4)
    made = [steep(rng, 20, 12, scale) for scale in (1.0, 1.0, 1e-5, 1e3)]
    grad, spectrum = np.concatenate([matrix.ravel() for matrix, _ in made]).astype(np.float32), made[0][1]
    ctx = compressor.init(ops, spec)
    best = norm(spectrum[compressor.rank :]) / norm(spectrum)
    for step in range(12):
        arrived, payload = once(ops, compressor, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
        for _, x, y in tensors(spec, grad, arrived):
            assert step < 10 or best * (1 - 1e-3) <= norm(x - y) / norm(x) <= best * 1.02, "in both sides"


@every_framework
@every_lowrank
def test_all_ranks_together_project_the_sum(level: str, framework: str) -> None:
    """What the bases learn is the column space of the summed gradient, not of anybody's own."""
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(3)
    shared = low_rank(rng, (20, 16), 1, 1.0)
    noise = rng.standard_normal(320)
    grads = [(shared + 5 * noise).astype(np.float32), (shared - 5 * noise).astype(np.float32)]
    ctx = compressor.init(ops, Spec(((20, 16),), ranks=2))
    for _ in range(4):
        total = add([compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads])
        arrived = ops.to_numpy(compressor.decode(ops, ctx, total))
        ctx = compressor.advance(ops, ctx, total)
    assert norm(arrived - 2 * shared) <= 1e-4 * norm(2 * shared)


@every_framework
@every_lowrank
def test_two_steps_bring_the_bases_near_the_best(level: str, framework: str) -> None:
    """A whole power iteration: on average within 70 % of the best, and 45 % after one step more.

    Random bases are off by a factor of two at rank 1, and of more than ten at rank 4.
    """
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(4)
    made = [steep(rng, 24, 24, scale) for scale in (1.0, 1e-6, 1e6, 1.0, 30.0)] + [steep(rng, 30, 24) for _ in range(5)]
    spec = Spec(((24, 24),) * 5 + ((30, 24),) * 5, tail=4)
    grad = np.concatenate([*(matrix.ravel() for matrix, _ in made), np.ones(4)]).astype(np.float32)
    best = norm(made[0][1][compressor.rank :])

    def off(ctx: Context) -> float:
        arrived, _ = once(ops, compressor, ctx, grad)
        scales = [norm(matrix) / norm(spectrum) for matrix, spectrum in made]
        return float(
            np.mean([norm(x - y) / s for (_, x, y), s in zip(tensors(spec, grad, arrived), scales, strict=True)]) / best
        )

    ctx = compressor.init(ops, spec)
    assert off(ctx) >= (1.8 if compressor.rank == 1 else 10)
    for most in (math.inf, 1.7, 1.45):
        ctx = compressor.advance(ops, ctx, once(ops, compressor, ctx, grad)[1])
        assert max(off_orthonormal(basis) for basis in bases_of(ops, ctx)) < 1e-5
        assert off(ctx) <= most


# -- bases -------------------------------------------------------------------------------------------------------------


@every_framework
def test_bases_stay_orthonormal_through_changing_and_degenerate_gradients(framework: str) -> None:
    ops, compressor = ops_of(framework), parse("lowrank:4")
    rng = np.random.default_rng(13)
    spec = Spec(((24, 16), (16, 16), (24, 16)))
    kinds = [
        lambda: rng.standard_normal(spec.size),
        lambda: np.zeros(spec.size),
        lambda: np.concatenate([low_rank(rng, shape, 1, 1.0) for shape in spec.shapes]),
        lambda: 1e-30 * rng.standard_normal(spec.size),
        lambda: 1e30 * rng.standard_normal(spec.size),
        lambda: np.ones(spec.size),
        lambda: 1e-41 * rng.standard_normal(spec.size),
    ]
    ctx = compressor.init(ops, spec)
    for step in range(42 if framework != "tensorflow" else 21):
        grad = kinds[step * 3 % 7 if step % 2 else step % 7]().astype(np.float32)
        _, payload = once(ops, compressor, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
        assert max(off_orthonormal(basis) for basis in bases_of(ops, ctx)) < 1e-5


@every_framework
def test_tiny_and_huge_matrices_of_rank_one_are_recovered(framework: str) -> None:
    ops, compressor = ops_of(framework), parse("lowrank:1")
    rng = np.random.default_rng(3)
    for scale in (1e-30, 1e30):
        grad = low_rank(rng, (16, 12), 1, scale / 10).astype(np.float32)
        ctx = compressor.init(ops, Spec(((16, 12),)))
        for _ in range(4):
            arrived, payload = once(ops, compressor, ctx, grad)
            ctx = compressor.advance(ops, ctx, payload)
        assert norm(arrived - grad) <= 1e-5 * norm(grad)


def test_sides_alternate() -> None:
    compressor, spec = LowRank(2), Spec(((30, 20),), tail=3)
    assert compressor.sides == 2
    assert [compressor.payload_bytes(spec, side) for side in (0, 1)] == [4 * (2 * 30 + 3), 4 * (2 * 20 + 3)]
    ops = ops_of("numpy")
    ctx = compressor.init(ops, spec)
    grad = Case(spec).gradients()[0]
    for side in (0, 1, 0, 1):
        assert ctx.side == side
        before, payload = ctx.state, compressor.encode(ops, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
        assert ctx.state[side] is before[side] and not np.array_equal(ctx.state[1 - side], before[1 - side])


@every_framework
@pytest.mark.parametrize(
    ("rank", "shape", "dense"),
    [
        (1, (2, 2), False),
        (1, (1, 50), True),
        (1, (50,), True),
        (1, (), True),
        (4, (8, 8), False),
        (4, (7, 100), True),
        (4, (100, 7), True),
        (4, (100, 8), False),
        (4, (3, 3, 1, 16), False),  # 9 x 16
        (4, (8, 1, 3, 3), False),  # 8 x 9
        (4, (7, 1, 3, 3), True),
        (4, (5, 5, 5), True),
    ],
)
def test_vectors_and_tiny_matrices_travel_dense(framework: str, rank: int, shape: tuple[int, ...], dense: bool) -> None:
    ops, compressor = ops_of(framework), LowRank(rank)
    spec = Spec((shape, (3,)), tail=2)
    size = spec.sizes[0]
    grad = np.random.default_rng(1).standard_normal(spec.size, np.float32)
    ctx = compressor.init(ops, spec)
    assert len(ctx.state) == (0 if dense else 3)
    for side in (0, 1):
        arrived, payload = once(ops, compressor, ctx, grad)
        sent = ops.to_numpy(payload)
        assert np.array_equal(sent[-5:], grad[-5:]) and np.array_equal(arrived[-5:], grad[-5:])
        if dense:
            assert np.array_equal(sent, grad) and np.array_equal(arrived, grad)
        else:
            assert sent.size == 5 + rank * most_square(shape)[side] <= 5 + size
            assert not np.allclose(arrived[:size], grad[:size])
        ctx = compressor.advance(ops, ctx, payload)


# -- changes of rank ---------------------------------------------------------------------------------------------------


def lost(old: np.ndarray, new: np.ndarray) -> float:
    """Largest singular value of what the smaller space has outside of the larger one, over a batch."""
    small, large = sorted((old.astype(np.float64), new.astype(np.float64)), key=lambda basis: basis.shape[-1])
    outside = small - large @ (large.swapaxes(-1, -2) @ small)
    return float(np.linalg.norm(outside, ord=2, axis=(-2, -1)).max())


@every_framework
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("suffix", ["", "+fp16"])
def test_another_rank_inherits_the_column_space(framework: str, before: int, after: int, suffix: str) -> None:
    """More columns keep all the old ones, fewer the first; nobody starts from noise again."""
    ops = ops_of(framework)
    old_level, new_level = parse(f"lowrank:{before}{suffix}"), parse(f"lowrank:{after}{suffix}")
    assert new_level.can_reuse(old_level) and old_level.can_reuse(new_level)
    shapes = ((20, 16), (6, 5), (3,), (24, 18), (20, 16), (5, 4))  # (6, 5) and (5, 4) are dense at rank 4
    spec, rng = Spec(shapes, seed=2, tail=3), np.random.default_rng(6)
    made = [low_rank(rng, shape, min(before, after), 1.0) for shape in shapes]
    grad = np.concatenate([*made, np.ones(3)]).astype(np.float32)
    ctx = old_level.init(ops, spec)
    for _ in range(5):
        ctx = old_level.advance(ops, ctx, once(ops, old_level, ctx, grad)[1])
    new = new_level.reuse_context(ops, new_level.init(ops, spec), ctx)
    assert new.side == ctx.side and new.spec == spec
    assert [array.shape for array in bases_of(ops, new)] == [
        array.shape for array in bases_of(ops, new_level.init(ops, spec))
    ]
    assert max(off_orthonormal(basis) for basis in bases_of(ops, new)) < 1e-5
    olds = {basis.shape[:2]: basis for basis in bases_of(ops, ctx)}
    compared = 0
    for basis in bases_of(ops, new):
        if basis.shape[:2] in olds:
            kept = olds[basis.shape[:2]]
            assert lost(kept, basis) < 1e-5
            assert np.allclose(kept[..., : min(before, after)], basis[..., : min(before, after)], atol=1e-5)
            compared += 1
    assert compared >= 4
    if after >= before:  # nothing is forgotten: matrices of the old rank still arrive whole
        arrived, _ = once(ops, new_level, new, grad)
        for shape, x, y in tensors(spec, grad, arrived):
            if min(most_square(shape)) >= 8:
                assert norm(x - y) <= (1e-4 if not suffix else 2e-3) * norm(x)
    encoded = ops.to_numpy(new_level.encode(ops, new, ops.from_numpy(grad)))
    assert encoded.nbytes == new_level.payload_bytes(spec, new.side)


def test_who_follows_whom() -> None:
    def can_reuse(new: str, old: str) -> bool:
        return parse(new).can_reuse(parse(old))

    assert can_reuse("lowrank:4", "lowrank:1") and can_reuse("lowrank:1+fp16", "lowrank:4+fp16")
    for new, old in (
        ("lowrank:4", "topk:0.1"),
        ("topk:0.1", "topk:0.2"),
        ("int8", "int4"),
        ("lowrank:4+int8", "lowrank:2+int8"),  # scales of other payloads
        ("lowrank:4+fp16", "topk:0.1+fp16"),
        ("lowrank:4", "none"),
    ):
        assert not can_reuse(new, old), (new, old)


def test_a_compressor_that_follows_nobody_keeps_its_own_start() -> None:
    for level in LEVELS:
        compressor: Compressor = parse(level)
        first = compressor.init(ops_of("numpy"), Spec(((20, 16),)))
        if isinstance(compressor, Chain | LowRank):
            continue
        assert compressor.reuse_context(ops_of("numpy"), first, first) == first


# -- views -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((64, 32, 3, 3), (64, 288)),  # torch: out, in, h, w
        ((3, 3, 32, 64), (288, 64)),  # Keras: h, w, in, out
        ((32, 1, 3, 3), (32, 9)),
        ((3, 3, 1, 32), (9, 32)),
        ((512, 8, 1, 1), (512, 8)),
        ((1, 1, 8, 512), (8, 512)),
        ((10, 20), (10, 20)),
        ((20, 10), (20, 10)),
        ((6, 5, 4), (6, 20)),
        ((9,), (1, 9)),
        ((), (1, 1)),
        ((0, 5), (1, 0)),
    ],
)
def test_most_square_view(shape: tuple[int, ...], view: tuple[int, int]) -> None:
    assert most_square(shape) == view


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
@examples(50)
def test_most_square_is_a_view_and_none_is_squarer(shape: list[int]) -> None:
    rows, columns = most_square(tuple(shape))
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    assert (rows, columns) in cuts
    assert rows + columns == min(map(sum, cuts))
