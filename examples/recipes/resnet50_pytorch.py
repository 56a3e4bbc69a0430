"""ResNet-50 (He et al., arXiv 1512.03385) on a folder of images, with one folder inside for each class.

    mpirun -np 2 --bind-to none python examples/recipes/resnet50_pytorch.py --data imagenet/train

The learning rate grows with the number of ranks, warms up for five epochs, and falls to a tenth at epochs 30, 60 and 80
(Goyal et al., arXiv 1706.02677). Reading images takes Pillow (``pip install pillow``).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with a folder for each class")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--learning-rate", type=float, default=0.0125, help="of one rank")
parser.add_argument("--workers", type=int, default=0, help="processes a rank that read images")
args = parser.parse_args()


class Images(torch.utils.data.Dataset):
    """Half or more of each image's largest square, at random, mirrored or not, and the image's class."""

    def __init__(self, folder, size):
        self.classes, self.size = sorted(path.name for path in Path(folder).iterdir() if path.is_dir()), size
        self.found = [(path, i) for i, name in enumerate(self.classes) for path in sorted(Path(folder, name).iterdir())]

    def __len__(self):
        return len(self.found)

    def __getitem__(self, place):
        path, label = self.found[place]
        with Image.open(path) as image:
            side = int(min(image.size) * (0.5 + 0.5 * torch.rand(()).item()) ** 0.5)
            x, y = (int(torch.randint(length - side + 1, ()).item()) for length in image.size)
            box = (x, y, x + side, y + side)
            pixels = np.array(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        values = torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1
        return values.flip(2) if torch.rand(()) < 0.5 else values, label


class Block(nn.Module):
    """Three convolutions, and a way past them."""

    def __init__(self, inputs, width, stride):
        super().__init__()

        def convolution(inputs, outputs, kernel, stride=1):
            return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)

        narrow, wide = convolution(inputs, width, 1), convolution(width, width, 3, stride)
        self.body = nn.Sequential(*narrow, nn.ReLU(), *wide, nn.ReLU(), *convolution(width, 4 * width, 1))
        same = inputs == 4 * width and stride == 1
        self.past = nn.Identity() if same else nn.Sequential(*convolution(inputs, 4 * width, 1, stride))
        nn.init.zeros_(self.body[-1].weight)  # a block begins as the way past it

    def forward(self, x):
        return torch.relu(self.body(x) + self.past(x))


def resnet50(classes):
    """3, 4, 6 and 3 blocks."""
    layers, inputs = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            layers.append(Block(inputs, 64 << stage, 2 if stage and not number else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


hvd.init()
torch.manual_seed(hvd.rank())  # crops of its own on each rank
images = Images(args.data, args.image_size)
sampler = torch.utils.data.DistributedSampler(images, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(
    images,
    args.batch_size,
    sampler=sampler,
    num_workers=args.workers,
    drop_last=True,
    persistent_workers=args.workers > 0,
)
if not len(loader):
    raise SystemExit(f"{len(images)} images are too few: each of {hvd.size()} ranks wants {args.batch_size} or more")
model = resnet50(len(images.classes))
rate = args.learning_rate * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
steps = len(loader)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / hvd.size(), total_iters=5 * steps)
decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epoch * steps for epoch in (30, 60, 80)])
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.record(loss=loss)
        optimizer.step()
        warm_up.step()
        decay.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
hvd.report(optimizer)
if hvd.rank() == 0:
    torch.save(model.state_dict(), "resnet50.pt")
hvd.shutdown()
