"""Say what noise did to runs of the published mechanism: `python results/diagnose.py DEVICE RUN...`, a line each.

It reads the runs' private noise, so its output is for experiments with public seeds.
"""

import json
import sys
from pathlib import Path

import torch

from stobatch.data import load as load_data
from stobatch.loading import load
from stobatch.models import Network
from stobatch.published.noise import PrivateNoise
from stobatch.seeds import Seeds


@torch.no_grad()
def diagnose(run: Path, device: str) -> dict[str, object]:
    """Where W_π points, how much of θ1 is left, and what the network answers on 1,000 test images."""
    model = load(run, device=device)
    network = model.network
    assert isinstance(network, Network)
    test = load_data(model.config.data, seeds=Seeds.reproducible(model.config.seed or 0)).test.limit(1000)
    last_hidden: list[torch.Tensor] = []
    network.head.output.register_forward_hook(lambda layer, inputs, output: last_hidden.append(inputs[0]))
    labels = network(test.inputs.to(device)).argmax(1)
    weight = network.head.output.weight
    common = weight.mean(0)
    noise = PrivateNoise.load(run, model.config.training_hash).label_noise.to(device).reshape(-1, len(common)).mean(0)
    spectrum = torch.linalg.svdvals(network.encoder.weight.flatten(1)).square()
    return {
        "run": run.name,
        "test_accuracy": float((labels == test.labels.to(device)).float().mean()),
        "share_of_commonest_prediction": float(labels.bincount().max() / len(labels)),
        "output_weight_norm": float(weight.norm()),
        "share_common_to_all_classes": float(common.norm() * len(weight) ** 0.5 / weight.norm()),
        "cosine_of_common_part_and_label_noise": float(torch.cosine_similarity(common, noise, dim=0)),
        "encoder_effective_rank": float(spectrum.sum() ** 2 / spectrum.square().sum()),
        "share_of_saturated_last_hidden_values": float((last_hidden[0].abs() >= 1).float().mean()),
    }


if __name__ == "__main__":
    for path in sys.argv[2:]:
        print(json.dumps(diagnose(Path(path), sys.argv[1])))
