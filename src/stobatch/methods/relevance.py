"""DP-SGD with a step that releases something else than a gradient: how relevant the values of a layer are.

Methods that give more noise to some values than to others learn from the data which these are. That look at the data
has to be paid for like any other. Here it is one of the planned steps: the same Poisson sample, one vector per example
clipped to the same norm, the same noise. So T steps are T steps to the accountant, whatever they release.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from stobatch.methods.dpsgd_trainable import DpSgdTrainable
from stobatch.objectives.private import Coins
from stobatch.privacy.per_example import clipping_weights
from stobatch.training.engines import Gradients

RELEVANCE = "relevance"


class RelevanceTrainable(DpSgdTrainable):
    """DP-SGD of which one step releases relevances, and descends on nothing."""

    @property
    @abstractmethod
    def relevance_step(self) -> int:
        """Which."""

    @abstractmethod
    def relevances(self, inputs: Tensor, labels: Tensor, coins: Coins) -> Tensor:
        """Of each value of the layer, for each example; a function of that example alone."""

    @abstractmethod
    def take(self, relevance: Tensor) -> None:
        """The released mean over examples, noise included; kept in a buffer of the network."""

    @property
    @abstractmethod
    def relevance_shape(self) -> tuple[int, ...]:
        """The layer's."""

    @property
    def largest_release(self) -> int:
        return max(super().largest_release, prod(self.relevance_shape))

    def targets(self, step: int) -> Mapping[str, Tensor]:
        if step != self.relevance_step:
            return super().targets(step)
        return {RELEVANCE: torch.zeros(self.relevance_shape, device=self.network.device, dtype=self.network.dtype)}

    def _clipped(self, inputs: Tensor, labels: Tensor, step: int, coins: Coins) -> Gradients:
        if step != self.relevance_step:
            return super()._clipped(inputs, labels, step, coins)
        found = self.relevances(inputs, labels, coins).detach()
        # In float64, and vectors that are no numbers left out: the bound must not depend on what the data do.
        rows = found.flatten(1).double()
        rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
        weights = clipping_weights(rows.norm(dim=1), self.clip_norm)
        return {RELEVANCE: (weights @ rows).reshape(self.relevance_shape).to(found.dtype)}

    def released(self, step: int, gradients: Gradients) -> None:
        super().released(step, gradients)
        if step == self.relevance_step:
            self.take(gradients[RELEVANCE])
