"""Who sends a request, and how long that caller waits for it: what a call carries beside its message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.core.errors import InvalidArgumentError
from baton.rpc.deadlines import remaining_s

if TYPE_CHECKING:
    from collections.abc import Iterable

TENANT_KEY = "x-baton-tenant"
DEFAULT_TENANT = "default"

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant whose turn a request takes, and the seconds that it may live."""

    tenant: str
    timeout_s: float


class CallContext(Protocol):
    """A server's context."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The call's metadata; keys are lower case."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        ...


def read_caller(context: CallContext, *, longest_s: float) -> Caller:
    """The caller of a call that may live `longest_s` at most.

    InvalidArgumentError for a tenant that is no name, DeadlineExceededError when the deadline is over already.
    """
    client_s = remaining_s(context)
    return Caller(
        tenant=_tenant(context.invocation_metadata() or ()),
        timeout_s=longest_s if client_s is None else min(longest_s, client_s),
    )


def _tenant(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    given = [value for key, value in metadata if key == TENANT_KEY]
    if not given:
        return DEFAULT_TENANT
    if len(given) > 1:
        raise InvalidArgumentError(TENANT_KEY, f"must be given once; it is given {len(given)} times")
    tenant = given[0]
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidArgumentError(TENANT_KEY, "must be 1 to 64 characters of [A-Za-z0-9._-]")
    return tenant
