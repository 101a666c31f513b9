from __future__ import annotations

import math

import pytest

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.core.generation import LogprobOptions, SamplingParams, Structure, StructureKind, TokenLogprobs
from baton.rpc.generation import (
    logprob_options_message,
    logprobs_message,
    read_logprob_options,
    read_logprobs,
    read_sampling,
    read_structure,
    sampling_message,
    structure_message,
)
from baton.v1.common_pb2 import SamplingParams as Message
from baton.v1.common_pb2 import Structure as StructureMessage
from baton.v1.gateway_pb2 import GenerateRequest

EVERYTHING = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    min_p=0.25,
    seed=2**64 - 1,
    repetition_penalty=1.25,
    frequency_penalty=-2.0,
    presence_penalty=0.5,
    logit_bias=((0, -100.0), (99, 100.0)),
)


def read(message: Message) -> SamplingParams:
    return read_sampling(message, default_seed=7, vocab_size=100)


def test_what_is_written_is_read():
    assert read(sampling_message(EVERYTHING)) == EVERYTHING
    assert read(Message.FromString(sampling_message(SamplingParams()).SerializeToString())) == SamplingParams()


def test_unset_fields_take_their_defaults_and_zeros_stay_zeros():
    assert read(Message()) == SamplingParams(seed=7)
    zeros = Message(temperature=0, top_k=0, min_p=0, seed=0, frequency_penalty=0, presence_penalty=0)
    assert read(zeros) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        (Message(repetition_penalty=0), "sampling.repetition_penalty", "[0.125, 8]; it is 0"),
        (Message(repetition_penalty=8.5), "sampling.repetition_penalty", "[0.125, 8]; it is 8.5"),
        (Message(repetition_penalty=math.nan), "sampling.repetition_penalty", "it is nan"),
        (Message(frequency_penalty=2.5), "sampling.frequency_penalty", "[-2, 2]; it is 2.5"),
        (Message(frequency_penalty=-math.inf), "sampling.frequency_penalty", "it is -inf"),
        (Message(presence_penalty=-2.5), "sampling.presence_penalty", "[-2, 2]; it is -2.5"),
        (Message(logit_bias={5: 100.5}), "sampling.logit_bias[5]", "[-100, 100]; it is 100.5"),
        (Message(logit_bias={5: math.nan}), "sampling.logit_bias[5]", "it is nan"),
        (Message(logit_bias=dict.fromkeys(range(301), 0.0)), "sampling.logit_bias", "at most 300 ids; there are 301"),
    ],
)
def test_a_field_outside_its_range_is_named_with_its_limit(message, field, words):
    with pytest.raises(InvalidArgumentError) as caught:
        read(message)
    assert caught.value.field == field
    assert words in caught.value.description


def test_a_bias_for_no_token_is_refused():
    with pytest.raises(OutOfRangeError) as caught:
        read(Message(logit_bias={99: 1.0, 100: 1.0}))
    assert (caught.value.field, caught.value.limit) == ("sampling.logit_bias[100]", 99)


@pytest.mark.parametrize("kind", list(StructureKind))
def test_a_structure_that_is_written_is_read(kind):
    structure = Structure(kind, "{}")
    assert read_structure(GenerateRequest(structure=structure_message(structure))) == structure
    assert read_structure(GenerateRequest(structure=structure_message(None))) is None


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        (StructureMessage(), "structure", "exactly one of json_schema, regex, grammar must be set; 0 are"),
        (StructureMessage(regex="", json_schema=""), "structure", "2 are"),
        (StructureMessage(grammar="x" * 65_537), "structure.grammar", "at most 65536 characters; there are 65537"),
    ],
)
def test_a_structure_is_one_and_not_too_long(message, field, words):
    with pytest.raises(InvalidArgumentError) as caught:
        read_structure(GenerateRequest(structure=message))
    assert caught.value.field == field
    assert words in caught.value.description


def test_log_probabilities_that_are_written_are_read():
    logprobs = TokenLogprobs(-0.5, ((7, -0.25), (3, -4.0)))
    assert read_logprobs(logprobs_message(logprobs)) == logprobs
    for options in (LogprobOptions(), LogprobOptions(output_top=0, prompt_top=20)):
        assert read_logprob_options(logprob_options_message(options)) == options
