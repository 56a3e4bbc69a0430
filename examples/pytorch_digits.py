"""Train a small CNN on scikit-learn's real handwritten digits, on as many ranks as you like.

    horovodrun -np 2 python examples/pytorch_digits.py
    mpirun -np 2 --bind-to none python examples/pytorch_digits.py
    torchrun --nproc-per-node 2 examples/pytorch_digits.py

With GPUs, ``mpirun`` needs Horovod or HVDPLUS_TRANSPORT=torch. ``pip install scikit-learn`` brings the data.
Change the import back and what is left is a script for Horovod, but for the lines that watch and report.
"""

import argparse

import torch
from digits import Progress, last_line, load_digits_shard

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, default=0.02)
parser.add_argument("--compression", default="auto", help="auto, none, fp16, lowrank:4, ...")
parser.add_argument("--png", help="file for the report's picture")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1 + hvd.rank())  # ranks start apart on purpose: the broadcast below has to make them equal
torch.set_num_threads(1)
device = torch.device("cpu")
if torch.cuda.device_count() >= hvd.local_size():  # one device a rank
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

train_x, train_y, test_x, test_y = load_digits_shard(hvd.rank(), hvd.size(), channels_last=False)
train_x, train_y, test_x, test_y = (torch.from_numpy(array).to(device) for array in (train_x, train_y, test_x, test_y))

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
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=args.compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

progress = Progress("torch", args.epochs, show=hvd.rank() == 0)
for epoch in range(args.epochs):
    for batch in torch.randperm(len(train_x)).split(args.batch_size):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        loss.backward()
        optimizer.record(loss=loss)
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    progress.epoch(epoch, loss.item(), accuracy, optimizer.hvdplus.status)

identical = hvd.identical(model)
summary = hvd.report(optimizer, png=args.png, accuracy=accuracy, identical_ranks=identical)
if hvd.rank() == 0:
    print(last_line("torch", accuracy, identical, summary), flush=True)
hvd.shutdown()
