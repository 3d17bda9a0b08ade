"""Algorithm 2 (vanilla adversarial training), Appendix C and its loss, Eq. 15."""

from pathlib import Path

import pytest
import torch

import stobatch
from stobatch.baselines.vanilla import VanillaConfig
from stobatch.config import RunConfig
from stobatch.data import from_tensors
from stobatch.errors import ModelError, SettingError
from stobatch.published.losses import example_weights
from stobatch.types import Status
from stobatch_recipes import recipe


@pytest.fixture
def stripes() -> stobatch.Dataset:
    """Two classes a small network tells apart at once: bright left half or bright right half."""
    labels = torch.arange(160) % 2
    images = torch.full((160, 1, 28, 28), -0.8)
    images[labels == 0, :, :, :14] = 0.8
    images[labels == 1, :, :, 14:] = 0.8
    images += torch.arange(160)[:, None, None, None] / 1000  # no image is another one
    return from_tensors(images[:120], labels[:120], images[120:], labels[120:])


def config(**changes: object) -> RunConfig:
    method = VanillaConfig(batch_size=30, train_attack_steps=2, train_attack_radius=0.2)
    settings = {
        "data.name": "tensors",
        "training.steps": 8,
        "training.learning_rate": 1e-3,
        "evaluation.attack_steps": 2,
        "evaluation.adaptive_steps": 2,
        "evaluation.adaptive_attacks": ["madry"],
        "seed": 1,
    }
    return recipe("paper.demo").replace(method=method).override_all(settings | changes)


def test_both_batch_sizes_and_the_weight_enter_the_mean() -> None:
    weights = example_weights(4, 2, 0.5)
    assert torch.allclose(weights, torch.tensor([1.0, 1, 1, 1, 0.5, 0.5]) / 5)
    assert float(weights.sum()) == pytest.approx(1)


def test_it_learns_all_parameters_and_claims_no_privacy(stripes: stobatch.Dataset, tmp_path: Path) -> None:
    model = stobatch.train(config(), tmp_path / "run", dataset=stripes, quiet=True)
    scores = stobatch.evaluate(tmp_path / "run", dataset=stripes, quiet=True).to_dict()
    assert scores["clean_accuracy"]["value"] == 1.0
    assert model.guarantee.status is Status.NONE
    assert "no privacy guarantee" in str(model.guarantee)
    assert not any("epsilon" in key for key in scores["guarantee"])


def test_it_has_no_certificate(stripes: stobatch.Dataset, tmp_path: Path) -> None:
    stobatch.train(config(**{"training.steps": 1}), tmp_path / "run", dataset=stripes, quiet=True)
    with pytest.raises(ModelError, match="no certificate"):
        stobatch.certify(tmp_path / "run", dataset=stripes, quiet=True)


def test_two_batches_must_fit_the_data(stripes: stobatch.Dataset) -> None:
    with pytest.raises(SettingError, match="two batches of 63 do not fit 120"):
        stobatch.plan(config(**{"method.batch_size": 63}), dataset=stripes)
