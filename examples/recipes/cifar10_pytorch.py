"""A CNN on CIFAR-10.

    mpirun -np 2 --bind-to none python examples/recipes/cifar10_pytorch.py --data cifar-10-batches-bin

The learning rate grows with the number of ranks, and warms up for an epoch (Goyal et al., arXiv 1706.02677).
"""

import argparse

import torch
from data import cifar10
from torch import nn

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with CIFAR-10's binary files")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, default=0.05, help="of one rank")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
x, y, test_x, test_y = map(torch.from_numpy, cifar10(args.data, hvd.rank(), hvd.size()))


def block(inputs, outputs):
    """Halves the image."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(
    block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate * hvd.size(), momentum=0.9, weight_decay=5e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
steps = max(1, len(x) // args.batch_size)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / hvd.size(), total_iters=steps)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, (args.epochs - 1) * steps))
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [steps])

for epoch in range(args.epochs):
    model.train()
    for batch in torch.randperm(len(x))[: steps * args.batch_size].split(args.batch_size):
        images = torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, x[batch].flip(3), x[batch])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), y[batch])
        loss.backward()
        optimizer.record(loss=loss)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in test_x.split(500)]) == test_y
    accuracy = hvd.allreduce(right.float().mean(), name="accuracy")  # running statistics are each rank's own
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy.item():.4f}", flush=True)

hvd.report(optimizer, accuracy=accuracy.item())
if hvd.rank() == 0:
    torch.save(model.state_dict(), "cifar10.pt")
hvd.shutdown()
