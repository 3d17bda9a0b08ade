"""A run's whole configuration: what is trained and how, as frozen data that fits in one JSON or TOML file.

What changes a guarantee or a result stands in the hashed sections; what only changes speed (`machine`) is kept
apart and left out of the hash, because by contract it changes neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from stobatch import strict_json
from stobatch.errors import SettingError
from stobatch.registry import ARCHITECTURES, ATTACKS, CERTIFICATES, DATA_SETS, METHODS, Names
from stobatch.settings import Settings, content_hash, parse_assignment, setting, show_value, unknown_key
from stobatch.types import PAPER_RANGE


class DataConfig(Settings):
    """Which examples are trained on and tested with."""

    name: str = setting(
        "mnist",
        choices=DATA_SETS,
        doc="The data set; `small_digits` is MNIST at 8x8, for audits; `shards` is what `stobatch shard` writes; "
        "`tensors` means it is handed over in Python",
    )
    num_classes: int | None = setting(None, at_least=2, doc="Keep only the first N classes; all of them if unset")
    classes: tuple[str, ...] | None = setting(
        None,
        doc="Of image folders: the names of all classes, in order, known without the pictures; unset takes those of "
        "the folders, and guarantees object",
        added_later=True,
    )
    train_limit: int | None = setting(None, at_least=1, doc="Use only the first N training examples")
    test_limit: int | None = setting(None, at_least=1, doc="Use only the first N test examples")
    augment: bool = setting(False, doc="Augment the training images as Appendix P describes, once, before batching")
    size: str | None = setting(
        None,
        doc="Of image folders: bring every picture to HEIGHTxWIDTH, as 64x64; unset, all must have one size",
        added_later=True,
    )
    fit: str = setting(
        "resize",
        choices=("resize", "crop"),
        doc="How: stretch the whole picture, or scale its shorter side and cut the middle out",
        added_later=True,
    )
    colour: str | None = setting(
        None,
        choices=("grey", "rgb"),
        doc="Of image folders: turn every picture grey, or into RGB; unset takes what the first one is",
        added_later=True,
    )
    manifest: str | None = setting(
        None,
        doc="Of image folders: a CSV file under the data root with the columns image, label, person; guarantees are "
        "then about persons",
        added_later=True,
    )
    held_out: int = setting(
        0,
        at_least=0,
        doc="Training records, or persons, that a run keeps aside, by a secret draw of its own: what a search scores "
        "it on",
        added_later=True,
    )
    allow_overlap: bool = setting(
        False, doc="Go on although test records of your own data are training records; every report says so"
    )

    def model_post_init(self, context: Any) -> None:
        _ = self.height_and_width
        for name in self.classes or ():
            if name.startswith(".") or "/" in name or "\\" in name:
                raise SettingError(f"data.classes has '{name}'.", remedy="Give the name of a folder, without a path.")
        if self.classes is not None and not 2 <= len(set(self.classes)) == len(self.classes):
            raise SettingError(
                f"data.classes has {len(self.classes)} names, {len(set(self.classes))} of them different.",
                remedy="""Name two classes or more, each once, as data.classes='["cat","dog"]'.""",
            )

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """Return what `size` says as numbers.

        >>> DataConfig(size="64x48").height_and_width
        (64, 48)
        """
        if self.size is None:
            return None
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", self.size)
        if match is None:
            raise SettingError(f"size={self.size} is not allowed.", remedy="Write HEIGHTxWIDTH, as data.size=64x64.")
        return int(match[1]), int(match[2])


class ModelConfig(Settings):
    """The network: one of the paper's, f = g(a(x)) split after its first affine layer, or a plain stack of layers."""

    architecture: str = setting(
        "mnist_cnn",
        doc="One of the paper's networks mnist_cnn, cifar10_cnn, resnet18; small_cnn, for audits; `custom`, handed "
        "over in Python; or a list of layers such as `squash 4, conv 64 5/2, relu, linear`",
    )
    normalisation: str = setting(
        "reference",
        choices=("reference", "group", "none", "batch"),
        doc="How hidden values are normalised; `batch` mixes examples and is refused where a guarantee is per example",
    )
    last_hidden_size: int = setting(
        256, at_least=1, doc="The number of neurons in the last hidden layer of the paper's networks"
    )
    train_only: str | None = setting(
        None,
        doc="What is trained: `head`, the last layer; `last-N`, the last N layers that have parameters; or patterns of "
        "parameter names, as `layers.3.*, layers.5.*`; unset trains all of it",
        added_later=True,
    )
    adapter_rank: int = setting(
        0,
        at_least=0,
        at_most=4096,
        doc="Train low-rank adapters of this rank beside the linear layers and convolutions that train_only leaves out "
        "(unset, all but the last layer); 0 for none",
        added_later=True,
    )

    first_weights: str = setting(
        "fan_in",
        choices=("fan_in", "box"),
        doc="Of a list of layers: the variance of the weights that training starts from, 1/fan-in, or 2π/fan-in², at "
        "which boxes neither grow nor vanish from layer to layer",
        added_later=True,
    )

    def model_post_init(self, context: Any) -> None:
        if not self._lists_layers and self.architecture not in ARCHITECTURES:
            raise unknown_key(
                f"model.architecture={self.architecture}", [f"model.architecture={name}" for name in ARCHITECTURES]
            )

    @property
    def _lists_layers(self) -> bool:
        return "," in self.architecture or self.architecture.split("*")[0].strip() == "linear"

    @property
    def layers(self) -> str | None:
        """Return the list of layers, as written or of the named architecture; None where it is not a list."""
        named = self.architecture if self._lists_layers else ARCHITECTURES.require(self.architecture)
        return named if isinstance(named, str) else None


