"""What a run started from: the weights that it keeps are those it names, and what was not trained is still the same."""

from __future__ import annotations

import re

import torch

from stobatch.errors import RunError
from stobatch.loading import read_start
from stobatch.models.parts import last_layer
from stobatch.results import Check
from stobatch.runs import START
from stobatch.verification.checks import agrees, differs, not_checked
from stobatch.verification.subject import Subject


def prior_check(subject: Subject) -> Check:
    """Compare a run's weights with those that it started from, as far as they are not trained."""
    name, model = "prior", subject.model
    if not (subject.run.path / START).exists():
        return not_checked(name, f"{START} is not in this copy of the run; config.json has its digest")
    try:
        start = read_start(subject.config, subject.run) or {}
    except RunError as error:
        return differs(name, error.what, START)
    trained = _trained(subject) | (last_layer(model.network) if subject.config.prior.new_head else frozenset())
    fixed = {key: value.cpu() for key, value in model.network.state_dict().items() if key in start.keys() - trained}
    for key, value in fixed.items():
        if not torch.equal(value, start[key].to(value)):
            return differs(name, f"{key} is not trained, and is not what the prior has", "model.safetensors")
    return agrees(name, f"its digest is the one in config.json; {len(fixed)} tensors that are not trained are its own")


def _trained(subject: Subject) -> frozenset[str]:
    """Return the tensors of the saved model that training moved; an adapter moves its layer's weight."""
    parts = subject.model.plan.parts
    if parts is None:
        return frozenset(subject.model.network.state_dict())
    if not subject.config.model.adapter_rank:
        return frozenset(parts.names)
    return frozenset(re.sub(r"\.(up|down)$", ".weight", name) for name in parts.names)
