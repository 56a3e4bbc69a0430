"""Jobs whose ranks cannot reach each other, or do not agree on how, end with an error instead of training apart."""

import sys
import time

import pytest
from launching import BIN, TESTS, gloo, mpirun, run

pytestmark = pytest.mark.jobs

TRAIN = """
import hvdplus.torch as hvd
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()} trains", flush=True)
hvd.shutdown()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "job.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("example", "environ"),
    [("keras_digits.py", {"KERAS_BACKEND": "tensorflow"}), ("pytorch_digits.py", {"HVDPLUS_TRANSPORT": "horovod"})],
)
def test_torchrun_is_refused_on_every_rank_at_once_where_it_connects_nothing(example, environ, tmp_path):
    example = str(TESTS.parent / "examples" / example)
    began = time.monotonic()
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--redirects=3", f"--log-dir={tmp_path}", example]
    code, output = run(command, 90, PYTHONSAFEPATH="", **environ)
    assert code != 0, output
    assert time.monotonic() - began < 60
    written = sorted(tmp_path.rglob("stderr.log"))
    assert len(written) == 2
    told = [path.read_text() for path in written]
    assert any("torchrun started 2 ranks (WORLD_SIZE=2, RANK=" in text for text in told)
    for text in told:  # the launcher may end the second before it has spoken
        assert "hvdplus: 1 rank" not in text and ("Only torch.distributed hears torchrun" in text or not text)


def test_torchrun_with_one_rank_is_one_rank(script):
    code, output = run([str(BIN / "torchrun"), "--nproc-per-node", "1", script(TRAIN)], 90)
    assert code == 0 and "rank 0 of 1 trains" in output, output


@pytest.mark.parametrize(
    ("launch", "environ", "words"),
    [
        (gloo, {"HVDPLUS_TRANSPORT": "mpi4py"}, "horovodrun --gloo started 2 ranks (HOROVOD_SIZE=2"),
        (
            None,
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            "(PMI_SIZE=2, PMI_RANK=0), but the transport horovod-mpi connects 1",
        ),
    ],
    ids=["mpi4py under Gloo", "another MPI"],
)
def test_ranks_that_their_launcher_does_not_connect_are_refused(script, launch, environ, words):
    command = [sys.executable, script(TRAIN)]
    code, output = run(launch(2, *command) if launch else command, 90, **environ)
    assert code != 0, output
    assert words in output and "would train apart" in output and "trains\n" not in output


IMPATIENT = """
import os, sys
if os.environ.get("HVDPLUS_TRANSPORT") == "mpi4py":
    import hvdplus.adapters.transports.mpi4py
    hvdplus.adapters.transports.mpi4py.MEET_SECONDS = 2.0
    del sys.modules["mpi4py.MPI"]  # MPI is started by hvd.init(), as far as that can see
"""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("mpi4py", "Rank 0 has not come to the transport mpi4py within 2 seconds after MPI started."),
        ("local", "HVDPLUS_TRANSPORT=local is for one process"),
    ],
)
def test_a_transport_that_one_rank_alone_asks_for_ends_the_job_with_a_message(script, asked, words):
    path = script(IMPATIENT + TRAIN)
    one = ["-np", "1", "-x", f"HVDPLUS_TRANSPORT={asked}", sys.executable, path]
    code, output = run([*mpirun(1, sys.executable, path), ":", *one], 60)
    assert code != 0, output
    assert words in output and "trains\n" not in output
    if asked == "mpi4py":
        assert "rank 1 has mpi4py from HVDPLUS_TRANSPORT (environment)" in output


WRAPS = """
import torch
net = torch.nn.Linear(2, 2)
hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(){argument})
"""


@pytest.mark.parametrize("argument", ["", ", every=2", ", op=hvd.Adasum"])
def test_a_job_that_wraps_an_optimizer_is_left_in_peace(script, argument):
    path = script(TRAIN.replace("hvd.shutdown()", WRAPS.format(argument=argument)))
    code, output = run(mpirun(2, sys.executable, path), 60)
    assert code == 0 and "no optimizer was wrapped" not in output, output


def test_a_job_that_wraps_no_optimizer_is_told_so_at_its_end(script):
    code, output = run(mpirun(2, sys.executable, script(TRAIN)), 60)
    assert code == 0 and output.count("hvdplus: no optimizer was wrapped") == 1, output
