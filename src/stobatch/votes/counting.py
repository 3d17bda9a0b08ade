"""Certificates by vote for any deterministic per-example classifier behind noise (Cohen et al., 2019).

Some draws choose the class; fresh ones count how often the classifier predicts it. With a fixed number of draws the
count gives a Clopper-Pearson bound. Most inputs are clear cases, though: for given radii drawing may stop as soon as
they are decided, and a confidence sequence (`votes.confidence`) keeps the bound valid then.

Every draw of noise serves all inputs that are still undecided. For each input the draws are independent; between inputs
they are the same, so errors of two certificates may coincide. Each certificate's own failure probability is unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stobatch.dp.mixing import FEW_ROWS, mixing_experiment, mixing_layers
from stobatch.errors import DataError, ModelError
from stobatch.models.validators import unchanged
from stobatch.settings import Settings, setting
from stobatch.types import PAPER_RANGE, InputRange, Norm, Radius, Status
from stobatch.verifier import ASSUMPTIONS, Certificate, CertificateKind, Flags, Labels, Search
from stobatch.votes.confidence import LOOK_EVERY, Floats, SequentialTest, clopper_pearson, draw_until_decided
from stobatch.votes.noise import GaussianNoise, SmoothingNoise, split_generator

Scorer = Callable[[Tensor], Tensor]


class VoteSettings(Settings):
    """How many draws, how sure, and how many rows pass the network at once."""

    failure_probability: float = setting(0.001, above=0, below=1, doc="The chance that an input's certificate is wrong")
    selection_draws: int = setting(100, at_least=1, doc="Draws that choose the class and are not counted")
    draws: int = setting(10_000, at_least=1, doc="Draws that are counted for an input, at most")
    rows_at_once: int = setting(
        2_000, at_least=1, doc="Noisy inputs in one forward pass; changes speed and memory only"
    )


@dataclass(frozen=True, repr=False)
class VoteCertificates:
    """Certificates of a batch of inputs; every column has one entry per input.

    `draws` are those counted; the ones that chose the class are not included. Where nothing was proved the input
    abstains and its radii are 0; the label is then only the class that was chosen.
    """

    label: Labels
    abstain: Flags
    top_lower: Floats
    draws: Labels
    radius_l1: Floats
    radius_l2: Floats
    radius_linf: Floats
    range: InputRange
    failure_probability: float
    """The chance, for each input by itself, that its certificate is wrong."""

    def radius(self, norm: Norm) -> Floats:
        """Return the certified radii in one norm, in units of `range`."""
        return {Norm.L1: self.radius_l1, Norm.L2: self.radius_l2, Norm.LINF: self.radius_linf}[norm]

    def certified(self, radius: Radius) -> Flags:
        """Return whether the label is proved to hold throughout a ball of this radius."""
        return ~self.abstain & (self.radius(radius.norm) >= radius.to(self.range).size)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all columns by name."""
        return {name: values for name, values in vars(self).items() if name not in ("range", "failure_probability")}

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> Certificate:
        """Return the certificate of one input, with its l2 radius."""
        radius = Radius(float(self.radius_l2[index]), Norm.L2, self.range)
        abstain = bool(self.abstain[index])
        return Certificate(int(self.label[index]), abstain, radius, Status.PROVED, self.failure_probability)

    def __repr__(self) -> str:
        radius = f"{np.median(self.radius_l2[~self.abstain]):.4g}" if not self.abstain.all() else "none"
        return (
            f"<{len(self)} inputs, {int(self.abstain.sum())} abstain; {Status.PROVED}, each wrong with probability at "
            f"most {self.failure_probability:g}; of the vote, not of a single pass; median radius of the others l2 "
            f"{radius} over {self.range}; assuming {', '.join(ASSUMPTIONS)}>"
        )


