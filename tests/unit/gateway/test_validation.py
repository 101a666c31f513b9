from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidArgumentError, NotFoundError, OutOfRangeError
from baton.core.generation import SamplingParams
from baton.core.model import ModelFingerprint
from baton.v1 import gateway_pb2
from baton.v1.common_pb2 import SamplingParams as Sampling
from baton.v1.common_pb2 import StopConditions as Stop
from baton.v1.common_pb2 import TokenIds
from gateway.served_model import ServedModel
from gateway.tokenization import ChatMessage
from gateway.validation import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)

MODEL = ServedModel(
    fingerprint=ModelFingerprint(model="m", weights="w", tokenizer="t", dtype=""),
    max_context_tokens=100,
    default_max_tokens=30,
    vocab_size=1000,
    eos_token_ids=frozenset({2, 3}),
    has_chat_template=True,
    longest_token_chars=10,
)
Request = gateway_pb2.GenerateRequest
User = gateway_pb2.ChatMessage(role="user", content="hi")


def validate(request: Request, model: ServedModel = MODEL) -> Any:
    return validate_generate(request, model, new_seed=77, max_choices=3)


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (Request(), "text", "exactly one of text, messages, token_ids must be set, none is"),
        (Request(text=""), "text", "empty"),
        (Request(token_ids=TokenIds()), "token_ids.ids", "empty"),
        (Request(text="x", token_ids=TokenIds(ids=[1])), "token_ids", "text and token_ids are"),
        (Request(text="", messages=[User]), "messages", "text and messages are"),
        (Request(messages=[User], token_ids=TokenIds()), "token_ids", "messages and token_ids are"),
        (Request(text="x", request_id="a b"), "request_id", "1 to 128 characters"),
        (Request(text="x", request_id="a" * 129), "request_id", "1 to 128 characters"),
        (Request(text="x", request_id="a\n"), "request_id", "1 to 128 characters"),
        (Request(messages=[User, gateway_pb2.ChatMessage(role="tool")]), "messages[1].role", "system, user, assistant"),
        (Request(messages=[gateway_pb2.ChatMessage(content="x")]), "messages[0].role", "it is empty"),
        (Request(messages=[User] * 4097), "messages", "at most 4096; there are 4097"),
        (Request(text="x", sampling=Sampling(temperature=-0.1)), "sampling.temperature", "[0, 100]; it is -0.1"),
        (Request(text="x", sampling=Sampling(temperature=101)), "sampling.temperature", "[0, 100]; it is 101"),
        (Request(text="x", sampling=Sampling(temperature=math.nan)), "sampling.temperature", "it is nan"),
        (Request(text="x", sampling=Sampling(temperature=math.inf)), "sampling.temperature", "it is inf"),
        (Request(text="x", sampling=Sampling(top_p=0)), "sampling.top_p", "(0, 1]; it is 0"),
        (Request(text="x", sampling=Sampling(top_p=1.5)), "sampling.top_p", "(0, 1]; it is 1.5"),
        (Request(text="x", sampling=Sampling(top_p=math.nan)), "sampling.top_p", "it is nan"),
        (Request(text="x", sampling=Sampling(min_p=-1)), "sampling.min_p", "[0, 1]; it is -1"),
        (Request(text="x", sampling=Sampling(min_p=2)), "sampling.min_p", "[0, 1]; it is 2"),
        (Request(messages=[User], echo=True), "echo", "must be false with messages"),
        (Request(text="x", stop=Stop(max_tokens=0)), "stop.max_tokens", "at least 1; it is 0"),
        (Request(text="x", stop=Stop(strings=["s"] * 17)), "stop.strings", "at most 16; there are 17"),
        (Request(text="x", stop=Stop(strings=["s", ""])), "stop.strings[1]", "1 to 256 characters; it has 0"),
        (Request(text="x", stop=Stop(strings=["s" * 257])), "stop.strings[0]", "it has 257"),
        (Request(text="x", stop=Stop(token_ids=[1] * 65)), "stop.token_ids", "at most 64; there are 65"),
        (Request(text="x", stop=Stop(max_tokens=3, min_tokens=4)), "stop.min_tokens", "at most max_tokens, 3; it is 4"),
    ],
)
def test_a_malformed_field_is_named_with_its_limit(request_: Request, field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(request_)
    assert caught.value.field == field
    assert words in caught.value.description


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (Request(token_ids=TokenIds(ids=[0, 999, 5, 1000])), "token_ids.ids[3]", 999),
        (Request(token_ids=TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]", 999),
        (Request(token_ids=TokenIds(ids=[1] * 100)), "token_ids.ids", 99),
        (Request(text="x" * 1001), "text", 1000),
        (Request(messages=[gateway_pb2.ChatMessage(role="user", content="x" * 501)] * 2), "messages", 1000),
        (Request(text="x", stop=Stop(token_ids=[5, 1000])), "stop.token_ids[1]", 999),
        (Request(text="x", sampling=Sampling(logit_bias={1000: 1})), "sampling.logit_bias[1000]", 999),
    ],
)
def test_a_field_beyond_the_model_is_named_with_its_limit(request_: Request, field: str, limit: int) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        validate(request_)
    assert (caught.value.field, caught.value.limit) == (field, limit)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="'gpt' is not served here; 'm' is"):
        validate(Request(text="x", model="gpt"))
    validate(Request(text="x", model="m"))


