"""What a sequence's own past, its fewest tokens and its structure do to its next token. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton.core.errors import OutOfRangeError
from baton.core.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from baton.core.generation import SamplingParams, StopRule, Structure
    from baton.structure.compiler import StructureCompiler
    from baton.structure.matcher import StructureMatcher


class Wishes(Protocol):
    """What a request says of how its tokens are chosen and when they end."""

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        ...

    @property
    def stop(self) -> StopRule:
        """When an output ends."""
        ...

    @property
    def structure(self) -> Structure | None:
        """The form of each output."""
        ...


class RuleBook:
    """Begins the rules of sequences. `structures` is None where no structure is taken: the service refuses them."""

    def __init__(self, structures: StructureCompiler | None) -> None:
        self._structures = structures

    def start(self, wishes: Wishes, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> TokenRules | None:
        """The rules of one output after these tokens; None where nothing asks for any. Raises as `TokenRules.start`.

        The same on each worker and at any point of the output. InvalidArgumentError for a structure that is none.
        """
        matcher = None
        if wishes.structure is not None:
            assert self._structures is not None, "the service takes no structures"
            matcher = self._structures.start(wishes.structure, wishes.stop.stop_token_ids)
        return TokenRules.start(
            wishes.sampling, wishes.stop, prompt_ids=prompt_ids, output_ids=output_ids, matcher=matcher
        )


class TokenRules:
    """State of one sequence that asks for penalties, biases, a structure or a fewest number of tokens, and of no other.

    Whoever keeps the sequence's books makes it, hands it to the executor with each slice that samples, and adds each
    token that was chosen. It can be made anew at any point of a sequence, on any worker, from the tokens so far.
    """

    def __init__(self, sampling: SamplingParams, stop: StopRule, matcher: StructureMatcher | None) -> None:
        self.sampling = sampling
        self._matcher = matcher
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
        matcher: StructureMatcher | None = None,
    ) -> TokenRules | None:
        """The rules after these tokens; None where the parameters ask for none.

        Raises as `append` does, and OutOfRangeError where the structure lets nothing follow.
        `prompt_ids` may be empty unless `sampling.penalizes_prompt`. `matcher` is new, and the rules' own from now on.
        """
        has_penalty = sampling.penalizes_prompt or sampling.penalizes_output or bool(sampling.logit_bias)
        if not has_penalty and not stop.min_tokens and matcher is None:
            return None
        rules = cls(sampling, stop, matcher)
        if sampling.penalizes_prompt:
            rules._seen.update(dict.fromkeys(prompt_ids))
        for token_id in output_ids:
            rules.append(token_id)
            if rules.is_complete:
                raise OutOfRangeError(
                    "structure",
                    f"nothing may follow the first {rules._num_output} tokens of the output",
                    limit=rules._num_output,
                )
        return rules

    def append(self, token_id: int) -> None:
        """Adds a token of the output. ResourceExhaustedError when its structure cannot be followed any further."""
        self._num_output += 1
        if self.sampling.penalizes_prompt:
            self._seen[token_id] = None
        if self.sampling.penalizes_output:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        if self._matcher is not None:
            self._matcher.append(token_id)

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

    @property
    def allowed(self) -> bytearray | None:
        """The tokens that may come next by the structure, as `StructureMatcher.allowed`; None without one."""
        return None if self._matcher is None else self._matcher.allowed

    @property
    def is_complete(self) -> bool:
        """Whether the structure lets nothing follow."""
        return self._matcher is not None and self._matcher.is_complete


def take_token(rules: TokenRules | None, stop: StopRule, token_id: int, num_generated: int) -> FinishReason | None:
    """Adds a sequence's `num_generated`-th output token; returns why the sequence ends with it, None when it goes on.

    Raises as `TokenRules.append` does.
    """
    if rules is not None:
        rules.append(token_id)
        if rules.is_complete:
            return FinishReason.STOP
    return stop.finish_reason(token_id, num_generated)
