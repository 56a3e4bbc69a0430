"""These tests run on several ranks at once, the same body on every rank; ``test_launches.py`` starts them.

A rank whose assertion fails would leave the others waiting in their next sum: it ends the whole job instead.
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


def pytest_collection_modifyitems(items):
    """Leave out bodies that mean nothing on so many ranks (``ranks(2)``), or nothing new here: ``any_transport`` runs
    on one rank and on two, over Horovod on MPI."""
    size = int(os.environ.get("EXPECTED_RANKS", "1"))
    elsewhere = os.environ.get("EXPECTED_TRANSPORT", "horovod-mpi") not in ("horovod-mpi", "local")
    for item in list(items):
        ranks = item.get_closest_marker("ranks")
        known = item.get_closest_marker("any_transport") and (elsewhere or size > 2)
        if known or ranks and size not in ranks.args:
            items.remove(item)
