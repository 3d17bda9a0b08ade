"""A random sample of rows, answered and certified again from the weights and the test data.

Bounds are deterministic: each radius must be proved again. Votes are drawn afresh: what was recorded is refuted only
where chance cannot explain the difference, with a false-alarm rate of `FALSE_ALARM` over all rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stobatch import data
from stobatch.auditing.vote_counts import can_count, count
from stobatch.data import Dataset, Examples
from stobatch.errors import StobatchError
from stobatch.files import Columns
from stobatch.results import CertificateSummary, Check, Scores
from stobatch.runs import commit
from stobatch.seeds import Seeds
from stobatch.sound.verifiers import BoundsVerifier, MarginsVerifier, VotesVerifier
from stobatch.verification.checks import agrees, differs, not_checked
from stobatch.verification.subject import Subject
from stobatch.verifier import ForeignVerifier, Verifier
from stobatch.votes.confidence import LOOK_EVERY, clopper_pearson

FALSE_ALARM = 1e-9
_DRAWS = 2000
"""Fresh draws for each row of a vote, at most."""
_ROUNDING = 1e-5
"""Of the largest score: two machines may disagree on which of two scores is larger if they are this near."""
_ROUNDING_OF_RADII = 1e-3
"""Of a radius whose rule is another package's: how it rounds is not known here."""


def data_of(subject: Subject, dataset: Dataset | None) -> Dataset | str:
    """Return the run's data, handed over or read by name; or why there are none."""
    if dataset is not None:
        return dataset
    recorded = subject.data
    if not recorded.public and recorded.name != subject.config.data.name:
        return "the test data were handed over in Python: hand them over again"
    try:
        root = subject.config.machine.data_root
        return data.load(subject.config.data, root=None if root is None else Path(root))
    except StobatchError as error:
        return f"the test data cannot be read here: {error}"


def sample_checks(subject: Subject, dataset: Dataset, size: int, seeds: Seeds) -> Iterator[Check]:
    test = dataset.test
    yield _check_test_data(subject, test)
    yield _check_training_data(subject, dataset)
    scores = Scores.read_if_there(subject.run)
    for entry in scores.under_attack if scores else ():
        if scores and entry.function == "single_pass":
            rows = subject.rows("attack", entry.records, entry.rows, scores.weights_sha256, lambda column: None)
            yield _check_answers(subject, test, rows, _sample_rows(len(rows["label"]), size, seeds), "scores.json")
            break
    document = CertificateSummary.read_if_there(subject.run)
    if document is not None:
        verifier, _ = subject.as_certified(document)
        rows = subject.certified_rows(document, verifier)
        chosen = _sample_rows(document.rows, size, seeds)
        if rows["label"] != test.labels[: document.rows].tolist():
            yield differs("sample certified again", "the certificates are for other labels", "certificates.json")
        else:
            yield _check_certificates(subject, verifier, test, rows, chosen, seeds)


def _check_test_data(subject: Subject, test: Examples) -> Check:
    """Check that the test data are those of the run, as far as a digest or the owner's key can tell."""
    recorded, fingerprint, name = subject.data, test.fingerprint(), "test data"
    if recorded.test_sha256 is not None:
        if recorded.test_sha256 != fingerprint:
            return differs(name, "have another SHA-256 than training.json says", "training.json")
        return agrees(name, f"{len(test)} examples with SHA-256 {fingerprint[:12]}…", "training.json")
    committed = commit(subject.run, "test data", fingerprint)
    if committed is None or recorded.test_commitment is None:
        return not_checked(name, "only the owner's key can open the commitment to them", "training.json")
    if committed != recorded.test_commitment:
        return differs(name, "do not open the commitment in training.json", "training.json")
    return agrees(name, f"{len(test)} examples open the commitment", "training.json")


