from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.rpc.wire import explain_malformed
from baton.v1 import common_pb2, gateway_pb2

if TYPE_CHECKING:
    from baton.core.errors import InvalidArgumentError

REQUEST = gateway_pb2.GenerateRequest


def explain(data: bytes) -> InvalidArgumentError:
    with pytest.raises(DecodeError):
        REQUEST.FromString(data)
    return explain_malformed(REQUEST.DESCRIPTOR, data)


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("request_id", "request_id"),
        ("messages", "messages[2].content"),
        ("stop", "stop.strings[1]"),
    ],
)
def test_text_that_is_no_utf8_is_found_where_it_is(field: str, place: str) -> None:
    request = REQUEST(
        request_id="MARK" if field == "request_id" else "r",
        messages=[
            gateway_pb2.ChatMessage(role="user", content="ok"),
            gateway_pb2.ChatMessage(role="user", content="ok"),
            gateway_pb2.ChatMessage(role="user", content="MARK" if field == "messages" else "ok"),
        ],
        token_ids=common_pb2.TokenIds(ids=range(300)),
        sampling=common_pb2.SamplingParams(temperature=0.5, seed=2**63),
        stop=common_pb2.StopConditions(strings=["ok", "MARK" if field == "stop" else "ok"]),
    )
    error = explain(request.SerializeToString().replace(b"MARK", b"MA\xffK"))
    assert error.field == place
    assert error.description == "is not UTF-8: byte 2 is 0xff"
    assert error.reason == "INVALID_UTF8"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x0a\x05ab", "request_id"),  # a length beyond the end
        (b"\x22\x04\x0a\x05ab", "messages[0].role"),
        (b"\x32\x02\x0d\x00", "sampling.temperature"),  # four bytes, one there
        (b"\x08" + b"\xff" * 11, "request_id"),  # a number without end
        (b"\xff", "request"),  # half a tag
        (b"\x0f", "request_id"),  # a wire type that does not exist
    ],
)
def test_bytes_that_are_cut_or_broken(data: bytes, field: str) -> None:
    error = explain(data)
    assert error.field == field
    assert error.reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("field", [b"\x48\x01", b"\x22\x00", b"\x22\x06\x0a\x04user"])
def test_no_more_than_so_many_fields_are_looked_at(field: bytes) -> None:
    assert explain(field * 4_000 + b"\xff").description == "is cut short"
    error = explain(field * 2**19 + b"\xff")
    assert error.field == "request"
    assert error.reason == "MALFORMED_MESSAGE"
    assert "behind its first 10000 fields" in error.description


@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer(data: bytes) -> None:
    try:
        REQUEST.FromString(data)
    except DecodeError:
        error = explain_malformed(REQUEST.DESCRIPTOR, data)
        assert error.field
        assert data[:40] not in str(error).encode() or len(data) < 8


@given(st.data())
def test_a_real_request_with_one_byte_changed_gets_an_answer(data: st.DataObject) -> None:
    good = bytearray(
        REQUEST(
            request_id="id", text="hello", stop=common_pb2.StopConditions(strings=["a", "b"]), model="m"
        ).SerializeToString()
    )
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        REQUEST.FromString(bytes(good))
    except DecodeError:
        assert explain_malformed(REQUEST.DESCRIPTOR, bytes(good)).field
