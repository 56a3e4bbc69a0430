"""State as plain values (numbers, text, lists, dictionaries), as checkpoints and run logs hold it, and back.

A checkpoint comes from a file, which may be damaged, or through JSON, which knows no tuples and no keys but text. So
values are rebuilt by the annotations of the fields that hold them, and one that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints


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

    Raises:
        TypeError, ValueError: it is no such value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return [from_plain(arguments[0], item) for item in _listed(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"a dictionary is wanted, not {value!r}")
        key = arguments[0]
        return {key(name): from_plain(arguments[1], item) for name, item in value.items()}
    if origin is tuple:
        return tuple(from_plain(one, item) for one, item in zip(arguments, _listed(value), strict=True))
    if issubclass(hint, Enum):
        return hint(value)
    if issubclass(hint, tuple):  # a named one
        kinds = list(get_type_hints(hint).values())
        return hint(*(from_plain(kind, item) for kind, item in zip(kinds, _listed(value), strict=True)))
    wanted = int | float if hint is float else hint
    if not isinstance(value, wanted) or isinstance(value, bool) != (hint is bool):
        raise TypeError(f"{hint.__name__} is wanted, not {value!r}")
    return value


def restore(target: Any, values: Mapping[str, Any]) -> None:
    """Set the fields of a dataclass that ``values`` names."""
    hints = get_type_hints(type(target))
    for each in fields(target):
        if each.name in values:
            try:
                setattr(target, each.name, from_plain(hints[each.name], values[each.name]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{each.name} does not fit: {error}") from None


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list is wanted, not {value!r}")
    return list(value)
