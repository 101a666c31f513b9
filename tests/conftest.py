"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# As in engine processes: threads that spin take the cores of those that work. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says how busy the machine is.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.otlp", "tests.fixtures.redis"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with SIGINT ignored, and so would be all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
