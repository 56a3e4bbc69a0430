"""One framework's half of ``test_golden.py``: the same gradients and contexts, and what becomes of them.

Arguments: framework, folder, levels. PyTorch goes first and leaves in the folder what Keras begins every step from.
"""

import os
import pickle
import sys
from pathlib import Path

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ["HVDPLUS_BUCKET_BYTES"] = "6000"

import numpy as np

import hvdplus.exchange.engine
from hvdplus.control.meter import StepTimes

FRAMEWORK, FOLDER, LEVELS = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
SHAPES = [(24, 40), (40,), (3, 3, 3, 16), (40, 24), (7,), (1,)]
SETTINGS = {"ladder": ["none", "int8", "lowrank:2"], "dense_steps": 10}
STEP_SECONDS = {"none": 0.1, "fp16": 0.06, "int8": 0.04, "lowrank:2": 0.02}
"""What steps take as far as the controller knows, so that decisions depend on gradients alone."""


def gradients(step, rank):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def listen(transport):
    """Notes every payload's sum, by its name. Keras runs eagerly here, so that there is one to note."""
    sums, start, wait = {}, transport.start, transport.wait
    names = {}

    def noted_start(array, name, scale=1.0):
        handle = start(array, name, scale)
        names[id(handle)] = name, handle
        return handle

    def noted_wait(handle):
        total = wait(handle)
        name, _ = names.pop(id(handle), ("", None))
        if name and ".metadata" not in name:  # plain dense gradients go without a payload of ours
            sums[name] = np.array(total)
        return total

    transport.start, transport.wait = noted_start, noted_wait
    return sums


def with_fixed_times(coordinator):
    """Steps take what the level alone decides about."""
    observe = coordinator.observe

    def observed(plan, metadata, *healthy):
        step = STEP_SECONDS.get(coordinator.ladder.names[coordinator._measured.level], 0.05)
        times = StepTimes(step, 0.001, max(0.0, step - 0.02), 0.0, 0.0)
        observe(plan, metadata._replace(times=times), *healthy)

    coordinator.observe = observed


def fixed_costs(ops, buckets, compressors, transport, *_):
    return tuple(0.001 for _ in compressors)


if FRAMEWORK == "torch":
    import torch

    import hvdplus.torch as hvd
else:
    import keras

    import hvdplus.keras as hvd

hvdplus.exchange.engine.codec_seconds = fixed_costs
hvdplus.exchange.engine.probe = lambda ops, transport, dense_bytes: [(4096, 0.0003), (262144, 0.0006)]
hvd.init()
sums = listen(hvd._require_world().transport)
rank = hvd.rank()


def wrapped(level):
    """(the weights, the optimizer, its exchange)."""
    if FRAMEWORK == "torch":
        weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression=level, settings=SETTINGS)
        # Elsewhere PyTorch reads what ranks tell of dense steps one step later than Keras, and so decides a step later.
        optimizer._exchange.reporter._unseen.add(-1)
        return weights, optimizer, optimizer._exchange
    weights = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=level, settings=SETTINGS)
    optimizer.build(weights)
    return weights, optimizer, optimizer._hvdplus.exchange


def contexts(exchange):
    """Of all levels, as PyTorch's."""
    state = exchange.state()
    return {
        "residuals": {i: np.array(residual) for i, residual in state["residuals"].items()},
        "contexts": [
            {name: [np.array(array) for array in arrays] for name, arrays in each["levels"].items()}
            for each in state["contexts"]
        ],
    }


def begin_from(known, exchange):
    """Keras: residuals and contexts as PyTorch had them before this step."""
    for state, levels in zip(exchange.states, known["contexts"], strict=True):
        for name, arrays in levels.items():
            if arrays:  # levels that learn nothing have none
                exchange.put_context(state, exchange.ladder.names.index(name), arrays)
    for i, residual in known["residuals"].items():
        exchange.hold(i, residual)


def values(weights):
    return [np.array(weight.detach() if FRAMEWORK == "torch" else weight) for weight in weights]


for level in LEVELS:
    weights, optimizer, exchange = wrapped(level)
    with_fixed_times(exchange.coordinator)
    seen = []
    if FRAMEWORK == "keras":
        before = pickle.loads((FOLDER / f"torch.{level}.{rank}.pickle").read_bytes())
    for step in range(45 if level == "auto" else 8):
        sums.clear()
        plan = tuple(exchange.coordinator.plan)
        start = contexts(exchange) if FRAMEWORK == "torch" else None
        old = values(weights)
        if FRAMEWORK == "torch":
            for weight, grad in zip(weights, gradients(step, rank), strict=True):
                weight.grad = torch.from_numpy(grad)
            optimizer.step()
        else:
            begin_from(before[step]["start"], exchange)
            optimizer.apply([keras.ops.convert_to_tensor(grad) for grad in gradients(step, rank)], weights)
        means = [a - b for a, b in zip(old, values(weights), strict=True)]
        seen.append({"plan": plan, "sums": dict(sums), "means": means, "start": start})
    decisions = [record for record in exchange.coordinator.log.records if record["kind"] == "decision"]
    seen.append([(record["step"], record["from"], record["to"]) for record in decisions])
    (FOLDER / f"{FRAMEWORK}.{level}.{rank}.pickle").write_bytes(pickle.dumps(seen))
