"""Every document of a run, computed again: plan and guarantee from the configuration, accuracies from the rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from stobatch.config import CertificationConfig, EvaluationConfig
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import DpSgdPlan
from stobatch.dp.selection import Search
from stobatch.errors import RunError
from stobatch.evaluation.accuracy import AttackedTable
from stobatch.evaluation.attack import protocol_of_prior
from stobatch.evaluation.sanity import Evidence, certified_from
from stobatch.evaluation.summaries import (
    attack_summary,
    certificate_summary,
    probe_of,
    probe_radius,
    probed,
    score_summary,
)
from stobatch.files import PRIVATE, Columns, read_tensors, tensors_sha256
from stobatch.loading import describe_network, make_plan, read_start
from stobatch.models.parts import last_layer
from stobatch.prediction import describe_kind
from stobatch.results import (
    Attack,
    CertificateSummary,
    Check,
    FederationAccount,
    Manifest,
    NetworkFacts,
    Part,
    PlanDocument,
    PriorCertificates,
    PriorScores,
    Scores,
)
from stobatch.runs import IMAGES, START
from stobatch.sound.verifiers import BoundsVerifier
from stobatch.training.checkpoint import FOLDER as CHECKPOINTS
from stobatch.types import Radius, Status
from stobatch.verification.checks import agrees, compare, differs, not_checked
from stobatch.verification.second_accountant import bracket, search_epsilon
from stobatch.verification.subject import Subject, other_run

_LOOSE = 1.05
"""An ε that is recorded may be so much above the second accountant's: both are upper bounds by other means."""


def plan_check(subject: Subject) -> Check:
    recorded = PlanDocument.read(subject.run)
    plan = make_plan(subject.config, subject.info, subject.model.network if subject.handed_over else None)
    if subject.handed_over:
        # A loaded network requires no gradients: what is trained of it was read off before.
        plan = replace(plan, parts=subject.model.plan.parts)
    detail = "every number that privacy depends on follows from the configuration"
    # The description of a network handed over, before it was trained, is not a number.
    numbers = {key: value for key, value in recorded.to_dict().items() if key != "network"}
    return compare("plan", "plan.json", [("plan", numbers, plan.to_dict())], detail)


def counts_check(subject: Subject) -> Check:
    """Check that no fewer steps were counted than made, and that they are those of the configuration."""
    training = subject.training
    problems = _wrong_rounds(subject) if training.rounds is not None else _wrong_steps(subject)
    for file, problem in problems:
        return differs("steps", problem, file)
    counted = training.accounted_steps
    detail = f"{training.steps} made" + ("" if counted is None else f", {counted} counted")
    return agrees("steps", detail, "training.json")


