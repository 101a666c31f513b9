"""One generation's output: tokens in, certain text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.events import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import TokenLogprobs
    from gateway.detokenizer import Detokenizer
    from gateway.stop_strings import StopStringMatcher


class Output:
    """Detokenizes, matches stop strings and counts. A stop token counts, but its text does not show.

    Stop strings are looked for in the text that the tokens after the first `min_tokens` make certain.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: StopStringMatcher,
        stop_token_ids: frozenset[int],
        *,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far, up to the one that completed a stop string."""
        return self._num_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the output; tokens after it do not belong to it."""
        return self._stop_strings.is_stopped

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Delta:
        """The news that these tokens make, with `logprobs` for each or none. Tokens after a stop string are dropped."""
        texts: list[str] = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            if token_id not in self._stop_token_ids:
                text = self._detokenizer.push((token_id,))
                if self._num_tokens + taken > self._min_tokens:
                    text = self._stop_strings.push(text)
                texts.append(text)
                if self.is_stopped:
                    break
        self._num_tokens += taken
        return Delta("".join(texts), tuple(token_ids[:taken]), tuple(logprobs[:taken]))

    def finish(self) -> Delta:
        """No more tokens come: what was held back. It may complete a stop string, see `is_stopped`."""
        if self.is_stopped:
            return Delta("")
        text = self._stop_strings.push(self._detokenizer.flush())
        return Delta(text if self.is_stopped else text + self._stop_strings.flush())
