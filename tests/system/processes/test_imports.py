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


def test_verbs_import_neither_a_compiler_nor_distributions(tmp_path: Path) -> None:
    """Optimisers, slopes, the trial of clipping and accounting need none: importing takes longer than a run starts."""
    code = (
        "import sys, stobatch; from stobatch_recipes import recipe\n"
        "small = {'training.steps': 2, 'data.train_limit': 200, 'method.batch_size': 30}\n"
        "heavy = {'torch._dynamo', 'scipy.optimize', 'scipy.stats', 'scipy.signal'}\n"
        "for name in ('demo', 'published.demo'):\n"
        "    run = f'{sys.argv[1]}/{name}'\n"
        "    stobatch.train(recipe(name).override_all(small), run, quiet=True)\n"
        "    assert not heavy & sys.modules.keys(), name\n"
        "run, limits = f'{sys.argv[1]}/demo', {'certification.limit': 20, 'certification.slope_steps': 2}\n"
        "few = {'limit': 20, 'adaptive_attacks': ['madry'], 'adaptive_steps': 2, 'num_images': 0}\n"
        "stobatch.certify(run, overrides=limits, quiet=True)\n"
        "stobatch.evaluate(run, overrides={f'evaluation.{key}': few[key] for key in few}, quiet=True)\n"
        "stobatch.report(run)\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
