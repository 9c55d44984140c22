"""Expert parallelism: the experts of a mixture are divided over an axis of the mesh, and tokens travel to them and back.

    rank 0: experts 0 1     tokens a b c      a -> 2, b -> 0, c -> 3        (one expert for each token here)
    rank 1: experts 2 3     tokens d e f      d -> 1, e -> 0, f -> 0

    counts      all ranks exchange how many rows they have for each expert  Comm.exchange
    dispatch    rank 0 gets b, d e f; rank 1 gets a c                       Comm.all_to_all, with these counts
    experts     each rank computes its experts on the rows that came        the class's own forward
    combine     the outputs go back the same way, and are multiplied by the router's weights on the token's rank

Ranks along the axis read different tokens, as data-parallel ranks do. Backward sends gradients in the opposite direction, so that an
expert's gradient on its rank is the sum over the tokens of all ranks along the axis. ZeRO reduces it over the ranks that hold the
same experts, and divides it as every other gradient (`Topology.divided`). Tokens are dropped only if a capacity is given.

Sources: GShard, arXiv 2006.16668, section 3; Switch Transformers, arXiv 2101.03961, section 2.2 (capacity); DeepSpeed-MoE, arXiv
2201.05596, section 5.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ..activations.experts import Idle, why_not
from ..axes import AlongAxis, Line, Owned, Tile, Tiled
from ..errors import ConfigError, did_you_mean
from ..utils import torch_compat
from ..utils.joined_class import Joined, joined_class
from ..utils.torch_compat import is_distributed
from ..utils.transformers_compat import are_experts


@dataclass
class Load:
    """Number of rows (choices of a token and an expert) that each rank along the axis has computed so far."""

    rows: list[int]

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank / mean over ranks; 1.0 is even."""
        return max(self.rows) * len(self.rows) / sum(self.rows) if sum(self.rows) else 1.0


@dataclass(frozen=True)
class _Route:
    """The rows that this rank sends to, and receives from, each rank along the axis; and for each received row (S,) its expert.

    experts: numbered from 0 on this rank.
    """

    sent: list[int]
    received: list[int]
    experts: Tensor


