"""The recipes train, small, on two ranks, in one job each: files are read, loss falls, what is saved can be loaded."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks import present
from launching import mpirun, run

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
pytestmark = pytest.mark.jobs
ONE_LEVEL = {"HVDPLUS_COMPRESSION": "fp16"}
"""`auto` would compile every level, and try for a minute what each takes."""


def trained(folder, name, *arguments, package="torch", **variables):
    """What a recipe printed, on two ranks."""
    if not present(package):
        pytest.skip(f"{package} is not installed")
    command = mpirun(2, sys.executable, str(RECIPES / name), *map(str, arguments))
    variables["PYTHONSAFEPATH"] = ""  # they import what lies beside them
    code, output = run(command, timeout_seconds=480, cwd=folder, **variables)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """CIFAR-10's format: two classes that differ in their colour."""
    folder, dice = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for name, count in (("data_batch_1.bin", 256), ("data_batch_2.bin", 256), ("test_batch.bin", 64)):
        labels = dice.integers(0, 2, (count, 1), np.uint8)
        pixels = dice.integers(0, 100, (count, 3, 1024)).astype(np.uint8)
        pixels[:, 0] += 60 * labels
        np.concatenate([labels, pixels.reshape(count, -1)], axis=1).astype(np.uint8).tofile(folder / name)
    return folder


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Some text: a module of Python's own."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(Path(re.__file__).read_bytes() + Path(subprocess_source()).read_bytes())
    return path


def subprocess_source():
    import subprocess

    return subprocess.__file__


@pytest.mark.parametrize(
    ("name", "package", "epochs"),
    [
        ("cifar10_pytorch.py", "torch", 3),
        pytest.param("cifar10_keras.py", "keras", 3, marks=pytest.mark.rarely),
        ("large_batch_pytorch.py", "pytorch_optimizer", 12),
        pytest.param("large_batch_keras.py", "keras", 12, marks=pytest.mark.rarely),
    ],
)
def test_images(name, package, epochs, images, tmp_path):
    level = ONE_LEVEL if package == "keras" else {}
    output = trained(tmp_path, name, "--data", images, "--epochs", epochs, "--batch-size", 32, package=package, **level)
    assert max(float(found) for found in re.findall(r"(?:val_accuracy:|accuracy) ([\d.]+)", output)) > 0.8, output
    assert "hvdplus run" in output


@pytest.mark.parametrize(
    ("framework", "package"), [pytest.param("keras", "keras", marks=pytest.mark.rarely), ("pytorch", "torch")]
)
def test_resnet50(framework, package, tmp_path):
    if not present(package):
        pytest.skip(f"{package} is not installed")
    from PIL import Image

    for label in ("cats", "dogs"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(8):
            colour = (200, 40, 40) if label == "cats" else (40, 40, 200)
            Image.new("RGB", (40, 40), colour).save(tmp_path / "images" / label / f"{number}.png")
    shape = ("--epochs", 1, "--batch-size", 2, "--image-size", 32)
    name = f"resnet50_{framework}.py"
    output = trained(tmp_path, name, "--data", tmp_path / "images", *shape, package=package, **ONE_LEVEL)
    assert "hvdplus run" in output and list(tmp_path.glob("resnet50.*"))


def test_language_models_and_fine_tuning(book, tmp_path):
    small = ("--width", 32, "--layers", 2, "--length", 32, "--steps", 200)
    for kind, every in (("lstm", "auto"), ("transformer", "1")):
        more = ("--model", kind, "--every", every, "--learning-rate", 0.003)
        output = trained(tmp_path, "language_model_pytorch.py", "--text", book, *small, *more)
        first, *_, last = (float(found) for found in re.findall(r"step \d+: ([\d.]+) bits", output))
        assert last < first < 6, output
    letters = tmp_path / "letters.txt"
    letters.write_text("Dear reader, nothing has happened since. " * 200)
    output = trained(tmp_path, "finetune_pytorch.py", "--model", "language_model.pt", "--text", letters, "--steps", 60)
    before, after = map(float, re.search(r"([\d.]+) bits a byte before, ([\d.]+) after", output).groups())
    assert after < before, output


def test_a_language_model_in_keras(book, tmp_path):
    small = ("--width", 32, "--length", 32, "--steps", 200, "--learning-rate", 0.01)
    output = trained(tmp_path, "language_model_keras.py", "--text", book, *small, package="keras", **ONE_LEVEL)
    assert float(re.search(r"([\d.]+) bits a byte", output)[1]) < 5 and (tmp_path / "language_model.keras").exists()
