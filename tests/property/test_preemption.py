"""Whatever arrives, is parked and cancelled, in however small a pool: caches stay what they were, and all get on.

The memory is played too: each block and each slot has, for each position in it, who wrote it and what. A swap copies
only when it ends, so a block that is used again before would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.generation import FinishReason, SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, Swap

BLOCK_SIZE = 4
NUM_BLOCKS = 12


@dataclass
class Request:
    at: int
    prompt: int
    max_tokens: int

    @property
    def num_positions(self) -> int:
        return self.prompt + self.max_tokens


@dataclass
class Worker:
    num_slots: int
    max_num_seqs: int
    copy_steps: int
    swap_steps: int
    memory: dict[int, list[object]] = field(default_factory=dict)
    saved: dict[int, list[object]] = field(default_factory=dict)
    copies: list[tuple[int, str]] = field(default_factory=list)
    swaps: list[tuple[int, Swap]] = field(default_factory=list)
    alive: dict[str, DecodeSequence] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    parked: set[str] = field(default_factory=set)
    step: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.swap = BlockPool(self.num_slots, BLOCK_SIZE) if self.num_slots else None
        self.scheduler = DecodeScheduler(self.pool, self.max_num_seqs, self.swap)

    def add(self, name: str, request: Request) -> None:
        sequence = DecodeSequence(
            attempt_id=name,
            num_prompt_tokens=request.prompt,
            last_token_id=1,
            sampling=SamplingParams(),
            stop=StopRule(max_tokens=request.max_tokens, stop_token_ids=frozenset()),
        )
        self.alive[name] = sequence
        self.scheduler.add(sequence)

    def end(self, name: str, how: str) -> None:
        del self.alive[name]
        self.ended[name] = how
        self.parked.discard(name)

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        if self.scheduler.remove(name) is not None:
            self.end(name, "cancelled")

    def toggle(self, name: str) -> None:
        if name in self.parked:
            self.scheduler.resume(name)
            self.parked.discard(name)
        elif self.alive[name].num_generated > 1:  # only tokens make a reader late
            self.scheduler.park(name)
            self.parked.add(name)

    def turn(self) -> bool:
        """Whether anything happened."""
        self.end_copies()
        swaps, shed = self.scheduler.make_room()
        self.swaps += [(self.step + self.swap_steps, each) for each in swaps]
        for sequence in shed:
            self.end(sequence.attempt_id, "shed")
        taken = self.scheduler.take_in()
        self.copies += [(self.step + self.copy_steps, each.attempt_id) for each in taken]
        plan = self.scheduler.plan()
        plan.assert_fits(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        for piece in plan.slices:
            self.check_cache(piece.attempt_id, piece.block_table, piece.start_position)
            self.write(piece.attempt_id, piece.block_table, piece.start_position)
        is_idle = not (plan.slices or swaps or shed or taken or self.copies or self.swaps)
        if is_idle:
            # A parked sequence keeps its seat, so one that was never taken in may have to wait for its reader.
            stuck = self.alive.keys() - self.parked - (self.scheduler._waiting.keys() if self.parked else set())
            assert not stuck, f"nothing happens, and these want to go on: {stuck}"
        self.check_oldest(plan)
        for token in self.scheduler.commit(plan, [7] * len(plan.slices)):
            if token.finish_reason is not None:
                assert token.finish_reason is FinishReason.LENGTH
                self.scheduler.remove(token.attempt_id)
                self.end(token.attempt_id, "finished")
        self.step += 1
        return not is_idle

    def check_oldest(self, plan) -> None:
        """The oldest sequence that has its blocks here goes on in every step, unless room for it is on its way."""
        here = [self.alive[name] for name in self.scheduler._running]
        if here and not self.swaps and not self.copies:
            oldest = min(here, key=lambda each: each.order)
            assert oldest.attempt_id in {piece.attempt_id for piece in plan.slices}

    def end_copies(self) -> None:
        for due, name in [each for each in self.copies if each[0] <= self.step]:
            self.copies.remove((due, name))
            sequence = self.alive[name]
            for position in range(sequence.num_prompt_tokens):
                self.write(name, sequence.block_table, position)
            if not self.scheduler.end_copy(name, join=True):
                self.end(name, "cancelled")
        for due, swap in [each for each in self.swaps if each[0] <= self.step]:
            self.swaps.remove((due, swap))
            source, ids = (self.memory, swap.block_ids) if swap.is_out else (self.saved, swap.slots)
            target, to = (self.saved, swap.slots) if swap.is_out else (self.memory, swap.block_ids)
            contents = [list(source.get(each, [None] * BLOCK_SIZE)) for each in ids]
            target.update(zip(to, contents, strict=True))
            if not self.scheduler.end_swap(swap.attempt_id, succeeded=True):
                self.end(swap.attempt_id, "cancelled")

    def write(self, name: str, table, position: int) -> None:
        block_id = table[position // BLOCK_SIZE]
        assert block_id in self.pool.owned_by(name)
        self.memory.setdefault(block_id, [None] * BLOCK_SIZE)[position % BLOCK_SIZE] = (name, position)

    def check_cache(self, name: str, table, end: int) -> None:
        for position in range(end):
            found = self.memory[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert found == (name, position), f"{name} finds {found} at {position}"


REQUESTS = st.builds(Request, at=st.integers(0, 40), prompt=st.integers(1, 20), max_tokens=st.integers(2, 28))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    num_slots=st.sampled_from([0, 1, 4, 9, 200]),
    max_num_seqs=st.integers(1, 8),
    delays=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    data=st.data(),
)
def test_all_get_on_and_find_their_caches_as_they_left_them(requests, num_slots, max_num_seqs, delays, data):
    worker = Worker(num_slots, max_num_seqs, *delays)
    pending = sorted(enumerate(requests), key=lambda each: each[1].at)
    is_eventful = data.draw(st.booleans())
    while pending or worker.alive:
        assert worker.step < 3000
        while pending and pending[0][1].at <= worker.step:
            index, request = pending.pop(0)
            worker.add(f"a{index}", request)
        if is_eventful and worker.step < 100 and worker.alive and data.draw(st.integers(0, 4)) == 0:
            name = data.draw(st.sampled_from(sorted(worker.alive)))
            worker.toggle(name) if data.draw(st.integers(0, 3)) else worker.cancel(name)
        if not worker.turn() or worker.step >= 100:
            for name in sorted(worker.parked):
                worker.toggle(name)
    assert len(worker.ended) == len(requests)
    assert all(name in worker.cancelled for name, how in worker.ended.items() if how == "cancelled")
    if num_slots == 200:
        assert "shed" not in worker.ended.values()
    for pool in (worker.pool, worker.swap):
        if pool is not None:
            pool.check_integrity()
            assert pool.num_used == 0


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    num_slots=st.sampled_from([0, 9]),
    copy_steps=st.integers(0, 3),
)
def test_with_credit_for_whole_answers_nobody_gives_way(requests, num_slots, copy_steps):
    worker = Worker(num_slots, 8, copy_steps, 1)
    pending = sorted(enumerate(requests), key=lambda each: each[1].at)
    credit: dict[str, int] = {}
    while pending or worker.alive:
        assert worker.step < 3000
        while pending and pending[0][1].at <= worker.step:
            index, request = pending[0]
            granted = sum(blocks for name, blocks in credit.items() if name in worker.alive)
            wanted = -(-request.num_positions // BLOCK_SIZE)
            if granted + wanted > NUM_BLOCKS or len(worker.alive) == 8:
                break
            pending.pop(0)
            credit[f"a{index}"] = wanted
            worker.add(f"a{index}", request)
            # What has credit starts at once.
            worker.scheduler.make_room()
            assert [each.attempt_id for each in worker.scheduler.take_in()] == [f"a{index}"]
            worker.copies.append((worker.step + copy_steps, f"a{index}"))
        worker.turn()
        assert not worker.swaps
    assert set(worker.ended.values()) == {"finished"}
    assert worker.scheduler.preemptions.num_swapped == worker.scheduler.preemptions.num_shed == 0
