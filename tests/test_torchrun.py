"""torchrun and torch.distributed, as users of them see it: scripts, restarts, ranks that are missing or end."""

import os
import re
import shlex
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from frameworks import need
from launching import TESTS, mpirun, run, torchrun

from hvdplus.adapters.transports.rendezvous import own_address

pytestmark = pytest.mark.jobs
EXAMPLES = TESTS.parent / "examples"


def script(tmp_path, body):
    """A file with a script of this body."""
    path = tmp_path / "script.py"
    path.write_text("import os, sys, time\nimport torch\nimport hvdplus.torch as hvd\n" + textwrap.dedent(body))
    return path


def start(path, ranks=2, timeout_seconds=120, launcher=torchrun, **environment):
    return run(launcher(ranks, "python", str(path)), timeout_seconds, **environment)


@pytest.mark.rarely  # test_packaging.py trains both where nothing else is installed
@pytest.mark.parametrize("example", ["pytorch_digits.py", "pytorch_ddp.py"])
def test_examples_under_torchrun(example):
    command = torchrun(2, "python", str(EXAMPLES / example), "--epochs", "12")
    code, output = run(command, 300, PYTHONPATH=f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    assert code == 0, output
    assert "transport torch-gloo" in output
    assert re.search(r"identical[^\n]*(True|yes)", output, re.IGNORECASE), output
    assert float(re.findall(r"accuracy (0\.\d+)", output)[-1]) > 0.8


def test_a_plain_process_needs_no_launcher(tmp_path):
    path = script(tmp_path, "hvd.init(); print(hvd.size(), hvd.allreduce(torch.ones(2)).tolist())")
    for transport in ("torch", "local"):
        code, output = run(["python", str(path)], 60, HVDPLUS_TRANSPORT=transport)
        assert code == 0 and "1 [1.0, 1.0]" in output, output


def test_processes_that_a_script_spawns_need_none_either(tmp_path):
    """A group over a file, no launcher: only the group says how many ranks there are."""
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        def rank(number, file):
            dist.init_process_group("gloo", init_method="file://" + file, rank=number, world_size=2)
            hvd.init()
            model = torch.nn.Linear(4, 2)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression="fp16")
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((8, 4), 1.0 + number)).square().mean().backward()
                optimizer.step()
            print(f"rank {hvd.rank()} of {hvd.size()} identical {hvd.identical(model)}\\n", end="", flush=True)
            hvd.shutdown()
            dist.destroy_process_group()
        if __name__ == "__main__":
            torch.multiprocessing.spawn(rank, (sys.argv[0] + ".store",), nprocs=2)
        """,
    )
    code, output = run(["python", str(path)], 120)
    assert code == 0 and "rank 0 of 2 identical True" in output and "rank 1 of 2 identical True" in output, output


def test_mpi_tells_where_to_meet(tmp_path):
    path = script(tmp_path, "hvd.init(); print('sum', hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist())")
    code, output = start(path, launcher=mpirun, HVDPLUS_TRANSPORT="torch")
    assert code == 0 and output.count("sum [2.0, 2.0]") == 2 and "transport torch-gloo" in output, output


def test_a_process_group_of_the_scripts_is_used(tmp_path):
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        hvd.init()
        one = torch.ones(1)
        dist.all_reduce(one)
        ours = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        print(f"theirs {one.item()} ours {ours.item()}\\n", end="", flush=True)
        hvd.shutdown()
        dist.barrier()
        """,
    )
    code, output = start(path)
    assert code == 0 and output.count("theirs 2.0 ours 2.0") == 2, output


def test_a_job_may_end_and_start_anew(tmp_path):
    path = script(
        tmp_path,
        """
        for time in range(2):
            hvd.init()
            group = torch.distributed.new_group([0, 1])
            net = torch.nn.Linear(30, 30)
            net.load_state_dict(hvd.broadcast_object(net.state_dict(), 0))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), "fp16", process_group=group)
            net(torch.full((4, 30), float(hvd.rank()))).sum().backward()
            optimizer.step()
            print(f"time {time} identical {hvd.identical(net)}\\n", end="", flush=True)
            hvd.shutdown()
            assert not torch.distributed.is_initialized()
        """,
    )
    code, output = start(path)
    assert code == 0 and output.count("time 0 identical True") == output.count("time 1 identical True") == 2, output


