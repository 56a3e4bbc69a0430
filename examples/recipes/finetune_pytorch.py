"""Fine-tuning: a transformer of bytes that ``language_model_pytorch.py`` saved goes on with another text. Its lower
half stays as it is, and so crosses no network.

    mpirun -np 2 --bind-to none python examples/recipes/finetune_pytorch.py --model language_model.pt --text letters.txt
"""

import argparse

import numpy as np
import torch
from byte_models import Transformer, bits, loss_of
from data import text

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="what language_model_pytorch.py saved")
parser.add_argument("--text", required=True, help="any file")
parser.add_argument("--batch-size", type=int, default=16, help="windows a rank and step")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--learning-rate", type=float, default=1e-4)
parser.add_argument("--save", default="finetuned.pt")
args = parser.parse_args()

saved = torch.load(args.model)
shape = saved["arguments"]
if shape["model"] != "transformer":
    raise SystemExit(f"{args.model} holds a {shape['model']}: this recipe freezes layers of a transformer.")

hvd.init()
torch.manual_seed(0)
model = Transformer(shape["width"], shape["layers"], shape["length"])
model.load_state_dict(saved["model"])
for layer in [model.bytes, model.places, *model.body.layers[: shape["layers"] // 2]]:
    layer.requires_grad_(False)

train, test = text(args.text)
draw = np.random.default_rng(hvd.rank())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
before = bits(model, test, shape["length"])
for _ in range(args.steps):
    optimizer.zero_grad()
    loss = loss_of(model, train, shape["length"], args.batch_size, draw)
    loss.backward()
    optimizer.record(loss=loss)
    optimizer.step()
after = bits(model, test, shape["length"])
hvd.report(optimizer, bits=after)
if hvd.rank() == 0:
    print(f"{before:.3f} bits a byte before, {after:.3f} after")
    torch.save({"model": model.state_dict(), "arguments": shape}, args.save)
hvd.shutdown()
