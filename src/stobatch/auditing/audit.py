"""`audit`: hold a run's claims against instruments that try to refute them, and keep what they found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from stobatch.auditing.falsifier import of_certificates
from stobatch.auditing.many_runs import of_many_runs
from stobatch.auditing.membership import of_membership
from stobatch.auditing.one_run import of_one_run
from stobatch.auditing.releases import of_releases
from stobatch.auditing.subject import Audited
from stobatch.config import RunConfig
from stobatch.data import Dataset, DatasetInfo, require_dataset
from stobatch.errors import RunError, SettingError
from stobatch.evaluation.tables import begin, read_data, require_allowed, seal_and_tell
from stobatch.loading import load, name_network, read_config, seeds_of
from stobatch.methods import method_of
from stobatch.results import (
    WITH_SECRET_SEEDS,
    Audit,
    CertificateSummary,
    Evidence,
    Finding,
    StartedRun,
    judge_claims,
    overall_verdict,
    recheck,
)
from stobatch.runs import Run
from stobatch.training.device import use_device
from stobatch.training_run import plan as plan_of
from stobatch.types import Status


def audit(
    run: str | Path,
    *,
    config: RunConfig | None = None,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> Audit:
    """Audit a run, or with `config` a configuration that nothing was trained with yet.

    Instruments that train models of their own (`many_runs`, `membership`) need no trained run. What was found before by
    an instrument that is used again is replaced; what others found is kept.

    **Guarantee.** Where all claims hold, a call refutes one of them with probability at most 1 - audit.confidence: the
    findings of a call share it equally.
    """
    audited = open_subject(
        Run.at(run), config, overrides=overrides, dataset=dataset, network=network, seed=seed, resume=resume,
        quiet=quiet, device=device,
    )  # fmt: skip
    with audited.run.held():
        return _audit(audited, seed)


def _audit(audited: Audited, seed: int | None) -> Audit:
    names = audited.settings.instruments or _default_instruments(audited)
    if audited.model is not None:
        begin(audited.model, "audit.json", *(f"evidence/{name}.json" for name in names))
    audited, known = replace(audited, num_tests=_num_tests(audited, names)), _other_findings(audited, names)
    for name in (name for name in MAKERS if name in names):
        findings = tuple(_add_evidence(finding, name, audited) for finding in MAKERS[name](audited))
        Evidence(
            training_hash=audited.config.training_hash,
            weights_sha256=audited.weights_sha256,
            settings=audited.settings.to_dict(),
            seed=seed,
            findings=findings,
        ).write_of(audited.run, name)
        known = [finding for finding in known if finding.instrument != name] + [*findings]
        document = summary(audited, known)
        document.write(audited.run)
    seal_and_tell(audited.run, "audit", audited.config.machine.device, quiet=audited.quiet)
    return document


def _add_evidence(finding: Finding, instrument: str, audited: Audited) -> Finding:
    """Return the finding with its evidence; where the seed is public, it says which training its claim is about."""
    finding = finding.replace(evidence=f"evidence/{instrument}.json")
    if finding.about != "privacy" or audited.config.seed is None or finding.claim_status is Status.NONE:
        return finding
    statement = f"{finding.statement} for this training {WITH_SECRET_SEEDS}"
    return finding.replace(claim=f"{WITH_SECRET_SEEDS}: {finding.claim}", statement=statement)


def _num_tests(audited: Audited, names: tuple[str, ...]) -> int:
    """Return how many findings a call will yield that may each be a false alarm; kinds of certificates share one."""
    releases = len(method_of(audited.config).releases(audited.plan))
    return sum(max(1, releases) if name == "release" else 1 for name in names)


def _other_findings(audited: Audited, names: tuple[str, ...]) -> list[Finding]:
    """Return what other instruments found before about this very training, from their evidence."""
    known: list[Finding] = []
    for name in (name for name in MAKERS if name not in names):
        before = Evidence.read_of(audited.run, name)
        if before is not None and before.training_hash == audited.config.training_hash:
            # Evidence from before there were digests is about the weights that are there.
            unnamed = "weights_sha256" not in before.model_fields_set
            if unnamed or before.weights_sha256 == audited.weights_sha256:
                known += recheck(before.findings)
    return known


def summary(audited: Audited, findings: list[Finding]) -> Audit:
    """Return all claims of the run, tested or not, and what was found about them."""
    certified = CertificateSummary.read_if_there(audited.run)
    certificates = certified.config_hash if certified else None
    claims = judge_claims(audited.claim.status, certified.kinds if certified else (), findings, certificates)
    return Audit(
        training_hash=audited.config.training_hash,
        weights_sha256=audited.weights_sha256,
        verdict=overall_verdict(claims, findings),
        claims=tuple(claims),
        findings=tuple(findings),
        certificates=certificates,
    )


def open_subject(
    run: Run,
    config: RunConfig | None = None,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = True,
    device: str | None = None,
) -> Audited:
    """Return what the instruments work on: a trained run, or settings that nothing was trained with yet."""
    require_dataset(dataset)
    changes = {**(overrides or {}), **({"machine.device": device} if device else {})}
    if config is not None:
        config = name_network(config.override_all(changes), network)
        run.require_new(config, resume=resume)
    elif run.exists:
        require_allowed(changes)
        config = read_config(run).override_all(changes)
    else:
        raise RunError(
            f"{run.path} is not a run.", remedy="Name a trained run, or a recipe as in `--recipe audit.published`."
        )
    seeds = seeds_of(config, run)
    use_device(config.machine)
    if run.is_trained:
        model = load(run.path, network=network, device=config.machine.device, threads=config.machine.threads)
        info = DatasetInfo.from_dict(StartedRun.read(run).dataset.to_dict())
        return Audited(run, config, info, model.plan, model.claim, seeds, model, dataset, network, seed, resume, quiet)
    the_plan = plan_of(config, dataset=dataset, network=network)
    whole = dataset or read_data(config, seeds, quiet)
    claim = the_plan.in_context(the_plan.claim)
    return Audited(run, config, whole.info, the_plan, claim, seeds, None, whole, network, seed, resume, quiet)


def _default_instruments(audited: Audited) -> tuple[str, ...]:
    """Return the instruments that can say something about the run and train nothing new."""
    if audited.model is None:
        return ("many_runs",)
    fits = {
        "release": bool(method_of(audited.config).releases(audited.plan)),
        "one_run": bool(audited.config.canaries.num) and audited.claim.status is not Status.NONE,
        "certificates": audited.run.has("certificates"),
    }
    names = tuple(name for name, there in fits.items() if there)
    if not names:
        raise SettingError(
            f"{audited.run.path} has nothing that can be audited without new trainings.",
            why="It was trained without canaries and is not certified.",
            remedy="Certify it first, train with canaries.num=1000, or ask for audit.instruments=many_runs.",
        )
    return names


MAKERS: dict[str, Callable[[Audited], list[Finding]]] = {
    "release": of_releases,
    "many_runs": of_many_runs,
    "one_run": of_one_run,
    "membership": of_membership,
    "certificates": of_certificates,
}
"""By name, in the order in which they are used."""
