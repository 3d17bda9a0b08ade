"""Bounds through residual sums, concatenations, pooling and frozen normalisation, against attacks and exact minima."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch import bounds
from stobatch.bounds import graph, linear
from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.bounds.branching import PLAIN, Effort
from stobatch.bounds.certifier import BoxCertifier
from stobatch.bounds.linear import AdaptivePool, Box, ChannelScaling, MaxPool
from stobatch.errors import ModelError
from stobatch.models import FrozenAffine, hand_over


class Every(nn.Module):
    """Everything that bounds follow, in one small network. A scalar input spreads over 4x4 values by padding."""

    def __init__(self, seed: int, channels: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(channels, 3, 4, padding=3)
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = FrozenAffine(torch.randn(3), torch.randn(3) / 2)
        self.pool, self.relu = (nn.MaxPool2d(3, stride=2, padding=1) if seed % 2 else nn.MaxPool2d(2)), nn.ReLU()
        self.shortcut, self.mean = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
        self.narrow = nn.Conv2d(6, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.relu(self.stem(inputs))
        out = self.second(F.relu(self.norm(self.first(values))))
        out += values
        size = F.adaptive_avg_pool2d(self.pool(out), 2)
        joined = torch.cat([size, F.adaptive_avg_pool2d(self.shortcut(out), 2)], 1)
        narrow = self.narrow(joined).relu()
        scores: Tensor = self.head(self.mean(narrow).view(narrow.size(0), -1))
        return scores


class Small(nn.Module):
    """The same for exact minima: a scalar in, few neurons, all operations."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.block = nn.Conv2d(1, 2, 2, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norm = FrozenAffine(torch.randn(2), torch.randn(2) / 2)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.stem(inputs)
        values = values + self.norm(self.block(values.relu()))
        both = torch.cat([F.max_pool2d(values, 2), values.mean((2, 3), keepdim=True)], 1)
        scores: Tensor = self.head(both.flatten(1))
        return scores


def composed(module: nn.Module, inputs: Tensor) -> Tensor:
    """The operations that were found, computed one after the other: an oracle of the following itself."""
    values = {graph.INPUT: inputs}
    for place, operation in enumerate(graph.operations_of(module)):
        values[place] = operation.layer(*(values[source] for source in operation.inputs))
    return values[place]


@pytest.mark.parametrize("module", [Every(0), Every(1), Small(0)], ids=["every", "padded", "small"])
def test_what_is_traced_is_what_a_call_computes(module: nn.Module) -> None:
    inputs = torch.rand(5, 1, 1, 1) * 2 - 1
    assert torch.allclose(composed(module, inputs), module(inputs), rtol=1e-5, atol=1e-6)


# The exact minimum, in rational numbers.

Values = list[Fraction]


def matrix_of(layer: nn.Module, shape: Sequence[int]) -> tuple[list[Values], Values, torch.Size]:
    """An affine layer as rational numbers: what it does to nothing and to each single value."""
    size = torch.Size(shape).numel()
    points = torch.cat([torch.zeros(1, size), torch.eye(size)]).double().view(-1, *shape)
    found = layer.double()(points) if list(layer.parameters()) or list(layer.buffers()) else layer(points)
    layer.float()
    shift, rows = found[0].flatten(), (found[1:] - found[0]).flatten(1)
    if isinstance(layer, nn.Conv2d | nn.Linear | FrozenAffine):
        # Weights alone, without the roundings of adding and subtracting the shift.
        bare = {name: value.clone() for name, value in layer.state_dict().items()}
        for name in ("bias", "shift"):
            if bare.get(name) is not None:
                getattr(layer, name).data.zero_()
        rows = layer.double()(points[1:]).flatten(1)
        layer.float().load_state_dict(bare)
    else:
        count = round(1 / float(rows.max()))
        return (
            [[Fraction(bool(w), count) for w in row.tolist()] for row in rows.t()],
            [Fraction(0)] * len(shift),
            found.shape[1:],
        )
    return (
        [[Fraction(w) for w in row.tolist()] for row in rows.t()],
        [Fraction(b) for b in shift.tolist()],
        found.shape[1:],
    )


