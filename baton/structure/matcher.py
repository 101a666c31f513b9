"""Which tokens may come next in one output that has to have a certain form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Collection

    from llguidance import LLMatcher, LLTokenizer


class StructureMatcher:
    """Follows one output. Fed with the same tokens it is in the same state, on any worker.

    The library calls some tokens the end of a sequence; here those of the request alone end it, and they may come
    where the output is complete and nowhere else. An output that cannot go on is over without one.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_token_ids: Collection[int]) -> None:
        """Takes `matcher` over. ResourceExhaustedError where the structure allows nothing at all."""
        self._matcher = matcher
        self._vocab_size = tokenizer.vocab_size
        self._library_eos = [token_id for token_id in tokenizer.eos_tokens if token_id < self._vocab_size]
        self._stop_token_ids = frozenset(token_id for token_id in stop_token_ids if token_id < self._vocab_size)
        self._is_complete = False
        self._allowed = bytearray()
        self._look_ahead()

    @property
    def is_complete(self) -> bool:
        """Whether the output is over: a stop token came, or nothing can follow."""
        return self._is_complete

    @property
    def allowed(self) -> bytearray:
        """The tokens that may come next, a bit each, the lowest bit of the first byte for id 0. Not empty."""
        return self._allowed

    def append(self, token_id: int) -> None:
        """Adds a token that was allowed. ResourceExhaustedError when the output cannot be followed any further."""
        assert not self._is_complete, "the output is over"
        if token_id in self._stop_token_ids:
            self._is_complete = True
            return
        self._matcher.consume_token(token_id)
        self._look_ahead()

    def _look_ahead(self) -> None:
        if self._matcher.is_error():
            raise _too_complex()
        if self._matcher.is_stopped():
            self._is_complete = True
            return
        allowed = bytearray(self._matcher.compute_bitmask()[: -(-self._vocab_size // 8)])
        if self._matcher.is_error():
            raise _too_complex()
        if self._vocab_size % 8:
            allowed[-1] &= (1 << self._vocab_size % 8) - 1
        for token_id in (*self._library_eos, *self._stop_token_ids):
            allowed[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        is_accepting = self._matcher.is_accepting()
        if not any(allowed):
            if not is_accepting:
                raise _too_complex()
            self._is_complete = True
            return
        if is_accepting:
            for token_id in self._stop_token_ids:
                allowed[token_id >> 3] |= 1 << (token_id & 7)
        self._allowed = allowed


def _too_complex() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "the structure cannot be followed any further: it is too complex, or leaves no token to choose from",
        reason="STRUCTURE_TOO_COMPLEX",
        retry_after_s=None,
    )
