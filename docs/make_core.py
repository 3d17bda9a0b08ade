"""Writes docs/core.md: the scripts of examples/, what they print, and what each promises."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "core.md"

OPENING = """# The core, on any module

<!-- blocks run by test_examples.py -->

Privacy, certificates, attacks and audits work on any `torch.nn.Module`, without a run directory, a configuration or a
method. These are the functions that the methods of this library use themselves. `python docs/make_core.py` writes this
page from the scripts in `examples/`, and a test compares it with what they print.

| function | what it returns | status of what it says |
|---|---|---|
| `dp.clipped_sum` | gradients by parameter name, each example's clipped, in one backward pass where that is right | \
a bound on the sum's sensitivity; not private before `dp.add_noise` |
| `dp.add_noise` | the sums with Gaussian noise on a public grid | as the accountant says, if its assumptions are kept |
| `dp.epsilon`, `dp.noise_multiplier` | ε for adding or removing one example, under Poisson sampling; the noise for an \
ε | proved for the mechanism assumed; whether a program is that mechanism is not checked |
| `bounds.certify` | a label and a radius for each input of a network of known operations | proved, rounding included |
| `votes.certify` | a label, or none, and a radius for each input of any per-example module | proved of the vote, each \
wrong with a stated probability |
| `attacks.attack` | the worst point found in a ball, and whether it breaks the label | broken is certain; not broken \
proves nothing |
| `auditing.one_run_bound`, `auditing.two_sample_bound` | a lower bound on ε from an attacker's scores | holds with \
the stated confidence; a small bound proves nothing |

Layers that mix examples, such as BatchNorm, are refused with the reason: no statement about one example would hold.
Parameters of a layer whose gradients are not known from what it saw have them formed, example by example, with the
same bound.
"""

SECTIONS = {
    "private_loop": "## A private training loop",
    "certified_radii": "## Certified radii by bounds",
    "vote": "## A vote under noise",
    "one_run_audit": "## An audit of one run",
}


def printed(script: Path) -> str:
    """What a script of examples/ prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def section(name: str) -> str:
    script = ROOT / "examples" / f"{name}.py"
    return f"{SECTIONS[name]}\n\n```python\n{script.read_text()}```\n\n```text\n{printed(script)}```\n"


def page() -> str:
    return "\n".join([OPENING, *map(section, SECTIONS)])


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.write_text(page())} characters in {PAGE}\n")
