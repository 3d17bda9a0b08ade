"""Six attacks side by side with foolbox, torchattacks and ART, on the paper's MNIST network.

Claim: at 10 steps (FGSM: one; Square: 10 queries) 2.5 times the examples per second of the fastest of them on a CPU,
each library handed the whole batch of 2,499 images and left to its own defaults. A library that cuts no batches pays
for memory that falls out of the cache, so the same is measured with the batch cut for it (357 images at a time): 1.8.

The others attack the network as one would write it in PyTorch (`stock`); "on our network" hands them ours, whose first
layer is faster, and the batch cut, to show what the loop itself is worth: 1.1. Everyone takes every step for every
image: ours would let go of images that are broken, so it is led to the least likely class in a ball too small to get
there. "All broken" is the other extreme: every image breaks within a few steps and is let go. That the attacks find the
same points is tested in tests/unit/adapters.

    python benchmarks/attacks.py --rounds 5 --attacks pgd,mim

Ratios are medians over rounds of the ratio within a round. On a machine that other work fills, threads that share an
operation wait for each other at the end of each, which flatters ours: `--threads 1` gives everyone one thread, and
compares processor time: the work alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Callable

import torch
from side_by_side import Measured, alternate, report
from torch import Tensor, nn

from stobatch.attacks import APGD, FGSM, IFGSM, MIM, Attack, Ball, Goal, Madry, Plain, Square
from stobatch.config import MachineConfig, ModelConfig
from stobatch.models import build
from stobatch.training.device import use_device
from stobatch.types import Radius

BATCH, STEPS, SIZE, CUT = 2499, 10, 0.01, 357
BREAKING = 0.2
OURS: dict[str, Attack] = {
    "fgsm": FGSM(),
    "ifgsm": IFGSM(STEPS),
    "mim": MIM(STEPS),
    "pgd": Madry(STEPS),
    "apgd": APGD(STEPS),
    "square": Square(STEPS),
}
Run = Callable[[Tensor, Tensor], Tensor]


def stock(network: nn.Module) -> nn.Module:
    """The same function as plain PyTorch layers: the affine normalisations folded into weights and biases."""
    head = network.head
    first = nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False)
    first.weight.data.copy_(network.encoder.weight)
    return (
        nn.Sequential(_Shifted(first, head.norm), *head.body, nn.Hardtanh(), head.output).eval().requires_grad_(False)
    )


class _Shifted(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.bias, self.scale = layer, -norm.mean / norm.spread, 1 / norm.spread

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.layer(inputs), self.scale)


def peers(model: nn.Module, batch: int) -> dict[str, dict[str, Run]]:
    """Each library's attacks of the six with the same step sizes; `batch` only matters to ART, which cuts by itself."""
    found: dict[str, dict[str, Run]] = {}
    if importlib.util.find_spec("foolbox"):
        import foolbox

        wrapped = foolbox.PyTorchModel(model, bounds=(-1, 1), device="cpu")
        attacks = {
            "fgsm": foolbox.attacks.LinfFastGradientAttack(),
            "ifgsm": foolbox.attacks.LinfBasicIterativeAttack(rel_stepsize=1 / STEPS, steps=STEPS),
            "mim": foolbox.attacks.LinfMomentumIterativeFastGradientMethod(rel_stepsize=1 / STEPS, steps=STEPS),
            "pgd": foolbox.attacks.LinfPGD(rel_stepsize=2.5 / STEPS, steps=STEPS),
        }
        found["foolbox"] = {
            name: lambda x, y, a=attack: a.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=SIZE)
            for name, attack in attacks.items()
        }
    if importlib.util.find_spec("torchattacks"):
        import torchattacks

        unit = nn.Sequential(_FromUnit(), model).eval()
        half = {"eps": SIZE / 2, "steps": STEPS}
        attacks = {
            "fgsm": torchattacks.FGSM(unit, eps=SIZE / 2),
            "apgd": torchattacks.APGD(unit, **half),
            "square": torchattacks.Square(unit, eps=SIZE / 2, n_queries=STEPS),
            # Without a random start its PGD is I-FGSM, and faster than its BIM.
            "ifgsm": torchattacks.PGD(unit, alpha=SIZE / 2 / STEPS, random_start=False, **half),
            "mim": torchattacks.MIFGSM(unit, alpha=SIZE / 2 / STEPS, **half),
            "pgd": torchattacks.PGD(unit, alpha=2.5 * SIZE / 2 / STEPS, **half),
        }
        found["torchattacks"] = {
            name: lambda x, y, a=attack: 2 * a((x + 1) / 2, y) - 1 for name, attack in attacks.items()
        }
    if importlib.util.find_spec("art"):
        from art.attacks import evasion
        from art.estimators.classification import PyTorchClassifier

        wrapped_art = PyTorchClassifier(
            model, nn.CrossEntropyLoss(), input_shape=(1, 28, 28), nb_classes=10, clip_values=(-1, 1), device_type="cpu"
        )
        sized = {"eps": SIZE, "batch_size": batch}
        common = {"eps": SIZE, "max_iter": STEPS, "batch_size": batch, "verbose": False}
        attacks = {
            "fgsm": evasion.FastGradientMethod(wrapped_art, **sized),
            "apgd": evasion.AutoProjectedGradientDescent(
                wrapped_art, eps_step=2 * SIZE, nb_random_init=1, loss_type="cross_entropy", **common
            ),
            "square": evasion.SquareAttack(wrapped_art, max_iter=STEPS, verbose=False, **sized),
            "ifgsm": evasion.BasicIterativeMethod(wrapped_art, eps_step=SIZE / STEPS, **common),
            "mim": evasion.MomentumIterativeMethod(wrapped_art, eps_step=SIZE / STEPS, **common),
            "pgd": evasion.ProjectedGradientDescent(
                wrapped_art, eps_step=2.5 * SIZE / STEPS, num_random_init=1, **common
            ),
        }
        found["ART"] = {
            name: lambda x, y, a=attack: torch.from_numpy(a.generate(x.numpy(), y.numpy()))
            for name, attack in attacks.items()
        }
    return found


