"""hvdplus at work: one training three ways, on two hosts with a slow network between them.

    python examples/demo.py                    as root, or where the kernel lets users have networks of their own
    python examples/demo.py --rate 50mbit

Stock Horovod, stock Horovod with fp16, and hvdplus train the same model on the same real data to the same accuracy, in
PyTorch and in Keras. In the end there are a table, a picture and a page in runs/. Where there can be no second host,
both ranks share one, and there is nothing to gain: that shows, too.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.text import columns
from hvdplus.lab import Lab, a_core_each, rootless, unavailable
from hvdplus.log.page import table, write_page
from hvdplus.log.runlog import read

HERE = Path(__file__).resolve().parent
WAYS = {"stock": "stock Horovod", "stock-fp16": "stock Horovod, fp16", "auto": "hvdplus"}
FRAMEWORKS = {"pytorch": "PyTorch", "keras": "Keras"}
JOB_SECONDS = 300
KERAS = "Stock Horovod trains ranks apart under Keras 3; what it would send, hvdplus sent there."
HEAD = ("", "", "accuracy", "seconds", "steps", "ms a step", "MB sent", "sooner")


class Went(NamedTuple):
    """How one training went."""

    points: list[dict[str, float]]
    """step, seconds, accuracy."""
    sent_mb: float
    last: str
    """Its last line, if it is hvdplus's."""
    there: bool
    """Whether it came to the accuracy, before its steps were over."""

    @property
    def seconds(self) -> float:
        """Until the accuracy, or the last step."""
        return self.points[-1]["seconds"]


def main() -> int:
    """Train, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the links (default: 100mbit)")
    parser.add_argument("--accuracy", default="0.95", help="that all train to (default: 0.95)")
    parser.add_argument("--runs", default="runs", help="folder for what is written (default: runs)")
    args = parser.parse_args()
    runs = Path(args.runs)
    runs.mkdir(parents=True, exist_ok=True)
    why_not = unavailable()
    if why_not:
        print(f"Both ranks share this host, as there can be no second one: {why_not} There is nothing to gain.\n")
        found = {key: train(None, *key, args.accuracy, runs) for key in every_way()}
    else:
        print(f"Two hosts, {args.rate} between them: {', '.join(WAYS.values())} train the same model.\n", flush=True)
        with Lab(2, args.rate, a_core_each(2)) as lab:
            found = {key: train(lab, *key, args.accuracy, runs) for key in every_way()}
    head = (f"to {float(args.accuracy):.0%}", *HEAD[1:])
    print("\n" + columns([head, *rows(found)], range(2, len(HEAD))))
    print("\n" + KERAS)
    logs = {f"{framework}_digits": read(runs / f"{framework}_digits.jsonl") for framework in FRAMEWORKS}
    picture = draw(found, "one host" if why_not else args.rate, runs / "demo.png")
    print(f"\nPage: {write_page(logs, runs / 'demo.html', race(head, found, picture))}")
    print(f"Picture: {picture}\n")
    for (_, way), went in found.items():
        if way == "auto":
            print(went.last)
    return 0


def every_way() -> list[tuple[str, str]]:
    """(framework, way) of all trainings."""
    return [(framework, way) for framework in FRAMEWORKS for way in WAYS]


def train(lab: Lab | None, framework: str, way: str, accuracy: str, runs: Path) -> Went:
    """One training, in the lab or on this host alone."""
    command = [sys.executable, str(HERE / f"demo_{framework}.py"), "--way", way, "--accuracy", accuracy]
    log = runs.resolve() / (f"{framework}_digits.jsonl" if way == "auto" else f"{framework}_{way}.jsonl")
    environment = {"HVDPLUS_RUN_LOG": str(log), "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    began = time.monotonic()
    if lab:
        result = lab.run(command, env=environment, timeout_seconds=JOB_SECONDS, cwd=HERE)
        code, output, sent = result.exit_code, result.output, sum(result.bytes_sent.values()) / 2e6
    else:
        launch = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *command]
        done = subprocess.run(
            launch, env={**os.environ, **environment}, capture_output=True, text=True, timeout=JOB_SECONDS, cwd=HERE
        )
        code, output, sent = done.returncode, done.stdout + done.stderr, float("nan")
    lines = output.splitlines()
    points = [json.loads(line.removeprefix("point ")) for line in lines if line.startswith("point ")]
    if code or not points:
        raise SystemExit(f"{FRAMEWORKS[framework]}, {WAYS[way]}, failed (code {code}):\n{output}")
    last = next((line for line in lines if line.startswith("hvdplus demo ")), "")
    said = f"  {FRAMEWORKS[framework]}, {WAYS[way]}: {points[-1]['accuracy']:.1%} after {points[-1]['seconds']:.1f} s"
    print(f"{said} of training ({time.monotonic() - began:.0f} s in all)", flush=True)
    return Went(points, sent, last, points[-1]["accuracy"] >= float(accuracy))


def rows(found: dict[tuple[str, str], Went]) -> list[tuple[str, ...]]:
    """Of the table."""
    made = []
    for (framework, way), went in found.items():
        stock, end = found[framework, "stock"], went.points[-1]
        made.append(
            (
                FRAMEWORKS[framework],
                WAYS[way],
                f"{end['accuracy']:.1%}",
                f"{went.seconds:.1f}",
                f"{end['step']:.0f}",
                f"{1e3 * went.seconds / end['step']:.1f}",
                f"{went.sent_mb:.1f}" if went.sent_mb == went.sent_mb else "-",
                f"{stock.seconds / went.seconds:.1f} x" if stock.there and went.there else "-",
            )
        )
    return made


def race(head: tuple[str, ...], found: dict[tuple[str, str], Went], picture: Path) -> str:
    """The table and the picture, for the page's top."""
    image = base64.b64encode(picture.read_bytes()).decode()
    return (
        f"<h1>The race</h1>{table(head, rows(found))}<p>{KERAS}</p>"
        f'<p><img style="width: 100%" alt="accuracy over seconds" src="data:image/png;base64,{image}"></p>'
        "<p>Below are the reports of both trainings with hvdplus. They have all seconds, those before the first step "
        "and of measuring accuracy too, and bytes of gradients, without what goes along with them on the link.</p>"
    )


def draw(found: dict[tuple[str, str], Went], where: str, path: Path) -> Path:
    """Accuracy over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    colours = {"stock": "#999999", "stock-fp16": "#0072b2", "auto": "#d55e00"}
    for axis, (framework, name) in zip(figure.subplots(1, 2, sharey=True), FRAMEWORKS.items(), strict=True):
        for way, label in WAYS.items():
            points = found[framework, way].points
            seconds, accuracy = ([point[key] for point in points] for key in ("seconds", "accuracy"))
            axis.plot(seconds, accuracy, color=colours[way], label=label, linewidth=2)
            axis.plot(seconds[-1], accuracy[-1], "o", color=colours[way])
        axis.set_title(f"{name}, two ranks, {where}")
        axis.set_xlabel("seconds of training")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower right")
        axis.set_ylim(0, 1)
    figure.axes[0].set_ylabel("accuracy on the test set")
    figure.savefig(path)
    return path


if __name__ == "__main__":
    rootless.enter(sys.argv)
    sys.exit(main())
