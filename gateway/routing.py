"""Which pair of workers serves a request. Pure: a snapshot in, a decision out."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

from baton.core.model import blocks_of_choices
from baton.core.workers import Route, WorkerRole, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from baton.core.model import ModelFingerprint
    from baton.core.workers import Ticket, WorkerRecord, WorkerView

# An enumeration looks its members up slowly, and these are asked for once for each worker.
_READY, _PREFILL = WorkerState.READY, WorkerRole.PREFILL


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
        # What a grant takes of a worker: the prompt's blocks, and on the decode side those of a share of each output.
        num_output = math.ceil(ticket.max_tokens * self._share)
        prefill_blocks = cache(partial(blocks_for, ticket.prompt_tokens))
        decode_blocks = cache(partial(blocks_of_choices, ticket.prompt_tokens, num_output, ticket.num_choices))
        best: tuple[_Rank, WorkerView, WorkerView] | None = None
        for prefills, decodes in self.sides(views, ticket.avoids):
            least = _best_pair(
                ticket,
                _least_loaded(prefills, _work(prefills, ticket), ticket, 1, prefill_blocks),
                _least_loaded(decodes, _memory(decodes), ticket, ticket.num_choices, decode_blocks),
            )
            if least is not None and (best is None or least[0] < best[0]):
                best = least
        if best is None:
            return None
        _, prefill, decode = best
        return Route(
            prefill_id=prefill.record.worker_id,
            decode_id=decode.record.worker_id,
            prefill_blocks=prefill_blocks(prefill.record.block_size),
            decode_blocks=decode_blocks(decode.record.block_size),
            prefill_tokens=ticket.uncached_tokens(prefill.record),
        )

    def has_pair(self, views: Sequence[WorkerView]) -> bool:
        """Whether any two workers can serve together, credit aside."""
        return any(decodes for _, decodes in self.sides(views))

    def most_choices(self, views: Sequence[WorkerView]) -> int:
        """The most outputs of one prompt that some decode worker could generate at a time."""
        return max((d.record.max_num_seqs for _, decodes in self.sides(views) for d in decodes), default=0)

    def most_output_tokens(self, prompt_tokens: int, views: Sequence[WorkerView], *, num_choices: int = 1) -> int:
        """The most tokens of each output that some pair could generate after such a prompt if it were idle.

        0 when none takes it. A request that asks for more would wait for ever, and all of its class behind it.
        """
        rooms = [0]
        for prefills, decodes in self.sides(views):
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

    def sides(
        self, views: Sequence[WorkerView], avoids: Collection[str] = ()
    ) -> Iterator[tuple[Sequence[WorkerView], Sequence[WorkerView]]]:
        """Prefill workers that compute alike, and the decode workers that can take over from any of them.

        Hosts and block sizes may differ: some transport joins any two, and the reader lays the blocks out anew.
        Lives that are in `avoids` are left out.
        """
        # Workers of one deployment mostly share one fingerprint, so it is looked into once, not for each of them.
        sharing: dict[int, _Group] = {}
        fingerprint, group = None, _new_group()
        for view in views:
            record = view.record
            if record.fingerprint is not fingerprint:
                fingerprint = record.fingerprint
                group = sharing.setdefault(id(fingerprint), _new_group())
            if record.state is _READY and record.incarnation not in avoids:
                group[0 if record.role is _PREFILL else 2 if record.converts_dtype else 1].append(view)
        by_numerics: dict[tuple[str, str], tuple[list[WorkerView], list[WorkerView]]] = {}
        all_converters: list[WorkerView] = []
        for prefills, decodes, converters in sharing.values():
            first = next(iter(prefills or decodes or converters), None)
            if first is not None and self.fits(first.record):
                alike = by_numerics.setdefault(first.record.fingerprint.numerics, ([], []))
                alike[0].extend(prefills)
                alike[1].extend(decodes)
                all_converters += converters
        for prefills, decodes in by_numerics.values():
            if prefills:
                yield prefills, decodes + all_converters


_Load: TypeAlias = tuple[float, float]
# Prefill workers, decode workers, and decode workers that convert.
_Group: TypeAlias = "tuple[list[WorkerView], list[WorkerView], list[WorkerView]]"
_Turn: TypeAlias = tuple[int, str]
_Rank: TypeAlias = tuple[float, float, float, bool, _Turn, _Turn]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def _capacity(record: WorkerRecord, prompt_tokens: int, num_choices: int) -> int:
    """The most positions, those of the prompt included, that each output could have in the whole pool."""
    num_shared = prompt_tokens // record.block_size
    return (num_shared + (record.num_blocks - num_shared) // num_choices) * record.block_size


def _new_group() -> _Group:
    return [], [], []


def _least_loaded(
    views: Sequence[WorkerView], loads: Sequence[float], ticket: Ticket, num_seqs: int, blocks_of: Callable[[int], int]
) -> tuple[_Load, list[WorkerView]]:
    """Of the workers with credit those with the least load, and that load: of work or of memory, then of sequences.

    `loads` has the former of each. A worker must have `num_seqs` slots, and blocks, of which the number follows from
    their size.
    """
    least: _Load = (math.inf, math.inf)
    found: list[WorkerView] = []
    longest = ticket.prompt_tokens + ticket.max_tokens
    for work_or_memory, view in zip(loads, views, strict=True):
        if work_or_memory > least[0]:
            continue
        # Where requests wait most workers have no slot left, so that comes first.
        record, granted_seqs = view.record, view.granted_seqs
        max_num_seqs = record.max_num_seqs
        if granted_seqs + num_seqs > max_num_seqs or longest > record.max_context_tokens:
            continue
        load = (work_or_memory, granted_seqs / max_num_seqs)
        if load > least:
            continue
        if view.free_blocks >= blocks_of(record.block_size):
            if load < least:
                least, found = load, []
            found.append(view)
    return least, found


def _work(views: Sequence[WorkerView], ticket: Ticket) -> list[float]:
    """The tokens that each prefill worker has to compute until the ticket's prompt is done."""
    if not ticket.cached:
        prompt_tokens = ticket.prompt_tokens
        return [view.granted_tokens + prompt_tokens for view in views]
    return [view.granted_tokens + ticket.uncached_tokens(view.record) for view in views]


