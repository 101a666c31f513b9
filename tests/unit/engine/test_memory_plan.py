from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import StartupError
from baton.core.settings import EngineSettings
from baton.core.workers import WorkerRole
from baton.engine.host_needs import HostNeeds
from baton.engine.memory_limit import MemoryLimit
from baton.engine.memory_plan import RANK_PROCESS_BYTES, MemoryPlan, WorkerNeeds, gib
from baton.engine.model_config import DecoderConfig

MIB, GIB = 1 << 20, 1 << 30
NOTHING, SWAP, COPY = HostNeeds(), HostNeeds(swap_bytes=GIB), HostNeeds(swap_bytes=GIB, copies_pool=True)
CONFIG = DecoderConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=4096,
    tied_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None,) * 32,
    inv_freq=(1.0,) * 64,
    rope_scale=1.0,
)


def plan(
    memory: int, *, is_host=False, role=WorkerRole.DECODE, context=None, host=NOTHING, host_bytes=None, **engine
) -> MemoryPlan:
    settings = EngineSettings(**{"device": "cpu" if is_host else "cuda"} | engine)
    needs = WorkerNeeds(
        role=role,
        config=CONFIG,
        layout=CONFIG.kv_layout(settings.block_size, "bfloat16"),
        engine=settings,
        max_context_tokens=context,
        by_kernels=is_host,
        host=host,
    )
    limit = MemoryLimit(total_bytes=memory, usable_bytes=memory, name="the test's memory", is_host=is_host)
    beside = None
    if host_bytes is not None:
        beside = MemoryLimit(total_bytes=host_bytes, usable_bytes=host_bytes, name="the test's host", is_host=True)
    return MemoryPlan.make(needs, limit, beside)


def test_seven_billion_parameters_at_16_bits_are_14_gb():
    made = plan(80 * GIB)
    assert made.parameters.total == 6_738_415_616  # Llama 2 7B, as its model card has it
    assert round(made.weight_bytes / 1e9) == 13
    assert made.token_bytes == 512 * 1024  # 2 x 32 layers x 4096 x 2 bytes


def test_int8_takes_a_byte_and_a_32nd():
    made = plan(80 * GIB, quantization="int8")
    assert round(made.weight_bytes / made.parameters.total, 3) == 1.031


def test_an_absolute_size_wins_over_a_fraction():
    made = plan(80 * GIB, kv_cache_bytes=3 * GIB, memory_fraction=0.9)
    assert made.kv_bytes == 3 * GIB
    assert made.num_blocks == 3 * GIB // (16 * 512 * 1024)
    assert made.faults() == []


@pytest.mark.parametrize("role", WorkerRole)
@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("fraction", [0.3, 0.5, 1.0])
def test_a_fraction_is_of_the_whole_worker(role, is_host, fraction):
    made = plan(80 * GIB, role=role, is_host=is_host, memory_fraction=fraction, host=SWAP)
    block = made.needs.layout.block_bytes
    assert fraction * 80 * GIB - 2 * block < made.total_bytes <= fraction * 80 * GIB
    assert made.faults() == []
    assert made.kv_bytes <= made.largest_kv_bytes


def test_the_default_leaves_room_for_the_other_worker_and_takes_no_more_than_a_gib_of_a_machine():
    assert plan(80 * GIB, is_host=True).kv_bytes == GIB
    assert plan(80 * GIB).total_bytes == pytest.approx(32 * GIB, rel=0.001)
    small = plan(34 * GIB, is_host=True)
    assert small.kv_bytes < GIB
    assert small.total_bytes <= 0.4 * 34 * GIB


def test_swap_space_is_host_memory():
    assert plan(80 * GIB, host=SWAP).swap_bytes == 0
    with_swap, without = plan(80 * GIB, is_host=True, host=SWAP), plan(80 * GIB, is_host=True)
    assert with_swap.largest_kv_bytes == pytest.approx(without.largest_kv_bytes - GIB, rel=0.01)


