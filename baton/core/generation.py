"""What a generation is asked to do, after all defaults are filled in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import Enum

# More outputs of one prompt than this cannot be allowed by any setting.
MAX_CHOICES = 128


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    The noise of the token at position p depends on `seed`, p and the ids alone, so prefill and decode workers
    continue one stream without passing any state. The penalties depend on the tokens before p too. The wire's
    `SamplingParams` says what each field does; `logit_bias` is sorted by id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    def of_choice(self, choice: int) -> SamplingParams:
        """The parameters of one of several outputs for a prompt: each follows a random stream of its own.

        The first has the request's; those of the others follow from its seed.
        """
        if choice == 0:
            return self
        digest = hashlib.blake2b(b"%d/%d" % (self.seed, choice), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest, "big"))

    @property
    def penalizes_prompt(self) -> bool:
        """Whether the prompt's tokens change the choice beyond what the model makes of them."""
        return self.repetition_penalty != 1.0

    @property
    def penalizes_output(self) -> bool:
        """Whether it matters how often the output has a token."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a sequence ends by its tokens. Stop strings are matched where text exists: at the gateway.

    The first `min_tokens` tokens are chosen from all others than `stop_token_ids`.
    """

    max_tokens: int
    stop_token_ids: frozenset[int]
    min_tokens: int = 0

    def finish_reason(self, token_id: int, num_generated: int) -> FinishReason | None:
        """Why the sequence ends with `token_id` as its `num_generated`-th output token; None when it goes on."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if num_generated >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """How many of the most likely tokens come with each token's log-probability; None: no log-probabilities."""

    output_top: int | None = None
    prompt_top: int | None = None


NO_LOGPROBS = LogprobOptions()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities at the place of one token: its own, and the largest ones.

    `top` has (id, log-probability), most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StructureKind(Enum):
    """How the form of an output is told; the value is the wire's field."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"

    @property
    def field(self) -> str:
        """The field that an error names."""
        return f"structure.{self.value}"


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an output's text must have."""

    kind: StructureKind
    text: str