_LARGEST_FLOAT32 = 3.4e38


class TrainingConfig(Settings):
    """How the parameters move."""

    steps: int = setting(4002, at_least=1, doc="The number of descent steps T")
    learning_rate: float = setting(1e-4, above=0, doc="The learning rate of both parts")
    schedule: str = setting(
        "constant",
        choices=("constant", "linear", "cosine"),
        doc="What becomes of the learning rate after its warm-up: it stays, or falls towards 0 at the end",
        added_later=True,
    )
    warm_up: float = setting(
        0.0,
        at_least=0,
        below=1,
        doc="Share of the steps over which the learning rate grows from 0; method.warm_up is of the losses",
        added_later=True,
    )
    optimiser: str = setting(
        "adam", choices=("adam", "sgd"), doc="The descent rule for θ2, and for θ1 unless the method has its own"
    )
    monitor_every: int = setting(200, at_least=1, doc="Steps between two looks at accuracy on held-out test images")
    monitor_examples: int = setting(1000, at_least=1, doc="How many test images such a look takes")

    def model_post_init(self, context: Any) -> None:
        if self.learning_rate > _LARGEST_FLOAT32:
            raise SettingError(
                f"learning_rate={self.learning_rate} is not allowed.",
                why="No float32 is so large.",
                remedy="Use a number such as 0.1.",
            )


class CertificationConfig(Settings):
    """Verified inference (Algorithm 3)."""

    noise_draws: int = setting(2000, at_least=1, doc="The number n of invocations per input")
    resampling_shrinkage: float = setting(2.0, at_least=1, doc="Appendix N's psi: fresh noise is this much smaller")
    failure_probability: float = setting(
        0.05, above=0, below=1, doc="1 - eta, split over the classes, for each input's certificate"
    )
    interval: str = setting(
        "clopper_pearson",
        choices=("clopper_pearson", "hoeffding"),
        doc="Clopper-Pearson on votes (the released code) or Hoeffding on mean scores (the paper's text)",
    )
    attack_radius: float = setting(0.2, above=0, at_most=2, doc="The attack size mu_a, l-infinity over [-1, 1]")
    limit: int | None = setting(None, at_least=1, doc="Certify only the first N test examples")
    certificate: str = setting(
        "best",
        choices=Names("best", registry=CERTIFICATES),
        doc="Bounds of the network itself, votes under noise, or the best of the method's own ways",
    )
    slope_steps: int = setting(
        20,
        at_least=0,
        doc="Of bounds: optimiser steps on the slopes of a margin that plain bounds and a short attack leave open; "
        "above 0, boxes inside deep networks are tightened too",
        added_later=True,
    )
    branches: int = setting(
        0, at_least=0, doc="Of bounds: at most N branches on signs of ReLUs for such an input", added_later=True
    )
    selection_draws: int = setting(100, at_least=1, doc="Of votes: the draws that choose the class and are not counted")
    hidden_stddev: float = setting(
        0.0, at_least=0, doc="Of votes: Gaussian noise in the first hidden layer beside that at the input"
    )
    stop_early: bool = setting(True, doc="Of votes: stop drawing for an input once all radii asked about are decided")


