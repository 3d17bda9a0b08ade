"""Scattering against direct sums; its norm bound and its certificates against searches that try to beat them."""

from __future__ import annotations

from itertools import product
from math import cos, exp, pi, sin, sqrt

import pytest
import torch
from torch import Tensor

from stobatch.bounds.margins import MarginCertifier, _MarginLipschitz
from stobatch.bounds.scattering import ScatteringLipschitz, squared_norm
from stobatch.errors import DataError, ModelError
from stobatch.models.layered import Layered, build_layered
from stobatch.models.scattering import Scattering
from stobatch.types import Norm, Status

SIDE = 12
GAINS = (1.0, 2.0, 2.0, 3.0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, channels: int = 1, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, SIDE, SIDE, generator=seeded(seed)) * 2 - 1


def direct(picture: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Every sum one by one, with zeros outside; samples lie in the middle of their blocks."""
    side, outputs = filters.shape[-1], picture.shape[-1] // stride
    margin = (side - stride) // 2 if stride > 1 else side // 2
    wide = torch.zeros(picture.shape[0] + 2 * margin, picture.shape[1] + 2 * margin, dtype=picture.dtype)
    wide[margin : margin + picture.shape[0], margin : margin + picture.shape[1]] = picture
    windows = [
        [wide[i * stride : i * stride + side, j * stride : j * stride + side] for j in range(outputs)]
        for i in range(outputs)
    ]
    return torch.stack([torch.stack([(window * filters).sum((-1, -2)) for window in row], -1) for row in windows], -2)


def test_features_are_the_sums_that_define_them() -> None:
    front = Scattering((1, SIDE, SIDE), angles=2).double()
    picture = pictures(1)[0, 0].double()
    low, coarse_low = front.low_fine[0, 0], front.low_coarse[0, 0]

    def moduli(values: Tensor, filters: Tensor, stride: int) -> Tensor:
        real, imaginary = direct(values, filters, stride).chunk(2)
        return (real.square() + imaginary.square()).sqrt()

    fine, coarse = moduli(picture, front.wavelets(0)[:, 0], 1), moduli(picture, front.wavelets(1)[:, 0], 2)
    second = torch.cat([moduli(one, front.wavelets(1)[:, 0], 2) for one in fine])
    expected = [direct(picture, low, 4), *(direct(one, low, 4) for one in fine)]
    expected += [direct(one, coarse_low, 2) for one in (*coarse, *second)]
    torch.testing.assert_close(front(picture[None, None])[0], torch.stack(expected))


def test_wide_wavelets_are_waves_about_the_middle_of_each_block() -> None:
    """Sums over the whole picture, one by one; none of them sees a picture of one grey."""
    front = Scattering((1, SIDE, SIDE), 2, (1.0, 1.0, 1.0, 2.0, 3.0), orders=1).double()
    picture, flat = pictures(1)[0, 0].double(), torch.full((1, 1, SIDE, SIDE), 0.7, dtype=torch.float64)
    expected = []
    for scale, angle, row, column in product((2, 3), (0, 1), range(3), range(3)):
        stddev, total, weight, mean = 0.8 * 2**scale, 0j, 0.0, 0j
        values = []
        for i, j in product(range(SIDE), range(SIDE)):
            down, right = i - (4 * row + 1.5), j - (4 * column + 1.5)
            along, across = (right, down) if angle == 0 else (down, -right)
            bell = exp(-(along**2 + (2 * across) ** 2) / (2 * stddev**2)) * 2 / (2 * pi * stddev**2)
            wave = bell * complex(cos(0.75 * pi / 2**scale * along), sin(0.75 * pi / 2**scale * along))
            values.append((bell, wave, float(picture[i, j])))
            weight, mean = weight + bell, mean + wave
        for bell, wave, value in values:
            total += (wave - bell * mean / weight) * value
        expected.append(4 * abs(total))
    found = front.maps(picture[None, None])[0, 5:].flatten()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(front.maps(flat)[0, 5:], torch.zeros(4, 3, 3, dtype=torch.float64), atol=1e-6, rtol=0)


def test_scales_that_are_left_out_are_neither_computed_nor_kept() -> None:
    """Differences of colours without gains at the first two scales: no features, and their maps are 0."""
    gains = (1.0, 3.0, 3.0, 2.0, 1.0)
    every, some = (
        Scattering((3, SIDE, SIDE), 4, gains, differences=others, orders=1, even=True)
        for others in (gains, (1.0, 0.0, 0.0, 2.0, 1.0))
    )
    inputs = pictures(2, 3)
    there, left = every.maps(inputs).view(2, 3, 17, -1), some.maps(inputs).view(2, 3, 17, -1)
    assert not left[:, 1:, 1:9].any()
    assert torch.equal(left[:, :1], there[:, :1])
    assert torch.equal(left[:, 1:, 9:], there[:, 1:, 9:])
    kept = every.gain.view(3, 17)[:, :, None].expand(3, 17, 9).reshape(-1)[every.mirrored[0]] != 0
    zero = some.gain.view(3, 17)[:, :, None].expand(3, 17, 9).reshape(-1)[every.mirrored[0]] == 0
    assert kept.all()
    assert some(inputs).shape[1] == int((~zero).sum()) < every(inputs).shape[1]


def test_mixtures_are_scattered_like_pictures_of_that_colour() -> None:
    """The mean plus and minus the first difference, over √2: as one-channel pictures they have the same maps."""
    gains = (1.0, 3.0, 3.0, 2.0, 1.0)
    front = Scattering((3, SIDE, SIDE), 4, gains, differences=gains, mixtures=(0.0, *gains[1:]), orders=1)
    grey, inputs = Scattering((1, SIDE, SIDE), 4, gains, orders=1), pictures(2, 3)
    mean, difference = inputs.sum(1) / sqrt(3), (inputs[:, 0] - inputs[:, 2]) / sqrt(2)
    for place, sign in ((3, 1), (4, -1)):
        expected = grey.maps(((mean + sign * difference) / sqrt(2)).unsqueeze(1))
        torch.testing.assert_close(front.maps(inputs).view(2, 5, 17, 3, 3)[:, place], expected, atol=1e-5, rtol=1e-4)


def test_even_features_do_not_tell_a_picture_from_its_mirror_image() -> None:
    front = Scattering((3, SIDE, SIDE), angles=4, gains=GAINS, even=True)
    there = pictures(3, 3)
    torch.testing.assert_close(front(there), front(there.flip(3)), atol=1e-5, rtol=0)
    assert not torch.allclose(front(there), front(there.flip(2)), atol=1e-2)


def test_levels_are_taken_off_the_mean_colour_alone() -> None:
    plain, levelled = (Scattering((3, SIDE, SIDE), 2, GAINS, levels) for levels in (None, (-0.5, 0.5, 0.5, 0.25)))
    off = (plain(pictures(2, 3)) - levelled(pictures(2, 3))).view(2, 3, 9, -1)
    expected = torch.tensor([-0.5, *[0.5 * GAINS[1]] * 4, *[0.25 * GAINS[3]] * 4])
    torch.testing.assert_close(off[:, 0], expected.view(1, -1, 1).expand_as(off[:, 0]), atol=1e-5, rtol=0)
    assert not off[:, 1:].any()


def test_lifted_is_the_transpose_and_features_pass() -> None:
    front = Scattering((3, SIDE, SIDE), angles=2, gains=GAINS, even=True).double()
    inputs = pictures(2, 3).double()
    features = front(inputs)
    weights = torch.randn(4, features.shape[1], generator=seeded(1), dtype=torch.float64)
    by_maps = front.maps(inputs).flatten(1) @ front.lifted(weights).flatten(1).T
    torch.testing.assert_close(features @ weights.T, by_maps)
    assert front(features) is features


FRONTS = {
    "two orders": Scattering((1, SIDE, SIDE), angles=4, gains=GAINS),
    "four scales": Scattering((1, SIDE, SIDE), 4, (1.0, 3.0, 3.0, 2.0, 1.0), orders=1),
}


@pytest.fixture(scope="module", params=FRONTS)
def stretch(request: pytest.FixtureRequest) -> ScatteringLipschitz:
    return ScatteringLipschitz(FRONTS[request.param])


def steepest(front: Scattering, weights: Tensor | None, seed: int) -> float:
    """Ascend on ‖M(x) - M(y)‖/‖x - y‖, or on |w·(S(x) - S(y))|/‖x - y‖; returns the largest that was found."""
    flat = torch.zeros(8, 1, SIDE, SIDE, dtype=torch.float64)
    noise = torch.randn(8, 1, SIDE, SIDE, generator=seeded(seed), dtype=torch.float64)
    base = (noise * torch.linspace(0, 0.3, 8).view(-1, 1, 1, 1).double()).requires_grad_()
    start = torch.randn(8, 1, SIDE, SIDE, generator=seeded(seed + 1), dtype=torch.float64)
    move = (flat + 0.05 * start + 0.05).requires_grad_()
    optimiser, best = torch.optim.Adam([base, move], lr=0.04), 0.0
    for _ in range(60):
        there, here = front.maps(base + move), front.maps(base)
        moved = (there - here).flatten(1)
        if weights is None:
            speed = moved.norm(dim=1) / move.flatten(1).norm(dim=1)
        else:
            speed = (moved @ front.lifted(weights).flatten(1).T).amax(1) / move.flatten(1).norm(dim=1)
        best = max(best, float(speed.detach().max()))
        optimiser.zero_grad()
        (-speed.sum()).backward()
        optimiser.step()
    return best


def test_no_pair_of_pictures_beats_the_norm_but_a_bound_without_order_zero_falls(stretch: ScatteringLipschitz) -> None:
    found = steepest(stretch.front, None, seed=3)
    assert found <= stretch.maps
    assert found > 0.9 * stretch.maps  # the search is strong enough to notice a tenth
    # Broken twins: a bound that forgets the local means of the picture, and one that forgets what subsampling gains.
    forgets_an_order = sqrt(squared_norm(*((1.0, stage) for stage in stretch.scales)))
    strides = [(1 / min(4, 2**scale) ** 2, stage) for scale, stage in enumerate(stretch.scales)]
    forgets_subsampling = sqrt(squared_norm((1 / 16, stretch.low), *strides))
    assert found > forgets_an_order
    assert found > forgets_subsampling


@pytest.mark.parametrize("part", ["all", "last"])
def test_no_pair_beats_the_bound_of_a_functional(stretch: ScatteringLipschitz, part: str) -> None:
    front = stretch.front
    weights = torch.randn(1, *front.map_shape, generator=seeded(5), dtype=torch.float64)
    if part == "last":  # order 2, or the widest scale
        weights[:, : front.paths - front.sizes[-1]] = 0
    weights = weights.abs().flatten(1) if part == "last" else weights.flatten(1)
    found, bound = steepest(front, weights, seed=7), float(stretch.of(weights))
    assert 0.2 * bound < found <= bound


def test_float32_stays_inside_the_allowance(stretch: ScatteringLipschitz) -> None:
    front = next(front for front in FRONTS.values() if front.orders == stretch.front.orders)
    inputs = torch.cat([pictures(50), pictures(50).sign()])
    off = (front.maps(inputs).double() - stretch.maps_of(stretch.responses(inputs))).flatten(1).norm(dim=1)
    reach = inputs.flatten(1).norm(dim=1) + 1
    assert bool((off <= stretch.rounding * reach).all())
    assert bool((off > stretch.rounding * reach * 2.0**-29).all())  # an allowance for float64 would be too small


LAYERS = ("scatter_even 4 2 3 0.25 0.03, linear", "wavelets_even 4 0 0.3 3 3 2 1, linear")


def trained(layers: str = LAYERS[0]) -> Layered:
    return build_layered(layers, (1, SIDE, SIDE), 3, seeded(0))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("norm", [Norm.L2, Norm.LINF])
@pytest.mark.parametrize("asked", [False, True])
def test_attacks_inside_the_radius_change_no_label_and_a_wider_one_falls(asked: bool, norm: Norm, layers: str) -> None:
    network, inputs = trained(layers), pictures(12)
    certifier = MarginCertifier(network)
    found = certifier.certificates(inputs, norm)
    if asked:  # about more than was proved without factors
        more = certifier.certificates(inputs, norm, [1.3 * float(found.radius.max())])
        assert (more.radius > found.radius).any()
        found = more
    assert found.kind.status is Status.PROVED
    assert (found.radius > 0).all()
    radius, label = torch.from_numpy(found.radius).view(-1, 1, 1, 1).float(), torch.from_numpy(found.label)

    def attacked(times: float) -> Tensor:
        """Return whether steps along the gradient of the lead change the label, anywhere in the ball."""
        points, broken = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool)
        for _ in range(40):
            points.requires_grad_()
            scores = network(points)
            lead = scores.gather(1, label[:, None]) - scores.scatter(1, label[:, None], -torch.inf).amax(1, True)
            (gradient,) = torch.autograd.grad(lead.sum(), points)
            step = gradient.sign() if norm is Norm.LINF else gradient / length_of(gradient)
            moved = points.detach() - times * radius / 8 * step - inputs
            if norm is Norm.LINF:
                moved = moved.clamp(-times * radius, times * radius)
            else:
                moved = moved * (times * radius / length_of(moved)).clamp(max=1)
            points = (inputs + moved).clamp(-1, 1)
            broken |= network(points).argmax(1) != label
        return broken

    assert not attacked(1.0).any()
    assert attacked(6.0).any()


def length_of(moves: Tensor) -> Tensor:
    return moves.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


@pytest.mark.parametrize("norm", [Norm.L2, Norm.LINF])
def test_a_radius_that_is_asked_about_is_decided_at_least_like_the_largest(norm: Norm) -> None:
    """Squares are completed at other distances, so the two may differ by a little; factors prove more besides."""
    inputs, certifier = pictures(12), MarginCertifier(trained())
    largest = certifier.certificates(inputs, norm).radius
    for asked in (0.7 * float(largest.mean()), float(largest.mean())):
        found = certifier.certificates(inputs, norm, [asked]).radius
        assert (found[largest >= 1.1 * asked] >= asked).all()


def test_refusals() -> None:
    certifier = MarginCertifier(trained())
    with pytest.raises(DataError, match="images of shape"):
        certifier.certificates(certifier.front(pictures(2)), Norm.L2)
    with pytest.raises(ModelError, match="followed by one linear layer"):
        MarginCertifier(build_layered("scatter 2, relu, linear", (1, SIDE, SIDE), 3, seeded(0)))
    certifier.network.layers[-1].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="hook"):
        certifier.certificates(pictures(2), Norm.L2)


def test_another_function_than_the_certified_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    certifier = MarginCertifier(trained())
    plain = Scattering.moduli
    monkeypatch.setattr(Scattering, "moduli", lambda self, maps, filters: plain(self, maps, filters) * 1.01)
    with pytest.raises(ModelError, match="not those that its layers give"):
        certifier.certificates(pictures(2), Norm.L2)


def test_radii_allow_for_rounding() -> None:
    """Without errors of the scores radii are larger: a twin that forgets them is told apart."""
    inputs, certifier = pictures(4), MarginCertifier(trained())
    margins = _MarginLipschitz(certifier.scattering, certifier.tangents, certifier.head)
    found, responses = certifier.certificates(inputs, Norm.L2), certifier.scattering.responses(inputs)
    front = certifier.scattering.front
    features = front.folded(front.levelled(certifier.scattering.maps_of(responses))).flatten(1)
    scores, labels = features @ margins.weight.T + margins.bias, torch.from_numpy(found.label)
    without = margins.radii(scores, labels, torch.zeros_like(scores), responses, Norm.L2, None).numpy()
    assert (without > found.radius).all()
    assert (found.radius > without - 0.01).all()


def test_tangents_prove_more_than_constants_alone() -> None:
    inputs, certifier = pictures(12), MarginCertifier(trained())
    found, constants = certifier.certificates(inputs, Norm.L2), certifier.scattering.of
    scores = certifier.network(inputs).double().detach()
    weight = certifier.head.weight.detach().double()
    by_constants = [
        min(float((own[label] - own[k]) / constants(weight[label] - weight[k : k + 1])) for k in range(3) if k != label)
        for own, label in zip(scores, found.label, strict=True)
    ]
    assert (found.radius > 1.3 * torch.tensor(by_constants).numpy()).all()
