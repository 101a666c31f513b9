from __future__ import annotations

from baton.core.prefixes import PrefixDigests


def test_a_name_stands_for_all_tokens_up_to_it_and_for_nothing_after():
    digests = PrefixDigests(4)
    names = digests.chain(list(range(11)))
    assert len(names) == len(set(names)) == 2
    assert digests.chain([*range(8), 99]) == names
    assert digests.chain([*range(7), 99])[0] == names[0]
    assert digests.chain([*range(7), 99])[1] != names[1]
    other_start = digests.chain([99, *range(1, 8)])
    assert not set(other_start) & set(names)
    # The same tokens at another place are another prefix.
    assert digests.chain([*range(4), *range(4)])[1] != names[0]
    assert digests.chain(range(3)) == digests.chain([]) == []


def test_salts_and_processes_have_names_of_their_own():
    digests, ids = PrefixDigests(4), list(range(8))
    chains = [digests.chain(ids), digests.chain(ids, "a"), digests.chain(ids, "b"), PrefixDigests(4).chain(ids)]
    assert len({name for chain in chains for name in chain}) == 8
    assert digests.chain(ids, "a") == chains[1]


def test_large_ids_do_not_run_into_each_other():
    digests = PrefixDigests(2)
    assert digests.chain([1 << 16, 0]) != digests.chain([0, 1 << 16])
    assert digests.chain([2**32 - 1, 1])
