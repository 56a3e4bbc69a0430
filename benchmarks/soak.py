"""Does a long training stay as it began? Memory, open files, threads, the time of a step, the run log's bytes.

    python benchmarks/soak.py            20 500 steps in each of two jobs: some minutes
    python benchmarks/soak.py --quick    2 000 steps

Two ranks on this machine train a small PyTorch model in steps of a few milliseconds, with the run log on. In one job
(``walk``) levels change all the time, up and down a ladder with residuals; in the other ``auto`` chooses. After the
first 500 steps, blocks of steps at one level at the beginning and at the end make pairs, as many as 1 000 steps have.
Machines change, too: each block has its own yardstick, steps of the same model on each rank alone. A ratio is the
geometric mean over the pairs, with its 95 % bounds; the verdict is on that of steps over that of yardsticks. Nothing
else may run on the machine meanwhile. Ends with 1 if a verdict is FAIL. Writes ``benchmarks/results/soak.txt``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

LADDER = ("none", "fp16", "int8", "lowrank:8+fp16", "lowrank:2+fp16")
WALK = ("none", "lowrank:2+fp16", "fp16", "lowrank:8+fp16", "int8")
"""Order of the levels: each residual is paid out, each level begins anew."""
CHANGING = "changing"
"""In place of a level, for steps that flush."""
JOBS = ("walk", "auto")
STEPS, QUICK_STEPS, WARM, STRETCH = 20_500, 2_000, 500, 1_000
YARDSTICK = 16
"""Steps of each rank alone, after a block."""
RATIO_LIMIT = 1.02
MEMORY_LIMIT_MB, LATE_MEMORY_LIMIT_MB = 16.0, 4.0
"""By which a rank may grow after the first 1 000 steps, in which its log in memory fills up, and in the second half."""
LOG_LIMIT_BYTES = 150.0
"""Of the run log, a step."""
SECONDS_A_DAY, USUAL_STEP_SECONDS = 86_400, 0.1
LIMIT_SECONDS = 3_600.0


class Course(NamedTuple):
    """Which steps are what."""

    warm: int
    """Steps that do not count, at the beginning."""
    stretch: int
    """Steps in which ``walk`` comes through all levels."""
    steps: int

    @property
    def block(self) -> int:
        """Steps of a block. A level has five, of which the first, after the change, does not count."""
        return self.stretch // len(WALK) // 5

    @property
    def looks(self) -> tuple[int, int, int]:
        """Steps after which ranks look at themselves: 1 000 of a whole course, half of it, all."""
        return self.warm + self.stretch // 2, self.steps // 2, self.steps

    def level(self, step: int) -> str:
        """That ``walk`` runs."""
        return WALK[(step - self.warm) % self.stretch * len(WALK) // self.stretch]


def course(steps: int) -> Course:
    """Of about so many steps: two stretches or more."""
    warm = min(WARM, steps // 5)
    stretch = min(STRETCH, max(100, (steps - warm) // 2 // 25 * 25))
    return Course(warm, stretch, warm + stretch * max(2, (steps - warm) // stretch))


class Health(NamedTuple):
    """Of a rank, between two steps."""

    memory_mb: float
    files: int
    threads: int


def health() -> Health:
    """This process's, as the kernel counts."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
    return Health(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files, threads)


