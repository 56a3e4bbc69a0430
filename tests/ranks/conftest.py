"""These tests run on several ranks at once, the same body on every rank; ``test_launches.py`` starts them.

A rank whose assertion fails would leave the others waiting in their next sum: it ends the whole job instead.
"""

import os
import sys

import pytest


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        sys.stderr.write(f"\n*** {item.nodeid} failed on rank {os.environ.get('OMPI_COMM_WORLD_RANK', '?')}\n")
        sys.stderr.write(f"{report.longrepr}\n")
        sys.stderr.flush()
        os._exit(1)


def pytest_collection_modifyitems(items):
    """``ranks(2)`` and the like: bodies that mean something for a certain number of ranks only."""
    import importlib

    for item in list(items):
        marker = item.get_closest_marker("ranks")
        if marker:
            size = importlib.import_module(item.module.__name__).hvd.size()
            if size not in marker.args:
                items.remove(item)
