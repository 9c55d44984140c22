"""`zs.Muon`: Muon for hidden matrices and AdamW for everything else, as one optimizer.

The arithmetic is torch's (torch.optim.Muon, torch.optim.AdamW). `use_muon` of a parameter group or, as in DeepSpeed, of each
parameter selects one of the two. Source: Jordan et al., Muon, 2024; https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..errors import ConfigError
from ..utils.torch_compat import muon
from .whole_matrix import whole_matrix

_MUON = {
    "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7,
    "ns_steps": 5, "adjust_lr_fn": None,
}  # fmt: skip
_ADAMW = {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}


class Muon(torch.optim.Optimizer):
    """Muon for some parameter groups and AdamW for the others.

    Args:
        params: parameters or groups. A group with use_muon=True takes the options of torch.optim.Muon (lr, momentum,
            weight_decay, nesterov, ns_steps, ns_coefficients, eps, adjust_lr_fn), one with False those of AdamW (lr, betas, eps,
            weight_decay). A group without it is divided by the attribute `use_muon`, which each of its parameters must have.
        lr: learning rate of groups that name none.
        adam_lr: learning rate of AdamW's groups that name none; None: lr.

    Raises:
        ConfigError: a parameter has no use_muon, neither by its group nor itself; or it has use_muon=True and is no matrix and no stack
            of matrices, of three dimensions, each of which is stepped by itself.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, adam_lr: float | None = None) -> None:
        groups, given = [], list(params)
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            members: list[Any] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            untold = [param for param in members if "use_muon" not in group and not hasattr(param, "use_muon")]
            if untold:
                raise ConfigError(
                    f"zs.Muon: {len(untold)} parameters, first of shape {tuple(untold[0].shape)}, are said to be neither for Muon nor for "
                    "AdamW: give each `param.use_muon = True` (hidden matrices) or False (embeddings, heads, norms, biases), or groups a "
                    "use_muon."
                )
            halves: dict[bool, list[Tensor]] = {True: [], False: []}
            for param in members:
                told = group["use_muon"] if "use_muon" in group else param.use_muon  # noqa: SIM401  # it may have none
                halves[bool(told)].append(param)
            for param in halves[True]:
                if param.dim() not in (2, 3):
                    raise ConfigError(
                        f"zs.Muon: a parameter of shape {tuple(param.shape)} has use_muon=True: expected matrices, of 2 dimensions, or a stack "
                        "of them (experts), of 3."
                    )
            for use_muon, half in halves.items():
                defaults = {"lr": lr if use_muon or adam_lr is None else adam_lr, **(_MUON if use_muon else _ADAMW)}
                if half:
                    groups.append({**defaults, **group, "params": half, "use_muon": use_muon})
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            if params and group["use_muon"]:
                for param in params:
                    self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffers = [self.state[param]["momentum_buffer"] for param in params]
                options = {name: group[name] for name in ("lr", *_MUON)}
                matrices = [_matrices(tensors) for tensors in (params, grads, buffers)]
                muon(*matrices, has_complex=False, **options)
            elif params:
                for param in (param for param in params if not self.state[param]):  # the first step of a parameter
                    zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[param].update(step=torch.tensor(0.0), **zeros)
                columns = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
                beta1, beta2 = group["betas"]
                adamw(
                    params, grads, columns[0], columns[1], [], columns[2], amsgrad=False, beta1=beta1, beta2=beta2,
                    lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
        return loss


def _matrices(tensors: list[Tensor]) -> list[Tensor]:
    """Return matrices, and the slices of stacks of matrices: each is stepped by itself."""
    return [matrix for tensor in tensors for matrix in (tensor.unbind(0) if tensor.dim() == 3 else [tensor])]


whole_matrix(Muon, where=lambda param, options: options["use_muon"], stacks=True)
