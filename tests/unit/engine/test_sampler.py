from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from baton.core.errors import InternalError
from baton.core.generation import SamplingParams
from baton.engine.native.build import build, compiler
from baton.engine.native.race import NativeRace
from baton.engine.sampler import NUCLEUS_CANDIDATES, race_key, sample, torch_race, uniforms

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def native_race() -> NativeRace:
    if compiler() is None:
        pytest.skip("no C compiler")
    library = build()
    assert library is not None
    return NativeRace(library)


def draws(logits: list[float], count: int, **params) -> Counter[int]:
    """Tokens that `count` different seeds draw from one row of logits."""
    rows = torch.tensor(logits).repeat(count, 1)
    return Counter(sample(rows, [SamplingParams(seed=seed, **params) for seed in range(count)], [5] * count))


def chi_squared(counts: Counter[int], probabilities: list[float]) -> float:
    total = sum(counts.values())
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities) if p > 0)


def test_greedy_takes_the_largest():
    logits = torch.tensor([[0.1, 3.0, -1.0], [9.0, 3.0, 8.0]])
    assert sample(logits, [GREEDY, GREEDY], [1, 2]) == [1, 0]


@pytest.mark.parametrize("vocab_size", [7, 255, 512, 1000, 49152])
def test_greedy_takes_the_lowest_id_among_equals(vocab_size, native_race):
    logits = torch.zeros(3, vocab_size)
    logits[1, 3:] = 1.0
    logits[2, [2, vocab_size - 1]] = 1.0
    for race in (torch_race, native_race):
        assert sample(logits, [GREEDY] * 3, [0, 0, 0], race) == [0, 3, 2]


@pytest.mark.parametrize("vocab_size", [256, 511, 512, 513, 1000])
def test_greedy_finds_the_largest_wherever_it_is(vocab_size, native_race):
    """In every position, in a vocabulary that is no multiple of what is searched at a time, with equals after it."""
    places = range(vocab_size)
    logits = torch.randn(vocab_size, vocab_size)
    logits[places, places] = 9.0
    for row in places:
        logits[row, row + 1 :: 100] = 9.0
    for race in (torch_race, native_race):
        assert sample(logits, [GREEDY] * vocab_size, [0] * vocab_size, race) == list(places)


def test_the_distribution_is_that_of_the_logits():
    probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    counts = draws([math.log(p) for p in probabilities], 20_000)
    # 99.9 % quantile of chi squared with 4 degrees of freedom.
    assert chi_squared(counts, probabilities) < 18.47


def test_positions_of_one_seed_are_as_independent_as_seeds():
    probabilities = [0.5, 0.3, 0.2]
    rows = torch.tensor([math.log(p) for p in probabilities]).repeat(20_000, 1)
    tokens = sample(rows, [SamplingParams(seed=77)] * 20_000, list(range(20_000)))
    assert chi_squared(Counter(tokens), probabilities) < 13.82
    pairs = Counter(first * 3 + second for first, second in zip(tokens[::2], tokens[1::2], strict=True))
    assert chi_squared(pairs, [a * b for a in probabilities for b in probabilities]) < 26.12


def test_temperature_sharpens():
    logits = [1.0, 0.0, -1.0]
    weights = [math.exp(x / 0.5) for x in logits]
    assert chi_squared(draws(logits, 10_000, temperature=0.5), [w / sum(weights) for w in weights]) < 13.82
    assert set(draws(logits, 200, temperature=1e-6)) == {0}


def test_top_k_keeps_k_in_their_proportions():
    counts = draws([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)], 10_000, top_k=2)
    assert set(counts) == {1, 3}
    assert chi_squared(counts, [0, 4 / 7, 0, 3 / 7]) < 10.83


def test_top_k_keeps_equals_of_the_last():
    assert set(draws([2.0, 1.0, 1.0, 0.0], 300, top_k=2)) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert set(draws(logits, 500, top_p=0.45)) == {1}
    assert set(draws(logits, 500, top_p=0.75)) == {1, 3}
    assert set(draws(logits, 500, top_p=0.9)) == {0, 1, 3}
    assert set(draws(logits, 500, top_p=0.0)) == {1}


def test_top_p_counts_within_top_k():
    # Of the two kept, 0.5 and 0.3, the first alone has 62 %.
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert set(draws(logits, 500, top_k=2, top_p=0.6)) == {1}
    assert set(draws(logits, 500, top_k=2, top_p=0.65)) == {1, 3}


def test_min_p_is_relative_to_the_likeliest():
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert set(draws(logits, 500, min_p=0.5)) == {1, 3}
    assert set(draws(logits, 500, min_p=0.2)) == {0, 1, 3}


def test_a_nucleus_wider_than_the_first_guess_is_found_whole():
    vocab_size = 4 * NUCLEUS_CANDIDATES
    counts = draws([0.0] * (vocab_size - 1) + [-30.0], 400, top_p=0.9999)
    # Equal logits are kept together, so only the last token can fall out.
    assert max(counts) < vocab_size - 1
    assert len(counts) > 350
    ramp = [-i / 2000 for i in range(vocab_size)]
    weights = torch.softmax(torch.tensor(ramp, dtype=torch.float64), 0).cumsum(0)
    size = int((weights < 0.8).sum()) + 1
    assert size > NUCLEUS_CANDIDATES
    tokens = draws(ramp, 3000, top_p=0.8)
    assert size - 30 < max(tokens) < size


