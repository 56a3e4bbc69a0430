"""Checks of a checkpoint's parts: they come from files, which may be damaged or from another program."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def damaged(what: str, wanted: str, received: Any) -> ValueError:
    """The error about a damaged part. ``what``: its name, ``wanted``: what would be right."""
    return ValueError(f"The state of hvdplus is damaged: {what} has to be {wanted}. Received: {reprlib.repr(received)}")


def require(fits: bool, what: str, wanted: str, received: Any) -> None:
    """Raise ValueError unless it ``fits``; arguments as of ``damaged``."""
    if not fits:
        raise damaged(what, wanted, received)


def is_count(value: Any, below: float = np.inf) -> bool:
    """Whether ``value`` is a whole number (no bool) from 0 to less than ``below``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def is_share(value: Any) -> bool:
    """Whether ``value`` is a number (no bool) from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether ``value`` is a list or tuple whose elements all fit."""
    return isinstance(value, list | tuple) and all(map(fits, value))


def are_shapes(value: Any) -> bool:
    """Whether ``value`` is a list of shapes."""
    return is_list(value, lambda shape: is_list(shape, is_count))


def are_different(value: Any, below: int) -> bool:
    """Whether ``value`` is a list of different whole numbers from 0 to less than ``below``."""
    return is_list(value, lambda each: is_count(each, below)) and len(set(value)) == len(value)


def is_finite(array: Any) -> bool:
    """Whether ``array`` is an array, of any framework, of finite real numbers."""
    try:
        if hasattr(array, "isfinite"):  # torch
            return not array.is_complex() and bool(array.isfinite().all())
        values = np.asarray(array)
        return hasattr(array, "shape") and values.dtype.kind in "fiu" and bool(np.isfinite(values).all())
    except (TypeError, ValueError, RuntimeError):
        return False


def require_fields(state: Any, names: Sequence[str], what: str) -> None:
    """Raise ValueError unless ``state`` is a dictionary that has all these fields."""
    require(isinstance(state, Mapping), what, "a dictionary", state)
    absent = [name for name in names if name not in state]
    if absent:
        raise ValueError(f"The state of hvdplus is damaged: {what} has no {', '.join(absent)}.")
