from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from baton.cli.commands import app

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path) -> Path:
    """A 7 B model of which nothing is here but its configuration."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def run(*flags: object):
    return CliRunner().invoke(app, ["plan", *map(str, flags)])


def on_gpu(config, *flags):
    return run(config, "--memory", "40GiB", "--set", "engine.device=cuda", *flags)


def test_a_configuration_alone_gives_a_plan(config):
    for path in (config, config.parent):
        result = on_gpu(path)
        assert result.exit_code == 0, result.output
        assert "6.74 G x 2 bytes = 13.48 GB (12.55 GiB)" in result.output
        assert "KV cache: 524288 bytes a token, 8 MiB a block of 16 tokens" in result.output
        assert "fits: both take 31.99 GiB of 40.00 GiB" in result.output


def test_the_numbers_are_there_for_programs(config):
    result = on_gpu(
        config, "--json", "--prompt-tokens", 1000, "--output-tokens", 280, "--set", "engine.max_num_seqs=99"
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert plan["parameters"]["total"] == 6_738_415_616
    assert plan["kv_bytes_each_token"] == 524_288
    assert plan["dtype"] == "bfloat16"
    for name, blocks in (("prefill_worker", 63), ("decode_worker", 80)):
        worker = plan[name]
        assert worker["max_sequences"] == min(99, worker["num_blocks"] // blocks)
        parts = ("weight_bytes", "step_bytes", "process_bytes")
        assert worker["total_bytes"] == sum(worker[part] for part in parts) + worker["num_blocks"] * (8 << 20)
    assert plan["faults"] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "engine.dtype=float32", "--memory", "24GiB"], "prefill worker: model.path: 25.10 GiB of weights"),
        (["--set", "engine.kv_cache_bytes=90GiB"], "decode worker: engine.kv_cache_bytes: 90.00 GiB"),
        (["--set", "engine.memory_fraction=0.8"], "together: both workers take 6"),
        (["--prompt-tokens", 4000], "requests of 4000 + 512 tokens: the context is 4096 tokens"),
        (["--set", "engine.kv_cache_bytes=1GiB", "--set", "model.max_context_tokens=4096"], "max_context_tokens"),
    ],
)
def test_what_does_not_fit_is_said_with_the_knob(config, flags, words):
    result = on_gpu(config, *flags)
    assert result.exit_code == 1
    assert f"does not fit: {words}" in result.output or words in result.output


def test_hints_name_what_bounds(config):
    assert (
        "engine.max_num_seqs 32 is what bounds" in on_gpu(config, "--prompt-tokens", 64, "--output-tokens", 64).output
    )
    assert "more KV blocks" in on_gpu(config, "--prompt-tokens", 4000, "--output-tokens", 64).output
    small = on_gpu(config, "--set", "engine.kv_cache_bytes=1GiB").output
    assert "sequences of up to 2048 tokens fit, the model takes 4096" in small


def test_this_machine_and_the_workers_own_settings_are_what_counts_by_default(config, monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_ENGINE__BLOCK_SIZE", "32")
    file = tmp_path / "baton.yaml"
    file.write_text("decode_worker: {engine: {max_num_seqs: 7}}\n")
    small = CONFIG | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config.write_text(json.dumps(small))
    plan = json.loads(run(config, "--config", file, "--json", "--prompt-tokens", 1, "--output-tokens", 1).output)
    assert plan["block_size"] == 32
    assert (plan["prefill_worker"]["max_sequences"], plan["decode_worker"]["max_sequences"]) == (32, 7)
    assert plan["prefill_worker"]["memory_bytes"] > 1 << 28
    assert (plan["prefill_worker"]["swap_bytes"], plan["decode_worker"]["swap_bytes"]) == (0, 256 << 20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "much"], "--memory: must be a size"),
        (["--set", "engine.device=cuda:77"], "--memory: must be given"),
        (["--set", "engine.device"], "NAME=VALUE"),
        (["--set", "engine.colour=red"], "engine.colour"),
        (
            ["--memory", "8GiB", "--set", "engine.tensor_parallel_size=2", "--set", "engine.device=cuda:1"],
            "must be cpu or cuda for 2 ranks",
        ),
        (["--set", "engine.tensor_parallel_size=64"], "64 ranks cannot divide"),
    ],
)
def test_what_makes_no_sense_is_refused(config, flags, words):
    result = run(config, *flags)
    assert result.exit_code != 0
    assert words in result.output


def test_a_model_that_is_not_served_is_named(config):
    config.write_text(json.dumps(CONFIG | {"model_type": "bert"}))
    result = run(config)
    assert result.exit_code == 1
    assert "model_type 'bert' is not supported" in result.output