def train(job: str, plan: Course, folder: Path) -> None:
    """A rank's side."""
    import torch

    import hvdplus.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # numbers that dwindle make processors slow, whoever trains
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(hvd.rank())

    def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(),
            torch.nn.Linear(256, 10),
        )  # fmt: skip
        return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        began = time.perf_counter()
        x = torch.randn(32, 64, generator=draw)
        y = torch.randint(10, (32,), generator=draw)  # nothing to learn: gradients stay as large as they are
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        return time.perf_counter() - began

    alone, (net, bare) = model(), model()
    settings = {"ladder": ",".join(LADDER), "run_log": str(folder / f"{job}.jsonl")}
    optimizer = hvd.DistributedOptimizer(bare, net.named_parameters(), settings=settings)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    coordinator = optimizer.hvdplus
    if job == "walk":  # the controller looks on, and decides nothing
        coordinator.auto.controller.observe = lambda *_: None
    # All at once, so that what is kept here does not look like growth.
    seconds, levels = array("d", bytes(8 * plan.steps)), bytearray(plan.steps)
    yardsticks, looks = array("d", bytes(8 * plan.steps)), []
    for number in range(plan.steps):
        if job == "walk" and number >= plan.warm:
            coordinator.set_level(LADDER.index(plan.level(number)))
        changing, levels[number] = coordinator.schedule.transitional, coordinator.plan.level
        if changing:
            levels[number] = len(LADDER)
        seconds[number] = step(net, optimizer)
        if number + 1 in plan.looks:
            looks.append(health())
        if (number + 1 - plan.warm) % plan.block == 0:
            hvd.barrier()  # both ranks measure at once, as both train at once
            yardsticks[number] = statistics.fmean(step(*alone) for _ in range(YARDSTICK))
            hvd.barrier()
    told = {"seconds": list(seconds), "levels": [(*LADDER, CHANGING)[level] for level in levels], "looks": looks}
    told |= {"yardsticks": list(yardsticks), "identical": hvd.identical(net)}
    (folder / f"{job}-{hvd.rank()}.json").write_text(json.dumps(told))
    hvd.shutdown()


