"""A training keeps the features of fixed scattering; it learns what it would have learnt from the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stobatch
from stobatch.training.trainable import Reader
from stobatch_recipes import recipe

LAYERS = "scatter_even 2, linear *0"


def small() -> stobatch.RunConfig:
    settings = {
        "data.name": "small_digits",
        "data.num_classes": 2,
        "model.architecture": LAYERS,
        "training.steps": 4,
        "method.batch_size": 64,
        "method.epsilon": 50.0,
        "seed": 1,
    }
    config = recipe("sound.cifar10_scattering")
    for key, value in settings.items():
        config = config.override(key, value)
    return config


def test_kept_features_train_the_same_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stobatch.train(small(), tmp_path / "kept", quiet=True).network
    monkeypatch.setattr(Reader, "keep_features", lambda *_: None)
    anew = stobatch.train(small(), tmp_path / "anew", quiet=True).network
    for one, other in zip(kept.parameters(), anew.parameters(), strict=True):
        assert float(one.detach().norm()) > 0
        assert float((one - other).detach().norm()) <= 1e-2 * float(other.detach().norm())
    assert all(torch.equal(a, b) for a, b in zip(kept.buffers(), anew.buffers(), strict=True))


def test_the_margin_loss_refuses_other_networks_before_anything_is_written(tmp_path: Path) -> None:
    config = small().override("model.architecture", "conv 2 3, relu, linear")
    with pytest.raises(stobatch.errors.ModelError, match="margin loss needs scattering"):
        stobatch.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
