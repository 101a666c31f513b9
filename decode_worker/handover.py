"""One KV cache on its way: what is known of it, and which part of it is to be copied next. No I/O and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decode_worker.messages import Accept
    from decode_worker.sequence import DecodeSequence
    from kv_transfer.descriptor import Growth, KVDescriptor
    from kv_transfer.transport import ReadResult


@dataclass(frozen=True, slots=True)
class Part:
    """Positions that lie in whole blocks on both sides, or reach to the cache's end: to be copied to `block_ids`."""

    kv: KVDescriptor
    block_ids: Sequence[int]


@dataclass(slots=True, kw_only=True)
class Handover:
    """From acceptance until the whole cache is here. One part is under way at a time."""

    accept: Accept
    block_size: int
    arrived_s: float
    sequence: DecodeSequence | None = None
    copy_started_s: float = 0.0
    is_copying: bool = False
    num_copied_tokens: int = 0
    num_bytes: int = 0
    copy_s: float = 0.0
    transport: str = ""
    num_parts: int = 0
    first_token_ids: tuple[int, ...] = ()
    source_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_token_ids = self.accept.first_token_ids

    @property
    def is_done(self) -> bool:
        """Whether all is here: the cache and the first tokens."""
        is_copied = self.num_copied_tokens == self.accept.kv.num_tokens and not self.is_copying
        return is_copied and bool(self.first_token_ids)

    @property
    def has_part(self) -> bool:
        """Whether something can be copied now: there is room, no part is under way, and there is more to be read."""
        has_room = self.sequence is not None and not self.is_copying
        return has_room and self._num_readable_tokens() > self.num_copied_tokens

    @property
    def waits_for_source(self) -> bool:
        """Whether it has its blocks and all that was told is here."""
        return self.sequence is not None and not (self.is_copying or self.has_part or self.is_done)

    def grow(self, growth: Growth) -> None:
        """Takes note of what may be read too."""
        self.source_ids += growth.block_ids
        self.first_token_ids = growth.first_token_ids

    def next_part(self) -> Part:
        """What can be copied now. Only where there `has_part`."""
        assert self.sequence is not None, "it has blocks"
        kv, theirs, ours = self.accept.kv, self.accept.source_block_size, self.block_size
        start, end = self.num_copied_tokens, self._num_readable_tokens()
        block_ids = self.sequence.branches[0].block_table[start // ours : -(-end // ours)]
        if not kv.is_growing:
            return Part(kv, block_ids)
        first = start // theirs
        return Part(kv.part(first, self.source_ids[first : -(-end // theirs)], end - start), block_ids)

    def start(self, part: Part) -> None:
        """The part's copy begins."""
        self.is_copying = True
        self.num_copied_tokens += part.kv.num_tokens

    def end(self, result: ReadResult) -> None:
        """The part that was under way is here."""
        self.is_copying = False
        self.transport = result.transport
        self.num_bytes += result.num_bytes
        self.copy_s += result.copy_s
        self.num_parts += 1

    def _num_readable_tokens(self) -> int:
        kv, theirs = self.accept.kv, self.accept.source_block_size
        num_known = len(self.source_ids) * theirs
        if not kv.is_growing or num_known >= kv.num_tokens:
            return kv.num_tokens
        # A part that ended within a block of either side would have it read or laid out twice.
        stride = math.lcm(theirs, self.block_size)
        return num_known // stride * stride
