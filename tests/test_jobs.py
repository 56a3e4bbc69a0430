"""Whole jobs: what happens when a rank fails, differs, or is alone."""

import re
import sys
import textwrap

import pytest
from launching import gloo, mpirun, run

pytestmark = pytest.mark.jobs

TRAIN = """
    import sys, torch
    import hvdplus.torch as hvd
    hvd.init()
    torch.set_num_threads(1)
    net = torch.nn.Linear(20, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01), named_parameters=net.named_parameters(), compression=COMPRESSION
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(40):
        if FAILS and step == 5 and hvd.rank() == hvd.size() - 1:
            raise KeyError("this rank has had enough")
        optimizer.zero_grad()
        net(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
    print(f"rank {hvd.rank()} of {hvd.size()} done, identical: {hvd.identical(net)}, "
          f"ladder: {','.join(optimizer.hvdplus.ladder.names)}", flush=True)
"""

IMPATIENT = "import hvdplus.adapters.transports.mpi4py\nhvdplus.adapters.transports.mpi4py.LOOK_SECONDS = 0.1\n"


@pytest.fixture
def script(tmp_path):
    def write(text, **constants):
        path = tmp_path / "job.py"
        path.write_text("\n".join([*(f"{k} = {v!r}" for k, v in constants.items()), textwrap.dedent(text)]))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [(mpirun, "horovod"), (gloo, "horovod"), (mpirun, "mpi4py")],
    ids=["mpi", "gloo", "mpi4py"],
)
@pytest.mark.parametrize("level", ["none", "lowrank:2"])
def test_an_exception_on_one_rank_ends_the_job(script, launcher, transport, level):
    path = script(TRAIN, COMPRESSION=level, FAILS=True)
    code, output = run(launcher(2, sys.executable, path), 90, HVDPLUS_TRANSPORT=transport)
    assert code != 0
    assert "this rank has had enough" in output
    assert "done" not in output


@pytest.mark.parametrize("others", ["", "hvd.allreduce(torch.ones(1)); "], ids=["step on", "call"])
@pytest.mark.parametrize("how", ["sys.exit()", "sys.exit('no data')"])
def test_over_mpi4py_a_rank_that_leaves_in_order_ends_the_job_of_those_who_wait_for_it(script, how, others):
    """Nothing else tells them: MPI lets who has left wait for them in its end."""
    text = IMPATIENT + textwrap.dedent(TRAIN)
    text = text.replace('raise KeyError("this rank has had enough")', how).replace(
        "optimizer.zero", f"{others}optimizer.zero"
    )
    path = script(text, COMPRESSION="none", FAILS=True)
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_TRANSPORT="mpi4py")
    assert code != 0
    assert "Rank 1 has ended, and the other ranks wait for it" in output and "done" not in output


def test_over_mpi4py_a_rank_that_leaves_within_a_sum_ends_when_the_others_have_left(script):
    path = script(
        IMPATIENT
        + textwrap.dedent(
            """
            import numpy as np
            import hvdplus.torch as hvd
            hvd.init()
            if hvd.rank() == 1:
                hvd._require_world().transport.start(np.ones(4, np.float32), "gradients")
            """
        )
    )
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_TRANSPORT="mpi4py")
    assert code != 0
    assert "rank 1 ends within sum 'gradients'" in output and "Rank 0 has ended" in output


def test_over_mpi4py_ranks_may_end_long_after_each_other(script):
    late = "if hvd.rank() == 0:\n    import time\n    time.sleep(3)\nprint('over', flush=True)\n"
    path = script(IMPATIENT + textwrap.dedent(TRAIN) + late, COMPRESSION="none", FAILS=False)
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_TRANSPORT="mpi4py")
    assert code == 0 and output.count("over") == 2, output


def test_a_failed_rank_that_cannot_end_in_order_ends_all_the_same(script):
    """Horovod's shutdown at exit was seen to hang now and then, so that the launcher never learned of the failure."""
    hang = "    import atexit, time\n    atexit.register(time.sleep, 600)\n"
    path = script(hang + TRAIN, COMPRESSION="none", FAILS=True)
    code, output = run(mpirun(2, sys.executable, path), 80)
    assert code != 0
    assert "this rank has had enough" in output
    assert "done" not in output


def test_a_keras_job_ends_too(script):
    path = script("""
        import keras, numpy as np
        import hvdplus.keras as hvd
        hvd.init()
        keras.utils.set_random_seed(0)  # ranks that begin with other weights end, too
        net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
        net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(), compression="lowrank:1"), "mse")

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3 and hvd.rank() == 1:
                    raise KeyError("this rank has had enough")

        net.fit(np.zeros((80, 4)), np.zeros((80, 4)), batch_size=4, verbose=0, callbacks=[Fail()])
        print("done", flush=True)
    """)
    code, output = run(mpirun(2, sys.executable, path), 90)
    assert code != 0
    assert "this rank has had enough" in output
    assert "done" not in output


