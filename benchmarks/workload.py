"""What is asked of a system, and when. Seeded: the same arguments give the same requests, token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Ids below are special tokens in the models that are measured, those above are in every vocabulary used here.
FIRST_PLAIN_TOKEN = 100
END_PLAIN_TOKEN = 30_000

# Prompt and answer lengths of conversations that people shared: log-normal, cut off at both ends. Medians and spreads
# follow what is commonly published of such collections; one list would be no more right than another.
PROMPT_TOKENS = (80, 1.1, 8, 1024)
ANSWER_TOKENS = (110, 0.9, 8, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation of exactly `max_tokens` tokens, sent `at_s` seconds after the start whatever else happens."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    at_s: float = 0.0


def prompt_of(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Random plain tokens: nothing of it is in any cache."""
    return tuple(rng.randrange(FIRST_PLAIN_TOKEN, END_PLAIN_TOKEN) for _ in range(num_tokens))


def uniform(seed: int, num_requests: int, prompt_tokens: int, max_tokens: int) -> list[Request]:
    """`num_requests` of one size, all at once."""
    rng = random.Random(seed)
    return [
        Request(name=f"uniform-{index}", prompt=prompt_of(rng, prompt_tokens), max_tokens=max_tokens)
        for index in range(num_requests)
    ]


def mixed(seed: int, num_requests: int, rate_per_s: float) -> list[Request]:
    """Conversation-like lengths, arriving as a Poisson process."""
    rng = random.Random(seed)
    requests = []
    at_s = 0.0
    for index in range(num_requests):
        prompt = prompt_of(rng, _length(rng, *PROMPT_TOKENS))
        answer = _length(rng, *ANSWER_TOKENS)
        requests.append(Request(name=f"mixed-{index}", prompt=prompt, max_tokens=answer, at_s=at_s))
        at_s += rng.expovariate(rate_per_s)
    return requests


def chats(seed: int, num_requests: int, interval_s: float, max_tokens: int = 64) -> list[Request]:
    """Short prompts of 40 to 120 tokens, one each `interval_s`."""
    rng = random.Random(seed)
    return [
        Request(
            name=f"chat-{index}",
            prompt=prompt_of(rng, rng.randint(40, 120)),
            max_tokens=max_tokens,
            at_s=index * interval_s,
        )
        for index in range(num_requests)
    ]


def long_prompt(seed: int, num_tokens: int, max_tokens: int, at_s: float = 0.0) -> Request:
    """One long prompt."""
    prompt = prompt_of(random.Random(seed), num_tokens)
    return Request(name="long", prompt=prompt, max_tokens=max_tokens, at_s=at_s)


def shifted(requests: Sequence[Request], by_s: float) -> list[Request]:
    """The same requests `by_s` later."""
    return [
        Request(name=each.name, prompt=each.prompt, max_tokens=each.max_tokens, at_s=each.at_s + by_s)
        for each in requests
    ]


def _length(rng: random.Random, median: int, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(median * rng.lognormvariate(0.0, spread))))
