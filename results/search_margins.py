"""Try settings of a linear layer behind scattering on training records that no trial was trained on.

    python results/search_margins.py --task cifar10_linf [--draws N] [--certify K] [--features FILE] [--log FILE]

Features of scattering are fixed, so they are computed once, and kept in FILE if one is given; a trial is DP-SGD on the
last layer alone, simulated: the margin loss of `stobatch.sound.losses`, its clipped gradients in closed form, and at a
share s of the cost batches of s·B and noise of s·σ, as in `search_sound.py`. A trial is trained on all training records
but the last 5,000, of which the first 500 are certified. Every trial is a line of the log; what is there already is
not made again. Trials protect nobody: seeds are public and settings are compared on the data.

Certifying takes ten times as long as such a training, so of settings that are drawn only the best K are certified:
those whose margins stay positive at first order, which is what a certificate without losses would prove, for most of
1,500 held-out records.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from search_sound import Log, Records, at_share
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.bounds.margins import MarginCertifier
from stobatch.bounds.scattering import ScatteringLipschitz
from stobatch.bounds.tangents import l2_stretch
from stobatch.config import RunConfig
from stobatch.dp.plan import DpSgdPlan
from stobatch.models.layered import Layered, build_layered
from stobatch.models.scattering import Scattering
from stobatch.sound.averaged import AveragedSGD
from stobatch.sound.losses import Ramp
from stobatch.training.descent import rate_share
from stobatch.types import Norm
from stobatch_recipes import sound

LOG = Path(__file__).parent / "margins_search.jsonl"
SHARE = 0.5
HELD_OUT, LOOKED_AT, CERTIFIED = 5000, 1500, 500
Values = dict[str, Any]


Choices = tuple[float, ...]


@dataclass(frozen=True)
class Space:
    """Settings that were good before, and what else each may be."""

    layer: str
    levels: tuple[float, float]
    gains: tuple[float, ...]
    radius: float
    clip_norm: float
    learning_rate: float
    radii: Choices

    def settings(self, chance: random.Random | None = None) -> Values:
        """Return the settings that were good, each with a chance of a third that it is drawn anew."""

        def drawn(value: float, choices: Choices) -> float:
            return chance.choice(choices) if chance and value and chance.random() < 1 / 3 else value

        levels = drawn(self.levels[0], (-0.8, -0.4, 0.4)), drawn(self.levels[1], (0.2, 0.25, 0.3))
        gains = (drawn(gain, (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)) for gain in self.gains)
        numbers = " ".join(f"{number:g}" for number in (*levels, *gains))
        return {
            "model.architecture": f"{self.layer} 8 {numbers}, linear *0",
            "method.radius": drawn(self.radius, self.radii),
            "method.clip_norm": drawn(self.clip_norm, (4.0, 6.0, 9.0, 12.0, 16.0, 24.0, 32.0)),
            "training.learning_rate": drawn(self.learning_rate, (0.08, 0.12, 0.16, 0.24, 0.32, 0.5, 0.8)),
        }


@dataclass(frozen=True)
class Task:
    """A recipe, and the settings that take the place of its own."""

    recipe: RunConfig
    space: Space


def _aimed(epsilon: float, radius: float, norm: str) -> RunConfig:
    like = sound.cifar10_scattering(epsilon, radius)
    return like.replace(evaluation=like.evaluation.replace(norm=norm, radii=(radius,)))


_BOX, _WIDE_BOX, _NEAR, _FAR = 4 / 255, 16 / 255, 32 / 255, 0.5
"""Radii over [-1, 1]; half of that over [0, 1]."""
_COLOURED = "wavelets_even", (-0.4, 0.25)
_PHOTOGRAPHS = Space(*_COLOURED, (4, 2, 3, 1.5, 0, 3, 1, 1.5, 0, 2, 2, 2), 0.5, 12.0, 0.3, (0.25, 0.35, 0.5, 0.7))
_PHOTOGRAPHS_WIDE = Space(*_COLOURED, (2, 2, 2, 2, 0, 1, 0.5, 0.5, 0, 1, 1, 1), 1.5, 8.0, 0.12, (1.0, 1.4, 2.0))
"""Fine wavelets of colours other than their mean, whose gains are 0, are small next to what an attacker may add."""
_DIGITS = Space("wavelets", (-2.8, 0.25), (8, 8, 8, 6), 0.3, 24.0, 0.32, (0.2, 0.3, 0.45, 0.6))
TASKS = {
    "cifar10_l2": Task(_aimed(8.0, _NEAR, "l2"), _PHOTOGRAPHS),
    "cifar10_l2_strict": Task(_aimed(3.0, _FAR, "l2"), _PHOTOGRAPHS),
    "cifar10_linf": Task(_aimed(8.0, _BOX, "linf"), _PHOTOGRAPHS),
    "cifar10_linf_strict": Task(_aimed(3.0, _BOX, "linf"), _PHOTOGRAPHS),
    "cifar10_linf_wide": Task(_aimed(8.0, _WIDE_BOX, "linf"), _PHOTOGRAPHS_WIDE),
    "cifar10_linf_strict_wide": Task(_aimed(3.0, _WIDE_BOX, "linf"), _PHOTOGRAPHS_WIDE),
    "mnist_l2": Task(sound.mnist_scattering(), _DIGITS),
}


class Kept:
    """Features of all training records by one kind of scattering, in half precision, without gains and levels."""

    def __init__(self, inputs: Tensor, file: Path | None, like: Scattering) -> None:
        ones = [tuple(float(gain != 0) for gain in of) for of in (like.gains, like.differences, like.mixtures)]
        mixtures = ones[2] if any(ones[2]) else None
        self.front = Scattering(
            *(like.input_shape, like.angles, ones[0]),
            differences=ones[1],
            mixtures=mixtures,
            orders=like.orders,
            even=like.even,
        )
        if file and file.exists():
            self.features: Tensor = torch.load(file, mmap=True)
            return
        with torch.no_grad():
            self.features = torch.cat([self.front(part).half() for part in inputs.split(250)])
        if file:
            torch.save(self.features, file)

    def of(self, rows: Tensor, front: Scattering) -> Tensor:
        """Return features of some records with the gains and levels of another front that leaves out the same."""
        features = self.features[rows].float()
        if not front.even:
            return front.folded(front.levelled(features)).flatten(1)
        gains = front.gain.repeat_interleave(front.map_shape[1] * front.map_shape[2])[front.mirrored[0]]
        return features * gains + front.folded(front.levelled(torch.zeros(1, *front.map_shape)))


def clipped_sum(
    head: nn.Linear, front: Scattering, batch: tuple[Tensor, Tensor], radius: float, bound: float, share: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of clipped gradients of the margin loss: cross-entropy at features moved against the label.

    With f the features, e the errors of the scores and s the move, the gradient is a fᵀ + b sᵀ, where b = share·e' are
    the errors at f + s, and a = b + (1 - share)·e: what the ramp has not given to the loss yet is plain cross-entropy.
    A move is a sum of ten vectors, one for each class, so products with it are products of their Gram matrices.
    """
    features, labels = batch
    scores, truth = head(features), F.one_hot(labels, head.out_features)
    errors = scores.softmax(1) - truth
    lifted = front.lifted(head.weight)
    vectors = front.folded(lifted).flatten(1)
    lengths = _norms(errors, lifted.flatten(1) @ lifted.flatten(1).T)
    moved = (share * radius / lengths)[:, None] * errors
    after = share * ((scores + moved @ (vectors @ head.weight.T)).softmax(1) - truth)
    before = after + (1 - share) * errors
    along, length = ((features @ vectors.T) * moved).sum(1), _norms(moved, vectors @ vectors.T)
    squares = before.square().sum(1) * (features.square().sum(1) + 1) + 2 * (before * after).sum(1) * along
    squares += after.square().sum(1) * length.square()
    factors = (bound / squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()).clamp(max=1)[:, None]
    return (factors * before).T @ features + (factors * after).T @ moved @ vectors, (factors * before).sum(0)


