"""A prior is two files that belong together; what reads them notices a missing, damaged or foreign one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stobatch.errors import RunError
from stobatch.results import PriorCard, PriorSource
from stobatch.results.prior import prior_files, read_prior, require_new_prior, write_prior

CARD = PriorCard(
    name="small",
    made_by="a test",
    architecture={"architecture": "linear"},
    input_shape=(1, 2, 2),
    num_classes=2,
    sources=(PriorSource(name="noise", what="random numbers", licence="CC0-1.0", sha256=None, records=None),),
    may_contain=(),
    weights_sha256="",
    method="other",
    settings={"seed": 1},
)
WEIGHTS = {"layers.1.weight": torch.arange(8.0).reshape(2, 4), "layers.1.bias": torch.zeros(2)}


@pytest.mark.parametrize("name", ["small", "small.v2", "small.safetensors"])
def test_a_prior_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    require_new_prior(tmp_path / name)
    write_prior(tmp_path / name, WEIGHTS, CARD)
    tensors, card = read_prior(tmp_path / name)
    assert {key: value.tolist() for key, value in tensors.items()} == {k: v.tolist() for k, v in WEIGHTS.items()}
    assert card == CARD.replace(weights_sha256=card.weights_sha256)
    with pytest.raises(RunError, match="there already"):
        require_new_prior(tmp_path / name)


def test_weights_without_their_own_card_are_refused(tmp_path: Path) -> None:
    write_prior(tmp_path / "small", WEIGHTS, CARD)
    other = {name: value + 1 for name, value in WEIGHTS.items()}
    write_prior(tmp_path / "other", other, CARD)
    weights, card = prior_files(tmp_path / "small")
    prior_files(tmp_path / "other")[0].replace(weights)
    with pytest.raises(RunError, match="other weights than"):
        read_prior(tmp_path / "small")
    card.unlink()
    with pytest.raises(RunError, match="is not there"):
        read_prior(tmp_path / "small")


def test_an_edited_card_is_refused_by_the_field(tmp_path: Path) -> None:
    write_prior(tmp_path / "small", WEIGHTS, CARD)
    card = prior_files(tmp_path / "small")[1]
    content = json.loads(card.read_text())
    card.write_text(json.dumps(content | {"method": "magic"}))
    with pytest.raises(RunError, match="method is wrong"):
        read_prior(tmp_path / "small")


def test_pickled_weights_are_refused_and_not_run(tmp_path: Path) -> None:
    write_prior(tmp_path / "small", WEIGHTS, CARD)
    torch.save(WEIGHTS, prior_files(tmp_path / "small")[0])
    with pytest.raises(RunError, match="is damaged"):
        read_prior(tmp_path / "small")
