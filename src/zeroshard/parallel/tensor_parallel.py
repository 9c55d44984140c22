"""Apply tensor parallelism to a model in place: with torch's parallel styles where they exist, with hooks elsewhere.

    sequence_parallel, one block       x: (batch, seq / tp, dim)   DTensor, Shard(1): the stream between maps
                       norm            on this rank's tokens
      enter attention  all-gather      (batch, seq, dim)           DTensor, Replicate: once for all maps that read it
                       q, k, v | o     this rank's heads           plain tensors
      leave            reduce-scatter  x + ...
    Without sequence_parallel the stream is a plain, whole tensor on every rank: forward all-reduces the output of each rowwise
    map, and backward the gradient of each entry's input.

Words: *map*: a linear layer; *stream*: the hidden states between blocks; *entry*: a module with several sharded maps that read
its input: the input becomes a DTensor once, so that its gradient is summed over ranks once; *stack*: the outermost list of
blocks; *island*: a mixture of experts, inside of which tensors are plain and whole with and without sequence_parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..errors import ConfigError, ZeroshardError
from ..utils import torch_compat
from ..utils.torch_compat import StridedShard
from .styles import (
    COLWISE,
    EXPERTS,
    GATHERED,
    LOCAL_NORM,
    PACKED,
    ROWWISE,
    VOCABULARY,
    ParallelStyles,
    Style,
    absent,
    divides,
    is_conv1d,
    resolve,
    styles_for,
)

STATES = ("hidden_states", "key_value_states", "encoder_hidden_states", "x", "input")  # keyword names of maps' inputs
WHOLE = ("replicate", "replicated")


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: ParallelStyles | Mapping[str, Style] | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """Shard a model over the ranks of a one-axis mesh (mesh["tp"]), in place, and return it (collective). Call before zs.shard.

    styles: a result of styles_for, or a mapping, name pattern -> style, that overrides styles_for(model).
    sequence_parallel: each rank has seq / tp tokens of the stream. loss_parallel: logits stay sharded over the vocabulary
    (a DTensor); run forward and backward inside torch.distributed.tensor.parallel.loss_parallel().

    Sharded parameters become DTensors of one placement: Shard, or _StridedShard for packed ones. Biases of rowwise maps and,
    with sequence_parallel, norms of blocks become Replicate DTensors, whose gradients torch sums; all other parameters stay
    plain and get the same gradient on every rank. All ranks start from the values of the axis's first rank; tied parameters
    stay tied. Seed dropout equally on all ranks of the axis: tensors that every rank holds whole must get the same mask (the
    heads of different ranks then share their masks too).

    Raises ConfigError or ZeroshardError, before anything is changed, if the number of ranks does not divide the model, names
    or styles do not fit, or the model is sharded already.
    """
    _check_plain(model, mesh)
    styles = styles if isinstance(styles, ParallelStyles) else styles_for(model, styles)
    _check(model, mesh, styles, loss_parallel)
    if mesh.size() == 1:
        return model
    torch_compat.mend_dtensors()
    cut = _Cut(model, mesh, styles, sequence_parallel, loss_parallel)
    ties = _ties(model, styles)
    named = [(module, name, p) for module in model.modules() for name, p in torch_compat.own_parameters(module).items()]
    marks = [(module, name, p.__dict__) for module, name, p in named if p is not None and p.__dict__]
    cut.run()
    for places in ties:
        held = [torch_compat.own_parameters(module)[attribute] for module, attribute in places]
        sharded: list[Any] = [param for param in held if isinstance(param, DTensor)]  # which are parameters, too
        assert len({param.placements for param in sharded}) == 1, "tied parameters were cut differently"
        for module, attribute in places:
            module.register_parameter(attribute, sharded[0])
    for module, name, given in marks:  # attributes of a parameter are copied to its DTensor
        torch_compat.own_parameters(module)[name].__dict__.update(given)
    with torch.no_grad():  # sharding has sent the sharded parameters of the axis's first rank; now it sends the others
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor
            if isinstance(tensor, DTensor):
                if not tensor.placements[0].is_replicate():
                    continue
                local = tensor.to_local()
            if not local.is_meta:
                dist.broadcast(local.detach(), group=mesh.get_group(), group_src=0)
    return model


class _Cut:
    """One call of `apply`: the constructor finds and checks the modules to change, and `run` changes them."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, styles: ParallelStyles, sequence_parallel: bool, loss_parallel: bool
    ) -> None:
        self.model, self.mesh, self.styles, self.loss_parallel = model, mesh, styles, loss_parallel
        modules = dict(model.named_modules())
        self.modules = {name: style for name, style in styles.by_name.items() if name in modules and style not in WHOLE}
        self.parameters = {name: style for name, style in styles.by_name.items() if name not in modules}
        self.colwise = [name for name, style in self.modules.items() if style in COLWISE and isinstance(style, str)]
        self.stacks: list[str] = []  # the outermost lists of blocks that have sharded maps
        for name, module in modules.items() if sequence_parallel else ():
            holds = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(c.startswith(f"{name}.") for c in self.colwise)
            if holds and not _inside(name, self.stacks):
                self.stacks.append(name)
        if sequence_parallel and not self.stacks:
            raise ConfigError("sequence_parallel: no list of blocks (nn.ModuleList) holds layers that the styles cut.")
        self.islands = [  # mixtures of experts: modules that hold the experts and their router
            name
            for name, module in modules.items()
            if styles.by_name.get(f"{name}.experts") == EXPERTS
            or (name and isinstance(getattr(module, "experts", None), nn.ModuleList))
        ]
        self.entries = self._entries()
        self.norms = self._norms()

    def in_stream(self, name: str) -> bool:
        """Return whether a module's output goes into a stream that is sharded by tokens."""
        return _inside(name, self.stacks) and not _inside(name, self.islands)

    def _entries(self) -> list[str]:
        """Return the entries: modules with two or more colwise maps that read the module's input, and no unsharded map."""
        found = []
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in self.colwise):
            children = self.model.get_submodule(parent).named_children()
            styles = [self.styles.by_name.get(f"{parent}.{name}") for name, child in children if _is_map(child)]
            block = not parent or parent.rpartition(".")[0] in self.stacks
            if not block and sum(style in COLWISE for style in styles) > 1 and all(s in COLWISE + ROWWISE for s in styles):
                found.append(parent)
        return found

    def _norms(self) -> list[str]:
        """Return the norms that the stream passes through: the modules with parameters in blocks that have no style.

        Raise ConfigError if one of these is not a norm.
        """
        parents = [name.rpartition(".")[0] for name in self.colwise]
        found = []
        for name, module in self.model.named_modules():
            if name in self.modules or not self.in_stream(name) or next(module.parameters(recurse=False), None) is None:
                continue
            if "norm" not in type(module).__name__.lower() or any(name.startswith(f"{parent}.") for parent in parents):
                raise ConfigError(
                    f"sequence_parallel: {name} ({type(module).__name__}) is in a block and has no style that says how to cut it, but "
                    "would get only some of the tokens. Give it a style, or train without sequence_parallel."
                )
            found.append(name)
        return found

    def run(self) -> None:
        for name, style in self.parameters.items():
            owner, attribute = resolve(self.model, name)
            assert attribute is not None
            ndim = getattr(owner, attribute).ndim  # (..., out, in), as experts have
            placement = _rows(ndim - 1 if style in ROWWISE else ndim - 2, PACKED.get(str(style), 1))
            _distribute(owner, attribute, self.mesh, placement)
        for name, style in self.modules.items():
            self._module(name, self.model.get_submodule(name), style)
        for name in self.norms:
            parallelize_module(self.model.get_submodule(name), self.mesh, SequenceParallel())
        for name in self.entries:
            self.model.get_submodule(name).register_forward_pre_hook(partial(_whole_states, self.mesh), with_kwargs=True)
        for name in self.islands:
            if _inside(name, self.stacks):
                island = self.model.get_submodule(name)
                island.register_forward_pre_hook(partial(_whole_states, self.mesh, local=True), with_kwargs=True)
                island.register_forward_hook(partial(_leave, self.mesh, whole=False))
        for stack in self.stacks:
            blocks = [b for b in self.model.get_submodule(stack).children() if next(b.parameters(), None) is not None]
            blocks[0].register_forward_pre_hook(partial(_stream_in, self.mesh), with_kwargs=True)
            blocks[-1].register_forward_hook(partial(_leave, self.mesh, whole=True))
        for name, attributes in self.styles.divided.items():
            module = self.model.get_submodule(name)
            for attribute in attributes:
                setattr(module, attribute, getattr(module, attribute) // self.mesh.size())
            if hasattr(module, "first_head"):  # zeroshard.planner.models.gpt: ALiBi's slope depends on the head's number
                module.__dict__["first_head"] = self.mesh.get_local_rank() * module.__dict__["heads"]

    def _module(self, name: str, module: nn.Module, style: str | ParallelStyle) -> None:
        mesh = self.mesh
        if not isinstance(style, str):
            parallelize_module(module, mesh, style)
        elif style in PACKED or (style in COLWISE and is_conv1d(module)):
            for attribute, param in list(module.named_parameters(recurse=False)):
                dim = param.ndim - 1 if is_conv1d(module) else 0
                _distribute(module, attribute, mesh, _rows(dim, PACKED.get(style, 1)))
            if is_conv1d(module):
                module.__dict__["nf"] //= mesh.size()
            _compute_locally(module, mesh, partial_inputs=True)
        elif style in (EXPERTS, LOCAL_NORM):
            if style == LOCAL_NORM:
                for attribute, _ in list(module.named_parameters(recurse=False)):
                    _distribute(module, attribute, mesh, Replicate())
            _compute_locally(module, mesh, partial_inputs=style == EXPERTS, partial_outputs=style == EXPERTS)
        elif style == "sequence_parallel":
            parallelize_module(module, mesh, SequenceParallel())
        elif style in GATHERED:
            whole = not (self.loss_parallel and name == self.styles.head)
            gathering = ColwiseParallel(output_layouts=Replicate() if whole else Shard(-1), use_local_output=whole)
            parallelize_module(module, mesh, gathering)
        elif style in COLWISE:
            if self.in_stream(name) and name.rpartition(".")[0] not in self.entries:
                module.register_forward_pre_hook(partial(_whole_states, mesh), with_kwargs=True)
            parallelize_module(module, mesh, ColwiseParallel())
        else:
            stream = self.in_stream(name)
            given = Replicate() if style in (VOCABULARY, "rowwise_split_input", "rowwise_rep") else Shard(-1)
            leaving = Shard(1) if stream else Replicate()
            if is_conv1d(module):
                _rowwise_conv1d(module, mesh, given, leaving, local=not stream)
            else:
                rowwise = RowwiseParallel(input_layouts=given, output_layouts=leaving, use_local_output=not stream)
                parallelize_module(module, mesh, rowwise)


# ------------------------------------------------------------------------------------------------ parameters


def _rows(dim: int, maps: int) -> Placement:
    """Return the placement that shards `dim`, or each of several maps that are concatenated along it."""
    return Shard(dim) if maps == 1 else StridedShard(dim, split_factor=maps)


def _distribute(module: nn.Module, attribute: str, mesh: DeviceMesh, placement: Placement) -> None:
    param = getattr(module, attribute)
    # the first rank sends its values; meta tensors have none
    whole = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None if param.is_meta else 0)
    module.register_parameter(attribute, nn.Parameter(whole, requires_grad=param.requires_grad))


