"""From what a client says about the form of an output to a matcher that follows one output token by token.

Imports neither torch nor transformers: gateways check structures with it, engines apply them.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.core.errors import InvalidArgumentError, ResourceExhaustedError
from baton.core.generation import StructureKind
from baton.structure.matcher import StructureMatcher

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from llguidance._lib import JsonCompileOptions

    from baton.core.generation import Structure

_log = logging.getLogger(__name__)

_MAX_REASON_CHARS = 300
# A compiled structure takes some tens to hundreds of kilobytes, and services use a few over and over.
_MAX_KEPT = 32
# One spelling of each value: else a model that likes spaces would put any number of them anywhere.
_JSON_SPACING: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Engines compile between two steps: all their streams wait for it. It takes time by the square of the optional
# properties of an object: 1.5 s for 4,000, which the library's own limits let in, and 0.1 s for what these do. 900 of
# them fit, and with this many items in a row they can be followed as well.
_LIMITS = LLParserLimits(max_grammar_size=8_000, max_items_in_row=5_000)


class StructureCompiler:
    """Compiles structures for one tokenizer. Safe to call from threads; a compilation takes up to 0.1 s."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        # Least recently used first. Nothing was ever fed to these.
        self._compiled: dict[Structure, LLMatcher] = {}

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int | None = None) -> StructureCompiler | None:
        """For the tokenizer in a model folder; `vocab_size` is the model's where it is not the tokenizer's own.

        Blocks, for about a second. None, with a line in the log, when the library cannot use the tokenizer.
        """
        try:
            return cls(LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), n_vocab=vocab_size))
        except (OSError, ValueError) as error:
            _log.warning("structured output is off: %s", _one_line(str(error)))
            return None

    def check(self, structure: Structure) -> None:
        """Compiles the structure. InvalidArgumentError names its field and says what is wrong with it."""
        self.start(structure, ())

    def start(self, structure: Structure, stop_token_ids: Collection[int]) -> StructureMatcher:
        """A matcher for one output that `stop_token_ids` may end. Raises as `check` does."""
        try:
            matcher = StructureMatcher(self._pristine(structure).deep_copy(), self._tokenizer, stop_token_ids)
        except ResourceExhaustedError as error:
            raise _invalid(structure, error.message) from error
        if matcher.is_complete:
            raise _invalid(structure, "allows no output but an empty one")
        return matcher

    def _pristine(self, structure: Structure) -> LLMatcher:
        with self._lock:
            matcher = self._compiled.pop(structure, None)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, _grammar(structure), log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise _invalid(structure, matcher.get_error())
        with self._lock:
            self._compiled[structure] = matcher
            while len(self._compiled) > _MAX_KEPT:
                del self._compiled[next(iter(self._compiled))]
        return matcher


def _grammar(structure: Structure) -> str:
    """The structure in the library's own language."""
    if structure.kind is StructureKind.JSON_SCHEMA:
        try:
            schema = json.loads(structure.text)
        except (ValueError, RecursionError) as error:
            raise _invalid(structure, f"is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise _invalid(structure, "must be a JSON object")
        try:
            return LLMatcher.grammar_from_json_schema(structure.text, overrides=_JSON_SPACING)
        except ValueError as error:  # nested deeper than the library reads
            raise _invalid(structure, str(error)) from error
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.text.lstrip().startswith("{"):  # the library would take it for its internal form
        raise _invalid(structure, "is not a Lark grammar")
    return LLMatcher.grammar_from_lark(structure.text)


def _invalid(structure: Structure, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(structure.kind.field, _one_line(reason), reason="INVALID_STRUCTURE")


def _one_line(text: str) -> str:
    """What the library says, without the dump of its state."""
    return " ".join(text.partition("<state>")[0].split())[:_MAX_REASON_CHARS]
