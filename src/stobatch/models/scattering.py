"""Wavelet scattering of pictures (Mallat, 2012): fixed filters, moduli and local means, to one order or two.

Nothing in it is trained and nothing comes from data, so it costs no privacy; and a small change of the picture is a
small change of what it returns, by a constant that can be computed (`bounds.scattering`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError

REDUCTION = 4
"""Pixels of a side for each value of a feature map."""
_FINE, _COARSE, _LOW_FINE, _LOW_COARSE = 9, 14, 14, 8
"""Sides of the filters, in pixels of what they are applied to."""
MOST_SCALES = 4


class Scattering(nn.Module):
    """Local means of the picture, of |picture * ψ| and of ||picture * ψ| * ψ'|, with wavelets ψ of several angles.

    Filters are Morlet wavelets, each scale twice as wide as the one before, and Gaussians, on a picture that is 0
    outside. Filters that skip pixels are multiplied by how many they skip along a side, so that no stage stretches
    distances by much more than 1. Colours are turned first: their mean, and two differences; and, with `mixtures`, the
    mean plus and minus the first, over √2, whose moduli tell how edges of brightness and of colour go together.

    `gains` multiply the features: of order 0, of each scale of order 1, and, with `orders` of 2, of order 2, which are
    those of the second scale behind the first. `differences` are gains for differences of colours, where they are
    others, and `mixtures` for mixtures; a gain of 0 leaves features out. `levels`, as many as gains, are taken off the
    features of the mean colour before, and their share off those of mixtures: means of moduli are all positive, and
    what pictures have in common would fill their clipped gradients.
    `even` keeps what a picture has in common with its mirror image: the sum of each feature and its mirrored one, over
    √2. Features may be given in place of pictures, so that a training computes them once.

    >>> Scattering((1, 8, 8), angles=2)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 9, 2, 2])
    >>> Scattering((1, 8, 8), 2, (1.0, 3.0, 2.0, 1.0), orders=1)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 7, 2, 2])
    """

    colours: Tensor
    low_fine: Tensor
    low_coarse: Tensor
    gain: Tensor
    level: Tensor
    mirrored: Tensor
    share: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        angles: int = 8,
        gains: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        levels: tuple[float, ...] | None = None,
        *,
        differences: tuple[float, ...] | None = None,
        mixtures: tuple[float, ...] | None = None,
        orders: int = 2,
        even: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3 or any(side % REDUCTION or not side for side in input_shape[1:]):
            raise ModelError(
                f"scattering does not take values of shape {tuple(input_shape)}.",
                why=f"Both sides of a picture have to be multiples of {REDUCTION}.",
                remedy="Give pictures of such a size, or pool them first.",
            )
        channels, height, width = input_shape
        self.input_shape, self.angles, self.even, self.orders = (channels, height, width), angles, even, orders
        self.gains, self.differences, self.levels = gains, differences or gains, levels or (0.0,) * len(gains)
        self.mixtures = mixtures or (0.0,) * len(gains)
        self.colour_kinds = [0, *[1] * (channels - 1), *[2] * (2 if mixtures else 0)]
        """Of each turned colour: whether it is the mean, a difference or a mixture."""
        self.num_scales = len(gains) - orders
        self.sizes = [1, *[angles] * self.num_scales, *[angles**2] * (orders - 1)]
        """How many paths there are of order 0, of each scale and of order 2."""
        self.paths = sum(self.sizes)
        self.map_shape = (len(self.colour_kinds) * self.paths, height // REDUCTION, width // REDUCTION)
        kinds = torch.repeat_interleave(torch.tensor(self.sizes))
        level = torch.tensor(self.levels).double()[kinds]
        constants = {
            "colours": _turned(channels, len(self.colour_kinds)),
            "low_fine": 4 * _low_pass(1.6, _LOW_FINE),
            "low_coarse": 2 * _low_pass(0.8, _LOW_COARSE),
            "gain": torch.cat([torch.tensor(of).double()[kinds] for of in self._gains_by_colour()]),
            "level": torch.cat([(1.0, 0.0, math.sqrt(0.5))[kind] * level for kind in self.colour_kinds]),
        }
        for scale in range(self.num_scales):
            constants[f"wavelets_{scale}"] = _filters(scale, angles, (height, width))
        for name, value in constants.items():
            self.register_buffer(name, value.float(), persistent=False)
        if even:
            mirrored = self._mirrored()
            here = torch.arange(len(mirrored))
            used = (self.gain != 0).repeat_interleave(len(mirrored) // len(self.gain))
            first = here[(here <= mirrored) & used]
            share = torch.where(first == mirrored[first], 0.5, math.sqrt(0.5))
            self.register_buffer("mirrored", torch.stack([first, mirrored[first]]), persistent=False)
            self.register_buffer("share", share.float(), persistent=False)
        self.feature_shape = (len(share),) if even else self.map_shape

    def _gains_by_colour(self) -> list[tuple[float, ...]]:
        return [(self.gains, self.differences, self.mixtures)[kind] for kind in self.colour_kinds]

    def wavelets(self, scale: int) -> Tensor:
        """Return the filters of a scale, real parts first: windows of the first two, values at pixels of wider ones."""
        filters: Tensor = getattr(self, f"wavelets_{scale}")
        return filters

    def reach(self, scale: int) -> list[int]:
        """Return which turned colours a scale is applied to: their mean, and others that are not left out."""
        return [colour for colour, of in enumerate(self._gains_by_colour()) if colour == 0 or of[1 + scale]]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features of pictures, never in mixed precision. Features that were computed before pass as they
        are.
        """
        if inputs.shape[1:] == self.feature_shape:
            return inputs
        if not torch.is_autocast_enabled(inputs.device.type):  # a graph for export is plain operators, without a region
            return self.folded(self.levelled(self.maps(inputs)))
        with torch.autocast(inputs.device.type, enabled=False):
            return self.folded(self.levelled(self.maps(inputs)))

    def maps(self, inputs: Tensor) -> Tensor:
        """Return the maps of all paths, channel by channel, before levels and gains; 0 for scales that are left out."""
        channels, height, width = self.input_shape
        turned = F.conv2d(inputs, self.colours.view(-1, channels, 1, 1))
        pictures = turned.reshape(-1, 1, height, width)
        found, fine = [self.by_colour(self.means(pictures), list(range(len(self.colours))))], pictures
        for scale in range(self.num_scales):
            reach = self.reach(scale)
            moduli = self.moduli(turned[:, reach].reshape(-1, 1, height, width), self.wavelets(scale))
            found.append(self.by_colour(self.means(moduli), reach))
            fine = moduli if scale == 0 else fine
        if self.orders == 2:
            second = self.moduli(fine.reshape(-1, 1, height, width), self.wavelets(1))
            second = second.reshape(-1, self.angles**2, height // 2, width // 2)
            found.append(self.by_colour(self.means(second), self.reach(0)))
        return torch.cat(found, 2).reshape(-1, *self.map_shape)

    def by_colour(self, means: Tensor, reach: list[int]) -> Tensor:
        """Return local means of some turned colours beside each other, and zeros for the others."""
        found = means.reshape(-1, len(reach), means.shape[1], *self.map_shape[1:])
        if len(reach) == len(self.colours):
            return found
        places = [reach.index(colour) if colour in reach else len(reach) for colour in range(len(self.colours))]
        return F.pad(found, (0, 0, 0, 0, 0, 0, 0, 1))[:, places]

    def levelled(self, maps: Tensor) -> Tensor:
        """Return the maps with their levels taken off."""
        return maps - self.level.view(-1, 1, 1)

    def folded(self, maps: Tensor) -> Tensor:
        """Return the maps with their gains; of even features, what each has in common with its mirrored one."""
        scaled = maps * self.gain.view(-1, 1, 1)
        if not self.even:
            return scaled
        flat = scaled.flatten(1)
        return (flat[:, self.mirrored[0]] + flat[:, self.mirrored[1]]) * self.share

    def moduli(self, maps: Tensor, filters: Tensor) -> Tensor:
        """Return |map * ψ| for each ψ of complex filters, whose real parts come first; the coarse skip every other
        pixel, wider ones three of four.
        """
        found = torch.complex(*self.filtered(maps, filters).chunk(2, 1))
        return found.abs()

    def filtered(self, maps: Tensor, filters: Tensor) -> Tensor:
        """Return the filters' own values, before the modulus."""
        if filters.ndim == 2:
            return (maps.flatten(1) @ filters).view(-1, 2 * self.angles, *self.map_shape[1:])
        if filters.shape[-1] == _FINE:
            return F.conv2d(maps, filters, padding=_FINE // 2)
        # The same sums as with stride 2, over the four pixels of a block as channels: several times faster on a CPU.
        blocks = F.pixel_unshuffle(maps, 2)
        return F.conv2d(blocks, F.pixel_unshuffle(filters, 2), padding=(_COARSE - 2) // 4)

    def means(self, maps: Tensor) -> Tensor:
        """Return local means: of every fourth pixel of what is as fine as the picture, of every other one of what is
        half as fine; what skips as many pixels as features do is returned as it is.
        """
        stride = self.input_shape[2] // maps.shape[-1]
        if stride == REDUCTION:
            return maps
        filters, stride = (self.low_fine, 4) if stride == 1 else (self.low_coarse, 2)
        count, padding = maps.shape[1], (filters.shape[-1] - stride) // 2
        return F.conv2d(maps, filters.expand(count, -1, -1, -1), stride=stride, padding=padding, groups=count)

    def lifted(self, functionals: Tensor) -> Tensor:
        """Return rows of weights of the features as weights of the maps: the transpose of `folded`."""
        if self.even:
            maps = functionals.new_zeros(len(functionals), math.prod(self.map_shape))
            for side in self.mirrored:
                maps.index_add_(1, side, functionals * self.share)
            functionals = maps
        return functionals.reshape(len(functionals), *self.map_shape) * self.gain.view(-1, 1, 1)

    def extra_repr(self) -> str:
        def listed(word: str, numbers: tuple[float, ...]) -> str:
            return f", {word} {', '.join(f'{number:g}' for number in numbers)}"

        others = listed("of differences", self.differences) if self.differences != self.gains else ""
        others += listed("of mixtures", self.mixtures) if any(self.mixtures) else ""
        levels = listed("levels", self.levels) if any(self.levels) else ""
        return f"{self.angles} angles{listed('gains', self.gains)}{others}{levels}{', even' if self.even else ''}"

    def _mirrored(self) -> Tensor:
        """Return where each feature of a picture stands in its mirror image: columns and angles run backwards."""
        turned = -torch.arange(self.angles) % self.angles
        second = (turned[:, None] * self.angles + turned).flatten()
        places = [torch.zeros(1, dtype=torch.long), *[turned] * self.num_scales, *[second] * (self.orders - 1)]
        starts = [sum(self.sizes[:kind]) for kind in range(len(self.sizes))]
        paths = torch.cat([start + place for start, place in zip(starts, places, strict=True)])
        _channels, height, width = self.map_shape
        where = torch.arange(math.prod(self.map_shape)).view(-1, self.paths, height, width)
        return where[:, paths].flip(3).flatten()


def is_linear_behind(layers: nn.Sequential) -> bool:
    """Return whether these layers are scattering, and one linear layer of its features."""
    return [type(layer) for layer in layers if type(layer) is not nn.Flatten] == [Scattering, nn.Linear]


def _turned(channels: int, count: int) -> Tensor:
    """Return an orthonormal basis of the colours: their mean first, then ever finer cosines along them (DCT-II); and,
    if more are asked for, the sum and the difference of the first two, over √2.
    """
    here = torch.arange(channels).double()
    rows = torch.cos(math.pi / channels * here[:, None] * (here + 0.5))
    basis: Tensor = rows / rows.norm(dim=1, keepdim=True)
    mixtures = [(basis[:1] + sign * basis[1:2]) / math.sqrt(2) for sign in (1, -1)]
    return torch.cat([basis, *mixtures])[:count]


def _gaussian(stddev: float, angle: float, slant: float, side: int) -> tuple[Tensor, Tensor]:
    """Return a Gaussian of sum 1 in the plane, and each pixel's place along its short axis."""
    places = torch.arange(side).double() - (side - 1) / 2
    down, right = torch.meshgrid(places, places, indexing="ij")
    return _bell(down, right, stddev, angle, slant)


def _bell(down: Tensor, right: Tensor, stddev: float, angle: float, slant: float) -> tuple[Tensor, Tensor]:
    along, across = right * math.cos(angle) + down * math.sin(angle), down * math.cos(angle) - right * math.sin(angle)
    curve = torch.exp(-(along.square() + (slant * across).square()) / (2 * stddev**2))
    return curve * slant / (2 * math.pi * stddev**2), along


def _low_pass(stddev: float, side: int) -> Tensor:
    curve, _ = _gaussian(stddev, 0.0, 1.0, side)
    return (curve / curve.sum()).view(1, 1, side, side)


def _filters(scale: int, angles: int, sides: tuple[int, int]) -> Tensor:
    """Return the wavelets of a scale, times the pixels that they skip along a side."""
    if scale < 2:
        return float(2**scale) * _wavelets(scale, angles, (_FINE, _COARSE)[scale])
    return REDUCTION * _wide_wavelets(scale, angles, sides)


def _wavelets(scale: int, angles: int, side: int) -> Tensor:
    """Return Morlet wavelets, a wave under a Gaussian with its mean taken off: real parts, then imaginary ones."""
    found = []
    for number in range(angles):
        curve, along = _gaussian(0.8 * 2**scale, math.pi * number / angles, 4 / angles, side)
        found.append(_wave(curve, along, scale))
    stacked = torch.stack(found).unsqueeze(1)
    return torch.cat([stacked.real, stacked.imag])


def _wide_wavelets(scale: int, angles: int, sides: tuple[int, int]) -> Tensor:
    """Return Morlet wavelets about the middle of each block of pixels, as a matrix: pixels x filters and blocks.

    They are as wide as the picture, so what lies inside it has its mean taken off, at the edge too.
    """
    places = [torch.arange(side).double() for side in sides]
    middles = [torch.arange((REDUCTION - 1) / 2, side, REDUCTION).double() for side in sides]
    away = [(place - middle[:, None]) for place, middle in zip(places, middles, strict=True)]
    down, right = away[0][:, None, :, None], away[1][None, :, None, :]
    found = []
    for number in range(angles):
        curve, along = _bell(down, right, 0.8 * 2**scale, math.pi * number / angles, 4 / angles)
        found.append(_wave(curve, along, scale))
    stacked = torch.stack(found).flatten(3).flatten(1, 2)
    matrix: Tensor = torch.cat([stacked.real, stacked.imag]).flatten(0, 1).T.contiguous()
    return matrix


def _wave(curve: Tensor, along: Tensor, scale: int) -> Tensor:
    """Return a wave under a bell, with the mean over the last two dimensions taken off."""
    wave = curve * torch.exp(1j * 0.75 * math.pi / 2**scale * along)
    found: Tensor = wave - curve * (wave.sum((-2, -1), keepdim=True) / curve.sum((-2, -1), keepdim=True))
    return found
