"""A plain script for DistributedDataParallel, and the lines that bring in hvdplus (marked with +).

    torchrun --nproc-per-node 2 examples/pytorch_ddp.py

On a slow network between several hosts it trains the same model sooner; here, on one, it shows that nothing else
changes. The data are scikit-learn's (``pip install scikit-learn``).
"""

import argparse
import os

import torch
import torch.distributed as dist
from digits import load_digits_shard
from torch.nn.parallel import DistributedDataParallel

import hvdplus.torch as hvd  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--compression", default="auto", help="auto, none, fp16, lowrank:4, ...")  # +
args = parser.parse_args()

on_devices = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one a rank
dist.init_process_group("nccl" if on_devices else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if on_devices:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda" if on_devices else "cpu")
torch.set_num_threads(1)

data = load_digits_shard(rank, size, channels_last=False)
train_x, train_y, test_x, test_y = (torch.from_numpy(array).to(device) for array in data)

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
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * size, momentum=0.9)
attached = hvd.ddp.attach(model, optimizer, compression=args.compression)  # +

for _ in range(args.epochs):
    for batch in torch.randperm(len(train_x)).split(args.batch_size):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        attached.record(loss)  # +
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

with torch.no_grad():
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
weights = [torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()] * size
dist.all_gather_object(weights, weights[rank])
identical = all(torch.equal(theirs, weights[0]) for theirs in weights)
hvd.report(attached, accuracy=accuracy)  # +
if rank == 0:
    print(f"DDP with hvdplus: accuracy {accuracy:.4f}, identical ranks: {identical}", flush=True)
dist.destroy_process_group()