def _rowwise_conv1d(module: nn.Module, mesh: DeviceMesh, given: Placement, leaving: Placement, local: bool) -> None:
    """Shard GPT-2's Conv1D, whose weight is (in, out), as RowwiseParallel does an nn.Linear.

    given, leaving: placements of a plain input, and of the output, which is a plain tensor with `local`.
    """

    def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        x = _as(inputs[0], mesh, given)
        return x.redistribute(placements=[Shard(x.ndim - 1)])

    def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        output = output.redistribute(placements=[leaving])
        return output.to_local() if local else output

    _distribute(module, "weight", mesh, Shard(0))
    _distribute(module, "bias", mesh, Replicate())
    distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]  # it takes what these hooks return


def _ties(model: nn.Module, styles: ParallelStyles) -> list[list[tuple[nn.Module, str]]]:
    """Return, for each tied parameter that styles shard, all (module, attribute) that hold it.

    Raise ConfigError if styles shard it in one module and not in another.
    """
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attribute, param in torch_compat.own_parameters(module).items():
            if param is not None:
                places.setdefault(id(param), []).append((name, module, attribute))
    shared = []
    for found in places.values():
        styled = [(name, styles.by_name[name]) for name, _, _ in found if styles.by_name.get(name) not in (None, *WHOLE)]
        if len(found) < 2 or not styled:
            continue
        for name, module, attribute in found:
            if isinstance(module, (nn.Embedding, nn.Linear)) and name not in dict(styled):
                other, style = styled[0]
                raise ConfigError(
                    f"{name}.{attribute} is tied to that of {other}, which these styles cut ({style}): cut both, or neither "
                    "(vocabulary=False)."
                )
        shared.append([(module, attribute) for _, module, attribute in found])
    return shared


