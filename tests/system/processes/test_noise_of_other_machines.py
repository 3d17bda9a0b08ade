"""A process as on an older CPU draws the noise that was recorded."""

from __future__ import annotations

import os
import subprocess
import sys

RECORDED = "1b67dcdc47d4d6abce033cc7be83bfda1f0654da77091175603345139f69452d"
"""Of the same draws as in the tests of the mechanism."""

_DRAW = (
    "import hashlib; from stobatch.seeds import Stream; from stobatch.dp.noise import rounded_normal;"
    "print(hashlib.sha256(rounded_normal(Stream(b'k' * 32), 100_000, 1.3, 2.0**-34).tobytes()).hexdigest())"
)


def test_every_machine_draws_the_same_noise() -> None:
    """Log, sin and cos round differently on other vector units; the noise does not."""
    poorer = {
        "ATEN_CPU_CAPABILITY": "default",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    }
    command = [sys.executable, "-W", "ignore", "-c", _DRAW]
    done = subprocess.run(command, env={**os.environ, **poorer}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == RECORDED
