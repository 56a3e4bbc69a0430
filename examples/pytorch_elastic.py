"""A training that outlives its ranks: when some are lost, all start again from the last checkpoint.

    sbatch examples/slurm/elastic.sbatch
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/pytorch_elastic.py

Whoever starts the ranks starts them again; torchrun does. With as many ranks as before, the training ends as if nothing
had been, bit for bit at a fixed level of compression. With fewer it goes on with smaller batches and a lower learning
rate.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from digits import load_digits_shard

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--compression", default="lowrank:4+fp16")
parser.add_argument("--folder", type=Path, default=Path("runs/elastic"), help="for checkpoints; all nodes see it")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
data = load_digits_shard(hvd.rank(), hvd.size(), channels_last=False)
train_x, train_y, test_x, test_y = map(torch.from_numpy, data)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding="same"),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, padding="same"),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(1024, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

args.folder.mkdir(parents=True, exist_ok=True)
checkpoint, first_epoch = args.folder / "checkpoint.pt", 0
# Rank 0 looks: a shared file system may show others the file later.
saved = hvd.broadcast_object(torch.load(checkpoint) if hvd.rank() == 0 and checkpoint.exists() else None)
if saved:
    first_epoch = saved["epoch"]
# Every part has a run log of its own: a log that exists is overwritten.
log = {"run_log": str(args.folder / f"from-epoch-{first_epoch}.jsonl")}
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), args.compression, settings=log)
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
else:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for group in optimizer.param_groups:  # also of a checkpoint that another number of ranks has saved
    group["lr"] = 0.02 * hvd.size()
if hvd.rank() == 0:
    print(f"from epoch {first_epoch} on, ranks: {hvd.size()}", flush=True)

for epoch in range(first_epoch, args.epochs):
    draw = torch.Generator().manual_seed(1000 * epoch + hvd.rank())  # the same batches when an epoch is repeated
    for batch in torch.randperm(len(train_x), generator=draw).split(args.batch_size):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
        optimizer.step()
    optimizer.consolidate_state_dict()  # so that one rank's file is complete, and serves any number of ranks
    if hvd.rank() == 0:
        fresh = checkpoint.with_suffix(".new")  # whole or not at all: a rank may be lost in the middle of saving
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, fresh)
        fresh.replace(checkpoint)
        print(f"epoch {epoch + 1} of {args.epochs} saved", flush=True)

with torch.no_grad():
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
identical = hvd.identical(model)
if hvd.rank() == 0:
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"finished: accuracy {accuracy:.4f}, weights {digest}, identical ranks: {identical}", flush=True)
    (args.folder / "finished").touch()
hvd.shutdown()
