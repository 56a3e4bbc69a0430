"""What compressors ask of a framework: every operation, in every framework, held against closed forms and NumPy."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from compressing import OPS, every_framework, lanes, norm, off_orthonormal, ops_of
from frameworks import examples, need
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Array, Ops, Spec, parse
from hvdplus.compression.contract import Piecewise
from hvdplus.compression.hashing import scramble
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Piece, Product, Rows

other_frameworks = pytest.mark.parametrize("framework", [name for name in OPS if name != "numpy"])
LARGE = 300_001
"""More elements than any implementation works on at a time."""


def random_values(size: int, seed: int = 0) -> np.ndarray:
    """float32 Gaussians."""
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@every_framework
def test_the_surface_is_what_the_protocol_says(framework: str) -> None:
    """No operation is missing, and compressors cannot come to depend on one that only some frameworks have."""
    promised = {name for name in vars(Ops) if not name.startswith("_")}
    ours = ops_of(framework)
    assert {name for name in dir(ours) if not name.startswith("_")} == promised
    for name in promised:
        assert (
            list(inspect.signature(getattr(ours, name)).parameters)
            == list(inspect.signature(getattr(Ops, name)).parameters)[1:]
        )


# -- moving and joining ------------------------------------------------------------------------------------------------


@every_framework
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64])
def test_a_copy_to_the_framework_and_back_is_bit_for_bit_and_a_copy(framework: str, dtype: type) -> None:
    ops = ops_of(framework)
    values = np.array([[0.0, -0.0, 3], [7, 100, -1.5]]).astype(dtype)
    if dtype == np.float32:
        values[0] = math.nan, 1e-45, math.inf
    there = ops.from_numpy(values)
    back = ops.to_numpy(there)
    assert back.tobytes() == values.tobytes() and back.shape == values.shape and back.dtype == values.dtype
    kept = values.tobytes()
    values[:] = 7
    back[:] = 8
    assert ops.to_numpy(there).tobytes() == kept


@every_framework
def test_a_constant_is_what_its_maker_says_and_is_sent_to_a_device_once(framework: str) -> None:
    ops, made = OPS[framework].make(), []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(3, dtype=np.int32)

    first, second = ops.constant("three", make), ops.constant("three", make)
    for constant in (first, second, ops.constant(("three", 1), lambda: np.arange(3, dtype=np.int32))):
        assert ops.to_numpy(constant).dtype == np.int32 and ops.to_numpy(constant).tolist() == [0, 1, 2]
    if "torch" in framework:
        assert first is second and len(made) == 1


def test_tensorflow_keeps_no_constant_of_a_graph_for_another() -> None:
    tf, ops = pytest.importorskip("tensorflow"), ops_of("tensorflow")

    def twice() -> Any:
        return ops.constant("one", lambda: np.ones(1, np.float32)) * 2

    for _ in range(2):
        assert tf.function(twice)().numpy().tolist() == [2.0]
    assert twice().numpy().tolist() == [2.0]


@pytest.mark.parametrize("framework", ["torch", "torch on a device"])
@pytest.mark.parametrize("level", ["int8", "signsgd", "randomk:0.1:16", "topk:0.1:16+int8", "lowrank:4+fp16"])
def test_a_step_sends_nothing_to_the_device_that_it_had_sent_before(level: str, framework: str) -> None:
    torch, sent = pytest.importorskip("torch"), []

    class Counting(type(OPS[framework].make())):  # type: ignore[misc]
        def from_numpy(self, values: np.ndarray) -> Array:
            sent.append(values)
            return super().from_numpy(values)

    ops, compressor = Counting("cpu"), parse(level)
    ctx = compressor.init(ops, Spec(((50, 40),), tail=3))
    values = np.ones(2003, np.float32)
    for step in range(3):
        sent.clear()
        payload = compressor.send(ops, ctx, torch.from_numpy(values.copy()), torch.from_numpy(values)).payload
        ctx = compressor.advance(ops, ctx, payload)
        assert step < compressor.sides or not sent


@every_framework
def test_reshape_is_row_major(framework: str) -> None:
    ops = ops_of(framework)
    values = np.arange(12, dtype=np.float32)
    for shape in ((3, 4), (2, 3, 2), (12,), (1, 12)):
        assert np.array_equal(ops.to_numpy(ops.reshape(ops.from_numpy(values), shape)), values.reshape(shape))
    assert ops.to_numpy(ops.reshape(ops.from_numpy(values[:0]), (0, 5))).shape == (0, 5)


@every_framework
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (0, 0), (0, 4, 0), (2, 3), (400_000, 1, 200_000)], ids=str)
def test_concat(framework: str, dtype: type, sizes: tuple[int, ...]) -> None:
    ops = ops_of(framework)
    parts = [np.arange(size).astype(dtype) + i for i, size in enumerate(sizes)]
    joined = ops.to_numpy(ops.concat([ops.from_numpy(part) for part in parts]))
    assert joined.dtype == (dtype if parts else np.float32)
    assert np.array_equal(joined, np.concatenate([*parts, np.zeros(0, dtype)]))


def test_parts_that_adjoin_are_joined_and_others_are_copied() -> None:
    """In PyTorch what adjoins in one array's memory may be joined without a copy; nothing else may come in between."""
    torch, ops = need("torch"), ops_of("torch")
    values = np.arange(24, dtype=np.float32)
    base, other = torch.from_numpy(values.copy()), torch.from_numpy(100 + values)
    grid = torch.from_numpy(values.copy()).view(4, 6)
    for parts in (
        [base[:3], base[3:7], base[7:20]],
        [base[5:6], base[6:6], base[6:9]],  # nothing in between
        [base[:4], base[4:4], base[5:9]],  # something in between
        [base[4:8], base[:4]],  # the other way round
        [base[:4], base[2:6]],  # over each other
        [base[:4], base[:4]],
        [base[:8:2], base[8:12]],
        [base[:1], base[1:9:2], base[9:10]],
        [base[3:4], base[4:5][::2], base[5:6]],
        [base[:5], other[5:9]],  # of different arrays, at the places that would adjoin
        [base[:3], base[3:6], other[6:9]],
        [other[:3], base[3:6], base[6:9]],
        [grid[0], grid[1], grid[2]],
        [grid[:, 0], grid[:, 1]],
        [grid[:1, 5].reshape(-1), grid[1]],
    ):
        before = [part.clone() for part in parts]
        joined = ops.concat(parts)
        assert joined.tolist() == [value for part in before for value in part.tolist()]
        assert joined.dim() == 1 and joined.is_contiguous()
        storages = {part.untyped_storage().data_ptr() for part in parts if part.numel()}
        if joined.untyped_storage().data_ptr() in storages:  # a view: of all its parts
            starts = [part.data_ptr() for part in parts if part.numel()]
            assert storages == {joined.untyped_storage().data_ptr()} and joined.data_ptr() == min(starts)
        else:
            joined[:] = -1
            assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))
    halves = torch.arange(8).to(torch.int64)
    assert ops.concat([halves[:3], halves[3:]]).tolist() == list(range(8))


