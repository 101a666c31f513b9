"""The protocol between the benchmarks and a peer, in the peer's own environment: standard library only.

Lines of JSON. In: {"id", "prompt": [token ids], "max_tokens"}; the end of the input ends the peer. Out: first
{"ready": {what it runs}} or {"error"}, then {"id", "tokens": n} for every message, {"id", "done": true} or
{"id", "error"}. Greedy, exactly `max_tokens` tokens: the end-of-sequence token does not end a generation.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Peer:
    """Both ends of the pipe. Whatever a library prints goes to standard error."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._write_lock = threading.Lock()
        # Bounded by what the load generator sends.
        self.requests: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def ready(self, configuration: Mapping[str, Any]) -> None:
        """Tells that requests may come; from here on `requests` fills, with None at the end of the input."""
        self._say({"ready": dict(configuration)})
        threading.Thread(target=self._read, daemon=True).start()

    def tokens(self, request_id: int, num_tokens: int) -> None:
        """New tokens of a request."""
        self._say({"id": request_id, "tokens": num_tokens})

    def done(self, request_id: int) -> None:
        """A request is complete."""
        self._say({"id": request_id, "done": True})

    def failed(self, request_id: int, error: str) -> None:
        """A request ended with an error."""
        self._say({"id": request_id, "error": error})

    def cannot_run(self, error: BaseException) -> None:
        """This machine or environment cannot run the peer."""
        self._say({"error": f"{type(error).__name__}: {error}"})

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._write_lock:
            self._output.write(json.dumps(message) + "\n")

    def _read(self) -> None:
        for line in sys.stdin:
            self.requests.put(json.loads(line))
        self.requests.put(None)
