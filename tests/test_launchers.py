"""Variables of launchers, and what follows where they and the transport disagree."""

import pytest

from hvdplus.adapters.transports.launchers import LAUNCHERS, announced, check_reachable, check_size, unheard
from hvdplus.transport import TransportError

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
ALLOCATION = {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
"""What a batch script sees."""
STEP = {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}
"""What a task of srun sees."""
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
"""With number and rank, what Kubernetes' operators for PyTorch set."""
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}


def said(environ, size, transport="horovod-mpi"):
    """The error of a transport of this size; empty: there is none."""
    try:
        check_reachable(environ)
        check_size(transport, size, environ)
    except TransportError as error:
        return str(error)
    return ""


ROWS = [
    (TORCHRUN, 2, ("torchrun", "WORLD_SIZE=2", "RANK=1", "mpirun or horovodrun", "PyTorch")),
    ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, 2, ("horovodrun --gloo", "HOROVOD_SIZE=2", "HVDPLUS_TRANSPORT")),
    (OPEN_MPI, 4, ("Open MPI", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=3", "horovodrun --gloo")),
    ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, 2, ("MVAPICH2", "MV2_COMM_WORLD_SIZE=2")),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2, ("Intel MPI", "PMI_SIZE=2, PMI_RANK=0", "srun --mpi=pmix")),
    ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "5"}, 6, ("jsrun", "JSM_NAMESPACE_SIZE=6")),
    ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, 2, ("flux", "FLUX_JOB_SIZE=2, FLUX_TASK_RANK=1")),
    ({**STEP, "PMIX_RANK": "0"}, 8, ("srun --mpi=pmix", "SLURM_STEP_NUM_TASKS=8, PMIX_RANK=0", "srun --mpi=list")),
    (STEP, 8, ("srun started 8 ranks", "SLURM_STEP_NUM_TASKS=8", "srun --mpi=pmix")),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, 2, ("WORLD_SIZE=2", "mpirun or horovodrun")),
    ({"WORLD_SIZE": "4", "RANK": "0", **MEETING}, 4, ("the environment started 4 ranks", "mpirun or horovodrun")),
]


@pytest.mark.parametrize(("environ", "ranks", "words"), ROWS, ids=[row[2][0] for row in ROWS])
def test_ranks_that_would_train_apart_are_refused_with_both_numbers_and_the_way_out(environ, ranks, words):
    message = said(environ, 1)
    assert all(word in message for word in words), message
    silent = announced(environ)[0].launcher.silent
    assert "apart" in message and (silent or "connects 1 here" in message)
    if not silent:
        assert said(environ, ranks) == ""
        assert f"connects {ranks + 1} here" in said(environ, ranks + 1)


def test_every_row_of_the_table_is_tried():
    tried = {announced(environ)[0].launcher.name for environ, _, _ in ROWS} | {"mpiexec (PALS)", "a launcher over PMIx"}
    assert tried == {launcher.name for launcher in LAUNCHERS}


@pytest.mark.parametrize("variable", ["PALS_RANKID", "PMIX_RANK"])
def test_a_launcher_that_tells_ranks_alone_is_believed_that_there_are_as_many(variable):
    assert "at least 4 ranks" in said({variable: "3"}, 1) and f"{variable}=3" in said({variable: "3"}, 3)
    assert said({variable: "3"}, 4) == "" and said({variable: "0"}, 1) == ""
    assert announced({variable: "0"})[0].size is None, "nobody said that there is one"


@pytest.mark.parametrize("one", [TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {}])
def test_one_rank_may_be_started_by_any_launcher(one):
    assert said(one, 1, "local") == ""


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (ALLOCATION, 1),  # a plain python in a batch script
        ({**ALLOCATION, **OPEN_MPI}, 4),  # mpirun with fewer ranks than were allocated
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2", **OPEN_MPI}, 4),  # mpirun starts one daemon a host, by srun
        ({**STEP, "PMIX_RANK": "0", **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, 2),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, 2),
        ({"WORLD_SIZE": "16", "RANK": "3", "LOCAL_RANK": "0", **OPEN_MPI}, 4),  # a pod's variables
        ({"WORLD_SIZE": "16", "RANK": "3", "LOCAL_RANK": "0", **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({**OPEN_MPI, "HOROVOD_SIZE": "8", "HOROVOD_RANK": "0"}, 4),  # the one that agrees
        ({"WORLD_SIZE": "16", "RANK": "3", **MEETING, **OPEN_MPI}, 4),
        ({"WORLD_SIZE": "16"}, 1),  # somebody's own variable
        ({"OMPI_COMM_WORLD_SIZE": "", "PMI_SIZE": "two"}, 1),
    ],
)
def test_variables_of_an_outer_launcher_are_no_error(environ, size):
    assert said(environ, size) == ""


@pytest.mark.parametrize("outer", [{**STEP, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": "1"}])
def test_torchrun_inside_another_launchers_single_task_is_refused(outer):
    message = said({**outer, **TORCHRUN}, 1)
    assert "torchrun started 2 ranks" in message


def test_torchrun_inside_srun_is_named_before_mpi_starts():
    with pytest.raises(TransportError, match="torchrun started 2 ranks"):
        check_reachable({**STEP, "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN})


def test_torch_distributed_hears_what_the_environment_says_if_that_is_all_it_wants_to_know():
    found = unheard({"WORLD_SIZE": "4", "RANK": "1", **MEETING})
    assert found is not None and (found.size, found.rank) == (4, 1)
    assert unheard({"WORLD_SIZE": "1", "RANK": "0", **MEETING}) is None
    assert unheard({"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}) is None
    assert unheard({"WORLD_SIZE": "4", "RANK": "1", **MEETING, **OPEN_MPI}) is None


def test_only_torch_distributed_hears_a_torchrun_that_mpirun_started_on_every_host():
    outer = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    found = unheard({**outer, **TORCHRUN})
    assert found is not None and found.launcher.name == "torchrun" and unheard(outer) is None