def _check_training_data(subject: Subject, dataset: Dataset) -> Check:
    """Check, for the owner alone, that these records are those that were trained on."""
    recorded, name = subject.data.training_commitment, "training data"
    if recorded is None or subject.config.data.augment or subject.config.data.held_out:
        return not_checked(name, "nothing was recorded of them that could be compared", "training.json")
    committed = commit(subject.run, "training data", dataset.train.fingerprint())
    if committed is None:
        return not_checked(name, "only the owner's key can open the commitment to them", "training.json")
    if committed != recorded:
        return differs(name, "do not open the commitment in training.json", "training.json")
    return agrees(name, f"{len(dataset.train)} records open the commitment", "training.json")


def _sample_rows(rows: int, size: int, seeds: Seeds) -> Tensor:
    order = torch.randperm(rows, generator=seeds.generator("sample", rows))
    return order[:size].sort().values


def _check_answers(subject: Subject, test: Examples, rows: Columns, chosen: Tensor, file: str) -> Check:
    """Check labels and clean answers of the single pass; two scores that tie up to rounding may fall either way."""
    name = "sample answered again"
    if rows["label"] != test.labels[: len(rows["label"])].tolist():
        return differs(name, "the rows are for other labels", file)
    wrong = _wrong_answers(subject, test, rows, chosen)
    if wrong:
        return differs(name, f"row {wrong[0]}: the weights give another label than is recorded", file)
    return agrees(name, f"{len(chosen)} of {len(rows['label'])} rows, and every label", file)


@torch.no_grad()
def _wrong_answers(subject: Subject, test: Examples, rows: Columns, chosen: Tensor) -> list[int]:
    network = subject.model.network
    scores = network(test.inputs[chosen].to(network.device, network.dtype)).double().cpu()
    recorded = torch.tensor([rows["prediction"][int(row)] for row in chosen])
    short = scores.amax(1) - scores.gather(1, recorded[:, None])[:, 0]
    near = _ROUNDING * scores.abs().amax(1).clamp(min=1.0)
    return [int(row) for row in chosen[short > near]]


def _check_certificates(
    subject: Subject, verifier: Verifier, test: Examples, rows: Columns, chosen: Tensor, seeds: Seeds
) -> Check:
    inputs = test.inputs[chosen].to(subject.model.network.device)
    part = {name: [values[int(row)] for row in chosen] for name, values in rows.items()}
    again = _Again(verifier, inputs, part, chosen.tolist(), len(rows["label"]), seeds)
    if verifier.function == "single_pass":
        wrong = _wrong_answers(subject, test, rows, chosen)
        if wrong:
            detail = f"row {wrong[0]}: the weights give another label than is certified"
            return differs("sample certified again", detail, "certificates.json")
        return again.bounds(verifier) if isinstance(verifier, BoundsVerifier) else again.radii()
    if not can_count(verifier):
        detail = f"nothing is known about how the vote of '{verifier.kinds[0].name}' is counted"
        return not_checked("sample certified again", detail, "certificates.json")
    return again.votes()


def _with_rounding(radii: Any) -> Any:
    return radii * (1 + _ROUNDING_OF_RADII) + _ROUNDING


