"""What docs/kv_handover.md says of the tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/kv_handover.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert named <= set(re.findall(r"def (test_\w+)\(", sources))
