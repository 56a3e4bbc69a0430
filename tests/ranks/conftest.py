"""These tests run on several ranks at once, the same body on every rank; ``test_launches.py`` starts them.

A rank whose assertion fails would leave the others waiting in their next sum: it ends the whole job instead.

A body is launched on several numbers of ranks and over several transports. Two marks say what a test is about, and
leave it out where it would tell nothing new; everything else runs in every launch. Both may stand on one value of a
parametrization, too (``picking.py`` has a shorthand for that).

- ``ranks(2, 4)``: these numbers of ranks, and no others. What one rank's word against another's shows needs two; for
  averages, slots, agreement and the naming of ranks two may be too few.
- ``any_transport``: whatever adds up, it is the same. It runs in the first launch on each number of ranks, in the
  order of ``test_launches.py``, and not in later ones (which have ``LAUNCHED_BEFORE`` set). Without this mark goes what
  a transport may do otherwise: the types that it adds up, the order of sums, several of them in flight, memory that it
  still reads, how errors come through.

A test that takes long and mostly tells what others tell is marked ``rarely``: it runs with ``EVERY_TEST=1 make test``.

So the first launch on two ranks runs all but what is about one rank or about four. Launched by hand, a body runs
everything that is about as many ranks.
"""

import os
import sys
from pathlib import Path

import pytest

# pytest numbers its temporary folders and clears old ones away while another rank lists them: each rank has a root of
# its own, inside the one that test_launches.py names (and removes).
if "RANKS_TEMPORARY" in os.environ:
    root = Path(os.environ["RANKS_TEMPORARY"], str(os.getpid()))
    root.mkdir()
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "?"))
        sys.stderr.write(f"\n*** {item.nodeid} failed on rank {rank}\n")
        sys.stderr.write(f"{report.longrepr}\n")
        sys.stderr.flush()
        os._exit(1)


@pytest.fixture(autouse=True, scope="module")
def as_expected(request):
    """The job is the one that was asked for, and not by accident another, of fewer ranks or over another transport."""
    hvd = getattr(request.module, "hvd", None)
    if "EXPECTED_TRANSPORT" in os.environ and hvd and hasattr(hvd, "_require_world") and hvd.is_initialized():
        transport = hvd._require_world().transport
        assert transport.name == os.environ["EXPECTED_TRANSPORT"]
        assert transport.size == int(os.environ["EXPECTED_RANKS"])


def pytest_collection_modifyitems(items):
    """Leave out what is not about this launch."""
    size, again = int(os.environ.get("EXPECTED_RANKS", "1")), "LAUNCHED_BEFORE" in os.environ
    for item in list(items):
        fits = all(size in ranks.args for ranks in item.iter_markers("ranks"))
        if not fits or again and item.get_closest_marker("any_transport"):
            items.remove(item)
