"""`verify`: for an auditor, whether a run's documents say what its files, its rows and its weights give.

Nothing is believed because a document says so. What cannot be checked from outside is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import nn

from stobatch.data import Dataset, require_dataset
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError, SettingError, StobatchError
from stobatch.loading import load
from stobatch.results import CertificateSummary, Check, Outcome, Source, Training, Verification, is_old
from stobatch.runs import MANIFEST, NOT_LISTED, PAGE, START, Run, differences, is_ours, source
from stobatch.seeds import Seeds
from stobatch.verification import audits, documents
from stobatch.verification.checks import agrees, differs, not_checked, page_check, sign, signature_check
from stobatch.verification.documents import prior_check
from stobatch.verification.sampling import data_of, sample_checks
from stobatch.verification.subject import Subject

__all__ = ["BEYOND", "Verification", "require_agreement", "sign", "verify"]

BEYOND = (
    "that the noise and the samples of the training were drawn as its plan says, with seeds that stayed secret",
    "that the training data were the records that are named, one for each person or each with the right person, "
    "and that no test record was one",
    "that this is the only training that looked at them, and that nothing was tuned on them unless it is said",
    "that the dates and the machine in the manifest are true, unless somebody you trust signed it",
    "that the attacks were run as their settings say: attacked rows are counted again, not attacked again",
)
"""What no file can show to a reader who was not there."""

_UNUSABLE = (StobatchError, KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration, OverflowError)
"""What documents that were edited by hand make of code that reads them."""


def require_agreement(verification: Verification) -> None:
    """Raise at the first difference; an old run has no manifest to differ from, and no report is built on a page."""
    run = Run(Path(verification.run))
    for check in verification.differing:
        if check.name != "report" and not (is_old(run) and check.name == "manifest"):
            raise RunError(
                f"{run.path / check.file}, {check.name}: {check.detail}.",
                why="What it says is not what the run's own files give.",
                remedy=f"Restore the files, or see all with `stobatch verify {run.path}`.",
            )


def verify(
    run: str | Path,
    *,
    sample: int = 20,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    signers: Path | None = None,
    identity: str | None = None,
    seed: int | None = None,
    rewritten: tuple[str, ...] = (),
) -> Verification:
    """Compute everything that a run publishes again, and certify a random sample of rows from the weights.

    `sample` rows need the test data: handed over, or read by the name in the configuration. 0 leaves them out. Files
    that the caller is about to rewrite are `rewritten`, and not compared with the manifest.
    """
    directory = Run.at(run)
    require_dataset(dataset)
    if not isinstance(sample, int) or sample < 0:
        raise SettingError(f"sample={sample!r} is no number of rows.", remedy="Give a whole number; 0 leaves them out.")
    if not directory.exists:
        raise RunError(f"{directory.path} is not a run.", remedy="Name a run directory.")
    # Unguarded: a tool or a key that is missing is for the reader to mend, and no difference.
    signature = signature_check(directory, signers, identity)
    files = list(_checks_or_difference("manifest", "manifest.json", lambda: _files(directory, rewritten)))
    page: tuple[Check, ...] = ()
    if PAGE not in rewritten:
        page = tuple(_checks_or_difference("report", PAGE, lambda: filter(None, [page_check(directory)])))
    subject = _open(directory, network, files)
    if isinstance(subject, Check):
        return conclude(directory, (*files, *page, signature, subject))
    found = tuple(_checks(subject, sample, dataset, seed))
    return conclude(directory, (*files, *page, signature, *found), _guarantee(subject))


def conclude(run: Run, checks: tuple[Check, ...], guarantee: PrivacyGuarantee | None = None) -> Verification:
    """Return what the checks of a run say together."""
    return Verification(
        run=str(run.path),
        verdict=Outcome.DIFFERS if any(check.outcome is Outcome.DIFFERS for check in checks) else Outcome.AGREES,
        guarantee=guarantee,
        checked_by=Source(**source()),
        checks=checks,
        cannot_be_checked=BEYOND,
    )


def _open(run: Run, network: nn.Module | None, files: list[Check]) -> Subject | Check:
    """Return the run with its model, or why nothing but its files can be checked."""
    # Bytes that are not those of the manifest are not read any further: they may be anything.
    if run.has(MANIFEST) and any(c.outcome is Outcome.DIFFERS and NOT_LISTED not in c.detail for c in files):
        return not_checked("documents", "files differ from the manifest, so what they say was not looked at")
    if not run.is_trained:
        if run.has("training"):
            return differs("model", "training.json is there, and the model is not", "model.safetensors")
        return not_checked("documents", "nothing was trained here")
    try:
        return Subject(run, load(run.path, network=network, device="cpu"), network is not None)
    except _UNUSABLE as error:
        if network is None and _was_handed_over(run):
            how = "a network of your own was trained: hand it over in Python, stobatch.verify(run, network=...)"
            return not_checked("documents", how)
        return differs("model", _reason(error), "model.safetensors")


def _guarantee(subject: Subject) -> PrivacyGuarantee | None:
    """Return what the run guarantees in the light of its audits; None where these cannot be read, as a check says."""
    try:
        return subject.guarantee
    except _UNUSABLE:
        return None


def _checks(subject: Subject, sample: int, dataset: Dataset | None, seed: int | None) -> Iterator[Check]:
    run = subject.run
    if subject.training.weights_sha256 is None:
        if run.has(MANIFEST):
            yield differs("model", "it names no weights", "training.json")
        yield from _check_without_digests(subject)
        return
    yield agrees("model", f"{subject.model.weights_sha256[:12]}… are the weights that training.json names")
    yield from _documents(subject)
    if sample:
        yield from _checks_or_difference("sample", "records", lambda: _sample(subject, sample, dataset, seed))


def _was_handed_over(run: Run) -> bool:
    try:
        network = Training.read(run).network
        return network is not None and network.handed_over
    except _UNUSABLE:
        return False


def _check_without_digests(subject: Subject) -> Iterator[Check]:
    """Check a run from before there were digests: what follows from its configuration alone."""
    yield from _checks_or_difference("plan", "plan.json", lambda: [documents.plan_check(subject)])
    yield from _checks_or_difference("steps", "training.json", lambda: [documents.counts_check(subject)])
    yield from _checks_or_difference("guarantee", "scores.json", lambda: documents.guarantee_checks(subject))
    yield not_checked("documents", "an older version wrote them, without digests of the weights they are about")


def _documents(subject: Subject) -> Iterator[Check]:
    run = subject.run
    yield from _checks_or_difference("identity", "manifest.json", lambda: [documents.identity_check(subject)])
    yield from _checks_or_difference("plan", "plan.json", lambda: [documents.plan_check(subject)])
    yield from _checks_or_difference("steps", "training.json", lambda: [documents.counts_check(subject)])
    if subject.config.prior.name is not None:
        yield from _checks_or_difference("prior", START, lambda: [prior_check(subject)])
    yield from _checks_or_difference("guarantee", "scores.json", lambda: documents.guarantee_checks(subject))
    parts: dict[str, Callable[[], Iterable[Check]]] = {
        "certificates": lambda: [
            documents.certificates_check(subject, CertificateSummary.read(run), "certificates.json")
        ],
        "attack": lambda: [documents.attack_check(subject)],
        "scores": lambda: [*documents.scores_checks(subject), documents.pictures_check(subject)],
        "audit": lambda: audits.audit_checks(subject),
    }
    for name, check in parts.items():
        if run.has(name):
            yield from _checks_or_difference(name, f"{name}.json", check)
        else:
            yield not_checked(name, f"there is no {name}.json: nothing is said about it")


def _files(run: Run, rewritten: tuple[str, ...]) -> Iterator[Check]:
    """Check every public file against the manifest."""
    if not run.has(MANIFEST):
        yield differs("manifest", "there is none: the files vouch for nothing, and cannot be verified", "manifest.json")
        return
    # What a run started from may be left out of a copy: its digest is in config.json, and `prior` checks it.
    apart = {*rewritten, *(() if (run.path / START).exists() else (START,))}
    changed = [(name, how) for name, how in differences(run) if name not in apart]
    strange = [name for name, how in changed if how == NOT_LISTED and not is_ours(name)]
    for name in strange:
        yield not_checked("files", "is not in the manifest, and no verb writes it", name)
    others = [(name, how) for name, how in changed if name not in strange]
    for name, how in others:
        unfinished = "; a verb was stopped before it had ended: run it again" if how == NOT_LISTED else ""
        yield differs("files", f"{how}{unfinished}", name)
    if not others:
        yield agrees("files", "every public file has the SHA-256 that the manifest says")


def _sample(subject: Subject, size: int, dataset: Dataset | None, seed: int | None) -> Iterable[Check]:
    data = data_of(subject, dataset)
    if isinstance(data, str):
        return [not_checked("sample", data)]
    return sample_checks(subject, data, size, Seeds.secret() if seed is None else Seeds.reproducible(seed))


def _checks_or_difference(name: str, file: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the checks, or a difference where a document cannot be read: never a crash."""
    try:
        yield from checks()
    except _UNUSABLE as error:
        yield differs(name, _reason(error), file)


def _reason(error: Exception) -> str:
    if isinstance(error, StobatchError):
        return str(error)
    return f"it is not what the program writes ({type(error).__name__}: {error})"
