"""A method that is not built in: its loss is tried before the first step, and the guarantee says whose it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.tamperings import mend_manifest
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.config import RunConfig
from stobatch.dp.clipping import Batch
from stobatch.errors import ModelError
from stobatch.registry import METHODS
from stobatch.settings import setting
from stobatch.sound import step
from stobatch.sound.losses import NormalSampler, Objective, Ramp, Term
from stobatch.sound.method import DpSgdFamily
from stobatch.sound.settings import DpSgdSettings
from tests.support.small_records import small_config, small_records

WHOSE = "the method and its loss are those of code registered in this process, which stobatch did not check"


@dataclass(frozen=True)
class Own(Term):
    """Cross-entropy, with the mistake that is named."""

    mistake: str

    def prepare(self, network: nn.Module, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler) -> Batch:
        means = inputs.mean(0, keepdim=True) if self.mistake == "preparation" else torch.zeros_like(inputs[:1])
        return (means.expand_as(inputs),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        each = F.cross_entropy(network(inputs - prepared[0]), labels, reduction="none")
        return each + each.mean() if self.mistake == "loss" else each


class OwnConfig(DpSgdSettings, name="own_losses"):
    """Settings of a method of one's own."""

    mistake: str = setting("", doc="Where examples mix")

    def objective(self, attack_chunk: int) -> Objective:
        return Objective(((1.0, Own(self.mistake)),), Ramp(0.0, 0.0))


class OwnLosses(DpSgdFamily):
    config_class = OwnConfig


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "own_losses", OwnLosses())


def own_config(mistake: str = "") -> RunConfig:
    return small_config().replace(method=OwnConfig(batch_size=16, delta=1e-3, mistake=mistake))


@pytest.mark.parametrize("mistake", ["loss", "preparation"])
def test_a_loss_that_mixes_examples_is_refused_before_the_first_step(mistake: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="changing one example of a batch changes another example's loss"):
        stobatch.train(own_config(mistake), tmp_path / "run", dataset=small_records(), quiet=True)


def test_the_guarantee_says_whose_method_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stobatch.train(own_config(), run, dataset=small_records(), quiet=True)
    (line,) = [line for line in stobatch.load(run).guarantee.assumptions if line.startswith(WHOSE)]
    document = json.loads((run / "plan.json").read_text())
    document["guarantee"]["assumptions"].remove(line)
    (run / "plan.json").write_text(json.dumps(document))
    mend_manifest(run)
    checked = stobatch.verify(run, dataset=small_records(), sample=0)
    assert not checked.differing, "older versions did not write the line"
    assert checked.guarantee is not None
    assert line in checked.guarantee.assumptions


def test_built_in_methods_are_not_tried_again_and_say_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "check_losses", None)
    stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True)
    guarantee = stobatch.load(tmp_path / "run").guarantee
    assert not any("stobatch did not check" in line for line in guarantee.assumptions)
