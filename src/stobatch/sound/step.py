"""One step of DP-SGD: who samples what, what an example adds, and who draws the noise.

Everything that an example is made into (noisy views, an adversarial point, the bounds of its box) is one gradient, and
that gradient is clipped; Gaussian noise goes on the sum of a Poisson sample, and the sum is divided by a constant.
Where examples belong to persons, samples are of persons, and all that is drawn of a person is one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import frexp, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stobatch.config import RunConfig, TrainersConfig
from stobatch.data import Examples, TrainingExamples
from stobatch.data.partition import holdings, poisson_sample, take_turns
from stobatch.data.persons import Persons, few_of_each
from stobatch.dp.canaries import LENGTH, GradientCanaries, Planted
from stobatch.dp.clipping import (
    Batch,
    Clipper,
    Losses,
    clipped_sum_by_example,
    clipped_sum_one_by_one,
    clipper_for,
    formed_at_once,
    in_units,
    is_right_in_full,
    weigh_classes,
)
from stobatch.dp.mixing import FEW_ROWS
from stobatch.dp.noise import Grid, add_noise
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.models import Classifier, Layered, rows_by_trial, rows_in_memory
from stobatch.models.scattering import Scattering
from stobatch.models.validators import keeps_nothing, unchanged
from stobatch.seeds import Seeds, Stream
from stobatch.sound.averaged import make_descent
from stobatch.sound.losses import NormalSampler, normal_sampler, sampler_by_blocks
from stobatch.sound.settings import DpSgdSettings
from stobatch.training import Trainable
from stobatch.training.checkpoint import tensors_digest
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.engines.base import DeviceRank, split_rows
from stobatch.training.exact_sum import ExactSum
from stobatch.training.ledger import Ledger, Stretch
from stobatch.training.trainable import BEFORE_AVERAGING, Reader, working_precision

_CPU_CHUNK = 512
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""

_FEATURES_AT_ONCE = 100
"""Examples whose features are computed in one pass; fixed, so that every process keeps the same bits."""


@dataclass(frozen=True)
class _Piece:
    """Examples that pass at once: whole units, each of `per` consecutive rows."""

    rows: Tensor
    per: int
    coins: NormalSampler


class DpSgdTrainable(Trainable):
    """A step of DP-SGD: a Poisson sample, one clipped contribution per example, noise, a public denominator."""

    monitored = "epsilon_spent"
    history_of = BEFORE_AVERAGING
    _drawing: ThreadPoolExecutor | None

    def __init__(
        self,
        config: DpSgdSettings,
        plan: DpSgdPlan,
        network: Classifier,
        train: TrainingExamples,
        seeds: Seeds,
        *,
        memory_mb: int,
        trainers: TrainersConfig,
        pieces: int,
        precision: str = "float32",
    ) -> None:
        self.config, self.plan, self.network, self.seeds, self.trainers = config, plan, network, seeds, trainers
        # A power of two, so that nothing is rounded before the sum is.
        size = max(plan.clip_norm * plan.denominator, plan.noise_stddev / 2**8)
        self.shrink = 2.0 ** -max(-100, min(100, frexp(size)[1]))
        self._grid = Grid.for_noise(
            plan.noise_stddev * self.shrink, scale=1 / (plan.clip_norm * plan.denominator * self.shrink)
        )
        self.clip_norm, self.noise_stddev = self._clip_norm(), plan.noise_stddev
        self.canaries: GradientCanaries | None = None
        self._repeated, self._drawing = 0, None
        self.pieces = pieces
        self.examples = train
        on_gpu = network.device.type == "cuda"
        # On a CPU a guess; on a GPU rows are tried out with the clipping itself.
        self.chunk = rows_in_memory(network, memory_mb if on_gpu else memory_mb // 8, most=_CPU_CHUNK)
        self.objective, self.views = config.objective(self.chunk), config.random_views
        self._read()
        weights = config.class_weights
        self.class_weights = None if weights is None else torch.tensor(weights).to(network.device, network.dtype)
        self.recalibrate()
        if self.chunk < self.per * self.views.num:
            raise SettingError(
                f"{self.per * self.views.num} rows are one contribution, and {self.chunk} pass at once.",
                why="What is drawn of a person, and all views of it, is clipped as one, in one pass.",
                remedy="Raise machine.memory_mb, or lower method.records_per_person or method.augmented_views.",
            )
        self.clip = self._clipper(precision, memory_mb)
        if formed := formed_at_once(network, self.clip):
            self.chunk = max(self.per * self.views.num, min(self.chunk, memory_mb * 2**20 // 4 // formed))

    def _read(self) -> None:
        self.reader = Reader(self.examples, self.network.device, self.network.dtype)
        front = self.network.layers[0] if isinstance(self.network, Layered) else None
        if isinstance(front, Scattering) and self.objective.takes_features and not self.views.kinds:
            self.reader.keep_features(front, _FEATURES_AT_ONCE)
        self.persons = self._persons()
        self.holdings = holdings((self.persons or self.examples).shards, self.trainers.num)

    def _persons(self) -> Persons | None:
        """Whom the examples belong to, where the plan is about persons."""
        return None if self.plan.num_persons is None else self.examples.persons

    @property
    def per(self) -> int:
        """The most records that one contribution is made of."""
        return 1 if self.plan.num_persons is None else self.plan.records_per_person

    def _clipper(self, precision: str, memory_mb: int) -> Clipper:
        """Return the fast clipping, if it is right for a few examples and for as many as pass at once."""
        with unchanged(self.network):
            # Layers that are known branch on no values; of others `torch.func` has to follow all they do.
            slow = clipped_sum_one_by_one if keeps_nothing(self.network) else clipped_sum_by_example
            found, unit = clipper_for(self.network, *self._probe(FEW_ROWS), slow=slow), self.per * self.views.num
            if self.network.device.type == "cuda":

                def clip(units: int) -> None:
                    found(self.network, *self._probe(units), 1.0)

                units = rows_by_trial(self.network.device, memory_mb, clip)
                self.chunk = max(1, min(self.chunk // unit, units)) * unit
            units = self.rows // unit
            if found is not clipped_sum_by_example and units > FEW_ROWS:
                rough = precision == "bfloat16"
                with working_precision(precision, self.network.device):
                    if not is_right_in_full(self.network, *self._probe(units), rough=rough, way=found, slow=slow):
                        return clipped_sum_by_example
            return found

    @property
    def rows(self) -> int:
        """Examples that pass at once, usually."""
        return min(self.chunk, self.plan.expected_batch_size * self.per * self.views.num)

    def _probe(self, units: int) -> tuple[Losses, Batch]:
        """Public points that have nothing to do with the data, to try the fast clipping on."""
        generator, rows = torch.Generator().manual_seed(1), self.per * self.views.num
        count = units * rows
        inputs = torch.rand(count, *self.network.input_shape, generator=generator).to(self.network.dtype) * 2 - 1
        labels = torch.arange(count) % self.network.num_classes
        device = self.network.device
        coins = normal_sampler(generator, device)
        batch, losses = self._prepared(inputs.to(device), labels.to(device), 1.0, coins, rows)
        return losses, batch

    def _prepared(
        self, inputs: Tensor, labels: Tensor, progress: float, coins: NormalSampler, rows: int
    ) -> tuple[Batch, Losses]:
        """Return what is clipped: a loss for each unit of so many rows."""
        batch, losses = self.objective.prepare(self.network, inputs, labels, progress, coins)
        return in_units(batch, weigh_classes(losses, self.class_weights), rows)

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        self.average = make_descent(self.parameters.values(), config.training, self.config)
        return [self.average]

    def tasks(self, step: int) -> list[TrainerTask]:
        picked = take_turns(step, self.trainers.num, self.trainers.per_step, self.seeds)
        return [TrainerTask(trainer, benign_batch=0, adversarial_batch=0) for trainer in picked]

    @property
    def per_example_bound(self) -> float:
        return 1 / self.plan.expected_batch_size

    def add_canaries(self, planted: Planted) -> None:
        """Canaries that are in become records of the first trainer; the sampling rate and the noise stay as planned.

        Where the plan is about persons, each canary is a person, with as many records alike as a step may draw.
        """
        if planted.inputs is not None and planted.labels is not None:
            if self.trainers.num > 1 or len(self.examples.shards) > 1:
                raise ModelError(
                    "input canaries stand behind the data of one owner, in memory.",
                    remedy="Set canaries.kind=gradient, or train with one trainer on data that are not in shards.",
                )
            own, here = self.examples.in_memory(), planted.included
            inputs = torch.cat([own.inputs, planted.inputs[here].repeat_interleave(self.per, 0).to(own.inputs)])
            labels = torch.cat([own.labels, planted.labels[here].repeat_interleave(self.per).to(own.labels)])
            groups = own.groups
            if groups is not None:
                added = int(groups.max()) + 1 + torch.arange(int(here.sum())).repeat_interleave(self.per)
                groups = torch.cat([groups, added])
            self.examples = Examples(inputs, labels, own.num_classes, groups=groups)
            self._read()
        if planted.gradients is not None:
            self.canaries = planted.gradients
            self.canaries_in = self._canary_units(planted.included.nonzero().flatten())
            self.canary_sums = torch.zeros(len(planted.included), dtype=torch.float64)

    def _canary_units(self, canaries: Tensor) -> Tensor:
        """Which canary each planted unit is: a unit of its own, whatever it owns."""
        return canaries

    @property
    def _canary_pull(self) -> float:
        """The length of a canary's contribution: all its records pull one way, far beyond C, and are clipped as one."""
        return min(LENGTH * self.plan.clip_norm, self.clip_norm)

    def extra_state(self) -> dict[str, Tensor]:
        return {} if self.canaries is None else {"canary_sums": self.canary_sums}

    def _clipped(self, inputs: Tensor, labels: Tensor, step: int, coins: NormalSampler, per: int = 1) -> Gradients:
        """Σ clipped contributions of some examples that pass at once, `per` of them, in all their views, to a unit."""
        inputs, labels = self.views.draw(inputs, labels, coins)
        return self._clipped_rows(inputs, labels, step, coins, per * self.views.num)

    def _clipped_rows(self, inputs: Tensor, labels: Tensor, step: int, coins: NormalSampler, per: int) -> Gradients:
        """Σ clipped contributions, of units of `per` rows."""
        batch, losses = self._prepared(inputs, labels, step / self.plan.steps, coins, per)
        return self.clip(self.network, losses, batch, self.clip_norm).gradients

    def contributions(self, inputs: Tensor, labels: Tensor, step: int, groups: Tensor | None = None) -> Gradients:
        """As the release counts them, with view noise of its own; `groups` are the persons' numbers."""
        coins = normal_sampler(self.seeds.generator("step", step, "other views"), self.network.device)
        total = ExactSum(self.targets(step))
        for rows, per in self._other_units(step, len(labels), groups):
            for part in torch.split(rows, self.chunk // (per * self.views.num) * per):
                there = inputs[part].to(self.network.device, self.network.dtype), labels[part].to(self.network.device)
                total.add(self._clipped(*there, step, coins, per))
        return {name: value.mul_(self.per_example_bound / self.plan.clip_norm) for name, value in total.mean(1).items()}

    def _other_units(self, step: int, count: int, groups: Tensor | None) -> list[tuple[Tensor, int]]:
        """Rows of examples that are not the training's own, in units, and how many rows make one."""
        if self.plan.num_persons is None or groups is None:
            return [(torch.arange(count), 1)]
        persons = Persons.in_memory(groups)
        return self._drawn(persons, torch.arange(len(persons)), self.seeds.stream("step", step, "other records"))

    def _drawn(self, persons: Persons, which: Tensor, stream: Stream) -> list[tuple[Tensor, int]]:
        """Positions of at most K records of each of these persons: those of persons with one record, with two, ..."""
        rows, counts = persons.rows(which)
        rows = rows[few_of_each(counts, self.plan.records_per_person, stream)]
        left = counts.clamp(max=self.plan.records_per_person)
        of_each = left.repeat_interleave(left)
        return [(rows[of_each == count], count) for count in sorted(set(left.tolist()))]

    def _path(self, step: int, trainer: int) -> tuple[str | int, ...]:
        """Return the name of a trainer's randomness in a step; no two of either share one."""
        again = ("attempt", self.attempt) if self.attempt else ()
        return ("step", step, *again, *(() if self.trainers.num == 1 else ("trainer", trainer)))

    def _clip_norm(self) -> float:
        """C, less what rounding two sums to the grid may put between them."""
        return self.plan.clip_norm - sqrt(self.largest_release) * self._grid.step / self.shrink

    @property
    def largest_release(self) -> int:
        """The most values that a step releases."""
        return sum(value.numel() for value in self.parameters.values())

    def grid(self, step: int) -> Grid:
        return self._grid

    def _noise(self, step: int, trainer: int) -> Stream:
        """Return the stream of a trainer's noise in a step."""
        return self.seeds.stream(*self._path(step, trainer), "noise")

    def _samples(self, step: int, trainer: int, share: DeviceRank) -> Iterator[tuple[int, Tensor, bool]]:
        """Poisson samples of the trainer's shards that this device reads: which, positions, and whether it does all.

        The only shard is read by all devices, a piece each; of several, each is read by one device. The sample of the
        first trainer's last shard may name positions behind its end: those are planted records.
        """
        owned = self.holdings[trainer]
        for index, shard in enumerate(owned):
            if len(owned) > 1 and not share.takes(index):
                continue
            path = self._path(step, trainer) + (("shard", index) if len(owned) > 1 else ())
            planted = len(self.canaries_in) if self._holds_canaries(trainer, index) else 0
            stream = self.seeds.stream(*path, "sample")
            yield index, poisson_sample(len(shard) + planted, self.plan.sampling_rate, stream), len(owned) > 1

    def check_data(self, share: DeviceRank) -> None:
        """The shards that this device reads, of any trainer, are there and as they were written."""
        for owned in self.holdings:
            if 1 < len(owned) < share.devices:
                raise DataError(
                    f"a trainer's {len(owned)} shards are too few for its {share.devices} devices.",
                    why="A shard is read by one device.",
                    remedy=f"Write at least {share.devices * len(self.holdings)} shards, or start fewer processes.",
                )
        if len(self.examples.shards) > 1:
            mine = {s for owned in self.holdings for i, s in enumerate(owned) if len(owned) == 1 or share.takes(i)}
            self.examples.require(number for number, shard in enumerate(self.examples.shards) if shard in mine)

    def _holds_canaries(self, trainer: int, shard: int) -> bool:
        return self.canaries is not None and trainer == 0 and shard == len(self.holdings[0]) - 1

    def _cut(self, own: Tensor, step: int, trainer: int, index: int, share: DeviceRank) -> Iterator[_Piece]:
        """Cut a sample into pieces that fit the memory; no unit is in two of them."""
        path, device = self._path(step, trainer), self.network.device
        units, shard = [(own, 1)], (("shard", index) if len(self.holdings[trainer]) > 1 else ())
        if self.persons is not None:
            units = self._drawn(self.persons, own, self.seeds.stream(*path, *shard, "records"))
        for rows, per in units:
            views = partial(self.seeds.generator, *path, "views", index, *(() if per == 1 else ("records", per)))
            wide = per * self.views.num
            for piece in split_rows(len(rows) // per, self.chunk // wide, device, share, self.pieces):
                coins = sampler_by_blocks(views, slice(piece.start * wide, piece.stop * wide), device)
                yield _Piece(rows[piece.start * per : piece.stop * per], per, coins)

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        """Σ clipped contributions + noise, shrunk. The grid makes it (Σ + noise) / (C · denominator).

        So an example adds at most `unit` to the average.
        """
        scale, noise = self.shrink, self._noise_beside(step, task.trainer) if share.first else None
        for index, sample, whole in self._samples(step, task.trainer, share):
            shard = self.holdings[task.trainer][index]
            own = sample[sample < len(shard)] + shard.start
            for number, piece in enumerate(self._cut(own, step, task.trainer, index, share)):
                if whole or share.takes(number):
                    clipped = self._clipped(*self.reader.fetch(piece.rows), step, piece.coins, piece.per)
                    yield {name: value.mul_(scale) for name, value in clipped.items()}
            if self.canaries is not None and self._holds_canaries(task.trainer, index) and (whole or share.first):
                which = self.canaries_in[sample[sample >= len(shard)] - len(shard)]
                total = {name: torch.zeros_like(p) for name, p in self.targets(step).items()}
                self.canaries.add(total, which, step, self._canary_pull)
                yield {name: value.mul_(scale) for name, value in total.items()}
        if noise is not None:
            # Once for the trainer, however many devices it has. The engine's sums are exact on the grid of the noise,
            # so noise on a part of zeros is noise on the sum.
            yield noise()

    def _noise_beside(self, step: int, trainer: int) -> Callable[[], Gradients]:
        """Return the noise of a step, to be called for; drawn by a thread of the CPU while a GPU clips."""
        device = self.network.device
        nothing = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.targets(step).items()}
        draw = partial(add_noise, nothing, self.noise_stddev * self.shrink, self._noise(step, trainer), self._grid)
        if device.type == "cpu":
            return draw
        if self._drawing is None:
            self._drawing = ThreadPoolExecutor(1, thread_name_prefix="noise")
        drawn = self._drawing.submit(draw)
        return lambda: {name: value.to(device) for name, value in drawn.result().items()}

    def released(self, step: int, gradients: Gradients) -> None:
        if self.canaries is not None:
            self.canary_sums += self.canaries.read(gradients, step)

    def recalibrate(self) -> None:
        """What depends on the parameters alone follows them, as it will in deployment. Repeatable."""
        self.network.calibrate()

    def after_update(self) -> None:
        """Parameters that have run away give every example an endless gradient, which is left out: say so instead."""
        self.recalibrate()
        probe = torch.zeros(1, *self.network.input_shape, device=self.network.device, dtype=self.network.dtype)
        with torch.no_grad(), self.keeping_state():
            if not bool(self.network(probe).isfinite().all()):
                raise ModelError(
                    "the network's scores are not numbers any more.",
                    why="The parameters have diverged.",
                    remedy="Lower training.learning_rate, and start a new run.",
                )

    def save_private(self, run: Path, config_hash: str) -> None:
        """The privacy noise lives in the steps alone; the model carries none."""

    def begin(self, run: Path, stretch: Stretch) -> int:
        ledger = Ledger.of(run).entered(replace(stretch, bits=self._bits(stretch.bits)))
        ledger.save(run)
        self._repeated = ledger.accounted - ledger.reached
        return ledger.attempt

    def _bits(self, machine: str) -> str:
        """The fingerprint of a step's arithmetic: the machine's, the seeds', and how public points are clipped now.

        The points tell a network whose code was changed, or that draws numbers of its own, from one that repeats
        itself. The digest is mixed with the seeds, so that it confirms no guess about them.
        """
        clipped = self.clip(self.network, *self._probe(FEW_ROWS), self.clip_norm)
        return format(self.seeds.child("ledger", machine, tensors_digest(clipped.gradients)).root, "064x")[:32]

    def saved(self, run: Path, step: int, state: str) -> None:
        Ledger.of(run).settled(step, state).save(run)

    def distrust(self, run: Path) -> None:
        # Any process may be the first to know, and the last to live: they all write the same.
        Ledger.of(run).distrusted().save(run)

    def require_counted(self, run: Path, step: int) -> None:
        Ledger.of(run).require_covers(step, run)

    def use_average(self) -> None:
        self.average.adopt_average()
        self.recalibrate()

    def finish(self, run: Path) -> dict[str, Any]:
        self.use_average()
        ledger = Ledger.of(run)
        if ledger.open:
            # A kill came between the last checkpoint and its entry: what is open was made.
            ledger.made(ledger.open).save(run)
        return {"accounted_steps": ledger.accounted}

    def monitor(self, step: int) -> float:
        """ε of the steps so far, those included that were made again with other bits; of a search, all of it."""
        if self.plan.searched is not None:
            return self.plan.claim.epsilon
        return self.plan.mechanism(step + self._repeated).epsilon(self.plan.delta)