class SmoothedClassifier:
    """The class that a network predicts most often under fresh noise, and the radius within which that cannot change.

    `network` is everything behind the noise: the whole classifier for noise at the input, and all but the first layer
    for `HiddenNoise`. Noise and radii are in units of the inputs, which lie in `input_range`.

    **Guarantee.** For each input separately, with probability at least 1 - failure_probability over the draws: either
    it abstains, or its label is the most probable class under noise, and stays so for every perturbation up to
    `radius(norm)`. The class is chosen on draws of their own, so its count is binomial. Assumes that the network is
    deterministic and treats each example by itself (tried out on the inputs), exact arithmetic, ideal random numbers.
    """

    def __init__(
        self,
        network: Scorer,
        noise: SmoothingNoise,
        num_classes: int,
        settings: VoteSettings | None = None,
        *,
        input_range: InputRange = PAPER_RANGE,
    ) -> None:
        self.network, self.noise, self.num_classes = network, noise, num_classes
        self.settings, self.input_range = settings or VoteSettings(), input_range

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        """Return what each column of radii means."""
        return tuple(
            CertificateKind(
                f"smoothed {norm}",
                Status.PROVED,
                "randomised smoothing by vote (stobatch.votes.noise)",
                Radius(1.0, norm, self.input_range),
                self.settings.failure_probability,
                ASSUMPTIONS,
            )
            for norm in Norm
        )

    def certify(
        self, inputs: Tensor, generator: torch.Generator, radii: Sequence[Radius] | None = None
    ) -> VoteCertificates:
        """Return labels and radii: the largest that `settings.draws` draws prove, or decisions about the given `radii`.

        With `radii`, an input stops drawing as soon as each of them is proved or given up: its p_A is shown to be too
        small, or the remaining draws cannot prove it. Giving up never gives a false certificate, at worst a missing
        one; where p_A barely suffices, a fixed number of draws proves a little more than early stopping does.
        Include Radius(0) to decide the label where no radius can be proved.
        """
        counter = self._counter(inputs)
        choosing, counting = split_generator(generator)
        positions, num_inputs = np.arange(len(inputs)), prod(inputs.shape[1:])
        label = counter.votes(positions, self.settings.selection_draws, choosing).argmax(1)
        max_draws, failure = self.settings.draws, self.settings.failure_probability
        if radii is None:
            hits = counter.hits(positions, label, max_draws, counting)
            draws = np.full(len(inputs), max_draws)
            top_lower, _ = clopper_pearson(hits, max_draws, failure)
        else:
            top_lower, draws = draw_until_decided(
                lambda undecided, more: counter.hits(undecided, label, more, counting),
                len(inputs),
                self.required_probabilities(radii, num_inputs),
                max_draws,
                failure,
            )
        return self.certificates(label, top_lower, draws, num_inputs)

    def required_probabilities(self, radii: Sequence[Radius], num_inputs: int) -> Floats:
        """Return the probabilities of the top class that prove these radii, in increasing order."""
        sizes = [(radius.to(self.input_range).size, radius.norm) for radius in radii]
        return np.unique([self.noise.required_top_probability(*size, num_inputs) for size in sizes])

    def certificates(self, label: Tensor, top_lower: Floats, draws: Labels, num_inputs: int) -> VoteCertificates:
        """Return the certificates that follow from lower bounds on the probability of the chosen class."""
        # All other classes together have probability at most 1 - top_lower, hence so has each of them.
        radii = {f"radius_{norm}": self.noise.radius(norm, top_lower, 1 - top_lower, num_inputs) for norm in Norm}
        return VoteCertificates(
            label.cpu().numpy(),
            abstain=top_lower <= 0.5,
            top_lower=top_lower,
            draws=draws,
            range=self.input_range,
            failure_probability=self.settings.failure_probability,
            **radii,
        )

    def predict(self, inputs: Tensor, generator: torch.Generator, draws: int = 1000) -> tuple[Labels, Flags]:
        """Return the most probable class under noise, and whether to abstain.

        **Guarantee.** An input that does not abstain gets a wrong class with probability at most failure_probability:
        the two leading classes are compared by a two-sided sign test (Hung and Fithian, 2019).
        """
        from scipy.stats import binom

        top = self._counter(inputs).votes(np.arange(len(inputs)), draws, generator).topk(2)
        first, second = top.values.cpu().numpy().T
        p_value = 2 * binom.sf(first - 1, first + second, 0.5)
        return top.indices[:, 0].cpu().numpy(), p_value > self.settings.failure_probability

    def _counter(self, inputs: Tensor) -> VoteCounter:
        if not len(inputs):
            raise DataError("there are no inputs to certify.", remedy="Give at least one.")
        if not bool(((inputs >= self.input_range.low) & (inputs <= self.input_range.high)).all()):
            raise DataError(
                f"inputs to certify are outside {self.input_range} or NaN.",
                remedy="Rescale them, or give their range with input_range=InputRange(low, high).",
            )
        counter = VoteCounter(self.network, self.noise, inputs, self.num_classes, self.settings.rows_at_once)
        counter.require_per_example()
        return counter


