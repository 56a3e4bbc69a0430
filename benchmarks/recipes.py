"""The recipes but ResNet-50, dense and with ``auto``, on two hosts with a slow link: loss over steps and over seconds.

    python benchmarks/recipes.py                    all of them, at 200 Mb/s: a quarter of an hour
    python benchmarks/recipes.py --only "CNN, PyTorch"      this one anew

Needs root or user namespaces (``hvdplus.lab``); nothing else may run on the machine meanwhile. Nothing is downloaded:
images are scikit-learn's handwritten digits in CIFAR-10's format, texts are modules of Python's own library. Every run
takes the same steps. Writes ``benchmarks/results/recipes.json`` and ``docs/images/recipes.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from adaptive import machine
from matplotlib.figure import Figure

from hvdplus.lab import Lab, a_core_each
from hvdplus.log.facts import steps_in, windows_of
from hvdplus.log.runlog import read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
PICTURE = ROOT / "docs" / "images" / "recipes.png"
LEVELS = ("none", "auto")
SMOOTHED = 9
"""Windows that a drawn loss is the mean of: every step has a batch of its own."""
COLUMNS = 4
"""Of the picture."""
RATE = "200mbit"
CNN = ("--data", "{images}", "--epochs", "6", "--batch-size", "32")
LARS = ("--data", "{images}", "--epochs", "12", "--batch-size", "64")
LSTM = ("--learning-rate", "0.003", "--save", "lstm.pt")
TUNING = ("--text", "{other}", "--steps", "200")
LANGUAGE = ("--text", "{text}", "--steps", "250", "--length", "64", "--batch-size", "8")


class Recipe(NamedTuple):
    """What is run, and how it is called in the picture."""

    title: str
    script: str
    arguments: tuple[str, ...]


RECIPES = (
    Recipe("CNN, PyTorch", "cifar10_pytorch.py", CNN),
    Recipe("CNN, Keras", "cifar10_keras.py", CNN),
    Recipe("LARS, PyTorch", "large_batch_pytorch.py", LARS),
    Recipe("LARS, Keras", "large_batch_keras.py", LARS),
    Recipe("transformer, PyTorch", "language_model_pytorch.py", LANGUAGE),
    Recipe("LSTM, PyTorch", "language_model_pytorch.py", (*LANGUAGE, "--model", "lstm", *LSTM)),
    Recipe("LSTM, Keras", "language_model_keras.py", (*LANGUAGE, "--width", "256", "--learning-rate", "0.003")),
    Recipe("fine-tuning, PyTorch", "finetune_pytorch.py", ("--model", "language_model.pt", *TUNING)),
)
"""Fine-tuning goes on with the transformer's model."""


