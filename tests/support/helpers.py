"""Models, the training loop under test, and the one-process reference that it must equal.

    data[step][micro][rank] -> arguments of the model; the model returns its loss
    train(rank, task, **options)      one rank of a sharded run (call it through zeroshard.testing.run_threads)
    reference(task, world_size, ...)  plain torch, one process, the same micro-batches

The reference adds in the documented order (DESIGN, numerics contract): ranks in rank order, times 1/N, then on top of
what earlier backwards of the step left; under `zs.accumulate` local sums first. Gradients are cast to fp32 as they
are sent, masters are fp32, the loss scale is a power of two, so every precision has one right answer, bit for bit.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import zeroshard as zs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATOR = threading.RLock()  # held while torch's generator, one for all threads of the process, is seeded and drawn from


# -- models --------------------------------------------------------------------------------------------------


class OddBlock(nn.Module):
    """Attention and MLP side by side, with sizes that no power of two divides, and a scalar parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.norm = nn.LayerNorm(dim)
        self.into = nn.Linear(dim, 4 * dim + 3)  # queries, keys, values, hidden
        self.out = nn.Linear(2 * dim + 3, dim, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim
        q, k, v, hidden = self.into(self.norm(x)).split([dim, dim, dim, dim + 3], dim=-1)  # (batch, seq, .)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return x + self.gain * self.out(torch.cat([mixed, F.gelu(hidden)], dim=-1))


class OddGPT(nn.Module):
    """A GPT in miniature: blocks in a ModuleList, head tied to the embedding. `model(tokens, targets)` is the loss."""

    def __init__(self, dim: int = 7, layers: int = 2, vocab_size: int = 11, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(OddBlock(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, seq, vocab)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """Linear layers with odd widths, and a scalar parameter. `model(x, y)` is the loss."""

    def __init__(self, widths: tuple[int, ...] = (5, 9, 7, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.gain * self.layers[-1](x), y)


class Branches(nn.Module):
    """Three branches, chosen by the caller: parameters that take no part in some micro-batches or on some ranks."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(dim, dim)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim)) for _ in range(3))
        self.head = nn.Linear(dim, 2)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in chosen:
            x = x + self.branches[index](x)
        return self.head(x).square().mean()


def token_batches(steps: int, micro: int, world_size: int, vocab_size: int = 11, seed: int = 1) -> list:
    """data[step][micro][rank] for OddGPT: (tokens, targets), each (2, 4)."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randint(0, vocab_size, (2, 4), generator=generator)

    return [[[(draw(), draw()) for _ in range(world_size)] for _ in range(micro)] for _ in range(steps)]


def vector_batches(steps: int, micro: int, world_size: int, inputs: int = 5, outputs: int = 3, seed: int = 1) -> list:
    """data[step][micro][rank] for MLP: x (4, inputs), y (4, outputs)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(4, width, generator=generator)

    return [[[(draw(inputs), draw(outputs)) for _ in range(world_size)] for _ in range(micro)] for _ in range(steps)]


@contextlib.contextmanager
def seeding(seed: int) -> Iterator[None]:
    """torch's generator begins at `seed` inside, for one thread at a time: ranks that are threads share it. Not for collectives."""
    with GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same values every time."""
    with seeding(seed):
        return make()


# -- the task and what comes out of it -------------------------------------------------------------------------


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Task:
    """What to train, the same for the reference and every sharded run.

    clip: step -> maximal norm given to zs.clip_grad_norm_ before that step. local_sums: under zs.accumulate.
    optimizer: parameters -> optimizer; or, `by_model`, the model -> optimizer (for parameter groups).
    scheduler: optimizer -> learning-rate scheduler, stepped after every step; built before sharding if `early`.
    late: the optimizer (and its scheduler) is made after zs.shard, which is given none.
    states: also collect the optimizer's states.
    loss: (model, *batch) -> loss. weight: batch -> its weight in the mean (zs.backward), None: each counts alike.
    """

    model: nn.Module
    data: list
    optimizer: Callable[[object], torch.optim.Optimizer] = adamw
    by_model: bool = False
    local_sums: bool = False
    clip: dict[int, float] = field(default_factory=dict)
    scheduler: Callable[[torch.optim.Optimizer], object] | None = None
    early: bool = False
    late: bool = False
    states: bool = False
    loss: Callable[..., Tensor] = lambda model, *batch: model(*batch)
    weight: Callable[[tuple], float] | None = None

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.optimizer(model if self.by_model else model.parameters())


@dataclass
class Outcome:
    """gradients[step] (as stepped: clipped, unscaled), weights (masters where there are any), norms before clipping."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: dict[str, dict[str, object]] = field(default_factory=dict)


def train(rank: int, task: Task, **options: object) -> Outcome:
    """One rank of a sharded run. options: those of zs.shard."""
    model = copy.deepcopy(task.model)
    if task.late:
        zs.shard(model, **options)
    optimizer = task.make_optimizer(model)
    scheduler = task.scheduler(optimizer) if task.scheduler and task.early else None
    if not task.late:
        model, optimizer = zs.shard(model, optimizer, **options)
    if task.scheduler and not task.early:
        scheduler = task.scheduler(optimizer)
    out = Outcome()
    for step, micros in enumerate(task.data):
        for number, ranks in enumerate(micros):
            held = task.local_sums and number < len(micros) - 1
            with zs.accumulate(model) if held else contextlib.nullcontext():
                loss = task.loss(model, *ranks[rank])
                if task.weight is None:
                    loss.backward()
                else:
                    zs.backward(model, loss, weight=task.weight(ranks[rank]))
                out.losses.append(loss.item())
        if step in task.clip:
            zs.clip_grad_norm_(model, task.clip[step])
        optimizer.step()
        out.gradients.append(zs.full_gradients(model))
        out.norms.append(optimizer.last_step.grad_norm)
        out.coefficients.append(optimizer.last_step.clip_coefficient)
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    out.weights = zs.full_state_dict(model, masters=True)
    if task.states:
        out.states = zs.full_optimizer_state(model)
    zs.close(model)
    return out


@dataclass(frozen=True)
class Rounding:
    """Where the reference rounds. send: gradients on their way (None: as the parameter); rest: reduced gradients.

    node: so many ranks sum first, and what they send on is rounded as gradients are; alike: the mean travels as well (HSDP).
    """

    node: int = 0
    alike: bool = False
    send: torch.dtype | None = None
    rest: torch.dtype = torch.float32
    masters: bool = True  # fp32 masters for low precision
    prepare: Callable[[nn.Module], None] = lambda model: None  # changes the low-precision model, e.g. some dtypes


def reference(
    task: Task,
    world_size: int,
    precision: str = "fp32",
    coefficients: list[float] | None = None,
    scale: float = 1.0,
    rounding: Rounding = Rounding(),
) -> Outcome:
    """The same run in plain torch on one process.

    coefficients: what each step's gradients are multiplied with (None: found from task.clip and the norm here). The
    norm is summed in another order than in a sharded run, so its last bits differ; given the coefficients of such a
    run, everything else has one right answer.
    """
    model = copy.deepcopy(task.model)
    masters = copy.deepcopy(model)
    model.to(DTYPES[precision])
    rounding.prepare(model)
    masters = masters if rounding.masters else model
    optimizer = task.make_optimizer(masters)
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    pairs = dict(zip(masters.parameters(), model.parameters(), strict=True))
    out = Outcome()
    for step, micros in enumerate(task.data):
        total = _step_gradients(model, task, micros, world_size, scale, out.losses, rounding)
        divisor = scale * (sum(task.weight(batch) for m in micros for batch in m) / world_size if task.weight else 1.0)
        norm = _norm(total) / divisor
        limit = task.clip.get(step)
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        factor = coefficients[step] if coefficients is not None else factor
        if factor / divisor != 1.0:
            total = {param: grad * (factor / divisor) for param, grad in total.items()}
        for master, param in pairs.items():
            master.grad = total[param].to(master.dtype) if param in total else None
        optimizer.step()
        out.gradients.append({name: total.get(pairs[master]) for name, master in masters.named_parameters()})
        out.norms.append(norm)
        out.coefficients.append(factor)
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in pairs.items():
                param.copy_(master) if param is not master else None
    out.weights = {n: t.detach().clone() for n, t in masters.state_dict().items()}
    out.states = {name: dict(optimizer.state.get(p, {})) for name, p in masters.named_parameters()}
    return out


def _norm(grads: dict[Tensor, Tensor]) -> float:
    return float(sum(grad.double().square().sum() for grad in grads.values())) ** 0.5


def _step_gradients(
    model: nn.Module, task: Task, micros: list, world_size: int, scale: float, losses: list, rounding: Rounding
) -> dict[Tensor, Tensor]:
    """Gradient of one step by parameter, fp32: the mean over ranks, summed over micro-batches."""
    grads = [[_backward(model, task, micro[rank], scale, losses) for rank in range(world_size)] for micro in micros]
    if task.local_sums:  # each rank's own sum in the resting dtype, then sent
        grads = [[_add_up([micro[rank] for micro in grads], rounding.rest) for rank in range(world_size)]]

    def travel(part: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        return {p: _rounded(g, rounding.send or p.dtype) for p, g in part.items()}

    def mean(ranks: list[dict[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        if rounding.node:
            ranks = [travel(_add_up(ranks[i : i + rounding.node])) for i in range(0, world_size, rounding.node)]
        total = _mean(ranks, world_size)
        return travel(total) if rounding.alike else total

    return _add_up([mean([travel(rank) for rank in micro]) for micro in grads], rounding.rest)


def _backward(model: nn.Module, task: Task, batch: tuple, scale: float, losses: list[float]) -> dict[Tensor, Tensor]:
    weight = task.weight(batch) if task.weight else 1.0
    dtype = next(p.dtype for p in model.parameters())
    batch = tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in batch)
    loss = task.loss(model, *batch)
    losses.append(loss.item())
    loss.float().backward(torch.tensor(scale * weight))
    grads = {p: p.grad.float() for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


def _add_up(parts: list[dict[Tensor, Tensor]], rest: torch.dtype = torch.float32) -> dict[Tensor, Tensor]:
    """Sums in fp32, each of them rounded to the dtype in which they rest."""
    total: dict[Tensor, Tensor] = {}
    for part in parts:
        for param, grad in part.items():
            total[param] = _rounded(total[param] + grad if param in total else grad, rest)
    return total


def _mean(parts: list[dict[Tensor, Tensor]], world_size: int) -> dict[Tensor, Tensor]:
    """(g0 + g1 + ...) * (1 / N), absent gradients being zeros; absent everywhere: absent."""
    total = _add_up(parts)
    return total if world_size == 1 else {param: grad * (1.0 / world_size) for param, grad in total.items()}


# -- comparison ------------------------------------------------------------------------------------------------


def flat(tensors: dict[str, Tensor | None]) -> Tensor:
    """All tensors in the order of their names as one fp32 vector."""
    return torch.cat([tensors[name].detach().reshape(-1).float() for name in sorted(tensors) if tensors[name] is not None])


def differences(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    """Names whose values are not the same bits, with the largest difference."""
    found = [f"{name}: only on one side" for name in sorted(got.keys() ^ expected.keys())]
    for name in sorted(got.keys() & expected.keys()):
        left, right = got[name], expected[name]
        if left is None or right is None:
            if left is not right:
                found.append(f"{name}: {'None' if left is None else 'a tensor'}, expected the other")
        elif left.shape != right.shape or left.dtype != right.dtype:
            found.append(f"{name}: {tuple(left.shape)} {left.dtype}, expected {tuple(right.shape)} {right.dtype}")
        elif not torch.equal(left, right):
            found.append(f"{name}: differs by {(left.double() - right.double()).abs().max():.3g}")
    return found


def state_differences(got: dict[str, dict[str, object]], expected: dict[str, dict[str, object]]) -> list[str]:
    """As `differences`, for optimizer states by parameter name; scalars compare by value."""
    found = [f"{name}: only on one side" for name in sorted(got.keys() ^ expected.keys())]
    for name in sorted(got.keys() & expected.keys()):
        tensors = [
            {key: torch.as_tensor(value) for key, value in side[name].items() if value is not None} for side in (got, expected)
        ]
        found += [f"{name}.{text}" for text in differences(*tensors)]
    return found


def assert_equal_runs(got: Outcome, expected: Outcome, where: str = "") -> None:
    """Gradients of every step and final weights are the same bits."""
    for step, (left, right) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        bad = differences(left, right)
        assert not bad, f"{where} gradients of step {step}: {'; '.join(bad[:4])}"
    bad = differences(got.weights, expected.weights)
    assert not bad, f"{where} weights: {'; '.join(bad[:4])}"
    if got.states:
        bad = state_differences(got.states, expected.states)
        assert not bad, f"{where} optimizer states: {'; '.join(bad[:4])}"
