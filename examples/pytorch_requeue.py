"""A training that stops when its time is over, and goes on where it was in the next job, bit for bit.

    sbatch examples/slurm/requeue.sbatch

Slurm sends a signal some time before it ends a job (``--signal=USR1@120``). Ranks finish their step, agree, save, and
leave; the batch script puts the job back into the queue. A fixed level of compression: ``auto`` goes by measured times,
which no two jobs share.
"""

import argparse
import hashlib
import signal
from pathlib import Path

import torch
from digits import load_digits_shard

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--compression", default="lowrank:4+fp16")
parser.add_argument("--folder", type=Path, default=Path("runs/requeue"), help="for checkpoints; all nodes see it")
args = parser.parse_args()

asked_to_stop = False


def ask_to_stop(*_):
    """The step that runs is finished first."""
    global asked_to_stop
    asked_to_stop = True


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, ask_to_stop)

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
train_x, train_y, *_ = map(torch.from_numpy, load_digits_shard(hvd.rank(), hvd.size(), channels_last=False))
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=args.compression)

unfinished, mine = args.folder / "unfinished", f"rank-{hvd.rank()}-of-{hvd.size()}-step-"
args.folder.mkdir(parents=True, exist_ok=True)
# Each rank has files of its own: what compression holds back differs between ranks. A job may have died while some had
# saved a step and others had not: all go on from the newest that every rank has.
steps = {int(path.stem.removeprefix(mine)) for path in args.folder.glob(f"{mine}*.pt")}
first_step = max(set.intersection(*hvd.allgather_object(steps)), default=0)
others = [path.name for path in args.folder.glob("rank-*.pt") if f"-of-{hvd.size()}-" not in path.name]
if others and not first_step:
    raise SystemExit(f"{args.folder} has checkpoints of another number of ranks, such as {min(others)}")
if first_step:
    saved = torch.load(args.folder / f"{mine}{first_step}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
else:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if hvd.rank() == 0:
    print(f"from step {first_step} on", flush=True)


def save(step):
    """Whole or not at all: a job may be ended in the middle of it. Older files go once every rank has the new one."""
    fresh = args.folder / f"{mine}{step}.new"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, fresh)
    fresh.replace(fresh.with_suffix(".pt"))
    hvd.barrier()
    for old in steps - {step}:
        (args.folder / f"{mine}{old}.pt").unlink(missing_ok=True)


for step in range(first_step, args.steps):
    batch = torch.randint(len(train_x), (args.batch_size,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
    optimizer.step()
    # The signal comes to each rank in a step of its own, and all have to stop in the same one: every tenth is a place.
    if (step + 1) % 10 == 0 and any(hvd.allgather_object(asked_to_stop)):
        save(step + 1)
        unfinished.touch()
        if hvd.rank() == 0:
            print(f"stopped after step {step}", flush=True)
        break
else:
    unfinished.unlink(missing_ok=True)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if hvd.rank() == 0:
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"finished: {args.steps} steps, weights {digest}", flush=True)
hvd.shutdown()
