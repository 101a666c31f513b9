"""transformers' `generate` behind the benchmarks' pipe: whatever waits when a batch ends is the next batch."""

from __future__ import annotations

import argparse
import queue
from typing import Any

from benchmarks.peers.serving import Peer

MAX_BATCH = 16


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    peer = Peer()
    try:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    except Exception as error:
        peer.cannot_run(error)
        raise
    peer.ready({"version": transformers.__version__, "threads": options.threads, "dtype": options.dtype})
    while batch := _next_batch(peer.requests):
        _generate(model, peer, batch)


def _next_batch(requests: queue.Queue[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Blocks for the first request, then takes what else is there; empty at the end of the input."""
    request = requests.get()
    batch = []
    while request is not None:
        batch.append(request)
        if len(batch) == MAX_BATCH:
            break
        try:
            # Requests of one moment come through the pipe one by one.
            request = requests.get(timeout=0.01)
        except queue.Empty:
            break
    return batch


def _generate(model: Any, peer: Peer, batch: list[dict[str, Any]]) -> None:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    left = {request["id"]: request["max_tokens"] for request in batch}

    class Tell(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            for request_id in [each for each, num in left.items() if num > 0]:
                peer.tokens(request_id, 1)
                left[request_id] -= 1
                if left[request_id] == 0:
                    peer.done(request_id)
            ended = [left[request["id"]] == 0 for request in batch]
            return torch.tensor(ended, device=input_ids.device)

    width = max(len(request["prompt"]) for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
        mask[row, width - len(request["prompt"]) :] = 1
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(left.values()),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Tell()]),
        )


if __name__ == "__main__":
    main()
