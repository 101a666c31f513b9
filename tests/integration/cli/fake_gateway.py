"""A gateway that answers by rote, over real gRPC."""

from __future__ import annotations

import asyncio

from baton.core.errors import OutOfRangeError, ResourceExhaustedError, ServingError
from baton.rpc.errors import to_status
from baton.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

LONG_ADDRESS = f"{'host' * 30}.example:8471"


class RoteGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Says back the last thing it was told, word by word; a few words make it behave otherwise."""

    def __init__(self) -> None:
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        prompt = request.messages[-1].content if request.messages else request.text
        try:
            if request.logprobs.HasField("prompt_top"):
                scored = gateway_pb2.ScoredPrompt(
                    first_position=1, token_ids=[5], logprobs=[common_pb2.TokenLogprobs(logprob=-0.5)]
                )
                yield gateway_pb2.GenerateResponse(scored_prompt=scored)
            async for event in self._events(prompt):
                yield self._scored(event, request.logprobs)
                for choice in range(1, request.n if event.HasField("delta") else 1):
                    other = gateway_pb2.GenerateResponse(delta=event.delta)
                    other.delta.text, other.delta.choice = event.delta.text.upper() * choice, choice
                    yield other
        except ServingError as error:
            await context.abort(*to_status(error))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _scored(self, event, options):
        if event.HasField("delta") and options.HasField("output_top"):
            event.delta.logprobs.add(logprob=-1.25, top_ids=[9], top_logprobs=[-0.75])
        return event

    async def _events(self, prompt):
        if prompt == "full":
            raise ResourceExhaustedError("class chat is full", retry_after_s=1.5)
        if prompt == "long":
            raise OutOfRangeError("messages", "9000 tokens, more than 8192", limit=8192)
        yield gateway_pb2.GenerateResponse(accepted=gateway_pb2.Accepted(request_id="r"))
        words = prompt.split(" ")
        for number, word in enumerate(words):
            text = word if number == 0 else f" {word}"
            yield gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(text=text, token_ids=[number]))
        if prompt.startswith("forever"):
            await asyncio.Event().wait()
        usage = gateway_pb2.Usage(prompt_tokens=7, completion_tokens=len(words))
        yield gateway_pb2.GenerateResponse(
            finished=gateway_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, usage=usage)
        )

    async def GetModel(self, request, context):
        model = gateway_pb2.Model(
            name=request.name,
            max_context_tokens=8192,
            vocab_size=49152,
            fingerprint=common_pb2.ModelFingerprint(dtype="bfloat16"),
        )
        return gateway_pb2.GetModelResponse(model=model)

    async def GetStatus(self, request, context):
        worker = common_pb2.WorkerStatus(
            worker_id="prefill-1",
            role=99,
            state=common_pb2.WORKER_STATE_READY,
            address=LONG_ADDRESS,
            num_blocks=1000,
            device="cuda:1",
            attention="flashinfer",
        )
        queue = gateway_pb2.QueueStatus(queue_class="chat", num_waiting=3, max_waiting=256, max_waiting_tokens=4096)
        return gateway_pb2.GetStatusResponse(model="tiny", queues=[queue], workers=[worker], num_active=5)
