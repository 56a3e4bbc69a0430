"""PyTorch and Keras, held against each other: from equal contexts the same gradients become the same sums."""

import pickle
import sys

import numpy as np
import pytest
from launching import TESTS, mpirun, run

pytestmark = pytest.mark.jobs

RANKS = 2


LEVELS = ["fp16", "randomk:0.2", "topk:0.2:32", "lowrank:2", "int8", "topk:0.2:32+int8", "auto"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """``halves(level)``: what the ranks of PyTorch saw, and what those of Keras did."""
    folder = tmp_path_factory.mktemp("golden")
    for framework in ("torch", "keras"):  # all levels in one job: most of a job is the import of its framework
        body = [sys.executable, "-P", str(TESTS / "ranks" / "golden.py"), framework, str(folder), *LEVELS]
        code, output = run(mpirun(RANKS, *body), timeout_seconds=240)
        assert code == 0, output

    def of(level):
        for framework in ("torch", "keras"):
            files = [folder / f"{framework}.{level}.{rank}.pickle" for rank in range(RANKS)]
            yield [pickle.loads(file.read_bytes()) for file in files]

    return of


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_gradients_become_the_same_sums(halves, level):
    torchs, kerass = halves(level)
    assert bool(torchs[0][-1]) == (level == "auto")  # rank 0 keeps the log's records
    compared = 0
    for theirs, ours in zip(torchs, kerass, strict=True):
        assert theirs[-1] == ours[-1], "the same decisions"
        for number, (a, b) in enumerate(zip(theirs[:-1], ours[:-1], strict=True)):
            assert a["plan"][:-1] == b["plan"][:-1], number  # but for the gauge, which frameworks read at other times
            if any("none" not in name for name in a["sums"]):  # plain dense gradients go without a payload of ours
                compared += 1
                assert {name: total.nbytes for name, total in a["sums"].items()} == {
                    name: total.nbytes for name, total in b["sums"].items()
                }, "the same bytes on the wire"
                for name, total in a["sums"].items():
                    if total.dtype.kind == "i":
                        off = np.abs(total.view(np.int8).astype(int) - b["sums"][name].view(np.int8).astype(int))
                        # Energies of blocks are sums, which frameworks add up in another order before rounding.
                        most = 2 + 0.005 * off.size if "+int8" in level else 0
                        assert np.count_nonzero(off) <= most and off.max() <= 1, f"step {number}: {name}"
                    else:
                        close(total, b["sums"][name], 1e-3 if total.dtype == np.float16 else 1e-5)
            for mean, other in zip(a["means"], b["means"], strict=True):
                close(mean, other, 1e-3 if "fp16" in level or level == "auto" else 1e-5)
    assert compared >= RANKS or level == "auto", "payloads were caught"


def close(one, other, relative):
    one, other = one.astype(np.float64), other.astype(np.float64)
    largest = np.abs(one[np.isfinite(one)]).max(initial=1e-3)  # a preview's first step shows nothing yet: NaN
    np.testing.assert_allclose(other, one, rtol=0, atol=relative * largest)
