"""Two micro-benchmarks on one process, with communication that does nothing: what a library itself costs.

1. Host work per unit and step: a model of 32 units with 11 small parameters each, forward and backward;
   (time sharded - time of the plain module) / 32. Collectives return at once, so what remains is hooks,
   views, copies and bookkeeping.
2. Optimizer step and gradient clipping on 300 small parameters.

The world has two ranks of which only rank 0 exists: PyTorch's "fake" process group for FSDP2, zeroshard's
`FakeComm` for zeroshard. Models take turns, so a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Callable

from .worker_group import one_thread_per_rank

UNITS = 32
OPTIMIZER_UNITS, OPTIMIZER_UNIT_PARAMETERS = 30, 10
DIM = 32
TIMEOUT_S = 300.0

Millis = dict[str, float]


@dataclass(frozen=True)
class HostWork:
    """Medians in milliseconds by library (and, for the optimizer, its variant)."""

    step_ms: Millis = field(default_factory=dict)  # forward and backward, with "plain"
    optimizer_ms: Millis = field(default_factory=dict)  # clipping and step, with "plain"
    errors: dict[str, str] = field(default_factory=dict)

    def unit_ms(self, library: str) -> float | None:
        """Host work per unit and step, beyond the plain module's."""
        if library not in self.step_ms:
            return None
        return (self.step_ms[library] - self.step_ms["plain"]) / UNITS

    @property
    def best_fsdp2_optimizer(self) -> str | None:
        """FSDP2's fastest AdamW: fused, foreach or one by one."""
        variants = [name for name in self.optimizer_ms if name.startswith("fsdp2")]
        return min(variants, key=self.optimizer_ms.__getitem__, default=None)

    @property
    def unit_ratio(self) -> float | None:
        ours, theirs = self.unit_ms("zeroshard"), self.unit_ms("fsdp2")
        return None if ours is None or theirs is None else ours / theirs

    @property
    def optimizer_ratio(self) -> float | None:
        ours, theirs = self.optimizer_ms.get("zeroshard"), self.best_fsdp2_optimizer
        return None if ours is None or theirs is None else ours / self.optimizer_ms[theirs]


def measure(repeats: int) -> HostWork:
    """Run both micro-benchmarks in a process of their own: the fake group must not meet a real one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with one_thread_per_rank():
        process = context.Process(target=_serve, args=(there, repeats), daemon=True)
        process.start()
    there.close()
    try:
        answer = here.recv() if here.poll(TIMEOUT_S) else f"no answer within {TIMEOUT_S:.0f} s"
    except EOFError:
        answer = "the process died"
    process.kill()
    process.join()
    return answer if isinstance(answer, HostWork) else HostWork(errors={"all": answer})


def _serve(pipe: Connection, repeats: int) -> None:
    try:
        pipe.send(_measure_here(repeats))
    except Exception:
        pipe.send(traceback.format_exc())


def _measure_here(repeats: int) -> HostWork:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    errors: dict[str, str] = {}
    step_ms = _medians(_prepare(_STEPS, errors), repeats)
    optimizer_ms = _medians(_prepare(_OPTIMIZERS, errors), repeats)
    return HostWork(step_ms, optimizer_ms, errors)


@dataclass(frozen=True)
class _Timed:
    """`before` runs untimed (zero the gradients, or make some), then `action` is timed."""

    before: Callable[[], None]
    action: Callable[[], None]


def _prepare(builders: dict[str, Callable[[], _Timed]], errors: dict[str, str]) -> dict[str, _Timed]:
    """Build what can be built here; say why the rest cannot."""
    prepared = {}
    for name, builder in builders.items():
        try:
            prepared[name] = builder()
            prepared[name].before()
            prepared[name].action()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
            prepared.pop(name, None)
    return prepared


def _medians(timed: dict[str, _Timed], repeats: int) -> Millis:
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for index in range(repeats + 3):  # the first three warm up
        for name, item in timed.items():
            item.before()
            start = time.perf_counter()
            item.action()
            if index >= 3:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in samples.items()}


def _small_model(units: int, with_scale: bool):
    """Units of 10 small parameters, 11 with a scale: two norms, three linear maps with biases."""
    import torch
    from torch import nn

    class SmallUnit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
            self.maps = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("one", "two", "three")})
            self.scale = nn.Parameter(torch.ones(DIM)) if with_scale else 1.0

        def forward(self, x):  # (4, DIM)
            x = x + self.maps["one"](self.norms[0](x))
            return x + self.maps["three"](self.maps["two"](self.norms[1](x))) * self.scale

    torch.manual_seed(0)
    return nn.Sequential(*(SmallUnit() for _ in range(units)))


def _forward_backward(model) -> Callable[[], None]:
    import torch

    x = torch.randn(4, DIM)
    return lambda: model(x).sum().backward()


def _fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _zeroshard(model, optimizer=None):
    import zeroshard as zs

    from ..comm.fake import FakeComm

    return zs.shard(model, optimizer, stage=3, comm=FakeComm(rank=0, world_size=2))


def _step_plain() -> _Timed:
    model = _small_model(UNITS, with_scale=True)
    return _Timed(model.zero_grad, _forward_backward(model))


def _step_fsdp2() -> _Timed:
    model = _fsdp2(_small_model(UNITS, with_scale=True))
    return _Timed(model.zero_grad, _forward_backward(model))


def _step_zeroshard() -> _Timed:
    model = _small_model(UNITS, with_scale=True)
    model, optimizer = _zeroshard(model, _adamw(model, fused=True))
    return _Timed(optimizer.zero_grad, _forward_backward(model))


def _adamw(model, **variant):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)


def _clip_and_step(model, optimizer) -> _Timed:
    """Clipping and step of an optimizer of PyTorch, on gradients of a constant: a fake world sums nothing."""
    import torch

    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)

    def action() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return _Timed(lambda: None, action)


def _optimizer_model():
    return _small_model(OPTIMIZER_UNITS, with_scale=False)


def _optimize_plain() -> _Timed:
    model = _optimizer_model()
    return _clip_and_step(model, _adamw(model, fused=True))


def _optimize_fsdp2(**variant: bool) -> Callable[[], _Timed]:
    def build() -> _Timed:
        model = _fsdp2(_optimizer_model())
        return _clip_and_step(model, _adamw(model, **variant))

    return build


def _optimize_zeroshard() -> _Timed:
    import zeroshard as zs

    model = _optimizer_model()
    model, optimizer = _zeroshard(model, _adamw(model, fused=True))
    forward_backward = _forward_backward(model)

    def before() -> None:
        optimizer.zero_grad()
        forward_backward()

    def action() -> None:
        zs.clip_grad_norm_(model, 1.0)
        optimizer.step()

    return _Timed(before, action)


_STEPS = {"plain": _step_plain, "fsdp2": _step_fsdp2, "zeroshard": _step_zeroshard}
_OPTIMIZERS = {
    "plain": _optimize_plain,
    "fsdp2 fused": _optimize_fsdp2(fused=True),
    "fsdp2 foreach": _optimize_fsdp2(foreach=True),
    "fsdp2 one by one": _optimize_fsdp2(foreach=False),
    "zeroshard": _optimize_zeroshard,
}
