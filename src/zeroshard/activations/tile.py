"""zs.tile: cut operators that are too large to gather whole, in place, before zs.shard.

    model = zs.tile(model, max_bytes=1 << 30)        weight (V, D) of 3.2 GiB  ->  4 tiles of rows, each its own unit
    model, optimizer = zs.shard(model, optimizer)    at most the block around it and one tile are gathered

Words: a *cut* is the plan for one weight and every module that holds it (tied weights are cut alike), or for all weights of a
module of experts. All checks are made before the first change. Modules stay the same objects, with their hooks and attributes;
`tile` changes only their class.
ZeRO-Infinity, arXiv 2104.07857, section 5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import Tiled
from ..config import Config
from ..errors import ConfigError, ZeroshardError
from ..seam import Part, ShardedParameter, ShardedTensor, collect, info_of, partition
from ..tensor.attributes import attributes_of
from ..utils import torch_compat
from ..utils.dtypes import follows_precision
from ..utils.transformers_compat import are_experts
from ..values import BirthHome
from . import experts as tiled_experts
from .layers import EmbeddingTile, LinearTile, TiledEmbedding, TiledLinear

_ROWS = 16  # tiles begin at multiples of this where possible, so that random draws and vector kernels are as for the whole


@dataclass(frozen=True)
class Holder:
    """A module that holds a parameter: `prefix`.`attribute`."""

    prefix: str
    module: nn.Module
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.prefix}.{self.attribute}" if self.prefix else self.attribute


@dataclass(frozen=True)
class Cut:
    """Plan for weights (by attribute) with the same cuts: tile i has [bounds[i], bounds[i + 1]) of dimension `dim` of each."""

    weights: dict[str, nn.Parameter]
    holders: list[Holder]
    dim: int
    bounds: list[int]

    def largest_nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the largest tile, its bias included, in a dtype; None: in that of each weight."""
        longest, total = max(stop - start for start, stop in itertools.pairwise(self.bounds)), 0
        for weight in self.weights.values():
            total += _nbytes(weight, dtype) // weight.shape[self.dim] * longest
        if any(_bias(holder.module) is not None for holder in self.holders):
            total += (longest if self.dim == 0 else len(weight)) * _itemsize(weight, dtype)
        return total


