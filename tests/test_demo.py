"""The demo, small: three ways in both frameworks, with a table, a page and a picture in the end."""

import json
import re
import sys
from pathlib import Path

import pytest
from launching import run

from hvdplus.lab import unavailable
from hvdplus.log.runlog import read

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.jobs


def checked(output: str, folder: Path) -> list[list[str]]:
    """The rows of the table; everything else is as it should be."""
    for framework in ("torch", "keras"):
        assert re.search(
            rf"^hvdplus demo {framework}: accuracy=0\.[5-9]\d+ ranks=2 .* identical_ranks=yes$", output, re.M
        )
    assert (folder / "demo.html").read_text().count("<svg") >= 6 and (folder / "demo.png").stat().st_size > 10_000
    for name in ("pytorch_digits", "keras_digits"):
        assert read(folder / f"{name}.jsonl")[-1]["kind"] == "end"
    return [re.split(r"\s{2,}", line) for line in output.splitlines() if re.match(r"(PyTorch|Keras)  ", line)]


@pytest.mark.alone
@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_on_two_hosts(tmp_path):
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--rate",
        "200mbit",
        "--accuracy",
        "0.6",
        "--runs",
        str(tmp_path),
    ]
    code, output = run(command, timeout_seconds=300, PYTHONSAFEPATH="")  # scripts import what lies beside them
    assert code == 0, output
    rows = checked(output, tmp_path)
    assert [row[1] for row in rows] == ["stock Horovod", "stock Horovod, fp16", "hvdplus"] * 2
    for stock, half, ours in (rows[:3], rows[3:]):
        per_step = [float(row[6]) / float(row[4]) for row in (stock, half, ours)]
        assert per_step[0] > 1.8 * per_step[1] > 5 * per_step[2], "megabytes a step"
        assert float(ours[5]) < float(half[5]) < float(stock[5]), "milliseconds a step"


def test_where_there_is_no_second_host(tmp_path):
    """One framework's scripts, without the lab."""
    command = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable]
    log = tmp_path / "run.jsonl"
    command += [str(EXAMPLES / "demo_pytorch.py"), "--way", "auto", "--accuracy", "0.6"]
    code, output = run(command, timeout_seconds=120, HVDPLUS_RUN_LOG=str(log), PYTHONSAFEPATH="")
    assert code == 0, output
    points = [json.loads(line.removeprefix("point ")) for line in output.splitlines() if line.startswith("point ")]
    assert points[-1]["accuracy"] >= 0.6 and "identical_ranks=yes" in output
