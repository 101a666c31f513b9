"""What a prompt's first token is when its beginning was computed for another: by the real scheduler and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.core.generation import LogprobOptions, SamplingParams, TokenLogprobs
from baton.core.prefixes import PrefixDigests
from baton.engine.block_pool import BlockPool
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from prefill_worker.scheduler import Prefill, PrefillLimits, PrefillScheduler
from tests.integration.engine import families

if TYPE_CHECKING:
    from pathlib import Path

NUM_BLOCKS, BLOCK_SIZE = 64, 4
BEGINNING = [(7 * index + index * index) % 200 + 5 for index in range(48)]
FIRST, SECOND = [*BEGINNING, *range(20, 31)], [*BEGINNING, *range(60, 65)]
SAMPLING = SamplingParams(seed=3, temperature=0.8)


class Engine:
    """A prefill engine's scheduler and executor. `budget` says where prompts are cut."""

    def __init__(self, model: Path, dtype: str, budget: int, *, shares: bool) -> None:
        layout = DecoderConfig.from_folder(model).kv_layout(BLOCK_SIZE, dtype)
        self.executor = TorchExecutor.from_folder(model, pool=KVPool(layout, NUM_BLOCKS))
        limits = PrefillLimits(max_num_batched_tokens=budget, max_num_seqs=4, oldest_share=0.25)
        digests = PrefixDigests(BLOCK_SIZE) if shares else None
        self.scheduler = PrefillScheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), limits, digests)

    def first_token(self, token_ids: list[int]) -> tuple[int, TokenLogprobs, int]:
        """The token, log-probabilities there, and how many tokens of the prompt were found computed."""
        options = LogprobOptions(output_top=5)
        prefill = Prefill(attempt_id="a", token_ids=token_ids, sampling=SAMPLING, arrived_s=0.0, logprobs=options)
        self.scheduler.add(prefill)
        while True:
            self.scheduler.start_waiting(0.0)
            plan = self.scheduler.plan()
            output = self.executor.execute(plan)
            for index, _ in self.scheduler.commit(plan):
                token = output.tokens[index]
                assert token is not None
                self.scheduler.release("a")
                return token, output.logprobs["a", 0], prefill.num_cached_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_cuts_give_the_same_bits(tmp_path: Path, dtype: str) -> None:
    families.save_model("llama", tmp_path)
    alone = Engine(tmp_path, dtype, 16, shares=False)
    sharing = Engine(tmp_path, dtype, 16, shares=True)
    expected = [alone.first_token(ids) for ids in (FIRST, SECOND, SECOND)]
    found = [sharing.first_token(ids) for ids in (FIRST, SECOND, SECOND)]
    assert [cached for *_, cached in expected] == [0, 0, 0]
    assert [cached for *_, cached in found] == [0, 48, 52]
    # The third starts after a cut that was not made before: see the next test.
    assert [each[:2] for each in found[:2]] == [each[:2] for each in expected[:2]]


@pytest.mark.parametrize("budget", [5, 13, 64])
def test_other_cuts_change_no_token_and_the_logarithms_by_rounding_only(tmp_path: Path, budget: int) -> None:
    families.save_model("llama", tmp_path)
    alone = Engine(tmp_path, "float32", 64, shares=False)
    sharing = Engine(tmp_path, "float32", budget, shares=True)
    for token_ids in (FIRST, SECOND, SECOND, FIRST):
        token, logprobs, _ = alone.first_token(token_ids)
        same_token, close, _ = sharing.first_token(token_ids)
        assert same_token == token
        assert close.logprob == pytest.approx(logprobs.logprob, abs=1e-4)
        assert [token_id for token_id, _ in close.top] == [token_id for token_id, _ in logprobs.top]
