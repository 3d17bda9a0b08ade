"""Wavelet scattering of pictures (Mallat, 2012): fixed filters, moduli and local means, to two scales and two orders.

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
"""Pixels of a side for each value of a feature map: two scales, each half as fine as the one before."""
_FINE, _COARSE, _LOW_FINE, _LOW_COARSE = 9, 14, 14, 8
"""Sides of the filters, in pixels of what they are applied to."""


class Scattering(nn.Module):
    """Local means of the picture, of |picture * ψ| and of ||picture * ψ| * ψ'|, with wavelets ψ of several angles.

    Filters are Morlet wavelets of two scales and Gaussians, on a picture that is 0 outside. Filters that skip pixels
    are multiplied by how many they skip along a side, so that no stage stretches distances by much more than 1. Colours
    are turned first: their mean, and two differences. `gains` multiply the features of order 0, 1 and 2. `levels` are
    taken off those of the mean colour before: means of moduli are all positive, and what pictures have in common would
    fill their clipped gradients. `even` keeps what a picture has in common with its mirror image: the sum of each
    feature and its mirrored one, over √2.
    Features may be given in place of pictures, so that a training computes them once.

    >>> Scattering((1, 8, 8), angles=2)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 9, 2, 2])
    """

    colours: Tensor
    fine: Tensor
    coarse: Tensor
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
        gains: tuple[float, float, float] = (1.0, 1.0, 1.0),
        levels: tuple[float, float, float] = (0.0, 0.0, 0.0),
        *,
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
        self.input_shape, self.angles, self.even = (channels, height, width), angles, even
        self.gains, self.levels = gains, levels
        self.paths = 1 + 2 * angles + angles**2
        self.map_shape = (channels * self.paths, height // REDUCTION, width // REDUCTION)
        constants = {
            "colours": _cosines(channels),
            "fine": _wavelets(0, angles, _FINE),
            "coarse": 2 * _wavelets(1, angles, _COARSE),
            "low_fine": 4 * _low_pass(1.6, _LOW_FINE),
            "low_coarse": 2 * _low_pass(0.8, _LOW_COARSE),
            "gain": torch.tensor(gains).double()[self._orders()].repeat(channels),
            "level": F.pad(torch.tensor(levels).double()[self._orders()], (0, (channels - 1) * self.paths)),
        }
        for name, value in constants.items():
            self.register_buffer(name, value.float(), persistent=False)
        if even:
            mirrored = self._mirrored()
            here = torch.arange(len(mirrored))
            first = here[here <= mirrored]
            share = torch.where(first == mirrored[first], 0.5, math.sqrt(0.5))
            self.register_buffer("mirrored", torch.stack([first, mirrored[first]]), persistent=False)
            self.register_buffer("share", share.float(), persistent=False)
        self.feature_shape = (len(share),) if even else self.map_shape

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
        """Return the maps of all paths, channel by channel, before levels and gains."""
        channels, height, width = self.input_shape
        turned = F.conv2d(inputs, self.colours.view(channels, channels, 1, 1))
        pictures = turned.reshape(-1, 1, height, width)
        fine, coarse = self.moduli(pictures, self.fine), self.moduli(pictures, self.coarse)
        second = self.moduli(fine.reshape(-1, 1, height, width), self.coarse)
        second = second.reshape(-1, self.angles**2, height // 2, width // 2)
        low = (self.means(pictures), self.means(fine), self.means(coarse), self.means(second))
        return torch.cat(low, 1).reshape(-1, *self.map_shape)

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
        pixel.
        """
        found = torch.complex(*self.filtered(maps, filters).chunk(2, 1))
        return found.abs()

    def filtered(self, maps: Tensor, filters: Tensor) -> Tensor:
        """Return the filters' own values, before the modulus."""
        if filters.shape[-1] == _FINE:
            return F.conv2d(maps, filters, padding=_FINE // 2)
        # The same sums as with stride 2, over the four pixels of a block as channels: several times faster on a CPU.
        blocks = F.pixel_unshuffle(maps, 2)
        return F.conv2d(blocks, F.pixel_unshuffle(filters, 2), padding=(_COARSE - 2) // 4)

    def means(self, maps: Tensor) -> Tensor:
        """Return local means: of every fourth pixel of what is as fine as the picture, of every other one else."""
        as_fine = maps.shape[-1] == self.input_shape[2]
        filters, stride = (self.low_fine, 4) if as_fine else (self.low_coarse, 2)
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
        gains = ", ".join(f"{gain:g}" for gain in self.gains)
        levels = f", levels {', '.join(f'{level:g}' for level in self.levels)}" if any(self.levels) else ""
        return f"{self.angles} angles, gains {gains}{levels}{', even' if self.even else ''}"

    def _orders(self) -> Tensor:
        return torch.tensor([0] + [1] * (2 * self.angles) + [2] * self.angles**2)

    def _mirrored(self) -> Tensor:
        """Return where each feature of a picture stands in its mirror image: columns and angles run backwards."""
        turned = -torch.arange(self.angles) % self.angles
        second = (turned[:, None] * self.angles + turned).flatten()
        starts = (0, 1, 1 + self.angles, 1 + 2 * self.angles)
        places = (torch.zeros(1, dtype=torch.long), turned, turned, second)
        paths = torch.cat([start + place for start, place in zip(starts, places, strict=True)])
        _channels, height, width = self.map_shape
        where = torch.arange(math.prod(self.map_shape)).view(-1, self.paths, height, width)
        return where[:, paths].flip(3).flatten()


def is_linear_behind(layers: nn.Sequential) -> bool:
    """Return whether these layers are scattering, and one linear layer of its features."""
    return [type(layer) for layer in layers if type(layer) is not nn.Flatten] == [Scattering, nn.Linear]


def _cosines(channels: int) -> Tensor:
    """Return an orthonormal basis of the colours: their mean first, then ever finer cosines along them (DCT-II)."""
    here = torch.arange(channels).double()
    rows = torch.cos(math.pi / channels * here[:, None] * (here + 0.5))
    basis: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return basis


def _gaussian(stddev: float, angle: float, slant: float, side: int) -> tuple[Tensor, Tensor]:
    """Return a Gaussian of sum 1 in the plane, and each pixel's place along its short axis."""
    places = torch.arange(side).double() - (side - 1) / 2
    down, right = torch.meshgrid(places, places, indexing="ij")
    along, across = right * math.cos(angle) + down * math.sin(angle), down * math.cos(angle) - right * math.sin(angle)
    curve = torch.exp(-(along.square() + (slant * across).square()) / (2 * stddev**2))
    return curve * slant / (2 * math.pi * stddev**2), along


def _low_pass(stddev: float, side: int) -> Tensor:
    curve, _ = _gaussian(stddev, 0.0, 1.0, side)
    return (curve / curve.sum()).view(1, 1, side, side)


def _wavelets(scale: int, angles: int, side: int) -> Tensor:
    """Return Morlet wavelets, a wave under a Gaussian with its mean taken off: real parts, then imaginary ones."""
    found = []
    for number in range(angles):
        curve, along = _gaussian(0.8 * 2**scale, math.pi * number / angles, 4 / angles, side)
        wave = curve * torch.exp(1j * 0.75 * math.pi / 2**scale * along)
        found.append(wave - curve * (wave.sum() / curve.sum()))
    stacked = torch.stack(found).unsqueeze(1)
    return torch.cat([stacked.real, stacked.imag])
