from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.generation import FinishReason
from gateway.events import Delta
from gateway.output import Output
from gateway.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable


class Letters:
    """A detokenizer for which token i is the i-th letter; `held` comes out at the end."""

    def __init__(self, held: str = "") -> None:
        self._held = held

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._held


def output(*stops: str, held: str = "", stop_ids: frozenset[int] = frozenset()) -> Output:
    return Output(Letters(held), StopStringMatcher(stops), stop_ids)


def test_text_and_ids_go_together() -> None:
    out = output()
    assert out.push([0, 1]) == Delta("ab", (0, 1))
    assert out.finish(None) == Delta("")
    assert len(out.token_ids) == 2


def test_ids_are_sent_while_their_text_is_held() -> None:
    out = output("bcd")
    assert out.push([0, 1]) == Delta("a", (0, 1))
    assert out.push([2]) == Delta("", (2,))
    assert out.finish(FinishReason.LENGTH) == Delta("bc", finish_reason=FinishReason.LENGTH)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    out = output("bc")
    assert out.push([0, 1, 2, 3, 4]) == Delta("a", (0, 1, 2), finish_reason=FinishReason.STOP)
    assert out.is_over
    assert out.reason is FinishReason.STOP
    assert len(out.token_ids) == 3
    assert out.finish(None) == Delta("")


def test_a_stop_token_counts_without_text() -> None:
    out = output("abc", stop_ids=frozenset({2}))
    assert out.push([0, 1, 2]) == Delta("", (0, 1, 2))
    assert not out.is_over
    assert out.finish(FinishReason.STOP) == Delta("ab", finish_reason=FinishReason.STOP)
    assert len(out.token_ids) == 3


def test_what_comes_out_at_the_end_may_complete_a_stop_string() -> None:
    out = output("b\ufffd", held="\ufffd")
    assert out.push([0, 1]) == Delta("a", (0, 1))
    assert out.finish(FinishReason.LENGTH) == Delta("", finish_reason=FinishReason.STOP)
    assert out.is_over
    assert out.reason is FinishReason.STOP


def test_stop_strings_are_looked_for_after_the_fewest_tokens() -> None:
    out = Output(Letters(), StopStringMatcher(["bc"]), frozenset(), min_tokens=2)
    # The one that begins in the second token does not count.
    assert out.push([0, 1, 2, 3]) == Delta("abcd", (0, 1, 2, 3))
    assert out.push([1, 2, 3]) == Delta("", (1, 2), finish_reason=FinishReason.STOP)
    assert out.is_over
    assert out.reason is FinishReason.STOP
    assert len(out.token_ids) == 6