class Exact:
    """A network of a scalar in rational arithmetic: piecewise linear, so its least lead is at a kink or at an end."""

    def __init__(self, module: nn.Module) -> None:
        self.operations = graph.operations_of(module)
        self.shapes: dict[int, torch.Size] = {}
        self.affine: dict[int, tuple[list[Values], Values]] = {}
        values = {graph.INPUT: torch.zeros(1, 1, 1, 1)}
        for place, (layer, inputs, _) in enumerate(self.operations):
            values[place] = layer(*(values[source] for source in inputs))
            self.shapes[place] = values[place].shape[1:]
            if isinstance(layer, nn.Conv2d | nn.Linear | FrozenAffine | nn.AdaptiveAvgPool2d | nn.AvgPool2d):
                rows, shift, _ = matrix_of(layer, values[inputs[0]].shape[1:])
                self.affine[place] = rows, shift

    def at(self, point: Fraction) -> tuple[Values, list[list[Values]]]:
        """The scores, and the groups of values whose largest, or whose sign, decides what follows."""
        values: dict[int, Values] = {graph.INPUT: [point]}
        decided: list[list[Values]] = []
        for place, (layer, inputs, _) in enumerate(self.operations):
            given = [values[source] for source in inputs]
            if place in self.affine:
                rows, shift = self.affine[place]
                values[place] = [
                    b + sum(w * v for w, v in zip(row, given[0], strict=True))
                    for row, b in zip(rows, shift, strict=True)
                ]
            elif isinstance(layer, nn.ReLU):
                decided.append([[v, Fraction(0)] for v in given[0]])
                values[place] = [max(v, Fraction(0)) for v in given[0]]
            elif isinstance(layer, nn.MaxPool2d):
                windows = self._windows(layer, given[0], self.shapes[inputs[0]])
                decided.append(windows)
                values[place] = [max(window) for window in windows]
            elif isinstance(layer, graph.Sum):
                values[place] = [a + b for a, b in zip(*given, strict=True)]
            elif isinstance(layer, graph.Concatenation):
                values[place] = [v for part in given for v in part]
            else:
                assert isinstance(layer, nn.Flatten)
                values[place] = given[0]
        return values[place], decided

    @staticmethod
    def _windows(layer: nn.MaxPool2d, values: Values, shape: torch.Size) -> list[Values]:
        maps, high, wide = shape
        assert layer.kernel_size == layer.stride == 2
        return [
            [values[(c * high + y + dy) * wide + x + dx] for dy in (0, 1) for dx in (0, 1)]
            for c in range(maps)
            for y in range(0, high - 1, 2)
            for x in range(0, wide - 1, 2)
        ]

    def least_lead(self, low: Fraction, high: Fraction, label: int) -> Fraction:
        knots = sorted({low, high})
        while True:
            found = [self.at(knot) for knot in knots]
            # Layer by layer: behind a kink that is not yet a knot, values between knots are not on a line.
            new: set[Fraction] = set()
            for (left, (_, before)), (right, (_, after)) in pairwise(list(zip(knots, found, strict=True))):
                for groups, others in zip(before, after, strict=True):
                    for one, other in zip(groups, others, strict=True):
                        new |= set(crossings(left, right, one, other))
                    if new - set(knots):
                        break
            if not new - set(knots):
                return min(scores[label] - max(s for k, s in enumerate(scores) if k != label) for scores, _ in found)
            knots = sorted(set(knots) | new)


def crossings(left: Fraction, right: Fraction, one: Values, other: Values) -> list[Fraction]:
    """Where, between two points, one of several straight lines crosses another."""
    found = []
    for i in range(len(one)):
        for k in range(i):
            a, b = one[i] - one[k], other[i] - other[k]
            if a * b < 0:
                found.append(left + (right - left) * a / (a - b))
    return found


def overshoots(seeds: int = 5, radii: Sequence[float] = (0.0, 0.1, 0.4), effort: Effort = PLAIN) -> list[float]:
    """How far each bound lies above the exact minimum: never, if it is a bound."""
    found = []
    for seed, radius in product(range(seeds), radii):
        module = Small(seed).requires_grad_(False)
        certifier, exact = BoxCertifier(module, effort=effort), Exact(module)
        inputs = torch.tensor([-0.7, 0.1, 0.6]).view(3, 1, 1, 1)
        answers = zip(
            inputs.flatten().tolist(),
            certifier.predict(inputs).tolist(),
            certifier.margins(inputs, radius).tolist(),
            strict=True,
        )
        for centre, label, margin in answers:
            ends = [max(Fraction(-1), min(Fraction(1), Fraction(centre) + way * Fraction(radius))) for way in (-1, 1)]
            found.append(float(Fraction(margin) - exact.least_lead(*ends, label)))
    return found


