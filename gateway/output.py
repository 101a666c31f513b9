"""One choice's output: tokens in, certain text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.generation import FinishReason
from gateway.events import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import TokenLogprobs
    from gateway.detokenizer import Detokenizer
    from gateway.stop_strings import StopStringMatcher


class Output:
    """Detokenizes, matches stop strings and counts. A stop token counts, but its text does not show.

    Stop strings are looked for in the text that the tokens after the first `min_tokens` make certain. `token_ids` are
    those that the output has; when it `is_over`, `reason` says why, None if the worker's reason is not known here.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: StopStringMatcher,
        stop_token_ids: frozenset[int],
        *,
        min_tokens: int = 0,
        choice: int = 0,
    ) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.is_over = False
        self.reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: FinishReason | None = None,
    ) -> Delta:
        """The news that these tokens make, with `logprobs` for each or none; with `finish_reason` they are the last.

        Tokens after a stop string are dropped; what comes when it is over is no news.
        """
        if self.is_over:
            return Delta("", choice=self.choice)
        texts: list[str] = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            if token_id not in self._stop_token_ids:
                text = self._detokenizer.push((token_id,))
                if len(self.token_ids) + taken > self._min_tokens:
                    text = self._stop_strings.push(text)
                texts.append(text)
                if self._stop_strings.is_stopped:
                    break
        self.token_ids += token_ids[:taken]
        if finish_reason is not None or self._stop_strings.is_stopped:
            texts.append(self._end(finish_reason))
        return Delta("".join(texts), tuple(token_ids[:taken]), tuple(logprobs[:taken]), self.choice, self.reason)

    def finish(self, reason: FinishReason | None) -> Delta:
        """No more tokens come: what was held back, which may complete a stop string. Nothing when it is over."""
        if self.is_over:
            return Delta("", choice=self.choice)
        return Delta(self._end(reason), choice=self.choice, finish_reason=self.reason)

    def _end(self, reason: FinishReason | None) -> str:
        tail = ""
        if not self._stop_strings.is_stopped:
            tail = self._stop_strings.push(self._detokenizer.flush())
        if not self._stop_strings.is_stopped:
            tail += self._stop_strings.flush()
        self.is_over = True
        self.reason = FinishReason.STOP if self._stop_strings.is_stopped else reason
        return tail