STEPS = """
hvd.init()
torch.manual_seed(0)
net = torch.nn.Linear(30, 30)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), "fp16")
for step in range({steps}):
    optimizer.zero_grad()
    net(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    {each}
print("done", flush=True)
"""


def test_a_rank_that_ends_early_is_named(tmp_path):
    path = script(tmp_path, STEPS.format(steps="5 - hvd.rank()", each=""))
    code, output = start(path)
    assert code != 0
    assert "Rank 1 has ended" in output and "Every rank has to take the same number of steps" in output, output


def test_ranks_that_ask_for_unlike_levels_are_told_so(tmp_path):
    path = script(tmp_path, 'os.environ["HVDPLUS_TWO_LEVEL"] = ["on", "off"][int(os.environ["RANK"])]; hvd.init()')
    code, output = start(path)
    assert code != 0 and "Ranks differ in HVDPLUS_TWO_LEVEL: off and on." in output, output


def test_an_exception_on_one_rank_is_told_to_the_others(tmp_path):
    each = 'if step == 2 and hvd.rank() == 1: raise ValueError("no such file")'
    code, output = start(script(tmp_path, STEPS.format(steps=5, each=each)))
    assert code != 0 and "Rank 1 has ended with ValueError: no such file." in output, output


def test_a_rank_that_never_comes_is_named_after_the_time_that_was_set(tmp_path):
    each = "if step == 2 and hvd.rank() == 1: time.sleep(600)"
    code, output = start(script(tmp_path, STEPS.format(steps=5, each=each)), HVDPLUS_TIMEOUT_SECONDS="6")
    assert code != 0
    assert "It is not known to wait anywhere: rank 1." in output and "HVDPLUS_TIMEOUT_SECONDS" in output, output


def test_a_killed_rank_ends_the_job(tmp_path):
    each = "if step == 2 and hvd.rank() == 1: os.kill(os.getpid(), 9)"
    code, output = start(script(tmp_path, STEPS.format(steps=500, each=each)))
    assert code != 0 and "SIGKILL" in output, output


def two_torchruns(*command):
    """As on two nodes with a rank each."""
    meet = f"--rdzv-backend c10d --rdzv-endpoint localhost:{own_address([], os.environ)[1]}"
    node = f"torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 1 {meet} --no-python {shlex.join(command)}"
    return ["bash", "-c", f"{node} & {node}; code=$?; wait $! && exit $code"]


def test_starts_of_ranks_have_names_of_their_own():
    """Whatever earlier ranks have left in the store, and whoever comes first."""
    store = need("torch.distributed").HashStore()
    from hvdplus.adapters.transports.torch_distributed import start_of_ranks

    def start(size, late):
        def rank(number):
            time.sleep(0.2 * (number in late))
            return start_of_ranks(store, number, size, 20.0)

        with ThreadPoolExecutor(size) as ranks:
            (name,) = set(ranks.map(rank, range(size)))
        return name

    names = [start(3, {0}), start(3, {1, 2})]
    for alone in (1, 0, 1):  # ranks of a start to which the others did not come
        with pytest.raises((RuntimeError, TimeoutError)):
            start_of_ranks(store, alone, 2, 0.2)
    names += [start(2, {0}), start(4, {1}), start(1, ())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.rarely), 2])
def test_torchrun_restarts_a_job_that_goes_on_from_its_checkpoint(nodes, tmp_path):
    """Killed once, the job ends with the weights of a job that was not. Each node counts its own ranks' failures."""
    body = """
    hvd.init()
    torch.manual_seed(0)
    folder, die = sys.argv[1:]
    net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), "lowrank:2+fp16")
    first, path = 0, f"{folder}/state.{hvd.rank()}.pt"
    if os.path.exists(path):
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"goes on at step {first}\\n", end="", flush=True)  # in one piece: two ranks print
    for step in range(first, 12):
        if step == 7 and die == "die" and hvd.rank() == 1 and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            os.kill(os.getpid(), 9)
        draw = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        net(torch.randn(8, 40, generator=draw)).pow(2).mean().backward()
        optimizer.step()
        if step == 4:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, path)
            hvd.barrier()
    print("weights", sum(p.double().sum() for p in net.parameters()).item(), hvd.identical(net), flush=True)
    """
    found = []
    for how in ("live", "die"):
        folder = tmp_path / how
        folder.mkdir()
        path = script(folder, body)
        command = two_torchruns("python", str(path), str(folder), how)
        if nodes == 1:
            command = torchrun(2, "python", str(path), str(folder), how)
            command[1:1] = ["--max-restarts", "1"]
        code, output = run(command, 180)
        assert code == 0, output
        assert ("goes on at step 5" in output) == (how == "die"), output
        found.append(set(re.findall(r"weights (\S+) True", output)))
    assert found[0] == found[1] and len(found[0]) == 1, found


