"""Whatever arrives, is parked and cancelled, in however small a pool: caches stay what they were, and all get on.

Some have several outputs, which share what the prompt fills, end one by one, and write into nothing of each other's.

The memory is played too: each block and each slot has, for each position in it, who wrote it and what. A swap copies
only when it ends, so a block that is used again before would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.generation import FinishReason, SamplingParams, StopRule
from baton.core.model import blocks_of_choices
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
    choices: int = 1

    @property
    def num_blocks(self) -> int:
        return blocks_of_choices(self.prompt, self.max_tokens, self.choices, BLOCK_SIZE)


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
            num_choices=request.choices,
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
        elif any(branch.num_steps for branch in self.alive[name].branches):  # only tokens make a reader late
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
        self.check_sharing()
        for piece in plan.slices:
            self.check_cache(piece)
            self.write(piece.attempt_id, piece.choice, piece.block_table, piece.start_position)
        is_idle = not (plan.slices or swaps or shed or taken or self.copies or self.swaps)
        if is_idle:
            # A parked sequence keeps its seat, so one that was never taken in may have to wait for its reader.
            stuck = self.alive.keys() - self.parked - (self.scheduler._seats.waiting.keys() if self.parked else set())
            assert not stuck, f"nothing happens, and these want to go on: {stuck}"
        self.check_oldest(plan)
        for token in self.scheduler.commit(plan, [7] * len(plan.slices)):
            if token.finish_reason is not None:
                assert token.finish_reason is FinishReason.LENGTH
                self.end_choice(token.attempt_id, token.choice)
        self.step += 1
        return not is_idle

    def check_oldest(self, plan) -> None:
        """The oldest sequence that has its blocks here goes on in every step, unless room for it is on its way."""
        here = [self.alive[name] for name in self.scheduler._seats.running]
        if here and not self.swaps and not self.copies:
            oldest = min(here, key=lambda each: each.order)
            for branch in oldest.branches:
                assert (oldest.attempt_id, branch.choice) in {(piece.attempt_id, piece.choice) for piece in plan.slices}

    def end_copies(self) -> None:
        for due, name in [each for each in self.copies if each[0] <= self.step]:
            self.copies.remove((due, name))
            sequence = self.alive[name]
            for position in range(sequence.num_prompt_tokens):
                self.write(name, None, sequence.branches[0].block_table, position)
            for source, block_id in sequence.forks(BLOCK_SIZE):
                self.memory[block_id] = list(self.memory[source])
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

    def end_choice(self, name: str, choice: int) -> None:
        if self.scheduler.end_choice(name, choice) is not None:
            self.end(name, "finished")
        elif name in self.scheduler._seats.condemned:  # all others had ended, and a swap runs
            self.cancelled.add(name)

    def write(self, name: str, choice: int | None, table, position: int) -> None:
        block_id = table[position // BLOCK_SIZE]
        assert block_id in self.pool.owned_by(name)
        self.memory.setdefault(block_id, [None] * BLOCK_SIZE)[position % BLOCK_SIZE] = (name, choice, position)

    def check_cache(self, piece) -> None:
        num_prompt = self.alive[piece.attempt_id].num_prompt_tokens
        for position in range(piece.start_position):
            found = self.memory[piece.block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            choice = piece.choice if position >= num_prompt else None
            assert found == (piece.attempt_id, choice, position), f"{piece} finds {found} at {position}"

    def check_sharing(self) -> None:
        """Each block in use is in the table of one branch alone, or filled by the prompt of its sequence."""
        seats = self.scheduler._seats
        here = (seats.copying, seats.running, seats.parked, seats.returning)
        used: list[int] = []
        for sequence in (each for attempts in here for each in attempts.values()):
            shared = sequence.branches[0].block_table[: sequence.num_shared]
            assert len(shared) == sequence.num_prompt_tokens // BLOCK_SIZE
            assert all(branch.block_table[: len(shared)] == shared for branch in sequence.branches)
            own = [each for branch in sequence.branches for each in branch.block_table[len(shared) :]]
            assert set(shared + own) == self.pool.owned_by(sequence.attempt_id)
            used += shared + own
        assert len(set(used)) == len(used)
        assert len(used) + self.scheduler._room._num_soon_free() == self.pool.num_used


REQUESTS = st.builds(
    Request,
    at=st.integers(0, 40),
    prompt=st.integers(1, 20),
    max_tokens=st.integers(2, 28),
    choices=st.sampled_from([1, 1, 1, 2, 3]),
).filter(lambda request: request.num_blocks <= NUM_BLOCKS)


def disturb(worker: Worker, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(worker.alive)))
    match data.draw(st.integers(0, 4)):
        case 0:
            worker.cancel(name)
        case 1:
            worker.end_choice(name, data.draw(st.integers(0, 2)))
        case _:
            worker.toggle(name)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    num_slots=st.sampled_from([0, 1, 4, 9, 200]),
    max_num_seqs=st.integers(3, 8),
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
            disturb(worker, data)
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
            num_seqs = sum(sequence.num_choices for sequence in worker.alive.values())
            if granted + request.num_blocks > NUM_BLOCKS or num_seqs + request.choices > 8:
                break
            pending.pop(0)
            credit[f"a{index}"] = request.num_blocks
            worker.add(f"a{index}", request)
            # What has credit starts at once.
            worker.scheduler.make_room()
            assert [each.attempt_id for each in worker.scheduler.take_in()] == [f"a{index}"]
            worker.copies.append((worker.step + copy_steps, f"a{index}"))
        worker.turn()
        assert not worker.swaps
    assert set(worker.ended.values()) == {"finished"}
    assert worker.scheduler.preemptions.num_swapped == worker.scheduler.preemptions.num_shed == 0
