#!/usr/bin/env bash
# Runs what needs a CUDA device and prints one line a test, then the figures that the tests measured. Without a device
# every line says why it was skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT
status=0
.venv/bin/python -m pytest -q -m gpu tests/gpu --junitxml="$report" >"$report.log" 2>&1 || status=$?
.venv/bin/python - "$report" <<'PYTHON' || { cat "$report.log" >&2; exit 1; }
import sys
import xml.etree.ElementTree as ElementTree

figures = []
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    outcome, detail = "passed", ""
    for kind in ("skipped", "failure", "error"):
        if (found := case.find(kind)) is not None:
            outcome, detail = kind, (found.get("message") or "").splitlines()[0][:80]
    print(f"{outcome:8} {float(case.get('time', 0)):7.1f} s  {case.get('name')}  {detail}")
    figures += [(each.get("name"), each.get("value")) for each in case.iter("property")]
for name, value in figures:
    print(f"{name:40} {value}")
PYTHON
if [ "$status" -ne 0 ]; then cat "$report.log" >&2; fi
rm -f "$report.log"
exit "$status"