def test_the_largest_pool_just_fits():
    room = plan(40 * GIB)
    made = plan(40 * GIB, kv_cache_bytes=room.largest_kv_bytes)
    assert made.faults() == []
    assert made.total_bytes <= 40 * GIB
    (fault,) = plan(40 * GIB, kv_cache_bytes=room.largest_kv_bytes + 20 * MIB).faults()
    assert fault.startswith("engine.kv_cache_bytes: ")
    assert f"at most {gib(room.largest_kv_bytes)} of KV blocks fit" in fault


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (plan(8 * GIB), ["model.path", "12.55 GiB of weights", "8.00 GiB of the test's memory"]),
        (plan(40 * GIB, kv_cache_bytes=30 * GIB), ["engine.kv_cache_bytes", "30.00 GiB", "40.00 GiB", "at most"]),
        (plan(40 * GIB, kv_cache_bytes=2 * MIB), ["engine.kv_cache_bytes", "2 MiB", "less than a block, 8 MiB"]),
        (plan(40 * GIB, memory_fraction=0.2), ["engine.memory_fraction", "0.2 of 40.00 GiB", "8.00 GiB"]),
        (plan(20 * GIB), ["engine.memory_fraction", "0.4 of 20.00 GiB", "set engine.kv_cache_bytes"]),
        (
            plan(40 * GIB, context=4096, kv_cache_bytes=GIB),
            ["model.max_context_tokens", "4096 tokens needs 2.00 GiB", "1.00 GiB for 2048 tokens"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_fields_and_numbers(made, words):
    with pytest.raises(StartupError) as refusal:
        made.require_fits()
    line = str(refusal.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_without_a_setting_a_pool_below_the_models_context_is_allowed():
    assert plan(40 * GIB, kv_cache_bytes=GIB).faults() == []


def test_how_many_sequences_fit():
    made = plan(40 * GIB, kv_cache_bytes=GIB, max_num_seqs=20)  # 128 blocks
    assert made.max_sequences(100, 60) == 12
    assert made.max_sequences(10, 6) == 20
    assert made.max_sequences(3000, 60) == 0
    prefill = replace(made, needs=replace(made.needs, role=WorkerRole.PREFILL))
    assert prefill.max_sequences(100, 60) == 18


def test_sizes_are_readable():
    assert [gib(size) for size in (1536, 3 * MIB, 5 * GIB // 2)] == ["2 KiB", "3 MiB", "2.50 GiB"]


@pytest.mark.parametrize("role", WorkerRole)
def test_ranks_share_weights_and_pool_and_have_a_process_and_a_step_each(role):
    one, four = (plan(80 * GIB, is_host=True, role=role, tensor_parallel_size=size) for size in (1, 4))
    assert (four.weight_bytes, four.kv_bytes) == (one.weight_bytes, one.kv_bytes)
    assert four.process_bytes == one.process_bytes + 3 * RANK_PROCESS_BYTES
    assert one.step_bytes < four.step_bytes < 4 * one.step_bytes + 4 * 2**25
    assert four.faults() == []


def test_more_ranks_than_kv_heads_do_not_start():
    with pytest.raises(StartupError, match=r"engine\.tensor_parallel_size: 33 ranks cannot divide the 32 KV heads"):
        plan(80 * GIB, is_host=True, tensor_parallel_size=33)


def test_several_ranks_on_cuda_have_the_memory_of_as_many_devices():
    one, four = (plan(80 * GIB, tensor_parallel_size=size) for size in (1, 4))
    assert four.memory.usable_bytes == 4 * one.memory.usable_bytes
    assert four.process_bytes == 4 * one.process_bytes
    assert four.weight_bytes == one.weight_bytes
    assert four.total_bytes == pytest.approx(4 * one.total_bytes, rel=0.001)  # the default's share
    uneven = plan(80 * GIB, tensor_parallel_size=3)  # 10, 11 and 11 of 32 heads
    assert uneven.memory.usable_bytes == 80 * GIB * 32 // 11


def test_a_host_copy_is_as_large_as_the_pool_and_has_to_fit_into_the_host():
    sizes = {"kv_cache_bytes": 30 * GIB, "host_bytes": 40 * GIB}
    assert plan(80 * GIB, host=SWAP, **sizes).host_copy_bytes == 0
    assert plan(80 * GIB, is_host=True, host=COPY, kv_cache_bytes=30 * GIB).host_copy_bytes == 0
    copied = plan(80 * GIB, host=COPY, **sizes)
    assert copied.host_copy_bytes == 30 * GIB
    assert copied.total_bytes == plan(80 * GIB, host=SWAP, **sizes).total_bytes
    assert copied.faults() == plan(80 * GIB, host=COPY, kv_cache_bytes=39 * GIB).faults() == []
    (fault,) = plan(80 * GIB, host=COPY, kv_cache_bytes=39 * GIB, host_bytes=40 * GIB).faults()
    assert fault.startswith(
        "engine.kv_cache_bytes: the host copy of 39.00 GiB of KV blocks and 1.50 GiB for swap space"
    )
    assert "more than the 40.00 GiB of the test's host: at most 38.50 GiB" in fault
    ranks = plan(80 * GIB, host=SWAP, tensor_parallel_size=2, **sizes)
    assert ranks.host_copy_bytes == 30 * GIB