PAPER_ATTACKS = ("fgsm", "ifgsm", "mim", "madry")
"""What the paper's authors attacked with; which other attacks there are says the registry."""


class EvaluationConfig(Settings):
    """How the trained model is attacked: radii, protocols, and what each attack may spend."""

    norm: str = setting("linf", choices=("linf", "l2", "l1"), doc="The norm of all radii")
    radii: tuple[Annotated[float, Field(gt=0)], ...] = setting(
        (0.05, 0.1, 0.2, 0.4, 0.6), doc="Radii of the table, in that norm over [-1, 1]"
    )
    protocols: tuple[str, ...] = setting(
        ("published", "adaptive"),
        choices=("published", "adaptive"),
        doc="As the paper's authors attacked (a noise-free copy), and as an adversary would (the deployed function)",
    )
    functions: tuple[str, ...] = setting(
        ("single_pass", "vote"),
        choices=("single_pass", "vote"),
        doc="What is deployed: one pass with the fixed noise, or the vote of verified inference",
    )
    attacks: tuple[str, ...] = setting(
        PAPER_ATTACKS, choices=PAPER_ATTACKS, doc="The published protocol's attacks, tried on every test input"
    )
    attack_steps: int = setting(10, at_least=1, doc="Gradient steps of the published protocol's attacks, T_a")
    adaptive_attacks: tuple[str, ...] = setting(
        ("fgsm", "ifgsm", "mim", "madry", "apgd_ce", "apgd_t", "square"),
        choices=ATTACKS,
        doc="The adaptive protocol's attacks on a single pass",
    )
    adaptive_steps: int = setting(40, at_least=1, doc="Gradient steps of the adaptive protocol's attacks")
    restarts: int = setting(2, at_least=1, doc="Random starts of each adaptive attack that has them")
    num_aims: int = setting(3, at_least=1, doc="Other classes that apgd_t walks towards, most likely first")
    queries: int = setting(200, at_least=1, doc="Queries of the square attack")
    labels: str = setting("true", choices=("true", "predicted"), doc="What adaptive attacks lead away from")
    target: str = setting(
        "none",
        choices=("none", "random", "least_likely"),
        doc="Lead adaptive attacks to another class instead of away from the label",
    )
    vote_attacks: tuple[str, ...] = setting(
        ("ifgsm", "madry"), choices=ATTACKS, doc="The adaptive protocol's attacks on the vote"
    )
    noise_draws: int | None = setting(
        None,
        at_least=1,
        doc="Noise draws per gradient step on the vote; unset takes as many as gradients need to agree",
    )
    vote_draws: int = setting(200, at_least=1, doc="Draws of each vote on an attacked input")
    vote_limit: int | None = setting(100, at_least=1, doc="Attack the vote on only the first N test examples")
    limit: int | None = setting(None, at_least=1, doc="Attack only the first N test examples")
    num_images: int = setting(8, at_least=0, doc="Attacked test images kept for the report")

    def model_post_init(self, context: Any) -> None:
        for name in ("radii", "protocols", "functions", "attacks", "adaptive_attacks", "vote_attacks"):
            given = getattr(self, name)
            if len(set(given)) < len(given):
                raise SettingError(
                    f"{name} names something twice: {', '.join(map(str, given))}.", remedy="Name it once."
                )
        widest = PAPER_RANGE.width
        if self.norm == "linf" and max(self.radii) > widest:
            raise SettingError(
                f"radii={max(self.radii)} is not allowed.",
                why=f"In l-infinity over {PAPER_RANGE} a radius of {widest:g} covers everything.",
                remedy="Give radii in units of inputs in [-1, 1]: 8/255 of the pixel scale is 0.063.",
            )


