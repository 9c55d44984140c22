"""The zoo: small models of every kind, and the comparison of a sharded run with a one-process one.

`check(Case(...), stage=3, ...)` trains the model on `world` ranks as threads and beside it in plain torch, where
every rank is a replica and gradients are averaged by hand in rank order; it compares every gradient at each step and
all parameters and buffers at the end, bit for bit unless a tolerance is given.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import GENERATOR
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import run_threads

#: stage 2, stage 3 in one common memory, stage 3 with gather and release
MODES = [
    pytest.param({"stage": 2}, id="stage2"),
    pytest.param({"stage": 3, "map_shared": True}, id="stage3-mapped"),
    pytest.param({"stage": 3, "map_shared": False}, id="stage3"),
]
every_mode = pytest.mark.parametrize("mode", MODES)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def call(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: what the model returns for (*batch)."""
    return model(*batch)


@dataclass
class Case:
    """A model, its data and how a loss comes out of both. batches[step][rank] is what `loss(model, batch)` gets."""

    model: nn.Module
    batches: list[list[Any]]
    loss: Callable[[nn.Module, Any], Tensor | None] = call
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    tolerance: float = 0.0
    after: Callable[[nn.Module], None] | None = None  # runs after each step

    @property
    def world(self) -> int:
        return len(self.batches[0])


@dataclass
class Trace:
    """What one rank saw: losses and (name -> gradient) by step, and the final state dict."""

    losses: list[float | None] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    notes: Any = None


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def reference(case: Case) -> list[Trace]:
    """One trace per rank, of plain torch."""
    models = [copy.deepcopy(case.model) for _ in range(case.world)]
    optimizers = [case.optimizer(trainable(m)) for m in models]
    traces = [Trace() for _ in models]
    for batches in case.batches:
        for model, batch, trace in zip(models, batches, traces, strict=True):
            loss = case.loss(model, batch)
            if loss is not None:
                loss.backward()
            trace.losses.append(None if loss is None else loss.item())
        mean = _mean_gradients(models)
        for model, optimizer, trace in zip(models, optimizers, traces, strict=True):
            for name, param in model.named_parameters():
                param.grad = None if mean.get(name) is None else mean[name].clone()
            trace.grads.append(mean)
            optimizer.step()
            optimizer.zero_grad()
            if case.after is not None:
                case.after(model)
    for model, trace in zip(models, traces, strict=True):
        trace.state = {k: v.detach().clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return traces


def _mean_gradients(models: list[nn.Module]) -> dict[str, Tensor | None]:
    """The mean over ranks in rank order; None where no rank has a gradient, zeros where one has none."""
    mean: dict[str, Tensor | None] = {}
    for name, param in models[0].named_parameters():
        if not param.requires_grad:
            continue
        grads = [dict(m.named_parameters())[name].grad for m in models]
        if all(g is None for g in grads):
            mean[name] = None
            continue
        total = torch.zeros_like(param)
        for grad in grads:
            total = total if grad is None else total + grad
        mean[name] = total * (1.0 / len(models))
    return mean


def sharded(case: Case, rank: int, **options: Any) -> Trace:
    """The trace of one rank of a sharded run."""
    model = copy.deepcopy(case.model)
    model, optimizer = zs.shard(model, case.optimizer(trainable(model)), **options)
    trace = Trace()
    for batches in case.batches:
        loss = case.loss(model, batches[rank])
        if loss is not None:
            loss.backward()
        trace.losses.append(None if loss is None else loss.item())
        trace.grads.append(zs.full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if case.after is not None:
            case.after(model)
    trace.state = zs.full_state_dict(model)
    trace.notes = zs.report(model)
    exact = zs.full_state_dict(model, masters=True)
    zs.close(model)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            same(value, exact[name].to(value.dtype), f"{name} after close", 0.0)
    return trace


def same(got: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    """Assert equal values (bit for bit, or within a relative and absolute tolerance), shapes and dtypes."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: {got.shape} {got.dtype}"
    if tolerance:
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")
    else:
        difference = (got.double() - wanted.double()).abs().max().item() if got.numel() else 0.0
        assert torch.equal(got, wanted), f"{what}: differs by at most {difference:.3e}"


def compare(got: Trace, wanted: Trace, tolerance: float) -> None:
    """Assert that a rank saw what its reference saw."""
    for step, (mine, theirs) in enumerate(zip(got.grads, wanted.grads, strict=True)):
        assert set(mine) == set(theirs), f"step {step}: {sorted(set(mine) ^ set(theirs))}"
        for name, grad in theirs.items():
            assert (mine[name] is None) == (grad is None), f"step {step}, gradient of {name}: {mine[name]} / {grad}"
            if grad is not None:
                same(mine[name], grad, f"step {step}, gradient of {name}", tolerance)
        if wanted.losses[step] is not None:
            assert got.losses[step] == pytest.approx(wanted.losses[step], rel=max(tolerance, 1e-6))
    assert list(got.state) == list(wanted.state)
    for name, value in wanted.state.items():
        same(got.state[name], value, f"final {name}", tolerance)


def check(case: Case, **options: Any) -> list[Trace]:
    """Train sharded and plain, compare, and return the sharded traces."""
    wanted = reference(case)
    traces = run_threads(case.world, lambda rank: sharded(case, rank, **options))
    for mine, theirs in zip(traces, wanted, strict=True):
        compare(mine, theirs, case.tolerance)
    return traces


def normal_batches(steps: int, world: int, *shape: int, seed: int = 1) -> list[list[tuple[Tensor, ...]]]:
    """batches[step][rank] = (x,) with x standard normal of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    return [[(torch.randn(*shape, generator=generator),) for _ in range(world)] for _ in range(steps)]


def token_batches(steps: int, world: int, vocab: int, *shape: int, seed: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """batches[step][rank] = (tokens, targets)."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, 0, vocab, shape, generator=generator)
    return [[(draw(), draw()) for _ in range(world)] for _ in range(steps)]


def seeded(build: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
    """A model built with a fixed seed."""
    with GENERATOR:  # the generator goes on from here, as in a program
        torch.manual_seed(seed)
        return build(*args, **kwargs)


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss for models that return one tensor."""
    return model(*batch).square().mean()


# -- models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList behind a linear map; odd sizes on purpose."""

    def __init__(self, dim: int = 7, blocks: int = 3, block: type = Block) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(blocks))
        self.last = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Attention(nn.Module):
    """A transformer block around nn.MultiheadAttention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True), Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.mlp(x + self.mix(h, h, h, need_weights=False)[0])


class Language(nn.Module):
    """Embedding, blocks, head; optionally tied. Returns the loss."""

    def __init__(self, vocab: int = 17, dim: int = 8, blocks: int = 2, tied: bool = False, block: type = Attention):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class MixtureOfExperts(nn.Module):
    """Top-1 routing over four experts in a ModuleList; an expert without tokens is not called."""

    def __init__(self, dim: int = 6, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 9), nn.ReLU(), nn.Linear(9, dim)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out
