"""What a training, alone or of a federation, leaves for others: settings, plan, numbers, and a manifest of digests."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, field_validator

from stobatch.results.document import (
    Count,
    Document,
    Flag,
    Guarantee,
    NotNull,
    Number,
    Part,
    Settings,
    Size,
    Text,
    Whole,
)
from stobatch.runs import Run
from stobatch.types import Status


class DatasetFacts(Part):
    """A data set in public numbers (`data.DatasetInfo` is the class to compute with)."""

    name: Text
    input_shape: tuple[Count, Count, Count]
    num_classes: Count
    num_train: Count
    num_test: Count
    class_names: tuple[Text, ...] = ()
    copies: Count = 1
    num_persons: Annotated[Count | None, NotNull] = None
    """Whom the training records belong to, where that is known."""
    classes_from_labels: Annotated[Flag | None, NotNull] = None
    """Whether the number of classes was read off the labels; left out where it was given."""
    read_from_folder: Annotated[tuple[Text, ...] | None, NotNull] = None
    """Of a folder of private pictures: which of classes, size and colour were read off it; left out where all were
    given."""

    def class_name(self, label: int) -> str:
        return self.class_names[label] if label < len(self.class_names) else str(label)


class StartedRun(Document):
    """config.json: the settings that a run was started with, the data they are for, and their hashes."""

    kind: ClassVar[str] = "config"

    training_hash: Text
    content_hash: Text
    config: Settings
    dataset: DatasetFacts

    @field_validator("config")
    @classmethod
    def _has_names(cls, config: Settings) -> Settings:
        """Check that the settings have what every run names; the rest is for `config` to read."""
        method, data, seed = config.get("method"), config.get("data"), config.get("seed", False)
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in (method, data)):
            raise ValueError("it names no method, or no data")
        if isinstance(seed, bool) or not isinstance(seed, int | None):
            raise ValueError("its seed is neither null nor a whole number")
        return config

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def data(self) -> str:
        """Return the name of the data in the settings; `dataset.name` is that of the data themselves."""
        return str(self.config["data"]["name"])

    @property
    def seed(self) -> int | None:
        """Return the public seed; None where seeds are secret."""
        seed: int | None = self.config["seed"]
        return seed

    @property
    def trained_radius(self) -> float | None:
        """Return the radius that training aims at, l-infinity over [-1, 1]; None where the method has none."""
        own = self.config["method"]
        radius = next((own[name] for name in ("radius", "train_attack_radius") if name in own), None)
        return float(radius) if isinstance(radius, (int, float)) else None

    def lines(self) -> list[str]:
        return [f"configuration {self.training_hash}: method {self.method} on {self.dataset.name}"]


class PlannedNumber(Part):
    """One line of the printed plan."""

    name: Text
    symbol: Text
    value: Number
    formula: Text
    paper: Text


class PlanDocument(Document):
    """plan.json: every number that privacy depends on, fixed before any data is read."""

    kind: ClassVar[str] = "plan"

    guarantee: Guarantee
    sizes: Settings = Field(default_factory=dict)
    """The public numbers that the plan was derived from, by the names that its method gives them."""
    rows: tuple[PlannedNumber, ...]
    network: Annotated[tuple[Text, ...] | None, NotNull] = None
    """Of a network handed over: how it is clipped, and which certificates it will have."""

    def lines(self) -> list[str]:
        numbers = (f"{row.name}: {row.value:g}" for row in self.rows)
        return [str(self.guarantee), *numbers, *(self.network or ())]


class DataDigests(Part):
    """The data of a run: sizes, and digests that confirm no guess about anything private."""

    name: Text
    public: Flag
    training_records: Count
    test_records: Count
    training_commitment: Text | None = None
    test_sha256: Text | None = None
    test_commitment: Text | None = None


class NetworkFacts(Part):
    """The network for people and for `verify`: its layers, its size, and whether it has to be handed over."""

    handed_over: Flag
    layers: tuple[Text, ...]
    parameters: Count
    probe: Annotated[tuple[Number, ...] | None, NotNull] = None
    """Scores of public points by the saved model, where the network was a module of its owner's: what it computes."""
    trained: Annotated[Count | None, NotNull] = None
    """How many values were trained, those of adapters included; left out where all parameters were."""
    trained_names: Annotated[tuple[Text, ...] | None, NotNull] = None
    """Which: names of parameters; `up` and `down` are an adapter's, which was added to its layer's weight."""


