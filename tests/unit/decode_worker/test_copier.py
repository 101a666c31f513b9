from __future__ import annotations

import threading

import pytest

from baton.core.errors import InternalError, OutOfMemoryError
from decode_worker.copier import ThreadCopier
from kv_transfer.errors import StaleLeaseError
from kv_transfer.transport import ReadResult

RESULT = ReadResult(transport="shm", num_bytes=64, copy_s=0.25)


class Readers:
    """Ends every read as it is told."""

    def __init__(self, outcome: ReadResult | Exception) -> None:
        self.outcome = outcome

    def read(self, kv, pool, block_ids):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close_all(self):
        pass


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (StaleLeaseError("ended"), "LEASE_STALE"),
        (MemoryError(), "OUT_OF_MEMORY"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "OUT_OF_MEMORY"),
        (ZeroDivisionError(), "INTERNAL"),
    ],
)
def test_whatever_ends_a_copy_is_told(outcome, reason):
    woken = threading.Event()
    copier = ThreadCopier(Readers(outcome), None, woken.set)
    copier.start("a", None, [0])
    assert woken.wait(10)
    (done,) = copier.take_done()
    assert (done.attempt_id, done.result.reason) == ("a", reason)
    assert isinstance(done.result, StaleLeaseError | OutOfMemoryError | InternalError)
    copier.close()


def test_a_copy_that_ended_well_has_its_result():
    woken = threading.Event()
    copier = ThreadCopier(Readers(RESULT), None, woken.set)
    copier.start("a", None, [0])
    assert woken.wait(10)
    assert copier.has_done
    assert [done.result for done in copier.take_done()] == [RESULT]
    copier.close()
