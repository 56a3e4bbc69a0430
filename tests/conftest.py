"""What tests of several files use."""

import contextlib
import sys
from pathlib import Path

import pytest

# At the end, as the folder also holds names that others use (codecs).
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.fixture
def lab():
    """``lab(hosts=2, rate="1gbit", …)`` gives a running `Lab`, removed after the test."""
    from lab import Lab, unavailable

    why = unavailable()
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Lab(*arguments, **options))
