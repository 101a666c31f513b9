"""Where Redis is: one server, a cluster, or what Sentinels watch over, as one URL."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

SINGLE_SCHEMES = ("redis", "rediss", "unix")
# `rediss` is TLS, to the servers and to the Sentinels.
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_DEFAULT_PORTS = {"cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL. `single` is a URL of one server with all that does not depend on which one it is.

    `addresses` are the cluster's nodes or the Sentinels to ask, none for one server; `service` is the name that
    Sentinels know the servers by.
    """

    single: str
    addresses: tuple[tuple[str, int], ...] = ()
    service: str | None = None

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ValueError, which does not quote the URL, for what is none."""
        scheme, _, rest = url.partition("://")
        if scheme in SINGLE_SCHEMES:
            return cls(require_location(url))
        if scheme not in CLUSTER_SCHEMES + SENTINEL_SCHEMES:
            begins = " or ".join(f"{each}://" for each in SINGLE_SCHEMES + CLUSTER_SCHEMES + SENTINEL_SCHEMES)
            raise ValueError(f"must be a URL that begins with {begins}")
        tls_or_not, _, kind = scheme.partition("+")
        location, _, query = rest.partition("?")
        userinfo, at, hosts_and_path = location.rpartition("@")
        hosts, _, path = hosts_and_path.partition("/")
        addresses = tuple(_address(host, _DEFAULT_PORTS[kind]) for host in hosts.split(","))
        service = None
        if kind == "sentinel":
            service, _, path = path.partition("/")
            if not service:
                raise ValueError("must name the service after the Sentinels: redis+sentinel://host:26379/service")
        elif path not in ("", "0"):
            raise ValueError("a cluster has no databases but 0")
        host, port = addresses[0]
        shown_host = f"[{host}]" if ":" in host else host
        single = f"{tls_or_not}://{userinfo}{at}{shown_host}:{port}/{path}" + (f"?{query}" if query else "")
        return cls(require_location(single), addresses, service)


def require_location(url: str) -> str:
    """`url` itself, when it names a host or a path and no impossible port; else ValueError, which does not quote it."""
    parts = urlsplit(url)
    if not (parts.hostname or parts.path.strip("/")):
        raise ValueError("must name a host or a path")
    if parts.port == 0:  # `port` raises ValueError beyond 65535
        raise ValueError("must name a port from 1 to 65535")
    return url


def _address(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError("must name hosts as host:port, separated by commas")
    return parts.hostname, parts.port or default_port
