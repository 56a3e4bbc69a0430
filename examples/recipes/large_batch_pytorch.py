"""Large batches: a CNN on CIFAR-10 with LARS (You et al., arXiv 1708.03888) or LAMB (arXiv 1904.00962).

    pip install pytorch-optimizer
    mpirun -np 4 --bind-to none python examples/recipes/large_batch_pytorch.py --data cifar-10-batches-bin

Both scale every layer's step by the norm of its gradient. They see the mean of all ranks' gradients, as one process
with the whole batch would. The learning rate grows with the batch, and warms up for a tenth of the training.
"""

import argparse

import torch
from data import cifar10
from pytorch_optimizer import LARS, Lamb
from torch import nn

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with CIFAR-10's binary files")
parser.add_argument("--optimizer", choices=("lars", "lamb"), default="lars")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=512, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, help="for 256 images a step (LARS: 0.4; LAMB: 0.002)")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
x, y, test_x, test_y = map(torch.from_numpy, cifar10(args.data, hvd.rank(), hvd.size()))
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(128, 256, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(256 * 16, 10),
)
kind, usual = {"lars": (LARS, 0.4), "lamb": (Lamb, 0.002)}[args.optimizer]
rate = (args.learning_rate or usual) * args.batch_size * hvd.size() / 256
optimizer = kind(model.parameters(), lr=rate, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
steps = max(1, len(x) // args.batch_size)
total = args.epochs * steps
warm = max(1, total // 10)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warm, (total - step) / max(1, total - warm))
)
for epoch in range(args.epochs):
    for batch in torch.randperm(len(x))[: steps * args.batch_size].split(args.batch_size):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.record(loss=loss)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in test_x.split(500)]) == test_y
    accuracy = right.float().mean().item()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy:.4f}", flush=True)
hvd.report(optimizer, accuracy=accuracy)
hvd.shutdown()
