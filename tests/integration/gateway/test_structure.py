"""Structures on their way through the gateway: checked before admission, handed to both workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from baton.core.errors import InvalidArgumentError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2

if TYPE_CHECKING:
    from tests.integration.gateway.harness import Deployment

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'


async def test_both_workers_get_the_structure(deployment: Deployment) -> None:
    for structure in (
        common_pb2.Structure(json_schema=SCHEMA),
        common_pb2.Structure(regex="[ab]+"),
        common_pb2.Structure(grammar="start: /a/ start | /b/"),
    ):
        await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x", structure=structure))
        assert deployment.prefill.requests[-1].structure == structure
        assert deployment.decode.requests[-1].structure == structure
    await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x"))
    assert not deployment.prefill.requests[-1].HasField("structure")
    assert not deployment.decode.requests[-1].HasField("structure")


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        (common_pb2.Structure(), "structure"),
        (common_pb2.Structure(json_schema=SCHEMA, regex="a"), "structure"),
        (common_pb2.Structure(json_schema="SECRET"), "structure.json_schema"),
        (common_pb2.Structure(json_schema='{"type": "integer", "not": {"const": 1}}'), "structure.json_schema"),
        (common_pb2.Structure(regex="(a"), "structure.regex"),
        (common_pb2.Structure(grammar="start: other"), "structure.grammar"),
    ],
)
async def test_a_bad_one_is_refused_before_admission(
    deployment: Deployment, structure: common_pb2.Structure, field: str
) -> None:
    call = deployment.stub.Generate(gateway_pb2.GenerateRequest(text="x", structure=structure))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()  # not even `accepted`
    failure = from_call(caught.value)
    assert isinstance(failure, InvalidArgumentError)
    assert failure.field == field
    assert "SECRET" not in failure.description
    assert not deployment.prefill.requests
    await deployment.assert_idle()


async def test_a_structure_has_no_fewest_tokens(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(
        text="x", structure=common_pb2.Structure(regex="a"), stop=common_pb2.StopConditions(min_tokens=1)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(request)
    assert from_call(caught.value).field == "stop.min_tokens"
