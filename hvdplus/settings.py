"""Settings: environment variables ``HVDPLUS_*`` over defaults that need no thought.

An argument that a script passes comes before both. Units stand in the names.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

PREFIX = "HVDPLUS_"


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError
        return number

    convert.__doc__ = f"a whole number of at least {least}"
    return convert


def _one_of(*words: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    convert.__doc__ = "one of " + ", ".join(words)
    return convert


def _words(text: str) -> tuple[str, ...]:
    """comma-separated names"""
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError
    return words


def _text(text: str) -> str:
    """text"""
    return text


def _setting(default: Any, convert: Callable[[str], Any], explanation: str) -> Any:
    return field(default=default, metadata={"convert": convert, "help": explanation})


@dataclass(frozen=True)
class Settings:
    """What can be set. ``Settings.from_environment()`` reads and checks the environment."""

    compression: str = _setting(
        "auto", _text, "level of compression: auto, or a fixed one such as fp16, int8, lowrank:4, topk:0.01+int8"
    )
    transport: str = _setting(
        "auto", _one_of("auto", "horovod", "mpi4py", "local"), "what carries the bytes: auto, horovod, mpi4py or local"
    )
    ladder: tuple[str, ...] = _setting(
        ("none", "fp16", "lowrank:4"), _words, "levels that auto may choose from, least compression first"
    )
    dense_steps: int = _setting(15, _at_least(1), "steps without compression at the start of training")
    warm_steps: int = _setting(2, _at_least(1), "dense steps from which a level learns before it begins")
    drain_steps: int = _setting(10, _at_least(1), "steps over which a residual is paid out on the way back to dense")
    bucket_bytes: int = _setting(8 << 20, _at_least(4), "size of the buckets that gradients are exchanged in, in bytes")
    window_steps: int = _setting(10, _at_least(1), "steps summed up in one line of the run log")
    run_log: str = _setting("", _text, "file for the run log (JSON lines, written by rank 0); empty: none")
    seed: int = _setting(0, _at_least(0), "seed of the compressors' randomness, the same on all ranks")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings with everything that ``environ`` (default ``os.environ``) names in ``HVDPLUS_*``.

        Raises:
            ValueError: a value has the wrong form; the message names variable, value and what would be right.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for entry in fields(cls):
            variable = PREFIX + entry.name.upper()
            if variable in environ:
                convert = entry.metadata["convert"]
                try:
                    values[entry.name] = convert(environ[variable])
                except ValueError:
                    raise ValueError(
                        f"{variable} wants {convert.__doc__}. Received: {variable}={environ[variable]!r}"
                    ) from None
        return cls(**values)


class Described(NamedTuple):
    """One setting, for people."""

    name: str
    value: str
    origin: str
    help: str


def describe(environ: Mapping[str, str] | None = None) -> Iterable[Described]:
    """Every setting with its value and where it came from (``environment`` or ``default``)."""
    environ = os.environ if environ is None else environ
    settings = Settings.from_environment(environ)
    for entry in fields(settings):
        variable = PREFIX + entry.name.upper()
        value = getattr(settings, entry.name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        yield Described(variable, text, "environment" if variable in environ else "default", entry.metadata["help"])


def unknown(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like settings and are none, each with the setting spelled most like it, or nothing."""
    known = [PREFIX + entry.name.upper() for entry in fields(Settings)]
    others = [name for name in environ if name.startswith(PREFIX) and name not in (*known, "HVDPLUS_VENV")]
    return [(name, next(iter(difflib.get_close_matches(name, known, 1, 0.8)), "")) for name in sorted(others)]
