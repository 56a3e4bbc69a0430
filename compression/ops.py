"""The array operations that compressors use.

A compressor never imports a framework; it receives an ``Ops``. NumPy (``hvdplus.adapters.numpy``) is the reference
that tests compare torch and TensorFlow with. Keep this surface tiny: every framework implements every method. Plain
arithmetic, comparison and slicing of arrays (``a + b``, ``a * 2.0``, ``a // b``, ``a[i:j]``) is common to all
frameworks and needs no method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np


class Arithmetic(Protocol):
    """What arrays of all frameworks can do by themselves. ``==`` is left out: its result counts as one boolean."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, places: int | slice, /) -> Self: ...
    def __abs__(self) -> Self: ...
    def __add__(self, other: Self | float, /) -> Self: ...
    def __sub__(self, other: Self | float, /) -> Self: ...
    def __rsub__(self, other: float, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __rmul__(self, other: float, /) -> Self: ...
    def __truediv__(self, other: Self | float, /) -> Self: ...
    def __floordiv__(self, other: Self | int, /) -> Self: ...
    def __mod__(self, other: Self | int, /) -> Self: ...
    def __and__(self, other: Self, /) -> Self: ...
    def __or__(self, other: Self, /) -> Self: ...
    def __gt__(self, other: Self | float, /) -> Self: ...
    def __ge__(self, other: Self | float, /) -> Self: ...
    def __lt__(self, other: Self | float, /) -> Self: ...


Array = TypeVar("Array", bound=Arithmetic)
"""An array of the framework in use (``numpy.ndarray``, ``torch.Tensor``, ``tf.Tensor``)."""


def magnitude(values: Array) -> Array:
    """``abs`` of every element; type checkers do not see that plain ``abs`` returns the same type of array."""
    return values.__abs__()


HALF_LIMIT = 2.0**15
"""Saturating float16 values stop at this magnitude times their factor (1/N or less), so that the sum of N of them stays
below 65504 despite rounding."""


class Product(NamedTuple, Generic[Array]):
    """A matrix given by its factors, row-major: ``left right^T``."""

    left: Array
    """(n, r)"""
    right: Array
    """(m, r)"""


class Rows(NamedTuple, Generic[Array]):
    """A matrix with few non-zero rows, row-major."""

    values: Array
    """(k, width)"""
    rows: Array
    """int32 (k,): their indices, ascending"""
    height: int
    """number of rows of the matrix"""


class Packed(NamedTuple, Generic[Array]):
    """Signed integers in lanes of ``bits`` bits, times a power of two: ``q 2^exponent``."""

    words: Array
    """int32 or int64 (W,). With 8 or 16 bits, element i is in word i // lanes, lane i % lanes, lowest bits first (plain
    bytes in order). With other widths, each lane holds a stretch: element i is in word i % W, lane i // W.
    """
    exponent: Array
    """int32, one element or one a run; see ``Ops.power_of_two``"""
    bits: int
    length: int
    """number of elements; lanes behind them are zero"""
    runs: tuple[int, ...] = ()
    """lengths of the runs of elements that have an exponent each; empty: one for all"""


def sign_bits(bits: int, word: int) -> int:
    """S, the highest bit of every lane of a word, as a signed integer of that word.

    ``(word ^ S) - S`` turns lanes in two's complement into the sum of ``q 2^(lane bits)``; ``(word + S) ^ S`` undoes
    that. Flipped lanes are unsigned and do not borrow from each other.
    """
    value = sum(1 << (lane * bits + bits - 1) for lane in range(word // bits))
    return value - (1 << word)


class Packing(NamedTuple, Generic[Array]):
    """Results of ``Ops.pack``."""

    words: Array
    clipped: Array
    """int32, 0-d: number of values beyond the levels"""
    rms: Array
    """``Ops.rms`` of the values; with runs, 1-D: of each"""
    left: Array | None
    """``values - q 2^left_exponent``; None without ``left_exponent``"""
    largest: Array
    """0-d: the largest magnitude of the values; undefined unless all are finite"""


class Halves(NamedTuple, Generic[Array]):
    """float16 values times a factor."""

    values: Array
    factor: float


Piece: TypeAlias = Array | Product[Array] | Rows[Array] | Packed[Array] | Halves[Array]
"""A stretch of a bucket: a plain 1-D float32 array, or a compact form of one."""


class Ops(Protocol[Array]):
    """What a compressor may ask of a framework. All arrays are float32 unless stated."""

    def from_numpy(self, values: np.ndarray) -> Array:
        """Copy a NumPy array to the framework, bit for bit, same shape and dtype."""

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> Array:
        """``from_numpy(make())``, cached where the framework can, so that it is copied to a device once. Read-only.

        Args:
            key: unique to this constant.
        """

    def to_numpy(self, values: Array) -> np.ndarray:
        """Copy an array to NumPy, bit for bit, same shape and dtype."""

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in row-major order under another shape; no copy where the framework can avoid it."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join 1-D arrays of one dtype end to end."""

    def assemble(self, pieces: Sequence[Piece[Array]], scale: float = 1.0) -> Array:
        """All pieces end to end, as one 1-D array, times ``scale``. At 1 a single plain piece is returned uncopied."""

    def assemble_into(self, pieces: Sequence[Piece[Array]], scale: float, parts: Sequence[Array]) -> bool:
        """``assemble`` into ``parts``, 1-D float32 arrays that have as many elements.

        Returns whether it was done: where arrays cannot be written to, it is not.
        """

    def subtract(self, values: Array, pieces: Sequence[Piece[Array]]) -> Array:
        """``values - assemble(pieces)``; may overwrite ``values``."""

    def matmul(self, a: Array, b: Array, transpose_a: bool = False) -> Array:
        """Matrix product of two 2-D arrays (or batches of them), the first transposed if asked to."""

    def project(
        self, bucket: Array, start: int, shape: tuple[int, int], basis: Array, transpose: bool = False
    ) -> Array:
        """``matmul(matrix, basis, transpose)`` of a matrix: the ``shape`` at element ``start`` of a bucket (1-D)."""

    def orthonormal(self, columns: Array) -> Array:
        """Orthonormal bases of the columns of (b, n, r) matrices, n >= r, by Householder QR, R's diagonal >= 0.

        The sign convention makes the result unique for full rank, so that frameworks agree. Rank-deficient and
        zero input yields an orthonormal basis that contains the column space. Scale the columns to a largest
        magnitude of about 1 first: tiny ones, whose squares underflow, may be taken for zeros.
        """

    def largest(self, batch: Array) -> Array:
        """Largest magnitude of each matrix of a batch: (b, n, r) -> (b, 1, 1)."""

    def half(self, parts: Sequence[Array], factor: float, saturate: bool = False) -> Array:
        """All ``parts`` (float32 or narrower), end to end, rounded to float16 (to nearest even), times ``factor``, a
        power of two.

        Values beyond 65504 become infinite; with ``saturate``, finite values beyond ``HALF_LIMIT`` stop there, and
        infinite values become NaN. The product follows the cast, in place, which is much faster than a product in fresh
        memory; products below 6e-5 are rounded again.
        """

    def rms(self, values: Array) -> Array:
        """Root of the mean square, 0-d; 0 for an empty array. No overflow or underflow on the way."""

    def row_rms(self, matrix: Array, other: Array | None = None, factor: float = 1.0) -> Array:
        """Root of the mean square of every row of ``matrix + other * factor`` (2-D). No overflow or underflow on the
        way, and finite where the row is."""

    def top(self, values: Array, count: int) -> Array:
        """Indices (int32, ascending) of the ``count`` largest of a 1-D array; of equal elements, the first.
        NaN counts as infinity: it is never passed over."""

    def take_rows(self, matrix: Array, rows: Array) -> Array:
        """``matrix[rows]``; ``rows`` is int32."""

    def put_values(self, values: Array, places: Array, new: Array) -> Array:
        """Copy of a 1-D array with ``new`` at ``places`` (int32, distinct)."""

    def log2(self, values: Array) -> Array:
        """Binary logarithm of positive values."""

    def power_of_two(self, exponent: Array) -> Array:
        """``2^exponent`` as exact float32, of int32 from -126 to 127; 0 for -127 and below."""

    def integers(self, values: Array, bits: int = 32) -> Array:
        """Nearest int32 (or int64) of floats, booleans or integers; undefined for NaN and infinity."""

    def floats(self, values: Array) -> Array:
        """float32 of integers that it holds exactly, or of booleans: 1 where true, else 0."""

    def scramble(self, values: Array) -> Array:
        """Hash int32 values one by one; see ``hashing.scramble``."""

    def pack(
        self,
        values: Array,
        exponent: Array,
        levels: int,
        bits: int,
        word: int,
        noise: Array | None = None,
        left_exponent: Array | None = None,
        runs: tuple[int, ...] = (),
    ) -> Packing[Array]:
        """Round ``values / 2^exponent`` to integers in ``[-levels, levels]`` and pack them (see ``Packed``).

        Args:
            exponent: int32, one element or one a run; -127 rounds everything to 0.
            word: 32 or 64, bits of a word.
            noise: None rounds to nearest, ties to even; an int32 (one element) rounds stochastically:
                ``floor(x + u)`` with ``u`` in [0, 1) from a hash of that key, the element's place, and its own bits,
                so that ranks with different values draw independently with the same key.
            left_exponent: int32, like ``exponent``: return ``Packing.left``, too, and perhaps overwrite ``values``.
            runs: lengths of the runs of values that have an exponent each, at least two; empty: one for all.
        """

    def all_finite(self, values: Array) -> Array:
        """0-d boolean array: no element is NaN or infinite. Integers are finite."""

    def checksum(self, values: Array) -> Array:
        """Sum of the elements' 32-bit patterns as signed integers, as a 0-d int64 array (wrapping)."""
