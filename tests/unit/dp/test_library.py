"""The accountant's library without `scipy.stats`: the same numbers as with it, and SciPy is as it was afterwards."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from stobatch.dp.library import CentredNormal

SCALES = (1e-3, 0.37, 1.0, 11.8, 1e6)
VALUES = np.concatenate([np.linspace(-45, 45, 5001), [0.0, -0.0, 1e-300, 1e300, -np.inf, np.inf, np.nan]])
SHARES = np.concatenate([np.linspace(0, 1, 5001), 10.0 ** -np.arange(1, 308), [-0.1, 1.1, np.nan]])


def same_numbers(ours: object, theirs: object) -> bool:
    """Compare every bit but the sign of a zero, which one of them gives for a logarithm at infinity."""
    one, other = np.asarray(ours), np.asarray(theirs)
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("scale", SCALES)
def test_the_normal_law_is_that_of_scipy_to_the_bit(scale: float) -> None:
    ours, theirs = CentredNormal(scale), stats.norm(scale=scale)
    assert same_numbers(ours.cdf(VALUES * scale), theirs.cdf(VALUES * scale))
    assert same_numbers(ours.logcdf(VALUES * scale), theirs.logcdf(VALUES * scale))
    assert same_numbers(ours.ppf(SHARES), theirs.ppf(SHARES))
    for value in (-3, 0.25, np.float32(1.1), [1, 2], np.float64(-np.inf)):
        assert same_numbers(ours.cdf(value), theirs.cdf(value))
        assert same_numbers(ours.logcdf(value), theirs.logcdf(value))
    assert same_numbers(ours.ppf(0.3), theirs.ppf(0.3))
    # The comparison would see a last bit.
    assert not same_numbers(ours.cdf(0.25 * scale), np.nextafter(theirs.cdf(0.25 * scale), 1))


def test_what_the_library_does_not_ask_for_today_comes_from_scipy() -> None:
    assert CentredNormal(2.0).sf(1.0) == stats.norm(scale=2.0).sf(1.0)
    assert copy.deepcopy(CentredNormal(2.0)).std() == 2.0


ACCOUNT = """
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.composition import compose_epsilon
cases = [(0.01, 1.0, 300, 1e-5), (1.0, 11.8, 10, 1e-5), (0.05, 2.0, 3, 1e-9)]
for rate, noise, steps, delta in cases:
    print(PoissonGaussian(rate, noise, steps).epsilon(delta).hex())
"""
UNIMPORTED = "import sys; print(sorted({'scipy.optimize', 'scipy.stats', 'scipy.signal'} & sys.modules.keys()))\n"
COMPOSE = "print(compose_epsilon([PoissonGaussian(*case[:3]) for case in cases[::2]], 1e-5).hex())\n"


def said(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_epsilon_is_that_of_the_library_as_it_imports_itself() -> None:
    """In processes of their own: here all three modules of SciPy are imported."""
    *late, unimported, composed = said(ACCOUNT + UNIMPORTED + COMPOSE)
    assert unimported == "[]"
    *plain, imported, composed_plainly = said("import dp_accounting\n" + ACCOUNT + UNIMPORTED + COMPOSE)
    assert imported == "['scipy.optimize', 'scipy.signal', 'scipy.stats']"
    assert (late, composed) == (plain, composed_plainly)


def test_scipy_is_itself_afterwards() -> None:
    code = (
        "import stobatch.dp.library, scipy, scipy.optimize, scipy.stats, scipy.signal\n"
        "from scipy import optimize, signal, stats\n"
        "print(scipy.stats is stats, stats.norm is scipy.stats.distributions.norm, stats.__file__.count('stats'))\n"
        "print(scipy.signal is signal, signal.fftconvolve([1, 2], [1, 2]).round().tolist())\n"
        "print(scipy.optimize is optimize, optimize.brentq(lambda x: x - 1, 0, 3))\n"
    )
    assert said(code) == ["True True 1", "True [1.0, 4.0, 4.0]", "True 1.0"]


def test_what_the_library_holds_of_scipy_imports_it_when_used() -> None:
    code = (
        "import stobatch.dp.library, sys, dp_accounting\n"
        "assert 'scipy.stats' not in sys.modules\n"
        "late = dp_accounting.get_epsilon_gaussian(2.0, 1e-5)\n"
        "laplace = dp_accounting.pld.privacy_loss_distribution.from_laplace_mechanism(1.5)\n"
        "import scipy.stats\n"
        "from dp_accounting.pld import privacy_loss_mechanism as held\n"
        "assert held.stats.norm(1.0, 2.0).cdf(1.0) == 0.5 and held.stats.binom is scipy.stats.binom\n"
        "print(0 < late < 3, 0 < laplace.get_epsilon_for_delta(0.1) < 1)\n"
    )
    assert said(code) == ["True True"]
