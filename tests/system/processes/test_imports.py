"""What a fresh process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_reading_a_comparison_needs_no_torch() -> None:
    code = "import sys, stobatch.reporting.comparison; sys.exit('torch' in sys.modules)"
    # The package itself imports its verbs; the room below it is what must not.
    stub = (
        "import sys, types; m = types.ModuleType('stobatch'); m.__path__ = [sys.argv[1]]; sys.modules['stobatch'] = m; "
    )
    source = Path(__file__).parents[3] / "src" / "stobatch"
    subprocess.run([sys.executable, "-c", stub + code, str(source)], check=True)
