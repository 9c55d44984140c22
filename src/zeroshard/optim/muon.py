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
from .inner_optimizer import Options
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
        ConfigError: a parameter has no use_muon, neither by its group nor itself; or it has use_muon=True and is not a matrix.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, adam_lr: float | None = None) -> None:
        groups, given = [], list(params)
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            for use_muon, members in _divided(group):
                defaults = {"lr": lr if use_muon or adam_lr is None else adam_lr, **(_MUON if use_muon else _ADAMW)}
                groups.append({**defaults, **group, "params": members, "use_muon": use_muon})
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
            if params:
                (self._step_muon if group["use_muon"] else self._step_adamw)(group, params)
        return loss

    def _step_muon(self, group: Options, params: list[Tensor]) -> None:
        for param in params:
            self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        muon(
            params, _gradients(params), [self.state[p]["momentum_buffer"] for p in params], has_complex=False,
            **{name: group[name] for name in names},
        )  # fmt: skip

    def _step_adamw(self, group: Options, params: list[Tensor]) -> None:
        for param in (param for param in params if not self.state[param]):  # the first step of a parameter
            zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            self.state[param].update(step=torch.tensor(0.0), **zeros)
        columns = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")]
        beta1, beta2 = group["betas"]
        adamw(
            params, _gradients(params), columns[0], columns[1], [], columns[2], amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


whole_matrix(Muon, where=lambda param, options: options["use_muon"])


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _divided(group: Options) -> list[tuple[bool, list[Tensor]]]:
    """Return (stepped by Muon, parameters) for a group, or for both halves of a group whose parameters differ in use_muon."""
    members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    untold = [param for param in members if "use_muon" not in group and not hasattr(param, "use_muon")]
    if untold:
        raise ConfigError(
            f"zs.Muon: {len(untold)} parameters, first of shape {tuple(untold[0].shape)}, are said to be neither for Muon nor for AdamW: "
            "give each `param.use_muon = True` (hidden matrices) or False (embeddings, heads, norms, biases), or groups a use_muon."
        )
    kind = lambda param: bool(group["use_muon"] if "use_muon" in group else param.use_muon)  # noqa: E731, SIM401
    halves = [(use_muon, [param for param in members if kind(param) is use_muon]) for use_muon in (True, False)]
    for param in halves[0][1]:
        if param.dim() != 2:
            raise ConfigError(
                f"zs.Muon: a parameter of shape {tuple(param.shape)} has use_muon=True: expected matrices, of 2 dimensions."
            )
    return [(use_muon, half) for use_muon, half in halves if half]