def test_a_model_without_a_chat_template_takes_no_messages() -> None:
    model = replace(MODEL, has_chat_template=False)
    with pytest.raises(InvalidArgumentError) as caught:
        validate(Request(messages=[User]), model)
    assert (caught.value.field, caught.value.reason) == ("messages", "NO_CHAT_TEMPLATE")
    with pytest.raises(InvalidArgumentError):
        validate_tokenize(gateway_pb2.TokenizeRequest(messages=[User]), model)


def test_prompts_as_plain_data() -> None:
    assert validate(Request(text="x")).prompt == TextPrompt("x")
    assert validate(Request(messages=[User])).prompt == ChatPrompt((ChatMessage("user", "hi"),))
    assert validate(Request(token_ids=TokenIds(ids=[7, 8]))).prompt == TokenPrompt((7, 8))


def test_more_outputs_than_are_allowed_are_refused() -> None:
    for n in (4, 4_000_000_000):
        with pytest.raises(OutOfRangeError, match=f"{n} is over the 3") as caught:
            validate(Request(text="x", n=n))
        assert (caught.value.field, caught.value.limit) == ("n", 3)
    with pytest.raises(InvalidArgumentError) as refused:
        validate(Request(text="x", n=0))
    assert refused.value.field == "n"
    assert validate(Request(text="x", n=3)).num_choices == 3
    assert validate(Request(text="x", n=1)) == validate(Request(text="x"))


def test_unset_fields_take_their_defaults_and_zeros_stay_zeros() -> None:
    assert validate(Request(text="x")).sampling == SamplingParams(seed=77)
    given = Request(text="x", sampling=Sampling(temperature=0, top_k=0, min_p=0, seed=0))
    assert validate(given).sampling == SamplingParams(temperature=0.0, seed=0)


def test_eos_ends_unless_it_is_ignored() -> None:
    assert validate(Request(text="x", stop=Stop(token_ids=[9]))).stop_token_ids == {2, 3, 9}
    assert validate(Request(text="x", stop=Stop(token_ids=[9], ignore_eos=True))).stop_token_ids == {9}


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "expected"), [(10, None, 30), (90, None, 10), (10, 90, 90), (99, 1, 1), (10, 1, 1)]
)
def test_max_tokens_fit_the_context(prompt_tokens: int, asked: int | None, expected: int) -> None:
    request = validate(Request(text="x", stop=Stop(max_tokens=asked)))
    assert request.stop_rule(prompt_tokens, MODEL).max_tokens == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "field", "limit"), [(100, None, "text", 99), (60, 41, "stop.max_tokens", 40)]
)
def test_what_exceeds_the_context_is_refused(prompt_tokens: int, asked: int | None, field: str, limit: int) -> None:
    request = validate(Request(text="x", stop=Stop(max_tokens=asked)))
    with pytest.raises(OutOfRangeError) as caught:
        request.stop_rule(prompt_tokens, MODEL)
    assert (caught.value.field, caught.value.limit) == (field, limit)


def test_min_tokens_are_at_most_what_is_left() -> None:
    request = validate(Request(text="x", stop=Stop(min_tokens=20)))
    assert request.stop_rule(80, MODEL).min_tokens == 20
    with pytest.raises(OutOfRangeError) as caught:
        request.stop_rule(81, MODEL)
    assert (caught.value.field, caught.value.limit) == ("stop.min_tokens", 19)


def test_min_tokens_need_a_token_that_does_not_end() -> None:
    model = replace(MODEL, vocab_size=5)
    validate(Request(text="x", stop=Stop(min_tokens=1, token_ids=[0, 1])), model)
    with pytest.raises(InvalidArgumentError) as caught:
        validate(Request(text="x", stop=Stop(min_tokens=1, token_ids=[0, 1, 4])), model)
    assert caught.value.field == "stop.min_tokens"


def test_a_text_without_tokens_is_empty() -> None:
    with pytest.raises(InvalidArgumentError, match="text: the prompt is empty"):
        validate(Request(text="x")).stop_rule(0, MODEL)


def test_errors_quote_no_prompt() -> None:
    secret = "SECRET" * 200
    for request in (
        Request(text=secret),
        Request(messages=[gateway_pb2.ChatMessage(role=secret, content="x")]),
        Request(text="x", stop=Stop(strings=[secret])),
    ):
        with pytest.raises((InvalidArgumentError, OutOfRangeError)) as caught:
            validate(request)
        assert "SECRET" not in str(caught.value)


def test_tokenize_and_detokenize() -> None:
    assert validate_tokenize(gateway_pb2.TokenizeRequest(text="x"), MODEL) == TextPrompt("x")
    assert validate_detokenize(gateway_pb2.DetokenizeRequest(token_ids=[1, 999]), MODEL) == (1, 999)
    assert validate_detokenize(gateway_pb2.DetokenizeRequest(), MODEL) == ()
    with pytest.raises(InvalidArgumentError, match="exactly one of text, messages"):
        validate_tokenize(gateway_pb2.TokenizeRequest(text="x", messages=[User]), MODEL)
    with pytest.raises(OutOfRangeError, match=r"token_ids\[0\]"):
        validate_detokenize(gateway_pb2.DetokenizeRequest(token_ids=[1000]), MODEL)
    with pytest.raises(OutOfRangeError, match="has 101 ids"):
        validate_detokenize(gateway_pb2.DetokenizeRequest(token_ids=[1] * 101), MODEL)