def _wrong_rounds(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield the parties of a federation whose counted answers are outside their plans."""
    rounds, plans = subject.training.rounds or {}, getattr(subject.model.plan, "plans", {})
    if rounds.keys() != plans.keys():
        yield "training.json", "rounds are not those of the parties in the plan"
        return
    for party, count in rounds.items():
        if not 0 <= count <= plans[party].steps:
            yield "training.json", f"{party} counts {count} rounds of at most {plans[party].steps}"


def _wrong_steps(subject: Subject) -> Iterator[tuple[str, str]]:
    training, asked, file = subject.training, subject.config.training.steps, "training.json"
    steps, counted = [row.step for row in training.history], training.accounted_steps
    if training.steps != asked:
        yield file, f"{training.steps} steps were made, the configuration asks for {asked}"
    if not steps or steps != sorted(set(steps)) or steps[0] < 1 or steps[-1] != asked:
        yield file, "the history does not end with the last step, or runs backwards"
    status = subject.model.plan.guarantee.status
    if training.epsilon_spent_status not in (None, status):
        yield file, f"it calls the ε of its history {training.epsilon_spent_status}, and the plan's is {status}"
    if counted is None and subject.model.plan.curve is not None:
        yield file, "steps that looked at the data are not counted"
    if counted is not None:
        if counted < asked:
            yield file, f"{counted} steps are counted, and {asked} were made"
        yield from _wrong_ledger(subject, counted)
    latest = max((int(p.name[5:]) for p in (subject.run.path / CHECKPOINTS).glob("step-*")), default=asked)
    if latest != asked:
        yield str(CHECKPOINTS), f"the last checkpoint is of step {latest} of {asked}"


def _wrong_ledger(subject: Subject, counted: int) -> Iterator[tuple[str, str]]:
    """Yield where the owner's ledger, if there is one, has another count."""
    if subject.run.has("ledger", private=True):
        ledger = subject.run.read("ledger", private=True)
        done, open_ = int(ledger["done"]), int(ledger["open"])
        if min(done, open_) < 0 or done + open_ != counted:
            yield "private/ledger.json", f"the ledger counts {done + open_}, training.json {counted}"


def guarantee_checks(subject: Subject) -> Iterator[Check]:
    """Check what documents say of privacy against what configuration and counts give."""
    for document in (Attack.read_if_there(subject.run), Scores.read_if_there(subject.run)):
        if document is not None:
            yield _check_guarantee(subject, f"{document.kind}.json", document.guarantee)
    federation = FederationAccount.read_if_there(subject.run)
    if federation is not None:
        accounts = [account.to_document().to_dict() for account in getattr(subject.model.plan, "accounts", ())]
        pairs = [
            ("guarantee", federation.guarantee.to_dict(), subject.unaudited.to_dict()),
            ("parties", [party.to_dict() for party in federation.parties], accounts),
        ]
        yield compare("guarantee", "federation.json", pairs, _budget(subject.unaudited))
    yield _check_epsilon(subject)


def _check_guarantee(subject: Subject, file: str, recorded: PrivacyGuarantee) -> Check:
    """Compare the guarantee. Its status may be that before an audit: audits are checked, and shown, by themselves."""
    claim = subject.unaudited
    refuted = subject.guarantee.status is Status.REFUTED
    allowed = {str(claim.status), *((str(Status.REFUTED),) if refuted else ())}
    if recorded.status not in allowed:
        return differs("guarantee", f"its status is {recorded.status}, and it is {' or '.join(allowed)}", file)
    told = set(subject.guarantee.audits)
    for line in recorded.audits:
        if line not in told:
            return differs("guarantee", f"it quotes an audit that is not in audit.json: {line[:60]}...", file)
    if claim.status is Status.NONE:
        pairs: list[tuple[str, Any, Any]] = [("source", recorded.source, claim.source)]
    else:
        fields = ("epsilon", "delta", "neighbours", "unit", "source", "assumptions", "objections", "prior")
        pairs = [(f"guarantee.{key}", _value_of(recorded, key), _value_of(claim, key)) for key in fields]
    return compare("guarantee", file, pairs, _budget(claim))


def _budget(guarantee: PrivacyGuarantee) -> str:
    return str(guarantee).partition(" (")[0]


def _value_of(guarantee: PrivacyGuarantee, key: str) -> Any:
    value = getattr(guarantee, key)
    return list(value) if isinstance(value, tuple) else value if isinstance(value, float) else str(value)


def _check_epsilon(subject: Subject) -> Check:
    """Check ε by the second accountant, for claims that rest on the Poisson-subsampled Gaussian mechanism."""
    name, claim = "second accountant", subject.claim
    mechanisms = list(_mechanisms(subject))
    if not mechanisms:
        return not_checked(name, f"ε is {claim.status}: there is no mechanism to account for")
    brackets = [bracket(q, sigma, steps, delta) for q, sigma, steps, delta in mechanisms]
    known = [one for one in brackets if one is not None]
    if len(known) < len(brackets):
        return not_checked(name, f"δ = {claim.delta:g} is too small for it")
    low, high = max(one.low for one in known), max(one.high for one in known)
    plan = subject.model.plan
    if isinstance(plan, DpSgdPlan) and plan.searched is not None:
        return _check_search_epsilon(name, subject, plan, low)
    detail = f"{_recorded_epsilon(subject)} is recorded, the second accountant finds [{low:.6g}, {high:.6g}]"
    if not low * (1 - 1e-9) <= claim.epsilon <= high * _LOOSE + 1e-6:
        return differs(name, detail)
    return agrees(name, detail)


def _recorded_epsilon(subject: Subject) -> str:
    """Return the ε of the plan with who vouches for it in this run: a number that agrees may still protect nobody."""
    return f"{subject.guarantee.status} ε = {subject.claim.epsilon:.6g}"


def _check_search_epsilon(name: str, subject: Subject, plan: DpSgdPlan, least: float) -> Check:
    """Check ε of a search, and that of one of its candidates, whose noise was chosen for it."""
    assert plan.searched is not None
    claim = subject.claim
    search = plan.mechanism_of()
    assert isinstance(search, Search)
    trainings = [(one.sampling_rate, one.noise_multiplier, one.steps) for one in search.mechanisms]
    shape = None if search.law.is_poisson else search.law.shape
    recomputed = search_epsilon(trainings, search.score_noise, search.law.mean, shape, claim.delta)
    own = plan.searched.candidate_epsilon
    detail = (
        f"{_recorded_epsilon(subject)} is recorded for the search, the second accountant finds {recomputed:.6g}; "
        f"one candidate has at most {own:.6g}, and at least {least:.6g}"
    )
    if not recomputed * (1 - 1e-6) <= claim.epsilon <= recomputed * _LOOSE or least > own * (1 + 1e-9):
        return differs(name, detail)
    return agrees(name, detail)


def _mechanisms(subject: Subject) -> Iterator[tuple[float, float, int, float]]:
    """Yield sampling rate, noise multiplier, steps and δ of what was done, for each owner of data."""
    plan, claim = subject.model.plan, subject.claim
    parties = getattr(plan, "accounts", None)
    if parties is not None:
        for account in parties:
            if account.rounds:
                own = account.plan
                yield own.sampling_rate, own.noise_multiplier, account.rounds, own.delta
    elif isinstance(plan, DpSgdPlan):
        curve = plan.mechanism(max(subject.model.accounted_steps, plan.steps))
        yield curve.sampling_rate, curve.noise_multiplier, curve.steps, claim.delta


def certificates_check(subject: Subject, document: CertificateSummary, file: str) -> Check:
    """Check accuracies, statuses and largest radii of certificates against their rows."""
    if wrong := other_run(subject, document.training_hash, document.weights_sha256):
        return differs("certificates", wrong, file)
    verifier, config = subject.as_certified(document)
    columns = subject.certified_rows(document, verifier)
    computed = certificate_summary(columns, verifier.kinds, config.evaluation.radii)
    pairs = _pairs(document, computed)
    if isinstance(verifier, BoundsVerifier):
        asked = {0.0, *verifier.radii}
        pairs.append(("radii nobody asked about", sorted(set(columns["radius"]) - asked), []))
    pairs.append(_own_row(subject, document.prior))
    if document.prior is not None:
        own = certificate_summary(
            subject.certified_rows(document.prior, verifier), verifier.kinds, config.evaluation.radii
        )
        pairs += [(f"prior.{key}", *pair) for key, *pair in _pairs(document.prior, own)]
    if document.chosen is not None:
        pairs.append(("chosen", document.chosen.certificate, verifier.kinds[0].name))
    detail = f"{document.rows} rows give the accuracies that it states"
    return compare("certificates", file, pairs, detail)


def _own_row(subject: Subject, row: PriorCertificates | PriorScores | None) -> tuple[str, Any, Any]:
    """Return which prior is shown with a run's numbers, and which must be: one with an answer is never left out."""
    prior, expected = subject.model.plan.prior, None
    if prior is not None and not prior.new_head:
        expected = [prior.name, prior.weights_sha256, prior.conflict, prior.tuned]
    own = None if row is None else [row.name, row.weights_sha256, row.conflict, row.tuned]
    return "prior", own, expected


def attack_check(subject: Subject) -> Check:
    document, file = Attack.read(subject.run), "attack.json"
    if wrong := other_run(subject, document.training_hash, document.weights_sha256):
        return differs("attack", wrong, file)
    settings = EvaluationConfig.from_dict(document.settings)
    computed = attack_summary(subject.attacked_table(document, settings, document.weights_sha256))
    return compare(
        "attack", file, _pairs(document, computed), f"{document.rows} rows give the accuracies that it states"
    )


def scores_checks(subject: Subject) -> Iterator[Check]:
    """Check the whole evaluation: every table, the gaps, the flags, and the certificates with them."""
    document, file = Scores.read(subject.run), "scores.json"
    if wrong := other_run(subject, document.training_hash, document.weights_sha256):
        yield differs("evaluation", wrong, file)
        return
    settings, weights = EvaluationConfig.from_dict(document.settings), document.weights_sha256
    certificates = document.certificates
    certified, columns = [], None
    if certificates != CertificateSummary.read_if_there(subject.run):
        how = "they are not those in certificates.json: evaluate again to have them side by side"
        yield not_checked("certificates beside scores", how, file)
    if certificates is not None:
        yield certificates_check(subject, certificates, file)
        verifier, _ = subject.as_certified(certificates)
        columns = subject.certified_rows(certificates, verifier)
        kinds = [describe_kind(kind) for kind in verifier.kinds]
        chance = CertificationConfig.from_dict(certificates.settings).failure_probability
        certified = certified_from(columns, kinds, chance)
    tables = [subject.attacked_table(entry, settings, weights) for entry in document.under_attack]
    adaptive, recorded = probed(tables), document.probe
    if (adaptive is None) != (recorded is None) or document.lowest_input is None:
        yield differs("evaluation", "its probe and its lowest input are not those of its tables", file)
        return
    probe = None
    radii: tuple[float, float] | None = None
    if adaptive is not None and recorded is not None:
        radius: Radius = probe_radius(adaptive)
        probe = probe_of(subject.probe_rows(recorded, weights), radius, subject.info.num_classes)
        radii = (recorded.radius, radius.size)
    computed = score_summary(Evidence(tables, probe, certified), document.lowest_input)
    pairs = _pairs(document, computed)
    if radii is not None:
        pairs.append(("probe.radius", *radii))
    functions = [name for name in settings.functions if name in {table.function for table in tables}]
    order = [(name, protocol) for name in functions for protocol in settings.protocols]
    pairs.append(("tables", [[t.function, t.protocol] for t in tables], [list(each) for each in order]))
    pairs.append(("rows", document.rows, max(len(table.label) for table in tables)))
    pairs.append(_own_row(subject, document.prior))
    if (own := document.prior) is not None:
        recomputed = attack_summary(subject.attacked_table(own, settings, own.weights_sha256))
        pairs += [(f"prior.{key}", *pair) for key, *pair in _pairs(own, recomputed)]
        pairs.append(("prior.protocol.name", own.protocol.name, protocol_of_prior(settings)))
    yield compare("evaluation", file, pairs, f"{len(tables)} tables of rows give every number that it states")
    yield _check_tables_agree(tables, columns, document)


def _check_tables_agree(tables: list[AttackedTable], certified: Columns | None, document: Scores) -> Check:
    """Check that tables are about the same test examples, and that the single pass answers the same in all of them."""
    name, file = "tables agree", "scores.json"
    labels = max((table.label.tolist() for table in tables), key=len)
    passes = [table.records["prediction"] for table in tables if table.function == "single_pass"]
    if certified is not None and document.certificates is not None:
        labels = max(labels, certified["label"], key=len)
        if document.certificates.kinds[0].function == "single_pass":
            passes.append(certified["prediction"])
    answers = max(passes, key=len, default=[])
    images = document.images
    if images is not None:
        passes.append([*images.predictions["clean"]])
    for recorded, wanted, what in (
        *((table.label.tolist(), labels, "labels") for table in tables),
        *(((certified["label"], labels, "labels"),) if certified is not None else ()),
        *((([*images.labels], labels, "labels of the pictures"),) if images is not None else ()),
        *((one, answers, "answers of the single pass") for one in passes),
    ):
        if answers or what.startswith("labels"):
            rows = [row for row, (a, b) in enumerate(zip(recorded, wanted, strict=False)) if a != b]
            if rows or len(recorded) > len(wanted):
                return differs(name, f"{what} differ between two tables, first in row {rows[0] if rows else 0}", file)
    return agrees(name, "labels and answers are the same wherever two tables have the same example", file)


def pictures_check(subject: Subject) -> Check:
    """Check that the owner's pictures are those that the evaluation kept."""
    name, kept = "pictures", Scores.read(subject.run).images
    path = subject.run.path / PRIVATE / IMAGES
    if kept is None or not path.exists():
        return not_checked(name, "there are none in this copy of the run")
    _, metadata = read_tensors(path)
    wanted = (subject.model.weights_sha256, tensors_sha256(path.read_bytes()))
    if (metadata.get("weights_sha256"), metadata.get("pixels_sha256")) != wanted:
        return differs(name, "are not those that the evaluation kept", f"{PRIVATE}/{IMAGES}")
    return agrees(name, "are those that the evaluation kept", f"{PRIVATE}/{IMAGES}")


def _pairs(document: Part, computed: Part) -> list[tuple[str, Any, Any]]:
    """Return what a document says next to what was computed again, key by key."""
    recorded = document.to_dict()
    return [(key, recorded.get(key), value) for key, value in computed.to_dict().items()]


def _on_any_machine(network: NetworkFacts | None) -> dict[str, Any] | None:
    """Return what is the same on another machine, with another version of PyTorch.

    Of a probe's scores another machine has other bits; loading has compared them with an allowance for that.
    PyTorch 2.13 says of a normalisation with scale and shift that it has a shift, 2.11 does not.
    """
    if network is None:
        return None
    facts = {key: value for key, value in network.to_dict().items() if key != "probe"}
    return facts | {"layers": [layer.replace("affine=True, bias=True", "affine=True") for layer in network.layers]}


def identity_check(subject: Subject) -> Check:
    """Check that manifest, configuration, training and weights are of one run."""
    manifest, training = Manifest.read(subject.run), subject.training
    sizes = subject.data
    parts = subject.model.plan.parts
    network = describe_network(subject.model.network, handed_over=subject.handed_over, parts=parts)
    pairs: list[tuple[str, Any, Any]] = [
        ("training_hash", manifest.training_hash, subject.config.training_hash),
        ("weights_sha256", manifest.weights_sha256, subject.model.weights_sha256),
        ("data", manifest.data and manifest.data.to_dict(), sizes.to_dict()),
        ("data.name", sizes.name, subject.info.name),
        ("data.test_records", sizes.test_records, subject.info.num_test),
        ("network", _on_any_machine(training.network), _on_any_machine(network)),
    ]
    if training.rounds is None:
        pairs.append(("data.training_records", sizes.training_records, subject.info.num_train))
    return compare("identity", "manifest.json", pairs, "configuration, training, weights and data are of one run")


def prior_check(subject: Subject) -> Check:
    """Compare a run's weights with those that it started from, as far as they are not trained."""
    name, model = "prior", subject.model
    if not (subject.run.path / START).exists():
        return not_checked(name, f"{START} is not in this copy of the run; config.json has its digest")
    try:
        start = read_start(subject.config, subject.run) or {}
    except RunError as error:
        return differs(name, error.what, START)
    trained = _trained_tensors(subject) | (last_layer(model.network) if subject.config.prior.new_head else frozenset())
    fixed = {key: value.cpu() for key, value in model.network.state_dict().items() if key in start.keys() - trained}
    for key, value in fixed.items():
        if not torch.equal(value, start[key].to(value)):
            return differs(name, f"{key} is not trained, and is not what the prior has", "model.safetensors")
    return agrees(name, f"its digest is the one in config.json; {len(fixed)} tensors that are not trained are its own")


def _trained_tensors(subject: Subject) -> frozenset[str]:
    """Return the tensors of the saved model that training moved; an adapter moves its layer's weight."""
    parts = subject.model.plan.parts
    if parts is None:
        return frozenset(subject.model.network.state_dict())
    if not subject.config.model.adapter_rank:
        return frozenset(parts.names)
    return frozenset(re.sub(r"\.(up|down)$", ".weight", name) for name in parts.names)
