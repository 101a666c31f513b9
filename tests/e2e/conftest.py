"""The whole system as `baton up` runs it, with the real model in float32."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import gateway_pb2_grpc
from tests.fixtures.otlp import OtlpReceiver
from tests.fixtures.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_TIMEOUT_S = 200.0
COMPONENTS = ("gateway", "prefill_worker", "decode_worker")


@dataclass(frozen=True, kw_only=True)
class System:
    """A running system: where it answers, where its parts show metrics, and what it traces to."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_ports: dict[str, int]
    traces: OtlpReceiver

    def stub(self, channel: grpc.aio.Channel) -> gateway_pb2_grpc.GatewayServiceAsyncStub:
        return gateway_pb2_grpc.GatewayServiceStub(channel)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the gateway says SERVING: when requests can run from end to end."""
        deadline_s = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                assert self.process.poll() is None, f"baton up ended with {self.process.returncode}"
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                assert time.monotonic() < deadline_s, "the system did not become ready in time"
                time.sleep(0.1)


@contextmanager
def running_system(model_folder: Path, log_folder: Path, environment: dict[str, str]) -> Iterator[System]:
    """`baton up` in float32, with these variables besides, until the block ends: then it must end well."""
    with OtlpReceiver() as traces:
        port = free_port()
        metrics_ports = {name: free_port() for name in COMPONENTS}
        environment = {
            **os.environ,
            "BATON_ENGINE__DTYPE": "float32",
            "BATON_TELEMETRY__OTLP_ENDPOINT": traces.endpoint,
            **{f"BATON_{name.upper()}__TELEMETRY__METRICS_PORT": str(value) for name, value in metrics_ports.items()},
            **environment,
        }
        with (log_folder / "baton-up.log").open("wb") as log:
            command = [sys.executable, "-m", "baton.cli", "up", "--model", str(model_folder), "--port", str(port)]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        running = System(process=process, address=f"127.0.0.1:{port}", metrics_ports=metrics_ports, traces=traces)
        try:
            running.wait_ready()
            yield running
        finally:
            process.terminate()
            try:
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert code == 0, f"baton up ended with {code}"


@dataclass(frozen=True)
class Reference:
    """transformers' own tokenizer and model, in float32."""

    tokenizer: Any
    model: Any

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """[positions, vocabulary]: row i is for the token after position i."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].to(torch.float64), dim=-1)

    def greedy(self, prompt: list[int], answer: list[int]) -> list[int]:
        """What it says at each place of `answer` after what stands before: `answer` itself, or it is not greedy's.

        One pass over everything, where to generate would take one for each token.
        """
        return self.log_probabilities(prompt + answer)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    return Reference(
        tokenizer=transformers.AutoTokenizer.from_pretrained(model_folder),
        model=transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval(),
    )


@pytest.fixture(scope="session")
def system(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for the whole session. Tests leave it as they found it: idle, all blocks free."""
    environment = {"BATON_ENGINE__KV_CACHE_BYTES": "1GiB"}
    with running_system(model_folder, tmp_path_factory.mktemp("system"), environment) as system:
        yield system
