from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.model import ModelFingerprint
from baton.core.workers import Route, Ticket, WorkerRecord, WorkerRole, WorkerState, WorkerView
from gateway.routing import Router

OURS = ModelFingerprint(model="m", weights="w", tokenizer="t", dtype="", quantization="")
ROUTER = Router(OURS)
TICKET = Ticket(attempt_id="a", request_id="r", queue_class="chat", prompt_tokens=33, max_tokens=31)


def view(
    worker_id: str, *, granted_blocks: int = 0, granted_seqs: int = 0, granted_tokens: int = 0, **changes: Any
) -> WorkerView:
    """A ready worker; its role by the first letter of its id."""
    record = WorkerRecord(
        worker_id=worker_id,
        incarnation="i",
        role=WorkerRole.PREFILL if worker_id.startswith("p") else WorkerRole.DECODE,
        state=WorkerState.READY,
        address="a:1",
        host_id="host",
        fingerprint=replace(OURS, dtype="float32"),
        block_size=16,
        num_blocks=10,
        max_num_seqs=2,
        max_context_tokens=8192,
    )
    return WorkerView(
        record=replace(record, **changes),
        granted_blocks=granted_blocks,
        granted_seqs=granted_seqs,
        heartbeat_age_s=0.1,
        granted_tokens=granted_tokens,
    )


def test_a_route_takes_blocks_for_the_prompt_and_for_all() -> None:
    expected = Route(prefill_id="p1", decode_id="d1", prefill_blocks=3, decode_blocks=4, prefill_tokens=33)
    assert ROUTER.choose_route(TICKET, [view("p1"), view("d1")]) == expected


