from __future__ import annotations

import asyncio

from baton.core.errors import InternalError
from baton.core.generation import FinishReason
from baton.worker.engine_client import Attempt
from baton.worker.messages import Failed
from decode_worker.messages import Finished, Token
from decode_worker.token_stream import TokenRun, in_runs

FINISHED = Finished(attempt_id="a", reason=FinishReason.LENGTH, num_steps=3, generate_s=0.1)


def token(position: int) -> Token:
    return Token(attempt_id="a", position=position, token_id=100 + position)


async def test_the_first_token_goes_at_once_and_what_gathers_goes_together():
    attempt = Attempt("a")
    runs = in_runs(attempt)
    attempt.put(token(5))
    start_s = asyncio.get_running_loop().time()
    assert await anext(runs) == TokenRun(5, [105])
    for position in (6, 7, 8):
        attempt.put(token(position))
    attempt.put(FINISHED)
    assert await anext(runs) == TokenRun(6, [106, 107, 108])
    assert asyncio.get_running_loop().time() - start_s > 0.004
    assert await anext(runs) == FINISHED
    assert [item async for item in runs] == []


async def test_slow_tokens_go_one_by_one():
    attempt = Attempt("a")
    runs = in_runs(attempt)
    for position in (1, 2):
        attempt.put(token(position))
        assert await anext(runs) == TokenRun(position, [100 + position])


async def test_a_failure_comes_after_the_tokens_before_it():
    attempt = Attempt("a")
    failed = Failed(attempt_id="a", error=InternalError("a step failed"))
    attempt.put(token(1))
    attempt.put(failed)
    assert [item async for item in in_runs(attempt)] == [TokenRun(1, [101]), failed]
