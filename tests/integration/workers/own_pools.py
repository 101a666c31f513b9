"""Workers whose ranks have a pool each, as on CUDA, on a CPU: `python -m tests.integration.workers.own_pools PACKAGE`.

All but the ranks' hardware is as `python -m PACKAGE` wires it.
"""

from __future__ import annotations

import sys
from functools import partial

from baton.worker.host import run_worker
from tests.integration.engine.gloo_ranks import GlooRanks


def main(package: str, flags: list[str]) -> int:
    """Runs a worker of these flags."""
    if package == "prefill_worker":
        from prefill_worker.__main__ import serve as serve_prefill
        from prefill_worker.settings import PrefillWorkerSettings

        return run_worker(PrefillWorkerSettings, partial(serve_prefill, hardware=GlooRanks()), flags)
    from decode_worker.__main__ import serve as serve_decode
    from decode_worker.settings import DecodeWorkerSettings

    return run_worker(DecodeWorkerSettings, partial(serve_decode, hardware=GlooRanks()), flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