def _memory(views: Sequence[WorkerView]) -> list[float]:
    """The share of each decode worker's blocks that is taken."""
    return [view.granted_blocks / (view.record.num_blocks or 1) for view in views]


def _best_pair(
    ticket: Ticket, prefills: tuple[_Load, list[WorkerView]], decodes: tuple[_Load, list[WorkerView]]
) -> tuple[_Rank, WorkerView, WorkerView] | None:
    """Of the least loaded workers of either side the pair that goes first, and its rank; None when a side has none."""
    (prefill_load, least_prefills), (decode_load, least_decodes) = prefills, decodes
    if not least_prefills or not least_decodes:
        return None
    first_prefill, first_decode = _first_by_host(least_prefills, ticket), _first_by_host(least_decodes, ticket)
    shared = first_prefill.keys() & first_decode.keys()
    if shared:
        host = min(shared, key=lambda name: (first_prefill[name][0], first_decode[name][0]))
        prefill, decode = first_prefill[host], first_decode[host]
    else:
        prefill, decode = min(first_prefill.values(), key=_turn), min(first_decode.values(), key=_turn)
    rank = (
        prefill_load[0],
        decode_load[0],
        prefill_load[1] + decode_load[1],
        not shared,
        prefill[0],
        decode[0],
    )
    return rank, prefill[1], decode[1]


def _first_by_host(views: Iterable[WorkerView], ticket: Ticket) -> dict[str, tuple[_Turn, WorkerView]]:
    """By host whose turn is first, and that turn: of prefill workers by lot, of decode workers by name."""
    beginning = crc32(f"{ticket.attempt_id}/".encode())
    first: dict[str, tuple[_Turn, WorkerView]] = {}
    for view in views:
        name, host_id = view.record.worker_id, view.record.host_id
        turn = (crc32(name.encode(), beginning) if view.record.role is _PREFILL else 0, name)
        known = first.get(host_id)
        if known is None or turn < known[0]:
            first[host_id] = (turn, view)
    return first


def _turn(candidate: tuple[_Turn, WorkerView]) -> _Turn:
    return candidate[0]


def _holds(record: WorkerRecord, prompt_tokens: int) -> bool:
    return blocks_for(prompt_tokens, record.block_size) <= record.num_blocks
