"""What the README shows a reader to write has to work as it stands there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import present

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import TABLE, Ops, Spec, parse
from hvdplus.settings import SETTINGS, Settings, variable

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "adaptive-2-hosts.json").read_text())
    found = {(cell["model"], cell["rate"]): cell["against_dense"][0] for cell in results["cells"]}
    rates = {"50 Mb/s": "50mbit", "200 Mb/s": "200mbit", "1 Gb/s": "1gbit", "5 Gb/s": "5gbit", "unshaped": "unshaped"}
    for link, rate in rates.items():
        row = [f"{found[model, rate]:.2f}" for model in ("mlp", "text", "cnn")]
        assert f"| {link} | {' | '.join(row)} |" in README


@pytest.fixture
def vote() -> Any:
    """The README's own compressor, registered for as long as a test runs."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30, "the README says 30 lines"
    try:
        exec(code, {})
        yield parse("vote")
    finally:
        TABLE.pop("vote", None)


def ops_of(framework: str) -> Ops:
    """The framework's ``Ops``."""
    if framework == "torch":
        from hvdplus.adapters.torch.ops import TorchOps

        return TorchOps()
    if framework == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from hvdplus.adapters.tensorflow.ops import TensorFlowOps

        return TensorFlowOps()
    return NumpyOps()


@pytest.mark.parametrize("framework", [name for name in ("numpy", "torch", "tensorflow") if present(name)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_majority_wins(vote: Any, framework: str, ranks: int) -> None:
    ops, spec = ops_of(framework), Spec(((30, 20),), ranks=ranks, tail=7)
    grads = np.random.default_rng(0).standard_normal((ranks, spec.size)).astype(np.float32)
    grads[:, :5] = 0
    ctx = vote.init(ops, spec)
    payloads = [vote.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads]
    assert ops.to_numpy(payloads[0]).nbytes == vote.payload_bytes(spec)
    mean = ops.to_numpy(vote.decode(ops, ctx, sum(payloads[1:], payloads[0]))) / ranks
    assert np.array_equal(mean, np.sign(np.sign(grads).sum(axis=0)))


def test_it_gives_up_what_the_readme_says_it_gives_up(vote: Any) -> None:
    """All of one mind: the sum of what each payload stands for is not what their sum stands for."""
    ops, spec = NumpyOps(), Spec(((1,),), ranks=3)
    ctx = vote.init(ops, spec)
    payloads = [vote.encode(ops, ctx, np.array([value], np.float32)) for value in (1.0, 1.0, 1.0)]
    together = vote.decode(ops, ctx, payloads[0] + payloads[1] + payloads[2])
    assert together[0] == 3.0 and sum(vote.decode(ops, ctx, payload)[0] for payload in payloads) != together[0]


def test_wrong_parameters_are_a_clear_error(vote: Any) -> None:
    with pytest.raises(ValueError, match="vote:3"):
        parse("vote:3")


def test_all_settings_are_in_the_table_with_their_defaults() -> None:
    for name, default in ((name, getattr(Settings(), name)) for name in SETTINGS):
        (row,) = [line for line in README.splitlines() if line.startswith(f"| `{variable(name)}` |")]
        assert not isinstance(default, int | float) or f"({default})" in row


def test_the_settings_file_is_one(tmp_path: Path) -> None:
    (content,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "hvdplus.yaml"
    path.write_text(content)
    assert Settings.load(environ={"HVDPLUS_CONFIG": str(path)}) == Settings(
        compression="auto", ladder=("none", "fp16", "lowrank:2"), dense_steps=20
    )