def _norms(coefficients: Tensor, gram: Tensor) -> Tensor:
    """Return the norms of sums of vectors with these coefficients."""
    squares: Tensor = ((coefficients @ gram) * coefficients).sum(1)
    return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def front_of(config: RunConfig, shape: tuple[int, ...]) -> Scattering:
    """Return the scattering of a configuration."""
    front = build_layered(config.model.architecture, shape, 10, torch.Generator()).layers[0]
    assert isinstance(front, Scattering)
    return front


@torch.no_grad()
def train(config: RunConfig, plan: DpSgdPlan, kept: Kept, labels: Tensor, seed: int = 0) -> Layered:
    """Return the network after simulated DP-SGD on all records that have a label."""
    generator = torch.Generator().manual_seed(seed)
    network = build_layered(config.model.architecture, kept.front.input_shape, 10, generator)
    front, head = network.layers[0], network.layers[-1]
    assert isinstance(front, Scattering)
    assert isinstance(head, nn.Linear)
    method, steps = config.method.to_dict(), config.training.steps
    ramp, rate = Ramp(method["warm_up"], method["ramp"]), config.training.learning_rate
    descent = AveragedSGD(head.parameters(), lr=rate, momentum=method["momentum"], decay=method["average_decay"])
    share_of_all = len(labels) / len(kept.features)
    size = plan.expected_batch_size * share_of_all
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in head.parameters()]
        rows = (torch.rand(len(labels), generator=generator) < size / len(labels)).nonzero().flatten()
        for part in rows.split(2048):
            batch, share = (kept.of(part, front), labels[part]), ramp.share(step / steps)
            found = clipped_sum(head, front, batch, method["radius"], plan.clip_norm, share)
            sums = [total + of_part for total, of_part in zip(sums, found, strict=True)]
        for parameter, total in zip(head.parameters(), sums, strict=True):
            noise = torch.randn(total.shape, generator=generator) * plan.noise_stddev * share_of_all
            parameter.grad = (total + noise) / (size * plan.clip_norm)
        descent.param_groups[0]["lr"] = rate * rate_share(config.training, step)
        descent.step()
    descent.use_average()
    return network