def run(job: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank has told.

    Raises:
        SystemExit: the job failed; with what it printed.
    """
    import launching

    command = [sys.executable, __file__, "--steps", str(steps), "--rank-of", job, "--folder", str(folder)]
    code, output = launching.run(launching.mpirun(2, *command), LIMIT_SECONDS)
    if code:
        raise SystemExit(f"{job} ended with {code}:\n{output}")
    return [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(2)]


class Block(NamedTuple):
    """Steps at one level, and a rank's own steps right after them: seconds."""

    steps: list[float]
    yardstick: float


def pairs(told: dict[str, Any], plan: Course) -> dict[str, tuple[list[Block], list[Block]]]:
    """Level -> its first blocks and its last, as many of each as there are in the last stretch."""
    blocks: dict[str, list[Block]] = {}
    late: dict[str, int] = {}
    for begin in range(plan.warm, plan.steps, plan.block):
        end = begin + plan.block
        level, *others = set(told["levels"][max(begin - plan.block, 0) : end])  # the one before, too: it has settled
        if not others and level != CHANGING:
            blocks.setdefault(level, []).append(Block(told["seconds"][begin:end], told["yardsticks"][end - 1]))
            late[level] = late.get(level, 0) + (begin >= plan.steps - plan.stretch)
    counts = {level: min(late[level], len(blocks[level]) // 2) for level in blocks}
    return {level: (blocks[level][:count], blocks[level][-count:]) for level, count in counts.items() if count}


def verdict(passed: bool, line: str) -> str:
    """A line that says whether a promise holds."""
    return f"{'ok  ' if passed else 'FAIL'}  {line}"


def judge(job: str, told: Sequence[dict[str, Any]], plan: Course, log_bytes: int) -> Iterator[str]:
    """The table of a job, and its verdicts."""
    from adaptive import ratio

    looks = [[Health(*look) for look in rank["looks"]] for rank in told]
    for rank, (early, half, late) in enumerate(looks):
        yield (
            f"{job}: rank {rank}: {early.memory_mb:.1f} MB after step {plan.looks[0]}, {half.memory_mb:.1f} MB half "
            f"way, {late.memory_mb:.1f} MB at the end; open files {early.files}, {half.files}, {late.files}; "
            f"threads {early.threads}, {half.threads}, {late.threads}"
        )
    found = pairs(told[0], plan)
    yield f"{job}: milliseconds a step, first and last {plan.stretch} steps"
    yield f"  {'level':<16} {'blocks':>6} {'mean':>14} {'median':>14}"
    for level, sides in found.items():
        steps = [[1e3 * step for block in side for step in block.steps] for side in sides]
        means, medians = (
            [f"{figure(side):6.3f}" for side in steps] for figure in (statistics.fmean, statistics.median)
        )
        yield f"  {level:<16} {len(sides[0]):>6} {' '.join(means):>14} {' '.join(medians):>14}"
    grown = max(late.memory_mb - early.memory_mb for early, _, late in looks)
    yield verdict(grown <= MEMORY_LIMIT_MB, f"{job}: memory grew by {grown:.1f} MB, at most {MEMORY_LIMIT_MB:g}")
    grown = max(late.memory_mb - half.memory_mb for _, half, late in looks)
    yield verdict(
        grown <= LATE_MEMORY_LIMIT_MB,
        f"{job}: memory grew by {grown:.1f} MB in the second half, at most {LATE_MEMORY_LIMIT_MB:g}",
    )
    for what in ("files", "threads"):
        more = max(getattr(late, what) - getattr(early, what) for early, _, late in looks)
        yield verdict(more <= 0, f"{job}: {more:+d} {'open files' if what == 'files' else what}, at most 0")
    first, last = ([block for sides in found.values() for block in sides[side]] for side in (0, 1))
    if len(first) < 2:
        yield verdict(False, f"{job}: no level ran both at the beginning and at the end")
    else:
        slower, slower_alone, both = (
            ratio([figure(block) for block in last], [figure(block) for block in first])
            for figure in (_mean, lambda block: block.yardstick, lambda block: _mean(block) / block.yardstick)
        )
        yield verdict(
            both.middle <= RATIO_LIMIT,
            f"{job}: last steps over first {slower}, of ranks alone {slower_alone}: {both}, at most {RATIO_LIMIT}",
        )
    a_step, mean = log_bytes / plan.steps, statistics.fmean(told[0]["seconds"])
    days = [a_step * SECONDS_A_DAY / seconds / 1e6 for seconds in (mean, USUAL_STEP_SECONDS)]
    yield verdict(
        a_step <= LOG_LIMIT_BYTES,
        f"{job}: run log {log_bytes / 1e6:.2f} MB, {a_step:.0f} bytes a step, at most {LOG_LIMIT_BYTES:g}; a day has "
        f"{days[0]:.0f} MB at {1e3 * mean:.1f} ms a step, {days[1]:.0f} MB at {1e3 * USUAL_STEP_SECONDS:.0f} ms",
    )
    yield verdict(all(rank["identical"] for rank in told), f"{job}: ranks end with equal weights")


def _mean(block: Block) -> float:
    return statistics.fmean(block.steps)


def main() -> int:
    """Run both jobs, print and judge; or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of each job")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--only", choices=JOBS, help="one of the jobs")
    parser.add_argument("--rank-of", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = QUICK_STEPS if options.quick else options.steps
    plan = course(steps)
    if options.rank_of:
        train(options.rank_of, plan, options.folder)
        return 0
    from adaptive import machine

    began, lines = time.monotonic(), [f"{machine()}; two ranks, {plan.steps} steps; ladder {', '.join(LADDER)}"]
    print(lines[0], flush=True)
    for job in [options.only] if options.only else JOBS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            told = run(job, steps, folder)
            for line in judge(job, told, plan, (folder / f"{job}.jsonl").stat().st_size):
                lines.append(line)
                print(line, flush=True)
    lines.append(f"{time.monotonic() - began:.0f} s")
    print(lines[-1])
    if plan.steps == STEPS and not options.only:
        (Path(__file__).parent / "results" / "soak.txt").write_text("\n".join(lines) + "\n")
    return any(line.startswith("FAIL") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