def test_parts_that_adjoin_by_chance_are_copied() -> None:
    """Arrays of their own that other libraries cut from one block: no view of the one reaches into the other."""
    torch, ops = need("torch"), ops_of("torch")
    memory = np.arange(8, dtype=np.float32)
    whole, front, back = (torch.from_numpy(memory[part]) for part in (slice(None), slice(3), slice(3, None)))
    for parts in ([front, back], [front, whole[3:]], [whole[:3], back]):
        assert ops.concat(parts).tolist() == memory.tolist()


@every_framework
def test_take_and_put(framework: str) -> None:
    ops = ops_of(framework)
    matrix = random_values(40).reshape(10, 4)
    rows = np.array([0, 3, 9], np.int32)
    assert np.array_equal(ops.to_numpy(ops.take_rows(ops.from_numpy(matrix), ops.from_numpy(rows))), matrix[rows])
    values, there = matrix[:, 0].copy(), ops.from_numpy(matrix[:, 0].copy())
    changed = ops.to_numpy(ops.put_values(there, ops.from_numpy(rows), ops.from_numpy(np.ones(3, np.float32))))
    assert np.array_equal(ops.to_numpy(there), values), "a copy"
    values[rows] = 1
    assert np.array_equal(changed, values)


@every_framework
def test_large_arrays_that_somebody_holds_are_never_handed_out_again(framework: str) -> None:
    """Memory may be kept and reused from step to step, but only what nobody can see any more."""
    ops, size = ops_of(framework), 600_000
    held: list[tuple[Array, float]] = []
    for i in range(8):
        part = ops.from_numpy(np.full(size, i, np.float32))
        whole = ops.concat([part, part])
        if i % 2:
            held.append((whole[7:], float(i)))  # only a view of it
        if i % 3 == 0:
            held.append((ops.half([part], 1.0), float(i)))
        del whole
    for array, value in held:
        assert (ops.to_numpy(array) == value).all()


def test_large_arrays_that_nobody_holds_are_handed_out_again() -> None:
    """PyTorch gives large blocks back to the system, and touching new pages costs more than a copy."""
    torch, ops = need("torch"), OPS["torch"].make()
    part = torch.zeros(600_000)
    first = ops.concat([part, part]).data_ptr()
    assert all(ops.concat([part, part]).data_ptr() == first for _ in range(3))
    held = ops.concat([part, part])
    assert ops.concat([part, part]).data_ptr() != held.data_ptr()


# -- pieces ------------------------------------------------------------------------------------------------------------


def pieces_of(ops: Ops, rng: np.random.Generator, large: bool) -> list[tuple[Piece, np.ndarray]]:
    """(piece, what it stands for), one of every kind, some of them empty."""
    scale = 400 if large else 1

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    left, right = values(5 * scale, 3), values(7, 3)
    kept, rows = values(4, 30 * scale), np.array([0, 2, 3, 8], np.int32)
    sparse = np.zeros((9, 30 * scale), np.float32)
    sparse[rows] = kept
    halves = values(11 * scale).astype(np.float16)
    plain = values(13 * scale)
    found: list[tuple[Piece, np.ndarray]] = [
        (ops.from_numpy(plain), plain),
        (Product(ops.from_numpy(left), ops.from_numpy(right)), (left @ right.T).ravel()),
        (Rows(ops.from_numpy(kept), ops.from_numpy(rows), 9), sparse.ravel()),
        (Halves(ops.from_numpy(halves), 4.0), halves.astype(np.float32) * 4),
        (ops.from_numpy(plain[:0]), plain[:0]),
        (Halves(ops.from_numpy(halves[:0]), 4.0), plain[:0]),
    ]
    for bits, word in ((2, 32), (3, 64), (8, 32), (11, 64), (12, 64), (16, 32), (32, 32), (32, 64)):
        for count in (0, 1, 17 * scale):
            most = min(2 ** (bits - 1) - 1, 2**20)
            numbers = rng.integers(-most, most + 1, count)
            words = packed(numbers, bits, word)
            exponent = ops.from_numpy(np.array([-3], np.int32))
            standing = (numbers.astype(np.float32) * np.float32(2.0**-3)).astype(np.float32)
            found.append((Packed(ops.from_numpy(words), exponent, bits, count), standing))
    return found