def tile(
    model: nn.Module,
    *,
    max_bytes: int | None = None,
    budget_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Cut every Linear, Embedding and module of experts with weights of more than `max_bytes` into tiles, in place; return the
    model.

    Args:
        max_bytes: bound on the bytes of one gathered tile (all its parameters), without the padding of up to 32 elements a rank.
        budget_bytes: in the place of max_bytes, a bound on all parameters that are gathered for use at one time under
            units="auto": those outside the blocks, the largest block, and one tile. Units gathered ahead (between hosts and on
            GPUs the next unit, and up to Config.prefetch_nbytes) come on top.
        dtype: dtype in which weights are gathered (torch.bfloat16 for precision="bf16"); default: their own.
        optimizer: an optimizer that was built already and has not stepped. Tiles replace the weights in its groups.

    A Linear is cut by rows (outputs), or by columns if not even one row fits; embeddings are cut by rows, tied weights alike. A
    module of experts is one of Transformers' with weights (experts, ..., ...): the bytes of all of them count, and it is cut
    between experts. Values, requires_grad and module hooks stay, and state_dict(), load_state_dict(), zs.full_state_dict() and
    `weights=` use the original names and shapes.

    Outputs cut by rows, embeddings and gradients of weights are the same bits up to the choice of kernel. The gradient of a tiled
    Linear's input is a sum over T tiles, rounded T - 1 times more. Outputs of experts are sums in another order, and
    _init_weights draws values for tiles of a meta-device model in another order. Parameters that exceed max_bytes and stay whole
    are named on stderr. The call is collective if the model was built under zs.init().

    Raises:
        ConfigError: a bound is wrong, or too small for one row or expert; or a weight has a gradient, hooks, or states.
        NotImplementedError: an embedding with max_norm, scale_grad_by_freq or sparse would be tiled.
        ZeroshardError: the model is sharded already.
    """
    _check_arguments(model, optimizer, max_bytes, budget_bytes)
    holders = _holders(model)
    limit = max_bytes if budget_bytes is None else _limit_of(model, holders, budget_bytes, dtype)
    assert limit is not None
    cuts, whole = _plan(holders, limit, dtype)
    for cut in cuts:
        _check_cut(cut, optimizer)
    lines = [f"stays whole: {line}" for line in whole]
    if not cuts and not whole:
        lines = [f"nothing to tile: no weight is larger than {limit:,} bytes"]
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(f"zeroshard: tile: {line}", file=sys.stderr)
    for cut in cuts:
        _carry_out(cut, optimizer)
    for module in model.modules():  # the inference kernels of torch's encoders read weights without calling the modules
        if not any(isinstance(inner, Tiled) for inner in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # 0: an activation that the kernels do not support
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def _check_arguments(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, max_bytes: int | None, budget_bytes: int | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if (max_bytes is None) == (budget_bytes is None):
        raise ConfigError("expected max_bytes=... (of a tile) or budget_bytes=... (of all that is gathered), one of them.")
    for name, value in (("max_bytes", max_bytes), ("budget_bytes", budget_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ConfigError(f"{name}: expected a positive number of bytes, got {value!r}.")
    sharded = any("_zeroshard" in module.__dict__ for module in model.modules())
    if sharded or any(info_of(param) is not None for param in model.parameters()):
        raise ZeroshardError("this model is sharded already: zs.tile(model) comes before zs.shard(), or zs.close() it first.")
    if optimizer is not None and any(info_of(param) is not None for group in optimizer.param_groups for param in group["params"]):
        raise ZeroshardError("this optimizer is sharded already: zs.tile() comes before zs.shard().")


# -- the plan --------------------------------------------------------------------------------------------------


def _holders(model: nn.Module) -> dict[nn.Parameter, list[Holder]]:
    """Return for every parameter all the modules that hold it (several for a tied one)."""
    found: dict[nn.Parameter, list[Holder]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for attribute, param in torch_compat.own_parameters(module).items():
            if param is not None and not isinstance(param, torch_compat.UninitializedTensorMixin):
                found[param].append(Holder(prefix, module, attribute))
    return found


def _plan(holders: dict[nn.Parameter, list[Holder]], limit: int, dtype: torch.dtype | None) -> tuple[list[Cut], list[str]]:
    """Return the cuts of weights above `limit` bytes, and a line for each parameter above it that cannot be cut."""
    cuts, whole, seen = [], [], set[nn.Parameter]()
    for param, held in holders.items():
        if param in seen:
            continue
        weights = {held[0].attribute: param}
        if are_experts(held[0].module):
            weights = {
                attribute: each for attribute, each in torch_compat.own_parameters(held[0].module).items() if each is not None
            }
        seen.update(weights.values())
        nbytes = sum(_nbytes(weight, dtype) for weight in weights.values())
        if nbytes <= limit:
            continue
        reason = _why_not(held, holders)
        if reason is None:
            cuts.append(_cut(weights, held, limit, dtype))
        else:
            name = held[0].name if len(weights) == 1 else held[0].prefix
            whole.append(f"{name} ({nbytes:,} bytes): {reason}")
    return cuts, whole


def _itemsize(param: Tensor, dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype is not None and follows_precision(param.dtype) else param.element_size()


def _nbytes(param: Tensor, dtype: torch.dtype | None) -> int:
    return param.numel() * _itemsize(param, dtype)


def _bias(module: nn.Module) -> nn.Parameter | None:
    """Return a Linear's bias, which is cut with the weight; None for other modules (experts' biases count as weights)."""
    return torch_compat.own_parameters(module).get("bias") if type(module) is nn.Linear else None


def _why_not(held: list[Holder], holders: dict[nn.Parameter, list[Holder]]) -> str | None:
    """Return why a parameter cannot be cut, or None. Only weights that their module uses row by row can be cut."""
    for holder in held:
        module, where = holder.module, holder.prefix or "the model"
        experts = are_experts(module)
        if not experts and (type(module) not in (nn.Linear, nn.Embedding) or holder.attribute != "weight"):
            known = "weights of nn.Linear, nn.Embedding and experts with Transformers' interface alone can be cut"
            return f"{where} is a {type(module).__name__}; {known}"
        if "forward" in module.__dict__ or torch_compat.compiled_call(module) is not None:
            return f"the forward of {where} was replaced or compiled; call zs.tile() before that"
        bias = _bias(module)
        if bias is not None and len(holders[bias]) > 1:
            return f"the bias of {where} is shared"
        if experts and any(
            len(holders[param]) > 1 for param in torch_compat.own_parameters(module).values() if param is not None
        ):
            return f"a parameter of {where} is shared"
        if experts and (reason := tiled_experts.why_not(module, where)):
            return reason
    return None


def _cut(weights: dict[str, nn.Parameter], held: list[Holder], limit: int, dtype: torch.dtype | None) -> Cut:
    """Return the cut into the fewest, evenly sized tiles of rows (or experts); of columns if not even one row fits."""
    first = next(iter(weights.values()))
    rows, extra = len(first), any(_bias(holder.module) is not None for holder in held) * _itemsize(first, dtype)
    row = sum(_nbytes(weight, dtype) for weight in weights.values()) // rows + extra
    if limit >= row:
        return Cut(weights, held, 0, _bounds(rows, limit // row))
    linear = all(type(holder.module) is nn.Linear for holder in held)
    most = (limit - extra * rows) // (rows * _itemsize(first, dtype))
    if linear and most > 0:
        return Cut(weights, held, 1, _bounds(first.shape[1], most))
    what = f"one row of {held[0].name} {tuple(first.shape)}" if len(weights) == 1 else f"one expert of {held[0].prefix}"
    column = ", and than one column" if linear else ""
    raise ConfigError(f"max_bytes: {limit} bytes are less than {what}, {row} bytes{column}. Give at least {row}.")


def _bounds(extent: int, most: int) -> list[int]:
    """Return the bounds of the fewest even tiles of at most `most`: multiples of _ROWS if that takes no more tiles."""
    count = -(-extent // most)
    for step in (_ROWS, 1):
        chunks = extent // step
        bounds = [chunks * i // count * step for i in range(count)] + [extent]
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        if min(lengths) > 0 and max(lengths) <= most:
            return bounds
    raise AssertionError(f"no tiles of at most {most} for {extent}")


def _limit_of(model: nn.Module, holders: dict[nn.Parameter, list[Holder]], budget: int, dtype: torch.dtype | None) -> int:
    """Return the largest max_bytes (budget, budget / 2, ...) with which root unit, largest other unit and a tile fit."""
    config = Config()
    units = partition(model, config, collect(model, config))
    limit, least = budget, 0  # least: need of the last try, for the message
    while limit > 0:
        try:
            cuts, _ = _plan(holders, limit, dtype)
        except ConfigError:
            break
        largest = {weight: cut.largest_nbytes(dtype) for cut in cuts for weight in cut.weights.values()}
        biases = {_bias(holder.module) for cut in cuts for holder in cut.holders}
        root, other = 0, 0
        for draft in units:
            params = [spec.original for spec in draft.specs]
            nbytes = sum(_nbytes(p, dtype) for p in params if p not in largest and p not in biases)
            tiles = max((largest[p] for p in params if p in largest), default=0)
            if model in draft.modules:
                root, other = root + nbytes, max(other, tiles)
            else:
                other = max(other, nbytes + tiles)
        if root + other <= budget:
            return limit
        least, limit = root + other, limit // 2
    raise ConfigError(
        f"budget_bytes: {budget:,} bytes are too few: with the smallest tiles that can be made, {least:,} are gathered at "
        "one time. Give at least that, or smaller units (units=, max_unit_numel=) with max_bytes=."
    )


def _check_cut(cut: Cut, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise if cutting would lose hooks, gradients, optimizer states or options of a module."""
    params = {replace(cut.holders[0], attribute=attribute).name: weight for attribute, weight in cut.weights.items()}
    for holder in cut.holders:
        module = holder.module
        bias = _bias(module)
        if bias is not None:
            params[f"{holder.prefix}.bias"] = bias
        if any(torch_compat.state_dict_hooks(module)):
            raise ConfigError(f"{holder.prefix} has state-dict hooks, which expect a whole weight: remove them before zs.tile().")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if type(module) is nn.Embedding and getattr(module, option):
                raise NotImplementedError(
                    f"{holder.prefix}: an embedding with {option}={getattr(module, option)!r} can not be tiled. Switch it "
                    f"off, or give zs.tile() a max_bytes above {module.weight.nbytes:,}."
                )
    for name, param in params.items():
        if isinstance(param, ShardedTensor) and cut.dim != 0:
            raise NotImplementedError(
                f"{name}: a row is larger than max_bytes, and columns of a parameter made under zs.init() can not be cut. Raise max_bytes, "
                "or build the model on the meta device in place of zs.init()."
            )
        if param.grad is not None:
            raise ConfigError(f"{name} has a gradient: call optimizer.zero_grad(set_to_none=True) before zs.tile().")
        if torch_compat.has_hooks(param):
            raise ConfigError(f"{name} has hooks, which expect a whole gradient: register them on the tiles after zs.tile().")
        if optimizer is not None and optimizer.state.get(param):
            raise ConfigError(f"the optimizer has states of {name}: call zs.tile() before the optimizer's first step.")


