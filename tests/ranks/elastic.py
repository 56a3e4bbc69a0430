"""Jobs whose ranks come and go (DISTURBED, see ``disturbing.py``) or do not; started by ``test_elastic.py``.

Arguments: the file that the host discovery reads; a folder that every rank writes what it has seen to. The job trains
once with each of SEEDS at each of LEVELS, on the same samples in the same order, however many ranks share them. At a
level that ends with ``!`` a sum fails on the way, and all ranks go back to their last commit; ``@2``: for two epochs.
"""

import faulthandler
import itertools
import json
import os
import sys
from pathlib import Path

import torch
from disturbing import BATCH, COMMIT, FAILS_AT, Task, asked, change, changes_at, die, outcome, watched
from horovod.common.exceptions import HorovodInternalError

import hvdplus.torch as hvd
from hvdplus.torch.elastic import run

HOSTS, SEEN = Path(sys.argv[1]), Path(sys.argv[2])
LEVELS, DISTURBED = os.environ["LEVELS"].split(), os.environ["DISTURBED"]
SEEDS = [int(seed) for seed in os.environ["SEEDS"].split()]

hvd.init()
torch.set_num_threads(1)
seen, shared, trained = [], [], []


def training(level, epochs, fails, seed):
    """Train once; what came of it is in ``trained``."""
    faulthandler.dump_traceback_later(100, exit=True)  # a rank that waits says where
    task = Task(seed, epochs)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    bare = torch.optim.SGD(model.parameters(), lr=task.rate(0, hvd.size()), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        bare, named_parameters=model.named_parameters(), compression=level, settings={"dense_steps": 2}
    )
    left = [fails]

    def held_on_average():
        """What ranks hold back, their mean."""
        parts = [part for part in (state.residual for state in optimizer._exchange.states) if part is not None]
        return hvd.allreduce(torch.cat(parts), name="held").tolist() if parts else []

    def watch(state):
        coordinator = optimizer.hvdplus
        local = getattr(optimizer, "_fragments", ())
        exchanges = [fragment.outer._exchange for fragment in local] or [optimizer._exchange]
        states = [state for exchange in exchanges for state in exchange.states]
        seen.append(
            {
                "step": state.step,
                "samples": state.samples,
                "ranks": hvd.size(),
                "rank": hvd.rank(),
                "identical": hvd.identical([anchor for each in local for anchor in each.anchors] if local else model),
                "level": coordinator.ladder.names[coordinator.plan.level],
                "held_back": sum(float(state.residual.norm()) for state in states if state.residual is not None),
            }
        )

    @run
    def train(state):
        if state.changes == 1 and level == "lowrank:2":
            shared.append(held_on_average())
        while state.samples < task.samples:
            inputs, labels = map(torch.from_numpy, task.batch(state.samples, hvd.rank()))
            for group in optimizer.param_groups:
                group["lr"] = task.rate(state.samples, hvd.size())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            state.step += 1
            state.samples += BATCH * hvd.size()
            if DISTURBED and watched(state, task.samples):
                watch(state)
            if DISTURBED == "resized" and (then := changes_at(state, hvd.size())):
                if state.changes == 0 and level == "lowrank:2":
                    shared.append(held_on_average())
                change(state, hvd.rank(), HOSTS, then)
            if DISTURBED == "killed":
                die(state, hvd.size(), hvd.local_size())
            if state.step == FAILS_AT and left[0]:
                left[0] = False
                raise HorovodInternalError("A sum has failed on all ranks, none of which is gone.")
            if DISTURBED == "resized" or state.step % COMMIT == 0:
                state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, samples=0, changes=0)
    train(state)
    inputs, labels = map(torch.from_numpy, task.test)
    with torch.no_grad():
        logits = model(inputs)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    accuracy, loss = (logits.argmax(1) == labels).double().mean(), torch.nn.functional.cross_entropy(logits, labels)
    trained.append(outcome(state, level, seed, fails, accuracy, loss, weights.tobytes()))


for level, seed in itertools.product(LEVELS, SEEDS):
    training(*asked(level), seed)
(SEEN / f"{os.getpid()}.json").write_text(json.dumps({"steps": seen, "shared": shared, "trained": trained}))
