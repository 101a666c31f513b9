from __future__ import annotations

import pytest

from baton.core.errors import UnauthenticatedError
from kv_transfer.pairs import PairSecrets, new_key, pair_of


def test_each_handshake_has_a_secret_of_its_own_and_both_sides_name_the_pair_alike():
    pairs = PairSecrets(new_key())
    one, two = pairs.mint(), pairs.mint()
    assert one != two
    assert pairs.require(one) == pair_of(one) != pairs.require(two)
    assert pairs.secret_of(pair_of(one)) == one


def test_two_processes_with_the_same_key_agree():
    key = new_key()
    secret = PairSecrets(key).mint()
    assert PairSecrets(key).require(secret) == pair_of(secret)


@pytest.mark.parametrize(
    "spoil", [lambda s: b"", lambda s: s[:-1], lambda s: s + b"x", lambda s: s[:16], lambda s: bytes(48)]
)
def test_whatever_was_not_given_out_is_refused_without_being_repeated(spoil):
    pairs = PairSecrets(new_key())
    secret = spoil(pairs.mint())
    with pytest.raises(UnauthenticatedError) as refusal:
        pairs.require(secret)
    assert not secret or secret.hex() not in str(refusal.value)


def test_every_changed_byte_is_noticed():
    pairs = PairSecrets(new_key())
    secret = pairs.mint()
    for i in range(len(secret)):
        with pytest.raises(UnauthenticatedError):
            pairs.require(secret[:i] + bytes([secret[i] ^ 1]) + secret[i + 1 :])
