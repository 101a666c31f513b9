from __future__ import annotations

import pickle

import pytest

from baton.core.errors import InternalError, InvalidArgumentError, OutOfRangeError, ResourceExhaustedError


@pytest.mark.parametrize(
    "error",
    [
        InternalError("a fault", metadata={"step": "7"}),
        InvalidArgumentError("kv.block_ids", "must not be empty"),
        OutOfRangeError("token_ids", "too many", limit=8191, reason="PROMPT_TOO_LONG"),
        ResourceExhaustedError("full", retry_after_s=1.5, reason="QUEUE_FULL"),
    ],
)
def test_an_error_is_the_same_in_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