class VoteSearch(Search):
    """`SmoothedClassifier.certify` in blocks of draws.

    **Guarantee.** As for `certify`. With `radii` or `anytime` the bounds hold for every number of draws at once
    (confidence sequences), so the caller may stop at any time. Otherwise the number of draws is fixed beforehand, the
    bound is Clopper-Pearson's, and nothing may be read before the last draw.
    """

    def __init__(
        self,
        classifier: SmoothedClassifier,
        inputs: Tensor,
        generator: torch.Generator,
        radii: Sequence[Radius] | None,
        *,
        anytime: bool,
    ) -> None:
        self.classifier, self.inputs, self.anytime = classifier, inputs, anytime
        self._choosing, self._counting = split_generator(generator)
        self._counter: VoteCounter | None = None
        settings, num_inputs = classifier.settings, prod(inputs.shape[1:])
        thresholds = np.array([]) if radii is None else classifier.required_probabilities(radii, num_inputs)
        self._test = SequentialTest(len(inputs), thresholds, settings.draws, settings.failure_probability)
        self._stops_early = radii is not None

    def step(self) -> bool:
        """Choose the classes, then make a block of draws; return whether draws are left."""
        if self._counter is None:
            self._counter = self.classifier._counter(self.inputs)
            positions, draws = np.arange(len(self.inputs)), self.classifier.settings.selection_draws
            self._label = self._counter.votes(positions, draws, self._choosing).argmax(1)
            return True
        test = self._test
        if test.is_running:
            draws, undecided = min(LOOK_EVERY, test.max_draws - test.total_draws), test.undecided
            test.update(self._counter.hits(undecided, self._label, draws, self._counting), draws)
            if not self._stops_early:
                # Without thresholds nothing is ever decided: every draw improves the bound.
                test.undecided = undecided
        return test.is_running

    def drop(self, rows: slice) -> None:
        dropped = np.arange(len(self.inputs))[rows]
        self._test.undecided = np.setdiff1d(self._test.undecided, dropped)

    def read(self) -> VoteCertificates:
        test = self._test
        if self._stops_early or self.anytime:
            top_lower = test.lower_bounds()
        elif test.total_draws == test.max_draws:
            top_lower, _ = clopper_pearson(test.successes, test.max_draws, test.failure)
        else:
            raise ModelError(
                f"{test.total_draws} of {test.max_draws} draws are made.",
                why="Their number was fixed, and the bound for a fixed number holds after the last draw only.",
                remedy="Search with anytime=True.",
            )
        return self.classifier.certificates(self._label, top_lower, test.draws, prod(self.inputs.shape[1:]))


def certify(
    module: nn.Module,
    inputs: Tensor,
    stddev: float,
    draws: int = 10_000,
    failure_probability: float = 0.001,
    *,
    selection_draws: int = 100,
    input_range: InputRange = PAPER_RANGE,
    generator: torch.Generator | None = None,
    rows_at_once: int = 2_000,
) -> VoteCertificates:
    """Certify any module that treats each example by itself, by vote under Gaussian noise.

    What is certified, and has to be deployed, is the vote: the class that `module` predicts most often for
    input + N(0, stddev²). `module` maps a batch of noisy inputs to one score per class; it is called as it is, so call
    `module.eval()` first.

    **Guarantee.** For each input separately, with probability at least 1 - failure_probability over the draws: either
    it abstains, or its label is the most probable class under the noise and stays so within its radius. Assumes that
    the module is deterministic and treats each example by itself, which is checked on the inputs; exact arithmetic;
    and ideal random numbers, for which PyTorch's generator is used.

    >>> certificates = certify(nn.Linear(4, 3), torch.zeros(2, 4), stddev=0.5, draws=1000)
    >>> certificates.radius(Norm.L2).shape, certificates.certified(Radius(10.0, Norm.L2)).tolist()
    ((2,), [False, False])
    """
    if not len(inputs):
        raise DataError("there are no inputs to certify.", remedy="Give at least one.")
    settings = VoteSettings(
        failure_probability=failure_probability,
        selection_draws=selection_draws,
        draws=draws,
        rows_at_once=rows_at_once,
    )
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    with torch.no_grad(), unchanged(module):
        scores = module(inputs[:FEW_ROWS])
        if scores.ndim != 2:
            raise ModelError(
                f"the module returns {tuple(scores.shape)} for {len(inputs[:FEW_ROWS])} inputs.",
                remedy="Return one row of scores, one for each class, for each input.",
            )
        classifier = SmoothedClassifier(
            module, GaussianNoise(stddev), scores.shape[1], settings, input_range=input_range
        )
        return classifier.certify(inputs, generator)