class _SendRows(torch.autograd.Function):
    """Send rows (S, H) to the ranks along an axis; backward sends their gradients back.

    sent, received: number of rows for, and from, each rank, in the order of ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: Line, sent: list[int], received: list[int], label: str) -> Tensor:
        ctx.line, ctx.sent, ctx.received, ctx.label = line, sent, received, label
        return _send_rows(rows, line, sent, received, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _send_rows(grad, ctx.line, ctx.received, ctx.sent, f"{ctx.label}, backward"), None, None, None, None


def _send_rows(rows: Tensor, line: Line, sent: Sequence[int], received: Sequence[int], label: str) -> Tensor:
    width = rows.shape[-1]
    found = rows.new_empty(sum(received), width)
    into, out = ([count * width for count in each] for each in (received, sent))
    line.all_to_all(found, rows.contiguous(), label, into, out)
    return found


class DividedExperts(Joined, AlongAxis):
    """A module of experts of which each rank along an axis holds some; its inputs and outputs are those of the whole module.

    `divide_experts` joins this class with the experts' class, whose forward computes the rank's own experts (utils/joined_class.py).
    num_experts: number of this rank's experts; everywhere: of those of all ranks. capacity_factor: see `divide_experts`.
    """

    num_experts: int
    everywhere: int
    capacity_factor: float | None
    load: Load

    @torch_compat.disable_dynamo  # it sends messages between ranks and reads their lengths, which torch.compile cannot trace
    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return (T, H) for hidden (T, H), index (T, K), weights (T, K), however the class names these arguments."""
        bound = inspect.signature(self.stands_for.forward).bind(self, *args, **kwargs).arguments
        hidden, index, weights = cast(list[Tensor], list(bound.values())[1:])
        line, label = self.line, f"experts {self.module_name}"
        experts, order = index.flatten().sort(stable=True)  # stable: an expert sees its tokens in the order of the batch
        if self.capacity_factor is not None:
            order, experts = self._within_capacity(order, experts, len(hidden), index.shape[-1])
        route = self._route(experts, label)
        rows = _SendRows.apply(hidden[order // index.shape[-1]], line, route.sent, route.received, f"{label}: dispatch")
        computed = self._compute(rows, route.experts)
        back = _SendRows.apply(computed, line, route.received, route.sent, f"{label}: combine")
        chosen = back.new_zeros(index.numel(), back.shape[-1]).index_copy(0, order, back)  # zeros: choices beyond the capacity
        return (chosen.unflatten(0, index.shape) * weights.unsqueeze(-1)).sum(dim=-2).to(hidden.dtype)

    def _route(self, experts: Tensor, label: str) -> _Route:
        """Tell all ranks along the axis how many rows this one has for each expert. experts (S,): the expert of each row, sorted."""
        rank, ranks, form = self.line.comm.rank, self.line.comm.world_size, f"<{self.everywhere}I"
        told = self.line.comm.exchange(struct.pack(form, *self._counts(experts)), f"{label}: tokens of each")
        # table[a][b]: the numbers of rows that rank a sends to rank b, one for each expert of rank b
        firsts = range(0, self.everywhere, self.num_experts)
        table = [
            [counts[first : first + self.num_experts] for first in firsts]
            for counts in (struct.unpack(form, row) for row in told)
        ]
        arriving = [of_rank[rank] for of_rank in table]
        sent, received = [sum(counts) for counts in table[rank]], [sum(counts) for counts in arriving]
        self.load.rows = [rows + sum(sum(of_rank[to]) for of_rank in table) for to, rows in enumerate(self.load.rows)]
        # the received rows are sorted by the rank that sent them, and those of a rank by expert
        repeats = torch.tensor([count for counts in arriving for count in counts], device=experts.device)
        local = torch.arange(self.num_experts, device=experts.device).repeat(ranks)
        return _Route(sent, received, local.repeat_interleave(repeats, output_size=sum(received)))

    def _counts(self, experts: Tensor) -> list[int]:
        """Return the number of this rank's rows for each expert; on imagined ranks, whose tensors have no values, equal ones."""
        if self.line.comm.imagined:
            base, more = divmod(len(experts), self.everywhere)
            return [base + (number < more) for number in range(self.everywhere)]
        counts: list[int] = torch.bincount(experts, minlength=self.everywhere).tolist()
        if len(counts) > self.everywhere:
            raise IndexError(
                f"experts {self.module_name}: a token chose expert {len(counts) - 1}, and there are {self.everywhere}."
            )
        return counts

    def _within_capacity(self, order: Tensor, experts: Tensor, tokens: int, choices: int) -> tuple[Tensor, Tensor]:
        """Keep the first choices of each expert, in the order of the batch, as many as it has capacity for."""
        assert self.capacity_factor is not None
        most = math.ceil(self.capacity_factor * tokens * choices / self.everywhere)
        if self.line.comm.imagined:  # tensors have no values: keep as many rows as an even routing would
            kept_rows = min(most * self.everywhere, len(order))
            return order[:kept_rows], experts[:kept_rows]
        first = torch.searchsorted(experts, torch.arange(self.everywhere, device=experts.device))
        kept = torch.arange(len(experts), device=experts.device) - first[experts] < most
        return order[kept], experts[kept]

    def _compute(self, rows: Tensor, local: Tensor) -> Tensor:
        """Return the outputs of this rank's experts `local` (S,) for rows (S, H), by the forward of the experts' class."""
        own = {name: param for name, param in torch_compat.own_parameters(self).items() if param is not None}
        shards = {name: param.to_local() if is_distributed(param) else param for name, param in own.items()}
        if not len(rows) and shards:
            return Idle.apply(rows, *shards.values())
        self.__dict__.update(shards)  # attributes in __dict__ hide the parameters of the same names, which are DTensors
        try:
            return super().forward(rows, local.unsqueeze(-1), rows.new_ones(len(rows), 1))
        finally:
            for name in shards:
                del self.__dict__[name]

    def extra_repr(self) -> str:
        return f"{self.stands_for.__name__}, {self.num_experts} of {self.everywhere} experts"


class Experts(nn.ModuleList):
    """A list of experts with the interface of experts, for `divide_experts`; each is a module (S, H) -> (S, H).

        self.experts = zs.Experts(MLP() for _ in range(8))       # names: experts.0.up.weight, ...
        out = self.experts(hidden, index, weights)               # (T, H) for hidden (T, H), index and weights (T, K)

    The result is the sum over k of weight * expert(hidden). All experts run, also on no tokens, so that ranks use the same units.
    """

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__(modules)
        self.num_experts, self.first = len(self), 0  # if they are divided: the number of this rank's experts, and the first one's

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return (T, H) for hidden (T, H), index (T, K) in 0 .. num_experts - 1, weights (T, K)."""
        experts, order = index.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=self.num_experts).tolist()
        parts = hidden[order // index.shape[-1]].split(counts)
        rows = torch.cat([self[self.first + number](part) for number, part in enumerate(parts)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (rows[back].unflatten(0, index.shape) * weights.unsqueeze(-1)).sum(dim=-2).to(hidden.dtype)


def experts_of(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Return the modules of experts of a model, by name.

    names: patterns of names of modules; None: all with Transformers' common interface of experts, and all `Experts`. Raises
    ConfigError for a pattern that matches no module.
    """
    if names is None:
        return {n: module for n, module in model.named_modules() if are_experts(module) or isinstance(module, Experts)}
    known, found = dict(model.named_modules()), dict[str, nn.Module]()
    for pattern in [names] if isinstance(names, str) else names:
        matching = {name: module for name, module in known.items() if fnmatchcase(name, pattern)}
        if not matching:
            raise ConfigError(f"experts: {type(model).__name__} has no module named {pattern!r}.{did_you_mean(pattern, known)}")
        found |= matching
    return found


def divide_experts(
    model: nn.Module, mesh: DeviceMesh, *, experts: Iterable[str] | None = None, capacity_factor: float | None = None
) -> nn.Module:
    """Divide the experts of a model over a one-dimensional mesh, in place; return the model. Call zs.shard(mesh=) afterwards.

    Args:
        model: a model with modules of experts: the same on every rank, or on the meta device. Its optimizer is made afterwards.
        mesh: the ranks over which each module's experts are divided: mesh["ep"]. They read different tokens.
        experts: names of the modules of experts, or patterns; None: all those of Transformers, and all `zs.Experts`. Another such
            module has `num_experts` and parameters whose first dimension are the experts; its forward(hidden (T, H), index (T, K),
            weights (T, K)) returns the sum over k of weight * expert(hidden), for any number of experts.
        capacity_factor: each rank sends an expert at most ceil(factor * T * K / experts) of its tokens, the first of its batch;
            further ones get zeros from that expert. None: every token reaches its experts.

    Raises:
        ConfigError: no such module; the ranks do not divide its experts; its parameters are not one for each expert. Nothing has
            changed then.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1 or not mesh.mesh_dim_names:
        raise ConfigError(f"divide_experts: expected one axis of a mesh, such as mesh['ep'], got {mesh!r}.")
    for module in divisible(model, mesh.size(), experts, capacity_factor).values():
        _divide(module, mesh, capacity_factor)
    return model


def divisible(
    model: nn.Module, ranks: int, experts: Iterable[str] | None = None, capacity_factor: float | None = None
) -> dict[str, nn.Module]:
    """Return the modules of experts to divide over `ranks` ranks, by name. Raise ConfigError as `divide_experts`."""
    if capacity_factor is not None and not (isinstance(capacity_factor, (int, float)) and 0 < capacity_factor < math.inf):
        raise ConfigError(
            f"capacity_factor: expected a finite number above 0, or None (no token is dropped), got {capacity_factor!r}."
        )
    found = experts_of(model, experts)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no module of experts of Transformers' interface to divide over {ranks} ranks: name its modules of "
            "experts (experts=['*.experts']), or leave the axis ep out of the mesh."
        )
    for name, module in found.items():
        _check(module, name, ranks)
    divided = {id(param) for module in found.values() for param in module.parameters()}
    first: dict[int, str] = {}
    for place, module in model.named_modules():
        for key, param in torch_compat.own_parameters(module).items():
            name = f"{place}.{key}"
            if id(param) in divided and first.setdefault(id(param), name) != name:
                raise ConfigError(
                    f"{name} is {first[id(param)]}: a parameter of experts that two modules share can not be divided. Let both places call one "
                    "module of experts, or leave the axis ep out of the mesh."
                )
    return found


def _check(module: nn.Module, name: str, ranks: int) -> None:
    """Raise ConfigError if a module of experts can not be divided over `ranks` ranks."""
    count = len(module) if isinstance(module, Experts) else getattr(module, "num_experts", None)
    if not isinstance(count, int):
        raise ConfigError(
            f"{name} ({type(module).__name__}) has no num_experts: expected a module whose parameters have the experts as their first "
            "dimension, and whose forward takes (hidden, index, weights)."
        )
    if count % ranks:
        fits = [n for n in range(1, count + 1) if count % n == 0]
        nearest = min(fits, key=lambda n: (abs(n - ranks), n))
        raise ConfigError(
            f"{name} has {count} experts, which {ranks} ranks do not divide: take an axis of {nearest} ranks for them, and give the "
            "others to dp."
        )
    if isinstance(module, (Tile, Tiled)):
        raise ConfigError(f"{name} is in tiles: divide its experts first, and let zs.tile cut what is left.")
    if any(map(is_distributed, module.parameters())):
        raise ConfigError(
            f"{name} has DTensors already: divide its experts before other axes cut the model, or by one axis alone."
        )
    if isinstance(module, Experts):
        wrong = [key for key, param in module.named_parameters() if not param.dim()] + [key for key, _ in module.named_buffers()]
        if wrong:
            raise ConfigError(
                f"{name} has scalar parameters or buffers in its experts, which can not be divided: {', '.join(wrong[:3])}."
            )
    elif (reason := why_not(module, name)) is not None:
        raise ConfigError(f"its experts can not be divided: {reason}.")


def _divide(module: nn.Module, mesh: DeviceMesh, capacity_factor: float | None) -> None:
    """Keep only this rank's experts in a module, and change its class to one whose forward sends tokens."""
    if isinstance(module, Experts):
        module.num_experts = len(module)
    from torch.distributed.tensor import DTensor, Shard

    everywhere, ranks = int(module.num_experts), mesh.size()  # type: ignore[arg-type]
    own, rank = everywhere // ranks, mesh.get_local_rank()
    parameters = torch_compat.own_parameters(module)
    for attribute, param in list(parameters.items()):
        if param is None:
            continue
        local = param.detach()[rank * own : (rank + 1) * own].clone()
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride())
        parameters[attribute] = nn.Parameter(shard, requires_grad=param.requires_grad)
        parameters[attribute].__dict__.update(param.__dict__)
    if isinstance(module, Experts):
        module.first = rank * own
        for number, expert in enumerate(module):
            _keep_on_owner(expert, mesh, number // own)
    module.__class__ = joined_class(DividedExperts, type(module))  # type: ignore[arg-type]  # a class can be hashed
    divided = cast(DividedExperts, module)
    divided.axis = (mesh.mesh_dim_names or ("",))[0]
    divided.num_experts, divided.everywhere, divided.capacity_factor = own, everywhere, capacity_factor
    divided.load = Load([0] * ranks)


def _keep_on_owner(expert: nn.Module, mesh: DeviceMesh, owner: int) -> None:
    """Keep the parameters of one expert on its owner along the axis only; on other ranks they have no elements."""
    for module in expert.modules():
        parameters = torch_compat.own_parameters(module)
        for attribute, param in parameters.items():
            if param is None:
                continue
            distribution = Owned(mesh, (), tuple(param.shape), param.stride(), owner)
            kept = param
            if distribution.absent:
                kept = parameters[attribute] = nn.Parameter(param.detach()[:0].clone(), requires_grad=param.requires_grad)
                kept.__dict__.update(param.__dict__)
            kept.__dict__["_distribution"] = distribution


def expert_imbalance(model: nn.Module) -> dict[str, float]:
    """Return for each divided module of experts, by name, the rows of its busiest rank over the mean of all ranks, in all forwards."""
    return {name: module.load.imbalance for name, module in model.named_modules() if isinstance(module, DividedExperts)}
