"""What a run would cost on this machine: passes through the network, counted, times one pass, timed."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from stobatch import data
from stobatch.config import EvaluationConfig, RunConfig
from stobatch.evaluation.tables import data_root
from stobatch.loading import make_network
from stobatch.seeds import Seeds
from stobatch.training.device import use_device
from stobatch.training.trainable import working_precision

_TIMED = {"cpu": 32, "cuda": 1024}
"""Images of the pass that is timed."""
_FORWARD = 1 / 3
"""Of a pass forward and back."""
_VOTE_GRADIENTS = 8
"""Draws of a gradient step on a vote where the setting leaves it open."""
_PASSES = {"pixeldp": 1.2, "dpsgd": 0.8, "securesgd": 1.0, "securesgd_agm": 1.0, "adlm": 1.2, "sound": 2.0}
_PUBLISHED = 0.45
"""Passes of an example in a step, and for `published` of each attack step and both losses: the minutes of
results/recipe_times.json over what is counted here, on one CPU.
"""


def training_minutes(config: RunConfig) -> float:
    """Return an estimate for a training that was not begun."""
    settings = config.method.to_dict()
    examples = next(value for key, value in settings.items() if key in ("batch_size", "expected_batch_size"))
    attacked = settings.get("train_attack_steps")
    passes = _PUBLISHED * (attacked + 2) if attacked else _PASSES[config.method.title]
    return float(config.training.steps * examples * passes * _pass_seconds(config) / 60)


def pretraining_minutes(config: RunConfig, steps: int, batch_size: int) -> float:
    """Return an estimate for a public start; its losses are the method's own."""
    return steps * batch_size * _PASSES[config.method.title] * _pass_seconds(config) / 60


def certifying_minutes(config: RunConfig, *, votes: bool) -> float:
    """Return an estimate for the certificates of the test images asked about."""
    settings = config.certification
    draws = (settings.noise_draws + settings.selection_draws) * _FORWARD if votes else 10
    return _images(config, settings.limit) * draws * _pass_seconds(config) / 60


def attacking_minutes(config: RunConfig) -> float:
    """Return an estimate for all protocols and functions; broken images are not attacked again, which halves it."""
    settings, passes = config.evaluation, 0.0
    radii = len(settings.radii)
    for function in settings.functions:
        votes = function == "vote"
        limits = [limit for limit in (settings.limit, settings.vote_limit if votes else None) if limit]
        images = _images(config, min(limits, default=None))
        answer = settings.vote_draws * _FORWARD if votes else _FORWARD
        if "published" in settings.protocols:
            steps = sum(1 if name == "fgsm" else settings.attack_steps for name in settings.attacks)
            passes += images * radii * (steps + len(settings.attacks) * answer)
        if "adaptive" in settings.protocols:
            passes += images * radii * _adaptive(settings, votes, answer) / (1 if votes else 2)
    return passes * _pass_seconds(config) / 60


def _adaptive(settings: EvaluationConfig, votes: bool, answer: float) -> float:
    if votes:
        draws = settings.noise_draws or _VOTE_GRADIENTS
        return 2 * len(settings.vote_attacks) * (settings.adaptive_steps * settings.restarts * draws + answer)
    usual = settings.adaptive_steps * settings.restarts
    special = {"fgsm": 1.0, "square": settings.queries * _FORWARD, "apgd_t": usual * settings.num_aims}
    return sum(special.get(name, usual) for name in settings.adaptive_attacks)


def _images(config: RunConfig, limit: int | None) -> int:
    available = data.describe(config.data, data_root(config)).num_test
    return min(limit or available, available)


def _pass_seconds(config: RunConfig) -> float:
    """Seconds of one image forward and back through the network of a configuration, which is timed once."""
    info, model = data.describe(config.data, data_root(config)), config.model
    machine = config.machine
    network_key = (info.input_shape, model.architecture, model.normalisation, model.last_hidden_size)
    key = (*network_key, machine.device, machine.precision)
    if key not in _TIMES:
        device = use_device(machine)
        network = make_network(config, info, Seeds.reproducible(0), None).to(device)
        count = _TIMED[device.type]
        images = torch.zeros(count, *info.input_shape, device=device, requires_grad=True)
        with working_precision(machine.precision, device):
            _TIMES[key] = min(_once(network, images) for _ in range(3)) / count
    return _TIMES[key]


_TIMES: dict[tuple[Any, ...], float] = {}


def _once(network: nn.Module, images: torch.Tensor) -> float:
    started = time.perf_counter()
    network(images).sum().backward()
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return time.perf_counter() - started