@pytest.mark.parametrize(("share", "blocks"), [(0.01, 3), (0.5, 4), (0.48, 3), (1.0, 4)])
def test_of_the_output_a_share_is_reserved_and_may_not_exceed_the_context(share: float, blocks: int) -> None:
    router = Router(OURS, reserved_output_share=share)  # 33 + 31 tokens
    route = router.choose_route(TICKET, [view("p1"), view("d1", num_blocks=blocks)])
    assert route is not None
    assert (route.prefill_blocks, route.decode_blocks) == (3, blocks)
    assert router.choose_route(TICKET, [view("p1"), view("d1", num_blocks=blocks - 1)]) is None
    assert router.choose_route(TICKET, [view("p1"), view("d1", max_context_tokens=63)]) is None


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"granted_seqs": 2}, {}),
        ({"granted_blocks": 8}, {}),
        ({}, {"granted_seqs": 2}),
        ({}, {"granted_blocks": 7}),
        ({}, {"max_context_tokens": 63}),
        ({"state": WorkerState.DRAINING}, {}),
        ({}, {"state": WorkerState.DRAINING}),
        ({"fingerprint": replace(OURS, tokenizer="x")}, {}),
        ({}, {"fingerprint": replace(OURS, weights="x")}),
        ({}, {"fingerprint": replace(OURS, dtype="bfloat16")}),
        ({}, {"fingerprint": replace(OURS, dtype="float32", quantization="int8")}),
    ],
)
def test_no_route_without_credit_and_fit_on_both_sides(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    assert ROUTER.choose_route(TICKET, [view("p1", **prefill), view("d1", **decode)]) is None


@pytest.mark.parametrize("edge", [{"granted_blocks": 6, "granted_seqs": 1}, {"max_context_tokens": 64}])
def test_credit_may_be_used_up_to_its_end(edge: dict[str, Any]) -> None:
    assert ROUTER.choose_route(TICKET, [view("p1"), view("d1", **edge)]) is not None


def test_the_least_loaded_pair_wins_whatever_the_order() -> None:
    views = [view("p1", granted_tokens=80), view("p2"), view("d1"), view("d2", granted_blocks=1)]
    for order in (views, views[::-1]):
        route = ROUTER.choose_route(TICKET, order)
        assert (route.prefill_id, route.decode_id) == ("p2", "d1")


def test_ties_go_by_lot_and_all_gateways_agree() -> None:
    views = [view(name) for name in ("p2", "d2", "p1", "d1", "p3")]
    tickets = [replace(TICKET, attempt_id=f"a{number}") for number in range(90)]
    routes = [ROUTER.choose_route(ticket, views) for ticket in tickets]
    assert [ROUTER.choose_route(ticket, views[::-1]) for ticket in tickets] == routes
    assert {route.decode_id for route in routes} == {"d1"}
    by_worker = Counter(route.prefill_id for route in routes)
    assert len(by_worker) == 3
    assert min(by_worker.values()) >= 15


def test_hosts_block_sizes_and_with_consent_numerics_may_differ() -> None:
    # 64 tokens of prompt and output: 2 blocks of 32.
    numerics = {"dtype": "bfloat16", "quantization": "int8"}
    other = {"host_id": "elsewhere", "block_size": 32, "fingerprint": replace(OURS, **numerics)}
    route = ROUTER.choose_route(TICKET, [view("p1"), view("d1", converts_dtype=True, **other)])
    assert route.decode_blocks == 2


def test_a_pair_on_one_host_wins_among_equals_only() -> None:
    views = [view("p1", host_id="a"), view("p2", host_id="b"), view("d1", host_id="b")]
    assert ROUTER.choose_route(TICKET, views).prefill_id == "p2"
    loaded = [view("p1", host_id="a"), view("p2", host_id="b", granted_tokens=5), view("d1", host_id="b")]
    assert ROUTER.choose_route(TICKET, loaded).prefill_id == "p1"


def test_has_pair_looks_past_credit() -> None:
    assert ROUTER.has_pair([view("p1", granted_seqs=2), view("d1", granted_blocks=10)])
    assert not ROUTER.has_pair([view("p1"), view("p2")])
    assert not ROUTER.has_pair([])


def test_most_output_tokens_is_what_an_idle_pair_could_hold() -> None:
    busy = [view("p1", granted_blocks=10), view("d1", granted_blocks=10)]
    assert ROUTER.most_output_tokens(60, busy) == 100
    assert ROUTER.most_output_tokens(160, busy) == 0
    # The prompt does not fit the prefill worker's pool.
    assert ROUTER.most_output_tokens(60, [view("p1", num_blocks=3), view("d1")]) == 0
    assert ROUTER.most_output_tokens(60, [view("p1"), view("d1", max_context_tokens=64)]) == 4
    assert ROUTER.most_output_tokens(1, []) == 0


WORKERS = st.builds(
    view,
    st.builds("{}{}".format, st.sampled_from("pd"), st.integers(0, 9)),
    granted_blocks=st.integers(0, 8),
    granted_seqs=st.integers(0, 2),
    granted_tokens=st.sampled_from((0, 20, 40)),
    incarnation=st.sampled_from(("i1", "i2", "i3")),
    host_id=st.sampled_from(("h1", "h2", "h3")),
    fingerprint=st.builds(
        lambda tokenizer, *numerics: replace(OURS, tokenizer=tokenizer, dtype=numerics[0], quantization=numerics[1]),
        st.sampled_from("tttx"),
        st.sampled_from(("float32", "bfloat16")),
        st.sampled_from(("none", "int8")),
    ),
    state=st.sampled_from((WorkerState.READY,) * 4 + (WorkerState.DRAINING,)),
    converts_dtype=st.booleans(),
    num_blocks=st.sampled_from((8, 16)),
    block_size=st.sampled_from((8, 16)),
    max_context_tokens=st.sampled_from((40, 64, 8192)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(WORKERS, max_size=14, unique_by=lambda view: view.record.worker_id),
    st.integers(1, 60),
    st.sampled_from((0, 20)),
    st.sampled_from((frozenset(), frozenset({"i3"}))),
    st.sampled_from((1.0, 0.5)),
)
def test_the_choice_is_that_of_a_search_over_all_pairs(
    views: list[WorkerView], prompt_tokens: int, cached: int, avoids: frozenset[str], share: float
) -> None:
    cached = min(cached, prompt_tokens)
    router = Router(OURS, reserved_output_share=share)
    ticket = replace(TICKET, prompt_tokens=prompt_tokens, cached={"i1": cached} if cached else {}, avoids=avoids)
    usable = [w for w in views if w.record.state is WorkerState.READY and w.record.fingerprint.tokenizer == "t"]
    pairs = [
        (p, d)
        for p in usable
        for d in usable
        if p.record.role is WorkerRole.PREFILL
        and d.record.role is WorkerRole.DECODE
        and (d.record.converts_dtype or p.record.fingerprint.numerics == d.record.fingerprint.numerics)
    ]

    def rank(p: WorkerView, d: WorkerView) -> Any:
        work = p.granted_tokens + prompt_tokens - (cached if p.record.incarnation == "i1" else 0)
        lot = crc32(f"{ticket.attempt_id}/{p.record.worker_id}".encode())
        names = (lot, p.record.worker_id, d.record.worker_id)
        return (
            work,
            Fraction(d.granted_blocks, d.record.num_blocks),
            p.granted_seqs + d.granted_seqs,
            p.record.host_id != d.record.host_id,
            *names,
        )

    def fits(p: WorkerView, d: WorkerView) -> bool:
        needs = [(p, prompt_tokens), (d, prompt_tokens + math.ceil(TICKET.max_tokens * share))]
        return all(
            w.free_seqs > 0
            and w.record.incarnation not in avoids
            and w.free_blocks * w.record.block_size >= tokens
            and prompt_tokens + TICKET.max_tokens <= w.record.max_context_tokens
            for w, tokens in needs
        )

    def room(p: WorkerView, d: WorkerView) -> int:
        if prompt_tokens > p.record.num_blocks * p.record.block_size:
            return 0
        pool = d.record.num_blocks * d.record.block_size
        return min(p.record.max_context_tokens, d.record.max_context_tokens, pool) - prompt_tokens

    expected = min((rank(p, d) for p, d in pairs if fits(p, d)), default=None)
    chosen = router.choose_route(ticket, views)
    assert (chosen and (chosen.prefill_id, chosen.decode_id)) == (expected and expected[5:])
    assert ROUTER.has_pair(views) == bool(pairs)
    assert ROUTER.most_output_tokens(prompt_tokens, views) == max([0, *(room(p, d) for p, d in pairs)])


def test_lives_that_the_ticket_avoids_get_nothing() -> None:
    views = [view("p1", incarnation="i1"), view("p2", incarnation="i2", granted_seqs=1), view("d1", incarnation="i3")]
    assert ROUTER.choose_route(replace(TICKET, avoids=frozenset({"i1"})), views).prefill_id == "p2"
    assert ROUTER.choose_route(replace(TICKET, avoids=frozenset({"i3"})), views) is None


def test_a_prompt_goes_where_its_beginning_is_until_as_much_waits_there() -> None:
    ticket = replace(TICKET, cached={"i1": 20})

    def chosen(granted_tokens: int, **changes: Any) -> Any:
        has_it = view("p2", incarnation="i1", granted_tokens=granted_tokens, **changes)
        return ROUTER.choose_route(ticket, [view("p1"), has_it, view("d1")])

    assert (chosen(0).prefill_id, chosen(0).prefill_tokens) == ("p2", 13)
    assert chosen(19).prefill_id == "p2"
    assert (chosen(21).prefill_id, chosen(21).prefill_tokens) == ("p1", 33)
    # The blocks are taken in full: what is shared now may be nobody else's in a moment.
    assert chosen(0).prefill_blocks == 3
    assert chosen(0, granted_blocks=8).prefill_id == "p1"
