from __future__ import annotations

import pytest

from baton.core.errors import DeadlineExceededError
from baton.rpc.deadlines import remaining_s


class Context:
    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s


def test_the_next_hop_gets_what_is_left_less_the_margin() -> None:
    assert remaining_s(Context(10.0)) == pytest.approx(9.95)
    assert remaining_s(Context(10.0), margin_s=1.0) == pytest.approx(9.0)
    assert remaining_s(Context(None)) is None


@pytest.mark.parametrize("left_s", [0.05, 0.0, -3.0])
def test_nothing_left_is_an_error_here(left_s: float) -> None:
    with pytest.raises(DeadlineExceededError):
        remaining_s(Context(left_s))
