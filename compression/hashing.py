"""Randomness from an integer hash, never from a framework's generator.

The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) over a
counter: equal on every rank, framework and machine, and the user's global generators stay untouched.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (any shape) one by one; a bijection."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(stream: Iterable[int], count: int) -> np.ndarray:
    """``count`` float64 values in [0, 1) that depend on the integers of ``stream`` and on nothing else."""
    key = np.zeros(1, np.uint64)
    for number in stream:
        key = mix(key + _GOLDEN * np.array([(number + 1) % 2**64], np.uint64))
    counters = key + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    return (mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
