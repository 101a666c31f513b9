from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.worker.engine_loop import EngineStats, EventBatch
from decode_worker.messages import Park, Resume, Token
from decode_worker.pacing import Pacer


def batch(*attempts: str) -> EventBatch:
    events = tuple(Token(attempt_id=name, position=1, token_id=1) for name in attempts)
    return EventBatch(events=events, num_commands=0, stats=EngineStats(), step=None)


def test_a_reader_that_is_behind_parks_its_own_sequence_once():
    sent = []
    pacer = Pacer(sent.append, max_unread_tokens=4)
    with pacer.follow("slow") as read_slow, pacer.follow("quick") as read_quick:
        for _ in range(6):
            pacer.observe(batch("slow", "quick", "stranger"))
            read_quick(1)
        assert sent == [Park(attempt_id="slow")]
        read_slow(3)
        assert sent == [Park(attempt_id="slow")]
        read_slow(1)
        assert sent == [Park(attempt_id="slow"), Resume(attempt_id="slow")]
    pacer.observe(batch("slow"))
    assert len(sent) == 2


@settings(max_examples=50, deadline=None)
@given(reads=st.lists(st.integers(0, 12), min_size=1, max_size=80), limit=st.integers(1, 10), lag=st.integers(0, 3))
def test_what_gathers_is_bounded_and_nobody_is_parked_for_ever(reads, limit, lag):
    """An engine that hears of commands `lag` steps late, and a reader that reads in fits."""
    commands: list[object] = []
    pacer = Pacer(commands.append, max_unread_tokens=limit)
    unread, runs, pending = 0, True, []
    with pacer.follow("a") as read:
        for wanted in [*reads, *[limit] * 6]:
            pending.append(list(commands))
            commands.clear()
            for command in pending.pop(0) if len(pending) > lag else []:
                runs = isinstance(command, Resume)
            if runs:
                unread += 1
                pacer.observe(batch("a"))
            assert unread <= limit + lag + 1
            taken = min(wanted, unread)
            unread -= taken
            read(taken)
        pending.append(list(commands))
        for command in [command for step in pending for command in step]:
            runs = isinstance(command, Resume)
        assert runs or unread > limit // 2
