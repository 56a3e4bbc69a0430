"""What goes wrong in real jobs, done on purpose: does the job survive it or end with a word, or does it hang or lie?

    python benchmarks/faults.py                    all of it, some 35 minutes; as root also those of the network
    python benchmarks/faults.py --only killed,nan  rows whose names hold one of these words

Two ranks train a small model over each transport, and a fault strikes one of them, mostly rank 1 before step 10. A row
is one job. What comes out:

    survived   all ranks came to the end with equal weights
    ended      the job ended with an error that has the words which the row asks for: the rank, the cause
    unsaid     it ended, but without these words
    told       ranks ended with these words, and their launcher still waits for a host that it cannot reach
    hang       it had not ended after the time allowed
    DIVERGED   it came to the end as if all were well, and weights differ
    half       some ranks came to the end, others did not

Each row says whether it should survive or end (``told`` will do then). Ends with 1 if a row comes out otherwise. Writes
its rows into ``benchmarks/results/faults.txt``, where others stay.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import launching  # noqa: E402

from hvdplus.lab import Lab, a_core_each, unavailable  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "faults.txt"
PATIENCE = 6
"""Seconds after which a waiting rank gives up (HVDPLUS_TIMEOUT_SECONDS), in these jobs."""
LIMIT_SECONDS = 100.0
"""After which a job counts as hanging: it has the start of two frameworks in it."""

TORCH = """
import os, signal, subprocess, sys, time, warnings
warnings.simplefilter("ignore")
NAMES = "RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"
RANK = int(next(os.environ[name] for name in NAMES if name in os.environ))
STEPS, rate, level, kind = 60, 0.05, os.environ.get("LEVEL", "auto"), "SGD"
def before_import(): pass
def before_wrap(): pass
def before_step(step): pass
def spoil(x, step): pass
def at_end(): pass
width, depth, dtype, careful, skipped = 40, 3, "float32", False, []
{fault}
before_import()
import torch
import hvdplus.torch as hvd
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))).to(getattr(torch, dtype))
before_wrap()
inner = getattr(torch.optim, kind)(net.parameters(), lr=rate)
optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), compression=level)
if "nobroadcast" not in globals():
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
draw = torch.Generator().manual_seed(RANK)
for step in range(STEPS):
    before_step(step)
    optimizer.zero_grad()
    x = torch.randn(8, width, generator=draw).to(getattr(torch, dtype))
    spoil(x, step)
    net(x).square().mean().backward()
    if step == 20 and RANK == 0:
        print("under way", flush=True)
    if not careful:
        optimizer.step()
        continue
    optimizer.synchronize()  # as in scripts that leave bad steps out
    if all(torch.isfinite(parameter.grad).all() for parameter in net.parameters()):
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        skipped.append(step)
assert skipped == ([10, 11] if careful else []), f"steps that were not finite: {{skipped}}"
at_end()
print(f"rank {{RANK}} at the end, identical {{hvd.identical(net)}}\\n", end="", flush=True)
"""

KERAS = """
import os, signal, sys, time, warnings
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
batches = 60
{fault}
import numpy as np
import keras
import hvdplus.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
class Strike(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        strike(self.model, batch)
if "strike" not in globals():
    def strike(model, batch): pass
x = np.random.default_rng(RANK).standard_normal((8 * batches, 40)).astype("float32")
if "spoil" in globals():
    spoil(x)
model = keras.Sequential([keras.layers.Dense(40), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=os.environ.get("LEVEL", "auto")), "mse")
calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), Strike()]
model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=calls)
print(f"rank {{RANK}} at the end, identical {{hvd.identical(model)}}\\n", end="", flush=True)
"""


class Fault(NamedTuple):
    """One row."""

    name: str
    code: str
    """What it puts into the script, on all ranks; ``RANK`` is known."""
    right: str
    """``survived``, or a pattern of the words with which the job has to end."""
    framework: str = "torch"
    transports: str = "horovod gloo mpi4py torch"
    """``gloo``: Horovod over Gloo, by horovodrun."""
    env: dict[str, str] = {}
    link: str = ""
    """What becomes of the link between two hosts of a laboratory, from step 20 on."""


def on_rank_1(code: str) -> str:
    """A function body that only rank 1 runs, before its step 10."""
    body = textwrap.indent(textwrap.dedent(code).strip(), " " * 8)
    return f"def before_step(step):\n    if RANK == 1 and step == 10:\n{body}\n"


def _strike(code: str) -> str:
    """A callback's body that only rank 1 runs, after its batch 10."""
    return f"def strike(model, batch):\n    if RANK == 1 and batch == 10: {code}"