def packed(numbers: np.ndarray, bits: int, word: int) -> np.ndarray:
    """Signed integers in lanes, by Python's own integers; the inverse of ``lanes``."""
    per_word = word // bits
    table = np.zeros(-(-numbers.size // per_word) * per_word, np.int64)
    table[: numbers.size] = numbers
    table = table.reshape(-1, per_word) if bits in (8, 16) else table.reshape(per_word, -1).T
    sums = [sum(number << (bits * lane) for lane, number in enumerate(row)) for row in table.tolist()]
    return np.array(sums, np.int32 if word == 32 else np.int64)


@every_framework
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_assemble_and_subtract(framework: str, large: bool) -> None:
    ops, rng = ops_of(framework), np.random.default_rng(3)
    pieces = pieces_of(ops, rng, large)
    for chosen in [pieces, *([piece] for piece in pieces), pieces[::-1]]:
        expected = np.concatenate([values for _, values in chosen])
        whole = ops.to_numpy(ops.assemble([piece for piece, _ in chosen]))
        assert whole.dtype == np.float32 and whole.shape == expected.shape
        assert np.allclose(whole, expected, rtol=1e-6, atol=1e-5), "to the rounding of products"
        third = ops.to_numpy(ops.assemble([piece for piece, _ in chosen], 1 / 3))
        assert third.dtype == np.float32 and np.allclose(third, expected / 3, rtol=1e-6, atol=1e-5)
        assert np.array_equal(ops.to_numpy(ops.assemble([piece for piece, _ in chosen])), whole), "pieces are as before"
        minuend = rng.standard_normal(expected.size, np.float32)
        left = ops.to_numpy(ops.subtract(ops.from_numpy(minuend), [piece for piece, _ in chosen]))
        assert left.shape == expected.shape and left.dtype == np.float32
        off = np.abs(left - (minuend.astype(np.float64) - expected))
        assert (off <= 1e-6 * (np.abs(minuend) + np.abs(expected)) + 1e-5).all()
    if not large:
        for piece, values in pieces:
            if isinstance(piece, Packed | Rows | Halves):
                assert np.array_equal(ops.to_numpy(ops.assemble([piece])), values), "copied, or exact integers"


@every_framework
@pytest.mark.parametrize("rows", [15, 16, 1000, 1003])
@pytest.mark.parametrize("column_by_column", [False, True])
def test_products_larger_than_the_cache(framework: str, rows: int, column_by_column: bool) -> None:
    """PyTorch computes them in blocks of rows, whatever is left over, and however the factors lie in memory."""
    ops, columns = ops_of(framework), 300 * 1000 // rows
    left, right = (random_values(3 * length, seed=length).reshape(length, 3) for length in (rows, columns))
    factors = [ops.from_numpy(factor) for factor in (left, right)]
    if column_by_column:
        if framework != "torch":
            pytest.skip("only PyTorch's arrays know strides of their own")
        factors = [factor.t().contiguous().t() for factor in factors]
    product = Product(*factors)
    expected = (left.astype(np.float64) @ right.T.astype(np.float64)).ravel()
    assert np.allclose(ops.to_numpy(ops.assemble([product], 1 / 3)), expected / 3, rtol=1e-5, atol=1e-6)
    minuend = random_values(rows * columns, seed=1)
    assert np.allclose(ops.to_numpy(ops.subtract(ops.from_numpy(minuend), [product])), minuend - expected, atol=1e-5)
    into = ops.from_numpy(np.full(rows * columns, np.nan, np.float32))
    if ops.assemble_into([product], 1.0, [into]):
        assert np.allclose(ops.to_numpy(into), expected, atol=1e-5), "what was there is not read"


@every_framework
@pytest.mark.parametrize("level", ["lowrank:2", "lowrank:4+fp16", "topk:0.2", "topk:0.3:7", "randomk:0.3+fp16", "fp16"])
def test_means_are_written_where_they_shall_be(framework: str, level: str) -> None:
    """Into tensors with gaps between them."""
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, Piecewise)
    spec = Spec(((12, 20), (30, 10), (300, 1), (5, 4, 16)), 0, 0, 2, tail=11)
    ctx = compressor.init(ops, spec)
    total = compressor.encode(ops, ctx, ops.from_numpy(random_values(spec.size)))
    expected = ops.to_numpy(compressor.mean(ops, ctx, total, 0.5))
    memory = [ops.from_numpy(np.full(size + 3, np.nan, np.float32)) for size in (*spec.sizes, 4, 7)]
    parts = [whole[:-3] for whole in memory]
    done = compressor.mean_into(ops, ctx, total, 0.5, parts)
    assert done == (framework != "tensorflow"), "arrays of a graph cannot be written to"
    if done:
        found = np.concatenate([ops.to_numpy(part) for part in parts])
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        assert all(np.isnan(ops.to_numpy(whole)[-3:]).all() for whole in memory)


@every_framework
def test_a_mean_of_float64_keeps_its_53_bits(framework: str) -> None:
    """Torch wrote it to float32, so that digits were lost and 1e300 was infinite."""
    ops, sums = ops_of(framework), np.array([1 + 2.0**-52, 1e300])
    mean = ops.to_numpy(ops.assemble([ops.from_numpy(sums)], 0.5))
    assert mean.dtype == np.float64 and np.array_equal(mean, sums / 2)


@every_framework
def test_nothing_of_nothing(framework: str) -> None:
    ops = ops_of(framework)
    assert ops.to_numpy(ops.assemble([])).shape == (0,)
    assert ops.to_numpy(ops.subtract(ops.from_numpy(np.zeros(0, np.float32)), [])).shape == (0,)


# -- products and bases ------------------------------------------------------------------------------------------------


@every_framework
def test_products(framework: str) -> None:
    ops = ops_of(framework)
    a, b = random_values(30).reshape(5, 6), random_values(24, 1).reshape(6, 4)
    for batch in ((), (3,)):
        x, y = np.broadcast_to(a, (*batch, 5, 6)).copy(), np.broadcast_to(b, (*batch, 6, 4)).copy()
        plain = ops.to_numpy(ops.matmul(ops.from_numpy(x), ops.from_numpy(y)))
        turned = np.ascontiguousarray(x.swapaxes(-1, -2))
        transposed = ops.to_numpy(ops.matmul(ops.from_numpy(turned), ops.from_numpy(y), transpose_a=True))
        for product in (plain, transposed):
            assert product.shape == (*batch, 5, 4) and norm(product - a @ b) <= 1e-6 * norm(product) + 1e-6


@every_framework
@pytest.mark.parametrize("transpose", [False, True])
def test_a_product_of_a_matrix_that_stands_in_a_bucket(transpose: bool, framework: str) -> None:
    ops, bucket = ops_of(framework), random_values(50)
    basis = random_values((5 if transpose else 6) * 3, 1).reshape(-1, 3)
    matrix = bucket[7:37].reshape(5, 6)
    product = ops.to_numpy(ops.project(ops.from_numpy(bucket), 7, (5, 6), ops.from_numpy(basis), transpose))
    assert np.allclose(product, (matrix.T if transpose else matrix) @ basis, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", [(513, 600), (600, 513), (2, 200_000), (200_000, 2), (1, 300_000)])
def test_a_vector_is_added_up_while_it_is_multiplied(shape: tuple[int, int], transpose: bool) -> None:
    """PyTorch adds up blocks of rows, whatever is left over, and multiplies each; the sum is as if added up before."""
    need("torch")
    from hvdplus.adapters.torch.joint import Joint

    ops, size = ops_of("torch"), math.prod(shape)
    first, second, basis = (
        ops.from_numpy(random_values(count, seed))
        for seed, count in enumerate((size + 20, size + 20, 2 * shape[0 if transpose else 1]))
    )
    parts = [part.clone() for part in first.split([5, size, 15])]
    whole = first.new_full((size + 20,), math.nan)
    joint = Joint(parts, second, 0.5, whole)
    product = ops.project(joint, 5, shape, basis.view(-1, 2), transpose)
    expected = first + 0.5 * second
    matrix = expected[5 : size + 5].view(shape)
    assert (product - ops.matmul(matrix, basis.view(-1, 2), transpose)).norm() <= 1e-5 * product.norm()
    assert whole[5 : size + 5].equal(expected[5 : size + 5])
    assert whole[:5].isnan().all() and whole[size + 5 :].isnan().all(), "nobody has read them"
    assert joint[1:3].equal(expected[1:3]) and whole[:5].equal(expected[:5]) and whole[size + 5 :].isnan().all()
    for part in parts[:2]:
        part.zero_()  # they have been read
    again = ops.project(joint, 5, shape, basis.view(-1, 2), transpose)
    assert (again - product).norm() <= 1e-5 * product.norm() and joint[:].equal(expected)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))))
