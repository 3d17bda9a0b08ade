"""Deliberately broken methods: what every privacy audit has to catch before its silence means anything.

Each is the sound method with one mistake that people really make. They train, save and load like any method, and what
they say about their privacy is labelled as the claim of a control.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Persons
from stobatch.data.persons import as_dense
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import SettingError
from stobatch.models import Classifier
from stobatch.seeds import Stream
from stobatch.sound.losses import NormalSampler
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import Gradients
from stobatch.types import Status


class HalfNoise(DpSgdTrainable):
    """Noise of half the planned standard deviation, as when a scale is taken for a variance."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.noise_stddev /= 2


class SharedNoise(DpSgdTrainable):
    """One draw of noise for all steps, as when each of them seeds its generator the same way."""

    def _noise(self, step: int, trainer: int) -> Stream:
        return super()._noise(0, trainer)


class NoClipping(DpSgdTrainable):
    """Gradients as long as they come, under noise for clipped ones."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.clip_norm = inf


class SplitPersons(DpSgdTrainable):
    """Anyone with two records or more is taken for two persons, as when one has an account at home and at work."""

    def _persons(self) -> Persons | None:
        whole = super()._persons()
        if whole is None:
            return None
        rows, counts = whole.rows(torch.arange(len(whole)))
        within = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        codes = torch.empty_like(rows)
        codes[rows] = 2 * torch.arange(len(whole)).repeat_interleave(counts) + within % 2
        return Persons.in_memory(as_dense(codes))

    def _canary_units(self, canaries: Tensor) -> Tensor:
        return canaries.repeat_interleave(2) if self.records_per_unit > 1 else canaries


class RecordClipping(DpSgdTrainable):
    """Each record is clipped by itself, so that a person adds as many contributions as records."""

    def _clipped(self, inputs: Tensor, labels: Tensor, step: int, normal: NormalSampler, per: int = 1) -> Gradients:
        return super()._clipped(inputs, labels, step, normal, 1)

    @property
    def _canary_norm(self) -> float:
        return self.records_per_unit * super()._canary_norm


@dataclass(frozen=True, kw_only=True)
class ControlPlan(DpSgdPlan):
    """The sound method's plan, which does not hold for a method that is broken."""

    mistake: str

    def _relabel(self, guarantee: PrivacyGuarantee) -> PrivacyGuarantee:
        return replace(
            guarantee,
            status=Status.CLAIMED,
            source="a control that is broken on purpose",
            objections=(f"the mistake: {self.mistake}",),
        )

    @property
    def claim(self) -> PrivacyGuarantee:
        return self._relabel(super().claim)

    def after(self, accounted_steps: int) -> PrivacyGuarantee:
        return self._relabel(super().after(accounted_steps))


class HalfNoiseConfig(SoundConfig, name="control_half_noise"):
    """The sound method's settings, for the control with half the noise."""


class SharedNoiseConfig(SoundConfig, name="control_shared_noise"):
    """The sound method's settings, for the control that draws its noise once."""


class NoClippingConfig(SoundConfig, name="control_no_clipping"):
    """The sound method's settings, for the control that does not clip."""


class SplitPersonsConfig(SoundConfig, name="control_split_persons"):
    """The sound method's settings, for the control that takes a person for two."""


class RecordClippingConfig(SoundConfig, name="control_record_clipping"):
    """The sound method's settings, for the control that clips the records of a person one by one."""


class Control(Sound):
    """The sound method with a mistake."""

    has_trainers = False
    mistake: ClassVar[str]

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> ControlPlan:
        right = super().plan(config, info, network)
        return ControlPlan(**{field.name: getattr(right, field.name) for field in fields(right)}, mistake=self.mistake)


class HalfNoiseControl(Control):
    """See `HalfNoise`."""

    config_class, trainable, mistake = HalfNoiseConfig, HalfNoise, "half of the planned noise"


class SharedNoiseControl(Control):
    """See `SharedNoise`."""

    config_class, trainable, mistake = SharedNoiseConfig, SharedNoise, "noise drawn once and shared by all steps"


class NoClippingControl(Control):
    """See `NoClipping`."""

    config_class, trainable, mistake = NoClippingConfig, NoClipping, "gradients are not clipped"


class PersonControl(Control):
    """A mistake about persons, which takes data that have some."""

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> ControlPlan:
        if info.num_persons is None:
            raise SettingError(
                f"method '{config.method.title}' needs data whose records have persons.",
                why="Its mistake is one about persons: without them it is the sound method.",
                remedy="Hand the data over with stobatch.data.from_tensors(..., groups=...), or name a manifest.",
            )
        return super().plan(config, info, network)


class SplitPersonsControl(PersonControl):
    """See `SplitPersons`."""

    config_class, trainable, mistake = SplitPersonsConfig, SplitPersons, "a person's records are taken for two persons'"


class RecordClippingControl(PersonControl):
    """See `RecordClipping`."""

    config_class, trainable = RecordClippingConfig, RecordClipping
    mistake = "the records of a person are clipped one by one"
