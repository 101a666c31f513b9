"""How a handover fails. Each failure is one request's; the pair of workers stays usable unless it says so."""

from __future__ import annotations

from baton.core.errors import FailedPreconditionError, NotFoundError, UnavailableError


class StaleLeaseError(UnavailableError):
    """The lease ended before the blocks were read: what was copied, if anything, must not be used.

    The prompt can be computed again, so the request as a whole may be retried.
    """

    default_reason = "LEASE_STALE"


class LeaseNotFoundError(NotFoundError):
    """A lease to be renewed has ended, or never was."""

    default_reason = "LEASE_NOT_FOUND"


class PeerGoneError(UnavailableError):
    """The worker that holds the blocks is dead, unreachable or replaced by another life of itself."""

    default_reason = "PEER_GONE"


class PoolMismatchError(FailedPreconditionError):
    """A pool is not what the handshake promised: another layout, another version, another life."""

    default_reason = "POOL_MISMATCH"


class NoTransportError(FailedPreconditionError):
    """No transport joins the two workers."""

    default_reason = "NO_TRANSPORT"


class TransferFailedError(UnavailableError):
    """A transport broke or stalled in the middle of a read. Another transport of the same pair may still work."""

    default_reason = "TRANSFER_FAILED"


class ChecksumError(TransferFailedError):
    """What arrived is not what was sent."""

    default_reason = "CHECKSUM_MISMATCH"
