"""Try settings of `sound` on MNIST from rendered digits, on training images that no trial was trained on.

    python results/search_prior.py --prior PRIOR --prior-steps 6000 --set 'training.steps=100' [--set ...]

makes the prior in `--folder` if it is not there, measures it alone, and then trains from it privately once for each
`--set`: the settings are START, but for what it names, KEY=VALUE with blanks between. `--prior` names in the same way
what the prior has. Every trial is a line of the log with all that was asked; what is there
already is not made again. A trial has `--share` of a batch and noise to match (see search_sound.py), one seed, and is
not attacked. The last `--held-out` training images are the test; no test image is read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import torch
from prior_table import certified
from search_sound import Records, Values, at_share, weighed

import stobatch
from stobatch.config import RunConfig
from stobatch.data import Dataset
from stobatch.loading import plain_network
from stobatch.results.prior import prior_files, read_prior
from stobatch.seeds import Seeds
from stobatch_recipes import sound

LOG = Path(__file__).parent / "prior_search.jsonl"
RADII = (0.05, 0.2, 0.4, 0.6)
START = sound.mnist_near().override_all(
    {
        "model.architecture": "squash 4, conv 64 5/2, relu, avgpool 2, linear",
        "method.radius": 0.2,
        "method.batch_size": 2048,
        "method.average_decay": 0.98,
        "method.warm_up": 0.0,
        "method.ramp": 0.0,
        "training.steps": 100,
        "training.learning_rate": 1.0,
    }
)
"""Where the search began: `sound.mnist_near` with twice the maps, a larger box from the first step on, few steps."""


def parsed(text: str) -> Values:
    """Return the settings that a line names; a value with blanks is quoted as in JSON."""
    found: Values = {}
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        key, _, rest = rest.partition("=")
        value, end = decoder.raw_decode(rest)
        found[key], rest = value, rest[end:].strip()
    return found


def of_prior(options: argparse.Namespace) -> Values:
    steps, batch_size = options.prior_steps, options.prior_batch_size
    return {"settings": parsed(options.prior), "steps": steps, "batch_size": batch_size, "seed": options.seed}


def make_prior(start: RunConfig, prior: Values, folder: Path) -> Path:
    out = folder / f"prior-{sha256(json.dumps(prior, sort_keys=True).encode()).hexdigest()[:8]}"
    if not prior_files(out)[1].exists():
        config = weighed(start, prior["settings"])
        stobatch.pretrain(config, "digits", out, **{key: prior[key] for key in ("steps", "batch_size", "seed")})
    return out


def alone(start: RunConfig, prior: Values, path: Path, dataset: Dataset, radii: tuple[float, ...]) -> Values:
    """Measure a prior as it is."""
    config = weighed(start, prior["settings"])
    network = plain_network(config, dataset.info, Seeds.reproducible(0), None)
    network.load_state_dict(read_prior(path)[0])
    return certified(config, network.eval().requires_grad_(False), dataset.test, dataset, radii)


def primed(config: RunConfig, path: Path, share: float, dataset: Dataset, radii: tuple[float, ...]) -> Values:
    """Train from a prior once, in a folder that is thrown away."""
    config, share = at_share(config, share, dataset)
    quiet = {"training.monitor_every": 10**6, "machine.checkpoint_every": 10**6, "seed": 0}
    with tempfile.TemporaryDirectory() as folder:
        model = stobatch.train(
            config.override_all(quiet), Path(folder) / "run", dataset=dataset, prior=path, quiet=True
        )
    return {"cost": share, **certified(model.config, model.network, dataset.test, dataset, radii)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prior", default="", help="settings of the prior where they are not those of START")
    parser.add_argument("--prior-steps", type=int, default=6000)
    parser.add_argument("--prior-batch-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1, help="of the prior")
    parser.add_argument("--set", action="append", default=[], help="settings of a private training")
    parser.add_argument("--share", type=float, default=1 / 16)
    parser.add_argument("--radii", type=float, nargs="+", default=RADII)
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--folder", type=Path, default=Path("runs/priors"))
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = START.override("machine.threads", options.threads)
    prior, radii = of_prior(options), tuple(options.radii)
    there = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    dataset = Records("mnist", options.held_out).dataset
    for text in (None, *options.set):
        asked: Values = {"prior": prior, "settings": None if text is None else parsed(text)}
        asked |= {"share": None if text is None else options.share, "radii": list(radii)}
        asked["examples"] = options.held_out
        if any(asked == {key: line[key] for key in asked} for line in there):
            continue
        path, started = make_prior(start, prior, options.folder), time.monotonic()
        if asked["settings"] is None:
            found = alone(start, prior, path, dataset, radii)
        else:
            # A private training has the prior's network, and otherwise what the recipe has.
            network = {key: value for key, value in prior["settings"].items() if key.startswith("model.")}
            config = weighed(start, network | asked["settings"])
            found = primed(config, path, options.share, dataset, radii)
        line = {**asked, **found, "torch": torch.__version__, "seconds": round(time.monotonic() - started, 1)}
        print(json.dumps(line), flush=True)
        with options.log.open("a") as log:
            log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
