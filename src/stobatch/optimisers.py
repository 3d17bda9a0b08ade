"""PyTorch's optimisers without what its compiler adds to them."""

from __future__ import annotations

from inspect import unwrap

import torch


def without_compiler(rule: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the same rule without wrappers that import PyTorch's compiler: a second and a half, and 50 MiB.

    PyTorch wraps methods of optimisers so that its compiler passes them over, and the wrappers import it whether
    anything is compiled or not. What they wrap is called as it is, and `step` without recording gradients as before.
    """
    methods = {name: unwrap(getattr(rule, name)) for name in _WRAPPED}
    return type(rule.__name__, (rule,), {**methods, "step": torch.no_grad()(unwrap(rule.step))})


_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")

OPTIMISERS = {"adam": without_compiler(torch.optim.Adam), "sgd": without_compiler(torch.optim.SGD)}
