from __future__ import annotations

from dataclasses import replace

from baton.core.model import ModelFingerprint
from baton.core.workers import WorkerRecord, WorkerRole, WorkerState, WorkerView
from gateway.prefixes import STRIDE, KnownPrefixes


def worker(life: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"worker-{life}",
        incarnation=life,
        role=WorkerRole.PREFILL,
        state=WorkerState.READY,
        address="a:1",
        host_id="host",
        fingerprint=ModelFingerprint(model="m", weights="w", tokenizer="t", dtype="float32"),
        block_size=16,
        num_blocks=10,
        max_num_seqs=2,
        max_context_tokens=8192,
        caches_prefixes=True,
    )


def views(*lives: str) -> list[WorkerView]:
    return [WorkerView(record=worker(life), granted_blocks=0, granted_seqs=0, heartbeat_age_s=0.0) for life in lives]


def prompt(num_strides: int, last: int = 0) -> list[int]:
    return [*range(num_strides * STRIDE), last]


def test_it_expects_what_a_live_worker_has_computed() -> None:
    known = KnownPrefixes(shares=False)
    known.learn(known.names(prompt(3), "t"), worker("a"))
    known.learn(known.names(prompt(2), "t"), worker("b"))
    longer = known.names(prompt(5, 7), "t")
    assert known.cached_tokens(longer, views("a", "b", "c")) == {"a": 3 * STRIDE, "b": 2 * STRIDE}
    assert known.cached_tokens(longer, views("b")) == {"b": 2 * STRIDE}
    assert known.cached_tokens(known.names([99, *prompt(3)], "t"), views("a", "b")) == {}
    assert known.cached_tokens(known.names([1, 2, 3], "t"), views("a")) == {}


def test_tenants_know_each_others_prompts_only_where_they_share() -> None:
    for shares in (False, True):
        known = KnownPrefixes(shares=shares)
        known.learn(known.names(prompt(1), "one"), worker("a"))
        assert bool(known.cached_tokens(known.names(prompt(1), "two"), views("a"))) == shares
        assert (known.salt("one") == known.salt("two")) == shares


def test_a_worker_without_a_cache_is_expected_to_have_nothing() -> None:
    known = KnownPrefixes(shares=False)
    known.learn(known.names(prompt(1), "t"), replace(worker("a"), caches_prefixes=False))
    assert known.cached_tokens(known.names(prompt(1), "t"), views("a")) == {}


def test_what_was_not_used_for_longest_is_forgotten_from_its_end() -> None:
    known = KnownPrefixes(shares=False, max_names=5)
    old, new = known.names(prompt(3), "t"), known.names([5, *prompt(3)], "t")
    known.learn(old, worker("a"))
    known.learn(new, worker("a"))
    assert known.cached_tokens(old, views("a")) == {"a": 2 * STRIDE}
    assert known.cached_tokens(new, views("a")) == {"a": 3 * STRIDE}


def test_of_many_workers_the_last_eight_are_remembered() -> None:
    known = KnownPrefixes(shares=False)
    names, lives = known.names(prompt(1), "t"), [f"w{index:02}" for index in range(12)]
    for life in lives:
        known.learn(names, worker(life))
    assert set(known.cached_tokens(names, views(*lives))) == set(lives[4:])