class CanaryConfig(Settings):
    """Records planted in a training so that it can be audited in one run. Each is in or out by a secret coin."""

    num: int = setting(0, at_least=0, doc="How many; 0 trains as if there were none")
    kind: str = setting(
        "gradient",
        choices=("gradient", "input"),
        doc="Contributions that no example could outdo (methods that clip), or images that do not belong (any method)",
    )


class TrainersConfig(Settings):
    """Local trainers of the sound method: owners of disjoint parts of the data, a few of whom work in each step."""

    num: int = setting(1, at_least=1, doc="How many; with 1 the data have one owner")
    per_step: int = setting(1, at_least=1, doc="Trainers that take part in a step, 𝒩; by turns, in random order")
    noise: str = setting(
        "each",
        choices=("each", "shares"),
        doc="Each trainer adds all the noise, so that no one need be trusted; or shares of it that sum to it, which "
        "protects those who see the sum alone",
    )

    def model_post_init(self, context: Any) -> None:
        if self.per_step > self.num:
            raise SettingError(
                f"trainers.per_step={self.per_step} is more than the {self.num} trainers.",
                remedy=f"Set trainers.per_step to at most {self.num}, or raise trainers.num.",
            )


class SearchConfig(Settings):
    """A search that draws settings at random, a random number of times, and keeps the best: `stobatch tune`."""

    settings: tuple[str, ...] | None = setting(
        None, doc="What is searched, each as KEY=[VALUE, VALUE]; unset is no search"
    )
    law: str = setting(
        "poisson",
        choices=("poisson", "negative_binomial"),
        doc="The law of the number of candidates; a Poisson number may be 0, a truncated negative binomial one is not",
    )
    mean: float = setting(5.0, above=1, at_most=1000, doc="Candidates on average; how many there are stays secret")
    shape: float = setting(1.0, at_least=0, doc="Of the negative binomial law: 1 is geometric, 0 logarithmic")
    score: str = setting(
        "accuracy",
        choices=("accuracy", "certified"),
        doc="Held-out records that count for a candidate: those it classifies rightly; or rightly, and proved to stay "
        "so at certification.attack_radius",
    )
    score_noise: float = setting(
        10.0, at_least=0.1, at_most=1e6, doc="Standard deviation of the noise on the number of records that count"
    )
    candidate_epsilon: float | None = setting(
        None, above=0, doc="The ε of each candidate by itself; `tune` finds the largest within method.epsilon"
    )

    @property
    def space(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each setting that is searched, by its dotted key.

        >>> SearchConfig(settings=("training.steps=[100, 200]", "method.clip_norm=0.5,1")).space
        {'training.steps': (100, 200), 'method.clip_norm': (0.5, 1)}
        """
        lists: dict[str, tuple[Any, ...]] = {}
        for entry in self.settings or ():
            key, value = parse_assignment(entry)
            if isinstance(value, str) and "," in value:
                value = [parse_assignment(f"{key}={part.strip()}")[1] for part in value.split(",")]
            values = value if isinstance(value, list) else [value]
            if key in lists:
                raise SettingError(f"'{key}' is searched twice.", remedy="Name it once, with all of its values.")
            if any(values.count(one) > 1 for one in values):
                raise SettingError(f"'{key}' has a value twice.", remedy="Name each value once.")
            lists[key] = tuple(values)
        return lists


INSTRUMENTS = ("release", "many_runs", "one_run", "membership", "certificates")


class AuditConfig(Settings):
    """How hard claims are tried, and how sure a refutation has to be."""

    instruments: tuple[str, ...] | None = setting(
        None, choices=INSTRUMENTS, doc="Which to use; unset takes those that fit the run and train nothing new"
    )
    confidence: float = setting(
        0.95, above=0.5, below=1, doc="1 minus the false-alarm rate of a call; its findings share it equally"
    )
    neighbours: str | None = setting(
        None, choices=("replace-one", "add-or-remove-one"), doc="The relation to audit; unset takes the claim's own"
    )
    trainings: int = setting(1000, at_least=2, doc="Of many_runs: models trained, half of them on each neighbour")
    models_at_once: int = setting(32, at_least=1, doc="Of many_runs and membership: models trained side by side")
    canary: str = setting(
        "input", choices=("input", "gradient"), doc="Of many_runs: the record in which the neighbours differ"
    )
    view: str = setting(
        "final", choices=("final", "steps"), doc="Of many_runs: the attacker sees the trained model, or every step"
    )
    shadow_models: int = setting(128, at_least=2, doc="Of membership: models trained on random halves of the data")
    release_trials: int = setting(2000, at_least=2, doc="Of release: releases drawn, half of them from each neighbour")
    num_inputs: int | None = setting(200, at_least=1, doc="Of certificates: inputs attacked, nearest to a border first")
    attack_steps: int = setting(50, at_least=1, doc="Of certificates: gradient steps of each attack")
    restarts: int = setting(3, at_least=1, doc="Of certificates: random starts of each attack that has them")
    judging_draws: int = setting(2000, at_least=100, doc="Of certificates: fresh draws that judge an attacked vote")


class MachineConfig(Settings):
    """Speed and place. By contract nothing here changes a guarantee, so it is not part of the hash."""

    device: str = setting("cpu", doc="Where tensors live: cpu, cuda, cuda:1")
    threads: int | None = setting(None, at_least=1, doc="CPU threads; PyTorch's default if unset")
    memory_mb: int | None = setting(
        None,
        at_least=16,
        doc="What the hot loops may take for activations, in MiB; unset: 512 on a CPU, an eighth of a GPU's memory",
    )
    checkpoint_every: int = setting(50, at_least=1, doc="Steps between two checkpoints")
    data_root: str | None = setting(None, doc="Where data sets lie; STOBATCH_DATA if unset")
    precision: str = setting(
        "float32",
        choices=("float32", "float64", "bfloat16"),
        doc="Of training: bfloat16 passes over float32 parameters (for GPUs), or float64 throughout (for comparisons)",
    )
    devices_per_trainer: int | None = setting(
        None, at_least=1, doc="Processes that share one trainer's work, 𝕄; unset gives every process something to do"
    )
    pieces: int = setting(
        4,
        at_least=1,
        doc="On CPUs: pieces that a trainer's work is cut into, or a multiple; one process takes whole ones",
    )
    exact_sums: bool = setting(
        True,
        doc="Between processes: sums with the same bits for any number of them, at 16 bytes a parameter, not 4; sums "
        "under DP-SGD's noise always are",
    )
    book: str | None = setting(
        None,
        doc="The folder of the owner's budget book, in which trainings are entered; STOBATCH_BOOK if unset, else none",
        added_later=True,
    )
    timeout_s: float = setting(
        600.0, above=0, doc="How long a process waits for the others before it gives them up for lost, in seconds"
    )


class MethodConfig(Settings):
    """The settings of one training method. Each method derives its own class and names it once.

    `name` is what files say, and hashes rest on it; people read `title`.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str | None = None, **others: Any) -> None:
        """Register the method; without a name these are settings that several methods have in common."""
        super().__init_subclass__(**others)
        if name is not None:
            cls.name = name

    @property
    def title(self) -> str:
        return METHODS.shown(self.name)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if not isinstance(values, Mapping):
            raise SettingError(
                f"method={show_value(values)} is not a section.", remedy='Write method = { name = "sound" }.'
            )
        rest = dict(values)
        name = rest.pop("name", None)
        if cls is not MethodConfig:
            return super().from_dict(rest)
        if not isinstance(name, str) or name not in METHODS:
            asked = name if isinstance(name, str) else show_value(name)
            near = ", ".join(f"method.name={known}" for known in METHODS.nearest(asked))
            remedy = f"Nearest: {near}." if near else f"There are {', '.join(METHODS)}."
            raise SettingError(f"there is no setting 'method.name={asked}'.", remedy=remedy)
        kind: type[Self] = METHODS[name].config_class
        if METHODS.shown(kind.name) != METHODS.shown(name):
            raise SettingError(
                f"the method '{name}' has settings of the name '{kind.name}'.",
                why="A run finds its method again by the name that its settings have.",
                remedy="Give the entry point and the settings of the method one name.",
            )
        return kind.from_dict(rest)