# ------------------------------------------------------------------------------------------------------ hooks


def _as(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return a plain tensor as a DTensor with `placement`. A DTensor is redistributed for Replicate, else returned as it is."""
    if not isinstance(x, DTensor):
        return DTensor.from_local(x, mesh, [placement], run_check=False)
    return x.redistribute(placements=[placement]) if placement.is_replicate() else x


def _whole_states(mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict, local: bool = False) -> tuple[tuple, dict]:
    """Pre-hook: make the inputs of a module's maps (its first argument, and keywords in STATES) whole.

    Each becomes one DTensor that all maps read (local: a plain tensor, for an island).
    """

    def whole(x: object) -> object:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        found = _as(x, mesh, Replicate())
        return found.to_local() if local else found

    return (*map(whole, args[:1]), *args[1:]), {k: whole(v) if k in STATES else v for k, v in kwargs.items()}


def _stream_in(mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pre-hook of the first block: take this rank's tokens of a plain, whole input."""
    whole = args[0] if args else kwargs["hidden_states"]
    cut = _as(whole, mesh, Replicate()).redistribute(placements=[Shard(1)])
    return ((cut, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": cut})


def _leave(mesh: DeviceMesh, module: nn.Module, args: tuple, output: Tensor | tuple, whole: bool) -> Tensor | tuple:
    """Hook after an island: take this rank's tokens of its output. Hook after the last block (whole): make its output whole."""
    first = _as(output[0] if isinstance(output, tuple) else output, mesh, Replicate())
    changed = first.to_local() if whole else first.redistribute(placements=[Shard(1)])
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def _compute_locally(module: nn.Module, mesh: DeviceMesh, partial_inputs: bool = False, partial_outputs: bool = False) -> None:
    """Let a module's forward compute with plain tensors: this rank's shards of its parameters, and whole inputs.

    partial_inputs: sum the gradients of the inputs over ranks. partial_outputs: sum the outputs over ranks.
    """

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for name in torch_compat.own_parameters(module):
            param = getattr(module, name)
            if isinstance(param, DTensor):  # an entry in the instance's __dict__ hides the parameter
                grads = [Partial()] if param.placements[0].is_replicate() else param.placements
                module.__dict__[name] = param.to_local(grad_placements=grads)
        if not partial_inputs:
            return args, kwargs

        def local(x: object) -> object:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            return _as(x, mesh, Replicate()).to_local(grad_placements=[Partial()])

        return tuple(map(local, args)), {name: local(value) for name, value in kwargs.items()}

    def leave(module: nn.Module, args: tuple, output: Tensor | None) -> Tensor | None:
        for name in torch_compat.own_parameters(module):
            module.__dict__.pop(name, None)
        if not partial_outputs or output is None:
            return output
        return DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    # after an error, too: a local tensor must not go on hiding the parameter
    module.register_forward_hook(leave, always_call=True)


# ------------------------------------------------------------------------------------------ places in a model


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _inside(name: str, places: list[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


# ----------------------------------------------------------------------------------------------------- checks


def _check_plain(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ConfigError(f'mesh: expected one axis, as mesh["tp"] is, got {mesh.ndim}: {mesh.mesh_dim_names}.')
    for name, module in model.named_modules():
        where = name or "the model"
        if "_zeroshard" in module.__dict__:
            raise ZeroshardError(f"{where} is sharded by zs.shard already: cut a model over tp first, then zs.shard it.")
        for wrapper in ("FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"):
            if any(base.__name__ == wrapper for base in type(module).__mro__):
                raise ZeroshardError(f"{where} is in {wrapper} already: cut a model over tp first, then give it to zs.shard.")
    for name, param in model.named_parameters():
        if hasattr(param, "placements"):
            raise ZeroshardError(f"{name} is a DTensor ({param.placements}) already: a model is cut over tp once.")
        if hasattr(param, "_home"):
            raise ZeroshardError(f"{name} belongs to a model that is sharded by zs.shard: cut a model over tp first.")


def _check(model: nn.Module, mesh: DeviceMesh, styles: ParallelStyles, loss_parallel: bool) -> None:
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for name, style in styles.by_name.items():
        if name not in names:
            raise absent(model, name, names)
        owner, attribute = resolve(model, name)
        if isinstance(style, str) and attribute is None and style in (*COLWISE, *GATHERED, *ROWWISE, VOCABULARY):
            linear = _is_map(owner)
            if not (linear or (isinstance(owner, nn.Embedding) and style not in (*PACKED, *ROWWISE))):
                raise ConfigError(f"styles: {name} is a {type(owner).__name__}: {style} cuts linear maps (and embeddings).")
            if linear and (style == VOCABULARY or (is_conv1d(owner) and style in GATHERED)):
                kind = type(owner).__name__
                raise ConfigError(f"styles: {name} is a {kind}, for which {style} is not served: colwise and rowwise are.")
    if loss_parallel and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError("loss_parallel can not add a router's loss to the loss: set model.config.output_router_logits=False.")
    if loss_parallel and styles.head is None:
        raise ConfigError(
            f"loss_parallel: no style cuts the head of {type(model).__name__}. Give it one, or leave out this option."
        )
    wrong = divides(model, mesh.size(), styles)
    if wrong:
        raise ConfigError("\n".join(wrong))
