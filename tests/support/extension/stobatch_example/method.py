"""DP-SGD on smoothed labels: the sound family's plan, step and certificates with another loss."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.dp.clipping import Batch
from stobatch.settings import setting
from stobatch.sound.losses import Objective, Ramp, Term
from stobatch.sound.method import DpSgdFamily
from stobatch.sound.settings import DpSgdSettings


@dataclass(frozen=True)
class SmoothedLabels(Term):
    """Cross-entropy with a label that leaves a share to the other classes."""

    share: float

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(network(inputs), labels, label_smoothing=self.share, reduction="none")


class SmoothLabelsConfig(DpSgdSettings, name="smooth_labels"):
    """Its settings: the family's, and one of its own."""

    label_share: float = setting(0.1, at_least=0, below=1, doc="What the label leaves to all classes together")

    def objective(self, attack_chunk: int) -> Objective:
        return Objective(((1.0, SmoothedLabels(self.label_share)),), Ramp(0.0, 0.0))


class SmoothLabels(DpSgdFamily):
    """The method that the entry point names; stateless."""

    config_class = SmoothLabelsConfig
