"""What comes to a simulated deployment, and what computing it costs."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.model import blocks_of_choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PART = re.compile(r"(?P<share>[0-9.]+):(?P<p0>\d+)(-(?P<p1>\d+))?:(?P<o0>\d+)(-(?P<o1>\d+))?(:(?P<n>\d+))?")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of request: its share of all, the ranges of its prompt's and its outputs' tokens, ends included.

    It asks for `num_choices` outputs of at most the upper end of their range.
    """

    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_choices: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Reads `SHARE:PROMPT:OUTPUT` or `SHARE:PROMPT:OUTPUT:N`, where tokens are a number or a range.

        Such as `0.9:40-120:64`. ValueError otherwise.
        """
        match = _PART.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not SHARE:PROMPT:OUTPUT or SHARE:PROMPT:OUTPUT:N such as 0.9:40-120:64")
        prompt = (int(match["p0"]), int(match["p1"] or match["p0"]))
        output = (int(match["o0"]), int(match["o1"] or match["o0"]))
        share, num_choices = float(match["share"]), int(match["n"] or 1)
        if not (1 <= prompt[0] <= prompt[1] and 1 <= output[0] <= output[1] and share > 0 and num_choices > 0):
            raise ValueError(f"{text!r}: shares, tokens and N must be positive, ranges must go up")
        return cls(share, prompt, output, num_choices)

    def most_blocks(self, block_size: int) -> int:
        """Blocks of a decode worker that the longest such request may come to need."""
        return blocks_of_choices(self.prompt_tokens[1], self.output_tokens[1], self.num_choices, block_size)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request for outputs of at most `max_tokens` each. `output_tokens` has what each turns out to have, 1 or more.

    Nobody but the simulated model knows these before.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    max_tokens: int
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Independent arrivals (Poisson) of a mix of requests. Tenant `t0` sends `flood` times as much as each other."""

    parts: Sequence[Part]
    rate: float
    num_requests: int
    num_tenants: int = 1
    flood: float = 1.0
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """The requests in order; the same for the same seed."""
        draw = random.Random(self.seed)
        shares = [part.share for part in self.parts]
        tenants = [f"t{index}" for index in range(self.num_tenants)]
        weights = [self.flood, *[1.0] * (self.num_tenants - 1)]
        now_s = 0.0
        for _ in range(self.num_requests):
            now_s += draw.expovariate(self.rate)
            (part,) = draw.choices(self.parts, shares)
            (tenant,) = draw.choices(tenants, weights)
            prompt_tokens = draw.randint(*part.prompt_tokens)
            output_tokens = tuple(draw.randint(*part.output_tokens) for _ in range(part.num_choices))
            yield Arrival(now_s, prompt_tokens, output_tokens, part.output_tokens[1], tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that a step takes: a fixed part and one for each token or output. Copies cost by their tokens."""

    prefill_step_s: float = 0.005
    prefill_token_s: float = 1 / 900
    decode_step_s: float = 0.018
    decode_seq_s: float = 0.0009
    handover_s: float = 0.002
    handover_token_s: float = 0.000005
    swap_token_s: float = 0.000005
