"""Try settings of a linear layer behind scattering on training records that no trial was trained on.

    python results/search_margins.py --task cifar10_scattering_strict [--features FILE] [--log FILE]

Features of scattering are fixed, so they are computed once, and kept in FILE if one is given; a trial is DP-SGD on the
last layer alone, simulated: the margin loss of `stobatch.sound.losses`, its clipped gradients in closed form, and at a
share s of the cost batches of s·B and noise of s·σ, as in `search_sound.py`. A trial is trained on all training records
but the last 5,000, of which the first 500 are certified. Every trial is a line of the log; what is there already is
not made again. Trials protect nobody: seeds are public and settings are compared on the data.
"""

from __future__ import annotations

import argparse
import json
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
HELD_OUT, CERTIFIED = 5000, 500
Values = dict[str, Any]
FORMER: Values = {"model.architecture": "scatter_even 8 2 3, linear *0", "method.clip_norm": 12.0}
"""Without levels, features are longer, so more is to be clipped."""


@dataclass(frozen=True)
class Task:
    """A recipe, and what of it is changed in each trial."""

    recipe: RunConfig
    changes: tuple[Values, ...]


TASKS = {
    "cifar10_scattering_strict": Task(
        sound.cifar10_scattering_strict(),
        (
            FORMER | {"method.radius": 0.5},
            {},
            FORMER,
            {"method.radius": 0.25},
            {"method.radius": 0.5},
        ),
    ),
    "cifar10_scattering": Task(
        sound.cifar10_scattering(),
        (
            FORMER | {"method.radius": 0.188235, "training.learning_rate": 0.32},
            {},
            {"training.learning_rate": 0.32},
        ),
    ),
    "cifar10_scattering_linf": Task(
        sound.cifar10_scattering_linf(), tuple({"method.radius": radius} for radius in (0.35, 0.5))
    ),
    "mnist_scattering": Task(
        sound.mnist_scattering(),
        (
            {"method.radius": 0.6},
            {"method.radius": 0.9},
            {"method.radius": 0.4, "model.architecture": "scatter 8 2 3 0.25 0.03 -2.8, linear *0"},
            {"method.radius": 0.9, "model.architecture": "scatter 8 6 9 0.25 0.03 -2.8, linear *0"},
            {"method.radius": 0.9, "model.architecture": "scatter 8 6 6 0.25 0.03 -2.8, linear *0"},
        ),
    ),
}
"""The first trial of the first two has the settings that the recipe had before."""


class Kept:
    """Features of all training records, in half precision, without gains and levels."""

    def __init__(self, inputs: Tensor, file: Path | None, like: Scattering) -> None:
        ones = [tuple(float(gain != 0) for gain in gains) for gains in (like.gains, like.differences)]
        self.front = Scattering(
            like.input_shape, like.angles, ones[0], differences=ones[1], orders=like.orders, even=like.even
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--features", type=Path, help="a file to keep features of one layout in; they are private")
    parser.add_argument("--log", type=Path, default=LOG)
    options = parser.parse_args()
    task, log = TASKS[options.task], Log(options.log)
    records, norm = Records(task.recipe.data.name, HELD_OUT).dataset, Norm(task.recipe.evaluation.norm)
    train_part, held_out = records.train.in_memory(), records.test.in_memory().take(slice(0, CERTIFIED))
    inputs, kept = torch.cat([train_part.inputs, records.test.in_memory().inputs]), {}
    for settings in task.changes:
        row = {"task": options.task, "share": SHARE, "settings": settings}
        if Log.key(row) in log.known:
            continue
        started = time.monotonic()
        config, share = at_share(task.recipe.override_all(settings), SHARE, None)
        plan = stobatch.plan(config)
        assert isinstance(plan, DpSgdPlan)
        front = front_of(config, tuple(inputs.shape[1:]))
        layout = (front.angles, front.orders, *(gain != 0 for gain in (*front.gains, *front.differences)))
        if layout not in kept:
            kept[layout] = Kept(inputs, options.features, front)
        network = train(config, plan, kept[layout], train_part.labels.long())
        found = measure(network, held_out.inputs, held_out.labels, norm, config.evaluation.radii)
        found |= {"cost": share, "torch": torch.__version__, "seconds": round(time.monotonic() - started, 1)}
        log.add(row | found)
        print(json.dumps(log.known[Log.key(row)]), flush=True)


if __name__ == "__main__":
    main()
