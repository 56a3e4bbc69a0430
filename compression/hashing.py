"""Randomness from integer hashes, never from a framework's generator.

Equal on every rank, framework and machine, and the user's global generators stay untouched. Values that NumPy computes
once: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) over
a counter. Values that every framework computes in every step: the 32-bit finaliser of MurmurHash3 (Appleby).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

WEYL = -0x61C88647
"""Odd int32 near 2^32 / golden ratio: multiples of it are spread evenly."""
SCRAMBLE = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Rounds of ``scramble``: x ^= x >> shift (unsigned), then x *= factor (modulo 2^32)."""


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (any shape) one by one; a bijection."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def scramble(values: np.ndarray) -> np.ndarray:
    """Scramble int32 values (any shape) one by one; a bijection."""
    z = np.asarray(values, np.int32).view(np.uint32)
    for shift, factor in SCRAMBLE:
        z = (z ^ (z >> np.uint32(shift))) * np.uint32(factor)
    return z.view(np.int32)


@cache
def key(*stream: int) -> int:
    """An int32 that depends on the integers of ``stream`` and on nothing else."""
    return int(uniform(stream, 1)[0] * 2**32) - 2**31


def uniform(stream: Iterable[int], count: int) -> np.ndarray:
    """``count`` float64 values in [0, 1) that depend on the integers of ``stream`` and on nothing else."""
    key = np.zeros(1, np.uint64)
    for number in stream:
        key = mix(key + _GOLDEN * np.array([(number + 1) % 2**64], np.uint64))
    counters = key + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    return (mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
