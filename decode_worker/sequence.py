"""One attempt inside the decode worker, and what a step makes of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.core.errors import ServingError
    from baton.core.generation import FinishReason, SamplingParams, StopRule
    from baton.engine.token_rules import TokenRules


@dataclass(slots=True, kw_only=True)
class DecodeSequence:
    """One attempt inside the worker. Its blocks, and its slots in the swap space, belong to the scheduler.

    `order` is its place in the order of arrival, which the scheduler gives it.
    """

    attempt_id: str
    num_prompt_tokens: int
    last_token_id: int
    sampling: SamplingParams
    stop: StopRule
    rules: TokenRules | None = None
    top_logprobs: int | None = None
    num_generated: int = 1
    num_steps: int = 0
    order: int = 0
    is_parked: bool = False
    block_table: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Where the last token stands. Its keys and values are not in the cache yet."""
        return self.num_prompt_tokens + self.num_generated - 1

    def blocks_for_step(self, block_size: int) -> int:
        """Blocks that it has to have for its next step, which writes to `last_position`."""
        return self.last_position // block_size + 1

    def can_grow(self, block_size: int) -> bool:
        """Whether it may come to need more blocks than it has. The keys of its very last token are never computed."""
        last_written = max(self.num_prompt_tokens + self.stop.max_tokens - 2, self.last_position)
        return last_written // block_size + 1 > len(self.block_table)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token that a step produced; `finish_reason` is set when it is its sequence's last.

    With an `error` the sequence cannot go on after it.
    """

    attempt_id: str
    position: int
    token_id: int
    finish_reason: FinishReason | None
    error: ServingError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Blocks to be copied to slots of the swap space (`is_out`), or back. Both are the sequence's until it is done."""

    attempt_id: str
    is_out: bool
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
