"""Several outputs of one prompt on real workers: one prefill, one handover, then a batch of their own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from baton.core.generation import SamplingParams
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.integration.workers.harness import BLOCK_SIZE, GREEDY, WITHIN_S

if TYPE_CHECKING:
    from tests.integration.workers.harness import Client, Pair

PROMPT = [(37 * index + index * index) % 200 + 5 for index in range(10 * BLOCK_SIZE + 5)]
MAX_TOKENS = 24
SEED = 1
# A batch does not wait for whoever looks at it: then the look comes late, and is tried again.
MAX_TRIES = 50


def sampled(choice: int = 0) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0.8, seed=SamplingParams(seed=SEED).of_choice(choice).seed)


class Choices:
    """What an attempt's choices gave; `handover` is its one handover."""

    def __init__(self, client: Client, attempt_id: str, **changes: Any) -> None:
        self.client, self.attempt_id = client, attempt_id
        self.changes = {"max_tokens": MAX_TOKENS, "num_choices": 3} | changes
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.reasons: dict[int, int] = {}
        self.handover: decode_pb2.HandoverDone | None = None
        self.follows_growth = self.was_early = False

    async def run(self) -> dict[int, list[int]]:
        early = None
        async for event in self.client.prefill.Prefill(
            self.client.prefill_request(self.attempt_id, PROMPT, **self.changes, **self.scored("prefill"))
        ):
            if event.HasField("growing_cache") and self.follows_growth:
                early = self.decode(prefill_pb2.FirstToken(kv=event.growing_cache))
                self.was_early = True
            elif event.HasField("first_token"):
                first = event.first_token
                for choice, each in enumerate([first, *first.other_choices]):
                    self.take(choice, [each.token_id], [each.logprobs], each.finish_reason)
                if first.HasField("kv"):
                    await self.read(early or self.decode(first))
        return dict(self.tokens)

    def scored(self, role: str) -> dict[str, Any]:
        if role == "prefill":
            # Without a salt the prompt would be known, and computed in one chunk.
            return {"logprobs": common_pb2.LogprobOptions(output_top=0), "cache_salt": self.attempt_id}
        return {"top_logprobs": 0}

    def decode(self, first: prefill_pb2.FirstToken) -> Any:
        others = [each.token_id for each in first.other_choices]
        request = self.client.decode_request(
            self.attempt_id, first, other_first_token_ids=others, **self.changes, **self.scored("decode")
        )
        return self.client.decode.Decode(request)

    async def read(self, call: Any) -> None:
        async for event in call:
            if event.HasField("handover"):
                assert self.handover is None
                self.handover = event.handover
                await self.joined()
            elif event.HasField("tokens"):
                new = event.tokens
                assert new.first_position == len(PROMPT) + len(self.tokens[new.choice])
                self.take(new.choice, new.ids, new.logprobs, new.finish_reason)
                await self.grown()

    def take(self, choice: int, ids: Any, logprobs: Any, reason: int) -> None:
        assert choice not in self.reasons, "nothing comes after an end"
        self.tokens[choice] += ids
        self.logprobs[choice] += [each.logprob for each in logprobs]
        if reason:
            self.reasons[choice] = reason

    async def joined(self) -> None:
        """For a test to look at the workers."""

    async def grown(self) -> None:
        """The same, at every token."""


async def alone(client: Client, name: str, sampling: common_pb2.SamplingParams) -> list[int]:
    return (await client.generate(name, PROMPT, sampling=sampling, max_tokens=MAX_TOKENS)).tokens


async def num_used(client: Client) -> tuple[int, int]:
    prefill = await client.prefill.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
    decode = await client.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
    return prefill.worker.num_used_blocks, decode.worker.num_used_blocks


