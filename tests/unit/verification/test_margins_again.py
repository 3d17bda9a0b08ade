"""What margins certify is computed again: radii of another version's effort agree, larger ones do not."""

from __future__ import annotations

from pathlib import Path

import torch

import stobatch
from stobatch.models.layered import build_layered
from stobatch.seeds import Seeds
from stobatch.sound.verifiers import MarginsVerifier
from stobatch.types import Norm
from stobatch.verification.sampling import _Again
from stobatch_recipes import recipe


def test_a_recorded_radius_is_asked_about_before_it_differs() -> None:
    generator = torch.Generator().manual_seed(0)
    network = build_layered("scatter_even 4 2 3 0.25 0.03, linear", (1, 12, 12), 3, generator)
    inputs = torch.rand(4, 1, 12, 12, generator=generator) * 2 - 1
    verifier = MarginsVerifier(network, Norm.L2, (0.01,))
    close = verifier.verify(inputs, generator).radius
    far = verifier.verify_farthest(inputs, generator).radius
    # All are farther than what is asked about, so little effort goes into them; another version spent more.
    assert (close < 0.9 * far).any()

    def check(radii: list[float]) -> str:
        seeds = Seeds.reproducible(0)
        return str(_Again(verifier, inputs, {"radius": radii}, [0, 1, 2, 3], 4, seeds).radii().outcome)

    assert check(close.tolist()) == "agrees"
    assert check((0.98 * far).tolist()) == "agrees"
    # A broken twin of the record: no effort proves twice as much.
    assert check([*far[:3].tolist(), 2 * float(far[3])]) == "differs"


def test_radii_beyond_those_asked_about_agree(tmp_path: Path) -> None:
    """Margins prove more than what is asked about, as bounds do not."""
    settings = {
        "data.name": "small_digits",
        "data.num_classes": 2,
        "model.architecture": "wavelets 2 0 0.2 4 4, linear *0",
        "training.steps": 8,
        "method.batch_size": 64,
        "method.epsilon": 50.0,
        "evaluation.radii": (0.01,),
        "certification.attack_radius": 0.01,
        "certification.limit": 20,
        "seed": 1,
    }
    model = stobatch.train(recipe("sound.mnist_scattering").override_all(settings), tmp_path / "run", quiet=True)
    stobatch.certify(tmp_path / "run", quiet=True)
    found = stobatch.verify(tmp_path / "run")
    assert found.differing == ()
    document = stobatch.results.CertificateSummary.read(model.run)
    assert document.largest_radius["margins"] > 0.01
