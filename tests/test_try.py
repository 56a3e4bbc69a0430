"""``hvdplus try``: what it makes of run logs, and a whole run of it on hosts of a lab."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from launching import run as launched
from test_report import Job

from hvdplus.cli import main
from hvdplus.cli.attempt import Went, fault, planned, row, summed_up, watch
from hvdplus.lab import unavailable

SCRIPT = """
import sys, torch, hvdplus.torch as hvd
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
hvd.shutdown()
"""


def test_the_first_steps_do_not_count() -> None:
    slow = (110.0, 0.4, 80.0, 0.4)
    went = summed_up(Job().run("none", 30, slow).run("none", 40).end().records)
    assert went.span.step_ms == pytest.approx(19.8) and went.span.steps == 40 and went.price == 1.0


def test_delay_has_its_price() -> None:
    job = Job(limits={"delay_price": 0.25}).run("none", 30).run("lowrank:4", 90, error=0.8).end()
    went = summed_up(job.records)
    assert went.span.level == "lowrank:4" and went.price == pytest.approx(1.2)
    assert went.cost_ms == pytest.approx(1.2 * 13.0)
    plain = summed_up(Job().run("none", 80).end().records)
    cells = row("100mbit", {"none": plain, "fp16": plain, "auto": went})
    assert cells == ("100mbit", "19.8", "19.8", "13.0", "lowrank:4", f"{19.8 / 15.6:.2f} x")


def test_too_little_for_a_plan_is_no_row() -> None:
    assert planned([], 2) == [] and planned([Job().run("none", 20).end().records], 2) == []


def test_what_is_no_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "nowhere.py"]) == 2
    assert "hvdplus try wants a Python script. Received: nowhere.py" in capsys.readouterr().err
    assert main(["try", "--rates", "fast", __file__]) == 2
    assert "A rate is a number with kbit" in capsys.readouterr().err


def test_a_run_that_says_nothing_of_what_is_tried_is_an_error() -> None:
    ran = Job(compression="fp16").run("fp16", 80).end().records
    assert fault(ran, "fp16", None, "") == fault(ran, "fp16", 0, "") == ""
    assert "asks for fp16 itself" in fault(ran, "auto", None, "")
    assert fault(ran, "fp16", 3, "Traceback") == "the script ended with code 3:\nTraceback"
    assert "too few steps with hvdplus (0)" in fault([], "fp16", 0, "")
    for missing in (
        "environment variable RANK expected, but not set",
        "KeyError: 'LOCAL_RANK'",
        "KeyError: 'WORLD_SIZE'",
    ):
        assert "--torchrun" in fault([], "fp16", 1, missing)


def test_only_the_dashes_before_a_script_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--", "nowhere.py", "--", "x"]) == 2
    assert "Received: -- nowhere.py -- x" in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_script_is_tried(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "hvdplus.cli", "try", "--rates", "200mbit", "--seconds", "4"]
    code, output = launched([*command, str(script), "100000"], timeout_seconds=180)
    assert code == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("200mbit "))
    _, dense, fp16, auto, level, gain, _ = line.split()
    assert float(auto) < float(fp16) < float(dense) and float(gain) > 1.2, output
    assert level.startswith(("lowrank", "powersgd")), output
    assert sum(line.startswith("~ ") for line in output.splitlines()) == 2


@pytest.mark.alone
@pytest.mark.lab
@pytest.mark.rarely
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_script_for_torchrun_is_tried_by_torchrun(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "examples" / "pytorch_ddp.py"
    command = [sys.executable, "-m", "hvdplus.cli", "try", "--rates", "100mbit", "--seconds", "3"]
    code, output = launched([*command, str(script)], timeout_seconds=60, PYTHONSAFEPATH="")
    assert code == 1 and "hvdplus try --torchrun SCRIPT" in output, output
    code, output = launched([*command, "--torchrun", str(script)], timeout_seconds=180, PYTHONSAFEPATH="")
    assert code == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("100mbit "))
    assert float(line.split()[5]) > 1.2, output


class Endless:
    """A job that is running."""

    class process:
        @staticmethod
        def poll() -> None:
            return None


def test_a_script_that_never_begins_to_train_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    assert watch(Endless(), tmp_path / "run.jsonl", 100, limit=0.5) == []  # type: ignore[arg-type]
    assert time.monotonic() - began < 10


def test_a_run_of_nothing_but_transitions_shows_nothing() -> None:
    with pytest.raises(RuntimeError, match="too few steps at any level. Give it more time: --seconds"):
        summed_up([{**record, "level": "draining"} for record in Job().run("none", 60).end().records])


@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_script_without_hvdplus_is_told_what_to_import(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing to see')")
    command = [sys.executable, "-P", "-m", "hvdplus.cli", "try", "--rates", "1gbit", "--seconds", "2", str(script)]
    code, output = launched(command, timeout_seconds=60)
    assert code == 1 and "import hvdplus.torch as hvd" in output and "nothing to see" in output


def test_a_way_without_a_price_costs_its_seconds() -> None:
    span = summed_up(Job().run("none", 60).end().records).span
    assert Went(span, 1.0).cost_ms == span.step_ms
