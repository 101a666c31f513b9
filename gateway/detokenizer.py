"""From token ids to text, one token at a time and exactly.

The texts that a detokenizer returns, put together, equal the decoding of all ids at once without special
tokens. Each token costs a constant amount of work on average, however long the text is.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Protocol

from tokenizers import decoders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """State of one text. Single use: nothing may be pushed after `flush`."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds tokens and returns the text that became certain; never half a character."""
        ...

    def flush(self) -> str:
        """The text is over: returns what was held back, an incomplete character as decoding shows it."""
        ...


class PieceDecoder(Protocol):
    """What a detokenizer needs of a tokenizer. The library's `tokenizers.Tokenizer` has it."""

    @property
    def decoder(self) -> object:
        """The decoder that joins pieces to a text; None joins them by spaces."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The piece of an id; None for an id without one."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ...


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, of the kind that its decoder asks for."""

    def __init__(self, tokenizer: PieceDecoder, special_ids: frozenset[int]) -> None:
        self._pieces = _Pieces(tokenizer, special_ids)
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def new(self) -> Detokenizer:
        """A detokenizer for a new text."""
        return ByteLevelDetokenizer(self._pieces) if self._is_byte_level else WindowDetokenizer(self._pieces)


class _Pieces:
    """Pieces by id. Special tokens and ids without a piece have none: decoding skips them."""

    def __init__(self, tokenizer: PieceDecoder, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        # As large as the vocabulary at most.
        self._bytes_by_id: dict[int, bytes] = {}

    def piece(self, token_id: int) -> str | None:
        """The piece of a token that shows in the text."""
        return None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)

    def byte_level(self, token_id: int) -> bytes:
        """The bytes of a piece of a byte-level vocabulary, in which each character stands for one byte."""
        found = self._bytes_by_id.get(token_id)
        if found is None:
            piece = self.piece(token_id) or ""
            # A piece with another character is an added token, which is spelled as it is.
            is_byte_level = all(character in _BYTE_OF_CHARACTER for character in piece)
            found = bytes(_BYTE_OF_CHARACTER[character] for character in piece) if is_byte_level else piece.encode()
            self._bytes_by_id[token_id] = found
        return found

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): the bytes of the tokens are one UTF-8 stream."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds tokens and returns the text that became certain."""
        return self._utf8.decode(b"".join(map(self._pieces.byte_level, token_ids)))

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete character, or nothing."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer (SentencePiece-like ones above all): decodes a short window and takes the difference.

    Decoders treat the first token of a text specially (they strip its space), so the window begins with the
    last token whose text is out already, the anchor. A run of byte tokens (`<0xE4>`) is decoded as a whole, and
    one bad byte spoils all of it, so a run is held until it ends.
    """

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds tokens and returns the text that became certain."""
        num_certain = 0
        certain_piece = ""
        for token_id in token_ids:
            piece = self._pieces.piece(token_id)
            if piece is None:
                continue
            self._pending.append(token_id)
            if not _BYTE_PIECE.fullmatch(piece):
                num_certain, certain_piece = len(self._pending), piece
        if not num_certain:
            return ""
        window = self._anchor + self._pending[:num_certain]
        text = self._pieces.decode(window)
        if text.endswith(_REPLACEMENT):
            return ""
        new_text = text[len(self._anchor_text) :]
        # A token without any character cannot be an anchor: the next one would be taken for the first.
        self._anchor = window[-1:] if certain_piece else window
        self._anchor_text = self._pieces.decode(self._anchor)
        del self._pending[:num_certain]
        return new_text

    def flush(self) -> str:
        """Returns the text of the tokens that were held."""
        text = self._pieces.decode(self._anchor + self._pending)
        self._pending = []
        return text[len(self._anchor_text) :]


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
