"""What the tests of checkpoints share: an odd model, runs that save, runs that load, and what must be equal.

Saved    what a checkpoint was made of, as every rank saw it then: masters, optimizer states, options of the groups
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers import OddGPT, differences, seeded, state_differences
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.axes.tiled_parameter import whole_name
from zeroshard.tensor.part import part_of
from zeroshard.testing import run_threads

VOCAB, DIM = 11, 7


class Noted(nn.Module):
    """A linear map with state that is no parameter: a counter tensor and a note, by get_extra_state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)
        self.calls, self.note = 0, "new"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.map(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.note = state["calls"], state["note"]


class Stamped(nn.Module):
    """Extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stamp = torch.zeros(3)

    def get_extra_state(self) -> Tensor:
        return self.stamp

    def set_extra_state(self, state: Tensor) -> None:
        self.stamp = state


class Oddities(nn.Module):
    """Parameters of every odd kind; `model(tokens, targets)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.frozen = nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.prime = nn.Parameter(torch.randn(13))
        self.turned = nn.Parameter(torch.randn(5, DIM).t())  # (DIM, 5), not contiguous
        self.narrow = nn.Linear(5, DIM, dtype=torch.bfloat16)
        self.noted, self.stamped = Noted(DIM), Stamped()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.25))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen += 1
        x = self.frozen(self.embedding(tokens)) * self.gain + self.empty.sum() + self.prime.sum()
        x = x + self.narrow((x @ self.turned).to(self.narrow.weight.dtype)).to(x.dtype)
        logits = self.head(self.norm(self.noted(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Language(OddGPT):
    """OddGPT with buffers."""

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__(dim=DIM, layers=layers, vocab_size=VOCAB, **options)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(tokens, targets)


class LowRank(nn.Module):
    """A frozen base with trained matrices beside it: LoRA by hand (arXiv 2106.09685)."""

    def __init__(self, dim: int = 33) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(3)))
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(dim, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, dim, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: Language(tied=True),
    "untied": lambda: Language(tied=False, layers=1),
    "odd": Oddities,
    "tiles": lambda: zs.tile(Language(tied=True), max_bytes=4 * DIM * 5),
    "columns": lambda: zs.tile(Language(tied=False, layers=1), max_bytes=48),
}
TIED = ("tied", "tiles")  # the same parameters, cut otherwise
UNTIED = ("untied", "columns")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "lion": lambda params: zs.Lion(params, lr=1e-3, weight_decay=0.1),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


_making = threading.Lock()


@functools.cache
def _first_made(model: str, seed: int) -> nn.Module:
    return seeded(MODELS[model], seed)


def _made(model: str, seed: int) -> nn.Module:
    """One for all threads: they share the random generator."""
    with _making:
        return _first_made(model, seed)


def build(model: str | nn.Module, optimizer: str = "adamw", seed: int = 0, groups: int = 1, **options: Any) -> tuple:
    """A sharded (model, optimizer); every seed has values of its own. groups: of the optimizer."""
    module = copy.deepcopy(_made(model, seed) if isinstance(model, str) else model)
    params: Any = trained(module)
    if groups == 2:
        flat = [param.dim() < 2 for param in params]  # tiles are what their wholes are
        params = [
            {"params": [p for p, is_flat in zip(params, flat, strict=True) if is_flat == wanted], "lr": rate}
            for wanted, rate in ((True, 3e-3), (False, 5e-3))
        ]
    return zs.shard(module, OPTIMIZERS[optimizer](params), **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, batches: list, after: Callable = lambda: None
) -> list[float]:
    """One step for each of batches[step][rank]; the losses."""
    losses = []
    for ranks in batches:
        loss = model(*ranks[rank % len(ranks)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    return losses


@dataclass
class Saved:
    """See the head of this file. groups: options, and the names of members."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra_state: dict[str, Any] = field(default_factory=dict)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Saved:
    """Copies of everything (collective)."""
    extra = {n: copy.deepcopy(v) for n, v in model.state_dict().items() if n.endswith("_extra_state")}
    out = Saved(_cloned(zs.full_state_dict(model, masters=True)), extra_state=extra)
    if optimizer is not None:
        out.states = _joined(model, {name: _cloned(state) for name, state in zs.full_optimizer_state(model).items()})
        out.groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return out


def _joined(model: nn.Module, states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the states of a parameter's tiles as one, under its name."""
    result: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        owner, _, attribute = name.rpartition(".")
        part = part_of(model.get_submodule(owner), attribute)
        whole = result.setdefault(name if part is None else whole_name(name), {})
        for key, value in state.items():
            joins = part is not None and isinstance(value, Tensor) and value.dim() > 0 and key in whole
            whole[key] = torch.cat([whole[key], value], part.dim) if joins else value
    return result


def _cloned(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}


def assert_equal(got: Saved, expected: Saved, where: str = "") -> None:
    """The same bits. What was kept in bf16 may stand in fp32 on the other side, and the reverse."""
    tensors = {n: t for n, t in got.weights.items() if isinstance(t, Tensor)}
    wanted = {n: t.to(tensors[n].dtype) if n in tensors else t for n, t in expected.weights.items() if isinstance(t, Tensor)}
    bad = differences(tensors, wanted)
    assert not bad, f"{where} weights: {bad[:5]}"
    bad = state_differences(*({n: _widened(s) for n, s in side.states.items()} for side in (got, expected)))
    assert not bad, f"{where} states: {bad[:5]}"
    assert got.groups == expected.groups, f"{where} groups: {got.groups} {expected.groups}"
    assert got.extra_state.keys() == expected.extra_state.keys()
    for name, value in expected.extra_state.items():
        same = torch.equal(got.extra_state[name], value) if isinstance(value, Tensor) else got.extra_state[name] == value
        assert same, f"{where} {name}: {got.extra_state[name]}, expected {value}"


def _widened(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in state.items()}


def write_checkpoint(root: Path, world: int = 2, model: str | nn.Module = "tied", steps: list = (), **options: Any) -> Saved:
    """Save one on threads: after so many `steps`; what it holds. Options of zs.save begin with save_."""
    saving = {key.removeprefix("save_"): options.pop(key) for key in list(options) if key.startswith("save_")}

    def rank_run(rank: int) -> Saved:
        module, optimizer = build(model, **options)
        train(module, optimizer, rank, steps)
        zs.save(root, module, optimizer, **saving).wait()
        saved = snapshot(module, optimizer)
        zs.close(module)
        return saved

    return run_threads(world, rank_run)[0]


def read_checkpoint(root: Path, world: int = 2, model: str | nn.Module = "tied", **options: Any) -> list[Saved]:
    """Load one on threads into a model of other values; what each rank then has. Options of zs.load begin with load_."""
    loading = {key.removeprefix("load_"): options.pop(key) for key in list(options) if key.startswith("load_")}

    def rank_run(rank: int) -> Saved:
        module, optimizer = build(model, seed=5, **options)
        zs.load(root, module, optimizer, **loading)
        saved = snapshot(module, optimizer)
        zs.close(module)
        return saved

    return run_threads(world, rank_run)


def names(root: Path) -> list[str]:
    """What a user sees of a folder."""
    return sorted(path.name for path in root.iterdir())


def alone(**options) -> tuple:
    """A model on one rank without a process group."""
    return build("tied", **options)
