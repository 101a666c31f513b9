from __future__ import annotations

import pytest

from baton.core.errors import UnavailableError
from baton.core.workers import Grant
from gateway.losses import loss_of
from tests.fixtures.coordination import record

GRANT = Grant(attempt_id="a", prefill=record("p1"), decode=record("d1"), queue_s=0.0)


def lost(worker_id: str, worker_reason: str = "") -> UnavailableError:
    metadata = {"worker_id": worker_id} | ({"worker_reason": worker_reason} if worker_reason else {})
    return UnavailableError("lost", reason="WORKER_LOST", metadata=metadata)


@pytest.mark.parametrize(
    ("error", "role"),
    [
        (lost("p1"), "prefill"),
        (lost("d1"), "decode"),
        (lost("d1", "ENGINE_DIED"), "decode"),
        (lost("d1", "DRAINING"), "decode"),
        # The decode worker lives, and says that the source of the cache does not answer.
        (lost("d1", "PEER_GONE"), "prefill"),
        (lost("d1", "TRANSFER_FAILED"), "prefill"),
        (lost("d1", "LEASE_STALE"), "prefill"),
    ],
)
def test_who_is_to_blame(error: UnavailableError, role: str) -> None:
    loss = loss_of(error, GRANT)
    assert loss is not None
    assert (loss.role, loss.error) == (role, error)


def test_a_worker_that_was_lost_before_the_grant_was_heard_of_is_not_known() -> None:
    loss = loss_of(UnavailableError("gone", reason="WORKER_LOST"), None)
    assert loss is not None
    assert (loss.worker, loss.role) == (None, "unknown")


@pytest.mark.parametrize("reason", ["NO_WORKER", "REDIS_UNAVAILABLE", "SHUTTING_DOWN"])
def test_other_failures_are_no_losses(reason: str) -> None:
    assert loss_of(UnavailableError("no", reason=reason), GRANT) is None