@pytest.mark.parametrize("effort", [PLAIN, Effort(6, 20)], ids=["plain", "branches"])
def test_no_bound_exceeds_the_exact_minimum(effort: Effort) -> None:
    assert max(overshoots(effort=effort)) <= 0


def test_at_a_radius_of_0_there_is_nothing_to_lose_but_rounding() -> None:
    assert min(overshoots(radii=(0.0,))) > -1e-4


def one_branch(self: linear.Sum, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
    return [coefficients, torch.zeros_like(coefficients)]


def other_order(self: linear.Concatenation, coefficients: Tensor, parts: Sequence[Box]) -> list[Tensor]:
    sizes = [part.low.shape[1] for part in parts]
    return list(torch.split(coefficients.flip(1), sizes, 1))


TWINS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a sum that forgets a branch": (linear.Sum, "split", one_branch),
    "a largest value that is always the same one": (
        MaxPool,
        "_upper_of_others",
        lambda self, high, chosen: torch.full_like(chosen, -torch.inf, dtype=high.dtype),
    ),
    "values that change places": (linear.Concatenation, "split", other_order),
    "a scale without its sign": (ChannelScaling, "transposed", lambda self, c, shape: c * self.weight.abs()),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*TWINS[name])
    assert max(overshoots(5, (0.4,))) > 1e-6


# Attacks on what is deployed, in float32.


def leads(scores: Tensor, labels: Tensor) -> Tensor:
    named = scores.double().gather(1, labels[:, None])
    return (named - scores.double().scatter(1, labels[:, None], -torch.inf)).amin(1)


