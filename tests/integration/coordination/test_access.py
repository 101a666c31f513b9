"""Redis behind passwords, with few rights, behind TLS, and in cluster mode: all that is needed stands in the URL."""

from __future__ import annotations

import asyncio
import shutil
import signal
import ssl
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from baton.coordination.client import connect
from baton.coordination.embedded import EmbeddedRedis, _find_binary
from baton.coordination.keys import Keys
from baton.core.errors import StartupError, UnavailableError
from baton.core.launch import bound_to_this_process
from baton.core.settings import RedisSettings
from tests.fixtures.coordination import KEYS, Stage, open_stage, ticket
from tests.fixtures.processes import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.fixtures.redis import PrivateRedis

# As docs/operations.md shows it; the namespace of the tests is `test`.
RIGHTS = (
    "on >s3cret resetkeys ~{test:*}:* resetchannels &{test:*}:* -@all +@connection +@hash +@sortedset +@string"
    " +eval +evalsha +script|load +publish +subscribe +unsubscribe +info +time"
)


async def serve_a_request(stage: Stage) -> None:
    """Everything that a deployment asks of Redis, but for what a loss makes it ask."""
    async with stage.beating("p1", "d1"), stage.gateway("g1") as one, stage.gateway("g2") as two:
        async with one.admit(ticket("1")) as place, two.admit(ticket("2")) as other:
            await place.granted()
            await place.release_prefill()
            await other.granted()
            assert len(await one.status()) == 2
        await stage.assert_idle(one)
    await stage.registry.deregister("d1", "i1")


def url_for(server: PrivateRedis, user: str, password: str) -> str:
    return server.url.replace("unix://", f"unix://{user}:{password}@")


async def test_a_user_with_few_rights_is_enough(private_redis: PrivateRedis):
    assert private_redis.ask("ACL", "SETUSER", "baton", RIGHTS).startswith(b"+OK")
    assert private_redis.ask("ACL", "SETUSER", "default", "off").startswith(b"+OK")
    async with open_stage(url_for(private_redis, "baton", "s3cret")) as stage:
        await serve_a_request(stage)
        # Other deployments' keys are out of its reach.
        foreign = Stage(stage.connection, stage.url)
        foreign.registry._commands._keys = Keys("other", "model").all
        with pytest.raises(UnavailableError, match="NoPermission"):
            await foreign.workers("p1")


async def test_wrong_credentials_are_one_line_without_the_secret(private_redis: PrivateRedis):
    private_redis.ask("ACL", "SETUSER", "baton", RIGHTS)
    with pytest.raises(StartupError, match=r"redis\.url: cannot use Redis") as error:
        await connect(RedisSettings(url=url_for(private_redis, "baton", "guess"), socket_timeout_s=20.0), KEYS)
    assert "guess" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return key, certificate


async def test_tls_by_url(redis_server: EmbeddedRedis, certificate: tuple[Path, Path]):
    async with tls_in_front_of(redis_server, *certificate) as port:
        async with open_stage(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate[1]}") as stage:
            await serve_a_request(stage)
        with pytest.raises(StartupError, match="certificate"):
            await connect(RedisSettings(url=f"rediss://127.0.0.1:{port}/0", socket_timeout_s=20.0), KEYS)


@asynccontextmanager
async def tls_in_front_of(server: EmbeddedRedis, key: Path, certificate: Path) -> AsyncIterator[int]:
    """A port of the loopback that speaks TLS and passes on to the server, which cannot."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    path = server.url.removeprefix("unix://").partition("?")[0]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (OSError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(path)
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@pytest.fixture
def cluster_node(tmp_path: Path) -> Iterator[Path]:
    """The Unix socket of a server in cluster mode that has no slots yet; it may not answer yet either."""
    port = free_port(and_above=10_000)  # the cluster's own port is 10,000 above it
    path = tmp_path / "redis.sock"
    options = {"port": port, "unixsocket": path, "dir": tmp_path, "save": "", "cluster-enabled": "yes"}
    command = [str(_find_binary()), "--bind", "127.0.0.1"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with subprocess.Popen(bound_to_this_process(command, signal.SIGKILL), stdout=subprocess.DEVNULL) as process:
        yield path
        process.kill()


async def test_all_keys_of_a_model_lie_in_one_slot_of_a_cluster(cluster_node: Path):
    """A node in cluster mode refuses a script whose keys lie in different slots."""
    async with asyncio.timeout(60):
        while not cluster_node.exists():
            await asyncio.sleep(0.02)
        admin = Redis.from_url(f"unix://{cluster_node}")
        await admin.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        while b"cluster_state:ok" not in await admin.execute_command("CLUSTER", "INFO"):
            await asyncio.sleep(0.02)
        with pytest.raises(ResponseError, match="same slot"):
            await admin.eval("return 1", 2, "a", "b")
        await admin.aclose()
    async with open_stage(f"unix://{cluster_node}") as stage:
        await serve_a_request(stage)
