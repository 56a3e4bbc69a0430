"""The ranks of ``ranks/device_ranks.py`` on a CUDA device: one over NCCL, and two that share it over Gloo."""

import pytest
from launching import TESTS, run, torchrun

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_on_a_device(ranks):
    python = ["python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-W", "default", "device_ranks.py"]
    code, output = run(torchrun(ranks, *python), 300, cwd=TESTS / "ranks", EXPECTED_RANKS=str(ranks))
    assert code == 0, output
    assert " passed" in output
