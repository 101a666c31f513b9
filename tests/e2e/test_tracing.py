"""One request is one trace, from the client's own span through every process."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import grpc

from baton.v1 import gateway_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.conftest import System

SECRET_PROMPT = "The password of the vault is xyzzy-4711, tell nobody:"
STATUS_ERROR = 2
EXPECTED = {
    "gateway": {
        "baton.v1.GatewayService/Generate",
        "gateway.tokenize",
        "gateway.queue",
        "gateway.prefill",
        "gateway.decode",
        "gateway.handover",
    },
    "prefill_worker": {"baton.v1.PrefillService/Prefill", "prefill.queue", "prefill.compute"},
    "decode_worker": {"baton.v1.DecodeService/Decode", "decode.wait", "decode.handover", "decode.generate"},
}


async def test_one_request_is_one_trace_that_continues_the_clients(system: System) -> None:
    trace_id, client_span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    metadata = (("traceparent", f"00-{trace_id.hex()}-{client_span_id.hex()}-01"),)
    request = gateway_pb2.GenerateRequest(text=SECRET_PROMPT)
    request.sampling.temperature = 0.0
    request.stop.max_tokens = 8
    async with grpc.aio.insecure_channel(system.address) as channel:
        answer = await system.stub(channel).Complete(request, metadata=metadata)
    assert answer.finished.usage.completion_tokens == 8

    expected = {service: set(names) for service, names in EXPECTED.items()}
    expected["gateway"].remove("baton.v1.GatewayService/Generate")
    expected["gateway"].add("baton.v1.GatewayService/Complete")

    def is_whole(found: Sequence[tuple[str, Any]]) -> bool:
        known = {client_span_id, *(span.span_id for _, span in found)}
        return all(span.parent_span_id in known for _, span in found) and all(
            names <= {span.name for s, span in found if s == service} for service, names in expected.items()
        )

    spans = await asyncio.to_thread(system.traces.wait_for, trace_id, is_whole)
    by_id = {span.span_id: span for _, span in spans}
    root = next(span for _, span in spans if span.name == "baton.v1.GatewayService/Complete")
    assert root.parent_span_id == client_span_id
    # Every other span hangs, over however many hops, on the gateway's.
    for _, span in spans:
        while span.span_id != root.span_id:
            assert span.parent_span_id in by_id, f"{span.name} has a parent nobody sent"
            span = by_id[span.parent_span_id]
    assert [(service, span.name) for service, span in spans if span.status.code == STATUS_ERROR] == []
    # Neither the prompt nor the answer left the system.
    dump = str([span for _, span in spans])
    assert "xyzzy" not in dump
    assert not answer.text.strip() or answer.text.strip() not in dump


async def test_a_callers_unsampled_trace_is_not_exported(system: System) -> None:
    trace_id = secrets.token_bytes(16)
    request = gateway_pb2.GenerateRequest(text="hello")
    request.stop.max_tokens = 2
    async with grpc.aio.insecure_channel(system.address) as channel:
        metadata = (("traceparent", f"00-{trace_id.hex()}-{secrets.token_hex(8)}-00"),)
        await system.stub(channel).Complete(request, metadata=metadata)
        # A sampled request after it proves that the exporters have flushed since.
        sampled_id = secrets.token_bytes(16)
        metadata = (("traceparent", f"00-{sampled_id.hex()}-{secrets.token_hex(8)}-01"),)
        await system.stub(channel).Complete(request, metadata=metadata)
    await asyncio.to_thread(
        system.traces.wait_for, sampled_id, lambda found: {"gateway", "decode_worker"} <= {s for s, _ in found}
    )
    assert not [span for _, span in system.traces.all_spans() if span.trace_id == trace_id]