# -- the cut ---------------------------------------------------------------------------------------------------


def _carry_out(cut: Cut, optimizer: torch.optim.Optimizer | None) -> None:
    """Replace the weights by their parts, in the modules and in the optimizer."""
    ranges = list(itertools.pairwise(cut.bounds))
    parts = {a: [Part(cut.dim, *ends, tuple(weight.shape)) for ends in ranges] for a, weight in cut.weights.items()}
    weights = {a: [_part_of(weight, part) for part in parts[a]] for a, weight in cut.weights.items()}
    for attribute, weight in cut.weights.items():
        _exchange(optimizer, weight, weights[attribute])
    for holder in cut.holders:
        module = holder.module
        cls: type[Tiled]
        tiles: list[Any]
        if are_experts(module):
            cls, tiles = tiled_experts.TiledExperts, tiled_experts.make_tiles(module, weights, parts)
            module.__dict__["stands_for"] = type(module)
        elif type(module) is nn.Embedding:
            cls, tiles, padding = TiledEmbedding, [], module.padding_idx
            for weight, part in zip(weights["weight"], parts["weight"], strict=True):
                inside = None if padding is None or not part.start <= padding < part.stop else padding - part.start
                tiles.append(EmbeddingTile(weight, inside, {"weight": part}))
        else:
            cls, tiles = TiledLinear, _linear_tiles(module, weights["weight"], parts["weight"], optimizer)
        for attribute in cut.weights:
            del torch_compat.own_parameters(module)[attribute]  # the tiles hold the weight from here on
        module.__class__ = cls
        module.tiles = nn.ModuleList(tiles).train(module.training)


