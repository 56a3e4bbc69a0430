"""What ranks tell each other over the store at which they met, and what they do where it has gone."""

from __future__ import annotations

import pytest

from hvdplus.adapters.transports import board
from hvdplus.transport import TransportError


class Store:
    """As ``torch.distributed.Store``; it may go, with the rank that held it, after so many looks."""

    def __init__(self, looks: int = 10**9) -> None:
        self.kept: dict[str, str] = {}
        self.looks = looks

    def set(self, key: str, value: str) -> None:
        self.check([])
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        self.looks -= 1
        if self.looks < 0:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


@pytest.mark.parametrize("looks", [0, 1, 3, 10**9])
def test_different_calls_are_an_error_whatever_is_left_of_the_store(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the rank that comes last, when the others have ended, would wait for a sum that nobody begins."""
    monkeypatch.setattr(board, "TELL_SECONDS", 0.05)
    store = Store(looks)
    store.kept["call.sums.3.0"] = "sum of (7,)"
    with pytest.raises(TransportError, match=r"sum of \(8,\)"):
        board.Board(store, 1, 2).complain("sums.3", "sum of (8,)", "")


def test_what_was_told_before_the_store_went_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "TELL_SECONDS", 0.05)
    store = Store(6)  # one write, and a look or two at each of the others
    store.kept["call.sums.3.0"] = "sum of (7,)"
    with pytest.raises(TransportError, match=r"sum of \(7,\)"):
        board.Board(store, 1, 3).complain("sums.3", "sum of (8,)", "")
