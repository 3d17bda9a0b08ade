"""The arithmetic that guarantees rest on, tried on small cases whose answers are known by other means."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.doctor.check import Outcome
from stobatch.dp.accounting import PoissonGaussian, gaussian_epsilon
from stobatch.dp.clipping import Batch, Clipper, clipped_sum, clipped_sum_by_example
from stobatch.dp.noise import Grid, rounded_normal
from stobatch.models.layered import build_layered
from stobatch.results import Health
from stobatch.seeds import Seeds

Multiply = Callable[[Tensor, Tensor], Tensor]
Epsilon = Callable[[PoissonGaussian, float], float]
Draw = Callable[[int, str], NDArray[np.float64]]

CLIP_NORM = 0.5
DRAWS = 100_000


def _probe() -> tuple[nn.Module, Batch]:
    """A small network and a batch of noise: public, and the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    network = build_layered("conv 8 5/2, relu, linear 32, relu, linear", (1, 28, 28), 10, generator)
    return network, (torch.rand(32, 1, 28, 28, generator=generator) * 2 - 1, torch.arange(32) % 10)


def _losses(network: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def _gradient() -> list[Tensor]:
    network, batch = _probe()
    return list(torch.autograd.grad(_losses(network, batch).sum(), list(network.parameters())))


def torch_works(multiply: Multiply = torch.matmul) -> Outcome:
    """A product of matrices against NumPy's."""
    left, right = torch.rand(2, 192, 192, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    known = left.numpy() @ right.numpy()
    error = float(np.abs(multiply(left.float(), right.float()).double().numpy() - known).max() / np.abs(known).max())
    said = f"torch {torch.__version__}: a product of matrices differs from NumPy's by {error:.1g}"
    return Outcome(Health.OK if error < 1e-5 else Health.BROKEN, said)


def determinism(gradient: Callable[[], list[Tensor]] = _gradient) -> Outcome:
    """A resumed run repeats an undisturbed one only if the same gradient has the same bits every time."""
    digests = {hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradient())).hexdigest() for _ in range(3)}
    threads = f"on {torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "on one thread"
    if len(digests) > 1:
        return Outcome(Health.BROKEN, f"one gradient computed three times {threads} has {len(digests)} sets of bits")
    return Outcome(Health.OK, f"one gradient computed three times {threads} has the same bits")


def accountant(epsilon: Epsilon = PoissonGaussian.epsilon) -> Outcome:
    """Two numbers that are known: a closed form where every record takes part, and one of DP-SGD as usual.

    The accountant may round up by a thousandth and never down. The second number is the limit of ever finer grids.
    """
    known = (
        (PoissonGaussian(1.0, 11.8, 10), gaussian_epsilon(11.8, 10, 1e-5)),
        (PoissonGaussian(0.01, 1.0, 10_000), 6.1877),
    )
    excess = [epsilon(steps, 1e-5) / truth - 1 for steps, truth in known]
    said = f"two known privacy budgets are overcounted by {excess[0]:.1e} and {excess[1]:.1e} of themselves"
    right = all(-1e-9 <= over <= 1e-3 for over in excess)
    return Outcome(Health.OK if right else Health.BROKEN, f"{said}; 0 to 1e-3 is right")


def clipping(fast: Clipper = clipped_sum) -> Outcome:
    """The fast sum of clipped gradients against one that forms every example's gradient."""
    network, batch = _probe()

    def flat(clipper: Clipper) -> tuple[Tensor, float]:
        started = time.perf_counter()
        done = clipper(network, _losses, batch, CLIP_NORM)
        seconds = time.perf_counter() - started
        return torch.cat([done.norms, *(done.gradients[name].flatten() for name in sorted(done.gradients))]), seconds

    (formed, _), (quick, _) = flat(clipped_sum_by_example), flat(fast)
    slow_seconds, fast_seconds = flat(clipped_sum_by_example)[1], flat(fast)[1]
    error = float((quick - formed).norm() / formed.norm())
    said = (
        f"clipped sums of {len(batch[0])} examples differ from formed gradients by {error:.1g}; "
        f"{1e3 * fast_seconds:.1f} ms against {1e3 * slow_seconds:.1f} ms"
    )
    return Outcome(Health.OK if error < 1e-4 else Health.BROKEN, said)


def _released(count: int, name: str) -> NDArray[np.float64]:
    return rounded_normal(Seeds.reproducible(0).stream("doctor", name), count, 1.0, Grid.for_noise(1.0).step)


def noise(draw: Draw = _released) -> Outcome:
    """Normal, in its middle and in its tails; the same for the same name, and unrelated for another.

    The seed is fixed, so a sound generator passes always. For a random seed each limit would be passed by mistake
    with a probability of about 1e-6.
    """
    values, again, other = draw(DRAWS, "a"), draw(DRAWS, "a"), draw(DRAWS, "b")
    places = ndtr(np.sort(values))
    distance = float(np.abs(places - (np.arange(DRAWS) + 0.5) / DRAWS).max()) * math.sqrt(DRAWS)
    expected = 2 * DRAWS * float(ndtr(-3.0))
    tail = (float((np.abs(values) > 3).sum()) - expected) / math.sqrt(expected)
    related = float(np.mean(values * other)) * math.sqrt(DRAWS)
    said = (
        f"{DRAWS:,} draws of noise: Kolmogorov-Smirnov {distance:.2f} (below 2.7), beyond three deviations "
        f"{tail:+.1f}, with another stream {related:+.1f} (within 5)"
    )
    if not np.array_equal(values, again):
        return Outcome(Health.BROKEN, f"{said}; the same name gave two streams")
    right = distance < 2.7 and abs(tail) < 5 and abs(related) < 5
    return Outcome(Health.OK if right else Health.BROKEN, said)
