"""A job whose ranks come and go: three, then two, then three again; or one of three is killed (KILLED). Started by
``test_elastic.py``.

Arguments: the file that the host discovery reads; a folder that every rank writes what it has seen to.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvdplus.torch as hvd
from hvdplus.torch.elastic import run

HOSTS, SEEN = Path(sys.argv[1]), Path(sys.argv[2])
LEVEL, KILLED = os.environ["LEVEL"], "KILLED" in os.environ
STEPS = 200 if KILLED else 60

faulthandler.dump_traceback_later(100, exit=True)  # a rank that waits says where
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
bare = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    bare, named_parameters=model.named_parameters(), compression=LEVEL, settings={"dense_steps": 2}
)
seen, shared = [], []


def held_on_average():
    """What ranks hold back, their mean."""
    parts = [part for part in (state.residual for state in optimizer._exchange.states) if part is not None]
    return hvd.allreduce(torch.cat(parts), name="held").tolist() if parts else []


@run
def train(state):
    if state.changes == 1 and LEVEL == "lowrank:2":
        shared.append(held_on_average())
    while state.step < STEPS:
        draw = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        inputs = torch.randn(8, 20, generator=draw)
        labels = inputs[:, :4].argmax(1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        state.step += 1
        coordinator = optimizer.hvdplus
        local = getattr(optimizer, "_fragments", ())
        exchanges = [fragment.outer._exchange for fragment in local] or [optimizer._exchange]
        states = [state for exchange in exchanges for state in exchange.states]
        seen.append(
            {
                "step": state.step,
                "ranks": hvd.size(),
                "rank": hvd.rank(),
                "identical": hvd.identical([anchor for each in local for anchor in each.anchors] if local else model),
                "level": coordinator.ladder.names[coordinator.plan.level],
                "held_back": sum(float(state.residual.norm()) for state in states if state.residual is not None),
            }
        )
        for step, ranks, then in () if KILLED else ((15, 3, "localhost:2"), (30, 2, "localhost:3")):
            if state.step == step and hvd.size() == ranks and state.changes == (step == 30):
                if hvd.rank() == 0:
                    HOSTS.write_text(then)
                if step == 15 and LEVEL == "lowrank:2":
                    shared.append(held_on_average())
                while True:
                    time.sleep(0.5)
                    state.changes = 1 + (step == 30)
                    state.commit()  # ends with the change
        if KILLED and state.step == 10 and hvd.size() == 3 and hvd.local_size() == 1:  # Horovod gives up its host
            os.kill(os.getpid(), signal.SIGKILL)
        if not KILLED or state.step % 4 == 0:
            state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, changes=0))
draw = torch.Generator().manual_seed(1)
inputs = torch.randn(500, 20, generator=draw)
accuracy = (model(inputs).argmax(1) == inputs[:, :4].argmax(1)).float().mean().item()
told = {"steps": seen, "shared": shared, "accuracy": accuracy}
(SEEN / f"{os.getpid()}.json").write_text(json.dumps(told))