class VoteCounter:
    """Count the classes that a network predicts for given inputs under fresh draws of noise."""

    def __init__(
        self, network: Scorer, noise: SmoothingNoise, inputs: Tensor, num_classes: int, rows_at_once: int
    ) -> None:
        self.network, self.noise, self.num_classes, self.rows = network, noise, num_classes, rows_at_once
        self.shape, self.noise_free = tuple(inputs.shape[1:]), noise.noise_free(inputs)

    @property
    def tile(self) -> int:
        """Return the largest number of rows in one pass."""
        return min(self.rows, LOOK_EVERY * len(self.noise_free))

    def votes(self, positions: Labels, draws: int, stream: torch.Generator) -> Tensor:
        """Return the votes per class, inputs x classes, for the inputs at these positions."""
        votes = torch.zeros(len(positions), self.num_classes, dtype=torch.int64, device=self.noise_free.device)
        for part, predictions in self._predictions(positions, draws, stream):
            votes[part] += nn.functional.one_hot(predictions, self.num_classes).sum(0)
        return votes

    def hits(self, positions: Labels, label: Tensor, draws: int, stream: torch.Generator) -> Floats:
        """Return how many draws predict the label, for the inputs at these positions; `label` is of all inputs."""
        hits = torch.zeros(len(positions), dtype=torch.int64, device=self.noise_free.device)
        label = label[torch.from_numpy(positions).to(label.device)]
        for part, predictions in self._predictions(positions, draws, stream):
            hits[part] += (predictions == label[part]).sum(0)
        counts: Floats = hits.cpu().double().numpy()
        return counts

    @torch.no_grad()
    def _predictions(self, which: Labels, draws: int, stream: torch.Generator) -> Iterator[tuple[slice, Tensor]]:
        """Yield predicted classes, draws x inputs, in tiles of at most `rows` rows, without waiting for the device."""
        draws_at_once = min(LOOK_EVERY, draws, self.rows)
        # Tiles of equal size: a small last tile would cost almost as much as a full one.
        images = ceil(len(which) / ceil(len(which) * draws_at_once / self.rows))
        positions = torch.from_numpy(which).to(self.noise_free.device)
        # Noise is drawn in blocks of one size, so that the draws do not depend on `rows_at_once`.
        finite = torch.ones((), dtype=torch.bool, device=self.noise_free.device)
        for first in range(0, draws, LOOK_EVERY):
            shifts = self.noise.draw((LOOK_EVERY, *self.shape), stream)[: draws - first].to(self.noise_free)
            for start in range(0, len(which), images):
                part = slice(start, start + images)
                base = self.noise_free[positions[part]].unsqueeze(0)
                for shift in torch.split(shifts, draws_at_once):
                    scores = self.network((base + shift.unsqueeze(1)).flatten(0, 1))
                    finite &= scores.isfinite().all()
                    yield part, scores.argmax(1).reshape(len(shift), -1)
        if not bool(finite):
            raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")

    @torch.no_grad()
    def require_per_example(self) -> None:
        """Raise unless the network is deterministic and per-example on noisy inputs, in small and in full batches."""
        if isinstance(self.network, nn.Module):
            for name in mixing_layers(self.network):
                if self.network.get_submodule(name).training:
                    raise ModelError(
                        f"layer '{name}' is in training mode: each output depends on the whole batch.",
                        remedy="Call network.eval(), or use stobatch.models.replace_batch_norm(module).",
                    )
        for count in sorted({FEW_ROWS, self.tile} - {1}):
            stream = torch.Generator().manual_seed(1)
            noise = self.noise.draw((count, *self.shape), stream).to(self.noise_free)
            rows = self.noise_free[torch.arange(count, device=self.noise_free.device) % len(self.noise_free)] + noise
            if (shape := self.network(rows.clone()).shape) != (expected := (count, self.num_classes)):
                raise ModelError(
                    f"{count} inputs give scores of shape {tuple(shape)}, not {expected}.",
                    remedy="Return one score per class and example, and give the right num_classes.",
                )
            if mixing_experiment(self.network, rows, (0.0, 10 * float(rows.abs().max())), stream):
                raise ModelError(
                    f"the same example gets different scores in two batches of {count}.",
                    why="Some layer mixes examples or draws random numbers, so a vote is not about one input.",
                    remedy="Call network.eval(), and remove layers that mix examples.",
                )
