"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2).

    u     = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param = (1 - lr * weight_decay) * param - lr * u        decoupled weight decay
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad

It has one state as large as the parameter, where Adam has two: 4 bytes per parameter less on the host. Every operation is
elementwise and gives an element the same bits at any position in its tensor, so that shards, chunks and whole
parameters agree (tests/optim/test_cpu_kernels.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..seam import Options, State
from ..tiers import Kernel, register


class Lion(torch.optim.Optimizer):
    """The Lion optimizer, in torch.optim's style: `Lion(model.parameters(), lr=1e-4, weight_decay=0.1)`.

    The paper uses an lr 3-10 times smaller and a weight_decay 3-10 times larger than for AdamW. State: "exp_avg".
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ConfigError(f"Lion: expected lr to be a number or a tensor of 1 element, got {lr.numel()} elements.")
        if not lr >= 0.0:
            raise ConfigError(f"Lion: expected lr >= 0, got {lr}.")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"Lion: expected betas to be two numbers in [0, 1), got {betas}.")
        if not weight_decay >= 0.0:
            raise ConfigError(f"Lion: expected weight_decay >= 0, got {weight_decay}.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise ConfigError("Lion: expected dense gradients, got a sparse one; use sparse=False.")
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                lion_update(param, param.grad, state["exp_avg"], group)
        return loss


def lion_update(param: Tensor, grad: Tensor, exp_avg: Tensor, options: Options, scratch: Tensor | None = None) -> None:
    """Update param and exp_avg in place, in five elementwise passes (four without weight decay).

    scratch: memory like param for the update's direction; None: it is allocated.
    """
    lr, weight_decay = float(options["lr"]), float(options["weight_decay"])
    beta1, beta2 = options["betas"]
    if options["maximize"]:
        grad = torch.neg(grad)
    # before exp_avg is updated: Lion's beta1 is for the update only
    direction = torch.lerp(exp_avg, grad, 1 - beta1, out=scratch).sign_()
    if weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    param.add_(direction, alpha=-lr)
    exp_avg.lerp_(grad, 1 - beta2)


class _Lion(Kernel):
    """Kernel of zs.Lion: its own passes, with a scratch buffer that stays in the cache."""

    columns = ("exp_avg",)
    passes = 5

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._own = threading.local()  # .scratch: one buffer per thread

    def count(self, state: State) -> None:
        return None

    def update(self, param: Tensor, grad: Tensor, columns: Sequence[Tensor], count: None, options: Options) -> None:
        scratch = getattr(self._own, "scratch", None)
        if scratch is None or scratch.numel() < param.numel():
            scratch = self._own.scratch = torch.empty_like(param, requires_grad=False)
        lion_update(param, grad, columns[0], options, scratch[: param.numel()])


register(Lion, _Lion)
