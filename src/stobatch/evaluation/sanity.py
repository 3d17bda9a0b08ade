"""Signs that an evaluation flatters the model. Each says when it is raised, what it means, and what to do.

The statistical ones are raised by chance with probability at most 0.001 each on a model that does not deserve it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stobatch.evaluation.accuracy import AttackedTable
from stobatch.evaluation.statistics import chance_of_as_many, share_of, sign_test
from stobatch.files import Columns
from stobatch.results import WORST, Kind, SanityFlag
from stobatch.types import Radius, Status

FALSE_ALARM_RATE = 0.001
_ZERO_GRADIENTS = 0.01
"""The share of inputs without a gradient from which on it is worth a word."""


@dataclass(frozen=True)
class Rule:
    """One sign: its name, how bad it is, and its three sentences."""

    name: str
    level: str
    raised_if: str
    explanation: str
    remedy: str

    def flag(self, evidence: str, refutes: str | None = None) -> SanityFlag:
        """Return the sign as raised; `refutes` is the status of the certificates that it refutes, if it does."""
        return SanityFlag(**vars(self), evidence=evidence, refutes=Status(refutes) if refutes else None)


@dataclass(frozen=True)
class Probe:
    """What a few test inputs showed under one step, T steps and 4T steps, and in the widest ball of all."""

    label: NDArray[np.int64]
    one_step: NDArray[np.int64]
    usual_steps: NDArray[np.int64]
    more_steps: NDArray[np.int64]
    widest: NDArray[np.int64]
    radius: Radius
    num_classes: int


@dataclass(frozen=True)
class Certified:
    """Certificates for clean inputs: who vouches, in which units, how often each may fail, and the radii."""

    kind: str
    status: str
    norm: str
    input_range: str
    function: str
    failure_probability: float
    prediction: NDArray[np.int64]
    size: NDArray[np.float64]

    def comparable(self, unit: Radius) -> bool:
        return (self.norm, self.input_range) == (str(unit.norm), str(unit.range))

    def holds(self, table: AttackedTable, radius: Radius) -> NDArray[np.bool_]:
        """Return which clean inputs are right and certified at this radius; a table may have fewer examples."""
        count = len(table.label)
        held: NDArray[np.bool_] = (self.prediction[:count] == table.label) & (self.size[:count] >= radius.size)
        return held


@dataclass(frozen=True)
class Evidence:
    """All that the signs are read from."""

    tables: Sequence[AttackedTable]
    probe: Probe | None = None
    certified: Sequence[Certified] = field(default_factory=tuple)

    def table(self, protocol: str, function: str) -> AttackedTable | None:
        return next((t for t in self.tables if (t.protocol, t.function) == (protocol, function)), None)

    def adaptive(self) -> Iterable[AttackedTable]:
        return (table for table in self.tables if table.protocol == "adaptive")


MORE_STEPS = Rule(
    "more steps do not help",
    "warning",
    "four times the steps break no more inputs than a single step, while some still resist",
    "On a curved function iterating finds more than one step does; if it does not, gradients point nowhere useful. "
    "(On a linear model one step is already the best one, and in a ball that is too small nothing breaks at all: then "
    "all is well.)",
    "Look at the gradients: is there rounding, a hard threshold or a saturated layer in the model? Attack with square.",
)
NOT_CONVERGED = Rule(
    "attack has not converged",
    "warning",
    "four times the steps break significantly more inputs than the steps that were used",
    "The accuracies under attack are those of an attack that was cut short.",
    "Raise evaluation.adaptive_steps.",
)
WIDEST_BALL = Rule(
    "the widest ball does not reach chance",
    "warning",
    "with a radius as wide as the input range, accuracy stays significantly above chance",
    "In such a ball every image can become every other one, so a working attack always succeeds.",
    "The attack is broken or gradients are masked. Attack with square and with more steps and restarts.",
)
SINGLE_STEP = Rule(
    "single-step beats iterative",
    "warning",
    "FGSM breaks significantly more inputs than I-FGSM at the same radius",
    "The iterated attack can do all that the single step does, so its gradients lead it astray.",
    "Use more steps, restarts and the apgd attacks; look for masked gradients.",
)
TRANSFER = Rule(
    "transfer beats white-box",
    "warning",
    "attacks on the noise-free copy break significantly more inputs than attacks on the function itself",
    "An attacker with less knowledge does better: the white-box gradients are masked.",
    "Report the worse of both, attack with square, and use more noise draws per step.",
)
NO_GRADIENT = Rule(
    "zero gradients",
    "warning",
    "more than 1% of the inputs have a gradient of exactly zero",
    "Attacks that follow the cross-entropy cannot move there, so these inputs look robust. Saturated logits do this.",
    "Use apgd_dlr and square, which do not depend on the scale of the logits, or evaluate in float64.",
)
BROKEN_CERTIFICATE = Rule(
    "a certified input was broken inside its radius",
    "error",
    "attacks change the certified label within the certified radius more often than the certificates may fail",
    "This refutes the certificates: what they say is false for inputs in this test set.",
    "Do not rely on this kind of certificate. A proved one that is broken is a bug: please report it.",
)
MORE_CERTIFIED = Rule(
    "more is certified than survives",
    "warning",
    "of the same images more are proved to stay right than were right under attack",
    "A proof holds against every attack, so this cannot be: a certificate is broken, or the attacked vote had too few "
    "draws to answer as it should.",
    "Raise evaluation.vote_draws if the answer is a vote; if it stays, do not rely on these certificates: audit them.",
)
OTHER_UNITS = Rule(
    "units of radius differ",
    "warning",
    "certificates and attacks are in different norms or ranges",
    "Their radii cannot be compared, so whether attacks break certified inputs was not checked.",
    "Certify and attack in the same norm.",
)
ONE_SIDED_INPUTS = Rule(
    "inputs look like [0, 1]",
    "warning",
    "no test input has a value below 0, while the library works on [-1, 1]",
    "Radii are in units of [-1, 1]; on inputs in [0, 1] the same number is an attack twice as large.",
    "Scale pixels with x / 127.5 - 1.",
)
RULES = (
    MORE_STEPS,
    NOT_CONVERGED,
    WIDEST_BALL,
    SINGLE_STEP,
    TRANSFER,
    NO_GRADIENT,
    BROKEN_CERTIFICATE,
    MORE_CERTIFIED,
    OTHER_UNITS,
    ONE_SIDED_INPUTS,
)


def flags(evidence: Evidence, *, lowest_input: float | None = None) -> list[SanityFlag]:
    """Return every sign that the evidence gives, errors first."""
    flags = [flag for check in _CHECKS for flag in check(evidence)]
    if lowest_input is not None and lowest_input >= 0:
        flags.append(ONE_SIDED_INPUTS.flag(f"the smallest value is {lowest_input:g}"))
    return sorted(flags, key=lambda flag: flag.level != "error")


def _significantly_more(first: NDArray[Any], second: NDArray[Any], *, looks: int = 1) -> bool:
    """Return whether the first alone is true more often than the second alone, beyond chance in `looks` looks."""
    return sign_test(int((first & ~second).sum()), int((second & ~first).sum())) < FALSE_ALARM_RATE / looks


def _steps(evidence: Evidence) -> Iterable[SanityFlag]:
    probe = evidence.probe
    if probe is None:
        return
    one, usual, more = (points != probe.label for points in (probe.one_step, probe.usual_steps, probe.more_steps))
    shown = f"at {probe.radius}, of {len(one)}: one step breaks {one.sum()}, the usual {usual.sum()}, 4x {more.sum()}"
    if more.sum() <= one.sum() and not more.all():
        yield MORE_STEPS.flag(shown)
    if _significantly_more(more, usual):
        yield NOT_CONVERGED.flag(shown)


def _widest(evidence: Evidence) -> Iterable[SanityFlag]:
    probe = evidence.probe
    if probe is None:
        return
    right = probe.widest == probe.label
    if share_of(right, 1 - 2 * FALSE_ALARM_RATE).low > 1 / probe.num_classes:
        yield WIDEST_BALL.flag(f"accuracy {share_of(right)} in the widest ball, chance is {1 / probe.num_classes:.1%}")


def _single_step(evidence: Evidence) -> Iterable[SanityFlag]:
    for table in evidence.tables:
        if {"fgsm", "ifgsm"} <= set(table.attacks):
            for radius in table.radii:
                single, iterated = ~table.survives("fgsm", radius), ~table.survives("ifgsm", radius)
                if _significantly_more(single, iterated, looks=len(table.radii)):
                    yield SINGLE_STEP.flag(
                        f"{table.protocol} protocol, {table.function}, {radius}: FGSM breaks {single.sum()}, "
                        f"I-FGSM {iterated.sum()} of {len(single)}",
                    )


def _transfer(evidence: Evidence) -> Iterable[SanityFlag]:
    for adaptive in evidence.adaptive():
        published = evidence.table("published", adaptive.function)
        if published is None:
            continue
        for radius in adaptive.radii:
            copy, white_box = ~published.survives(WORST, radius), ~adaptive.survives(WORST, radius)
            if _significantly_more(copy, white_box, looks=len(adaptive.radii)):
                yield TRANSFER.flag(
                    f"{adaptive.function}, {radius}: the copy's attacks break {copy.sum()}, white-box ones "
                    f"{white_box.sum()} of {len(copy)}",
                )


def _gradients(evidence: Evidence) -> Iterable[SanityFlag]:
    for table in evidence.adaptive():
        if "gradient" in table.records:
            zero = share_of(np.asarray(table.records["gradient"]) == 0)
            if zero.value > _ZERO_GRADIENTS:
                yield NO_GRADIENT.flag(f"{zero} of the test inputs")


def _units(evidence: Evidence) -> Iterable[SanityFlag]:
    for certified in evidence.certified:
        for table in evidence.adaptive():
            if certified.function == table.function and not certified.comparable(table.radii[0]):
                yield OTHER_UNITS.flag(
                    f"{certified.kind} certificates are {certified.norm} over {certified.input_range}, attacks on "
                    f"the {table.function} are {table.radii[0].norm} over {table.radii[0].range}",
                )


def _broken(evidence: Evidence) -> Iterable[SanityFlag]:
    for certified in evidence.certified:
        for table in evidence.tables:
            if certified.function == table.function and certified.comparable(table.radii[0]):
                yield from _broken_certificates(certified, table)


def _broken_certificates(certified: Certified, table: AttackedTable) -> Iterable[SanityFlag]:
    """Yield a flag for certified inputs whose attacked point, within the radius, gets another label with confidence.

    On a vote both the certificate and the attacked answer may be wrong with the stated probability, so a few breaks
    may be chance; on a deterministic function a single one refutes. Every attack at every radius asks the vote again,
    so each is tested apart, at its share of the false-alarm rate.
    """
    count = min(len(table.label), len(certified.prediction))
    broken, checked = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    looks = [(attack, radius) for radius in table.radii for attack in table.attacks]
    chance, least = min(1.0, 2 * certified.failure_probability), 1.0
    for attack, radius in looks:
        inside = certified.size[:count] >= radius.size
        other = inside & (table.column(attack, radius)[:count] != certified.prediction[:count])
        if "abstain" in table.records:
            other &= ~table.column(attack, radius, "abstain")[:count].astype(bool)
        checked, broken = checked | inside, broken | other
        least = min(least, chance_of_as_many(int(other.sum()), int(inside.sum()), chance))
    if least < FALSE_ALARM_RATE / len(looks):
        rows = ", ".join(str(row) for row in np.flatnonzero(broken)[:10])
        yield BROKEN_CERTIFICATE.flag(
            f"{certified.kind} certificates ({certified.status}), {table.function}, {table.protocol} attacks: "
            f"{broken.sum()} of {checked.sum()} certified inputs broken (rows {rows})",
            refutes=certified.status,
        )


def _more_certified(evidence: Evidence) -> Iterable[SanityFlag]:
    for certified in evidence.certified:
        for table in evidence.tables:
            same = certified.function == table.function and certified.comparable(table.radii[0])
            if same and certified.status == Status.PROVED:
                few = table.limit(len(certified.prediction))
                for radius in few.radii:
                    held, left = certified.holds(few, radius).sum(), few.survives(WORST, radius).sum()
                    if held > left:
                        yield MORE_CERTIFIED.flag(
                            f"{certified.kind} certificates, {table.function}, {table.protocol} attacks, {radius}: "
                            f"{held} of {len(few.label)} certified, {left} right",
                        )


_CHECKS: tuple[Callable[[Evidence], Iterable[SanityFlag]], ...] = (
    _steps,
    _widest,
    _single_step,
    _transfer,
    _gradients,
    _units,
    _broken,
    _more_certified,
)


def certified_from(records: Columns, kinds: Sequence[Kind], failure_probability: float) -> list[Certified]:
    """Return the certificates as the checks need them, from the records and the summary of `certify`."""
    abstain = np.asarray(records["abstain"], dtype=bool)
    return [
        Certified(
            kind=kind.name,
            status=kind.status,
            norm=kind.norm,
            input_range=kind.input_range,
            function=kind.function,
            failure_probability=failure_probability if kind.failure_probability is None else kind.failure_probability,
            prediction=np.asarray(records["prediction"]),
            size=np.where(abstain & (kind.status is Status.PROVED), 0.0, np.asarray(records[kind.column])),
        )
        for kind in kinds
    ]