def data(folder: Path) -> dict[str, str]:
    """Files that the recipes train on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.kron(digits.images, np.ones((4, 4))) * (255 / 16)
    colours = np.repeat(pixels[:, None], 3, axis=1).astype(np.uint8)
    (folder / "images").mkdir()
    records = np.concatenate([digits.target[:, None].astype(np.uint8), colours.reshape(len(colours), -1)], axis=1)
    records[:1500].tofile(folder / "images" / "data_batch_1.bin")
    records[1500:].tofile(folder / "images" / "test_batch.bin")
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    (folder / "text").write_bytes(text)
    (folder / "other").write_bytes(b"".join(path.read_bytes() for path in sorted((library / "email").glob("*.py"))))
    return {name: str(folder / name) for name in ("images", "text", "other")}


def course(lab: Lab, recipe: Recipe, level: str, files: dict[str, str], folder: Path) -> dict[str, Any]:
    """One run: steps, seconds and losses of its windows.

    Raises:
        RuntimeError: the recipe failed; with what it printed.
    """
    log = folder / "run.jsonl"
    log.unlink(missing_ok=True)
    command = ["python", str(ROOT / "examples" / "recipes" / recipe.script)]
    command += [argument.format(**files) for argument in recipe.arguments]
    settings = {"HVDPLUS_COMPRESSION": level, "HVDPLUS_RUN_LOG": str(log), "OMP_NUM_THREADS": "1"}
    settings |= {"HVDPLUS_WINDOW_STEPS": "2", "PYTHONSAFEPATH": ""}
    went = lab.run(command, env=settings, cwd=folder, timeout_seconds=1500)
    if went.exit_code:
        raise RuntimeError(f"{recipe.title} at {level} ended with code {went.exit_code}:\n{went.output[-2000:]}")
    windows = windows_of(read(log))
    seconds = accumulate(steps_in(window) * window["step_ms"] / 1e3 for window in windows)
    return {
        "steps": [window["last_step"] for window in windows],
        "seconds": [round(value, 3) for value in seconds],
        "loss": [round(window["loss"], 4) for window in windows],
        "levels": list(dict.fromkeys(window["level"] for window in windows)),
    }


def prepare(lab: Lab, recipe: Recipe, files: dict[str, str], folder: Path) -> None:
    """Make what a recipe goes on from, if it is not there."""
    if recipe.script == "finetune_pytorch.py" and not (folder / "language_model.pt").exists():
        (transformer,) = (each for each in RECIPES if each.title == "transformer, PyTorch")
        course(lab, transformer, "auto", files, folder)


def smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last ``SMOOTHED`` windows."""
    return [statistics.fmean(losses[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(losses))]


def last(run: dict[str, Any]) -> float:
    """The loss in the end: the mean of the last tenth."""
    return statistics.fmean(run["loss"][-max(SMOOTHED, len(run["loss"]) // 10) :])


def lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A table."""
    yield f"{'':24}{'seconds':>18}{'loss in the end':>22}   levels of auto"
    yield f"{'':24}{'none':>9}{'auto':>9}{'none':>11}{'auto':>11}"
    for title, runs in found.items():
        none, auto = (runs[level] for level in LEVELS)
        levels = ", ".join(auto["levels"])
        times = f"{none['seconds'][-1]:9.1f}{auto['seconds'][-1]:9.1f}"
        yield f"{title:24}{times}{last(none):11.3f}{last(auto):11.3f}   {levels}"


def draw(found: dict[str, dict[str, Any]]) -> None:
    """The picture: a column a recipe, above over steps, below over seconds."""
    rows = 2 * math.ceil(len(found) / COLUMNS)
    figure = Figure(figsize=(13, 2 * rows), dpi=90, layout="constrained")
    axes = figure.subplots(rows, COLUMNS)
    for place, (title, runs) in enumerate(found.items()):
        for row, field in enumerate(("steps", "seconds")):
            axis = axes[2 * (place // COLUMNS) + row][place % COLUMNS]
            for level, colour in zip(LEVELS, ("0.45", "tab:blue"), strict=True):
                axis.plot(runs[level][field], smooth(runs[level]["loss"]), color=colour, label=level, lw=1.4)
            axis.set_xlabel(field, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.set_xlim(left=0)
            if row == 0:
                axis.set_title(title, fontsize=10)
            if place == 0:
                axis.legend(fontsize=8, frameon=False)
            if place % COLUMNS == 0:
                axis.set_ylabel("training loss", fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[recipe.title for recipe in RECIPES], help="this recipe alone")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    options = parser.parse_args(arguments)
    chosen = [] if options.draw else [recipe for recipe in RECIPES if options.only in (None, recipe.title)]
    found: dict[str, dict[str, Any]] = {}
    if options.draw or options.only:
        found = json.loads(RESULTS.read_text())["runs"]
    if chosen:
        measure(chosen, found)
    found = {recipe.title: found[recipe.title] for recipe in RECIPES if recipe.title in found}
    print("", *lines(found), sep="\n")
    draw(found)
    return 0


def measure(chosen: Sequence[Recipe], found: dict[str, dict[str, Any]]) -> None:
    """Run recipes, and put what they did into ``found`` and the file of results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = data(folder)
        with Lab(hosts=2, rate=RATE, cores=a_core_each(2)) as lab:
            for recipe in chosen:
                prepare(lab, recipe, files, folder)
                found[recipe.title] = {level: course(lab, recipe, level, files, folder) for level in LEVELS}
                RESULTS.write_text(json.dumps({"machine": machine(), "runs": found}) + "\n")
                print(*list(lines({recipe.title: found[recipe.title]}))[2:], sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
