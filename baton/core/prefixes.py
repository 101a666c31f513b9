"""Names for the beginnings of token sequences, such that equal names mean equal beginnings."""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_BYTES = 32


class PrefixDigests:
    """Names prefixes by a chain of digests, keyed with a secret that never leaves the process.

    Nobody without the secret can look for two prefixes of one name, or learn anything from a name. Names of two
    processes have nothing to do with each other. `stride`: tokens between two names of a chain.
    """

    def __init__(self, stride: int) -> None:
        assert stride > 0, stride
        self.stride = stride
        self._secret = secrets.token_bytes(64)

    def chain(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """Names of the prefixes of 1, 2, ... whole strides. Different salts give different names.

        About a microsecond a name.
        """
        packed = array("I", token_ids)
        width = self.stride * packed.itemsize
        data = packed.tobytes()
        names: list[bytes] = []
        name = self._digest(salt.encode(), b"salt")
        for start in range(0, len(data) - width + 1, width):
            name = self._digest(name + data[start : start + width], b"stride")
            names.append(name)
        return names

    def _digest(self, data: bytes, domain: bytes) -> bytes:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._secret, person=domain).digest()
