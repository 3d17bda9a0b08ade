"""`audit`: hold a run's claims against instruments that try to refute them, and keep what they found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stobatch.auditing.coverage import judge_claims, overall_verdict, recheck
from stobatch.config import RunConfig
from stobatch.data import Dataset, DatasetInfo
from stobatch.errors import RunError, SettingError
from stobatch.loading import load, seeds_of
from stobatch.methods import method_of
from stobatch.models import Classifier
from stobatch.runs import Run
from stobatch.training.device import use_device
from stobatch.types import Status
from stobatch.verbs.instruments import MAKERS, Audited
from stobatch.verbs.tables import allowed, read_data
from stobatch.verbs.training import plan as plan_of


def audit(
    run: str | Path,
    *,
    config: RunConfig | None = None,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: Classifier | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> dict[str, Any]:
    """Audit a run, or with `config` a configuration that nothing was trained with yet.

    Instruments that train models of their own (`many_runs`, `membership`) need no trained run. What was found before by
    an instrument that is used again is replaced; what others found is kept.

    **Guarantee.** Where all claims hold, a call refutes one of them with probability at most 1 - audit.confidence: the
    findings of a call share it equally.
    """
    audited = opened(
        Run(Path(run)), config, overrides=overrides, dataset=dataset, network=network, seed=seed, resume=resume,
        quiet=quiet, device=device,
    )  # fmt: skip
    names = audited.settings.instruments or _fitting(audited)
    audited, known = replace(audited, num_tests=_tests(audited, names)), _known(audited)
    for name in (name for name in MAKERS if name in names):
        found = [finding.to_dict() | {"evidence": f"evidence/{name}.json"} for finding in MAKERS[name](audited)]
        evidence = {
            "training_hash": audited.config.training_hash,
            "settings": audited.settings.to_dict(),
            "seed": seed,
            "findings": found,
        }
        audited.run.write(f"evidence/{name}", evidence)
        known = [finding for finding in known if finding["instrument"] != name] + found
        document = summary(audited, known)
        audited.run.write("audit", document)
    return document


def _tests(audited: Audited, names: tuple[str, ...]) -> int:
    """How many findings a call will yield that may each be a false alarm; kinds of certificates share one."""
    releases = len(method_of(audited.config).releases(audited.plan))
    return sum(max(1, releases) if name == "release" else 1 for name in names)


def _known(audited: Audited) -> list[dict[str, Any]]:
    """What was found before, about this very training."""
    if not audited.run.has("audit"):
        return []
    before = audited.run.read("audit")
    return recheck(before["findings"]) if before["training_hash"] == audited.config.training_hash else []


def summary(audited: Audited, findings: list[dict[str, Any]]) -> dict[str, Any]:
    """All claims of the run, tested or not, and what was found about them."""
    run = audited.run
    kinds = run.read("certificates")["kinds"] if run.has("certificates") else []
    claims = judge_claims(audited.claim.status, kinds, findings)
    return {
        "training_hash": audited.config.training_hash,
        "verdict": str(overall_verdict(claims, findings)),
        "claims": claims,
        "findings": findings,
    }


def opened(
    run: Run,
    config: RunConfig | None = None,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: Classifier | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = True,
    device: str | None = None,
) -> Audited:
    """What the instruments work on: a trained run, or settings that nothing was trained with yet."""
    changes = {**(overrides or {}), **({"machine.device": device} if device else {})}
    if config is not None:
        config = config.override_all(changes)
        run.require_new(config.training_hash, resume=resume)
    elif run.exists:
        allowed(changes)
        config = RunConfig.from_dict(run.read("config")["config"]).override_all(changes)
    else:
        raise RunError(
            f"{run.path} is not a run.", remedy="Name a trained run, or a recipe as in `--recipe audit.published`."
        )
    seeds = seeds_of(config, run)
    use_device(config.machine)
    if run.is_trained:
        model = load(run.path, network=network, device=config.machine.device, threads=config.machine.threads)
        info = DatasetInfo.from_dict(run.read("config")["dataset"])
        return Audited(run, config, info, model.plan, model.claim, seeds, model, dataset, network, seed, resume, quiet)
    the_plan = plan_of(config, dataset=dataset, network=network)
    whole = dataset or read_data(config, seeds, quiet)
    return Audited(
        run, config, whole.info, the_plan, the_plan.guarantee, seeds, None, whole, network, seed, resume, quiet
    )


def _fitting(audited: Audited) -> tuple[str, ...]:
    """Instruments that can say something about the run and train nothing new."""
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
