"""vLLM's asynchronous engine behind the benchmarks' pipe; runs in vLLM's environment."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from benchmarks.peers.serving import Peer


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--long-prefill-token-threshold", type=int)
    options = parser.parse_args()
    peer = Peer()
    # Read by vLLM when it is imported. By default it keeps a core for its other threads; here it gets what it is given.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, range(int(options.threads)))))
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        asyncio.run(_serve(peer, options))
    except Exception as error:
        peer.cannot_run(error)
        raise


async def _serve(peer: Peer, options: argparse.Namespace) -> None:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "enable_prefix_caching": False,
    }
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.long_prefill_token_threshold is not None:
        arguments["long_prefill_token_threshold"] = options.long_prefill_token_threshold
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        peer.ready({"version": vllm.__version__, "threads": options.threads, **arguments})
        async with asyncio.TaskGroup() as tasks:
            while (request := await asyncio.to_thread(peer.requests.get)) is not None:
                tasks.create_task(_generate(engine, peer, request))
    finally:
        engine.shutdown()


async def _generate(engine: Any, peer: Peer, request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=True,
        output_kind=RequestOutputKind.DELTA,
    )
    try:
        stream = engine.generate({"prompt_token_ids": request["prompt"]}, params, request_id=str(request["id"]))
        async for output in stream:
            if num_tokens := len(output.outputs[0].token_ids):
                peer.tokens(request["id"], num_tokens)
        peer.done(request["id"])
    except Exception as error:
        peer.failed(request["id"], f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