def _keras(name: str, code: str, right: str, **how: Any) -> Fault:
    return Fault(f"Keras: {name}", code, right, "keras", "horovod mpi4py", **how)


GONE = "[Ss]ignal 9|SIGKILL|Killed"
NAMED = r"Rank 1 (is|has)|rank 1|[Mm]issing ranks:?\s+[01]|has ended|say nothing like this are missing"
SAVED = "path = f'{os.path.dirname(__file__)}/{RANK}.pt'; torch.save(optimizer.state_dict(), path)"
SLOWLY = "STEPS = 400\ndef before_step(step): time.sleep(0.03)"
"""Steps that go on while a link changes."""
LONGER = {"HVDPLUS_TIMEOUT_SECONDS": "30"}
"""TCP waits for twice as long after each try, and so comes back some seconds after the link."""
LEVELS = (
    "none",
    "fp16",
    "int8",
    "int4",
    "topk:0.1",
    "lowrank:4",
    "lowrank:4+fp16",
    "powersgd:4+fp16",
    "signsgd",
    "qsgd",
)

FAULTS = [
    Fault("nothing", "", "survived"),
    Fault("killed", on_rank_1("os.kill(os.getpid(), signal.SIGKILL)"), GONE),
    Fault(
        "stopped for 4 s and continued",
        on_rank_1(
            """
            subprocess.Popen(f"sleep 4; kill -CONT {os.getpid()}", shell=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            """
        ),
        "survived",
    ),
    Fault("stopped for ever", on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)"), NAMED),
    Fault(
        "out of memory",
        on_rank_1("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); torch.zeros(2**34)"),
        "memory|Memory",
    ),
    Fault("an exception between steps", on_rank_1("raise KeyError('enough')"), "enough"),
    Fault(
        "an exception in forward",
        on_rank_1("net[1].register_forward_hook(lambda *_: 1 / 0)"),
        "ZeroDivisionError",
    ),
    Fault(
        "an exception in a gradient's hook",
        on_rank_1("net[1].weight.register_hook(lambda gradient: 1 / 0)"),
        "ZeroDivisionError",
    ),
    Fault(
        "an exception in step",
        on_rank_1("optimizer.register_step_pre_hook(lambda *_: 1 / 0)"),
        "ZeroDivisionError",
    ),
    Fault(
        "an exception in the data loader's worker",
        on_rank_1(
            """
            class Data(torch.utils.data.Dataset):
                def __len__(self): return 4
                def __getitem__(self, i): raise OSError("disk is gone")
            list(torch.utils.data.DataLoader(Data(), num_workers=1))
            """
        ),
        "disk is gone",
    ),
    *(
        Fault(
            f"{value} in one rank's data, {level}",
            f"careful = True\ndef spoil(x, step):\n    if RANK == 1 and step in (10, 11): x[0, 0] = float('{value}')\n",
            "survived",
            transports="horovod",
            env={"LEVEL": level},
        )
        for level in LEVELS
        for value in ("nan", "inf")
    ),
    Fault(
        "other weights",
        "nobroadcast = 1\ndef before_wrap():\n    torch.manual_seed(RANK)\n    net[0].reset_parameters()",
        "differ",
    ),
    Fault("another type of numbers", "dtype = 'float64' if RANK else 'float32'", "differ|another|float64"),
    Fault("fewer parameters", "depth = 3 - RANK", "differ|parameters"),
    Fault("another width", "width = 40 + RANK", "differ|shape"),
    Fault("fewer steps", "STEPS = 60 - 5 * RANK", NAMED),
    Fault("a step left out", "STEPS = 60 - RANK", NAMED),
    Fault("another level", "level = ('fp16', 'int8')[RANK]", "differ|fp16"),
    Fault("another seed", "os.environ['HVDPLUS_SEED'] = str(RANK)", "differ|seed"),
    Fault("another ladder", "os.environ['HVDPLUS_LADDER'] = ('none,fp16', 'none,int8')[RANK]", "differ|ladder"),
    Fault("another rate of learning", "rate = (0.05, 0.5)[RANK]", "differ|learning"),
    Fault("another optimizer", "kind = ('SGD', 'Adam')[RANK]", "differ|Adam|optimizer"),
    Fault(
        "another version of hvdplus",
        """
def before_import():
    from importlib import metadata
    real = metadata.version
    metadata.version = lambda name: f"0.1.{RANK}" if name == "hvdplus" else real(name)
""",
        "survived",
    ),
    Fault("wrapped on one rank only", "def before_wrap():\n    if RANK: time.sleep(60); sys.exit(0)", NAMED + "|0 is"),
    Fault("a sum on one rank only", on_rank_1("hvd.allreduce(torch.ones(1), name='alone')"), NAMED),
    Fault("a bad level", "level = 'lowrnk:4'", "lowrnk:4"),
    Fault("a run log that is full", "", "survived", env={"HVDPLUS_RUN_LOG": "/dev/full"}),
    Fault("a run log that may not be written", "", "Cannot write the run log", env={"HVDPLUS_RUN_LOG": "/proc/no"}),
    Fault("settings that are no YAML", "", "yaml|YAML", env={"HVDPLUS_CONFIG": "{folder}/bad.yaml"}),
    Fault("settings that are not there", "", "nowhere.yaml", env={"HVDPLUS_CONFIG": "{folder}/nowhere.yaml"}),
    Fault(
        "another model's checkpoint",
        "def at_end():\n    other = torch.nn.Linear(3, 3)\n"
        "    one = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), compression='lowrank:2')\n"
        "    one.load_state_dict(optimizer.state_dict())",
        "checkpoint|parameter|shape|group",
    ),
    Fault(
        "a checkpoint that is cut off",
        "def at_end():\n    state = optimizer.state_dict()\n    state['hvdplus'].pop('residuals', None)\n"
        "    state['hvdplus'].pop('contexts', None)\n    optimizer.load_state_dict(state)",
        "damaged|missing|checkpoint",
        env={"LEVEL": "lowrank:2"},
    ),
    Fault(
        "a checkpoint's file that is cut off",
        f"""
def at_end():
    {SAVED}
    content = open(path, "rb").read()
    open(path, "wb").write(content[: len(content) // 2])
    optimizer.load_state_dict(torch.load(path))
""",
        "central directory|PytorchStreamReader|zip",
    ),
    Fault(
        "a checkpoint of another version",
        "def at_end():\n    state = optimizer.state_dict()\n    state['hvdplus']['format'] = 1\n"
        "    optimizer.load_state_dict(state)",
        "reads states of format",
    ),
    Fault(
        "a checkpoint from a stranger, read as weights only",
        f"def at_end():\n    {SAVED}\n    optimizer.load_state_dict(torch.load(path, weights_only=True))",
        "survived",
    ),
    Fault(
        "bad arguments, four for each setting",
        """
def before_wrap():
    from hvdplus.settings import SETTINGS
    unclear = []
    for name in SETTINGS:
        for bad in (object(), float("nan"), [], -1.5):
            one = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1)
            try:
                hvd.DistributedOptimizer(one, settings={name: bad})
                unclear.append((name, bad, "taken"))
            except ValueError as error:
                if name not in str(error) or "eceived" not in str(error):
                    unclear.append((name, bad, str(error)))
    assert not unclear, unclear
""",
        "survived",
    ),
    _keras("nothing", "", "survived"),
    _keras("killed", _strike("os.kill(os.getpid(), signal.SIGKILL)"), GONE),
    _keras("an exception in a callback", _strike("1 / 0"), "ZeroDivisionError"),
    _keras("stop_training on one rank", _strike("model.stop_training = True"), NAMED),
    _keras("fewer batches on one rank", "batches = 60 - 5 * RANK", NAMED),
    _keras(
        "NaN in one rank's data, fp16",
        "def spoil(x):\n    if RANK: x[80] = float('nan')",
        "survived",
        env={"LEVEL": "fp16"},
    ),
    *(
        Fault(f"the link: {link}", SLOWLY, "survived", "torch", "horovod mpi4py torch", LONGER, link)
        for link in ("cut for 5 s", "at 1 % of its bandwidth for 5 s", "another rate every ten steps")
    ),
    Fault(
        "the link: full for a minute at fp16, no step of 5 s",
        """
width, depth, STEPS, times = 700, 4, 160, [time.monotonic()]
def before_step(step): times.append(time.monotonic())
def at_end():
    longest = max(after - before for before, after in zip(times[2:], times[3:]))
    assert longest < 5, f"a step took {longest} s"
""",
        "survived",
        "torch",
        "horovod mpi4py torch",
        {"LEVEL": "fp16"},
        "full",
    ),
    Fault(
        "the link: cut for ever",
        SLOWLY,
        f"{NAMED}|missing|closed|timed out|Broken|reset|lost",
        transports="horovod mpi4py torch",
        link="cut",
    ),
]


