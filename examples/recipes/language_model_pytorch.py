"""A language model of bytes, transformer or LSTM: much gradient for little computation, where hvdplus pays most.

mpirun -np 2 --bind-to none python examples/recipes/language_model_pytorch.py --text book.txt
mpirun -np 2 --bind-to none python examples/recipes/language_model_pytorch.py --text book.txt --every auto
"""

import argparse

import numpy as np
import torch
from byte_models import MODELS, bits, loss_of
from data import text
from torch import nn

import hvdplus.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", required=True, help="any file")
parser.add_argument("--model", choices=("transformer", "lstm"), default="transformer")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--length", type=int, default=128, help="bytes of a window")
parser.add_argument("--batch-size", type=int, default=16, help="windows a rank and step")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--every", default=1, help="local steps between two exchanges, or auto")
parser.add_argument("--save", default="language_model.pt")
args = parser.parse_args()


hvd.init()
torch.manual_seed(0)
train, test = text(args.text)
draw = np.random.default_rng(hvd.rank())  # windows of its own on each rank
model = MODELS[args.model](args.width, args.layers, args.length)
every = args.every if args.every == "auto" else int(args.every)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), every=every)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = loss_of(model, train, args.length, args.batch_size, draw)
    loss.backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.record(loss=loss)
    with optimizer.skip_synchronize():
        optimizer.step()
    if step % 100 == 0 or step == args.steps:
        seen = bits(model, test, args.length)
        if hvd.rank() == 0:
            print(f"step {step}: {seen:.3f} bits a byte", flush=True)
if every != 1:
    optimizer.average_now()
hvd.report(optimizer, bits=bits(model, test, args.length))
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "arguments": vars(args)}, args.save)
hvd.shutdown()
