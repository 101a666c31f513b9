"""The whole deployment on a virtual clock: what it shows must be what arithmetic says, and what the queue promises."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordination.limits import ClassLimits
from baton.sim.decode import SimDecode
from baton.sim.load import Arrival, Costs, Load, Part
from baton.sim.report import Percentiles, Report, Tally, best_split, max_min_shares
from baton.sim.simulation import Fleet, FleetRouter, Outcome, Simulation
from baton.sim.workers import WorkerSize
from decode_worker.scheduler import DecodeScheduler
from gateway.classes import QueueClass, QueueClasses
from gateway.routing import Router
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


def arrival(at_s: float, prompt_tokens: int, output_tokens: int, tenant: str = "t") -> Arrival:
    """One output as long as was asked for."""
    return Arrival(at_s, prompt_tokens, (output_tokens,), output_tokens, tenant)


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
    (outcome,) = run(Simulation(fleet(), classes()), [arrival(1.0, 100, 11)])
    assert outcome.granted_s == 1.0
    assert outcome.first_token_s == pytest.approx(1.0 + 0.01 + 100 * 0.001)
    # The copy, then ten steps alone in the batch.
    assert outcome.ended_s == pytest.approx(outcome.first_token_s + 0.004 + 10 * 0.021)


def test_a_chat_interrupts_a_long_prompts_step_and_holds_it_up_for_as_long_as_it_takes():
    # Steps of 512 tokens: the chat comes into the third.
    long, chat = run(Simulation(fleet(), classes()), [arrival(0.0, 2048, 2), arrival(1.2, 100, 2)])
    assert chat.first_token_s == pytest.approx(1.2 + 0.01 + 100 * 0.001)
    assert long.first_token_s == pytest.approx(4 * (0.01 + 512 * 0.001) + 0.01 + 100 * 0.001)


def test_decode_slots_bound_what_runs_and_the_rest_waits_in_the_queue():
    arrivals = [arrival(0.0, 16, 11) for _ in range(5)]
    outcomes = run(Simulation(fleet(max_num_seqs=2), classes()), arrivals)
    granted = sorted(outcome.granted_s for outcome in outcomes)
    assert granted[:2] == [0.0, 0.0]
    for first, ended in zip(granted[2:], sorted(outcome.ended_s for outcome in outcomes), strict=False):
        assert first >= ended - 1e-9


def crowd(seed: int) -> tuple[Fleet, list[Arrival]]:
    """Requests that may ask for several outputs and for more than they turn out to be; blocks may run short."""
    draw, quick = random.Random(seed), replace(COSTS, prefill_token_s=0.0001)
    divided = fleet(
        draw.randint(1, 2), draw.randint(1, 2), num_blocks=draw.randint(81, 120), max_num_seqs=draw.randint(4, 32)
    )
    arrivals = []
    for _ in range(draw.randint(1, 60)):
        output_tokens = tuple(
            draw.choice((1, draw.randint(2, 200), draw.randint(100, 200))) for _ in range(draw.randint(1, 4))
        )
        max_tokens = max(output_tokens) + draw.randint(0, 20)
        at_s = draw.choice((0.0, draw.uniform(0, 1)))
        arrivals.append(Arrival(at_s, draw.randint(1, 400), output_tokens, max_tokens, draw.choice("ab")))
    divided = replace(
        divided,
        decode=replace(divided.decode, num_swap_blocks=draw.choice((0, 20, 400))),
        costs=draw.choice((quick, replace(quick, decode_step_s=0.0, decode_seq_s=0.0, handover_s=0.0))),
        reserved_output_share=draw.choice((1.0, 0.5, 0.05, 0.01)),
    )
    return divided, sorted(arrivals, key=lambda each: each.at_s)


def test_a_fleets_router_decides_as_the_production_router(monkeypatch):
    load = Load(parts=[Part.parse("0.8:40-400:20"), Part.parse("0.2:40-100:20:3")], rate=60, num_requests=300)
    crowd = fleet(3, 4, num_blocks=120, max_num_seqs=6)
    routes = []
    for sides in (FleetRouter.sides, Router.sides):
        monkeypatch.setattr(FleetRouter, "sides", sides)
        routes.append([outcome.route for outcome in run(Simulation(crowd, classes()), load.arrivals())])
    assert routes[0] == routes[1]
    assert len(set(routes[0])) >= 12


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_ends_and_a_jump_over_steps_changes_nothing(seed):
    divided, arrivals = crowd(seed)
    jumped = Simulation(divided, classes())
    outcomes = run(jumped, arrivals)
    for outcome in outcomes:
        assert outcome.end in ("tokens", "full", "late", "timeout", "shed")
        assert outcome.end != "shed" or divided.reserved_output_share < 1
        assert outcome.num_preempted == 0 or divided.reserved_output_share < 1
        if outcome.end == "tokens":
            assert outcome.arrival.at_s <= outcome.granted_s < outcome.first_token_s <= outcome.ended_s
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SimDecode, "look_ahead", lambda _: (0, False))  # each step is planned and committed
        stepped = Simulation(divided, classes())
        assert run(stepped, arrivals) == outcomes
    assert stepped.most_used_share == jumped.most_used_share


def test_steps_are_jumped_over_with_hundreds_of_sequences_and_the_end_is_the_same(monkeypatch):
    parts = [Part.parse("0.8:40-120:100-300"), Part.parse("0.1:40-120:50-100:4"), Part.parse("0.1:1500-3000:200")]
    load = Load(parts=parts, rate=25, num_requests=400, num_tenants=3)
    crowd = fleet(10, 8, num_blocks=220)
    crowd = replace(crowd, decode=replace(crowd.decode, num_swap_blocks=100), reserved_output_share=0.5)
    outcomes, num_plans = [], []
    for look_ahead in (SimDecode.look_ahead, lambda _: (0, False)):
        plan = Mock(side_effect=DecodeScheduler.plan, autospec=True)
        monkeypatch.setattr(DecodeScheduler, "plan", lambda scheduler, plan=plan: plan(scheduler))
        monkeypatch.setattr(SimDecode, "look_ahead", look_ahead)
        outcomes.append(run(Simulation(crowd, classes()), load.arrivals()))
        num_plans.append(plan.call_count)
        monkeypatch.undo()
    assert outcomes[0] == outcomes[1]
    assert sum(outcome.num_preempted for outcome in outcomes[0]) > 0
    assert num_plans[0] < num_plans[1] / 3


def test_several_outputs_have_the_prompts_blocks_once_and_a_place_in_the_batch_each():
    # 10 blocks of prompt. The keys of the 32 tokens before the last fill two blocks more, of each output.
    simulation = Simulation(fleet(num_blocks=100), classes())
    (outcome,) = run(simulation, [Arrival(0.0, 160, (33, 33, 33, 33), 33, "t")])
    assert simulation.most_used_share == (10 + 4 * 2) / 100
    assert outcome.ended_s == pytest.approx(outcome.first_token_s + 0.004 + 32 * (0.02 + 4 * 0.001))
    # Of a worker's five places two requests for two outputs take four: the third waits until one of these ends.
    waiting = [Arrival(0.0, 16, (11, 11), 11, "t") for _ in range(3)]
    outcomes = run(Simulation(fleet(max_num_seqs=5), classes()), waiting)
    assert [outcome.granted_s for outcome in outcomes[:2]] == [0, 0]
    assert outcomes[2].granted_s == min(outcome.ended_s for outcome in outcomes[:2])


def test_an_output_that_ends_early_frees_what_only_it_has():
    # Of three outputs one ends with its first token, one after ten steps: the batch shrinks, and so does what is used.
    simulation = Simulation(fleet(num_blocks=100), classes())
    (outcome,) = run(simulation, [Arrival(0.0, 160, (1, 11, 49), 200, "t")])
    assert outcome.ended_s == pytest.approx(outcome.first_token_s + 0.004 + 10 * 0.022 + 38 * 0.021)
    # At first three blocks for the outputs, at the end three of the longest one's.
    assert simulation.most_used_share == (10 + 3) / 100


def pressed(num_swap_blocks: int) -> tuple[Fleet, list[Arrival]]:
    """Two requests that take three of eight blocks each by credit, and grow to five each."""
    costs = replace(COSTS, prefill_step_s=0.0, prefill_token_s=0.0, handover_s=0.0, swap_token_s=0.001)
    size = WorkerSize(num_blocks=8, num_swap_blocks=num_swap_blocks)
    crowd = Fleet(num_prefill=1, num_decode=1, prefill=size, decode=size, costs=costs, reserved_output_share=0.5)
    return crowd, [arrival(0.0, 16, 64), arrival(0.0, 16, 64)]


def test_where_credit_covers_half_an_output_the_younger_of_two_gives_way_and_comes_back():
    crowd, arrivals = pressed(num_swap_blocks=8)
    simulation = Simulation(crowd, classes())
    old, young = run(simulation, arrivals)
    assert (old.granted_s, young.granted_s) == (0, 0)
    assert (old.num_preempted, young.num_preempted) == (0, 1)
    # The younger one is taken in after the older one's first step, copied during the second, and joins the third. After
    # 46 together the older one has four blocks full and needs a fifth. The four of the younger one leave, and the older
    # one has its last 15 steps; then they come back, and the younger one has its last 17.
    swap_s = 4 * 16 * 0.001
    assert old.ended_s == pytest.approx(2 * 0.021 + 46 * 0.022 + swap_s + 15 * 0.021)
    assert young.ended_s == pytest.approx(old.ended_s + swap_s + 17 * 0.021)
    assert simulation.most_used_share == 1
    assert report_on([old, young], wanted_first_token_s=1.0).num_preempted == 1
    # With whole answers covered one waits for the other.
    first, second = run(Simulation(replace(crowd, reserved_output_share=1.0), classes()), arrivals)
    assert (first.num_preempted, second.num_preempted) == (0, 0)
    assert second.granted_s == first.ended_s == pytest.approx(63 * 0.021)


def test_without_swap_space_it_is_shed():
    crowd, arrivals = pressed(num_swap_blocks=0)
    old, young = run(Simulation(crowd, classes()), arrivals)
    assert (old.end, young.end) == ("tokens", "shed")
    assert young.ended_s == pytest.approx(2 * 0.021 + 46 * 0.022)
    assert old.ended_s == pytest.approx(young.ended_s + 15 * 0.021)


def test_half_the_reserve_lets_more_run_and_costs_nothing_where_answers_end_in_its_bounds():
    # 40 blocks; 5 for a whole answer, 3 for half of one.
    arrivals = [Arrival(0.0, 16, (30,), 64, "t") for _ in range(30)]
    num_at_once = []
    for share in (1.0, 0.5):
        crowd = replace(fleet(num_blocks=40), reserved_output_share=share)
        outcomes = run(Simulation(crowd, classes()), arrivals)
        num_at_once.append(sum(outcome.granted_s == 0 for outcome in outcomes))
        assert all(outcome.num_preempted == 0 for outcome in outcomes)
    assert num_at_once == [40 // 5, 40 // 3]


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
    chats = [arrival(0.02 * index, 160, 40) for index in range(1500)]
    big = arrival(5.0, 3200, 40)  # 203 of the 240 blocks of the pair
    arrivals = sorted([*chats, big], key=lambda each: each.at_s)
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


@pytest.mark.parametrize("text", ["", "1:2", "1:0:3", "0:1:1", "1:9-3:1", "x:1:1", "1:1:1:0", "1:1:1:"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"(?i)share"):
        Part.parse(text)