def run(fault: Fault, transport: str, folder: Path) -> tuple[str, float, str]:
    """(what came out, seconds, all that was printed)."""
    path = folder / "job.py"
    path.write_text((TORCH if fault.framework == "torch" else KERAS).format(fault=fault.code))
    env = {
        "HVDPLUS_TRANSPORT": "horovod" if transport == "gloo" else transport,
        "HVDPLUS_TIMEOUT_SECONDS": str(PATIENCE),
        **{name: value.format(folder=folder) for name, value in fault.env.items()},
    }
    began = time.monotonic()
    if fault.link:
        code, output = _in_the_laboratory(fault, transport, path, env)
    else:
        start = {"torch": launching.torchrun, "gloo": launching.gloo}.get(transport, launching.mpirun)
        command = start(2, sys.executable, str(path))
        if os.geteuid() == 0:  # ranks have sessions of their own: all of them end with their namespace
            command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        try:
            code, output = launching.run(command, LIMIT_SECONDS, **env)
        except TimeoutError as error:
            code, output = None, str(error)
    return _outcome(fault, code, output), time.monotonic() - began, output


def _in_the_laboratory(fault: Fault, transport: str, path: Path, env: dict[str, str]) -> tuple[int | None, str]:
    seconds = 45.0 if fault.link == "cut" else LIMIT_SECONDS
    with Lab(hosts=2, rate="100mbit", cores=a_core_each(2)) as lab:
        env = {"OMP_NUM_THREADS": "1", **env}
        how = {"launcher": "torch" if transport == "torch" else "mpi", "env": env, "timeout_seconds": seconds}
        with lab.start(["python", str(path)], **how) as job:
            try:
                next((line for line in job if line == "under way"), None)
                _change(lab, fault.link)
                done = job.wait()
            except TimeoutError:
                return None, job.output
            return done.exit_code, done.output


