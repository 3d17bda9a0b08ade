"""Differential privacy on any torch module: clipping, noise, accounting, plans and guarantees.

A private step in a user's own loop, with any optimiser:

>>> import torch
>>> from stobatch import dp
>>> model, inputs, labels = torch.nn.Linear(2, 2), torch.randn(8, 2), torch.zeros(8).long()
>>> def losses(model, batch):
...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
>>> sums = dp.clipped_sum(model, losses, (inputs, labels), clip_norm=1.0)
>>> noisy = dp.add_noise(sums, sums.noise_stddev(noise_multiplier=1.1))
>>> for name, parameter in model.named_parameters():
...     parameter.grad = noisy[name] / 8  # a constant: the expected size of a batch, not this one's
"""

from typing import TYPE_CHECKING

from stobatch.lazy import lazy_names

if TYPE_CHECKING:
    from stobatch.dp.accounting import epsilon, noise_multiplier
    from stobatch.dp.clipping import ClippedGradients, clipped_sum
    from stobatch.dp.guarantee import PrivacyGuarantee
    from stobatch.dp.noise import add_noise

__all__ = ["ClippedGradients", "PrivacyGuarantee", "add_noise", "clipped_sum", "epsilon", "noise_multiplier"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accounting": ("epsilon", "noise_multiplier"),
        "clipping": ("ClippedGradients", "clipped_sum"),
        "guarantee": ("PrivacyGuarantee",),
        "noise": ("add_noise",),
    },
)