def measure(network: Layered, inputs: Tensor, labels: Tensor, norm: Norm, radii: tuple[float, ...]) -> Values:
    """Return accuracy, and what constants alone prove beside what tangents add."""
    certifier, shares = MarginCertifier(network), {}
    found = certifier.certificates(inputs, norm, radii)
    correct = torch.from_numpy(found.label) == labels
    radius = torch.from_numpy(found.radius)
    shares["certified"] = {f"{at:.6g}": float((correct & (radius >= at)).double().mean()) for at in radii}
    by_constants = constant_radii(certifier.scattering, network, inputs) / l2_stretch(norm, inputs.shape[1:])
    shares["by_constants"] = {f"{at:.6g}": float((correct & (by_constants >= at)).double().mean()) for at in radii}
    return {"clean": float(correct.double().mean()), **shares}


@torch.no_grad()
def constant_radii(scattering: ScatteringLipschitz, network: Layered, inputs: Tensor) -> Tensor:
    """Return margins over Lipschitz constants, the least over classes, without rounding."""
    head = network.layers[-1]
    assert isinstance(head, nn.Linear)
    scores = torch.cat([network(part) for part in inputs.split(250)]).double()
    constants = torch.stack([scattering.of(head.weight - row) for row in head.weight])
    label = scores.argmax(1, keepdim=True)
    leads = (scores.gather(1, label) - scores) / constants[label[:, 0]]
    return leads.scatter(1, label, torch.inf).amin(1)


