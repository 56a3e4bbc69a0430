"""Where ranks meet, as launchers say it."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.transports.rendezvous import FIRST_PORT, PORTS, first_host, meeting
from hvdplus.transport import TransportError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "alice", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "417"}
SLURM |= {"SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-09,12]"}


def test_torchruns_variables_are_taken_as_they_are() -> None:
    assert meeting(TORCHRUN) == TORCHRUN
    assert meeting(TORCHRUN | SLURM) == TORCHRUN  # torchrun in a batch script


def test_jobs_and_their_steps_meet_on_ports_of_their_own() -> None:
    """Which may run on the same node: a job's second step and the next job's first one, say."""
    of_steps = [
        SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(s)} for job in range(417, 427) for s in range(5)
    ]
    assert len({meeting(each)["MASTER_PORT"] for each in of_steps}) == len(of_steps)


def test_slurms_words_are_translated() -> None:
    port = str(FIRST_PORT + zlib.crc32(b"417.2") % PORTS)
    expected = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": port, "MASTER_ADDR": "gpu07", "LOCAL_RANK": "1"}
    assert meeting(SLURM) == expected
    assert meeting(SLURM | {"MASTER_ADDR": "bob", "MASTER_PORT": "5"}) == expected | {
        "MASTER_ADDR": "bob",
        "MASTER_PORT": "5",
    }


@given(st.integers(0, 10**9), st.integers(0, 1000))
def test_a_jobs_port_is_below_those_that_the_system_gives_away(job: int, step: int) -> None:
    port = int(meeting(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"])
    assert FIRST_PORT <= port < 32768  # where Linux begins


def test_a_process_by_itself_meets_nobody() -> None:
    found = meeting({})
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert 0 < int(found["MASTER_PORT"]) < 65536


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "MASTER_ADDR"),
    ],
    ids=["half of torchrun's", "Slurm without nodes"],
)
def test_what_is_missing_is_named(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(TransportError, match=f"missing: {missing}. Start the job with torchrun or srun"):
        meeting(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack[2-3]node[05,07]", "rack2node05"),
        ("n[1].cluster", "n1.cluster"),
    ],
)
def test_the_first_of_slurms_hosts(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["[", "]x", ",a"])
def test_a_list_in_another_form_is_refused(nodes: str) -> None:
    with pytest.raises(TransportError, match="Set MASTER_ADDR. Received: '"):
        first_host(nodes)
