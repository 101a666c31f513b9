"""Text to token ids, and back: the model's own tokenizer and chat template, kept off the event loop.

Reads `tokenizer.json` as it is; nothing from a model folder is executed but its chat template, in Jinja's sandbox.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import jinja2
from transformers import PreTrainedTokenizerFast

from baton.core.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, StartupError
from baton.structure.compiler import StructureCompiler
from gateway.detokenizer import DetokenizerFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from baton.core.generation import Structure
    from gateway.detokenizer import Detokenizer

T = TypeVar("T")

# A queue of tokenizations clears in far less than this; a client that comes back after it finds room.
_BUSY_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """The tokenizer of one model. Its methods block (milliseconds for long texts) and are safe to call from threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, structures: StructureCompiler | None = None) -> None:
        self._tokenizer = tokenizer
        self._structures = structures
        self._backend = tokenizer.backend_tokenizer
        added_tokens = self._backend.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self._detokenizers = DetokenizerFactory(self._backend, special_ids)
        self._longest_piece = max(map(len, self._backend.get_vocab()), default=0)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer of a model folder. StartupError, one line, when it is missing or broken."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise StartupError(f"{file}: no such file")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises bare Exceptions for broken files
            raise StartupError(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}") from error
        return cls(tokenizer, StructureCompiler.load(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be turned into text."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        """The id that the tokenizer names as the end of a sequence."""
        eos_token_id: int | None = self._tokenizer.eos_token_id
        return eos_token_id

    @property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than this."""
        return self._longest_piece

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens that the tokenizer itself adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation, the assistant's turn opened. InvalidArgumentError when the template refuses it."""
        return self._encode(self._render(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Text of ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=not include_special_tokens)
        return text

    def check_structure(self, structure: Structure) -> None:
        """InvalidArgumentError when no output can have this form; FailedPreconditionError when none is supported."""
        if self._structures is None:
            raise FailedPreconditionError("the model's tokenizer allows no structures", reason="STRUCTURE_UNSUPPORTED")
        self._structures.check(structure)

    def new_detokenizer(self) -> Detokenizer:
        """A detokenizer for one generation; special tokens don't show in its text."""
        return self._detokenizers.new()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As a batch of one: for a single text the library holds the interpreter's lock all along, and with it
        # the event loop (0.9 s for 480,000 characters).
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [asdict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # `raise_exception` of a template raises exactly this class, with the template author's words. Any
            # other error's words could hold parts of the prompt.
            told = f": {' '.join(str(error).split())[:200]}" if type(error) is jinja2.TemplateError else ""
            description = f"the model's chat template refuses this conversation{told}"
            raise InvalidArgumentError("messages", description, reason="CHAT_TEMPLATE") from error
        return str(text)


class TokenizerPool:
    """A few threads that tokenize, with a bounded number of texts in and before them."""

    def __init__(self, tokenizer: Tokenizer, *, num_threads: int, max_pending: int) -> None:
        self._tokenizer = tokenizer
        self._max_pending = max_pending
        self._num_pending = 0
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def encode(self, text: str) -> list[int]:
        """Like `Tokenizer.encode`. ResourceExhaustedError when too many texts wait."""
        return await self._run(lambda: self._tokenizer.encode(text))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Like `Tokenizer.encode_chat`. ResourceExhaustedError when too many texts wait."""
        return await self._run(lambda: self._tokenizer.encode_chat(messages))

    async def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Like `Tokenizer.decode`. ResourceExhaustedError when too many texts wait."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, include_special_tokens=include_special_tokens))

    async def check_structure(self, structure: Structure) -> None:
        """Like `Tokenizer.check_structure`. ResourceExhaustedError when too many texts wait."""
        await self._run(lambda: self._tokenizer.check_structure(structure))

    def new_detokenizer(self) -> Detokenizer:
        """A detokenizer for one generation. It runs on the event loop: a token costs microseconds."""
        return self._tokenizer.new_detokenizer()

    def close(self) -> None:
        """Ends the threads. What is running ends by itself; what waits is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._num_pending >= self._max_pending:
            raise ResourceExhaustedError(
                f"{self._max_pending} texts wait to be tokenized",
                reason="TOKENIZER_BUSY",
                retry_after_s=_BUSY_RETRY_AFTER_S,
            )
        with self._lock:
            self._num_pending += 1
        future = self._executor.submit(work)
        # Counted until it is really over, in whichever thread that is: a cancelled caller leaves its text behind.
        future.add_done_callback(self._ended)
        return await asyncio.wrap_future(future)

    def _ended(self, _future: Future[T]) -> None:
        with self._lock:
            self._num_pending -= 1
