"""A handover under every order of events: crash, delay, duplicate and reordered messages, reuse of blocks.

Some caches are read as they grow: what is not computed yet holds garbage, and news of what is may be late.

The model has one source (real LeaseTable, real BlockPool) and a reader that copies by pieces through the real
FencedReader. Blocks hold the number of the attempt that wrote them, so a read of the wrong contents shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from baton.core.clock import ManualClock
from baton.core.errors import ResourceExhaustedError
from baton.core.model import KVLayout
from baton.engine.block_pool import BlockPool, OutOfBlocksError
from baton.engine.kv_pool import KVPool
from kv_transfer import fenced
from kv_transfer.descriptor import KVDescriptor, PeerKey
from kv_transfer.destination import copy_on_cpu
from kv_transfer.errors import LeaseNotFoundError, StaleLeaseError
from kv_transfer.fenced import FencedReader
from kv_transfer.lease import EndedLease, Lease, LeaseOutcome, LeaseTable

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32")
NUM_BLOCKS = 8
NUM_SLOTS = 3
LEASE_S = 5.0
GARBAGE = -1.0


class Memory:
    """The source's memory as a reader sees it. `meanwhile` goes on by one at each look at the blocks or a word."""

    name = "test"

    def __init__(self, storage: torch.Tensor) -> None:
        self.words = [0] * NUM_SLOTS
        self.meanwhile: Iterator[None] = iter(())
        self._blocks = storage.view(NUM_BLOCKS, -1)

    @property
    def num_slots(self) -> int:
        return len(self.words)

    @property
    def blocks(self) -> torch.Tensor:
        next(self.meanwhile, None)
        return self._blocks

    def store(self, slot: int, word: int) -> None:
        self.words[slot] = word

    def fence(self, slot: int) -> int:
        next(self.meanwhile, None)
        return self.words[slot]

    def copy(self, destination, runs):
        copy_on_cpu(self.blocks, destination, runs)

    def close(self) -> None:
        pass


