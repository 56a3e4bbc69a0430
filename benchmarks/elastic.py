"""Whether a training whose ranks are lost, leave and come learns as much as one that nothing disturbs.

    python benchmarks/elastic.py                      three seeds; a quarter of an hour on two cores
    python benchmarks/elastic.py --seeds 1 --only elastic

Three ranks over Gloo train a perceptron on the same samples in the same order, in PyTorch (``elastic``) and in Keras
(``keras_elastic``), at ``lowrank:2``, which holds much back (``tests/ranks/disturbing.py`` has the task):

    through    nothing happens
    resized    one rank leaves in order after 3/8 of the samples, and another comes after 1/10 more
    killed     one rank is killed after 5/8 of the samples, and the two others go on from their last commit to the end

A row is one training: accuracy in % and loss on 10 000 test samples, and how far both are from ``through`` with the
same seed. Such an accuracy has a standard error of 0.18, such a loss one of 0.0025. ``spread``: over the seeds, of
``through``.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import launching  # noqa: E402

KINDS = ("", "resized", "killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="elastic,keras_elastic")
    args = parser.parse_args()
    print(f"{'script':14} {'kind':8} seed  accuracy    loss   difference", flush=True)
    for script in args.only.split(","):
        through = {}
        for seed in range(args.seeds):
            for kind in KINDS:
                found = trained(script, kind, seed)
                mine = 100 * found["accuracy"], found["loss"]
                through.setdefault(seed, mine)
                more, lost = (one - other for one, other in zip(mine, through[seed], strict=True))
                row = f"{script:14} {kind or 'through':8} {seed:4} {mine[0]:9.2f} {mine[1]:7.4f}"
                print(row + (f"   {more:+.2f} {lost:+.4f}" if kind else ""), flush=True)
        if args.seeds > 1:
            spread = [statistics.stdev(each) for each in zip(*through.values(), strict=True)]
            print(f"{script:14} {'spread':13} {spread[0]:9.2f} {spread[1]:7.4f}", flush=True)


def trained(script: str, kind: str, seed: int) -> dict:
    """One training."""
    patience = {"HVDPLUS_TIMEOUT_SECONDS": "16"} if kind == "killed" else {}
    with tempfile.TemporaryDirectory() as folder:
        ranks, _ = launching.elastic(Path(folder), script, "lowrank:2", kind, str(seed), **patience)
    assert len(ranks) == (2 if kind == "killed" else 3)
    assert all(rank["trained"] == ranks[0]["trained"] for rank in ranks), "ranks differ"
    (found,) = ranks[0]["trained"]
    return found


if __name__ == "__main__":
    main()
