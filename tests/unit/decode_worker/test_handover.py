from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.generation import SamplingParams, StopRule
from decode_worker.handover import Handover
from decode_worker.messages import Accept
from decode_worker.sequence import DecodeSequence
from kv_transfer.descriptor import Growth, KVDescriptor
from kv_transfer.transport import ReadResult

STOP = StopRule(max_tokens=4, stop_token_ids=frozenset())


def handover_of(num_tokens: int, theirs: int, ours: int) -> Handover:
    accept = Accept(
        attempt_id="a",
        kv=KVDescriptor(
            lease_id="lease",
            lease_slot=0,
            generation=1,
            worker_id="p",
            incarnation="i",
            address="127.0.0.1:1",
            block_ids=(),
            num_tokens=num_tokens,
            lease_s=5.0,
            is_growing=True,
        ),
        first_token_ids=(),
        source_block_size=theirs,
        sampling=SamplingParams(),
        stop=STOP,
    )
    handover = Handover(accept=accept, block_size=ours, arrived_s=0.0)
    handover.sequence = DecodeSequence(
        attempt_id="a",
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        stop=STOP,
    )
    handover.sequence.branches[0].block_table = list(range(500, 500 + -(-(num_tokens + 4) // ours)))
    return handover


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 60),
    theirs=st.sampled_from([1, 4, 6, 16]),
    ours=st.sampled_from([1, 4, 8, 16, 24]),
    data=st.data(),
)
def test_parts_cover_the_cache_once_and_only_what_is_computed(
    num_tokens: int, theirs: int, ours: int, data: st.DataObject
) -> None:
    handover = handover_of(num_tokens, theirs, ours)
    source_ids = list(range(-(-num_tokens // theirs)))
    told = copied = 0
    filled: list[int] = []
    while not handover.is_done:
        if told < len(source_ids) and (not handover.has_part or data.draw(st.booleans())):
            count = data.draw(st.integers(1, len(source_ids) - told))
            is_last = told + count == len(source_ids)
            handover.grow(Growth(tuple(source_ids[told : told + count]), (7,) if is_last else ()))
            told += count
        if not handover.has_part:
            continue
        part = handover.next_part()
        handover.start(part)
        assert not handover.has_part
        end = copied + part.kv.num_tokens
        assert not part.kv.is_growing
        assert part.kv.first_block * theirs == copied
        assert list(part.kv.block_ids) == source_ids[copied // theirs : -(-end // theirs)]
        assert -(-end // theirs) <= told, "read before it was computed"
        assert len(part.block_ids) == -(-part.kv.num_tokens // ours)
        filled += part.block_ids
        copied = end
        handover.end(ReadResult(transport="t", num_bytes=3, copy_s=0.0))
    assert copied == num_tokens
    assert filled == handover.sequence.branches[0].block_table[: -(-num_tokens // ours)]
    assert handover.num_bytes == 3 * handover.num_parts
