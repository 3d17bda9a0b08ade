"""The run whose numbers are committed: six steps on the embedded images, on one thread of a CPU.

Only numbers that move continuously with rounding are kept, so that another CPU's last bits stay within the tolerance:
weights, logits, mean scores under noise, and the certificates that given votes earn with the trained weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("golden.json")

SETTINGS: dict[str, Any] = {
    "data.train_limit": 120,
    "data.test_limit": 60,
    "method.batch_size": 30,
    "method.total_epsilon": 400.0,
    "method.label_epsilon": 100.0,
    "method.train_attack_steps": 2,
    "method.train_attack_max_radius": 0.3,
    "method.trainers_per_step": 2,
    "model.last_hidden_size": 32,
    "training.steps": 6,
    "training.learning_rate": 0.001,
    "training.monitor_every": 1,
    "certification.noise_draws": 200,
    "certification.resampling_shrinkage": 4.0,
    "machine.checkpoint_every": 6,
    "machine.threads": 1,
    "seed": 11,
}


def compute() -> dict[str, Any]:
    """Train, certify and measure; plain numbers."""
    import torch

    import stobatch
    from stobatch import data
    from stobatch.published.monte_carlo import Tally, tally_products
    from stobatch.seeds import Seeds
    from stobatch_recipes import recipe

    threads = torch.get_num_threads()
    config = recipe("paper.demo").override_all(SETTINGS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = stobatch.train(config, Path(folder) / "run", quiet=True)
            history = model.run.read("training")["history"]
            test = data.load(config.data).test
            with torch.no_grad():
                logits = model.network(test.inputs)
                loss = torch.nn.functional.cross_entropy(logits, test.labels)
            verifier = model.verifiers()[0]
            generator = Seeds.reproducible(5).generator("golden")
            tally = tally_products(model.network, test.inputs[:6], verifier.noise, 200, generator, 64)
            # Votes are whole numbers and would jump: these are given, the weights behind the radii are trained.
            given = torch.tensor([[200 - k, k, *[0] * 8] for k in (0, 1, 5, 20, 60, 99)])
            verdicts = verifier.judge(Tally(given, given.double(), 200)).columns()
            certificates = {name: verdicts[name].tolist() for name in verdicts if "radius" in name or "_" in name}
            certificates = {name: [float(value) for value in column] for name, column in certificates.items()}
            sums = {name: float(value.double().abs().sum()) for name, value in model.network.state_dict().items()}
            plan = {f"{row.name} ({row.symbol})": float(row.value) for row in model.plan.rows()}
    finally:
        torch.set_num_threads(threads)
    return {
        "training_hash": config.training_hash,
        "plan": plan,
        "history": history,
        "test_loss": float(loss),
        "logits": logits[:3].tolist(),
        "weights_l1": sums,
        "mean_scores": (tally.scores / 200).tolist(),
        "certificates": certificates,
    }
