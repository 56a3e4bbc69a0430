"""Elastic jobs: ranks are lost and come while a job runs, and hvdplus's optimizers follow."""

import json
import sys

import pytest
from launching import TESTS, run

pytestmark = pytest.mark.jobs


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
    hosts, discover = tmp_path / "hosts", tmp_path / "discover.sh"
    # Two names of this machine: Horovod uses no host again that has lost a rank.
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script"]
    body = [sys.executable, "-P", str(TESTS / "ranks" / f"{script}.py"), str(hosts), str(tmp_path)]
    code, output = run(
        [*command, str(discover), *body],
        timeout_seconds=180,
        LEVEL=level,
        HOROVOD_GLOO_TIMEOUT_SECONDS="10",
    )
    print(output)
    assert code == 0
    told = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(told) == 3, "two that were there from the beginning, and the newcomer"
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
