"""One step of DP-SGD: Poisson sampling, clipped contributions, noise, and a public denominator.

Everything derived from an example (noisy views, an adversarial point, the bounds of its box) is one gradient, and that
gradient is clipped; Gaussian noise is added to the sum over a Poisson sample, and the sum is divided by a constant.
Where examples belong to persons, persons are sampled, and all records drawn of a person are one gradient.
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
from torch import Tensor, nn

from stobatch.config import RunConfig, TrainersConfig
from stobatch.data import Examples, TrainingExamples
from stobatch.data.partition import holdings, poisson_sample, take_turns
from stobatch.data.persons import Persons, few_of_each
from stobatch.dp.canaries import LENGTH, Canaries, GradientCanaries
from stobatch.dp.clipping import (
    Batch,
    Clipper,
    Losses,
    agrees_on_batch,
    bytes_per_example,
    check_losses,
    clipped_sum_by_example,
    clipped_sum_by_loop,
    clipper_for,
    group_rows,
    weigh_classes,
)
from stobatch.dp.mixing import FEW_ROWS
from stobatch.dp.noise import Grid, add_noise
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.models import Classifier, Layered, rows_by_trial, rows_in_memory
from stobatch.models.scattering import Scattering
from stobatch.models.validators import keeps_nothing, unchanged
from stobatch.registry import METHODS
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
from stobatch.training.trainable import BEFORE_AVERAGING, EPSILON_SPENT, Reader, working_precision

_CPU_CHUNK = 512
"""Examples of one pass on a CPU; larger chunks fall out of the cache."""

_FEATURES_AT_ONCE = 100
"""Examples whose features are computed in one pass; fixed, so that every process keeps the same bits."""


@dataclass(frozen=True)
class _Piece:
    """Rows that pass at once: whole units of `per` consecutive rows each, and the noise of their views."""

    rows: Tensor
    per: int
    normal: NormalSampler


class DpSgdTrainable(Trainable):
    """A step of DP-SGD: a Poisson sample, one clipped contribution per example, noise, a public denominator."""

    monitored = EPSILON_SPENT
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
        # Contributions are scaled into the range of exact sums, by a power of two, which rounds nothing.
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
        # An estimate on a CPU; on a GPU `_clipper` tries the clipping itself.
        self.chunk = rows_in_memory(network, memory_mb if on_gpu else memory_mb // 8, most=_CPU_CHUNK)
        self.objective, self.views = config.objective(self.chunk), config.random_views
        self._read_data()
        weights = config.class_weights
        self.class_weights = None if weights is None else torch.tensor(weights).to(network.device, network.dtype)
        self.recalibrate()
        if self.chunk < self.records_per_unit * self.views.num:
            raise SettingError(
                f"{self.records_per_unit * self.views.num} rows are one contribution, and {self.chunk} pass at once.",
                why="All views of all records drawn of a person are clipped as one gradient, in one pass.",
                remedy="Raise machine.memory_mb, or lower method.records_per_person or method.augmented_views.",
            )
        self.clip = self._clipper(precision, memory_mb)
        if num_bytes := bytes_per_example(network, self.clip):
            most = memory_mb * 2**20 // 4 // num_bytes
            self.chunk = max(self.records_per_unit * self.views.num, min(self.chunk, most))

    def _read_data(self) -> None:
        self.reader = Reader(self.examples, self.network.device, self.network.dtype)
        front = self.network.layers[0] if isinstance(self.network, Layered) else None
        if isinstance(front, Scattering) and self.objective.takes_features and not self.views.kinds:
            self.reader.keep_features(front, _FEATURES_AT_ONCE)
        self.persons = self._persons()
        self.holdings = holdings((self.persons or self.examples).shards, self.trainers.num)

    def _persons(self) -> Persons | None:
        """Return the persons whom the examples belong to; None where the unit is an example."""
        return None if self.plan.num_persons is None else self.examples.persons

    @property
    def records_per_unit(self) -> int:
        """Return the largest number of records in one contribution."""
        return 1 if self.plan.num_persons is None else self.plan.records_per_person

    def _clipper(self, precision: str, memory_mb: int) -> Clipper:
        """Return the fast clipper, if it agrees with an oracle on a few examples and on as many as pass at once."""
        with unchanged(self.network):
            if METHODS.provider(self.config.name) is not None:
                check_losses(self.network, *self._whole_probe())
            # Known layers do not branch on values; for others `torch.func` checks that nothing does.
            oracle = clipped_sum_by_loop if keeps_nothing(self.network) else clipped_sum_by_example
            clipper, unit = (
                clipper_for(self.network, *self._probe(FEW_ROWS), oracle=oracle),
                self.records_per_unit * self.views.num,
            )
            if self.network.device.type == "cuda":

                def clip(units: int) -> None:
                    clipper(self.network, *self._probe(units), 1.0)

                units = rows_by_trial(self.network.device, memory_mb, clip)
                self.chunk = max(1, min(self.chunk // unit, units)) * unit
            units = self.rows // unit
            if clipper is not clipped_sum_by_example and units > FEW_ROWS:
                bfloat16, probe = precision == "bfloat16", self._probe(units)
                with working_precision(precision, self.network.device):
                    if not agrees_on_batch(self.network, *probe, bfloat16=bfloat16, clipper=clipper, oracle=oracle):
                        return clipped_sum_by_example
            return clipper

    @property
    def rows(self) -> int:
        """Return how many rows usually pass at once."""
        return min(self.chunk, self.plan.expected_batch_size * self.records_per_unit * self.views.num)

    def _probe(self, units: int) -> tuple[Losses, Batch]:
        """Return losses and public random points that do not depend on the data, to check the fast clipper on."""
        generator, rows = torch.Generator().manual_seed(1), self.records_per_unit * self.views.num
        count = units * rows
        inputs = torch.rand(count, *self.network.input_shape, generator=generator).to(self.network.dtype) * 2 - 1
        labels = torch.arange(count) % self.network.num_classes
        device = self.network.device
        normal = normal_sampler(generator, device)
        batch, losses = self._prepare_losses(inputs.to(device), labels.to(device), 1.0, normal, rows)
        return losses, batch

    def _whole_probe(self) -> tuple[Losses, Batch]:
        """Return losses that prepare their batch themselves, and a few public points, to check for mixing anywhere."""
        points = torch.rand(FEW_ROWS, *self.network.input_shape, generator=torch.Generator().manual_seed(2)) * 2 - 1
        labels = torch.arange(FEW_ROWS) % self.network.num_classes

        def losses(network: nn.Module, batch: Batch) -> Tensor:
            normal = normal_sampler(torch.Generator().manual_seed(2), self.network.device)
            with torch.enable_grad():  # attacks differentiate
                prepared, each = self._prepare_losses(batch[0], batch[1], 1.0, normal, 1)
            return each(network, prepared)

        return losses, (points.to(self.network.device, self.network.dtype), labels.to(self.network.device))

    def _prepare_losses(
        self, inputs: Tensor, labels: Tensor, progress: float, normal: NormalSampler, rows: int
    ) -> tuple[Batch, Losses]:
        """Return the batch and its losses, one for each unit of `rows` rows, whose gradients are clipped."""
        batch, losses = self.objective.prepare(self.network, inputs, labels, progress, normal)
        return group_rows(batch, weigh_classes(losses, self.class_weights), rows)

    def optimisers(self, config: RunConfig) -> list[torch.optim.Optimizer]:
        self.average = make_descent(self.parameters.values(), config.training, self.config)
        return [self.average]

    def tasks(self, step: int) -> list[TrainerTask]:
        picked = take_turns(step, self.trainers.num, self.trainers.per_step, self.seeds)
        return [TrainerTask(trainer, benign_batch=0, adversarial_batch=0) for trainer in picked]

    @property
    def per_example_bound(self) -> float:
        return 1 / self.plan.expected_batch_size

    def add_canaries(self, planted: Canaries) -> None:
        """Add the included canaries to the first trainer's records; sampling rate and noise stay as planned.

        Where the unit is a person, each canary is a person with as many equal records as a step may draw.
        """
        if planted.inputs is not None and planted.labels is not None:
            if self.trainers.num > 1 or len(self.examples.shards) > 1:
                raise ModelError(
                    "input canaries need the data of one owner in memory.",
                    remedy="Set canaries.kind=gradient, or train with one trainer on data that are not in shards.",
                )
            own, included, count = self.examples.in_memory(), planted.included, self.records_per_unit
            inputs = torch.cat([own.inputs, planted.inputs[included].repeat_interleave(count, 0).to(own.inputs)])
            labels = torch.cat([own.labels, planted.labels[included].repeat_interleave(count).to(own.labels)])
            groups = own.groups
            if groups is not None:
                added = int(groups.max()) + 1 + torch.arange(int(included.sum())).repeat_interleave(count)
                groups = torch.cat([groups, added])
            self.examples = Examples(inputs, labels, own.num_classes, groups=groups)
            self._read_data()
        if planted.gradients is not None:
            self.canaries = planted.gradients
            self.canaries_in = self._canary_units(planted.included.nonzero().flatten())
            self.canary_sums = torch.zeros(len(planted.included), dtype=torch.float64)

    def _canary_units(self, canaries: Tensor) -> Tensor:
        """Return the canary of each added unit: one unit per canary."""
        return canaries

    @property
    def _canary_norm(self) -> float:
        """Return the norm of a canary's contribution: its gradient is far beyond C, and is clipped."""
        return min(LENGTH * self.plan.clip_norm, self.clip_norm)

    def extra_state(self) -> dict[str, Tensor]:
        return {} if self.canaries is None else {"canary_sums": self.canary_sums}

    def _clipped(self, inputs: Tensor, labels: Tensor, step: int, normal: NormalSampler, per: int = 1) -> Gradients:
        """Return Σ clipped contributions of rows that pass at once, `per` of them, with all their views, to a unit."""
        inputs, labels = self.views.draw(inputs, labels, normal)
        return self._clipped_rows(inputs, labels, step, normal, per * self.views.num)

    def _clipped_rows(self, inputs: Tensor, labels: Tensor, step: int, normal: NormalSampler, per: int) -> Gradients:
        """Return Σ clipped contributions of units of `per` rows."""
        batch, losses = self._prepare_losses(inputs, labels, step / self.plan.steps, normal, per)
        return self.clip(self.network, losses, batch, self.clip_norm).gradients

    def contributions(self, inputs: Tensor, labels: Tensor, step: int, groups: Tensor | None = None) -> Gradients:
        """Return Σ clipped contributions as in a release, with separate view noise; `groups` number the persons."""
        normal = normal_sampler(self.seeds.generator("step", step, "other views"), self.network.device)
        total = ExactSum(self.targets(step))
        for rows, per in self._external_units(step, len(labels), groups):
            for part in torch.split(rows, self.chunk // (per * self.views.num) * per):
                batch = inputs[part].to(self.network.device, self.network.dtype), labels[part].to(self.network.device)
                total.add(self._clipped(*batch, step, normal, per))
        return {name: value.mul_(self.per_example_bound / self.plan.clip_norm) for name, value in total.mean(1).items()}

    def _external_units(self, step: int, count: int, groups: Tensor | None) -> list[tuple[Tensor, int]]:
        """Return the rows of examples outside the training data, in units, and the rows of each unit."""
        if self.plan.num_persons is None or groups is None:
            return [(torch.arange(count), 1)]
        persons = Persons.in_memory(groups)
        return self._draw_records(persons, torch.arange(len(persons)), self.seeds.stream("step", step, "other records"))

    def _draw_records(self, persons: Persons, which: Tensor, stream: Stream) -> list[tuple[Tensor, int]]:
        """Return positions of at most K records of each of these persons, grouped by the number drawn of a person."""
        rows, counts = persons.rows(which)
        rows = rows[few_of_each(counts, self.plan.records_per_person, stream)]
        drawn = counts.clamp(max=self.plan.records_per_person)
        drawn_by_row = drawn.repeat_interleave(drawn)
        return [(rows[drawn_by_row == count], count) for count in sorted(set(drawn.tolist()))]

    def _path(self, step: int, trainer: int) -> tuple[str | int, ...]:
        """Return the name of a trainer's randomness in a step, unique to step, attempt and trainer."""
        again = ("attempt", self.attempt) if self.attempt else ()
        return ("step", step, *again, *(() if self.trainers.num == 1 else ("trainer", trainer)))

    def _clip_norm(self) -> float:
        """Return C - √d·step: rounding sums of d values to the grid moves neighbours apart by √d·step at most."""
        return self.plan.clip_norm - sqrt(self.largest_release) * self._grid.step / self.shrink

    @property
    def largest_release(self) -> int:
        """Return the largest number of values that a step releases."""
        return sum(value.numel() for value in self.parameters.values())

    def grid(self, step: int) -> Grid:
        return self._grid

    def _noise(self, step: int, trainer: int) -> Stream:
        """Return the stream of a trainer's noise in a step."""
        return self.seeds.stream(*self._path(step, trainer), "noise")

    def _samples(self, step: int, trainer: int, share: DeviceRank) -> Iterator[tuple[int, Tensor, bool]]:
        """Yield Poisson samples of the trainer's shards for this device: shard, positions, whether it takes them all.

        A single shard is read by all devices, a piece each; of several, each is read by one device. In the first
        trainer's last shard, positions behind its end are gradient canaries.
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
        """Raise unless the shards that this device reads, of any trainer, exist and are unchanged."""
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

    def _pieces(self, sample: Tensor, step: int, trainer: int, index: int, share: DeviceRank) -> Iterator[_Piece]:
        """Cut a sample into pieces that fit into memory, without splitting a unit."""
        path, device = self._path(step, trainer), self.network.device
        units, shard = [(sample, 1)], (("shard", index) if len(self.holdings[trainer]) > 1 else ())
        if self.persons is not None:
            units = self._draw_records(self.persons, sample, self.seeds.stream(*path, *shard, "records"))
        for rows, per in units:
            views = partial(self.seeds.generator, *path, "views", index, *(() if per == 1 else ("records", per)))
            rows_per_unit = per * self.views.num
            for piece in split_rows(len(rows) // per, self.chunk // rows_per_unit, device, share, self.pieces):
                view_rows = slice(piece.start * rows_per_unit, piece.stop * rows_per_unit)
                normal = sampler_by_blocks(views, view_rows, device)
                yield _Piece(rows[piece.start * per : piece.stop * per], per, normal)

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        """Yield scaled parts of Σ clipped contributions + noise; the grid's scale makes it (Σ + noise)/(C·denominator).

        So an example adds at most `per_example_bound` to the average.
        """
        scale, noise = self.shrink, self._start_noise(step, task.trainer) if share.first else None
        for index, sample, whole in self._samples(step, task.trainer, share):
            shard = self.holdings[task.trainer][index]
            records = sample[sample < len(shard)] + shard.start
            for number, piece in enumerate(self._pieces(records, step, task.trainer, index, share)):
                if whole or share.takes(number):
                    clipped = self._clipped(*self.reader.fetch(piece.rows), step, piece.normal, piece.per)
                    yield {name: value.mul_(scale) for name, value in clipped.items()}
            if self.canaries is not None and self._holds_canaries(task.trainer, index) and (whole or share.first):
                which = self.canaries_in[sample[sample >= len(shard)] - len(shard)]
                total = {name: torch.zeros_like(p) for name, p in self.targets(step).items()}
                self.canaries.add(total, which, step, self._canary_norm)
                yield {name: value.mul_(scale) for name, value in total.items()}
        if noise is not None:
            # Once per trainer, on its first device. The engine's sums are exact on the noise's grid, so noise on a part
            # of zeros is noise on the sum (docs/guarantees/noise.md).
            yield noise()

    def _start_noise(self, step: int, trainer: int) -> Callable[[], Gradients]:
        """Return a function that returns the noise of a step; for a GPU a CPU thread draws it while the GPU clips."""
        device = self.network.device
        zeros = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.targets(step).items()}
        draw = partial(add_noise, zeros, self.noise_stddev * self.shrink, self._noise(step, trainer), self._grid)
        if device.type == "cpu":
            return draw
        if self._drawing is None:
            self._drawing = ThreadPoolExecutor(1, thread_name_prefix="noise")
        future = self._drawing.submit(draw)
        return lambda: {name: value.to(device) for name, value in future.result().items()}

    def released(self, step: int, gradients: Gradients) -> None:
        if self.canaries is not None:
            self.canary_sums += self.canaries.read(gradients, step)

    def recalibrate(self) -> None:
        """Recompute what depends on the parameters alone, as in deployment; idempotent."""
        self.network.calibrate()

    def after_update(self) -> None:
        """Raise if the parameters have diverged: all gradients would be infinite, and clipping would drop them."""
        self.recalibrate()
        probe = torch.zeros(1, *self.network.input_shape, device=self.network.device, dtype=self.network.dtype)
        with torch.no_grad(), self.keeping_state():
            if not bool(self.network(probe).isfinite().all()):
                raise ModelError(
                    "the network's scores are NaN or infinite.",
                    why="The parameters have diverged.",
                    remedy="Lower training.learning_rate, and start a new run.",
                )

    def save_private(self, run: Path, config_hash: str) -> None:
        """Do nothing: the noise is used in the steps only, and the model has none."""

    def begin(self, run: Path, stretch: Stretch) -> int:
        ledger = Ledger.of(run).entered(replace(stretch, bits=self._bits(stretch.bits)))
        ledger.save(run)
        self._repeated = ledger.accounted - ledger.reached
        return ledger.attempt

    def _bits(self, machine: str) -> str:
        """Return a fingerprint of a step's arithmetic: of the machine, the seeds, and the clipped sum of public points.

        The points detect a network whose code was changed, or that draws random numbers itself. The digest is keyed by
        the seeds, so that it cannot confirm a guess about them.
        """
        clipped = self.clip(self.network, *self._probe(FEW_ROWS), self.clip_norm)
        return format(self.seeds.child("ledger", machine, tensors_digest(clipped.gradients)).root, "064x")[:32]

    def saved(self, run: Path, step: int, state: str) -> None:
        Ledger.of(run).settled(step, state).save(run)

    def distrust(self, run: Path) -> None:
        # Every process writes the same: any of them may be the only one that survives.
        Ledger.of(run).distrusted().save(run)

    def require_counted(self, run: Path, step: int) -> None:
        Ledger.of(run).require_covers(step, run)

    def use_average(self) -> None:
        self.average.use_average()
        self.recalibrate()

    def finish(self, run: Path) -> dict[str, Any]:
        self.use_average()
        ledger = Ledger.of(run)
        if ledger.open:
            # The run was killed between the last checkpoint and its entry: open stretches were made.
            ledger.made(ledger.open).save(run)
        return {"accounted_steps": ledger.accounted}

    def monitor(self, step: int) -> float:
        """Return ε of the steps so far, repeated ones included; in a search, ε of the whole search."""
        if self.plan.searched is not None:
            return self.plan.claim.epsilon
        return self.plan.mechanism(step + self._repeated).epsilon(self.plan.delta)
