"""What tests of several files use."""

import contextlib
import sys
from pathlib import Path

import pytest
from frameworks import present

# PyTorch with CUDA brings Triton, and a process that has loaded TensorFlow crashes when it loads that.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# At the end, as the folder also holds names that others use (codecs).
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


def pytest_report_header():
    missing = [module for module in ("torch", "tensorflow") if not present(module)]
    return f"without {' and '.join(missing)}: not installed" if missing else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that ask for a laboratory are marked so, before ``-m`` picks."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker("lab")


@pytest.fixture
def lab():
    """``lab(hosts=2, rate="1gbit", …)`` gives a running `Lab`, removed after the test."""
    from hvdplus.lab import Lab, unavailable

    why = unavailable()
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Lab(*arguments, **options))
