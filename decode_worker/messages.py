"""What the server process and the engine process of a decode worker tell each other: plain data, pickled.

Commands go to the engine, which looks at them before each step, and again after it before it believes the
step's outputs. Events come back in one batch a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from baton.worker.messages import Cancel, Failed

if TYPE_CHECKING:
    from baton.core.generation import FinishReason, SamplingParams, StopRule, Structure, TokenLogprobs
    from kv_transfer.descriptor import Growth, KVDescriptor, PeerKey, PeerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPeer:
    """A handshake made a source's pool known. Comes before the first Accept that reads from it."""

    pool: PeerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPeer:
    """The source is dead or was replaced: nothing may be held of it any more. Harmless when it is not known."""

    peer: PeerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """A sequence to be taken over; it fits the model and the pool, and its peer has been opened.

    `prompt_ids` is empty unless `sampling.penalizes_prompt`; `top_logprobs` is as in `SequenceSlice`. `output_ids` are
    the output of earlier attempts, before the first token; `kv` has it. `first_token_ids` has one for each of the
    `num_choices` outputs, and is empty when `kv` is growing: `Grow` tells it with the last blocks, which lie in blocks
    of `source_block_size` positions.
    """

    attempt_id: str
    kv: KVDescriptor
    first_token_ids: tuple[int, ...]
    source_block_size: int
    sampling: SamplingParams
    stop: StopRule
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    structure: Structure | None = None
    num_choices: int = 1
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndChoice:
    """Nobody wants more of one of the attempt's outputs. Harmless when that has ended, or is not here yet."""

    attempt_id: str
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grow:
    """More of a growing cache may be read. Harmless when the attempt has ended."""

    attempt_id: str
    growth: Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """The attempt's reader is behind: no more tokens for now. Harmless when it has ended."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The attempt's reader has caught up. Harmless when it has ended or was not parked."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The KV cache is in this worker's pool; the source's may go. The sequence joins the next step."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    transport: str
    num_bytes: int
    wait_s: float
    copy_s: float
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The next token of a choice, at `position`, the prompt included; `finish_reason` is set when it is its last."""

    is_last: ClassVar[bool] = False
    attempt_id: str
    position: int
    token_id: int
    choice: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of a sequence whose choices ran to their ends, the last for `reason`: its blocks are free."""

    is_last: ClassVar[bool] = True
    attempt_id: str
    reason: FinishReason
    num_steps: int
    generate_s: float


DecodeCommand = OpenPeer | ForgetPeer | Accept | Grow | EndChoice | Cancel | Park | Resume
DecodeEvent = HandedOver | Token | Finished | Failed
