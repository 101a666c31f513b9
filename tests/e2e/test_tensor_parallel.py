"""The real model divided among ranks says what the reference implementation says, whichever side has the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
import torch
import transformers

from baton.v1 import gateway_pb2
from tests.e2e.conftest import running_system
from tests.e2e.prompts import TEXTS
from tests.fixtures.processes import descendants
from tests.integration.workers.test_deaths import is_running

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = TEXTS[:4]
MAX_TOKENS = 16

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    answers = []
    for text in PROMPTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("divided", ["prefill_worker", "decode_worker"])
async def test_one_side_of_two_ranks_and_one_of_one(model_folder, tmp_path, expected, divided) -> None:
    """SmolLM2-135M has three KV heads: the ranks have one and two of them."""
    environment = {
        "BATON_ENGINE__KV_CACHE_BYTES": "128MiB",
        f"BATON_{divided.upper()}__ENGINE__TENSOR_PARALLEL_SIZE": "2",
    }
    with running_system(model_folder, tmp_path, environment) as system:
        name = f" {divided.removesuffix('_worker')}_engine rank-1 "
        rank_pids = [pid for pid, command in descendants(system.process.pid).items() if name in command]
        assert len(rank_pids) == 1
        async with grpc.aio.insecure_channel(system.address) as channel:
            for text, tokens in zip(PROMPTS, expected, strict=True):
                request = gateway_pb2.GenerateRequest(text=text)
                request.sampling.temperature = 0.0
                request.stop.max_tokens = MAX_TOKENS
                assert list((await system.stub(channel).Complete(request)).token_ids) == tokens
    assert not any(is_running(pid) for pid in rank_pids)
