"""Structured output from a pair of workers with a tiny random model and the real tokenizer.

A random model at temperature 1 writes noise, so whatever is valid is so because of the structure.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import jsonschema
import pytest
from tokenizers import Tokenizer

from baton.core.errors import FailedPreconditionError, InvalidArgumentError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2
from tests.integration.workers.conftest import new_pair, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.integration.workers.harness import Pair

NUM_SEEDS = 25
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,4}-[0-9]{3}(\.[xyz]+){0,2};"
GRAMMAR = 'start: "(" start ")" | "[" NUMBER "]"\nNUMBER: /[0-9]{1,3}/'


@pytest.fixture(scope="module")
def structured_pair(random_llama: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with new_pair(random_llama(512), tmp_path_factory.mktemp("logs")) as pair:
        start(pair.prefill, pair.decode)
        yield pair


@pytest.fixture(scope="module")
def text_of(model_folder: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode([token_id for token_id in ids if token_id != EOS], skip_special_tokens=False)


async def outputs(pair: Pair, structure: common_pb2.Structure, count: int, **changes: Any) -> list[Any]:
    """Answers for as many seeds, a few at a time."""
    gate = asyncio.Semaphore(8)
    async with pair.client() as client:

        async def one(seed: int) -> Any:
            async with gate:
                sampling = common_pb2.SamplingParams(temperature=1, seed=seed)
                fields = {"sampling": sampling, "max_tokens": 300, "stop_token_ids": [EOS], "structure": structure}
                return await client.generate(f"s{seed}", [5, 6, 7, seed + 10], **(fields | changes))

        answers = await asyncio.gather(*(one(seed) for seed in range(count)))
        await client.assert_all_free()
    return answers


def ended_by(answer: Any) -> int:
    last = answer.decode_events[-1].finished if answer.decode_events else answer.prefill_events[1].first_token
    return last.reason if answer.decode_events else last.finish_reason


async def test_json_is_valid_for_every_seed(structured_pair, text_of):
    answers = await outputs(structured_pair, common_pb2.Structure(json_schema=json.dumps(SCHEMA)), NUM_SEEDS)
    values = [json.loads(text_of(answer.tokens)) for answer in answers]
    for value in values:
        jsonschema.validate(value, SCHEMA)
    assert len({json.dumps(value) for value in values}) > NUM_SEEDS // 2
    assert {ended_by(answer) for answer in answers} == {common_pb2.FINISH_REASON_STOP}


async def test_text_matches_its_regex_for_every_seed(structured_pair, text_of):
    answers = await outputs(structured_pair, common_pb2.Structure(regex=REGEX), NUM_SEEDS)
    texts = [text_of(answer.tokens) for answer in answers]
    assert all(re.fullmatch(REGEX, text) for text in texts)
    assert len(set(texts)) > NUM_SEEDS // 2
    assert {ended_by(answer) for answer in answers} == {common_pb2.FINISH_REASON_STOP}


async def test_text_follows_its_grammar(structured_pair, text_of):
    answers = await outputs(structured_pair, common_pb2.Structure(grammar=GRAMMAR), 20)
    for answer in answers:
        nested = re.fullmatch(r"(\(*)\[[0-9]{1,3}\](\)*)", text_of(answer.tokens))
        assert nested
        assert len(nested[1]) == len(nested[2])
    assert {ended_by(answer) for answer in answers} == {common_pb2.FINISH_REASON_STOP}


async def test_one_token_may_be_all_and_max_tokens_may_cut(structured_pair, text_of):
    for answer in await outputs(structured_pair, common_pb2.Structure(regex="x"), 3):
        assert text_of(answer.tokens) == "x"
        assert not answer.decode_events
    (cut,) = await outputs(structured_pair, common_pb2.Structure(regex="x{50}"), 1, max_tokens=3)
    assert set(text_of(cut.tokens)) == {"x"}
    assert ended_by(cut) == common_pb2.FINISH_REASON_LENGTH


async def failure_of(client: Any, **changes: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.prefill.Prefill(client.prefill_request("bad", [5, 6], **changes)).read()
    return from_call(caught.value)


async def test_a_bad_structure_is_refused_with_its_field(structured_pair):
    async with structured_pair.client() as client:
        for structure, field in (
            (common_pb2.Structure(), "structure"),
            (common_pb2.Structure(regex="a", grammar="start: /a/"), "structure"),
            (common_pb2.Structure(regex="x" * 65_537), "structure.regex"),
            (common_pb2.Structure(json_schema='{"type": 5}'), "structure.json_schema"),
            (common_pb2.Structure(regex="[a-"), "structure.regex"),
        ):
            failure = await failure_of(client, structure=structure)
            assert isinstance(failure, InvalidArgumentError)
            assert failure.field == field
        failure = await failure_of(client, structure=common_pb2.Structure(regex="a"), min_tokens=2)
        assert failure.field == "min_tokens"
        await client.assert_all_free()


async def test_a_worker_whose_tokenizer_cannot_be_used_says_so(pair):
    async with pair.client() as client:
        failure = await failure_of(client, structure=common_pb2.Structure(regex="a"))
        assert isinstance(failure, FailedPreconditionError)
        assert failure.reason == "STRUCTURE_UNSUPPORTED"
        await client.assert_all_free()
