"""Which pair of workers serves a request. Pure: a snapshot in, a decision out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

from baton.core.model import blocks_of_choices
from baton.core.workers import Route, WorkerRole, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from baton.core.model import ModelFingerprint
    from baton.core.workers import Ticket, WorkerRecord, WorkerView


class Router:
    """Routes requests for one model to workers that run exactly it.

    `reserved_output_share`, above 0 and up to 1: how much of its longest output a request has decode blocks reserved
    for. Below 1 the workers are overcommitted, and preempt when outputs are longer than that.
    """

    def __init__(self, fingerprint: ModelFingerprint, *, reserved_output_share: float = 1.0) -> None:
        self._fingerprint = fingerprint
        self._share = reserved_output_share

    def choose_route(self, ticket: Ticket, views: Sequence[WorkerView]) -> Route | None:
        """The least loaded pair with credit for the ticket; None when there is none now.

        On the prefill side it is the worker with the least to compute until the prompt is done: what it has been
        granted and not given back, and what it should not have cached of this prompt. So a prompt goes where its
        beginning is, unless so much waits there that another worker is as fast without. On the decode side it is the
        one whose blocks are least taken.

        A prefill worker needs a sequence slot and blocks for the prompt, a decode worker a slot for each output and
        blocks for the prompt and the reserved share of the outputs. Ties go to a pair on one host, where
        the handover is cheapest, then to prefill workers by lot, so that all caches fill, and to decode workers by
        name; the lot is the ticket's, so that every gateway decides alike. Lives of workers that the ticket avoids are
        left out. Takes time in proportion to the number of workers, not of pairs: the sides are chosen apart.
        """
        best: tuple[_Rank, WorkerView, WorkerView] | None = None
        for prefills, decodes in self._sides([view for view in views if view.record.incarnation not in ticket.avoids]):
            least = _best_pair(
                ticket, _least_loaded(prefills, ticket, self._share), _least_loaded(decodes, ticket, self._share)
            )
            if least is not None and (best is None or least[0] < best[0]):
                best = least
        if best is None:
            return None
        _, prefill, decode = best
        return Route(
            prefill_id=prefill.record.worker_id,
            decode_id=decode.record.worker_id,
            prefill_blocks=_blocks_of(prefill, ticket, self._share),
            decode_blocks=_blocks_of(decode, ticket, self._share),
            prefill_tokens=ticket.uncached_tokens(prefill.record),
        )

    def has_pair(self, views: Sequence[WorkerView]) -> bool:
        """Whether any two workers can serve together, credit aside."""
        return any(decodes for _, decodes in self._sides(views))

    def most_choices(self, views: Sequence[WorkerView]) -> int:
        """The most outputs of one prompt that some decode worker could generate at a time."""
        return max((d.record.max_num_seqs for _, decodes in self._sides(views) for d in decodes), default=0)

    def most_output_tokens(self, prompt_tokens: int, views: Sequence[WorkerView], *, num_choices: int = 1) -> int:
        """The most tokens of each output that some pair could generate after such a prompt if it were idle.

        0 when none takes it. A request that asks for more would wait for ever, and all of its class behind it.
        """
        rooms = [0]
        for prefills, decodes in self._sides(views):
            contexts = [view.record.max_context_tokens for view in prefills if _holds(view.record, prompt_tokens)]
            capacities = [
                min(view.record.max_context_tokens, _capacity(view.record, prompt_tokens, num_choices))
                for view in decodes
                if view.record.max_num_seqs >= num_choices
            ]
            if contexts and capacities:
                rooms.append(min(max(contexts), max(capacities)) - prompt_tokens)
        return max(rooms)

    def fits(self, record: WorkerRecord) -> bool:
        """Whether a worker runs the model that this gateway tokenizes for."""
        theirs, ours = record.fingerprint, self._fingerprint
        return (theirs.model, theirs.weights, theirs.tokenizer) == (ours.model, ours.weights, ours.tokenizer)

    def _sides(self, views: Sequence[WorkerView]) -> Iterator[tuple[list[WorkerView], list[WorkerView]]]:
        """Prefill workers that compute alike, and the decode workers that can take over from any of them.

        Hosts and block sizes may differ: some transport joins any two, and the reader lays the blocks out anew.
        """
        by_numerics: dict[tuple[str, str], list[WorkerView]] = {}
        decodes = []
        for view in views:
            if view.record.state is not WorkerState.READY or not self.fits(view.record):
                continue
            if view.record.role is WorkerRole.PREFILL:
                by_numerics.setdefault(view.record.fingerprint.numerics, []).append(view)
            else:
                decodes.append(view)
        for numerics, prefills in by_numerics.items():
            takers = [d for d in decodes if d.record.converts_dtype or d.record.fingerprint.numerics == numerics]
            yield prefills, takers


_Load: TypeAlias = tuple[float, float]
_Turn: TypeAlias = tuple[int, str]
_Rank: TypeAlias = tuple[float, float, float, bool, _Turn, _Turn]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def _blocks_of(view: WorkerView, ticket: Ticket, share: float) -> int:
    """What a grant takes of a worker: the prompt's blocks, and on the decode side those of a share of each output."""
    if view.record.role is WorkerRole.PREFILL:
        return blocks_for(ticket.prompt_tokens, view.record.block_size)
    num_output = math.ceil(ticket.max_tokens * share)
    return blocks_of_choices(ticket.prompt_tokens, num_output, ticket.num_choices, view.record.block_size)


