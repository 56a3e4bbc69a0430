"""Checks of a checkpoint's parts: they come from files, which may be damaged or from another program."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

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


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: classes, and lists, dictionaries and named tuples of them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(has_type(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            has_type(key, arguments[0]) and has_type(each, arguments[1]) for key, each in value.items()
        )
    if hint is int:
        return is_count(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return type(value) is hint and all(map(has_type, value, get_type_hints(hint).values()))
    return isinstance(value, hint if isinstance(hint, type | types.UnionType) else object)


def check_remembered(remembers: Any, names: Sequence[str]) -> None:
    """Raise ValueError unless all ``names`` of an object hold what their annotations promise."""
    hints = get_type_hints(type(remembers))
    for name in names:
        value = getattr(remembers, name)
        require(has_type(value, hints[name]), f"{name} of its controller", f"of type {hints[name]}", value)


def require_fields(state: Any, names: Sequence[str], what: str) -> None:
    """Raise ValueError unless ``state`` is a dictionary that has all these fields."""
    require(isinstance(state, Mapping), what, "a dictionary", state)
    absent = [name for name in names if name not in state]
    if absent:
        raise ValueError(f"The state of hvdplus is damaged: {what} has no {', '.join(absent)}.")
