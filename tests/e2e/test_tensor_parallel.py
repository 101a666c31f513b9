"""The real model divided among ranks says what the reference implementation says."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.v1 import gateway_pb2
from tests.e2e.conftest import running_system
from tests.e2e.prompts import TEXTS
from tests.fixtures.processes import descendants
from tests.integration.workers.test_deaths import is_running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Reference

PROMPTS = TEXTS[:4]
MAX_TOKENS = 16

pytestmark = pytest.mark.timeout(300)


async def test_both_sides_of_two_ranks(model_folder: Path, tmp_path: Path, reference: Reference) -> None:
    """SmolLM2-135M has three KV heads: the ranks have one and two of them."""
    environment = {"BATON_ENGINE__KV_CACHE_BYTES": "128MiB", "BATON_ENGINE__TENSOR_PARALLEL_SIZE": "2"}
    with running_system(model_folder, tmp_path, environment) as system:
        commands = descendants(system.process.pid).items()
        rank_pids = [pid for pid, command in commands if re.search(" (prefill|decode)_engine rank-1 ", command)]
        assert len(rank_pids) == 2
        async with grpc.aio.insecure_channel(system.address) as channel:
            for text in PROMPTS:
                request = gateway_pb2.GenerateRequest(text=text)
                request.sampling.temperature = 0.0
                request.stop.max_tokens = MAX_TOKENS
                answer = list((await system.stub(channel).Complete(request)).token_ids)
                assert answer == reference.greedy(reference.tokenizer(text)["input_ids"], answer)
    deadline_s = time.monotonic() + 20
    while any(is_running(pid) for pid in rank_pids):
        assert time.monotonic() < deadline_s, "a rank outlives its system"
        await asyncio.sleep(0.05)
