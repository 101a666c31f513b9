from __future__ import annotations

import pytest

from baton.core.errors import StartupError
from decode_worker.settings import DecodeWorkerSettings
from prefill_worker.settings import PrefillWorkerSettings

FLAGS = ["--model.path", "folder", "--engine.max_num_batched_tokens", "2048"]


@pytest.mark.parametrize("kind", [PrefillWorkerSettings, DecodeWorkerSettings])
def test_a_worker_takes_all_that_gateways_are_granted(kind):
    def load(*flags: str):
        return kind.load([*FLAGS, *flags])

    assert load().max_waiting == 256
    assert load("--engine.max_num_seqs", "1000").max_waiting == 2000
    assert load("--engine.max_num_seqs", "1000", "--max_waiting", "1000").max_waiting == 1000
    words = "^max_waiting: 999 requests are fewer than engine.max_num_seqs 1000, which gateways are granted$"
    with pytest.raises(StartupError, match=words):
        load("--engine.max_num_seqs", "1000", "--max_waiting", "999")
    with pytest.raises(StartupError, match=r"^engine\.max_num_seqs: .*greater than or equal to 1, got '0'[^;]*$"):
        load("--engine.max_num_seqs", "0")
