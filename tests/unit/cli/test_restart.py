from __future__ import annotations

from baton.cli.restart import RestartPolicy


def test_delays_double_and_the_fifth_quick_death_is_the_end():
    policy = RestartPolicy()
    assert [policy.delay_s_after(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_a_long_life_starts_the_count_again():
    policy = RestartPolicy()
    for _ in range(4):
        policy.delay_s_after(29.9)
    assert policy.delay_s_after(30.0) == 0.5
    assert policy.delay_s_after(0.0) == 1.0