def test_rank_0_says_what_the_job_is(script):
    code, output = run(mpirun(2, sys.executable, script(TRAIN, COMPRESSION="none", FAILS=False)), 90)
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("hvdplus:")]
    assert len(lines) == 2
    assert "2 ranks on 1 host" in lines[0] and lines[0].endswith("transport horovod-mpi, collective ring")
    assert lines[1] == "hvdplus: compression none", "what the script says, not the environment"


def test_a_job_that_asks_for_no_report_leaves_a_complete_log(script, tmp_path):
    from hvdplus.log.runlog import read

    path, log = script(TRAIN, COMPRESSION="none", FAILS=False), tmp_path / "run.jsonl"
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_RUN_LOG=str(log), HVDPLUS_RUNLOG="typo")
    assert code == 0, output
    assert "HVDPLUS_RUNLOG is not a setting and was ignored; did you mean HVDPLUS_RUN_LOG?" in output
    records = read(log)
    assert records[-1]["kind"] == "end" and records[-1]["steps"] == 40
    assert sum(record["steps"] for record in records if record["kind"] == "window") >= 37
    path = script(TRAIN, COMPRESSION="fp16", FAILS=False)
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_RUN_LOG=str(log))
    assert code == 0, output
    assert read(log)[-1]["steps"] == 40, "the last one's times were never read"
    path, log = script(TRAIN, COMPRESSION="none", FAILS=True), tmp_path / "failed.jsonl"
    run(mpirun(2, sys.executable, path), 90, HVDPLUS_RUN_LOG=str(log))
    assert all(record["kind"] != "end" for record in read(log))


def test_ranks_on_unequal_cpus_are_held_at_the_least_of_them(script):
    """Trap: the same product gives other bits at another CPU capability, so that shared contexts drift apart."""
    path = script(TRAIN, COMPRESSION="lowrank:2", FAILS=False)
    weak = ["-np", "1", "-x", "ATEN_CPU_CAPABILITY=default", sys.executable, path]
    code, output = run([*mpirun(1, sys.executable, path), ":", *weak], 90)
    assert code == 0, output
    assert "CPUs differ (AVX512 | DEFAULT); this rank now uses DEFAULT" in output or "(AVX2 | DEFAULT)" in output
    assert output.count("identical: True") == 2


def test_ranks_on_unequal_cpus_that_cannot_be_held_leave_out_levels_that_need_equal_bits(script):
    early = "import torch\ntorch.ones(100) + 1  # now PyTorch has decided\n"
    path = script(early + textwrap.dedent(TRAIN), COMPRESSION="auto", FAILS=False)
    weak = ["-np", "1", "-x", "ATEN_CPU_CAPABILITY=default", sys.executable, path]
    code, output = run([*mpirun(1, sys.executable, path), ":", *weak], 90)
    assert code == 0, output
    assert "ranks differ in CPU" in output
    assert output.count("ladder: none,fp16") == 2
    path = script(early + textwrap.dedent(TRAIN), COMPRESSION="lowrank:2", FAILS=False)
    code, output = run([*mpirun(1, sys.executable, path), ":", *weak], 90)
    assert code != 0
    assert "needs the same CPU capability" in output


def test_a_single_process_needs_no_launcher(script):
    path = script(TRAIN, COMPRESSION="auto", FAILS=False)
    for transport in ("auto", "local", "mpi4py"):
        code, output = run([sys.executable, path], 90, HVDPLUS_TRANSPORT=transport)
        assert code == 0, output
        assert "rank 0 of 1 done" in output


def test_local_transport_refuses_several_ranks(script):
    path = script(TRAIN, COMPRESSION="auto", FAILS=False)
    code, output = run(mpirun(2, sys.executable, path), 90, HVDPLUS_TRANSPORT="local")
    assert code != 0
    assert "HVDPLUS_TRANSPORT=local is for one process, but the launcher started 2" in output


def test_without_horovod_the_message_names_the_command_that_installs_it(script, tmp_path):
    path = script(TRAIN, COMPRESSION="none", FAILS=False)
    # A `horovod` that cannot be found: what an environment without it looks like to hvdplus.
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name.split('.')[0] == 'horovod' else find(name, *a)\n"
    )
    code, output = run(mpirun(2, sys.executable, path), 90, PYTHONPATH=str(tmp_path), HVDPLUS_TRANSPORT="horovod")
    assert code != 0
    assert "hvdplus install-horovod" in output
    code, output = run(mpirun(2, sys.executable, path), 90, PYTHONPATH=str(tmp_path))
    assert code == 0, output
    assert "transport mpi4py" in output


