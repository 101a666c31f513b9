"""The secret that a handshake gives to a reader, and that every later call of the reader must show.

A secret is a random part and a keyed hash of it, so the source keeps no list: its server and its engine process check
it alike, with the key of this life of the source. The random part tells pairs apart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from baton.core.errors import UnauthenticatedError

_NONCE_BYTES = 16
KEY_BYTES = 32


def new_key() -> bytes:
    """The key of one life of a source."""
    return secrets.token_bytes(KEY_BYTES)


class PairSecrets:
    """Mints and checks the secrets of one life of a source."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mint(self) -> bytes:
        """A secret for a new pair."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._seal(nonce)

    def require(self, secret: bytes) -> str:
        """The pair that `secret` stands for; UnauthenticatedError when no handshake of this life gave it out."""
        nonce, seal = secret[:_NONCE_BYTES], secret[_NONCE_BYTES:]
        if not hmac.compare_digest(seal, self._seal(nonce)):
            raise UnauthenticatedError("pair_secret: no handshake of this worker gave it out", reason="PAIR_UNKNOWN")
        return nonce.hex()

    def secret_of(self, pair: str) -> bytes:
        """The secret of a pair that names itself by the random part: to check what it has sealed with the rest."""
        nonce = bytes.fromhex(pair)
        return nonce + self._seal(nonce)

    def _seal(self, nonce: bytes) -> bytes:
        return hmac.digest(self._key, nonce, hashlib.sha256)


def pair_of(secret: bytes) -> str:
    """The pair's name, as the holder of its secret knows it."""
    return secret[:_NONCE_BYTES].hex()