class _FromUnit(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs - 1


def cut(run: Run) -> Run:
    """The same run on pieces that fit the cache."""
    return lambda x, y: torch.cat([run(a, b) for a, b in zip(x.split(CUT), y.split(CUT), strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, help="for everyone; by default as many as there are cores")
    parser.add_argument("--attacks", default=",".join(OURS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    use_device(MachineConfig(device="cpu", threads=arguments.threads))
    network = build(ModelConfig(), (1, 28, 28), 10, torch.Generator().manual_seed(0))
    network = network.to(memory_format=torch.channels_last).eval().requires_grad_(False)
    network.calibrate()
    plain = stock(network)
    generator, batch = torch.Generator().manual_seed(1), arguments.batch
    images = torch.rand(batch, 1, 28, 28, generator=generator) * 2 - 1
    logits = network(images)
    labels, least_likely = logits.argmax(1), logits.argmin(1)

    for name in arguments.attacks.split(","):
        attack = OURS[name]

        def ours(attack: Attack = attack) -> Tensor:
            ball, goal = Ball.around(images, Radius(SIZE)), Goal(least_likely, targeted=True)
            return attack.run(Plain(network), ball, goal, torch.Generator().manual_seed(2), chunk=CUT)

        assert not bool((network(ours()).argmax(1) == least_likely).any())

        def all_broken(attack: Attack = attack) -> Tensor:
            ball, goal = Ball.around(images, Radius(BREAKING)), Goal(labels)
            return attack.run(Plain(network), ball, goal, torch.Generator().manual_seed(2), chunk=CUT)

        candidates: dict[str, Callable[[], object]] = {"stobatch": ours, "stobatch, all broken": all_broken}
        whole, parts = "whole batch", f"batch cut to {CUT}"
        for kind, model, size in ((whole, plain, batch), (parts, plain, CUT), ("cut, on our network", network, CUT)):
            for library, runs in peers(model, size).items():
                if name in runs:
                    run = runs[name] if kind == whole else cut(runs[name])
                    candidates[f"{library}, {kind}"] = lambda run=run: run(images, labels)
        measured = alternate(candidates, rounds=arguments.rounds)

        def fastest(kind: str, ours: str = "stobatch", measured: Measured = measured) -> float:
            several = [name for name in measured.wall if name.endswith(kind)]
            return measured.fastest(several, ours, of_processor=arguments.threads == 1)

        ratios = {
            f"{name}_fastest_peer_over_ours": fastest(whole),
            f"{name}_fastest_peer_batch_cut_over_ours": fastest(parts),
            f"{name}_fastest_peer_on_our_network_over_ours": fastest("on our network"),
            f"{name}_fastest_peer_over_ours_all_broken": fastest(whole, "stobatch, all broken"),
        }
        steps = 1 if name == "fgsm" else STEPS
        if arguments.threads == 1:
            ratios = {f"{key}_on_one_thread": value for key, value in ratios.items()}
        report(f"{name}, {steps} steps, {batch} images", measured, batch * steps, ratios)
    print(json.dumps({"benchmark": "peers", "ratios": {}, "measured": sorted(peers(plain, CUT))}))


if __name__ == "__main__":
    main()
