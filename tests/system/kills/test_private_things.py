"""Noise and seeds stay in `private/`, and nothing public gives them away."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints
from torch import Tensor

import stobatch
from stobatch import seeds

CHECKPOINT = ("part-1-of-1.safetensors", "complete.json")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def secret_runs(config, tmp_path_factory) -> tuple[Path, Path]:
    """Two runs of the same configuration without a seed."""
    folder = tmp_path_factory.mktemp("secret")
    runs = folder / "a", folder / "b"
    for out in runs:
        stobatch.train(config.override("seed", None), out, quiet=True)
        stobatch.certify(out, quiet=True)
        stobatch.evaluate(out, quiet=True)
    return runs


def public_files(run: Path) -> list[Path]:
    return [file for file in run.rglob("*") if file.is_file() and "private" not in file.relative_to(run).parts]


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_the_private_folder_is_for_its_owner(config, tmp_path, umask):
    before = os.umask(umask)
    try:
        stobatch.train(config.override("seed", None), tmp_path / "run", quiet=True)
    finally:
        os.umask(before)
    private = tmp_path / "run" / "private"
    assert mode(private) == 0o700
    names = {str(file.relative_to(private)): mode(file) for file in private.rglob("*") if file.is_file()}
    steps = [f"checkpoints/step-{step:08d}/{file}" for step in (3, 4) for file in CHECKPOINT]
    documents = {"commitment_key.json", "seeds.json", "data.json", "measurements.json"}
    assert set(names) == {*documents, "noise.safetensors", *steps}
    assert set(names.values()) == {0o600}
    assert {mode(folder) for folder in private.rglob("*") if folder.is_dir()} == {0o700}
    for file in public_files(tmp_path / "run"):
        assert mode(file) == 0o666 & ~umask, file


def test_private_files_stay_private_when_a_run_is_resumed(run, config):
    (run / "model.safetensors").unlink()
    shutil.rmtree(checkpoints.newest(run))
    stobatch.train(config, run, resume=True, quiet=True)
    private = run / "private"
    assert len(checkpoints.folders(run)) == 2
    assert {mode(file) for file in private.rglob("*") if file.is_file()} == {0o600}
    assert {mode(folder) for folder in (private, *private.rglob("*")) if folder.is_dir()} == {0o700}


def test_seeds_are_stored_only_where_nobody_gave_one(undisturbed, secret_runs):
    assert not (undisturbed / "private" / "seeds.json").exists()
    assert all((run / "private" / "seeds.json").exists() for run in secret_runs)
    assert json.loads((secret_runs[0] / "config.json").read_text())["config"]["seed"] is None


def test_the_root_is_in_no_other_file(secret_runs):
    for run in secret_runs:
        root = int(json.loads((run / "private" / "seeds.json").read_text())["root"])
        assert root.bit_length() > 64, "too few secret bits"
        spellings = [str(root).encode(), f"{root:x}".encode(), root.to_bytes(16, "little"), root.to_bytes(16, "big")]
        others = [file for file in run.rglob("*") if file.is_file() and file.name != "seeds.json"]
        assert len(others) >= 8
        for file in others:
            content = file.read_bytes()
            assert not any(spelling in content for spelling in spellings), file


def test_a_secret_root_is_not_shown_when_printed():
    secret = seeds.Seeds.secret()
    assert str(secret.root) not in repr(secret)


def contains(public: Tensor, private: Tensor) -> bool:
    """Whether a run of the private values stands in the public tensor, up to sign and a common scale."""
    values, wanted = public.flatten().double(), private.flatten().double()
    if values.numel() < 8 or wanted.numel() < 8:
        return False
    ratios = values[1:] / values[:-1]
    pattern = wanted[1:8] / wanted[:7]
    windows = ratios.unfold(0, 7, 1)
    return bool(((windows - pattern).abs() <= 1e-5 * pattern.abs()).all(1).any())


def test_the_search_finds_hidden_noise():
    noise = torch.randn(50)
    hidden = torch.randn(200)
    assert not contains(hidden, noise)
    hidden[30:80] = -3 * noise
    assert contains(hidden, noise)


def test_no_public_file_holds_the_noise(secret_runs):
    for run in secret_runs:
        noise = load_file(run / "private" / "noise.safetensors")
        assert {name: tuple(value.shape) for name, value in noise.items()} == {
            "input_noise": (1, 28, 28),
            "hidden_noise": (4, 14, 14),
            "label_noise": (16,),
        }
        weights = load_file(run / "model.safetensors")
        assert weights
        for name, values in weights.items():
            for kind, private in noise.items():
                assert not contains(values, private), (name, kind)
        for file in public_files(run):
            content = file.read_bytes()
            for kind, private in noise.items():
                for value in private.flatten()[:40].tolist():
                    # Two values in a row, so that no coincidence of four bytes counts.
                    assert repr(value).encode() not in content, (file, kind)
                row = private.flatten()[:2].tolist()
                assert struct.pack("<2f", *row) not in content, (file, kind)
                assert struct.pack("<2d", *row) not in content, (file, kind)


def test_the_weights_hold_parameters_and_nothing_else(secret_runs):
    """No noise, no reference statistics: those reveal the noise."""
    model = stobatch.load(secret_runs[0])
    assert set(load_file(secret_runs[0] / "model.safetensors")) == dict(model.network.named_parameters()).keys()


def test_runs_without_a_seed_differ(secret_runs):
    weights = [load_file(run / "model.safetensors") for run in secret_runs]
    noise = [load_file(run / "private" / "noise.safetensors") for run in secret_runs]
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] if weights[0][name].ndim > 1)
    assert not any(torch.equal(noise[0][name], noise[1][name]) for name in noise[0])
    roots = {json.loads((run / "private" / "seeds.json").read_text())["root"] for run in secret_runs}
    assert len(roots) == 2


def test_runs_with_the_same_seed_have_the_same_bits(config, undisturbed, same_training, tmp_path):
    stobatch.train(config, tmp_path / "again", quiet=True)
    same_training(tmp_path / "again", undisturbed)


def test_a_secret_run_resumes_with_its_own_secret(config, secret_runs, tmp_path):
    """The root is read back, so a resumed secret run ends where it would have ended."""
    run = Path(shutil.copytree(secret_runs[0], tmp_path / "run"))
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "private" / "checkpoints")
    stobatch.train(config.override("seed", None), run, resume=True, quiet=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (secret_runs[0], run))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_does_not_depend_on_the_global_generator(config, tmp_path):
    weights = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        stobatch.train(config, tmp_path / str(seed), quiet=True)
        weights.append(load_file(tmp_path / str(seed) / "model.safetensors"))
    first, second = weights
    assert all(torch.equal(first[name], second[name]) for name in first), "a draw comes from the global generator"