def _linear_tiles(
    module: nn.Module, weights: list[nn.Parameter], parts: list[Part], optimizer: torch.optim.Optimizer | None
) -> list[LinearTile]:
    """Return the tiles of one Linear. A tile of rows gets its part of the bias; the first tile of columns gets all of it."""
    bias = torch_compat.own_parameters(module).get("bias")
    if bias is None:
        return [LinearTile(w, None, {"weight": p}) for w, p in zip(weights, parts, strict=True)]
    shape = tuple(bias.shape)
    if parts[0].dim == 0:
        places: list[Part | None] = [Part(0, part.start, part.stop, shape) for part in parts]
    else:
        places = [Part(0, 0, shape[0], shape), *[None] * (len(parts) - 1)]
    biases = [None if place is None else _part_of(bias, place) for place in places]
    _exchange(optimizer, bias, [b for b in biases if b is not None])
    del torch_compat.own_parameters(module)["bias"]
    return [
        LinearTile(weight, b, {"weight": part} if place is None else {"weight": part, "bias": place})
        for weight, b, part, place in zip(weights, biases, parts, places, strict=True)
    ]


def _part_of(param: nn.Parameter, part: Part) -> nn.Parameter:
    """Return a part of a parameter as a parameter with the same attributes. Rows share the whole's memory, columns are copies.

    Rows of a parameter that was made under zs.init are gathered, and sharded as zs.init does (collective).
    """
    if isinstance(param, ShardedTensor):
        whole = param.data[part.start : part.stop].full_tensor()  # type: ignore[attr-defined]  # a ShardedTensor's
        birth = BirthHome(param._home.comm, f"{param._home.name}[{part.start}:{part.stop}]", whole.numel())
        local = whole.reshape(-1)[birth.start : birth.stop].clone()
        born = ShardedParameter(local, tuple(whole.shape), birth, param.requires_grad)
        born.__dict__.update(attributes_of(param))
        return born  # type: ignore[return-value]
    fresh = nn.Parameter(part.of(param.data).contiguous(), requires_grad=param.requires_grad)
    fresh.__dict__.update(param.__dict__)
    return fresh


def _exchange(optimizer: torch.optim.Optimizer | None, old: nn.Parameter, new: list[nn.Parameter]) -> None:
    """Replace a parameter by its parts in an optimizer's groups."""
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [p for param in group["params"] for p in (new if param is old else [param])]
