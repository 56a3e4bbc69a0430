"""One training of the demo in PyTorch: a wide perceptron on real digits, until the test accuracy is reached.

python examples/demo.py            starts it three ways on two hosts with a slow link between them
"""

import argparse
import json
import time

import torch
from digits import last_line, load_digits_shard

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("stock", "stock-fp16", "auto"), default="auto")
parser.add_argument("--accuracy", type=float, default=0.95, help="train until the test set is classified so well")
parser.add_argument("--most-steps", type=int, default=400)
args = parser.parse_args()

if args.way == "auto":
    import hvdplus.torch as hvd
else:
    import horovod.torch as hvd

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
train_x, train_y, test_x, test_y = map(torch.from_numpy, load_digits_shard(hvd.rank(), hvd.size(), channels_last=False))
model = torch.nn.Sequential(
    torch.nn.Flatten(),
    torch.nn.Linear(64, 1024),
    torch.nn.ReLU(),
    torch.nn.Linear(1024, 1024),
    torch.nn.ReLU(),
    torch.nn.Linear(1024, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
compression = {"stock": hvd.Compression.none, "stock-fp16": hvd.Compression.fp16, "auto": "auto"}[args.way]
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def accuracy_now():
    """On the whole test set; the same on all ranks."""
    with torch.no_grad():
        return (model(test_x).argmax(dim=1) == test_y).float().mean().item()


draw = torch.Generator().manual_seed(hvd.rank())
accuracy, seconds, step = 0.0, 0.0, 0
while accuracy < args.accuracy and step < args.most_steps:
    began = time.perf_counter()
    for _ in range(5):
        batch = torch.randint(len(train_x), (32,), generator=draw)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
        loss.backward()
        if args.way == "auto":
            optimizer.record(loss=loss)
        optimizer.step()
        step += 1
    seconds += time.perf_counter() - began
    accuracy = accuracy_now()
    if hvd.rank() == 0:
        print("point", json.dumps({"step": step, "seconds": seconds, "accuracy": accuracy}), flush=True)

if args.way == "auto":
    identical = hvd.identical(model)
    summary = hvd.report(optimizer, accuracy=accuracy, identical_ranks=identical)
    if hvd.rank() == 0:
        print(last_line("torch", accuracy, identical, summary), flush=True)
hvd.shutdown()
