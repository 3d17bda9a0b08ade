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


def test_training_and_certifying_import_no_compiler(tmp_path: Path) -> None:
    """Neither optimisers, of slopes too, nor the trial of the fast clipping: it takes longer than a run starts."""
    code = (
        "import sys, stobatch; from stobatch_recipes import recipe\n"
        "small = {'training.steps': 2, 'data.train_limit': 200, 'method.batch_size': 30}\n"
        "for name in ('demo', 'published.demo'):\n"
        "    stobatch.train(recipe(name).override_all(small), f'{sys.argv[1]}/{name}', quiet=True)\n"
        "    limits = {'certification.limit': 20, 'certification.slope_steps': 2} if name == 'demo' else {}\n"
        "    limits and stobatch.certify(f'{sys.argv[1]}/{name}', overrides=limits, quiet=True)\n"
        "    assert 'torch._dynamo' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
