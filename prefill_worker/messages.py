"""What the server process and the engine process of a prefill worker tell each other: plain data, pickled.

Commands go to the engine, which looks at them before each step, and again after it before it believes the
step's outputs. Events come back in one batch a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from baton.core.generation import NO_LOGPROBS
from baton.worker.messages import Cancel, Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import FinishReason, LogprobOptions, SamplingParams, StopRule, Structure, TokenLogprobs
    from kv_transfer.lease import LeaseOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A prompt to be computed; it fits the model and the pool. `lease_id` names the lease it may end in.

    The last `num_output_tokens` of `token_ids` are output of earlier attempts.
    """

    attempt_id: str
    lease_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stop: StopRule
    logprobs: LogprobOptions = NO_LOGPROBS
    structure: Structure | None = None
    num_output_tokens: int = 0
    cache_salt: str = ""
    num_choices: int = 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return len(self.token_ids) - self.num_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLease:
    """The lease's reader is alive. Harmless when the lease has ended."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """The lease's reader has the blocks or gives up. Harmless when the lease has ended."""

    lease_id: str
    outcome: LeaseOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The attempt has its blocks and its first chunk is next. `queue_s`: how long it waited for that."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """A chunk of the prompt is computed whose log-probabilities were asked for; they begin at `first_position`."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    first_position: int
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCache:
    """The KV cache of a prompt, as far as it is computed, for one reader, while its lease lasts."""

    lease_id: str
    slot: int
    generation: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGrown:
    """A chunk of a prompt is computed, and more of its cache may be read; `is_new` when nothing could before."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    cache: HeldCache
    is_new: bool


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one output; `finish_reason` is set when it is the last too."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDone:
    """The prompt is computed and the first token of each choice known. `cache` is None when none goes on after its."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    first_tokens: tuple[FirstToken, ...]
    compute_s: float
    num_chunks: int
    num_cached_tokens: int
    cache: HeldCache | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Last event of an attempt that was computed: its blocks are free. `outcome` is None where no lease was."""

    is_last: ClassVar[bool] = True
    attempt_id: str
    outcome: LeaseOutcome | None


PrefillCommand = Submit | Cancel | RenewLease | ReleaseLease
PrefillEvent = Started | PromptScored | CacheGrown | PromptDone | Released | Failed