def test_the_ring_is_really_a_ring(script):
    """Ask Open MPI itself, in a running job, which all-reduce it will use (MPI_T control variables)."""
    path = script("""
        import ctypes, os
        import torch
        import hvdplus.torch as hvd
        hvd.init()
        hvd.allreduce(torch.ones(100_000))
        mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        provided = ctypes.c_int()
        mpi.MPI_T_init_thread(0, ctypes.byref(provided))

        def value(name):
            index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
            assert mpi.MPI_T_cvar_get_index(name, ctypes.byref(index)) == 0, name
            assert mpi.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
            number = ctypes.c_int()
            assert mpi.MPI_T_cvar_read(handle, ctypes.byref(number)) == 0
            return number.value

        # In one piece: two ranks write at once.
        os.write(1, b"algorithm %d\\n" % value(b"coll_tuned_allreduce_algorithm"))
    """)
    code, output = run(mpirun(2, sys.executable, path), 90)
    assert code == 0, output
    assert output.count("algorithm 4") == 2
    code, output = run(
        mpirun(2, sys.executable, path),
        90,
        OMPI_MCA_coll_tuned_use_dynamic_rules="1",
        OMPI_MCA_coll_tuned_allreduce_algorithm="3",
    )
    assert output.count("algorithm 3") == 2, output  # the user's own choice stands
    assert "collective recursive doubling" in output


SHORTER = """
    import sys
    import time
    import torch
    import hvdplus.torch as hvd

    hvd.init()
    net = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression="lowrank:2")
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(12 if hvd.rank() == 0 else 6):
        optimizer.zero_grad()
        net(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
    if hvd.rank() == 1:
        time.sleep(300)  # busy with something else
    print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("launcher", "transport", "named"),
    [
        (mpirun, "horovod", r"Missing ranks:\s+1!: \[allreduce.hvdplus0"),
        (gloo, "horovod", r"Rank 0 has waited \d seconds in: sum 'hvdplus0.* are missing. .*HVDPLUS_TIMEOUT_SECONDS"),
        (mpirun, "mpi4py", "in: sum 'hvdplus0.* It is not known to wait anywhere: rank 1. .*HVDPLUS_TIMEOUT_SECONDS"),
    ],
    ids=["horovod-mpi", "horovod-gloo", "mpi4py"],
)
def test_a_rank_that_takes_fewer_steps_is_named_after_the_time_that_was_set(script, launcher, transport, named):
    environment = {"HVDPLUS_TRANSPORT": transport, "HVDPLUS_TIMEOUT_SECONDS": "6"}
    code, output = run(launcher(2, sys.executable, script(SHORTER)), 120, **environment)
    assert code != 0 and "trained" not in output, output
    assert re.search(named, output), output


SHORTER_KERAS = """
    import time
    import keras
    import numpy as np
    import hvdplus.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(20)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="lowrank:2"), "mse", jit_compile=False)
    rows = 8 * (12 if hvd.rank() == 0 else 6)
    net.fit(np.ones((rows, 20)), np.ones((rows, 20)), batch_size=8, verbose=0)
    if hvd.rank() == 1:
        time.sleep(300)  # busy with something else
    print("trained", flush=True)
"""


def test_a_keras_rank_that_takes_fewer_steps_ends_a_job_over_gloo(script):
    code, output = run(gloo(2, sys.executable, script(SHORTER_KERAS)), 120, HVDPLUS_TIMEOUT_SECONDS="6")
    assert code != 0 and "trained" not in output, output
    assert re.search(r"Rank 0 has waited \d+ seconds in: sum 'hvdplus0.metadata' of a training step", output), output


STANDS_STILL = """
    import os, signal, torch
    import hvdplus.torch as hvd
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(20, 20)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
    for step in range(40):
        if hvd.rank() == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        net(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
    print("trained", flush=True)
"""


@pytest.mark.parametrize("transport", ["horovod", "mpi4py"])
def test_a_rank_that_stands_still_ends_the_job(script, transport):
    """Not even Horovod's own thread answers there, for which Horovod's check of waiting ranks waits, too."""
    environment = {"HVDPLUS_TRANSPORT": transport, "HVDPLUS_TIMEOUT_SECONDS": "5"}
    code, output = run(mpirun(2, sys.executable, script(STANDS_STILL)), 90, **environment)
    assert code != 0 and "trained" not in output, output
    assert re.search(r"Rank 0 has waited \d+ seconds in: sum .*raise HVDPLUS_TIMEOUT_SECONDS. Received: 5", output), (
        output
    )