def _change(lab: Lab, link: str) -> None:
    if link.startswith("cut"):
        lab.plug("h2", connected=False)
        if link != "cut":
            time.sleep(5)
            lab.plug("h2", connected=True)
    elif "1 %" in link:
        lab.shape("1mbit")
        time.sleep(5)
        lab.shape("100mbit")
    elif link != "full":
        for turn in range(30):
            lab.shape(("20mbit", "100mbit", "500mbit")[turn % 3])
            time.sleep(0.3)  # ten steps


def _outcome(fault: Fault, code: int | None, output: str) -> str:
    ends = re.findall(r"rank \d at the end, identical (True|False)", output)
    # Lines of code in tracebacks hold words such as "optimizer", and say nothing of the fault.
    output = re.sub(r"(?m)^(\[\d+\]<\w+>:)? {4,}.*$", "", output)
    if code is None:
        return "told" if fault.link == "cut" and re.search(fault.right, output) else "hang"
    if code == 0:
        return "half" if len(ends) < 2 else "survived" if set(ends) == {"True"} else "DIVERGED"
    return "ended" if fault.right != "survived" and re.search(fault.right, output) else "unsaid"


def main() -> int:
    """Run the rows, print the table, and say what came out otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words, with commas between them: rows whose names hold one")
    parser.add_argument("--transports", default="", help="words, with commas between them: only these")
    parser.add_argument("--show", action="store_true", help="print what the jobs printed, too")
    args = parser.parse_args()
    words = [word for word in args.only.split(",") if word]
    wanted = [word for word in args.transports.split(",") if word]
    no_lab, wrong, lines = unavailable(), [], dict[str, str]()
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        for transport in fault.transports.split():
            if wanted and transport not in wanted:
                continue
            if fault.link and no_lab:
                print(f"{fault.name:52} {transport:8} left out: {no_lab}", flush=True)
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "bad.yaml").write_text("a: [1, }")
                outcome, seconds, output = run(fault, transport, folder)
            right = outcome in (("survived",) if fault.right == "survived" else ("ended", "told"))
            right = right or (outcome == "survived" and "survived" in fault.right)
            who = f"{fault.name:52} {transport:8}"
            lines[who] = f"{who} {outcome:9} {seconds:5.1f} s{'' if right else '   WRONG'}"
            print(lines[who], flush=True)
            if not right:
                wrong.append(fault.name)
            if args.show or not right:
                print(textwrap.indent(output[-1500:], "    | "), flush=True)
    print(summed_up(lines))
    before = RESULTS.read_text().splitlines()[:-1] if RESULTS.exists() else []
    lines = {line[:61]: line for line in before} | lines
    RESULTS.write_text("\n".join([*lines.values(), summed_up(lines)]) + "\n")
    return bool(wrong)


def summed_up(lines: Mapping[str, str]) -> str:
    """How many rows came out how."""
    counts = Counter(line[61:].split()[0] for line in lines.values())
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
