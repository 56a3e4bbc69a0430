"""Elastic jobs: ranks are lost and come while a job runs, and hvdplus's optimizers follow."""

import json
import re
import sys

import numpy as np
import pytest
from launching import TESTS, run

pytestmark = pytest.mark.jobs


def elastic(folder, script, level, gloo_seconds="30", **environment):
    """(what each rank has seen, what the job printed). Ranks wait so many seconds for others to come, and for one that
    is dead."""
    hosts, discover = folder / "hosts", folder / "discover.sh"
    # Two names of this machine: Horovod uses no host again that has lost a rank.
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script"]
    body = [sys.executable, "-P", str(TESTS / "ranks" / f"{script}.py"), str(hosts), str(folder)]
    code, output = run(
        [*command, str(discover), *body],
        timeout_seconds=180,
        LEVEL=level,
        HOROVOD_GLOO_TIMEOUT_SECONDS=gloo_seconds,
        **environment,
    )
    print(output)
    assert code == 0
    return [json.loads(path.read_text()) for path in folder.glob("*.json")], output


@pytest.mark.parametrize(
    ("script", "level"),
    [
        ("elastic", "none"),
        ("elastic", "lowrank:2"),
        ("elastic", "auto"),
        ("elastic", "local:3+lowrank:2"),
        ("elastic", "local:auto+fp16"),
        ("keras_elastic", "lowrank:2"),
        ("keras_elastic", "local:3+lowrank:2"),
    ],
)
def test_ranks_come_and_go(tmp_path, script, level):
    ranks, _ = elastic(tmp_path, script, level)
    assert len(ranks) == 3, "two that were there from the beginning, and the newcomer"
    told = [each["steps"] for each in ranks]
    shares = [each["shared"] for each in ranks if len(each["shared"]) > 1]
    assert len(shares) == 2 * ((script, level) == ("elastic", "lowrank:2"))
    for shared in shares:
        assert np.abs(shared[0]).max() > 0
        assert np.allclose(shared[0], shared[1], atol=1e-6), "of a rank that leaves in order, nothing is lost"
    assert all(line["identical"] for lines in told for line in lines)
    survivors = [lines for lines in told if lines[0]["step"] == 1]
    (newcomers,) = (lines for lines in told if lines[0]["step"] != 1)
    assert len(survivors) == 2
    for lines in survivors:
        sizes = [line["ranks"] for line in lines]
        assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [3, 2, 3]
        assert lines[-1]["step"] == 60
        if level.endswith("lowrank:2"):
            at = sizes.index(2)
            assert lines[at]["held_back"] > 0.3 * lines[at - 1]["held_back"] > 0, "nothing is lost on the way"
    assert newcomers[-1]["step"] == 60 and {line["ranks"] for line in newcomers} == {3}
    for mine, theirs in zip(reversed(survivors[0]), reversed(newcomers), strict=False):
        assert (mine["step"], mine["level"]) == (theirs["step"], theirs["level"])


@pytest.mark.alone  # while the machine is busy, ranks that live seem to be dead, too
@pytest.mark.parametrize("script", ["elastic", "keras_elastic"])
def test_a_rank_is_killed(tmp_path, script):
    """The others go back to their last commit, and train on without it, also long after its death."""
    ranks, output = elastic(tmp_path, script, "lowrank:2", "10", KILLED="1", HVDPLUS_TIMEOUT_SECONDS="16")
    assert len(ranks) == 2
    for steps in (rank["steps"] for rank in ranks):
        assert all(line["identical"] for line in steps)
        at = next(i for i, line in enumerate(steps) if line["ranks"] == 2)
        assert steps[at - 1]["step"] in (9, 10) and steps[at]["step"] == 9, "commits are after every fourth step"
        assert steps[-1]["step"] == 200
    assert re.search(r"1 rank is gone. What it held back is lost. \(.* norm [0-9.e+-]*[1-9]", output)
    assert all(rank["accuracy"] > 0.85 for rank in ranks), [rank["accuracy"] for rank in ranks]
