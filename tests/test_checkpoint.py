"""Saved exchanges: what a rank may take over, and files that hold exactly what was put in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import saved
from hvdplus.adapters.local import Local
from hvdplus.transport import Transport

plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.lists(st.integers(-100, 100), max_size=4).map(lambda values: np.array(values, np.int32))
values = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(st.dictionaries(st.text(max_size=4), values))
@examples(100)
def test_files_hold_what_was_put_in(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("saved")
    saved.write(state, folder)
    assert same(state, saved.read(folder / saved.FILE))


def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    saved.write({"error": math.nan, "limit": math.inf}, tmp_path)
    found = saved.read(tmp_path / saved.FILE)
    assert math.isnan(found["error"]) and found["limit"] == math.inf


def test_reading_a_file_executes_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / saved.FILE, state=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        saved.read(tmp_path / saved.FILE)


class At(Local):
    """A rank among several, as far as anybody asks here."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def state(rank: Any, ranks: int) -> dict[str, Any]:
    return {"format": saved.FORMAT, "rank": rank, "ranks": ranks, "shapes": [[2, 3]], "residuals": {0: 1.0}}


@pytest.mark.parametrize(
    ("rank", "ranks", "average", "expected"),
    [
        (1, 4, True, saved.Claim(True, True, 1.0)),  # this rank's own file
        (0, 4, True, saved.Claim(True, False, 1.0)),  # another's
        (None, 4, True, saved.Claim(True, True, 1.0)),  # consolidated
        (None, 2, True, saved.Claim(False, True, 1.0)),  # ... on fewer ranks: the mean stays the mean
        (None, 2, False, saved.Claim(False, True, 0.5)),  # ... and the sum the sum
        (1, 2, True, saved.Claim(False, True, 2.0)),  # of two, one of which came along twice: the mean stays the mean
        (1, 2, False, saved.Claim(False, True, 1.0)),
        (1, 8, True, saved.Claim(False, True, 0.5)),
        (0, 1, True, saved.Claim(False, False, 4.0)),  # rank 0 pays it out, and nobody else
        (saved.OWN, 2, False, saved.Claim(False, True, 1.0)),  # stays on its rank when others come or go
        (saved.OWN, 2, True, saved.Claim(False, True, 2.0)),
        (saved.ANOTHERS, 4, False, saved.Claim(True, False, 1.0)),
    ],
)
def test_what_a_rank_may_take_over(rank: Any, ranks: int, average: bool, expected: saved.Claim) -> None:
    here: Transport = At(1, 4)
    assert saved.claim(state(rank, ranks), here, average=average) == expected


@pytest.mark.parametrize(
    ("here", "size", "rank", "ranks", "lost"),
    [
        (1, 4, 0, 4, "1"),  # everybody loads one rank's
        (1, 4, 1, 4, ""),
        (1, 4, 0, 2, "1"),
        (3, 4, 0, 2, ""),  # there was no rank 3
        (1, 2, 1, 4, ""),  # rank 0 says it
        (0, 2, 0, 4, "2, 3"),
        (0, 2, 1, 4, "0, 2, 3"),
        (0, 2, None, 4, ""),
        (0, 2, saved.OWN, 4, ""),
        (0, 2, saved.ANOTHERS, 4, ""),
    ],
)
def test_what_is_lost_is_said(
    here: int, size: int, rank: Any, ranks: int, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.claim(state(rank, ranks), At(here, size), average=True)
    said = capsys.readouterr().err
    assert (f"what rank(s) {lost} held back is lost" in said) if lost else not said
    saved.claim({**state(rank, ranks), "residuals": {}}, At(here, size), average=True)
    assert not capsys.readouterr().err


def test_other_models_and_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="of format 1. Received: 2"):
        saved.check({**state(0, 1), "format": 2}, [(2, 3)])
    with pytest.raises(ValueError, match="of 1 parameters, while this optimizer has 2, and the first .* number 1"):
        saved.check(state(0, 1), [(2, 3), (4,)])
    saved.check(state(0, 1), [(2, 3)])


def test_ranks_that_differ_are_named() -> None:
    told = [saved.digest(1, None, arrays=[np.arange(3)]) for _ in range(3)]
    saved.check_same(told)
    with pytest.raises(RuntimeError, match="Ranks 0 and 2 would go on from different states"):
        saved.check_same([*told[:2], saved.digest(1, None, arrays=[np.arange(3) + 1])])
