"""The whole deployment on a virtual clock: what it shows must be what arithmetic says, and what the queue promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.coordination.limits import ClassLimits
from baton.sim.load import Arrival, Costs, Load, Part
from baton.sim.report import Percentiles, Report, Tally, best_split, max_min_shares
from baton.sim.simulation import Fleet, Outcome, Simulation
from baton.sim.workers import WorkerSize
from gateway.classes import QueueClass, QueueClasses
from gateway.settings import QueueSettings

COSTS = Costs(
    prefill_step_s=0.01,
    prefill_token_s=0.001,
    decode_step_s=0.02,
    decode_seq_s=0.001,
    handover_s=0.004,
    handover_token_s=0.0,
)


def fleet(num_prefill: int = 1, num_decode: int = 1, *, num_blocks: int = 4096, max_num_seqs: int = 32) -> Fleet:
    size = WorkerSize(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    return Fleet(num_prefill=num_prefill, num_decode=num_decode, prefill=size, decode=size, costs=COSTS)


def classes(**chat) -> QueueClasses:
    limits = {"max_waiting": 10_000, "max_waiting_tokens": 10**9} | chat
    return QueueClasses(
        [
            QueueClass(name="chat", max_prompt_tokens=1023, limits=ClassLimits(**limits, weight=4), queue_timeout_s=60),
            QueueClass(
                name="long",
                max_prompt_tokens=None,
                limits=ClassLimits(max_waiting=1000, max_waiting_tokens=10**9),
                queue_timeout_s=600,
            ),
        ]
    )


def run(simulation: Simulation, arrivals) -> list[Outcome]:
    """All outcomes, in the order of the arrivals."""
    arrivals = list(arrivals)
    places = {id(arrival): place for place, arrival in enumerate(arrivals)}
    return sorted(simulation.run(arrivals), key=lambda outcome: places[id(outcome.arrival)])


def report_on(outcomes, *, wanted_first_token_s: float) -> Report:
    tally = Tally(wanted_first_token_s=wanted_first_token_s)
    for outcome in outcomes:
        tally.add(outcome)
    return tally.report()


def test_a_lone_request_takes_what_its_steps_cost():
    (outcome,) = run(Simulation(fleet(), classes()), [Arrival(1.0, 100, 11, "t")])
    assert outcome.granted_s == 1.0
    assert outcome.first_token_s == pytest.approx(1.0 + 0.01 + 100 * 0.001)
    # The copy, then ten steps alone in the batch.
    assert outcome.ended_s == pytest.approx(outcome.first_token_s + 0.004 + 10 * 0.021)


def test_a_chat_interrupts_a_long_prompts_step_and_holds_it_up_for_as_long_as_it_takes():
    # Steps of 512 tokens: the chat comes into the third.
    long, chat = run(Simulation(fleet(), classes()), [Arrival(0.0, 2048, 2, "t"), Arrival(1.2, 100, 2, "t")])
    assert chat.first_token_s == pytest.approx(1.2 + 0.01 + 100 * 0.001)
    assert long.first_token_s == pytest.approx(4 * (0.01 + 512 * 0.001) + 0.01 + 100 * 0.001)


def test_decode_slots_bound_what_runs_and_the_rest_waits_in_the_queue():
    arrivals = [Arrival(0.0, 16, 11, "t") for _ in range(5)]
    outcomes = run(Simulation(fleet(max_num_seqs=2), classes()), arrivals)
    granted = sorted(outcome.granted_s for outcome in outcomes)
    assert granted[:2] == [0.0, 0.0]
    for first, ended in zip(granted[2:], sorted(outcome.ended_s for outcome in outcomes), strict=False):
        assert first >= ended - 1e-9


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 3),
            st.one_of(st.integers(1, 100), st.integers(1, 3000)),
            st.integers(1, 60),
            st.sampled_from(("a", "b")),
        ),
        min_size=1,
        max_size=40,
    ),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(192, 400), st.integers(1, 6)),
)
def test_whatever_comes_ends_and_nothing_is_held_afterwards(arrivals, sizes):
    num_prefill, num_decode, num_blocks, max_num_seqs = sizes
    simulation = Simulation(fleet(num_prefill, num_decode, num_blocks=num_blocks, max_num_seqs=max_num_seqs), classes())
    outcomes = run(simulation, [Arrival(*arrival) for arrival in sorted(arrivals)])
    for outcome in outcomes:
        assert outcome.end in ("tokens", "full", "late", "timeout")
        if outcome.end == "tokens":
            assert outcome.arrival.at_s <= outcome.granted_s < outcome.first_token_s <= outcome.ended_s


def test_a_flooding_tenant_takes_nothing_from_the_others():
    # Several times what the workers can do, nearly all of it from one tenant.
    load = Load(parts=[Part.parse("1:50:20")], rate=60, num_requests=3000, num_tenants=4, flood=40, seed=1)
    outcomes = run(Simulation(fleet(max_num_seqs=8), classes(max_waiting=400)), load.arrivals())
    others = [outcome for outcome in outcomes if outcome.arrival.tenant != "t0" and outcome.granted_s]
    flood = [outcome for outcome in outcomes if outcome.arrival.tenant == "t0" and outcome.granted_s]

    def wait(group):
        return Percentiles.of(outcome.granted_s - outcome.arrival.at_s for outcome in group).p95_s

    assert wait(others) < 1.0
    assert wait(flood) > 10 * wait(others)
    assert all(outcome.end == "tokens" for outcome in outcomes if outcome.arrival.tenant != "t0")
    assert report_on(outcomes, wanted_first_token_s=1.0).fairness == 1.0


def test_small_load_does_not_starve_a_big_request():
    chats = [Arrival(0.02 * index, 160, 40, "t") for index in range(1500)]
    big = Arrival(5.0, 3200, 40, "t")  # 203 of the 240 blocks of the pair
    arrivals = sorted([*chats, big], key=lambda arrival: arrival.at_s)
    waits = []
    for reserve_after_s in (1.0, 1000.0):
        simulation = Simulation(fleet(num_blocks=240, max_num_seqs=64), classes(), reserve_after_s=reserve_after_s)
        outcome = next(o for o in run(simulation, arrivals) if o.arrival is big)
        waits.append(outcome.granted_s - big.at_s)
    with_reservation, without = waits
    assert 1.0 <= with_reservation < 4.0
    assert without > 20


def test_overload_is_refused_and_costs_no_goodput():
    part = Part.parse("1:50:20")
    goodput = []
    for rate in (20, 60):  # at capacity, and three times as much
        load = Load(parts=[part], rate=rate, num_requests=rate * 40, seed=3)
        report = report_on(
            run(Simulation(fleet(max_num_seqs=8), classes(max_waiting=8)), load.arrivals()), wanted_first_token_s=2.0
        )
        goodput.append(report.goodput)
    assert report.classes["chat"].ends["full"] > 0
    assert report.classes["chat"].queue.p99_s < 1.5
    assert goodput[1] > 0.9 * goodput[0]


@pytest.mark.parametrize(("mix", "num_prefill"), [("1:90:31", 6), ("1:60:61", 4), ("1:30:91", 2)])
def test_the_best_ratio_is_that_of_the_work(mix, num_prefill):
    # A token takes a worker a millisecond, one of a prompt as one that follows the first of an output, and nothing
    # else takes time: eight workers are to be divided as the work is, and none of them has to wait then.
    costs = Costs(
        prefill_step_s=0.0,
        prefill_token_s=0.001,
        decode_step_s=0.0,
        decode_seq_s=0.001,
        handover_s=0.0,
        handover_token_s=0.0,
    )
    load = Load(parts=[Part.parse(mix)], rate=1000, num_requests=200)

    def evaluate(num_prefill: int) -> tuple[float, float]:
        divided = replace(fleet(num_prefill, 8 - num_prefill), costs=costs)
        report = report_on(Simulation(divided, classes()).run(load.arrivals()), wanted_first_token_s=math.inf)
        return report.goodput, -report.lasted_s

    assert best_split(8, evaluate) == num_prefill
    goodput, _ = evaluate(num_prefill)
    capacity = 8 / 0.12  # 120 ms of work each
    assert 0.8 * capacity < goodput <= capacity


@given(st.integers(3, 300), st.integers(1, 300))
def test_the_search_finds_a_peak(num_workers, peak):
    peak = min(peak, num_workers - 1)
    asked = []

    def evaluate(num_prefill: int) -> tuple[float, float]:
        asked.append(num_prefill)
        return -float(abs(num_prefill - peak)), 0.0

    assert best_split(num_workers, evaluate) == peak
    assert len(asked) == len(set(asked)) <= 25


def test_hundreds_of_workers_and_the_classes_of_a_gateway():
    load = Load(parts=[Part.parse("0.95:40-120:16"), Part.parse("0.05:1500-3000:16")], rate=400, num_requests=1200)
    outcomes = run(Simulation(fleet(120, 80), QueueSettings().queue_classes), load.arrivals())
    report = report_on(outcomes, wanted_first_token_s=1.0)
    assert {name: group.ends["tokens"] for name, group in report.classes.items()} == {
        "chat": sum(outcome.arrival.prompt_tokens < 1024 for outcome in outcomes),
        "long": sum(outcome.arrival.prompt_tokens >= 1024 for outcome in outcomes),
    }
    # Enough workers: nobody waits, and the same seed gives the same run.
    assert report.classes["chat"].queue.p99_s == 0
    again = run(Simulation(fleet(120, 80), QueueSettings().queue_classes), load.arrivals())
    assert [outcome.ended_s for outcome in again] == [outcome.ended_s for outcome in outcomes]


def test_percentiles_and_fair_shares():
    assert Percentiles.of(range(1, 101)) == Percentiles(50, 95, 99)
    assert math.isnan(Percentiles.of([]).p50_s)
    assert max_min_shares({"a": 100, "b": 10, "c": 30}, 60) == {"b": 10, "c": 25, "a": 25}


@pytest.mark.parametrize("text", ["", "1:2", "1:0:3", "0:1:1", "1:9-3:1", "x:1:1"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"(?i)share"):
        Part.parse(text)