def test_what_torch_distributed_cannot_do_is_said(tmp_path):
    path = script(
        tmp_path,
        """
        import warnings
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        warnings.simplefilter("ignore")
        hvd.init()
        sharded = torch.nn.Linear(8, 8)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        split = parallelize_module(torch.nn.Linear(8, 8), init_device_mesh("cpu", (2,)), ColwiseParallel())
        flat = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
        views = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=True)
        whole = torch.nn.Linear(8, 8)
        def optimize(model):
            return lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for what, call in {
            "fsdp2": optimize(sharded),
            "tensor parallel": optimize(split),
            "fsdp": optimize(flat),
            "fsdp with parameters": optimize(views),
            "attach": lambda: hvd.ddp.attach(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)),
            "stale": lambda: hvd.DistributedOptimizer(torch.optim.SGD(whole.parameters(), lr=0.1), staleness=2),
        }.items():
            try:
                call()
            except ValueError as error:
                print(f"{what} refused: {error}\\n", end="", flush=True)
        """,
    )
    code, output = start(path)
    assert code == 0, output
    for what in ("fsdp2", "tensor parallel", "fsdp", "fsdp with parameters"):
        assert output.count(f"{what} refused: FSDP, tensor parallelism and their like shard parameters") == 2, output
    assert output.count("attach refused: attach wants a DistributedDataParallel model (FSDP") == 2, output
    assert output.count("stale refused: With staleness, all ranks add to a memory that MPI shares") == 2, output


@pytest.mark.parametrize("launcher", [torchrun, mpirun])
def test_a_default_device_is_the_scripts_alone(launcher, tmp_path):
    """What hvdplus makes for itself stays where it belongs: on ``meta`` nothing has a value."""
    path = script(
        tmp_path,
        """
        torch.set_default_device("meta")
        hvd.init()
        def train(model, optimizer, x):
            for _ in range(12):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        x = torch.full((8, 60), 1.0 + hvd.rank(), device="cpu")
        for level in ("none", "fp16", "int8", "topk:0.1+int8", "lowrank:2+fp16", "powersgd:2", "auto", "local:4+int4"):
            model = torch.nn.Sequential(torch.nn.Linear(60, 50, device="cpu"), torch.nn.Linear(50, 4, device="cpu"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if hvd.torch_is_there and level[:5] != "local":
                hvd.ddp.attach(torch.nn.parallel.DistributedDataParallel(model), optimizer, level)
            else:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=level)
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            train(model, optimizer, x)
            print(f"{level} identical {hvd.identical(model)}\\n", end="", flush=True)
        """.replace("hvd.torch_is_there", str(launcher is torchrun)),
    )
    code, output = start(path, launcher=launcher)
    assert code == 0 and output.count("identical True") == 16, output


def test_a_group_without_a_store_is_refused(tmp_path):
    """As PyTorch's mpi backend makes it, which PyTorch's packages are built without."""
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.distributed_c10d._get_default_store = lambda: None
        hvd.init()
        """,
    )
    code, output = start(path, ranks=1, HVDPLUS_TRANSPORT="torch")
    assert code != 0 and "no store to meet by. Use gloo or nccl. Received: backend gloo" in output, output


def test_tensorflow_under_torchrun_is_refused_and_told_what_works(tmp_path):
    need("tensorflow")
    path = tmp_path / "keras_script.py"
    path.write_text("import hvdplus.keras as hvd\nhvd.init()\n")
    code, output = start(path, KERAS_BACKEND="tensorflow")
    assert code != 0 and "with TensorFlow, start the job with mpirun or horovodrun" in output, output
