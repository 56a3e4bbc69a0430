"""The docs' table of hooks, made from what the front doors really have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.jobs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "side-by-side.md"
HOOKS = [
    # what, in PyTorch, in Keras; what a door lacks becomes a dash
    ("start, stop", "hvd.init", "hvd.init"),
    ("rank, size, local rank", "hvd.rank", "hvd.rank"),
    ("wrap an optimizer", "hvd.DistributedOptimizer", "hvd.DistributedOptimizer"),
    ("level, budget and all settings", "settings=", "settings="),
    ("some layers stay on their rank", "", "hvd.PartialDistributedOptimizer"),
    ("a training loop of one's own", "optimizer.step", "hvdplus.tensorflow.DistributedGradientTape"),
    ("accumulate, then exchange once", "backward_passes_per_step=", "backward_passes_per_step="),
    ("exchange only after several local steps", "every=", "every="),
    ("ranks that do not wait for each other", "staleness=", ""),
    ("only some ranks exchange", "process_set=, process_group=", "process_set="),
    ("sum instead of mean", "op=", "op="),
    ("exchange now, then clip", "optimizer.synchronize", "clipnorm, global_clipnorm, clipvalue"),
    ("loss scaling", "grad_scaler=", "keras.optimizers.LossScaleOptimizer"),
    ("the same start on all ranks", "hvd.broadcast_parameters", "hvd.callbacks.BroadcastGlobalVariablesCallback"),
    ("optimizer state from one rank", "hvd.broadcast_optimizer_state", "hvd.broadcast_global_variables"),
    ("metrics of all ranks", "hvd.allreduce", "hvd.callbacks.MetricAverageCallback"),
    ("stop on all ranks where one stops", "hvd.allreduce", "hvd.callbacks.StopTogetherCallback"),
    ("warm up the learning rate", "torch.optim.lr_scheduler", "hvd.callbacks.LearningRateWarmupCallback"),
    ("save, with what was learned", "optimizer.state_dict", "model.save"),
    ("load, and go on from there", "optimizer.load_state_dict", "hvd.load_model"),
    ("one rank's file for all ranks", "optimizer.consolidate_state_dict", "optimizer.consolidate_state_dict"),
    ("average local steps at once", "optimizer.average_now", "hvd.callbacks.AverageLocalStepsCallback"),
    ("ranks come and go", "hvd.elastic.TorchState", "hvd.elastic.KerasState"),
    ("are all ranks identical?", "hvd.identical", "hvd.identical"),
    ("loss in the run log", "optimizer.record", "every train step"),
    ("figures in the training log", "optimizer.hvdplus.figures", "hvd.callbacks.ExchangeLogsCallback"),
    ("table, picture, summary", "hvd.report", "hvd.report"),
    ("level and times of late", "optimizer.hvdplus.status", "optimizer.hvdplus.status"),
]
SCRIPT = """
import inspect, json, sys
import hvdplus.{door} as hvd
from hvdplus.adapters.{door}.local import LocalSteps
from hvdplus.adapters.{door}.optimizer import Distributed
from hvdplus.exchange.coordinator import Coordinator

def there(name):
    if name.endswith("="):
        asked = {{part[:-1] for part in name.split(", ")}}
        return asked <= set(inspect.signature(hvd.DistributedOptimizer).parameters)
    known = {{"hvd": hvd, "optimizer": Distributed}}
    first, *rest = name.split(".")
    if first not in known:
        return bool(name)
    found = known[first]
    for part in rest:
        if (found, part) == (Distributed, "hvdplus"):
            found = Coordinator
        elif not hasattr(found, part) and found is Distributed and hasattr(LocalSteps, part):
            found = getattr(LocalSteps, part)
        elif not hasattr(found, part):
            return False
        else:
            found = getattr(found, part)
    return True

print("there", json.dumps({{name: there(name) for name in json.loads(sys.argv[1])}}))
"""


@pytest.fixture(scope="module")
def table() -> str:
    """The table as it has to stand in the docs."""
    cells = {}
    for door, column in (("torch", 1), ("keras", 2)):
        names = json.dumps([row[column] for row in HOOKS])
        code, output = run([sys.executable, "-P", "-c", SCRIPT.format(door=door), names], timeout_seconds=120)
        assert code == 0, output
        (line,) = (line for line in output.splitlines() if line.startswith("there "))
        cells[door] = json.loads(line.removeprefix("there "))
    rows = [
        f"| {what} | {cell(torch, cells['torch'])} | {cell(keras, cells['keras'])} |" for what, torch, keras in HOOKS
    ]
    return "\n".join(["| | PyTorch | Keras |", "|---|---|---|", *rows])


def cell(name: str, there: dict[str, bool]) -> str:
    if not there[name]:
        return "–"
    return name if " " in name and "," not in name else ", ".join(f"`{part}`" for part in name.split(", "))


def test_the_docs_have_the_table_as_it_is(table: str) -> None:
    assert table in PAGE.read_text(encoding="utf-8"), f"The table in {PAGE.name} has to be:\n{table}"


def test_both_doors_have_nearly_everything(table: str) -> None:
    assert table.count("–") == sum(not name for row in HOOKS for name in row)