def test_a_token_depends_on_its_own_row_alone():
    generator = torch.Generator().manual_seed(3)
    # Rounded as logits of half precision are: many equals.
    logits = (torch.randn(12, 5000, generator=generator) * 3).bfloat16().float()
    params = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=40),
        SamplingParams(seed=3, top_p=0.9),
        SamplingParams(seed=4, min_p=0.1, temperature=0.7),
        SamplingParams(seed=5, top_k=2000, top_p=0.99),
        SamplingParams(seed=6, top_p=0.99999, temperature=3.0),
        SamplingParams(seed=7, top_k=1, temperature=2.0),
        SamplingParams(seed=8, top_k=5000),
        SamplingParams(seed=9, top_k=60, top_p=0.95, min_p=0.01),
        SamplingParams(seed=10, temperature=1.5),
        GREEDY,
    ]
    positions = list(range(100, 112))
    together = sample(logits, params, positions)
    for row in range(12):
        assert sample(logits[row : row + 1], params[row : row + 1], positions[row : row + 1]) == together[row : row + 1]
    backwards = sample(logits.flip(0), params[::-1], positions[::-1])
    assert backwards == together[::-1]


def test_seed_and_position_both_count():
    logits = torch.zeros(1, 1000)

    def token(seed: int, position: int) -> int:
        return sample(logits, [SamplingParams(seed=seed)], [position])[0]

    assert token(1, 1) == token(1, 1)
    assert len({token(1, position) for position in range(50)}) > 40
    assert len({token(seed, 1) for seed in range(50)}) > 40
    # Not a function of their sum.
    assert token(1, 2) != token(2, 1)


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "expected"),
    [
        (0, 0, 0, 0.2558877432020381),
        (12345, 678, 49151, 0.872832941939123),
        (2**64 - 1, 8191, 7, 0.8336729687871411),
        (3, 1, 262143, 0.6132647552294657),
    ],
)
def test_the_uniforms_stay_the_same_for_ever(seed, position, token_id, expected):
    """A worker of another version continues a stream only when these numbers never change. Values: numpy's."""
    ids = torch.tensor([1, token_id])
    assert uniforms([5, race_key(seed, position)], ids)[1, 1].item() == expected


def test_a_filtered_token_never_wins(native_race):
    keys = [race_key(seed, 3) for seed in range(500)]
    rows = torch.tensor([[0.0, 0.3, 0.0, 0.7]]).repeat(500, 1)
    for race in (torch_race, native_race):
        assert set(race(rows, keys)) == {1, 3}


ROWS = {
    "flat": lambda noise: torch.zeros_like(noise),
    "likely": lambda noise: noise * 4,
    "rising": lambda noise: torch.arange(noise.shape[1]).expand_as(noise) / noise.shape[1] * 20,
    "banned": lambda noise: noise.masked_fill(noise < 0.5, -math.inf).index_fill(1, torch.tensor([0]), 0.0),
    "denormal": lambda noise: noise * 30,
}
FILTERS = [{}, {"temperature": 0.3}, {"top_k": 5}, {"top_p": 0.8, "temperature": 2.0}, {"min_p": 0.05}]


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 255, 49152])
@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_draws_what_pytorch_does(native_race, name, vocab_size):
    num_rows = 8 if vocab_size > 1000 else 100
    logits = ROWS[name](torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)))
    for filters in FILTERS:
        params = [SamplingParams(seed=2**63 + row, **filters) for row in range(num_rows)]
        positions = list(range(num_rows))
        assert sample(logits, params, positions, native_race) == sample(logits, params, positions)


def test_rounding_changes_few_draws(native_race):
    """Log-probabilities that differ by 0.003, as those of one cache computed twice do, over a whole vocabulary.

    3 of these 2,000 draws change. One uniform number that inverts the cumulative distribution changes 688, because
    the sum up to a token moves with all the tokens before it.
    """
    vocab_size, count = 49_152, 100
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    logits = frequencies.log().float()[torch.randperm(vocab_size, generator=generator)]
    changed = 0
    for first in range(0, 2000, count):
        params = [SamplingParams(seed=seed) for seed in range(first, first + count)]
        noise = 0.003 * torch.randn(vocab_size, generator=generator)
        one, other = (
            sample(row.repeat(count, 1), params, [40] * count, native_race) for row in (logits, logits + noise)
        )
        changed += sum(a != b for a, b in zip(one, other, strict=True))
    assert changed < 40


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("vocab_size", [9, 1000])
@pytest.mark.parametrize("place", [4, -1])
def test_logits_that_are_not_finite_are_an_error(bad, vocab_size, place, native_race):
    logits = torch.zeros(2, vocab_size)
    logits[1, place] = bad
    for race in (torch_race, native_race):
        with pytest.raises(InternalError, match="not finite"):
            sample(logits, [GREEDY, GREEDY], [0, 0], race)


def test_forbidden_tokens_are_no_fault(native_race):
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 700] = -3.0
    assert sample(logits, [GREEDY], [0], native_race) == [700]
