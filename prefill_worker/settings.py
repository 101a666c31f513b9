"""Settings of the prefill worker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from baton.core.settings import LeaseSettings
from baton.worker.settings import WORKER_ID_PATTERN, WorkerSettings, host_name
from kv_transfer.settings import SourceHandoverSettings
from prefill_worker.scheduler import PrefillLimits


def name_after_host() -> str:
    """A name that is unique where a host has one prefill worker."""
    return f"prefill-{host_name()}"


class PrefillWorkerSettings(WorkerSettings):
    """A worker that turns prompts into KV caches and first tokens."""

    class_name: ClassVar[str] = "prefill_worker"

    lease: LeaseSettings = LeaseSettings()
    handover: SourceHandoverSettings = SourceHandoverSettings()
    worker_id: str = Field(
        default_factory=name_after_host,
        pattern=WORKER_ID_PATTERN,
        description="Unique name, stable over restarts; default: prefill-<host name>, so set it for two on one host; "
        "while a worker lives, another one of its name does not start",
    )
    oldest_share: float = Field(
        default=0.25, gt=0, le=1, description="Share of the computed tokens that the oldest prompt is sure to get"
    )
    prefix_cache: bool = Field(
        default=True, description="Whether prompts that begin alike share the KV blocks of what they have in common"
    )

    @property
    def limits(self) -> PrefillLimits:
        """What the scheduler may do."""
        return PrefillLimits(
            max_num_batched_tokens=self.engine.max_num_batched_tokens,
            max_num_seqs=self.engine.max_num_seqs,
            oldest_share=self.oldest_share,
        )
