"""Two micro-benchmarks in one process, with communication that does nothing: the time that a library itself takes.

1. Host work per unit and step: a model of 32 units with 11 small parameters each, forward and backward;
   (time of the sharded model - time of the plain model) / 32. Collectives return at once, so what remains is
   the library's hooks, views, copies and bookkeeping.
2. Optimizer step and gradient clipping on 300 small parameters.

The world has two ranks of which only rank 0 exists: PyTorch's "fake" process group for FSDP2, zeroshard's
`FakeComm` for zeroshard. Models take turns, so a slow moment of the machine slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.utils.sheets import WARNING, Sheet

from .micro_benchmark import Unmeasured, apart, one_line, seconds, take_turns
from .tables import Goal

UNITS = 32
OPTIMIZER_UNITS = 30  # of 10 parameters
DIM = 32
LIMIT_S = 300.0

Millis = dict[str, float]


@dataclass(frozen=True)
class HostWork:
    """Median times in milliseconds by library (and, for the optimizer, its variant)."""

    step_ms: Millis = field(default_factory=dict)  # forward and backward; "plain": of the model that is not sharded
    optimizer_ms: Millis = field(default_factory=dict)  # clipping and step; "plain" as above
    errors: dict[str, str] = field(default_factory=dict)

    def unit_ms(self, library: str) -> float | None:
        """Return a library's milliseconds of host work per unit and step, beyond those of the plain model."""
        return (self.step_ms[library] - self.step_ms["plain"]) / UNITS if library in self.step_ms else None

    @property
    def goals(self) -> list[Goal]:
        """The goals with their measured values; FSDP2's fastest optimizer counts: fused, foreach or one by one."""
        fsdp2 = min((ms for name, ms in self.optimizer_ms.items() if name.startswith("fsdp2")), default=None)
        rows = (
            ("host work per unit and step / FSDP2", 0.25, self.unit_ms("zeroshard"), self.unit_ms("fsdp2")),
            ("optimizer step and clipping / FSDP2", 0.20, self.optimizer_ms.get("zeroshard"), fsdp2),
        )
        return [
            Goal(text, None if ours is None or theirs is None else ours / theirs, limit, "host")
            for text, limit, ours, theirs in rows
        ]

    def sheet(self) -> Sheet:
        """Return the table: milliseconds, and their ratio to plain PyTorch."""
        rows = []
        for library in ("fsdp2", "zeroshard"):
            ms = self.unit_ms(library)
            rows.append([f"host work per unit and step, {library}", "-" if ms is None else f"{ms:.3f}", ""])
        for name, ms in self.optimizer_ms.items():
            label = f"clipping and AdamW step, 300 parameters, {name}"
            rows.append([label, f"{ms:.2f}", f"{ms / self.optimizer_ms['plain']:.2f}"])
        notes = [(f"{name}: not measured: {error}", WARNING) for name, error in self.errors.items()]
        header = ("", "ms", "of plain PyTorch")
        return Sheet("Without communication, world of 2, rank 0 only", header, rows, numbers=True, notes=notes)


def measure(repeats: int, log_file: Path) -> HostWork:
    """Run both micro-benchmarks in a process of their own: the fake group must not meet a real one."""
    try:
        return apart(_measure_here, repeats, log_file=log_file, timeout_s=LIMIT_S)
    except Unmeasured as error:
        return HostWork(errors={"all": str(error)})


def _measure_here(repeats: int) -> HostWork:
    from zeroshard.utils.torch_compat import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = HostWork()
    for builders, medians in ((_STEPS, found.step_ms), (_OPTIMIZERS, found.optimizer_ms)):
        built: dict[str, Callable[[], float]] = {}
        for name, builder in builders.items():
            try:
                before, action = builder()

                def timed(before: Callable[[], object] = before, action: Callable[[], object] = action) -> float:
                    before()  # untimed: it zeroes the gradients, or makes some
                    return 1e3 * seconds(action)

                timed()
                built[name] = timed
            except Exception as error:
                found.errors[name] = one_line(error)
        medians |= {name: median(samples) for name, samples in take_turns(built, repeats, warmup=3).items()}
    return found


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


def _build(
    library: str, units: Iterable[nn.Module], **variant: bool
) -> tuple[Callable[[], object], Callable[[], object], torch.optim.Optimizer, nn.Module]:
    """Return a library's (forward and backward, clipping, optimizer, model). variant: of AdamW."""
    model: nn.Module = nn.Sequential(*units)
    if library == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    if library == "zeroshard":
        model, optimizer = zs.shard(model, optimizer, stage=3, comm=FakeComm(rank=0, world_size=2))
        clip = partial(zs.clip_grad_norm_, model, 1.0)
    x = torch.randn(4, DIM)
    return lambda: model(x).sum().backward(), clip, optimizer, model


def _step(library: str) -> tuple[Callable[[], object], Callable[[], object]]:
    forward_backward, _, optimizer, _ = _build(library, (SmallUnit(with_scale=True) for _ in range(UNITS)), fused=True)
    return optimizer.zero_grad, forward_backward


def _optimize(library: str, **variant: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what prepares, and what does, clipping and a step. Peers have constant gradients: the fake group reduces none."""
    units = (SmallUnit(with_scale=False) for _ in range(OPTIMIZER_UNITS))
    forward_backward, clip, optimizer, model = _build(library, units, **variant)
    if library != "zeroshard":
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    def before() -> None:
        if library == "zeroshard":
            optimizer.zero_grad()
            forward_backward()

    def action() -> None:
        clip()
        optimizer.step()

    return before, action


_STEPS = {library: partial(_step, library) for library in ("plain", "fsdp2", "zeroshard")}
_OPTIMIZERS = {
    "plain": partial(_optimize, "plain", fused=True),
    "fsdp2 fused": partial(_optimize, "fsdp2", fused=True),
    "fsdp2 foreach": partial(_optimize, "fsdp2", foreach=True),
    "fsdp2 one by one": partial(_optimize, "fsdp2", foreach=False),
    "zeroshard": partial(_optimize, "zeroshard", fused=True),
}
