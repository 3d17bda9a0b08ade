"""Try to break certificates: the strongest attacks inside every certified ball, each input at its own radius.

A single pass is broken by one point. A vote is a matter of probabilities, and its certificate may fail now and then by
its own account, so there a break is tested in two steps, each on draws that nothing before them has seen:

1. does another class lead at the point found? (a sign test for each input)
2. certified again, does the same input get a radius that reaches past that point, which is now known to be bad, more
   often than the certificate's failure probability allows? (a binomial test over all broken inputs)

Counting broken inputs would not do for the second step: inputs that are certified together share their draws, so an
honest certificate of failure probability 5% may fail on all of them at once, one time in twenty.

**Guarantee.** Let c be the confidence. Where all claims of a verifier hold, one of its kinds is refuted with
probability at most 1 - c, for any attack: half of that is shared by the sign tests of all inputs and kinds,
half by the binomial tests of the kinds (Bonferroni). On a single pass nothing is left to chance. A kind that is not
refuted is not proved: the attacks may have been too weak. One without a certified ball, or whose tests have too few
draws to reach their level, is not tested. Assumes what the verifier assumes of its draws.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import exp

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from stobatch.attacks.goals import margin
from stobatch.auditing.certificate_attacks import AttackedCertificates, FalsifierSettings, break_pass, break_vote
from stobatch.auditing.subject import Audited
from stobatch.data import Examples
from stobatch.errors import DataError, ModelError, RunError
from stobatch.evaluation.functions import Deployed, SinglePass, Vote
from stobatch.evaluation.tables import test_examples
from stobatch.files import PRIVATE, Columns, write_tensors
from stobatch.loading import as_certified, require_weights
from stobatch.models import budget_mb
from stobatch.progress import Tick, no_progress
from stobatch.results import CertificateDetails, CertificateSummary, Finding
from stobatch.types import Verdict
from stobatch.verifier import CertificateKind, Flags, Labels, Verifier
from stobatch.votes.confidence import Floats

COLUMNS = (
    *("index", "label", "radius", "found", "margin", "distance", "attack"),
    *("broken", "broken_float64", "chance", "retests", "overclaims"),
)


@dataclass(frozen=True)
class Attempt:
    """What was tried on one kind's certificates: columns with one entry per attacked input, and the breaking points.

    `points` are those of the inputs marked `broken`, in their order; columns of parts add up to those of the whole.
    """

    columns: Columns
    points: Tensor


def nearest(
    verifier: Verifier,
    certificates: AttackedCertificates,
    settings: FalsifierSettings,
    generator: torch.Generator,
    *,
    memory_mb: int = 512,
) -> Labels:
    """Return the rows worth attacking: certified, with the smallest lead for the size of their ball first."""
    rows = certificates.certified()
    if settings.num_inputs is None or len(rows) <= settings.num_inputs:
        return rows
    certified = certificates.part(rows)
    function = _deployed(verifier, certificates.kind, settings, memory_mb)
    points, goal = certified.ball(function.network).centre, certified.goal(function.network)
    victim = next(iter(function.victims(points, goal, generator).values()))
    scores = victim.draw_to_compare(generator)
    chunk = max(1, function.rows // victim.passes)
    with torch.no_grad():
        logits = torch.cat([scores(part) for part in torch.split(points, chunk)])
    assert goal.labels is not None
    lead = -margin(logits, goal.labels).double().cpu().numpy()
    chosen: Labels = rows[np.argsort(lead / certified.radius, kind="stable")[: settings.num_inputs]]
    return chosen


def falsify(
    verifier: Verifier,
    certificates: AttackedCertificates,
    settings: FalsifierSettings,
    generator: torch.Generator,
    *,
    tests: int | None = None,
    memory_mb: int = 512,
    tick: Tick = no_progress,
) -> Attempt:
    """Attack every certificate given; `nearest` says which are worth it, `finding_of` what the outcome means.

    For a part of the inputs, `tests` is how many inputs are attacked in all parts and for all kinds of the verifier;
    by default this is the only part, and every kind has as many.

    **Guarantee.** Every point marked broken is in the range and within its input's radius, computed in float64. On a
    single pass the deployed network gives it another label. On a vote that is so but for a chance of
    (1 - confidence)/2 over all tests.
    """
    certificates, kind = certificates.part(certificates.certified()), certificates.kind
    function = _deployed(verifier, kind, settings, memory_mb)
    if not len(certificates.index):
        tick(1.0)
        return Attempt({name: [] for name in COLUMNS}, certificates.inputs)
    if function.deterministic:
        worst = break_pass(verifier.network, certificates, settings, generator, memory_mb, tick)
    else:
        tests = len(certificates.index) * len(verifier.kinds) if tests is None else tests
        level = (1 - settings.confidence) / 2 / tests
        worst = break_vote(verifier, certificates, settings, generator, memory_mb, level, tick)
    distance = certificates.ball(verifier.network).distance(worst.points).cpu().numpy()
    retests, overclaims = _certify_again(verifier, certificates, worst.broken, distance, settings.retests, generator)
    columns: Columns = {
        "index": certificates.index.tolist(),
        "label": certificates.label.tolist(),
        "radius": certificates.radius.tolist(),
        "found": worst.found.tolist(),
        "margin": worst.margin.tolist(),
        "distance": distance.tolist(),
        "attack": worst.attack,
        "broken": worst.broken.tolist(),
        "broken_float64": worst.broken_float64,
        "chance": worst.chance.tolist(),
        "retests": retests.tolist(),
        "overclaims": overclaims.tolist(),
    }
    return Attempt(columns, worst.points[torch.from_numpy(worst.broken).to(worst.points.device)].cpu())


def finding_of(
    kind: CertificateKind,
    columns: Columns,
    settings: FalsifierSettings,
    *,
    certified: int,
    num_kinds: int,
    certificates: str | None = None,
) -> Finding:
    """Return what the attempts on one of `num_kinds` kinds mean; `columns` of all parts, `certified` inputs in all.

    `certificates` is the `config_hash` of their rows, where a run holds them.
    """
    broken, attacked = np.asarray(columns["broken"], dtype=bool), len(columns["broken"])
    retests, overclaims = sum(columns["retests"]), sum(columns["overclaims"])
    level = (1 - settings.confidence) / 2 / num_kinds
    allowed = int(binom.isf(level, retests, kind.failure_probability)) if retests else 0
    refuted = overclaims > allowed if kind.failure_probability else bool(broken.any())
    powerless = _why_untestable(kind, settings, attacked, num_kinds)
    by_attack = Counter(name for name, hit in zip(columns["attack"], broken, strict=True) if hit)
    exact = [flag for flag in columns["broken_float64"] if flag is not None]
    chance = f", but for a chance of {kind.failure_probability:g}" if kind.failure_probability else ""
    return Finding(
        instrument="certificates",
        about=kind.name,
        claim=f"{kind.status}: within its radius ({kind.unit.norm} over {kind.unit.range}) no input gets another label "
        f"from the {kind.function.replace('_', ' ')}{chance} ({kind.source})",
        claim_status=kind.status,
        verdict=Verdict.REFUTED if refuted else Verdict.NOT_TESTED if powerless else Verdict.CONSISTENT,
        statement=_statement(kind, certified, attacked, int(broken.sum()), sum(exact), retests, overclaims, allowed),
        threat_model="white box: knows the network and the law of its noise, not the draws; any point of the ball",
        attack=f"{', '.join(settings.attacks)}; {settings.steps} steps, {settings.restarts} starts, "
        f"{settings.queries} queries, {settings.random_points} corners and random points",
        confidence=settings.confidence,
        details=CertificateDetails(
            certified=certified,
            attacked=attacked,
            broken=int(broken.sum()),
            broken_float64=sum(exact) if exact else None,
            broken_by=dict(by_attack),
            smallest_margin=min(columns["margin"], default=None),
            smallest_radius=min(columns["radius"], default=None),
            largest_radius=max(columns["radius"], default=None),
            failure_probability=kind.failure_probability,
            retests=retests,
            overclaims=overclaims,
            allowed_overclaims=allowed,
            could_not_refute=None if refuted else powerless or None,
            **({} if certificates is None else {"certificates": certificates}),
        ),
    )


def _why_untestable(kind: CertificateKind, settings: FalsifierSettings, attacked: int, num_kinds: int) -> str:
    """Return why even attacks that always win would refute nothing; an empty string where they would refute.

    A vote is judged by Hoeffding's inequality or the sign test, whose smallest chances are e^(-n/2) and 2^-n. That a
    certificate fails too often is said by a binomial test, which needs more retests than chance may fail.
    """
    if not attacked:
        return "no input has a certified ball"
    level = (1 - settings.confidence) / 2
    if kind.function == Vote.name and exp(-settings.judging_draws / 2) > level / (attacked * num_kinds):
        return f"{settings.judging_draws} draws can never show that a label lost"
    chance, retests = kind.failure_probability, settings.retests
    if chance and binom.isf(level / num_kinds, retests, chance) >= retests:
        return f"{retests} certificates made anew can never show more failures than chance explains"
    return ""


def _deployed(verifier: Verifier, kind: CertificateKind, settings: FalsifierSettings, memory_mb: int) -> Deployed:
    if kind.function == SinglePass.name:
        return SinglePass.of(verifier.network, memory_mb)
    if kind.function == Vote.name:
        return Vote.of(verifier, memory_mb, settings.noise_draws)
    raise ModelError(
        f"'{kind.name}' certifies the function '{kind.function}', which nothing here can attack.",
        remedy=f"Name {SinglePass.name} or {Vote.name} as the function.",
    )


def _certify_again(
    verifier: Verifier,
    certificates: AttackedCertificates,
    broken: Flags,
    distance: Floats,
    times: int,
    generator: torch.Generator,
) -> tuple[Labels, Labels]:
    """Count, for each input, how often it was certified again, and how often past a point that is known to be bad.

    Broken inputs only, `times` in all, and none where one break is enough. Each time it is the turn of the input that
    did so most often (a success and a failure made up for each): claims that are too large by luck do not come again,
    those that are too large by mistake do.

    **Guarantee.** The points are fixed before these draws. So each certificate fails with at most its own failure
    probability, given all that came before, and the number of failures is at most that of a binomial variable.
    """
    tried, past = np.zeros(len(broken), dtype=np.int64), np.zeros(len(broken), dtype=np.int64)
    rows = np.flatnonzero(broken)
    for _ in range(times if len(rows) and certificates.kind.failure_probability else 0):
        row = rows[((past[rows] + 1) / (tried[rows] + 2)).argmax()]
        one = certificates.inputs[row : row + 1]
        answers = verifier.verify(one, generator)
        again = AttackedCertificates.of(certificates.kind, one, answers.label, answers.columns())
        tried[row] += 1
        past[row] += again.label[0] == certificates.label[row] and again.radius[0] >= distance[row]
    return tried, past


def _statement(
    kind: CertificateKind, certified: int, attacked: int, broken: int, exact: int, retests: int, over: int, allowed: int
) -> str:
    if not attacked:
        return "No input has a certified ball, so there is nothing to break."
    balls = f"{attacked} of {certified} certified balls were attacked"
    rounding = f"; in float64 {exact} would" if exact > broken else ""
    if not broken:
        return f"{balls}, and in none a point was found that gets another label{rounding}."
    outcome = f"{balls}, and {broken} hold a point that gets another label{rounding}"
    if not kind.failure_probability:
        return f"{outcome}."
    return (
        f"{outcome}; certified anew by fresh draws, these inputs got a radius beyond such a point in {over} of "
        f"{retests} cases, where chance explains up to {allowed}."
    )


_BALLS_AT_ONCE = 50
_NOTHING: Columns = {name: [] for name in (*COLUMNS, "row", "point")}


def of_certificates(audited: Audited) -> list[Finding]:
    """Attack every kind of certificate that `certify` left, inside the balls nearest to a border."""
    trained, run = audited.trained(), audited.run
    document = CertificateSummary.read_if_there(run)
    if document is None:
        raise RunError(f"{run.path} is not certified.", remedy=f"Certify it first: `{run.command('certify')}`.")
    require_weights(trained, document.weights_sha256, "certificates.json", "certify")
    model = replace(trained, config=as_certified(audited.config, document))
    made_by, chosen = document.config_hash, document.kinds[0].name
    records = run.records(
        "certify", config_hash=made_by, expected_rows=document.rows, weights_sha256=document.weights_sha256
    ).read()
    test = test_examples(model, audited.dataset, document.rows, audited.quiet)
    if test.labels.tolist() != records["label"]:
        raise DataError(
            f"the certificates in {run.path} are for other test data.", remedy="Certify the same data first."
        )
    ways = {way.kinds[0].name: way for way in model.verifiers()}
    if chosen not in ways:
        raise RunError(f"{run.path / 'certificates.json'} names no certificate of this model.", remedy="Certify again.")
    verifier = ways[chosen]
    return [_Falsified(audited, verifier, kind, test, records, made_by).finding() for kind in verifier.kinds]


@dataclass(frozen=True)
class _Falsified:
    """One kind of certificate under attack."""

    audited: Audited
    verifier: Verifier
    kind: CertificateKind
    test: Examples
    records: Columns
    certified_by: str

    @property
    def settings(self) -> FalsifierSettings:
        given = self.audited.settings
        return FalsifierSettings(
            num_inputs=given.num_inputs,
            steps=given.attack_steps,
            restarts=given.restarts,
            judging_draws=given.judging_draws,
            confidence=self.audited.confidence,
        )

    def finding(self) -> Finding:
        audited, settings = self.audited, self.settings
        memory_mb = budget_mb(audited.config.machine)
        whole = AttackedCertificates.of(self.kind, self.test.inputs, self.records["prediction"], self.records)
        stream = audited.root.generator("certificates", self.kind.name)
        chosen = whole.part(nearest(self.verifier, whole, settings, stream, memory_mb=memory_mb))
        tests = len(chosen.index) * len(self.verifier.kinds)

        def rows_of(start: int, count: int, tick: Tick) -> Columns:
            part = chosen.part(np.arange(start, start + count))
            own = audited.root.generator("certificates", self.kind.name, start)
            attempt = falsify(self.verifier, part, settings, own, tests=tests, memory_mb=memory_mb, tick=tick)
            points: list[list[float] | None] = [None] * count
            for row, point in zip(np.flatnonzero(attempt.columns["broken"]), attempt.points, strict=True):
                points[row] = point.flatten().tolist()
            rest = {name: column for name, column in attempt.columns.items() if name != "index"}
            return {**rest, "row": attempt.columns["index"], "point": points}

        identity = [self.certified_by, settings.to_dict(), self.test.fingerprint()]
        name = f"certificates-{self.kind.name}"
        table = audited.table(name, identity, len(chosen.index), _BALLS_AT_ONCE, rows_of) if tests else _NOTHING
        self._keep_broken(table)
        num_kinds, certified = len(self.verifier.kinds), len(whole.certified())
        return finding_of(
            self.kind, table, settings, certified=certified, num_kinds=num_kinds, certificates=self.certified_by
        )

    def _keep_broken(self, table: Columns) -> None:
        """Save the broken inputs and the points that broke them for the owner alone: test data are private."""
        broken = [row for row, point in enumerate(table["point"]) if point is not None]
        path = self.audited.run.path / PRIVATE / "evidence" / f"certificates-{self.kind.name}.safetensors"
        path.unlink(missing_ok=True)
        if broken:
            which = torch.tensor([table["row"][row] for row in broken])
            shape = self.test.inputs.shape[1:]
            tensors = {
                "index": which,
                "input": self.test.inputs[which],
                "point": torch.tensor([table["point"][row] for row in broken]).reshape(-1, *shape),
                "radius": torch.tensor([table["radius"][row] for row in broken], dtype=torch.float64),
                "certified_label": torch.tensor([table["label"][row] for row in broken]),
            }
            weights = self.audited.trained().weights_sha256
            metadata = {"config_hash": self.audited.config.training_hash, "weights_sha256": weights}
            write_tensors(path, tensors, metadata, private=True)