@examples(60)
def test_what_is_read_of_a_vector_is_added_up_once(lengths: list[int], stretches: list[tuple[int, int]]) -> None:
    torch = need("torch")
    from hvdplus.adapters.torch.joint import Joint

    one, other = (torch.from_numpy(random_values(sum(lengths), seed)) for seed in range(2))
    parts = list(one.clone().split(lengths))
    joint = Joint(parts, other, -0.25, torch.full_like(one, math.nan))
    expected = one - 0.25 * other
    for start, stop in stretches:
        assert joint[start:stop].equal(expected[start:stop])
        first = 0
        for part in parts:
            if first < stop and start < first + len(part):
                part.fill_(math.nan)  # as it has been read
            first += len(part)
    assert joint[:].equal(expected)


def test_products_have_full_precision_whatever_the_script_has_chosen() -> None:
    torch = need("torch")
    from hvdplus.adapters.torch import private

    assert len(private._products) == 2, "this PyTorch has both"
    products = [one for one, *_ in private._products]
    before = [one.fp32_precision for one in products]
    torch.set_float32_matmul_precision("medium")
    try:
        chosen = [one.fp32_precision for one in products]
        assert set(chosen) & {"tf32", "bf16"}
        with private.full_precision():
            assert {one.fp32_precision for one in products} <= {"ieee", "none"}
        assert [one.fp32_precision for one in products] == chosen
        ops = ops_of("torch")
        a, b = (ops.from_numpy(random_values(64 * 64, seed).reshape(64, 64)) for seed in (1, 2))
        expected = a.double() @ b.double()
        assert float((ops.matmul(a, b) - expected).abs().max()) < 1e-4
        whole = ops.assemble([Product(a, b)]).view(64, 64)
        assert float((whole - a.double() @ b.double().T).abs().max()) < 1e-4
    finally:
        torch.set_float32_matmul_precision("highest")
        for one, value in zip(products, before, strict=True):
            one.fp32_precision = value


def test_before_pytorch_2_9_only_devices_have_a_reduced_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    need("torch")
    import importlib
    from types import SimpleNamespace

    from hvdplus.adapters.torch import private

    matmul = SimpleNamespace(allow_tf32=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("torch.backends.cuda.matmul", matmul)
            patch.setattr("torch.backends.mkldnn.matmul", None)
            importlib.reload(private)
            with private.full_precision():
                assert matmul.allow_tf32 is False
            assert matmul.allow_tf32 is True
    finally:
        importlib.reload(private)
    assert len(private._products) == 2


@every_framework
@pytest.mark.parametrize("kind", ["full", "deficient", "one column zero", "zero", "tiny", "square"])
def test_orthonormal_whatever_comes(framework: str, kind: str) -> None:
    ops = ops_of(framework)
    rng = np.random.default_rng(5)
    columns = rng.standard_normal((3, 4 if kind == "square" else 20, 4))
    if kind == "deficient":
        columns = columns[:, :, :2] @ rng.standard_normal((2, 4))
    elif kind == "one column zero":
        columns[:, :, 1] = 0
    elif kind == "zero":
        columns[:] = 0
    elif kind == "tiny":
        columns *= 1e-30
    batch = ops.to_numpy(ops.orthonormal(ops.from_numpy(columns.astype(np.float32)))).astype(np.float64)
    assert batch.shape == columns.shape
    assert off_orthonormal(batch) < 1e-5
    if kind == "tiny":  # some frameworks take squares that underflow for zeros; that is why callers scale first
        return
    for basis, matrix in zip(batch, columns, strict=True):
        assert norm(matrix - basis @ (basis.T @ matrix)) <= 1e-5 * norm(matrix), "the column space is inside"
        if kind in ("full", "square"):
            triangle = basis.T @ matrix
            assert (np.diag(triangle) > 0).all() and norm(np.tril(triangle, -1)) <= 1e-5 * norm(triangle)


@every_framework
def test_the_largest_magnitude_of_each_matrix(framework: str) -> None:
    ops = ops_of(framework)
    batch = np.array([[[1, -3.5], [2, 0]], [[0, 0], [-0.0, 0]], [[1e-30, 0], [0, 0]], [[3e38, 1], [1, -3.2e38]]])
    batch = batch.astype(np.float32)
    largest = ops.to_numpy(ops.largest(ops.from_numpy(batch)))
    assert largest.shape == (4, 1, 1) and largest.dtype == np.float32
    assert largest.ravel().tolist() == [3.5, 0, np.float32(1e-30), np.float32(3.2e38)]


# -- rounding ----------------------------------------------------------------------------------------------------------


@every_framework
@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0**-7])
def test_half(framework: str, factor: float) -> None:
    """To nearest even, infinite beyond 65504, ties and denormals included."""
    ops = ops_of(framework)
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), 65519, 65520, -65520, 2.0**-25, 3 * 2.0**-25])
    values = np.concatenate([ties, [0, math.inf, -math.inf, 1e30, 1e-30], random_values(LARGE)]).astype(np.float32)
    halves = ops.to_numpy(ops.half([ops.from_numpy(values)], factor))
    fits = (np.abs(values) < 65504) & (np.abs(values * factor) > 2.0**-14)
    wide = halves.astype(np.float64)[fits] / factor
    assert (np.abs(wide - values[fits]) <= 2.0**-11 * np.abs(values[fits])).all() and fits.sum() > LARGE / 2
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16) * np.float16(factor)
    assert halves.dtype == np.float16 and halves.tobytes() == expected.tobytes()
    assert np.isnan(ops.to_numpy(ops.half([ops.from_numpy(np.array([math.nan], np.float32))], factor))).all()


@every_framework
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.125])
def test_half_saturates(framework: str, factor: float) -> None:
    """What is finite stays finite; what is not does not."""
    ops = ops_of(framework)
    values = np.array([1e30, -1e30, 3e38, 3e4, -7e4, 1.0, math.inf, -math.inf, math.nan], np.float32)
    with np.errstate(invalid="ignore"):  # NumPy says so of 0 * infinity
        halves = ops.to_numpy(
            ops.half([ops.from_numpy(part) for part in np.array_split(values, 3)], factor, saturate=True)
        )
    stopped = np.abs(halves[[0, 1, 2, 4]].astype(float))
    assert (stopped == HALF_LIMIT * factor).all() and HALF_LIMIT == 2**15
    assert halves[3] == np.float16(3e4) * np.float16(factor), "below it nothing stops"
    assert (np.sign(halves[:6]) == np.sign(values[:6])).all()
    assert halves[5] == np.float16(factor)
    assert np.isnan(halves[6:]).all()


