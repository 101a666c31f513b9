"""What a sequence's own past and its fewest tokens do to the choice of its next token. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from baton.core.generation import SamplingParams, StopRule


class TokenRules:
    """State of one sequence that asks for penalties, biases or a fewest number of tokens; others have none.

    Whoever keeps the sequence's books makes it, hands it to the executor with each slice that samples, and adds each
    token that was chosen. It can be made anew at any point of a sequence, on any worker, from the tokens so far.
    """

    def __init__(self, sampling: SamplingParams, stop: StopRule) -> None:
        self.sampling = sampling
        self._stop = stop
        self._num_output = 0
        # Kept only where they matter. A dict keeps the order, so that equal sequences are computed equally.
        self._seen: dict[int, None] = {}
        self._output_counts: dict[int, int] = {}

    @classmethod
    def start(
        cls,
        sampling: SamplingParams,
        stop: StopRule,
        *,
        prompt_ids: Iterable[int],
        output_ids: Iterable[int] = (),
    ) -> TokenRules | None:
        """The rules after these tokens; None where the parameters ask for none.

        `prompt_ids` may be empty unless `sampling.penalizes_prompt`.
        """
        if not (sampling.penalizes_prompt or sampling.penalizes_output or sampling.logit_bias or stop.min_tokens):
            return None
        rules = cls(sampling, stop)
        if sampling.penalizes_prompt:
            rules._seen.update(dict.fromkeys(prompt_ids))
        for token_id in output_ids:
            rules.append(token_id)
        return rules

    def append(self, token_id: int) -> None:
        """Adds a token of the output."""
        self._num_output += 1
        if self.sampling.penalizes_prompt:
            self._seen[token_id] = None
        if self.sampling.penalizes_output:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1

    @property
    def seen_ids(self) -> Collection[int]:
        """Tokens of prompt and output, each once; empty unless there is a repetition penalty."""
        return self._seen.keys()

    @property
    def output_counts(self) -> Mapping[int, int]:
        """How often the output has each of its tokens; empty unless there is a frequency or presence penalty."""
        return self._output_counts

    @property
    def forbidden_ids(self) -> Collection[int]:
        """Tokens that may not come next."""
        return self._stop.stop_token_ids if self._num_output < self._stop.min_tokens else ()