class HistoryRow(Part):
    """A look at a training: accuracy on held-out images, and what its method watches, under the method's own name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number] = Field(init=False)

    step: Count
    test_accuracy: Number


class Training(Document):
    """training.json: what a finished training says of itself."""

    kind: ClassVar[str] = "training"

    accounted_steps: Annotated[Whole | None, NotNull] = None
    """Steps that have looked at the training data, where the method counts them."""
    rounds: Annotated[dict[Text, Count] | None, NotNull] = None
    """Of a federation: the answers that each party counts."""
    excluded: Annotated[dict[Text, Text] | None, NotNull] = None
    """Of a federation: parties that the server stopped to believe, and why."""
    steps: Count
    seconds_since_last_start: Annotated[Size | None, NotNull] = None
    """With the memory: left out where seeds are secret, since both depend on the samples, which no ε covers."""
    peak_memory_mb: Size | None = None
    peak_memory_of: Annotated[Text | None, NotNull] = None
    data: Annotated[DataDigests | None, NotNull] = None
    network: Annotated[NetworkFacts | None, NotNull] = None
    device: Text
    processes: Annotated[Count | None, NotNull] = None
    torch: Text
    test_accuracy: Annotated[Number | None, NotNull] = None
    """Of the saved model; None where an older version did not measure it."""
    test_examples: Annotated[Count | None, NotNull] = None
    history_of: Annotated[Text | None, NotNull] = None
    epsilon_spent_status: Annotated[Status | None, NotNull] = None
    """Who vouches for `epsilon_spent` of the history, before any audit; left out where there is none, or before 0.3."""
    weights_sha256: Annotated[Text | None, NotNull] = None
    """None of a run from before there were digests."""
    private_files: dict[Text, Text | None] = Field(default_factory=dict)
    """Commitments to the owner's private tensors."""
    history: tuple[HistoryRow, ...]

    def lines(self) -> list[str]:
        seconds = self.seconds_since_last_start
        lines = [f"{self.steps} steps on {self.device}" + ("" if seconds is None else f" in {seconds:g} s")]
        if self.test_accuracy is not None:
            lines.append(f"the saved model is right on {self.test_accuracy:.1%} of {self.test_examples} test images")
        return lines


class Made(Part):
    """When, by which version and on what a verb made its files."""

    model_config = ConfigDict(extra="allow")

    date: Text
    stobatch: Text | None
    commit: Text | None
    python: Text
    torch: Text
    numpy: Text
    platform: Text
    cpu: Text
    device: Text


class ListedFile(Part):
    """A public file as the manifest has it."""

    sha256: Text
    size: Count


class Manifest(Document):
    """manifest.json: every public file of a run with its digest, and what made it."""

    kind: ClassVar[str] = "manifest"

    training_hash: Text | None
    weights_sha256: Text | None
    data: DataDigests | None
    made: dict[Text, Made]
    """By verb."""
    files: dict[Text, ListedFile]

    def lines(self) -> list[str]:
        return [f"{len(self.files)} files", *(f"{verb}: {entry.date}" for verb, entry in self.made.items())]


def is_old(run: Run) -> bool:
    """Return whether there is nothing to compare with because an older version made the run."""
    training = Training.read_if_there(run)
    return not run.has(Manifest.kind) and (training is None or training.weights_sha256 is None)


class PartyAccount(Part):
    """What one party has promised and done, in public numbers: a line of the table behind the guarantee."""

    name: Text
    records: Count
    expected_batch_size: Count
    sampling_rate: Number
    noise_multiplier: Number
    clip_norm: Number
    most_rounds: Count
    rounds: Count
    epsilon: Number
    """To be shown with the status of the federation's guarantee only."""
    delta: Number


class FederationAccount(Document):
    """federation.json: the parties' accounts, their answers, and the guarantee for everyone who sees all messages."""

    kind: ClassVar[str] = "federation"

    parties: tuple[PartyAccount, ...]
    answers_received: dict[Text, Count]
    answers_clipped: dict[Text, Count]
    answer_bounds: dict[Text, Number]
    excluded: dict[Text, Text]
    guarantee: Guarantee

    def lines(self) -> list[str]:
        status = self.guarantee.status
        spent = [f"{party.name}: {party.rounds} rounds, {status} ε = {party.epsilon:g}" for party in self.parties]
        return [str(self.guarantee), *spent]


class _PublicNumbers(Part):
    """What a party agreed to, and how often it has answered."""

    name: Text
    terms: Text
    sizes: Settings
    noise_multiplier: Size
    rounds: Count
    epsilon: Size
    """To be shown with the status of the guarantee only."""


class Statement(_PublicNumbers):
    """What a party says of itself in public."""

    seed_mark: Text
    """A digest of its seeds, to find two parties with the same ones; it tells nothing of a root of 128 secret bits."""


class Participation(_PublicNumbers, Document):
    """participation.json: what one party has said of itself, and its own guarantee."""

    kind: ClassVar[str] = "participation"

    seed_mark: Text | None = None
    guarantee: Guarantee

    def lines(self) -> list[str]:
        return [f"{self.name}, {self.rounds} rounds", str(self.guarantee)]


class FederatedTraining(Document):
    """What `federate` prints: the training, and the account of the federation."""

    run: Text
    training: Training
    parties: tuple[PartyAccount, ...]
    answers_received: dict[Text, Count]
    answers_clipped: dict[Text, Count]
    answer_bounds: dict[Text, Number]
    excluded: dict[Text, Text]
    guarantee: Guarantee
