"""Fixtures that all tests share."""

from __future__ import annotations

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.otlp", "tests.fixtures.redis"]
