"""What every executor promises, held against the real one and the fake."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.generation import SamplingParams
from baton.core.model import KVLayout
from baton.engine.batch import BatchPlan, ScoredIds
from baton.engine.executor import Executor, ScriptedExecutor
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from tests.integration.engine import families
from tests.integration.engine.sequences import GREEDY, Sequence, generate, step

if TYPE_CHECKING:
    from pathlib import Path

NUM_BLOCKS = 60
SAMPLINGS = [GREEDY, SamplingParams(seed=5), SamplingParams(seed=6, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02)]


@pytest.fixture(params=["torch", "scripted"])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Executor:
    if request.param == "scripted":
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
        return ScriptedExecutor(layout=layout, num_blocks=NUM_BLOCKS)
    families.save_model("llama", tmp_path)
    pool = KVPool(DecoderConfig.from_folder(tmp_path).kv_layout(4, "float32"), NUM_BLOCKS)
    made = TorchExecutor.from_folder(tmp_path, pool=pool)
    made.warm_up()
    return made


def table(index: int) -> list[int]:
    return list(range(index * 12, index * 12 + 12))[::-1]


def test_it_says_what_it_is(executor: Executor) -> None:
    assert (executor.num_blocks, executor.layout.block_size) == (NUM_BLOCKS, 4)
    assert executor.vocab_size > 200
    assert executor.max_context_tokens >= 256
    assert executor.attention in ("native", "torch", "scripted")


def test_an_empty_plan_does_nothing(executor: Executor) -> None:
    assert list(executor.execute(BatchPlan(slices=[])).tokens) == []


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_depend_neither_on_cuts_nor_on_company(executor: Executor, sampling: SamplingParams) -> None:
    prompt = list(range(5, 24))
    alone = generate(executor, Sequence("alone", prompt, table(0), sampling), 12)
    cut = generate(executor, Sequence("cut", prompt, table(1), sampling), 12, chunks=(7, 2))
    together = [Sequence(f"s{i}", prompt, table(i), sampling) for i in range(3)]
    together.append(Sequence("other", prompt[::-1], table(3), SamplingParams(seed=9)))
    for _ in range(12):
        step(executor, [(sequence, 100) for sequence in together])
    assert cut == alone
    assert [sequence.tokens for sequence in together[:3]] == [alone] * 3
    assert all(0 <= token < executor.vocab_size for token in alone)


def test_steps_in_the_pauses_of_another_change_nothing(executor: Executor) -> None:
    prompt, other = list(range(5, 24)), list(range(40, 51))
    expected = [generate(executor, Sequence("alone", tokens, table(0)), 4) for tokens in (prompt, other)]
    # One of two tokens at once and one of a single token: the latter is computed in another way.
    long, single = Sequence("long", prompt, table(0)), Sequence("single", prompt, table(1))
    step(executor, [(single, len(prompt) - 1)])
    interrupting = Sequence("interrupting", other, table(2))
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1
        if len(interrupting.tokens) < 4:
            step(executor, [(interrupting, 6)])

    for limit in (7, 7, 100):
        step(executor, [(long, limit), (single, 1)], pause)
    assert generate(executor, long, 4) == generate(executor, single, 4) == expected[0]
    assert generate(executor, interrupting, 4) == expected[1]
    assert num_pauses >= 3


def test_a_seed_changes_the_tokens(executor: Executor) -> None:
    prompt = list(range(5, 24))
    outputs = {
        tuple(generate(executor, Sequence("a", prompt, table(0), SamplingParams(seed=seed, temperature=2.0)), 12))
        for seed in range(4)
    }
    assert len(outputs) == 4


def test_log_probabilities_come_only_for_those_who_ask(executor: Executor) -> None:
    prompt = list(range(5, 24))
    quiet = Sequence("quiet", prompt, table(0)).next_slice(100)
    asking = replace(Sequence("asking", prompt, table(1)).next_slice(100), top_logprobs=3)
    first = Sequence("scored", prompt, table(2)).next_slice(10)
    scored = replace(first, scored=ScoredIds(token_ids=prompt[1:11], top=2))
    output = executor.execute(BatchPlan(slices=[quiet, asking, scored]))
    assert output.logprobs.keys() == {("asking", 0)}
    assert output.prompt_logprobs.keys() == {"scored"}
    assert output.logprobs["asking", 0].top[0] == (output.tokens[1], output.logprobs["asking", 0].logprob)  # greedy
    assert len(output.logprobs["asking", 0].top) == 3
    assert [len(each.top) for each in output.prompt_logprobs["scored"]] == [2] * 10
    assert executor.execute(BatchPlan(slices=[quiet])).logprobs == {}


def test_a_plan_that_does_not_fit_is_a_bug(executor: Executor) -> None:
    sequence = Sequence("a", list(range(9)), [0, 1])
    with pytest.raises(AssertionError, match="need 3"):
        step(executor, [(sequence, 9)])


def test_the_fake_catches_two_writers_of_one_block() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
    fake = ScriptedExecutor(layout=layout, num_blocks=9, next_token=lambda last, position: last + position)
    step(fake, [(Sequence("a", [1, 2], [3]), 2)])
    with pytest.raises(AssertionError, match="block 3: a and b write"):
        step(fake, [(Sequence("a", [1, 2], [3]), 2), (Sequence("b", [1] * 6, [4, 3]), 6)])
    assert fake.execute(BatchPlan(slices=[Sequence("a", [1, 2], [3]).next_slice(2)])).tokens == [4]
    assert len(fake.plans) == 2


def test_a_handed_over_sequence_goes_on_in_another_executor(tmp_path: Path) -> None:
    """Whole blocks, copied by their bytes, and the first token are all that the other side needs."""
    families.save_model("qwen3", tmp_path)
    layout = DecoderConfig.from_folder(tmp_path).kv_layout(4, "float32")
    source, target = KVPool(layout, NUM_BLOCKS), KVPool(layout, NUM_BLOCKS)
    prompt, sampling = list(range(5, 24)), SamplingParams(seed=8)
    prefill = TorchExecutor.from_folder(tmp_path, pool=source)
    decode = TorchExecutor.from_folder(tmp_path, pool=target)
    expected = generate(prefill, Sequence("whole", prompt, table(1), sampling), 12)
    sequence = Sequence("handed over", prompt, table(0), sampling)
    step(prefill, [(sequence, 100)])
    num_used = layout.blocks_for(len(prompt))
    torch.index_select(source.tensor, 0, torch.tensor(table(0)[:num_used]), out=target.tensor[20 : 20 + num_used])
    sequence.block_table = list(range(20, 32))
    assert generate(decode, sequence, 12) == expected
