"""One attempt inside the decode worker, and what a step makes of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.errors import ServingError
    from baton.core.generation import FinishReason, SamplingParams, StopRule
    from baton.engine.token_rules import TokenRules


@dataclass(slots=True, kw_only=True)
class Branch:
    """One of an attempt's outputs, the choice of that number.

    The last token stands at `last_position`; its keys and values are not in the cache yet. `block_table` begins with
    the blocks that all branches share; the others are written to, and this branch alone has them.
    """

    choice: int
    sampling: SamplingParams
    last_position: int
    last_token_id: int = 0
    rules: TokenRules | None = None
    num_steps: int = 0
    block_table: list[int] = field(default_factory=list)

    def blocks_for_step(self, block_size: int) -> int:
        """Blocks that it has to have for its next step, which writes to `last_position`."""
        return self.last_position // block_size + 1


@dataclass(slots=True, kw_only=True)
class DecodeSequence:
    """One attempt inside the worker: a prompt and its outputs, which wait, run, rest and move as one.

    The prompt, with `num_resumed` tokens of output after it, is computed once; the blocks that it fills are shared by
    the branches. Blocks, and slots in the swap space, belong to the scheduler; while the sequence is swapped out, block
    tables name slots. `order` is its place in the order of arrival, which the scheduler gives it; `priority` counts
    among those of its `tenant`. Branches of `ending` leave when nothing moves their blocks any more.
    """

    attempt_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopRule
    top_logprobs: int | None = None
    num_resumed: int = 0
    num_choices: int = 1
    tenant: str = ""
    priority: int = 0
    order: int = 0
    num_steps: int = 0
    is_parked: bool = False
    num_shared: int = 0
    slots: list[int] = field(default_factory=list)
    ending: set[int] = field(default_factory=set)
    branches: list[Branch] = field(init=False)

    def __post_init__(self) -> None:
        first_position = self.num_prompt_tokens + self.num_resumed
        self.branches = [
            Branch(choice=choice, sampling=self.sampling.of_choice(choice), last_position=first_position)
            for choice in range(self.num_choices)
        ]

    @property
    def blocks(self) -> list[int]:
        """What its block tables name, each once: first the shared ones, then those of each branch."""
        first, *others = self.branches
        return first.block_table + [each for other in others for each in other.block_table[self.num_shared :]]

    @property
    def num_blocks(self) -> int:
        """How many these are."""
        num_shared = self.num_shared
        return num_shared + sum(len(branch.block_table) - num_shared for branch in self.branches)

    def blocks_for_step(self, block_size: int) -> int:
        """Blocks that it has to have for its next step."""
        num_shared = self._num_full(block_size)
        return num_shared + sum(branch.blocks_for_step(block_size) - num_shared for branch in self.branches)

    def num_growing(self, block_size: int) -> int:
        """How many branches may come to need more blocks than they have.

        The keys of a branch's very last token are never computed.
        """
        longest = self.num_prompt_tokens + self.stop.max_tokens - 2
        return sum(
            max(longest, branch.last_position) // block_size + 1 > len(branch.block_table) for branch in self.branches
        )

    def num_generated(self, branch: Branch) -> int:
        """Tokens of a branch's output so far."""
        return branch.last_position - self.num_prompt_tokens + 1

    def find(self, choice: int) -> Branch | None:
        """A choice's branch; None when it has left."""
        for branch in self.branches:  # once for every token: a generator would take four times as long
            if branch.choice == choice:
                return branch
        return None

    def settle(self, block_ids: Sequence[int], block_size: int) -> None:
        """Lays the tables out over as many blocks as the first step needs: each branch has one to itself."""
        self.num_shared = self._num_full(block_size)
        shared, own = block_ids[: self.num_shared], block_ids[self.num_shared :]
        for branch, block_id in zip(self.branches, own, strict=True):
            branch.block_table = [*shared, block_id]

    def forks(self, block_size: int) -> list[tuple[int, int]]:
        """Before the first step: what of the prompt lies in blocks that are written to, from which block to which.

        The cache was handed over to the blocks of the first branch.
        """
        if (self.num_prompt_tokens + self.num_resumed) % block_size == 0:
            return []
        first, *others = self.branches
        return [(first.block_table[-1], other.block_table[-1]) for other in others]

    def move(self, ids: Sequence[int]) -> None:
        """Puts other ids, of blocks or of slots, in the places of `blocks`, one for each."""
        shared, own = list(ids[: self.num_shared]), iter(ids[self.num_shared :])
        for branch in self.branches:
            branch.block_table = shared + [next(own) for _ in branch.block_table[self.num_shared :]]

    def extend(self, block_ids: Sequence[int], block_size: int) -> None:
        """Gives the blocks, one each, to the branches that have too few for their next step."""
        needy = [branch for branch in self.branches if len(branch.block_table) < branch.blocks_for_step(block_size)]
        for branch, block_id in zip(needy, block_ids, strict=True):
            branch.block_table.append(block_id)

    def _num_full(self, block_size: int) -> int:
        return (self.num_prompt_tokens + self.num_resumed) // block_size


# Not frozen: one is made for every token, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class NewToken:
    """A token that a step produced; `finish_reason` is set when it is its choice's last.

    With an `error` the sequence cannot go on after it.
    """

    attempt_id: str
    choice: int
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