class Handover(RuleBasedStateMachine):
    descriptors = Bundle("descriptors")
    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.small_pieces = mock.patch.object(fenced, "PIECE_BYTES", LAYOUT.block_bytes)
        self.small_pieces.start()
        self.clock = ManualClock()
        self.lives = 0
        self.attempts = 0
        self.ended: dict[str, LeaseOutcome] = {}
        self.granted: set[str] = set()
        self.words_seen: set[tuple[str, int, int]] = set()
        self.start_source()

    def see_word(self, lease: Lease) -> None:
        word = (self.peer.incarnation, lease.slot, lease.generation)
        assert lease.generation != 0
        assert word not in self.words_seen, "a slot saw a generation twice"
        self.words_seen.add(word)

    def start_source(self) -> None:
        self.lives += 1
        self.computing: dict[str, list[int]] = {}  # by lease, all blocks of a prompt that is computed
        self.peer = PeerKey("prefill", f"life-{self.lives}")
        storage = torch.zeros(NUM_BLOCKS * LAYOUT.block_bytes, dtype=torch.uint8)
        self.memory = Memory(storage)
        self.source = KVPool(LAYOUT, NUM_BLOCKS, storage=storage)
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.table = LeaseTable(self.memory, self.clock, lease_s=LEASE_S)
        self.reader = FencedReader(self.peer, LAYOUT, self.memory)

    def free(self, ended: EndedLease | None) -> None:
        if ended is None:
            return
        lease = ended.lease
        assert lease.lease_id not in self.ended, "a lease ended twice"
        assert self.memory.words[lease.slot] != lease.generation, "blocks named as ended before the fence was cleared"
        self.ended[lease.lease_id] = ended.outcome
        if lease.is_growing:
            assert lease.lease_id in self.computing, "its computation has the blocks"
            return
        self.pool.free(lease.attempt_id, list(lease.block_ids))

    @rule(target=descriptors, num_tokens=st.integers(1, 6))
    def finish_prefill(self, num_tokens):
        self.attempts += 1
        attempt_id, lease_id = f"attempt-{self.attempts}", f"lease-{self.attempts}"
        try:
            block_ids = self.pool.allocate(attempt_id, LAYOUT.blocks_for(num_tokens))
        except OutOfBlocksError:
            return multiple()
        self.source.tensor[block_ids] = float(self.attempts)
        try:
            lease = self.table.grant(lease_id, attempt_id, block_ids)
        except ResourceExhaustedError:
            self.pool.free(attempt_id, block_ids)
            return multiple()
        self.granted.add(lease_id)
        self.see_word(lease)
        return self.describe(lease, num_tokens)

    def describe(self, lease: Lease, num_tokens: int) -> KVDescriptor:
        return KVDescriptor(
            lease_id=lease.lease_id,
            lease_slot=lease.slot,
            generation=lease.generation,
            worker_id=self.peer.worker_id,
            incarnation=self.peer.incarnation,
            address="",
            block_ids=lease.block_ids,
            num_tokens=num_tokens,
            lease_s=LEASE_S,
        )

    @rule(target=descriptors, num_blocks=st.integers(2, 4))
    def compute_first_chunk(self, num_blocks):
        """The descriptor of what may be read so far; one more comes with each further chunk."""
        self.attempts += 1
        attempt_id, lease_id = f"attempt-{self.attempts}", f"lease-{self.attempts}"
        try:
            block_ids = self.pool.allocate(attempt_id, num_blocks)
        except OutOfBlocksError:
            return multiple()
        self.source.tensor[block_ids] = GARBAGE
        self.source.tensor[block_ids[0]] = float(self.attempts)
        try:
            lease = self.table.grant(lease_id, attempt_id, block_ids[:1], is_growing=True)
        except ResourceExhaustedError:
            self.pool.free(attempt_id, block_ids)
            return multiple()
        self.granted.add(lease_id)
        self.see_word(lease)
        self.computing[lease_id] = block_ids
        return self.describe(lease, LAYOUT.block_size)

    @precondition(lambda self: self.computing)
    @rule(target=descriptors, data=st.data())
    def compute_next_chunk(self, data):
        lease_id = data.draw(st.sampled_from(sorted(self.computing)))
        block_ids, number = self.computing[lease_id], lease_id.removeprefix("lease-")
        index = next(i for i, block_id in enumerate(block_ids) if bool((self.source.tensor[block_id] == GARBAGE).all()))
        self.source.tensor[block_ids[index]] = float(number)
        is_last = index == len(block_ids) - 1
        if is_last:
            del self.computing[lease_id]
        if lease_id in self.ended:  # its reader has given up; the computation had the blocks
            if is_last:
                self.pool.free(f"attempt-{number}", block_ids)
            return multiple()
        lease = self.table.grow(lease_id, block_ids[index : index + 1], is_complete=is_last)
        whole = replace(self.describe(lease, len(block_ids) * LAYOUT.block_size), is_growing=True)
        return whole.part(index, block_ids[index : index + 1], LAYOUT.block_size)

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def cancel_a_computation(self, data):
        self.stop_computing(data.draw(st.sampled_from(sorted(self.computing))))

    def stop_computing(self, lease_id: str) -> None:
        self.free(self.table.release(lease_id, LeaseOutcome.ABANDONED))
        self.pool.free(f"attempt-{lease_id.removeprefix('lease-')}", self.computing.pop(lease_id))

    @rule(target=messages, descriptor=descriptors, kind=st.sampled_from(["renew", "consumed", "abandoned"]))
    def send(self, descriptor, kind):
        return (kind, descriptor)

    @rule(message=messages)
    def deliver_and_keep(self, message):
        """Messages stay in flight: any may arrive late, twice or after a later one."""
        self.apply(message)

    @rule(message=consumes(messages))
    def lose(self, message):
        pass

    def apply(self, message) -> None:
        kind, descriptor = message
        if descriptor.peer != self.peer:  # the servicer answers for former lives by itself
            return
        if kind == "renew":
            live = descriptor.lease_id not in self.ended
            try:
                assert self.table.renew(descriptor.lease_id) == LEASE_S
                assert live
            except LeaseNotFoundError:
                assert not live
        else:
            self.free(self.table.release(descriptor.lease_id, LeaseOutcome(kind)))

    @rule(
        descriptor=descriptors,
        data=st.data(),
        happening=st.sampled_from(["nothing", "expiry", "release", "release and reuse"]),
        at_look=st.integers(0, 7),
    )
    def read(self, descriptor, data, happening, at_look):
        """A read, with one thing happening at the source just before the reader's n-th look at its memory."""
        if descriptor.peer != self.peer:
            return

        def meanwhile():
            yield from [None] * at_look
            if happening == "expiry":
                self.clock.advance(LEASE_S)
                self.sweep()
            elif happening.startswith("release"):
                self.apply(("abandoned", descriptor))
            if happening == "release and reuse":
                self.finish_prefill_unseen()

        self.memory.meanwhile = meanwhile()
        into = KVPool(LAYOUT, NUM_BLOCKS)
        block_ids = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(descriptor.block_ids)]
        try:
            result = self.reader.read(descriptor, into, block_ids)
        except StaleLeaseError:
            assert descriptor.lease_id in self.ended
        else:
            expected = float(descriptor.lease_id.removeprefix("lease-"))
            assert bool((into.tensor[block_ids] == expected).all()), "something else was read as this lease's blocks"
            untouched = sorted(set(range(NUM_BLOCKS)) - set(block_ids))
            assert not into.tensor[untouched].any()
            assert result.num_bytes == len(block_ids) * LAYOUT.block_bytes
        finally:
            self.memory.meanwhile = iter(())

    def finish_prefill_unseen(self) -> None:
        """Another prompt takes every free block at once, and the longest free slot."""
        self.attempts += 1
        attempt_id, lease_id = f"attempt-{self.attempts}", f"lease-{self.attempts}"
        if not self.pool.num_free:  # what was released is still computed
            return
        block_ids = self.pool.allocate(attempt_id, self.pool.num_free)
        self.source.tensor[block_ids] = float(self.attempts)
        try:
            self.table.grant(lease_id, attempt_id, block_ids)
        except ResourceExhaustedError:
            self.pool.free(attempt_id, block_ids)
        else:
            self.granted.add(lease_id)

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def sweep(self):
        for ended in self.table.expire():
            self.free(ended)

    @precondition(lambda self: self.granted)
    @rule()
    def crash_and_restart_source(self):
        """Nothing of the old life's ends is heard; its memory is gone with it."""
        for lease_id in self.granted - set(self.ended):
            self.ended[lease_id] = LeaseOutcome.ABANDONED
        self.start_source()

    @invariant()
    def nothing_leaks(self):
        live = self.granted - set(self.ended)
        assert self.table.num_active == len(live)
        assert len([word for word in self.memory.words if word]) == len(live)
        self.table.check_integrity()
        self.pool.check_integrity()

    def teardown(self):
        self.small_pieces.stop()
        for lease_id in list(self.computing):
            self.stop_computing(lease_id)
        self.clock.advance(LEASE_S)
        self.sweep()
        assert self.pool.num_used == 0
        assert not any(self.memory.words)
        assert self.granted == set(self.ended)


TestHandover = Handover.TestCase
TestHandover.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