def _capacity(record: WorkerRecord, prompt_tokens: int, num_choices: int) -> int:
    """The most positions, those of the prompt included, that each output could have in the whole pool."""
    num_shared = prompt_tokens // record.block_size
    return (num_shared + (record.num_blocks - num_shared) // num_choices) * record.block_size


def _has_credit(view: WorkerView, ticket: Ticket, share: float) -> bool:
    return (
        view.free_seqs >= (1 if view.record.role is WorkerRole.PREFILL else ticket.num_choices)
        and view.free_blocks >= _blocks_of(view, ticket, share)
        and ticket.prompt_tokens + ticket.max_tokens <= view.record.max_context_tokens
    )


def _least_loaded(views: Iterable[WorkerView], ticket: Ticket, share: float) -> tuple[_Load, list[WorkerView]]:
    """Of the workers with credit those with the least load, and that load: of work or of memory, then of sequences."""
    least: _Load = (math.inf, math.inf)
    found: list[WorkerView] = []
    for view in views:
        load = (_work_or_memory(view, ticket), view.granted_seqs / max(1, view.record.max_num_seqs))
        if load <= least and _has_credit(view, ticket, share):
            if load < least:
                least, found = load, []
            found.append(view)
    return least, found


def _work_or_memory(view: WorkerView, ticket: Ticket) -> float:
    if view.record.role is WorkerRole.PREFILL:
        return view.granted_tokens + ticket.uncached_tokens(view.record)
    return view.granted_blocks / max(1, view.record.num_blocks)


def _best_pair(
    ticket: Ticket, prefills: tuple[_Load, list[WorkerView]], decodes: tuple[_Load, list[WorkerView]]
) -> tuple[_Rank, WorkerView, WorkerView] | None:
    """Of the least loaded workers of either side the pair that goes first, and its rank; None when a side has none."""
    (prefill_load, least_prefills), (decode_load, least_decodes) = prefills, decodes
    if not least_prefills or not least_decodes:
        return None
    first_prefill = _first_by_host(least_prefills, ticket)
    first_decode = _first_by_host(least_decodes, ticket)
    shared = first_prefill.keys() & first_decode.keys()
    if shared:
        host = min(shared, key=lambda name: (_turn(first_prefill[name], ticket), _turn(first_decode[name], ticket)))
        prefill, decode = first_prefill[host], first_decode[host]
    else:
        prefill = min(first_prefill.values(), key=lambda view: _turn(view, ticket))
        decode = min(first_decode.values(), key=lambda view: _turn(view, ticket))
    rank = (
        prefill_load[0],
        decode_load[0],
        prefill_load[1] + decode_load[1],
        not shared,
        _turn(prefill, ticket),
        _turn(decode, ticket),
    )
    return rank, prefill, decode


def _first_by_host(views: Iterable[WorkerView], ticket: Ticket) -> dict[str, WorkerView]:
    first: dict[str, WorkerView] = {}
    for view in views:
        known = first.get(view.record.host_id)
        if known is None or _turn(view, ticket) < _turn(known, ticket):
            first[view.record.host_id] = view
    return first


def _turn(view: WorkerView, ticket: Ticket) -> _Turn:
    name = view.record.worker_id
    return crc32(f"{ticket.attempt_id}/{name}".encode()) if view.record.role is WorkerRole.PREFILL else 0, name


def _holds(record: WorkerRecord, prompt_tokens: int) -> bool:
    return blocks_for(prompt_tokens, record.block_size) <= record.num_blocks
