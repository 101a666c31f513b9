"""Runs a supervisor over fake components and tells each event as a line of JSON. Run as a script.

The argument is JSON: a list of stages, each a list of {"name", "args", "needs", "drain_s"}; a child named `redis` is
the embedded one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from baton.cli.child import Child
from baton.cli.readiness import watch_grpc, watch_redis
from baton.cli.redis import RedisChild
from baton.cli.restart import RestartPolicy
from baton.cli.supervisor import ChildSpec, ChildState, Supervisor
from baton.cli.topology import free_port
from baton.coordination.embedded import EmbeddedRedis
from baton.core.clock import SystemClock
from baton.core.errors import StartupError

COMPONENT = Path(__file__).with_name("fake_component.py")


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Teller:
    def changed(self, name: str, state: ChildState, detail: str) -> None:
        tell(name=name, state=state.value, detail=detail)

    def line(self, name: str, text: str) -> None:
        tell(name=name, line=text)


async def main(stages: list[list[dict]]) -> int:
    redis = EmbeddedRedis()

    def spec(child: dict) -> ChildSpec:
        def start(on_line):
            if child["name"] == "redis":
                started = RedisChild(redis)
                tell(name="redis", pid=redis.pid)
                return started
            port = free_port("127.0.0.1")
            command = [sys.executable, str(COMPONENT), "--port", str(port), *child.get("args", [])]
            started = Child(command, on_line, address=f"127.0.0.1:{port}")
            tell(name=child["name"], pid=started.pid)
            return started

        return ChildSpec(
            name=child["name"],
            start=start,
            watch=watch_redis if child["name"] == "redis" else watch_grpc,
            needs=tuple(child.get("needs", [])),
            drain_s=child.get("drain_s", 30.0),
        )

    supervisor = Supervisor(
        [[spec(child) for child in stage] for stage in stages],
        Teller(),
        SystemClock(),
        lambda: RestartPolicy(first_delay_s=0.05),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.request_stop)
    try:
        await supervisor.run()
    except StartupError as error:
        tell(failure=str(error))
        return 1
    finally:
        redis.stop()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(json.loads(sys.argv[1]))))
