"""The one exception hierarchy of Baton.

Each class stands for one gRPC status; `baton.rpc.errors` is the only place that maps between the two. A
message is one line that names what to change; it never carries a prompt or an output.
"""

from __future__ import annotations


class ServingError(Exception):
    """A request failed for a reason that its sender can read.

    `reason` is a stable UPPER_SNAKE_CASE word for programs, `message` is for people, and `metadata` holds
    further values for programs.
    """

    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str = "", metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = metadata or {}

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross from engine to server processes; by default pickle would call each class with its message only.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[ServingError], args: tuple[object, ...], attributes: dict[str, object]) -> ServingError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(ServingError):
    """A field is malformed, whatever the state of the service."""

    default_reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str, *, reason: str = "") -> None:
        super().__init__(f"{field}: {description}", reason=reason)
        self.field = field
        self.description = description


class OutOfRangeError(ServingError):
    """A field is well formed but beyond a limit of this model or deployment."""

    default_reason = "OUT_OF_RANGE"

    def __init__(self, field: str, description: str, *, limit: int | float, reason: str = "") -> None:
        super().__init__(f"{field}: {description}", reason=reason, metadata={"limit": str(limit)})
        self.field = field
        self.description = description
        self.limit = limit


class NotFoundError(ServingError):
    """A named thing does not exist."""

    default_reason = "NOT_FOUND"


class AlreadyExistsError(ServingError):
    """A name that must be unique is taken."""

    default_reason = "ALREADY_EXISTS"


class FailedPreconditionError(ServingError):
    """The two sides do not fit: a retry without a change fails again."""

    default_reason = "FAILED_PRECONDITION"


class ResourceExhaustedError(ServingError):
    """The service is full. `retry_after_s` is when a retry can succeed; None means that no retry will."""

    default_reason = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class OutOfMemoryError(ResourceExhaustedError):
    """An allocation failed, and this request was given up for it."""

    default_reason = "OUT_OF_MEMORY"


class UnavailableError(ServingError):
    """Something that is needed is away for now: no worker, no Redis, draining."""

    default_reason = "UNAVAILABLE"


class DeadlineExceededError(ServingError):
    """The request's time is up."""

    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(ServingError):
    """The request was cancelled by whoever sent it. Not `asyncio.CancelledError`: this one crosses processes."""

    default_reason = "CANCELLED"


class UnauthenticatedError(ServingError):
    """The caller did not prove who it is."""

    default_reason = "UNAUTHENTICATED"


class InternalError(ServingError):
    """A fault of ours."""


class StartupError(Exception):
    """A process cannot start. Its message is the one line that is shown; the exit code is not 0."""


class EngineFaultError(Exception):
    """An engine that served cannot go on and ends itself. Its message is one line, with no request's content."""