@dataclass(frozen=True)
class _Again:
    """Rows of a sample with what was recorded of them."""

    verifier: Verifier
    inputs: Tensor
    recorded: dict[str, list[Any]]
    rows: list[int]
    of: int
    seeds: Seeds
    name = "sample certified again"
    file = "certificates.json"

    def bounds(self, verifier: BoundsVerifier) -> Check:
        """Check that every recorded radius is one that was asked about, and prove it again."""
        radius = np.asarray(self.recorded["radius"])
        # Another machine may round the last bit of a bound otherwise: a millionth less has to hold in any case.
        asked = tuple(sorted(size for each in verifier.radii for size in (each, each * (1 - 1e-6))))
        holds = verifier.certifier.certified_at(self.inputs, asked).cpu().numpy()
        sizes = np.array((0.0, *asked))[holds.sum(1)]
        if not np.isin(radius, (0.0, *verifier.radii)).all():
            return differs(self.name, "a radius was recorded that nobody asked about", self.file)
        for place in np.flatnonzero(sizes < radius * (1 - 2e-6)):
            detail = f"row {self.rows[place]}: {radius[place]:g} is recorded, {sizes[place]:g} is proved again"
            return differs(self.name, detail, self.file)
        return agrees(self.name, f"{len(self.rows)} of {self.of} rows: every radius is proved again", self.file)

    def radii(self) -> Check:
        """Compute again what margins, or another package, certify without draws; rounding may make it less."""
        columns = self.verifier.verify(self.inputs, self.seeds.generator("sample radii")).columns()
        for kind in self.verifier.kinds:
            recorded, again = np.asarray(self.recorded[kind.column]), columns[kind.column]
            for place in np.flatnonzero(recorded > _with_rounding(again)):
                proved = again[place]
                if isinstance(self.verifier, MarginsVerifier):
                    # Another version may have spent its effort on other radii than this one does.
                    proved = self.verifier.radius_at(self.inputs[place : place + 1], recorded[place])
                if recorded[place] > _with_rounding(proved):
                    detail = f"row {self.rows[place]}: {recorded[place]:g} is recorded, {proved:g} is computed again"
                    return differs(self.name, detail, self.file)
        by = ""
        if isinstance(self.verifier, ForeignVerifier):
            by = f" by the code of {self.verifier.provider}, which stobatch did not check"
        return agrees(self.name, f"{len(self.rows)} of {self.of} rows: every radius is computed again{by}", self.file)

    def votes(self) -> Check:
        """Hold fresh draws against the recorded label and, where its rule has a closed form, against its radius."""
        label, abstain = np.asarray(self.recorded["prediction"]), np.asarray(self.recorded["abstain"], dtype=bool)
        first, second = (self.seeds.generator("sample votes", half) for half in (0, 1))
        rival = count(self.verifier, self.inputs, _DRAWS // 4, first).rival(label)
        ballots = count(self.verifier, self.inputs, _DRAWS, second)
        level = FALSE_ALARM / (3 * max(1, len(label)))
        lost = ballots.chance(label, rival) < level
        for place in np.flatnonzero(lost & ~abstain):
            detail = f"row {self.rows[place]}: under fresh draws another label leads"
            return differs(self.name, detail, self.file)
        if not isinstance(self.verifier, VotesVerifier):
            detail = f"{len(label)} of {self.of} rows: labels agree with {_DRAWS} fresh draws each; radii of this rule "
            return not_checked(self.name, f"{detail}have no closed form, and none was computed again", self.file)
        hits = ballots.sums[np.arange(len(label)), label]
        for row in np.flatnonzero(~abstain).tolist():
            if self._is_too_large(self.verifier, row, float(hits[row]), level):
                detail = f"row {self.rows[row]}: fresh draws refute the recorded radius"
                return differs(self.name, detail, self.file)
        detail = (
            f"{len(label)} of {self.of} rows: labels and radii agree with {_DRAWS} fresh draws each (false alarm at "
            f"most {FALSE_ALARM:g})"
        )
        return agrees(self.name, detail, self.file)

    def _is_too_large(self, verifier: VotesVerifier, place: int, hits: float, level: float) -> bool:
        """Return whether the share of votes that the radius needs is refuted.

        An honest radius comes from a bound that fails with the certificate's own probability; the same votes give a
        bound that fails with probability `level`, for each of the looks at which drawing might have stopped.
        """
        radius, draws = self.recorded[verifier.kinds[0].column][place], self.recorded["draws"][place]
        if radius <= 0:
            return False
        needed = verifier.noise.required_top_probability(
            radius * (1 - 1e-6), verifier.norm, prod(self.inputs.shape[1:])
        )
        counts = np.arange(draws + 1, dtype=np.float64)
        usual = clopper_pearson(counts, draws, verifier.settings.failure_probability)[0]
        least = int(np.searchsorted(usual, min(needed, usual[-1])))
        looks = max(1, ceil(draws / LOOK_EVERY))
        sure = float(clopper_pearson(counts[least : least + 1], draws, level / looks)[0][0])
        at_most = float(clopper_pearson(np.array([hits]), _DRAWS, level)[1][0])
        return needed > usual[-1] * (1 + 1e-9) or at_most < sure