async def none_used(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await num_used(client) != (0, 0):
            await asyncio.sleep(0.02)


async def test_greedy_choices_are_all_what_one_alone_is_and_share_the_prompt(pair: Pair) -> None:
    async with pair.client() as client:
        expected = await alone(client, "one", GREEDY)
        most_used = 0

        class Watched(Choices):
            async def grown(self) -> None:
                nonlocal most_used
                most_used = max(most_used, (await num_used(client))[1])

        num_own = (len(PROMPT) + MAX_TOKENS - 2) // BLOCK_SIZE + 1 - len(PROMPT) // BLOCK_SIZE
        for number in range(MAX_TRIES):
            choices = Watched(client, f"three-{number}", sampling=GREEDY)
            assert await choices.run() == dict.fromkeys(range(3), expected)
            assert set(choices.reasons.values()) == {common_pb2.FINISH_REASON_LENGTH}
            assert choices.handover.num_bytes == 11 * 6 * 1024, "the prompt's eleven blocks, once"
            await none_used(client)
            if most_used:  # else they had ended before anybody looked
                break
        assert len(PROMPT) // BLOCK_SIZE < most_used <= len(PROMPT) // BLOCK_SIZE + 3 * num_own


async def test_each_sampled_choice_is_what_its_seed_gives_alone_whatever_else_runs(pair: Pair) -> None:
    async with pair.client() as client:
        expected = {choice: await alone(client, f"alone{choice}", sampled(choice)) for choice in range(3)}
        assert len({tuple(tokens) for tokens in expected.values()}) == 3
        first, second = (Choices(client, name, sampling=sampled()) for name in ("first", "second"))
        second.follows_growth = True
        other = client.generate("other", PROMPT[:40], sampling=sampled(5), max_tokens=30)
        results = await asyncio.gather(first.run(), second.run(), other)
        assert results[0] == results[1] == expected
        assert second.was_early
        assert first.logprobs[2] == pytest.approx(second.logprobs[2], abs=1e-4)
        assert len(first.logprobs[2]) == MAX_TOKENS
        await none_used(client)


async def test_a_choice_ends_by_itself_or_is_ended_and_the_others_go_on(pair: Pair) -> None:
    async with pair.client() as client:
        expected = {choice: await alone(client, f"alone{choice}", sampled(choice)) for choice in range(3)}
        # Tokens that one choice alone has, early: the first one's very first, and one of the second.
        others = {*expected[1], *expected[2]}
        stops = [expected[0][0]] if expected[0][0] not in others else []
        stops += [each for each in expected[1][1:6] if each not in {*expected[0][:1], *expected[2]}][:1]
        assert len(stops) == 2, "another prompt would do"

        many = {"num_choices": 4, "max_tokens": 200}

        class Ending(Choices):
            is_ended = False

            async def grown(self) -> None:
                if not self.is_ended and len(self.tokens[2]) >= 8:
                    self.is_ended = True
                    request = decode_pb2.EndChoiceRequest(attempt_id=self.attempt_id, choice=2)
                    await self.client.decode.EndChoice(request)

        for number in range(MAX_TRIES):
            choices = Ending(client, f"ending-{number}", sampling=sampled(), stop_token_ids=stops, **many)
            tokens = await choices.run()
            assert tokens[0] == expected[0][:1]
            assert tokens[1] == expected[1][: expected[1].index(stops[1]) + 1]
            assert tokens[2][:8] == expected[2][:8]
            assert {choices.reasons[0], choices.reasons[1]} == {common_pb2.FINISH_REASON_STOP}
            assert 3 in choices.reasons
            await none_used(client)
            if 2 not in choices.reasons:  # else it had ended by itself before it was told to
                break
        assert 2 not in choices.reasons
        assert 8 <= len(tokens[2]) < 200


async def test_a_cancelled_call_frees_all_choices(pair: Pair) -> None:
    async with pair.client() as client:

        class Cancelled(Choices):
            async def grown(self) -> None:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            await Cancelled(client, "cancelled", sampling=GREEDY, max_tokens=600).run()
        await none_used(client)
