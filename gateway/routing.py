"""Which pair of workers serves a request. Pure: a snapshot in, a decision out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.workers import Route, WorkerRole, WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.model import ModelFingerprint
    from baton.core.workers import Ticket, WorkerRecord, WorkerView


class Router:
    """Routes requests for one model to workers that run exactly it."""

    def __init__(self, fingerprint: ModelFingerprint) -> None:
        self._fingerprint = fingerprint

    def choose_route(self, ticket: Ticket, views: Sequence[WorkerView]) -> Route | None:
        """The least loaded pair with credit for the ticket; None when there is none now.

        A prefill worker needs a sequence slot and blocks for the prompt, a decode worker a slot and blocks for
        prompt and output: what it reserves when it takes the sequence over. Ties go to a pair on one host, where
        the handover is cheapest, then by name, so that every gateway decides alike.
        """
        pairs = [
            (
                _load(prefill, decode),
                prefill.record.host_id != decode.record.host_id,
                prefill.record.worker_id,
                decode.record.worker_id,
                route,
            )
            for prefill, decode in self._pairs(views)
            if (route := _route(ticket, prefill, decode)) is not None
        ]
        return min(pairs, key=lambda pair: pair[:4])[4] if pairs else None

    def has_pair(self, views: Sequence[WorkerView]) -> bool:
        """Whether any two workers can serve together, credit aside."""
        return bool(self._pairs(views))

    def most_output_tokens(self, prompt_tokens: int, views: Sequence[WorkerView]) -> int:
        """The most tokens that some pair could generate after such a prompt if it were idle; 0 when none takes it.

        A request that asks for more would wait for ever, and all of its class behind it.
        """
        return max(
            (_room(prompt_tokens, prefill.record, decode.record) for prefill, decode in self._pairs(views)), default=0
        )

    def fits(self, record: WorkerRecord) -> bool:
        """Whether a worker runs the model that this gateway tokenizes for."""
        theirs, ours = record.fingerprint, self._fingerprint
        return (theirs.model, theirs.weights, theirs.tokenizer) == (ours.model, ours.weights, ours.tokenizer)

    def _pairs(self, views: Sequence[WorkerView]) -> list[tuple[WorkerView, WorkerView]]:
        ready = [view for view in views if view.record.state is WorkerState.READY and self.fits(view.record)]
        return [
            (prefill, decode)
            for prefill in ready
            if prefill.record.role is WorkerRole.PREFILL
            for decode in ready
            if decode.record.role is WorkerRole.DECODE and _can_hand_over(prefill.record, decode.record)
        ]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def _can_hand_over(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    # Hosts and block sizes may differ: some transport joins any two, and the reader lays the blocks out anew.
    return prefill.fingerprint.dtype == decode.fingerprint.dtype or decode.converts_dtype


def _route(ticket: Ticket, prefill: WorkerView, decode: WorkerView) -> Route | None:
    request_tokens = ticket.prompt_tokens + ticket.max_tokens
    prefill_blocks = blocks_for(ticket.prompt_tokens, prefill.record.block_size)
    decode_blocks = blocks_for(request_tokens, decode.record.block_size)
    has_credit = (
        prefill.free_seqs >= 1
        and decode.free_seqs >= 1
        and prefill.free_blocks >= prefill_blocks
        and decode.free_blocks >= decode_blocks
        and request_tokens <= min(prefill.record.max_context_tokens, decode.record.max_context_tokens)
    )
    if not has_credit:
        return None
    return Route(
        prefill_id=prefill.record.worker_id,
        decode_id=decode.record.worker_id,
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
    )


def _load(prefill: WorkerView, decode: WorkerView) -> tuple[float, float]:
    """How full a pair is: blocks first, for they stand for tokens, then sequences; each the sum of two shares."""
    blocks = sum(view.granted_blocks / max(1, view.record.num_blocks) for view in (prefill, decode))
    seqs = sum(view.granted_seqs / max(1, view.record.max_num_seqs) for view in (prefill, decode))
    return blocks, seqs


def _room(prompt_tokens: int, prefill: WorkerRecord, decode: WorkerRecord) -> int:
    if blocks_for(prompt_tokens, prefill.block_size) > prefill.num_blocks:
        return 0
    context = min(prefill.max_context_tokens, decode.max_context_tokens, decode.num_blocks * decode.block_size)
    return max(0, context - prompt_tokens)
