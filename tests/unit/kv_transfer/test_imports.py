from __future__ import annotations

import subprocess
import sys


def test_the_server_processes_share_of_the_handover_imports_no_torch():
    modules = "kv_transfer.client, kv_transfer.service, kv_transfer.segment, sys"
    script = f"import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
