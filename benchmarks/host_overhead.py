"""Two micro-benchmarks in one process, with communication that does nothing: the time that a library itself takes.

1. Host work per unit and step: a model of 32 units with 11 small parameters each, forward and backward;
   (time of the sharded model - time of the plain model) / 32. Collectives return at once, so what remains is
   the library's hooks, views, copies and bookkeeping.
2. Optimizer step and gradient clipping on 300 small parameters.

The world has two ranks of which only rank 0 exists: PyTorch's "fake" process group for FSDP2, zeroshard's
`FakeComm` for zeroshard. Models take turns, so a slow moment of the machine slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.planner.simulator.micro_benchmark import Unmeasured, apart, one_line, seconds, take_turns

UNITS = 32
OPTIMIZER_UNITS = 30  # of 10 parameters
DIM = 32
TIMEOUT_S = 300.0

Millis = dict[str, float]


@dataclass(frozen=True)
class HostWork:
    """Median times in milliseconds by library (and, for the optimizer, its variant)."""

    step_ms: Millis = field(default_factory=dict)  # forward and backward; "plain": of the model that is not sharded
    optimizer_ms: Millis = field(default_factory=dict)  # clipping and step; "plain" as above
    errors: dict[str, str] = field(default_factory=dict)

    def unit_ms(self, library: str) -> float | None:
        """Return a library's milliseconds of host work per unit and step, beyond those of the plain model."""
        if library not in self.step_ms:
            return None
        return (self.step_ms[library] - self.step_ms["plain"]) / UNITS

    @property
    def best_fsdp2_optimizer(self) -> str | None:
        """The name of FSDP2's fastest AdamW: fused, foreach or one by one."""
        variants = [name for name in self.optimizer_ms if name.startswith("fsdp2")]
        return min(variants, key=self.optimizer_ms.__getitem__, default=None)

    def unit_ratio(self) -> float | None:
        ours, theirs = self.unit_ms("zeroshard"), self.unit_ms("fsdp2")
        return None if ours is None or theirs is None else ours / theirs

    def optimizer_ratio(self) -> float | None:
        ours, theirs = self.optimizer_ms.get("zeroshard"), self.best_fsdp2_optimizer
        return None if ours is None or theirs is None else ours / self.optimizer_ms[theirs]


def measure(repeats: int, log_file: Path) -> HostWork:
    """Run both micro-benchmarks in a process of their own: the fake group must not meet a real one."""
    try:
        return apart(_measure_here, repeats, log_file=log_file, timeout_s=TIMEOUT_S)
    except Unmeasured as error:
        return HostWork(errors={"all": str(error)})


def _measure_here(repeats: int) -> HostWork:
    from zeroshard.utils.torch_compat import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    errors: dict[str, str] = {}
    return HostWork(_medians(_STEPS, repeats, errors), _medians(_OPTIMIZERS, repeats, errors), errors)


@dataclass(frozen=True)
class _Timed:
    """A timed action. `before` runs first, untimed: it zeroes the gradients, or makes some."""

    before: Callable[[], object]
    action: Callable[[], object]

    def __call__(self) -> float:
        """Run both; return the milliseconds of `action`."""
        self.before()
        return 1e3 * seconds(self.action)


def _medians(builders: dict[str, Callable[[], _Timed]], repeats: int, errors: dict[str, str]) -> Millis:
    """Return by name the median milliseconds of what each builder makes; add the error of one that fails to `errors`."""
    built: dict[str, Callable[[], float]] = {}
    for name, builder in builders.items():
        try:
            timed = builder()
            timed()
            built[name] = timed
        except Exception as error:
            errors[name] = one_line(error)
    return {name: median(samples) for name, samples in take_turns(built, repeats, warmup=3).items()}


class SmallUnit(nn.Module):
    """A module of 10 small parameters, 11 with a scale: two norms, three linear layers with biases."""

    def __init__(self, with_scale: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.maps = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("one", "two", "three")})
        self.scale = nn.Parameter(torch.ones(DIM)) if with_scale else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (4, DIM)
        x = x + self.maps["one"](self.norms[0](x))
        return x + self.maps["three"](self.maps["two"](self.norms[1](x))) * self.scale


def _step_model() -> nn.Sequential:
    return nn.Sequential(*(SmallUnit(with_scale=True) for _ in range(UNITS)))


def _optimizer_model() -> nn.Sequential:
    return nn.Sequential(*(SmallUnit(with_scale=False) for _ in range(OPTIMIZER_UNITS)))


def _forward_backward(model: nn.Module) -> Callable[[], object]:
    x = torch.randn(4, DIM)
    return lambda: model(x).sum().backward()


def _fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _adamw(model: nn.Module, **variant: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)


def _zeroshard(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    return zs.shard(model, _adamw(model, fused=True), stage=3, comm=FakeComm(rank=0, world_size=2))


def _step(wrap: Callable[[nn.Module], nn.Module]) -> _Timed:
    model = wrap(_step_model())
    return _Timed(model.zero_grad, _forward_backward(model))


def _step_zeroshard() -> _Timed:
    model, optimizer = _zeroshard(_step_model())
    return _Timed(optimizer.zero_grad, _forward_backward(model))


def _optimize(wrap: Callable[[nn.Module], nn.Module], **variant: bool) -> _Timed:
    """Time clipping and step of a PyTorch optimizer, with constant gradients, since the fake group reduces none."""
    model = wrap(_optimizer_model())
    optimizer, parameters = _adamw(model, **variant), list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)

    def action() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return _Timed(lambda: None, action)


def _optimize_zeroshard() -> _Timed:
    model, optimizer = _zeroshard(_optimizer_model())
    forward_backward = _forward_backward(model)

    def before() -> None:
        optimizer.zero_grad()
        forward_backward()

    def action() -> None:
        zs.clip_grad_norm_(model, 1.0)
        optimizer.step()

    return _Timed(before, action)


_STEPS: dict[str, Callable[[], _Timed]] = {
    "plain": partial(_step, nn.Module.train),
    "fsdp2": partial(_step, _fsdp2),
    "zeroshard": _step_zeroshard,
}
_OPTIMIZERS: dict[str, Callable[[], _Timed]] = {
    "plain": partial(_optimize, nn.Module.train, fused=True),
    "fsdp2 fused": partial(_optimize, _fsdp2, fused=True),
    "fsdp2 foreach": partial(_optimize, _fsdp2, foreach=True),
    "fsdp2 one by one": partial(_optimize, _fsdp2, foreach=False),
    "zeroshard": _optimize_zeroshard,
}
