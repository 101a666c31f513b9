"""Tokens of one attempt, put together so that a busy stream costs few messages and a slow one waits for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decode_worker.messages import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.core.generation import FinishReason, TokenLogprobs
    from baton.worker.engine_client import Attempt
    from decode_worker.messages import DecodeEvent

# A relay of one process carries some thousand messages a second; people do not see 5 ms.
_SHORTEST_GAP_S = 0.005
# After a pause the backlog goes in messages of this size, so that none is large.
_MAX_RUN_TOKENS = 64


@dataclass(slots=True)
class TokenRun:
    """Tokens of one choice that follow each other; the first stands at `first_position`.

    `logprobs` has one entry for each, or none. `finish_reason` is set when the last of them ends the choice.
    """

    first_position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    choice: int = 0

    def append(self, token: Token) -> None:
        """Adds the next token."""
        self.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        self.finish_reason = token.finish_reason


async def in_runs(attempt: Attempt[DecodeEvent]) -> AsyncIterator[TokenRun | DecodeEvent]:
    """The attempt's events up to its last, its tokens in runs: the first at once, later ones 5 ms apart or more.

    What has gathered of several choices goes together, a run for each. Events other than tokens are passed on in their
    place.
    """
    loop = asyncio.get_running_loop()
    last_sent_s = float("-inf")
    while True:
        event = await attempt.next_event()
        if not isinstance(event, Token):
            yield event
            if event.is_last:
                return
            continue
        gap_s = last_sent_s + _SHORTEST_GAP_S - loop.time()
        if gap_s > 0:
            await asyncio.sleep(gap_s)
        runs: dict[int, TokenRun] = {}
        num_tokens = 0
        while True:
            runs.setdefault(event.choice, TokenRun(event.position, [], choice=event.choice)).append(event)
            num_tokens += 1
            if num_tokens == _MAX_RUN_TOKENS or not isinstance(following := attempt.peek(), Token):
                break
            event = following
            await attempt.next_event()
        last_sent_s = loop.time()
        for run in runs.values():
            yield run
