"""Fixtures that all tests share."""

from __future__ import annotations

import signal

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.otlp", "tests.fixtures.redis"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with SIGINT ignored, and so would be all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