class PriorConfig(Settings):
    """The public weights that a training starts from. `train --from` writes this section; it is not chosen by hand."""

    name: str | None = setting(None, doc="What they are called; unset starts from random weights", added_later=True)
    weights_sha256: str | None = setting(None, doc="Their digest, as in training.json", added_later=True)
    read: tuple[str, ...] | None = setting(
        None, doc="What they were made from: each source with its licence, and its digest", added_later=True
    )
    may_contain: tuple[str, ...] | None = setting(
        None, doc="Data sets whose records they may have seen, or `unknown`", added_later=True
    )
    tuned_on: tuple[str, ...] | None = setting(
        None, doc="Data sets that somebody looked at to choose how they are made", added_later=True
    )
    promise: str | None = setting(
        None, doc="Of a run: what it guarantees to the records that it was trained on", added_later=True
    )
    new_head: bool = setting(
        False, doc="Whether the last layer is drawn afresh: theirs is for other classes, or for none", added_later=True
    )


class RunConfig(Settings):
    """Everything that a run depends on."""

    method: MethodConfig
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    prior: PriorConfig = PriorConfig()
    training: TrainingConfig = TrainingConfig()
    certification: CertificationConfig = CertificationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainers: TrainersConfig = TrainersConfig()
    canaries: CanaryConfig = CanaryConfig()
    audit: AuditConfig = AuditConfig()
    search: SearchConfig = SearchConfig()
    machine: MachineConfig = MachineConfig()
    seed: int | None = setting(None, at_least=0, doc="For reproducible experiments; unset draws secret randomness")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; without a prior and without a search, as before there were any."""
        plain, unset = super().to_dict(), self.search == SearchConfig()
        return {
            name: value
            for name, value in plain.items()
            if (name != "prior" or value) and (name != "search" or not unset)
        }

    @property
    def training_hash(self) -> str:
        """Return what identifies the trained model: runs with the same hash and the same seed have the same weights."""
        # Without canaries, and with one trainer, a training is what it was before there were any.
        special = (("canaries",) if self.canaries.num else ()) + (("trainers",) if self.trainers.num > 1 else ())
        special += ("search",) if self.search.settings else ()
        parts = ("method", "data", "model", "prior", "training", "seed", *special)
        plain = {name: value for name, value in self.to_dict().items() if name in parts}
        # What is said of an accuracy changes no weight.
        plain["data"] = {name: value for name, value in plain["data"].items() if name != "allow_overlap"}
        return content_hash(plain)


def load_config(path: Path) -> RunConfig:
    """Read a configuration from TOML or JSON."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        values = strict_json.read(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}.", remedy="Give a .toml or .json file.") from None
    except RecursionError:
        raise SettingError(f"{path} is nested too deeply.", remedy="Mend the file or start from a recipe.") from None
    except ValueError as error:
        raise SettingError(f"{path} is not valid: {error}.", remedy="Mend the file or start from a recipe.") from None
    return RunConfig.from_dict(values)


def require_config(config: object) -> None:
    """Raise unless a caller's settings are of the class that has been checked."""
    if isinstance(config, RunConfig):
        return
    remedy = 'Give a RunConfig, as stobatch_recipes.recipe("demo").'
    if isinstance(config, str):
        remedy = f"Give the recipe's: stobatch_recipes.recipe({config!r})."
    elif isinstance(config, Mapping):
        remedy = "Make a RunConfig of it: stobatch.RunConfig.from_dict(...)."
    raise SettingError(f"settings are a RunConfig, and this is a {type(config).__name__}.", remedy=remedy)
