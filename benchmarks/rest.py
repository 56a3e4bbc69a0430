"""Does ``auto`` rest where there is nothing to gain? Ranks of one host, in PyTorch and in Keras.

    python benchmarks/rest.py             ten pairs of jobs each, 12 minutes; writes benchmarks/results/rest.txt
    python benchmarks/rest.py --runs 2    fewer, which leave no file

A job at ``auto`` and one at ``none`` take turns, each the whole of ``examples/pytorch_digits.py`` or
``examples/keras_digits.py`` on two ranks. Counted are changes of the level held, trials not included; compared are
medians over a job's steps (of the windows in its log), so that trials and a start count where they are half of a job.
Ratios are geometric means over the pairs with 95 % bounds from their spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from adaptive import MOST_CHANGES, TURN_STEPS, Verdict, held_of, machine, ratio

from hvdplus.log.facts import Record, steps_in, weighted_median, windows_of
from hvdplus.log.runlog import read

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))
SCRIPTS = {"PyTorch": "pytorch_digits.py", "Keras": "keras_digits.py"}
RUNS = 10
MOST_SECONDS = 1.02
JOB_SECONDS = 200
SETTINGS = {"TF_NUM_INTEROP_THREADS": "1", "PYTHONSAFEPATH": ""}
"""A rank has a core; the examples import what lies beside them."""


def main() -> int:
    """Run the jobs and judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"pairs of jobs of each framework (default: {RUNS})")
    runs = parser.parse_args().runs
    if runs < 2:
        parser.error(f"--runs has to be at least 2. Received: {runs}")
    lines = [machine()]
    for framework, script in SCRIPTS.items():
        lines += measure(framework, script, runs)
    if runs >= RUNS:
        (HERE / "results" / "rest.txt").write_text("\n".join(lines) + "\n")
    return 0


def measure(framework: str, script: str, runs: int) -> list[str]:
    """Lines on one framework."""
    found: dict[str, list[float]] = {"auto": [], "none": []}
    changes, lines = [], []
    for run in range(runs):
        order = ("auto", "none") if run % 2 else ("none", "auto")
        logs = {level: job(script, level) for level in order}
        for level, records in logs.items():
            windows = windows_of(records)
            found[level].append(weighted_median([each["step_ms"] for each in windows], list(map(steps_in, windows))))
        held = levels_held(logs["auto"])
        changes.append(len(held) - 1)
        lines.append(
            f"  {framework}, pair {run + 1}: held {', then '.join(held)}; auto {found['auto'][-1]:.2f} ms, none "
            f"{found['none'][-1]:.2f} ms"
        )
        print(lines[-1], flush=True)
    longer = ratio(found["auto"], found["none"])
    verdicts = [
        Verdict(
            f"{framework}, one host: at most {MOST_CHANGES} changes a run of the level held for more than {TURN_STEPS} "
            "steps",
            max(changes) <= MOST_CHANGES,
            f"{max(changes)} at most, {statistics.mean(changes):.1f} on average, in {runs} runs",
        ),
        Verdict(
            f"{framework}, one host: the median step takes at most {MOST_SECONDS} x that of none",
            longer.middle <= MOST_SECONDS,
            str(longer),
        ),
    ]
    lines += map(str, verdicts)
    print(*verdicts, sep="\n", flush=True)
    return lines


def job(script: str, level: str) -> list[Record]:
    """The run log of one training on two ranks.

    Raises:
        SystemExit: the job failed; with what it printed.
    """
    import launching

    command = launching.mpirun(2, sys.executable, script, "--compression", level)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        settings = {**SETTINGS, "HVDPLUS_RUN_LOG": str(log)}
        code, output = launching.run(command, JOB_SECONDS, cwd=HERE.parent / "examples", **settings)
        if code:
            raise SystemExit(f"{script} at {level} ended with {code}:\n{output}")
        return read(log)


def levels_held(records: list[Record]) -> list[str]:
    """One after the other; all that ran, if none was held."""
    steps = [window["level"] for window in windows_of(records) for _ in range(steps_in(window))]
    return [level for level, _ in groupby(held_of(steps)[0] or steps)]


if __name__ == "__main__":
    sys.exit(main())
