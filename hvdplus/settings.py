"""Settings, from four sources: a script's arguments come before ``HVDPLUS_*`` variables, before a YAML file, before
defaults.

``HVDPLUS_CONFIG`` names the file; hvdplus does not search for one. Its keys are the names of settings::

    compression: auto
    ladder: [none, fp16, "lowrank:2"]
    dense_steps: 20

Units stand in the names.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from hvdplus import files

PREFIX = "HVDPLUS_"
CONFIG = PREFIX + "CONFIG"
"""Variable that names the file."""


# A value is text (from a variable) or has any type of YAML or Python. A converter raises TypeError or ValueError for a
# wrong value. Its docstring is part of the message. A bool is not a number here.


def _at_least(least: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
        if number < least:
            raise ValueError
        return number

    convert.__doc__ = f"a whole number of at least {least}"
    return convert


def _above_zero(value: Any) -> float:
    """a number above 0"""
    number = _not_negative(value)
    if not number:
        raise ValueError
    return number


def _not_negative(value: Any) -> float:
    """a number of at least 0"""
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _one_of(*words: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    convert.__doc__ = "one of " + ", ".join(words)
    return convert


def _auto_or_at_least_1(value: Any) -> int | str:
    """auto, or a whole number of at least 1"""
    return "auto" if value == "auto" else _at_least(1)(value)


def _any_or_at_least_0(value: Any) -> int | str:
    """any, or a whole number of at least 0"""
    return "any" if value == "any" else _at_least(0)(value)


def _two_level(value: Any) -> int | str:
    """auto, on, off, or a whole number of at least 2"""
    if isinstance(value, bool):  # as YAML reads on and off
        return "on" if value else "off"
    return value if value in ("auto", "on", "off") else _at_least(2)(value)


def _yes_or_no(value: Any) -> bool:
    """yes or no (also 1 or 0, true or false)"""
    known = {"yes": True, "no": False, "1": True, "0": False, "true": True, "false": False}
    return value if isinstance(value, bool) else known[str(value).lower()]


def _words(value: Any) -> tuple[str, ...]:
    """a list of names, or names with commas between them"""
    if not isinstance(value, (str, list, tuple)):
        raise TypeError
    words = tuple(_text(word).strip() for word in (value.split(",") if isinstance(value, str) else value))
    if not words or not all(words):
        raise ValueError
    return words


def _text(value: Any) -> str:
    """text"""
    if not isinstance(value, str):
        raise TypeError
    return value


def _setting(default: Any, convert: Callable[[Any], Any], explanation: str) -> Any:
    return field(default=default, metadata={"convert": convert, "help": explanation})


@dataclass(frozen=True)
class Settings:
    """All settings. ``Settings.load()`` finds and checks their values."""

    compression: str = _setting(
        "auto", _text, "level of compression: auto, or a fixed one such as fp16, int8, lowrank:4, topk:0.01+int8"
    )
    transport: str = _setting(
        "auto",
        _one_of("auto", "horovod", "mpi4py", "torch", "local"),
        "what carries the bytes: auto, horovod, mpi4py, torch (torch.distributed) or local",
    )
    timeout_seconds: float = _setting(
        1800.0, _above_zero, "how long ranks wait for another in one call before they end the job"
    )
    two_level: int | str = _setting(
        "auto",
        _two_level,
        "whether a host's ranks sum densely among themselves, and one compressed stream a host crosses the network: "
        "auto (if that is faster), on, off, or the number of ranks that share",
    )
    ladder: tuple[str, ...] = _setting(
        ("none", "fp16", "int8", "powersgd:16+fp16", "lowrank:16+fp16", "powersgd:8+fp16", "powersgd:4+fp16"),
        _words,
        "levels that auto may choose from, least compression first",
    )
    dense_steps: int = _setting(
        0,
        _at_least(0),
        "steps without compression at the start of auto, and in lock-step before local steps; 0: as few as it takes",
    )
    every: int | str = _setting(
        1,
        _auto_or_at_least_1,
        "local steps between two exchanges; 1: lock-step, an exchange in every step; auto: measured",
    )
    outer: str = _setting(
        "average", _one_of("average", "nesterov"), "what becomes of local steps: their average, or a step of momentum"
    )
    overlap_steps: int = _setting(
        0, _at_least(0), "local steps that ranks go on for while they exchange; 0: they wait for it"
    )
    fragments: int = _setting(1, _at_least(1), "parts of the model that local steps exchange one after the other")
    average_state: bool = _setting(
        False, _yes_or_no, "whether local steps average what ranks' optimizers remember, too: yes or no"
    )
    staleness: int | str = _setting(
        0,
        _any_or_at_least_0,
        "exchanges by which a rank may be ahead of the slowest one; 0: all exchange together; any: nobody waits",
    )
    secure_aggregation: bool = _setting(
        False, _yes_or_no, "whether ranks mask what they send, so that only its sum can be read: yes or no"
    )
    drain_steps: int = _setting(10, _at_least(1), "steps over which a residual is flushed on the way back to dense")
    delay_price: float = _setting(
        0.25,
        _not_negative,
        "price k of gradients that arrive late: auto goes by the seconds of a step times 1 + k error",
    )
    error_budget: float = _setting(
        5.0,
        _above_zero,
        "largest error of a level that auto keeps, whatever it saves: residual over gradient, both summed over ranks",
    )
    bucket_bytes: int = _setting(8 << 20, _at_least(4), "size of the buckets that gradients are exchanged in, in bytes")
    weights_check_steps: int = _setting(
        100, _at_least(0), "steps between checks that weights are equal on all ranks (also after the first); 0: none"
    )
    window_steps: int = _setting(10, _at_least(1), "steps summed up in one line of the run log")
    batch_size: int = _setting(
        0, _at_least(0), "samples that a rank takes in a step, for the samples a second of reports; 0: unknown"
    )
    run_log: str = _setting("", _text, "file for the run log (JSON lines, written by rank 0); empty: none")
    seed: int = _setting(0, _at_least(0), "seed of the compressors' randomness, the same on all ranks")

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Setting -> the source of its value: ``argument``, ``environment``, ``file PATH``. All others have defaults."""

    @classmethod
    def load(cls, arguments: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Take each setting from the highest source that has it.

        Args:
            arguments: name -> value, from a script's ``DistributedOptimizer(settings=)``.
            environ: the environment; default ``os.environ``.

        Raises:
            ValueError: the file cannot be read, a name is unknown, or a value has the wrong form; the message says
                where, what was received and what would be right.
        """
        environ = os.environ if environ is None else environ
        path = environ.get(CONFIG, "")
        sources = {  # the highest comes last
            f"file {path}": _read(path) if path else {},
            "environment": {name: environ[variable(name)] for name in SETTINGS if variable(name) in environ},
            "argument": _checked(arguments),
        }
        values, origins = {}, {}
        for origin, written in sources.items():
            for name, value in written.items():
                if name not in SETTINGS:
                    near = _nearest(str(name), SETTINGS)
                    right = f"; did you mean {near}?" if near else f". Settings are {', '.join(SETTINGS)}."
                    raise ValueError(f"{name} ({origin}) is not a setting{right}")
                origins[name] = origin
                values[name] = _converted(name, value, origin)
        return cls(**values, origins=origins)

    def whence(self, name: str) -> str:
        """The setting's name as its source spells it, and the source: ``HVDPLUS_LADDER (environment)``."""
        origin = self.origins.get(name, "default")
        return f"{_spelled(name, origin)} ({origin})"


SETTINGS = {entry.name: entry for entry in fields(Settings) if "convert" in entry.metadata}
"""Name -> the field, with its converter and help."""


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


class Described(NamedTuple):
    """One setting, to be shown."""

    name: str
    value: str
    origin: str
    help: str


def describe(settings: Settings) -> Iterable[Described]:
    """Every setting by its variable's name, with its value and the value's source."""
    for name, entry in SETTINGS.items():
        value = getattr(settings, name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        yield Described(variable(name), text, settings.origins.get(name, "default"), entry.metadata["help"])


def unknown(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables named ``HVDPLUS_*`` that are not settings, each with the most similar setting's variable, or ``""``."""
    known = {variable(name): name for name in SETTINGS} | {CONFIG: "config"}
    others = [name for name in environ if name.startswith(PREFIX) and name not in known]
    nearest = {name: _nearest(name, known.values()) for name in sorted(others)}
    return [(name, variable(near) if near else "") for name, near in nearest.items()]


def _nearest(name: str, names: Iterable[str]) -> str:
    """The most similar of ``names``; ``""`` if none is similar."""
    bare = name.lower().removeprefix(PREFIX.lower())
    return next(iter(difflib.get_close_matches(bare, list(names), 1)), "")


def _spelled(name: str, origin: str) -> str:
    return variable(name) if origin == "environment" else name


def _converted(name: str, value: Any, origin: str) -> Any:
    convert = SETTINGS[name].metadata["convert"]
    try:
        return convert(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        spelled = _spelled(name, origin)
        raise ValueError(f"{spelled} ({origin}) wants {convert.__doc__}. Received: {spelled}={value!r}") from None


def _checked(arguments: Any) -> Mapping[str, Any]:
    """A script's settings. Raises ValueError if they are not a mapping, or contain ``transport`` (too late here)."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"settings= wants names with values, such as {{'dense_steps': 20}}. Received: {arguments!r}")
    for name in ("transport", "timeout_seconds"):
        if name in arguments:
            raise ValueError(
                f"{name} (argument) comes too late: hvd.init() starts the transport before there is an optimizer. Set "
                f"{variable(name)}, or {name} in the file that {CONFIG} names. Received: {name}={arguments[name]!r}"
            )
    return arguments


def _read(path: str) -> Mapping[Any, Any]:
    """The content of the YAML file at ``path``, ``{}`` if it is empty. Raises ValueError for any other content."""
    import yaml

    try:
        content = yaml.safe_load(files.content(path))
    except OSError as error:
        raise ValueError(f"{CONFIG} names a file that cannot be read: {error.strerror}. Received: {path!r}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date is a plain ValueError
        raise ValueError(f"{CONFIG} names a file that is not YAML: {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} ({CONFIG}) wants lines such as `dense_steps: 20`. Received: {content!r}")
    return content
