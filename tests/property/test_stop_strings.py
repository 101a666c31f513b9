"""Stop strings against a plain search over the whole text, however it is cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abé\n", min_size=0, max_size=40)
STOPS = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=5), min_size=0, max_size=4)


def cut(text: str, cuts: list[int]) -> list[str]:
    points = sorted({min(at, len(text)) for at in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(points)]


def expected_output(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads the text a character at a time: the first moment at which it ends with a stop string ends it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_output_is_the_text_before_the_first_complete_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStringMatcher(stops)
    output = ""
    for piece in cut(text, cuts):
        output += matcher.push(piece)
        if matcher.is_stopped:
            break
    stopped = matcher.is_stopped
    output += matcher.flush()
    assert (output, stopped) == expected_output(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_only_a_possible_beginning_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    output = ""
    for end, character in enumerate(text, start=1):
        output += matcher.push(character)
        if matcher.is_stopped:
            return
        held = text[len(output) : end]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        longest = max(
            (size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size])), default=0
        )
        assert len(held) == longest