@every_framework
def test_integers_are_the_nearest(framework: str) -> None:
    ops = ops_of(framework)
    values = np.array([0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.4999, -2.6, 2.0**20 + 1, 1e9], np.float32)
    for bits, dtype in ((32, np.int32), (64, np.int64)):
        integers = ops.to_numpy(ops.integers(ops.from_numpy(values), bits))
        assert integers.dtype == dtype
        assert integers.tolist() == [0, 0, 2, 2, 0, -2, 0, -3, 2**20 + 1, 10**9]
        assert ops.to_numpy(ops.integers(ops.from_numpy(values) > 1.0, bits)).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
        back = ops.to_numpy(ops.integers(ops.from_numpy(np.array([-7, 2**30], np.int32)), bits))
        assert back.tolist() == [-7, 2**30] and back.dtype == dtype
    strange = np.array([math.nan, math.inf, -math.inf], np.float32)
    assert ops.to_numpy(ops.integers(ops.from_numpy(strange))).shape == (3,)


@every_framework
def test_powers_of_two_are_exact(framework: str) -> None:
    ops = ops_of(framework)
    exponents = np.arange(-140, 128, dtype=np.int32)
    powers = ops.to_numpy(ops.power_of_two(ops.from_numpy(exponents)))
    assert powers.dtype == np.float32
    assert powers.tolist() == [2.0 ** int(e) if e > -127 else 0.0 for e in exponents]


@every_framework
def test_logarithms(framework: str) -> None:
    ops = ops_of(framework)
    values = np.array([2.0**-100, 1.0, 2.0, 10.0, 3e38], np.float32)
    assert np.allclose(ops.to_numpy(ops.log2(ops.from_numpy(values))), np.log2(values.astype(np.float64)), atol=2e-5)


# -- measuring ---------------------------------------------------------------------------------------------------------

EXTREMES = {
    "usual": 1.0,
    "squares overflow": 1e25,
    "squares underflow": 1e-25,
    "nearly the largest": 1e38,
    "nearly the smallest": 1e-36,
}


@every_framework
@pytest.mark.parametrize("scale", EXTREMES.values(), ids=EXTREMES)
def test_root_mean_squares(framework: str, scale: float) -> None:
    ops = ops_of(framework)
    for size in (1, 2, 1000):
        values = np.clip(random_values(size).astype(float) * scale, -3e38, 3e38).astype(np.float32)
        rms = ops.to_numpy(ops.rms(ops.from_numpy(values)))
        assert rms.shape == () and rms.dtype == np.float32
        assert math.isclose(rms, math.sqrt(np.mean(values.astype(np.float64) ** 2)), rel_tol=1e-5)


@every_framework
def test_root_mean_squares_at_the_ends(framework: str) -> None:
    ops = ops_of(framework)

    def rms(*values: float) -> float:
        return float(ops.to_numpy(ops.rms(ops.from_numpy(np.array(values, np.float32)))))

    assert rms() == rms(0.0) == rms(0.0, -0.0) == 0
    assert 0 <= rms(1e-40, 1e-42) <= 1e-40, "frameworks may flush denormals"
    assert math.isclose(rms(*[3e38] * 50), 3e38, rel_tol=1e-5)
    assert math.isclose(rms(1e30, *[1e-30] * 3), 5e29, rel_tol=1e-5)
    for bad in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(rms(1.0, bad)) and not math.isfinite(rms(bad)) and not math.isfinite(rms(1e30, bad))


@every_framework
@pytest.mark.parametrize("scale", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 16), (300, 256), (2, 70_000)], ids=str)
def test_row_rms(framework: str, scale: float, shape: tuple[int, int]) -> None:
    """Also of a combination, without the combination being kept."""
    ops = ops_of(framework)
    scale = min(scale, 2e37)  # the combination itself has to fit
    matrix, other = ((random_values(math.prod(shape), i) * np.float32(scale)).reshape(shape) for i in range(2))
    for second, factor in ((None, 1.0), (other, -0.5), (other, -1.0)):
        whole = matrix.astype(np.float64) + (0 if second is None else second.astype(np.float64) * factor)
        norms = ops.row_rms(ops.from_numpy(matrix), None if second is None else ops.from_numpy(second), factor)
        tolerance = 1e-5 if scale > 1e-30 else 1e-3  # where frameworks flush elements that are denormal
        assert np.allclose(
            ops.to_numpy(norms), np.linalg.norm(whole, axis=1) / np.sqrt(shape[1]), rtol=tolerance, atol=0
        )
    assert not ops.to_numpy(ops.row_rms(ops.from_numpy(0 * matrix))).any()
    for bad in (math.nan, math.inf):
        matrix[-1, -1] = bad
        finite = np.isfinite(ops.to_numpy(ops.row_rms(ops.from_numpy(matrix))))
        assert finite.tolist() == [True] * (shape[0] - 1) + [False]


@every_framework
def test_every_rows_mean_square_has_its_own_scale(framework: str) -> None:
    ops = ops_of(framework)
    scales = np.array([1.0, 1e-25, 1e-30, 0.0, 1e10], np.float32)
    matrix = np.abs(random_values(5 * 16)).reshape(5, 16) * scales[:, None]
    norms = ops.to_numpy(ops.row_rms(ops.from_numpy(matrix)))
    assert np.allclose(norms, np.linalg.norm(matrix.astype(np.float64), axis=1) / 4, rtol=1e-5, atol=0)