def steepness(network: Layered, inputs: Tensor, labels: Tensor, norm: Norm, radii: tuple[float, ...]) -> Values:
    """Return accuracy, and the share of records whose margins stay positive at each radius, at first order.

    The three nearest classes are looked at. A certificate that loses nothing would prove that much.
    """
    found = []
    for part, truth in zip(inputs.split(250), labels.split(250), strict=True):
        images = part.clone().requires_grad_()
        scores = network(images)
        others = scores.detach().scatter(1, truth[:, None], -torch.inf).topk(3, 1).indices
        leads = scores.gather(1, truth[:, None]) - scores.gather(1, others)
        radius = torch.full_like(leads, torch.inf)
        for column in range(leads.shape[1]):
            (slope,) = torch.autograd.grad(leads[:, column].sum(), images, retain_graph=True)
            radius[:, column] = leads[:, column] / slope.flatten(1).norm(1 if norm is Norm.LINF else 2, dim=1)
        found.append(radius.detach().amin(1))
    radius = torch.cat(found)
    at_first_order = {f"{at:.6g}": round(float((radius >= at).double().mean()), 4) for at in radii}
    clean = round(float((radius > 0).double().mean()), 4)
    return {"score": sum(at_first_order.values()) / len(radii), "clean_of_all": clean, "at_first_order": at_first_order}


class Search:
    """Trials of one task."""

    def __init__(self, name: str, options: argparse.Namespace, log: Log) -> None:
        self.name, self.task, self.log = name, TASKS[name], log
        records, recipe = Records(self.task.recipe.data.name, HELD_OUT).dataset, self.task.recipe
        train_part, self.held_out = records.train.in_memory(), records.test.in_memory()
        self.norm, self.radii, self.labels = Norm(recipe.evaluation.norm), recipe.evaluation.radii, train_part.labels
        inputs = torch.cat([train_part.inputs, self.held_out.inputs])
        drawn = recipe.override_all(self.task.space.settings())
        self.kept = Kept(inputs, options.features, front_of(drawn, tuple(inputs.shape[1:])))

    def trial(self, settings: Values, certify: bool) -> Values:
        """Return what was found with these settings, now or before."""
        row = {"task": self.name, "share": SHARE, "settings": settings}
        known = self.log.known.get(Log.key(row), {})
        if known and ("certified" in known or not certify):
            return known
        started = time.monotonic()
        config, share = at_share(self.task.recipe.override_all(settings), SHARE, None)
        plan = stobatch.plan(config)
        assert isinstance(plan, DpSgdPlan)
        network, held_out = train(config, plan, self.kept, self.labels.long()), self.held_out
        some = held_out.take(slice(0, LOOKED_AT))
        found = row | steepness(network, some.inputs, some.labels.long(), self.norm, self.radii)
        if certify:
            some = held_out.take(slice(0, CERTIFIED))
            found |= measure(network, some.inputs, some.labels, self.norm, self.radii)
        seconds = round(time.monotonic() - started, 1)
        self.log.add(found | {"cost": share, "torch": torch.__version__, "seconds": seconds})
        found = self.log.known[Log.key(row)]
        print(json.dumps(found), flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--draws", type=int, default=0, help="settings to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing more is drawn")
    parser.add_argument("--certify", type=int, default=0, help="of the best of the log")
    parser.add_argument("--features", type=Path, help="a file to keep features of this kind in; they are private")
    parser.add_argument("--log", type=Path, default=LOG)
    options = parser.parse_args()
    search = Search(options.task, options, Log(options.log))
    chance, ends = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    for number in range(options.draws):
        settings = search.task.space.settings(chance if number else None)
        if time.monotonic() < ends:
            search.trial(settings, certify=False)
    found = [row for row in search.log.known.values() if row["task"] == options.task and "score" in row]
    for row in sorted(found, key=lambda row: -row["score"])[: options.certify]:
        search.trial(row["settings"], certify=True)


if __name__ == "__main__":
    main()
