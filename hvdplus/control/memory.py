"""State as plain values (numbers, text, lists, dictionaries), as checkpoints and run logs hold it, and back.

A checkpoint comes from a file, which may be damaged, or through JSON, which knows no tuples and no keys but text. So
values are rebuilt by the annotations of the fields that hold them, and one that does not fit is an error.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast, get_args, get_origin, get_type_hints


def to_plain(value: Any, *, without: tuple[str, ...] = ()) -> Any:
    """A copy of a dataclass, a named tuple, or anything made of them. ``without``: fields of ``value`` to leave out."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value) if each.name not in without}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_plain(hint: Any, value: Any) -> Any:
    """The value of an annotated type that ``to_plain`` made ``value`` of.

    Whole numbers are counts or positions, so none is negative; all others are finite.

    Raises:
        TypeError, ValueError: it is no such value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return [from_plain(arguments[0], item) for item in _listed(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"a dictionary is wanted, not {reprlib.repr(value)}")
        key = arguments[0]
        return {key(name): from_plain(arguments[1], item) for name, item in value.items()}
    if origin is tuple:
        return tuple(from_plain(one, item) for one, item in zip(arguments, _listed(value), strict=True))
    if issubclass(hint, Enum):
        return hint(value)
    if is_dataclass(hint):
        made = cast(Any, hint)()
        restore(made, value)
        return made
    if issubclass(hint, tuple):  # a named one
        kinds = list(get_type_hints(hint).values())
        return hint(*(from_plain(kind, item) for kind, item in zip(kinds, _listed(value), strict=True)))
    wanted = int | float if hint is float else hint
    fits = isinstance(value, wanted) and isinstance(value, bool) == (hint is bool)
    if not fits or (hint is float and not math.isfinite(value)) or (hint is int and not 0 <= value < 2**63):
        raise TypeError(f"{hint.__name__} is wanted, not {reprlib.repr(value)}")
    return value


def restore(target: Any, values: Any, *, without: tuple[str, ...] = ()) -> None:
    """Set the fields of a dataclass to what ``to_plain`` made of them. ``without``: as there.

    Raises:
        ValueError: a value is missing or does not fit.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"a dictionary is wanted, not {reprlib.repr(values)}")
    hints = get_type_hints(type(target))
    wanted = [each.name for each in fields(target) if each.name not in without]
    if absent := [name for name in wanted if name not in values]:
        raise ValueError(f"{', '.join(absent)} is missing")
    for name in wanted:
        try:
            setattr(target, name, from_plain(hints[name], values[name]))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} does not fit: {error}") from None


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list is wanted, not {reprlib.repr(value)}")
    return list(value)