@every_framework
def test_the_largest_and_of_equal_ones_those_in_front(framework: str) -> None:
    ops, rng = ops_of(framework), np.random.default_rng(1)
    for size in (1, 5, 100, 3000):
        for values in (
            rng.standard_normal(size),
            np.zeros(size),
            np.repeat(1.0, size),
            rng.integers(0, 4, size),
            -rng.integers(0, 3, size),
            np.where(rng.random(size) < 0.9, 0.0, 1e-30),
        ):
            values = values.astype(np.float32)
            for count in {1, size // 3, size // 2, size - 1, size} - {0}:
                top = ops.to_numpy(ops.top(ops.from_numpy(values), count))  # a sort that is stable
                expected = sorted(sorted(range(size), key=lambda i: (-values[i], i))[:count])
                assert top.dtype == np.int32 and top.tolist() == expected
    assert ops.to_numpy(ops.top(ops.from_numpy(np.ones(4, np.float32)), 0)).tolist() == []


@every_framework
def test_what_is_not_finite_is_among_the_largest(framework: str) -> None:
    """Their number never differs: a compiled step computes the next choice before it knows that it is dropped."""
    ops = ops_of(framework)
    for bad in (math.nan, math.inf, -math.inf):
        values = np.array([1, bad, 3, bad, 2], np.float32)
        for count in (1, 2, 4, 5):
            top = ops.to_numpy(ops.top(ops.from_numpy(values), count)).tolist()
            order = [2, 4, 0, 1, 3] if bad == -math.inf else [1, 3, 2, 4, 0]
            assert top == sorted(order[:count])


@every_framework
def test_all_finite_is_exact(framework: str) -> None:
    ops = ops_of(framework)
    for values, finite in (
        ([], True),
        ([0.0, -1.0], True),
        ([3e38, 3e38, -3e38], True),  # their norm is not
        ([1.0, math.nan], False),
        ([math.inf, 0.0], False),
        ([math.inf, -math.inf], False),
        ([3e38, 3e38, math.nan], False),
    ):
        assert bool(ops.all_finite(ops.from_numpy(np.array(values, np.float32)))) == finite, values
        with np.errstate(over="ignore"):
            halves = np.clip(values, -60000, 60000).astype(np.float16)  # which keeps NaN
            assert bool(ops.all_finite(ops.from_numpy(halves))) == (not np.isnan(halves).any()), values
    assert not bool(ops.all_finite(ops.from_numpy(np.array([1, math.inf], np.float16))))
    assert bool(ops.all_finite(ops.from_numpy(np.full(9, 60000, np.float16))))
    for dtype in (np.int32, np.int64):
        assert bool(ops.all_finite(ops.from_numpy(np.array([-(2**31), 5], dtype)))), "integers are"


@every_framework
def test_checksums_see_every_bit_and_agree_with_numpy(framework: str) -> None:
    ops, reference = ops_of(framework), NumpyOps()
    values = random_values(21).reshape(7, 3)
    values[0] = 0.0, -1e-45, math.inf
    expected = int(reference.checksum(values))
    assert int(ops.checksum(ops.from_numpy(values))) == expected == int(values.view(np.int32).astype(object).sum())
    for i in range(values.size):
        for bit in (0, 13, 31):
            changed = values.copy()
            changed.view(np.uint32).ravel()[i] ^= np.uint32(1 << bit)
            assert int(ops.checksum(ops.from_numpy(changed))) != expected
    assert int(ops.checksum(ops.from_numpy(np.zeros(0, np.float32)))) == 0
    many = np.full(100, -1e-45, np.float32)  # 100 times the smallest int32: wraps in 32 bits, not in 64
    assert int(ops.checksum(ops.from_numpy(many))) == 100 * int(many.view(np.int32)[0])
    integers = np.array([5, -7, 2**31 - 1], np.int32)
    assert int(ops.checksum(ops.from_numpy(integers))) == int(integers.sum(dtype=np.int64))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 45])
def test_a_parameters_checksum_sees_every_bit_wherever_it_lies_in_memory(dtype: str, size: int) -> None:
    torch = need("torch")
    from hvdplus.adapters.torch.backend import _sum_of_bits

    values = torch.randn(size + 1, dtype=torch.float64).to(getattr(torch, dtype))[1:]  # it begins within a word
    expected = int(_sum_of_bits(values.clone()))
    assert int(_sum_of_bits(values)) == expected
    assert int(_sum_of_bits(torch.stack([values, values], 1)[:, 0])) == expected, "nor with gaps"
    raw = values.clone().view(torch.uint8).numpy()
    for place in range(raw.size):
        for bit in range(8):
            changed = raw.copy()
            changed[place] ^= np.uint8(1 << bit)
            assert int(_sum_of_bits(torch.from_numpy(changed).view(values.dtype))) != expected


# -- hashes and lanes --------------------------------------------------------------------------------------------------


@other_frameworks
def test_every_framework_scrambles_alike(framework: str) -> None:
    ops = ops_of(framework)
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 5000).astype(np.int32)
    values[:4] = 0, -1, 2**31 - 1, -(2**31)
    assert ops.to_numpy(ops.scramble(ops.from_numpy(values))).tobytes() == scramble(values).tobytes()


WIDTHS = [(bits, word) for bits in range(2, 17) for word in (32, 64) if bits not in (8, 16) or word == 32] + [
    (32, 32),
    (32, 64),
]
"""Lanes in words; all that compressors use, and more."""