def lowest_found(module: nn.Module, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    """The least lead over random corners, random points and a descent, all inside the ball."""
    best = leads(module(inputs), labels)
    generator = torch.Generator().manual_seed(0)
    for count in range(60):
        noise = torch.rand(inputs.shape, generator=generator) * 2 - 1
        points = (inputs + radius * (noise.sign() if count % 2 else noise)).clamp(-1, 1)
        best = torch.minimum(best, leads(module(points), labels))
    points = inputs.clone()
    for _ in range(20):
        points.requires_grad_()
        (slope,) = torch.autograd.grad(leads(module(points), labels).sum(), points)
        points = (points.detach() - radius / 5 * slope.sign()).clamp(inputs - radius, inputs + radius).clamp(-1, 1)
        best = torch.minimum(best, leads(module(points), labels).detach())
    return best.detach()


@pytest.mark.parametrize("method", ["interval", "linear"])
def test_no_attack_gets_below_a_bound(method) -> None:
    for seed in range(3):
        module = Every(seed, channels=2)
        inputs = torch.rand(8, 2, 5, 5, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        certifier = BoxCertifier(module.requires_grad_(False), method)
        labels = certifier.predict(inputs)
        for radius in (0.01, 0.1, 0.5):
            margins = certifier.margins(inputs, radius)
            assert bool((margins <= lowest_found(module, inputs, labels, radius)).all())


def test_linear_bounds_prove_more_than_boxes_through_a_residual_network_and_never_less() -> None:
    inputs, gains = torch.rand(8, 2, 5, 5) * 2 - 1, []
    for seed in range(6):
        module = Every(seed, channels=2).requires_grad_(False)
        boxes, lines = (BoxCertifier(module, method).margins(inputs, 0.1) for method in ("interval", "linear"))
        gains.append(lines - boxes)
    gain = torch.cat(gains)
    assert bool((gain >= 0).all())
    assert float((gain > 1e-3).double().mean()) > 0.9


def test_training_boxes_hold_what_they_should() -> None:
    for seed in range(4):
        module = Every(seed, channels=2).requires_grad_(False)
        inputs = torch.rand(8, 2, 5, 5) * 2 - 1
        labels = module(inputs).argmax(1)
        worst = worst_case_scores(module, TrainingBox.around(inputs, 0.1), labels)
        least = -worst.scatter(1, labels[:, None], -torch.inf).amax(1)
        assert bool((least <= lowest_found(module, inputs, labels, 0.1) + 1e-4).all())


# Rounding.


def sums(values: Tensor) -> tuple[Box, Tensor]:
    one, other = values[:, :3], values[:, 3:] * 1e6
    box, _ = linear.Sum().join([Box(one.double(), one.double()), Box(other.double(), other.double())])
    return box, one + other


def scalings(values: Tensor) -> tuple[Box, Tensor]:
    layer = FrozenAffine(torch.randn(6) * 1e3, torch.randn(6))
    return ChannelScaling(layer.scale, layer.shift).forward(Box(values.double(), values.double())).after, layer(values)


def means(values: Tensor) -> tuple[Box, Tensor]:
    layer = nn.AdaptiveAvgPool2d(1)
    step = AdaptivePool(lambda sides: graph.window_of(layer, sides), values.device)
    return step.forward(Box(values.double(), values.double())).after, layer(values)


@pytest.mark.parametrize("rule", [sums, scalings, means])
def test_float32_stays_inside_the_allowance_and_a_float64_allowance_is_caught(
    rule: Callable[[Tensor], tuple[Box, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 6, 9, 9)

    def contained() -> bool:
        box, found = rule(values)
        return bool(((box.low <= found) & (found <= box.high)).all())

    assert contained()
    monkeypatch.setattr(linear, "FLOAT32_UNIT", linear.FLOAT64_UNIT)
    assert not contained()


class Lossy(nn.Module):
    """In real numbers class 0 leads by 2 everywhere; the float32 sum 1e8 + 8x is 1e8 or 1e8 + 8, nothing between."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Linear(1, 2), nn.Linear(1, 2), nn.Linear(2, 2)
        with torch.no_grad():
            self.small.weight.copy_(torch.tensor([[8.0], [8.0]]))
            self.small.bias.zero_()
            self.large.weight.zero_()
            self.large.bias.copy_(torch.tensor([1e8, 0.0]))
            self.head.weight.copy_(torch.eye(2))
            self.head.bias.copy_(torch.tensor([-1e8, -2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.small(inputs) + self.large(inputs))
        return scores


def test_a_sum_whose_rounding_flips_the_answer_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    module, point = Lossy().requires_grad_(False), torch.tensor([[0.6]])
    assert module(point).argmax() != module(torch.tensor([[0.45]])).argmax()
    certifier = BoxCertifier(module)
    assert float(certifier.margins(point, 0.2)) <= 0
    exact = linear.Sum.join
    monkeypatch.setattr(linear.Sum, "join", lambda self, parts: (exact(self, parts)[0], torch.zeros_like(parts[0].low)))
    monkeypatch.setattr(linear, "FLOAT32_UNIT", 0.0)
    with pytest.raises(ModelError, match="not those that its layers give"):
        certifier.margins(point, 0.2)


def test_sums_that_may_overflow_prove_nothing() -> None:
    large = Box(torch.full((1, 1), 1e38).double(), torch.full((1, 1), 1e38).double())
    box, rounding = linear.Sum().join([large, large])
    assert bool(box.low.isnan().all())
    assert bool(rounding.isnan().all())


# What cannot be traced.


class Forward(nn.Module):
    """Two layers, and whatever is done between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 3), between
        self.relu, self.weight = nn.ReLU(inplace=True), nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.between(self, self.first(inputs)))
        return scores


def branch(module: nn.Module, values: Tensor) -> Tensor:
    return values if values.sum() > 0 else -values


def overwrite_shared(module: nn.Module, values: Tensor) -> Tensor:
    return values + module.relu(values)


def overwrite_view(module: nn.Module, values: Tensor) -> Tensor:
    flat = values.flatten(1)
    return module.relu(flat) + values


def overwrite_unseen(module: nn.Module, values: Tensor) -> Tensor:
    values.relu_()
    return values


def add_in_place_to_shared(module: nn.Module, values: Tensor) -> Tensor:
    other = values.relu()
    values += other
    return values + other


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (branch, "cannot be traced"),
        (lambda module, values: values * values, "'mul'"),
        (lambda module, values: values - values, "'sub'"),
        (lambda module, values: values + 1, "other than results of earlier operations"),
        (lambda module, values: values + module.weight, "outside of a layer"),
        (lambda module, values: torch.add(values, values, alpha=2), "'add' with .*alpha=2"),
        (lambda module, values: torch.cat([values, values], 0)[: len(values)], "cannot be traced"),
        (lambda module, values: values.view(-1, 4), "'view'"),
        (lambda module, values: values.mean(1, keepdim=True) + values, "'mean'"),
        (overwrite_shared, "'relu' overwrites a value that is read elsewhere"),
        (overwrite_view, "overwrites a value that is read elsewhere"),
        (overwrite_unseen, "does not use it"),
        (lambda module, values: F.gelu(values), "'gelu'"),
        (lambda module, values: values[:, :4], "'getitem'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(between, reason) -> None:
    with pytest.raises(ModelError, match=rf"no bounds for a Forward: .*{reason}"):
        bounds.certify(Forward(between), torch.zeros(1, 4), 0.1)


def test_a_harmless_in_place_sum_is_traced() -> None:
    module = Forward(add_in_place_to_shared)
    with pytest.raises(ModelError, match="'iadd' overwrites"):
        bounds.certify(module, torch.zeros(1, 4), 0.1)
    assert len(bounds.certify(Every(0), torch.zeros(2, 1, 1, 1), 0.1)) == 2


def test_other_functions_than_forward_are_refused() -> None:
    class Calls(Every):
        def __call__(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
            return -super().__call__(inputs)

    hooked, patched, inner = Every(0), Every(0), Every(0)
    hooked.register_forward_hook(lambda module, inputs, output: -output)
    patched.forward = lambda inputs: -inputs  # type: ignore[method-assign]
    inner.first.register_forward_pre_hook(lambda module, inputs: None)
    for module in (Calls(0), hooked, patched, inner):
        with pytest.raises(ModelError, match=r"has a (call of its own|hook)|has an attribute in place"):
            bounds.certify(module, torch.zeros(1, 1, 1, 1), 0.1)


def test_a_change_after_the_certifier_was_made_is_seen() -> None:
    network = hand_over(Every(0), (1, 1, 1), 3)
    certifier, inputs = BoxCertifier.of(network, 64), torch.zeros(1, 1, 1, 1)
    certifier.margins(inputs, 0.1)
    network.module = Every(1)
    with pytest.raises(ModelError, match="other layers"):
        certifier.margins(inputs, 0.1)


def test_a_forward_that_tells_a_proxy_from_numbers_is_refused() -> None:
    class TwoFaced(Forward):
        def forward(self, inputs: Tensor) -> Tensor:
            scores = super().forward(inputs)
            return -scores if type(inputs) is Tensor else scores

    module = TwoFaced(lambda module, values: values)
    with pytest.raises(ModelError, match="not those that its layers give"):
        bounds.certify(module, torch.rand(4, 4), 0.1)


def test_batch_normalisation_is_no_frozen_map_even_in_evaluation() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)).eval()
    with pytest.raises(ModelError, match=r"layer '0\.1' is BatchNorm1d"):
        bounds.certify(module, torch.zeros(1, 4), 0.1)


def test_following_leaves_nothing_behind() -> None:
    module = Forward(lambda module, values: values + torch.ones(4))
    before = set(vars(module))
    with pytest.raises(ModelError, match="outside of a layer"):
        bounds.certify(module, torch.zeros(1, 4), 0.1)
    assert set(vars(module)) == before


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 3, 1), nn.MaxPool2d(1), nn.AvgPool2d(1), nn.AdaptiveAvgPool2d(4)])
def test_three_examples_are_not_taken_for_three_channels(layer: nn.Module) -> None:
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(ModelError, match="layer of images is given 4x4 values"):
        bounds.certify(module, torch.zeros(3, 4, 4), 0.1)


def test_windows_of_different_sizes_are_refused() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ModelError, match="windows of 5x5 values have different sizes"):
        bounds.certify(module, torch.zeros(1, 1, 5, 5), 0.1)


def test_more_operations_than_bounds_pay_for_are_refused() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            for _ in range(130):
                inputs = torch.relu(inputs)
            return self.last(inputs)

    with pytest.raises(ModelError, match="131 operations"):
        bounds.certify(Deep(), torch.zeros(1, 4), 0.1)
