"""Which frameworks tests may use, and how many examples a property gets.

Where everything is tested (``make test`` sets ``ALL_FRAMEWORKS=1``) a framework that cannot be imported is a failure.
Elsewhere (``make check``) tests of what is not installed are left out, or skipped with a reason.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

ALL = os.environ.get("ALL_FRAMEWORKS") == "1"
FULL_EXAMPLES = 100
"""Examples of the profile in which properties get the number that stands beside them."""

# The same examples on every machine and in every run, whatever the profile.
settings.register_profile("full", max_examples=FULL_EXAMPLES, deadline=None, derandomize=True, database=None)
settings.register_profile("check", settings.get_profile("full"), max_examples=FULL_EXAMPLES // 4)
settings.load_profile("full")


def present(*modules: str) -> bool:
    """Whether tests of all these modules are to run."""
    return ALL or all(find_spec(module) for module in modules)


def need(module: str) -> Any:
    """The module; the test is skipped where it may be missing and is."""
    if not present(module.partition(".")[0]):
        pytest.skip(f"{module} is not installed")
    return importlib.import_module(module)


def examples(count: int, **others: Any) -> settings:
    """``count`` examples of a property, a quarter of them in the profile ``check``, but at least one."""
    return settings(max_examples=max(1, count * settings.default.max_examples // FULL_EXAMPLES), **others)