@every_framework
@pytest.mark.parametrize(("bits", "word"), WIDTHS)
def test_packing_in_closed_form(framework: str, bits: int, word: int) -> None:
    """To nearest, ties to even, clipped and counted; and back, bit for bit, also of sums."""
    ops = ops_of(framework)
    levels = min(2 ** (bits - 1) - 1, 2**24) // 2 or 1
    for size in (0, 1, 5, 64, LARGE if bits in (3, 8, 32) else 1000):
        values = (random_values(size, size) * levels).astype(np.float32)
        values[:5] = np.array([0.5, 1.5, -0.5, -2.5, 3 * levels], np.float32)[:size]
        exponent = ops.from_numpy(np.array([-2], np.int32))
        words, clipped, rms, *_ = ops.pack(ops.from_numpy(values * np.float32(0.25)), exponent, levels, bits, word)
        rounded = np.rint(values.astype(np.float64))
        assert ops.to_numpy(clipped).dtype == np.int32 and ops.to_numpy(clipped).shape == ()
        assert int(clipped) == np.count_nonzero(np.abs(rounded) > levels)
        assert ops.to_numpy(rms).dtype == np.float32 and ops.to_numpy(rms).shape == ()
        assert math.isclose(float(rms), 0.25 * norm(values) / math.sqrt(max(1, size)), rel_tol=1e-5)
        packed_words = ops.to_numpy(words)
        assert packed_words.dtype == (np.int32 if word == 32 else np.int64)
        assert packed_words.size == -(-size // (word // bits))
        kept = np.clip(rounded, -levels, levels)
        if size <= 1000:
            assert np.array_equal(lanes(packed_words, bits, size), kept)
        for times in (1, 2) if levels > 1 or bits > 2 else (1,):
            back = ops.to_numpy(ops.assemble([Packed(words if times == 1 else words + words, exponent, bits, size)]))
            assert np.array_equal(back, times * kept * 0.25)


def one(ops: Ops, number: int) -> Array:
    """An int32 in an array."""
    return ops.from_numpy(np.array([number], np.int32))


STEPS = {
    "the step": (-2, -2),
    "signs": (-126, 3),  # everything but zero is beyond the one level, which stands for more than it says
    "signs of nothing known": (-126, -127),
    "nothing known": (-127, -127),
    "coarser": (-2, 1),
    "finer": (-2, -9),
}
"""What values are divided by, and what a level stands for; logarithms."""


SOME_WIDTHS = [(2, 32), (3, 64), (8, 32), (12, 64), (16, 32), (32, 32), (32, 64)]


@every_framework
@pytest.mark.parametrize(
    ("bits", "word", "exponent", "left_exponent"),
    [(*width, *STEPS["the step"]) for width in WIDTHS]
    + [(*width, *step) for width in SOME_WIDTHS for step in STEPS.values() if step != STEPS["the step"]],
)
def test_what_packing_leaves_in_closed_form(
    framework: str, bits: int, word: int, exponent: int, left_exponent: int
) -> None:
    """values - q 2^left_exponent, with one rounding at most; words, counts and measurement do not depend on asking."""
    ops = ops_of(framework)
    levels = 1 if exponent == -126 else min(2 ** (bits - 1) - 1, 2**24) // 2 or 1
    for size in (0, 1, 5, 999):
        values = (random_values(size, size) * np.float32(levels / 4)).astype(np.float32)
        values[:6] = np.array([0.125, 0.375, -0.625, 3 * levels, -0.0, 1e-30], np.float32)[:size]
        scaled = values.astype(np.float64) * (2.0**-exponent if exponent > -127 else 0)
        whole = np.clip(np.rint(scaled), -levels, levels)
        expected = values - (whole * (2.0**left_exponent if left_exponent > -127 else 0)).astype(np.float32)
        plain = ops.pack(ops.from_numpy(values), one(ops, exponent), levels, bits, word)
        packing = ops.pack(
            ops.from_numpy(values),
            one(ops, exponent),
            levels,
            bits,
            word,
            None,
            left_exponent=one(ops, left_exponent),
        )
        left = ops.to_numpy(packing.left)
        assert left.dtype == np.float32 and np.array_equal(left, expected)
        if size == 999:
            assert (left[whole != 0] == values[whole != 0]).all() == (left_exponent == -127 or not whole.any())
        assert ops.to_numpy(packing.words).tobytes() == ops.to_numpy(plain.words).tobytes()
        assert int(packing.clipped) == int(plain.clipped) == np.count_nonzero(np.abs(np.rint(scaled)) > levels)
        assert ops.to_numpy(packing.rms).shape == () and ops.to_numpy(packing.rms).dtype == np.float32
        for rms in (plain.rms, packing.rms):
            assert math.isclose(float(rms), norm(values) / math.sqrt(max(1, size)), rel_tol=1e-5)


RUNS = (700, 1, 600_000, 40)
"""Of which one is longer than the chunks in which large vectors are worked on, and the others within one."""


@every_framework
@pytest.mark.parametrize(("bits", "word"), [(3, 64), (4, 32), (8, 32), (16, 32)])
@pytest.mark.parametrize("noise", [False, True], ids=["to nearest", "by chance"])
def test_runs_are_packed_as_each_by_itself(framework: str, bits: int, word: int, noise: bool) -> None:
    """Each with its own exponents, one of them unknown; measured each by itself, clipped values all together."""
    ops, levels = ops_of(framework), 2 ** (bits - 1) - 1
    sizes = np.repeat([1.0, 0.01, 30.0, 5.0], RUNS)
    values = (random_values(sum(RUNS), bits) * sizes * levels).astype(np.float32)
    exponents, left_exponents = (np.array(each, np.int32) for each in ([0, -6, 4, -127], [0, -6, 3, -127]))
    key = one(ops, 17) if noise else None
    together = ops.pack(
        ops.from_numpy(values),
        ops.from_numpy(exponents),
        levels,
        bits,
        word,
        key,
        ops.from_numpy(left_exponents),
        RUNS,
    )
    piece = Packed(together.words, ops.from_numpy(exponents), bits, sum(RUNS), RUNS)
    back, left = ops.to_numpy(ops.assemble([piece], 0.5)), ops.to_numpy(together.left)
    taken = ops.to_numpy(ops.subtract(ops.from_numpy(values), [piece]))
    clipped, start, largest = 0, 0, list[float]()
    for number, length in enumerate(RUNS):
        part, own = slice(start, start + length), one(ops, int(exponents[number]))
        start += length
        if noise:  # what is drawn depends on the place
            off = np.abs(2.0 * back[part].astype(np.float64) - values[part])
            known = 2.0 ** exponents[number] if exponents[number] > -127 else 0.0
            beyond = np.maximum(np.abs(values[part]) - known * levels, 0)
            assert (off <= (known + beyond) * (1 + 1e-5)).all()
            expected = values[part] - 2.0 * back[part] * 2.0 ** (left_exponents[number] - exponents[number])
            np.testing.assert_allclose(left[part], expected, rtol=1e-5, atol=1e-5 * np.abs(values[part]).max())
        else:
            alone = ops.pack(
                ops.from_numpy(values[part]), own, levels, bits, word, None, one(ops, int(left_exponents[number]))
            )
            clipped += int(alone.clipped)
            assert np.array_equal(back[part], ops.to_numpy(ops.assemble([Packed(alone.words, own, bits, length)], 0.5)))
            assert np.array_equal(left[part], ops.to_numpy(alone.left))
            largest.append(float(alone.largest))
        np.testing.assert_allclose(taken[part], values[part] - 2.0 * back[part], rtol=1e-6, atol=1e-30)
        rms = norm(values[part]) / math.sqrt(length)
        assert math.isclose(float(together.rms[number]), rms, rel_tol=1e-5)
    assert ops.to_numpy(together.rms).shape == (len(RUNS),) and ops.to_numpy(together.largest).shape == ()
    assert noise or float(together.largest) == max(largest)
    assert noise or int(together.clipped) == clipped > 0


@every_framework
@pytest.mark.parametrize("size", [0, 5])
def test_what_is_left_is_told_if_asked_for(framework: str, size: int) -> None:
    """Without being asked, packing only reads."""
    ops = ops_of(framework)
    values = ops.from_numpy(np.ones(size, np.float32))
    assert ops.pack(values, one(ops, -1), 7, 4, 32).left is None
    assert ops.to_numpy(values).tolist() == [1.0] * size
    left = ops.pack(values, one(ops, -1), 7, 4, 32, left_exponent=one(ops, -2)).left
    assert ops.to_numpy(left).tolist() == [0.5] * size


@other_frameworks
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize(
    ("bits", "word", "size"), [(8, 32, 2**18), (16, 32, 2**19), (32, 32, 2**18), (12, 64, 5 * 2**18), (5, 32, 2**18)]
)
def test_packing_at_the_bounds_of_chunks(framework: str, bits: int, word: int, size: int, beyond: int) -> None:
    """In every bit as NumPy does it, whatever is worked on at a time; also drawn, and clipped in the last chunk."""
    ops, reference = ops_of(framework), NumpyOps()
    levels = min(2 ** (bits - 1) - 1, 2**24)
    values = np.resize(random_values(10_007), size + beyond) * np.float32(levels / 8)
    values[-1] = 9 * levels
    for noise in (None, 5):
        packings = [
            each.pack(
                each.from_numpy(values),
                one(each, 0),
                levels,
                bits,
                word,
                None if noise is None else one(each, noise),
                one(each, 0),
            )
            for each in (ops, reference)
        ]
        ours, theirs = [ops.to_numpy(array) for array in packings[0]], packings[1]
        assert ours[0].tobytes() == theirs[0].tobytes() and ours[1] == theirs[1] >= 1
        assert math.isclose(ours[2], theirs[2], rel_tol=1e-5)
        assert np.array_equal(ours[3], theirs[3]) and ours[3][-1] == 8 * levels


@every_framework
def test_packing_with_no_step_sends_nothing(framework: str) -> None:
    """Not even of what is huge; and everything counts as within the levels."""
    ops = ops_of(framework)
    values = np.array([1e30, -3e38, 1.0, 1e-30], np.float32)
    for noise in (None, ops.from_numpy(np.array([3], np.int32))):
        words, clipped, rms, *_ = ops.pack(
            ops.from_numpy(values), ops.from_numpy(np.array([-127], np.int32)), 7, 4, 32, noise
        )
        assert not ops.to_numpy(words).any() and int(clipped) == 0
        assert math.isclose(float(rms), 1.5e38, rel_tol=1e-4), "measured all the same"


@every_framework
def test_packing_far_beyond_the_levels(framework: str) -> None:
    """Even where a value divided by the step is infinite."""
    ops = ops_of(framework)
    values = np.array([1e30, -1e30, 3e38, 0.0], np.float32)
    words, clipped, rms, _, largest = ops.pack(ops.from_numpy(values), one(ops, -100), 7, 4, 32)
    assert math.isclose(float(rms), 1.5e38, rel_tol=1e-4)
    assert lanes(ops.to_numpy(words), 4, 4).tolist() == [7, -7, 7, 0] and int(clipped) == 3


@every_framework
@pytest.mark.parametrize("scale", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("exponent", [-127, -100, 0, 100])
@pytest.mark.parametrize("left", [False, True], ids=["packed only", "with what is left"])
def test_packing_measures_whatever_the_step(framework: str, scale: float, exponent: int, left: bool) -> None:
    """Although it has in hand what it divided by the step: that may have left float32's range."""
    ops = ops_of(framework)
    left_exponent = one(ops, exponent) if left else None
    values = np.clip(random_values(1000).astype(float) * scale, -3e38, 3e38).astype(np.float32)
    packing = ops.pack(ops.from_numpy(values), one(ops, exponent), 7, 4, 32, None, left_exponent)
    assert math.isclose(float(packing.rms), norm(values) / math.sqrt(1000), rel_tol=1e-5)
    for bad in (math.nan, math.inf):
        values[500] = bad
        packing = ops.pack(ops.from_numpy(values), one(ops, exponent), 7, 4, 32, None, left_exponent)
        assert not math.isfinite(float(packing.rms)), "or a number would hide it"


@every_framework
@pytest.mark.parametrize(
    ("scale", "exponent", "left_exponent", "levels", "noise"),
    [
        (1e15, 45, 45, 127, None),  # an ordinary step for such values, whose squares leave float32
        (1e17, 49, 49, 32767, None),
        (1e16, 35, 35, 2**30, None),  # a tail
        (1e16, -126, 48, 1, None),  # signs that stand for more
        (1e-20, -126, -10, 1, None),  # signs of values that were far louder one step ago
        (1e-25, -126, -49, 1, None),
        (1e25, -126, -10, 1, None),  # and of such that were far quieter
        (2e-16, -52, -49, 127, None),
        (2e-17, -49, -49, 127, 7),  # rounded away from zero by chance, although far below the step
        (1e-25, 0, 0, 127, None),
        (1e30, 0, 0, 127, None),
        (1e30, 93, 93, 127, None),
        (1e-25, -90, -90, 127, None),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("word", [32, 64])
def test_packing_measures_what_it_was_given_not_what_is_left(
    framework: str,
    scale: float,
    exponent: int,
    left_exponent: int,
    levels: int,
    noise: int | None,
    size: int,
    word: int,
) -> None:
    """A measurement from what is left would be off by as much as rounding takes away; the next step follows from it."""
    ops = ops_of(framework)
    values = (random_values(size, 1) * np.float32(scale)).astype(np.float32)
    key = None if noise is None else one(ops, noise)
    for asked in (None, one(ops, left_exponent)):
        packing = ops.pack(ops.from_numpy(values), one(ops, exponent), levels, 32, word, key, asked)
        assert math.isclose(float(packing.rms), norm(values) / math.sqrt(size), rel_tol=1e-5)


@every_framework
@pytest.mark.parametrize(("bits", "word"), [(3, 64), (8, 32), (16, 32), (5, 32)])
def test_noise_rounds_stochastically_and_alike_everywhere(framework: str, bits: int, word: int) -> None:
    """floor(x + u), u from key, place and the value's own bits: in every framework the same, past every chunk."""
    ops, reference = ops_of(framework), NumpyOps()
    levels = 2 ** (bits - 1) - 1
    values = random_values(LARGE) * np.float32(levels / 2)
    exponent, key = np.array([0], np.int32), np.array([-77], np.int32)
    words, clipped, rms, left, largest = ops.pack(
        ops.from_numpy(values), ops.from_numpy(exponent), levels, bits, word, ops.from_numpy(key), one(ops, 0)
    )
    expected = reference.pack(values, exponent, levels, bits, word, key)
    assert ops.to_numpy(words).tobytes() == expected.words.tobytes() and int(clipped) == int(expected.clipped)
    assert math.isclose(float(rms), float(expected.rms), rel_tol=1e-5), "of the values, not of what they became"
    assert float(largest) == np.abs(values).max()
    rounded = ops.to_numpy(ops.assemble([Packed(words, ops.from_numpy(exponent), bits, LARGE)]))
    assert np.array_equal(ops.to_numpy(left), values - rounded), "drawn once, not twice"
    inside = np.abs(values) < levels
    assert np.abs(rounded - values)[inside].max() <= 1
    assert set(np.unique((rounded - np.floor(values))[inside])) == {0.0, 1.0}
    assert abs((rounded - values)[inside].mean()) < 6 * 0.5 / math.sqrt(LARGE)


@given(st.integers(2, 16), st.integers(1, 64), st.integers(0, 10**6))
@examples(100)
def test_sums_of_lanes_are_lanes_of_sums(bits: int, ranks: int, seed: int) -> None:
    """In NumPy, whose arithmetic wraps silently, for as many ranks as leave a level."""
    ops, rng = NumpyOps(), np.random.default_rng(seed)
    levels = (2 ** (bits - 1) - 1) // ranks
    if not levels:
        return
    for word in (32, 64):
        total, numbers = 0, np.zeros(100)
        for _ in range(ranks):
            values = rng.integers(-levels, levels + 1, 100).astype(np.float32)
            numbers += values
            total = total + ops.pack(values, np.zeros(1, np.int32), levels, bits, word)[0]
        assert np.array_equal(lanes(total, bits, 100), numbers)
