"""`dp.clipped_sum`, `dp.add_noise`, `dp.epsilon` on modules of one's own: against a loop over examples, and refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch import dp
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.clipping import Batch
from stobatch.dp.noise import Grid
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.seeds import Seeds
from stobatch.types import Neighbours, Status

FALSE_ALARM = 1e-9


def cross_entropy(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def one_by_one(module: nn.Module, batch: Batch, clip_norm: float, *, examples: list[int] | None = None) -> Tensor:
    """The oracle: a backward pass for each example, clipped and added up, flat."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(len(batch[0])) if examples is None else examples:
        loss = cross_entropy(module, tuple(entry[i : i + 1] for entry in batch)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
        ).double()
        total += flat * min(1.0, clip_norm / max(float(flat.norm()), 1e-300))
    return total


def flat(sums: dp.ClippedGradients) -> Tensor:
    return torch.cat([value.flatten() for value in sums.values()]).double()


class Tied(nn.Module):
    """Its weight is used by a layer and, transposed, without one: no tape sees the second use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(inputs.flatten(1)[:, :6])), self.layer.weight.t())[:, :3]


class Scaled(nn.Module):
    """A parameter of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.Module, bool]:
    """A module for pictures of 2 x 5 x 5 and three classes, and whether one pass is enough for it."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(["dense", "conv", "layer norm", "own parameter", "tied", "grouped", "frozen"]))
    width, activation = draw(st.integers(1, 7)), draw(st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU]))
    if kind == "tied":
        return Tied(), False
    if kind in ("conv", "grouped"):
        maps = 2 * width
        conv = nn.Conv2d(2, maps, draw(st.integers(1, 3)), stride=draw(st.integers(1, 2)), padding=1,
                         groups=2 if kind == "grouped" else 1)  # fmt: skip
        stack = nn.Sequential(conv, nn.GroupNorm(2, maps), activation(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        return nn.Sequential(stack, nn.Linear(4 * maps, 3)), kind == "conv"
    extra = {"layer norm": nn.LayerNorm(width), "own parameter": Scaled(width)}.get(kind, nn.Identity())
    module = nn.Sequential(nn.Flatten(), nn.Linear(50, width), extra, activation(), nn.Linear(width, 3))
    if kind == "frozen":
        module[1].requires_grad_(False)
    return module, kind in ("dense", "frozen")


@settings(max_examples=60)
@given(modules(), st.integers(2, 9), st.sampled_from([0.01, 0.3, 100.0]), st.integers(0, 2**20))
def test_the_sum_is_that_of_a_loop_over_the_examples(
    made: tuple[nn.Module, bool], count: int, clip_norm: float, seed: int
) -> None:
    module, in_one_pass = made
    module.double()
    torch.manual_seed(seed)
    batch = torch.randn(count, 2, 5, 5, dtype=torch.float64), torch.randint(3, (count,))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    sums = dp.clipped_sum(module, cross_entropy, batch, clip_norm)
    expected = one_by_one(module, batch, clip_norm)
    assert float((flat(sums) - expected).norm()) <= 1e-6 * clip_norm * count
    assert sums.in_one_pass == in_one_pass
    assert set(sums) == {name for name, p in module.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())
    fewer = dp.clipped_sum(module, cross_entropy, tuple(entry[1:] for entry in batch), clip_norm)
    assert float((flat(sums) - flat(fewer)).norm()) <= clip_norm * (1 + 1e-12)


def test_the_loop_over_the_examples_would_see_a_sum_that_is_clipped_as_a_whole() -> None:
    """The broken twin: clipping the batch's gradient, as a plain loop does, is told from clipping each example's."""
    torch.manual_seed(0)
    module, batch = nn.Linear(4, 3).double(), (torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    whole = torch.cat(
        [g.flatten() for g in torch.autograd.grad(cross_entropy(module, batch).sum(), [*module.parameters()])]
    )
    wrong = whole * min(1.0, 8 * 0.3 / float(whole.norm()))
    assert float((wrong - one_by_one(module, batch, 0.3)).norm()) > 1e-2
    some = one_by_one(module, batch, 0.3, examples=list(range(7)))
    assert float((flat(dp.clipped_sum(module, cross_entropy, batch, 0.3)) - some).norm()) > 0.1


def test_an_empty_batch_and_a_single_example_have_sums_too() -> None:
    module = nn.Linear(4, 3)
    nothing = dp.clipped_sum(module, cross_entropy, (torch.zeros(0, 4), torch.zeros(0).long()), 1.0)
    assert flat(nothing).abs().sum() == 0
    alone = torch.ones(1, 4), torch.zeros(1).long()
    assert torch.allclose(flat(dp.clipped_sum(module, cross_entropy, alone, 0.1)), one_by_one(module, alone, 0.1))


def test_what_was_found_for_other_losses_or_another_mode_is_not_believed() -> None:
    torch.manual_seed(0)
    module, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(3, (8,)))

    def escaping(module: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(F.linear(module(batch[0]), module.weight[:, :3]), batch[1], reduction="none")

    assert dp.clipped_sum(module, cross_entropy, batch, 1.0).in_one_pass
    assert not dp.clipped_sum(module, escaping, batch, 1.0).in_one_pass
    assert dp.clipped_sum(module, cross_entropy, batch, 1.0).in_one_pass


class Centred(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        return inputs


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), "layer '0' is BatchNorm1d: each output depends on the whole batch.*replace_batch_norm"),
        (Centred(), "changing one example of a batch changes another example's loss"),
        (nn.Dropout(0.5), "draws random numbers"),
        (Counting(), "passing examples through the module changes its '0.seen'"),
    ],
)
def test_modules_without_a_gradient_of_one_example_are_refused(layer: nn.Module, message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=message):
        dp.clipped_sum(
            nn.Sequential(layer, nn.Linear(4, 3)), cross_entropy, (torch.randn(8, 4), torch.randint(3, (8,))), 1.0
        )


def test_requests_that_make_no_sense_are_refused() -> None:
    module, inputs, labels = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    for clip_norm in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SettingError, match="is not a positive number"):
            dp.clipped_sum(module, cross_entropy, (inputs, labels), clip_norm)
    with pytest.raises(DataError, match=r"lengths \[8, 7\]"):
        dp.clipped_sum(module, cross_entropy, (inputs, labels[1:]), 1.0)
    with pytest.raises(DataError, match=r"is a Tensor.*such as \(inputs, labels\)"):
        dp.clipped_sum(module, cross_entropy, inputs, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="one loss per example"):
        dp.clipped_sum(module, lambda m, b: cross_entropy(m, b).mean(), (inputs, labels), 1.0)
    for stddev in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(SettingError, match="is not a positive number"):
            dp.add_noise({"weight": inputs}, stddev)


def drawn(count: int, stddev: float) -> Tensor:
    """Noise by secret seeds on sums that are not on its grid."""
    sums = {"a": torch.full((count // 4, 4), 1 / 3, dtype=torch.float64), "b": torch.zeros(3)}
    noisy = dp.add_noise(sums, stddev)
    assert noisy["b"].dtype == torch.float32
    return (noisy["a"] - sums["a"]).flatten()


def test_noise_has_the_size_asked_for_and_is_never_the_same() -> None:
    """Kolmogorov-Smirnov, with a false-alarm rate of 1e-9; half of the noise is the broken twin."""
    noise = drawn(20_000, 1.5)
    assert kstest(noise.numpy(), "norm", (0, 1.5)).pvalue > FALSE_ALARM
    assert kstest(noise.numpy() / 2, "norm", (0, 1.5)).pvalue < FALSE_ALARM
    assert not torch.equal(noise, drawn(20_000, 1.5))


def test_what_is_released_lies_on_the_grid_whatever_the_sums_are() -> None:
    sums = {"weight": torch.tensor([1 / 3, -1e3 / 7, 1e-30], dtype=torch.float64)}
    step, stream = Grid.for_noise(0.7).step, Seeds.reproducible(1).stream("noise")
    steps = dp.add_noise(sums, 0.7, stream)["weight"] / step
    assert torch.equal(steps, steps.round())
    noise = steps - (sums["weight"] / step).round()
    assert torch.equal(noise * step, dp.add_noise({"weight": torch.zeros(3).double()}, 0.7, stream)["weight"])


@given(st.floats(1e-6, 1e6), st.floats(0.1, 100), st.integers(1, 10**8))
def test_the_noise_pays_for_rounding_the_sums(clip_norm: float, sigma: float, values: int) -> None:
    sums = dp.ClippedGradients({"weight": torch.zeros(1).expand(values)}, clip_norm, in_one_pass=True)
    stddev = sums.noise_stddev(sigma)
    assert stddev >= sigma * (clip_norm + math.sqrt(values) * Grid.for_noise(stddev).step)
    if clip_norm * sigma > 1e-3 and sigma <= 10:
        assert stddev <= sigma * clip_norm * (1 + 1e-4), "and hardly costs anything"


def test_the_accountant_says_what_it_assumes() -> None:
    found = dp.epsilon(noise_multiplier=1.1, poisson_sampling_rate=0.02, steps=300, delta=1e-6)
    assert found.epsilon == PoissonGaussian(0.02, 1.1, 300).epsilon(1e-6)
    assert (found.neighbours, found.status) == (Neighbours.ADD_REMOVE, Status.PROVED)
    for words in ("proved ε = ", "no program was checked", "Poisson sampling", "deviation 1.1 C", "at most 300 steps"):
        assert words in repr(found)
    assert all(f"assumes: {assumption}" in repr(found) for assumption in found.assumptions)
    assert "<li>Poisson sampling" in found._repr_html_()
    sigma = dp.noise_multiplier(target_epsilon=found.epsilon, poisson_sampling_rate=0.02, steps=300, delta=1e-6)
    assert sigma == pytest.approx(1.1, rel=2e-3)


def test_sums_say_that_they_are_not_private() -> None:
    sums = dp.clipped_sum(nn.Linear(4, 3), cross_entropy, (torch.randn(8, 4), torch.randint(3, (8,))), 0.5)
    assert "each example at most 0.5 in l2, clipped in one pass; no noise yet, NOT private" in repr(sums)
