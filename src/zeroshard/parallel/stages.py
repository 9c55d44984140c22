"""Pipeline stages: cut a model of the Transformer family between its blocks. Stages keep the whole model's names.

    whole     embedding | blocks.0 blocks.1 blocks.2 blocks.3 | norm head
    stage 0   embedding | blocks.0 blocks.1                   |               tokens -> hidden states
    stage 1             |                   blocks.2 blocks.3 | norm head     hidden states -> logits

A stage is a copy of the model, of a subclass of its class, with fewer parameters; it runs the model's own forward. The forward's
loop over blocks visits only this stage's blocks: the first takes the received hidden states in place of its argument, and the
last one's output is sent to the next stage. Every stage makes masks, positions and rotary tables itself, from shapes. A
`StandIn` replaces each module outside of the blocks whose parameters belong to another stage; nothing reads the zeros that it
returns.

To find which modules are used before and after the blocks, the forward runs once on a few tokens (with fake tensors if the
model is on the meta device), and every function that uses a parameter is recorded. So a model can be cut if its forward consists
of modules, one list of blocks, and further modules, with one tensor of hidden states between blocks. For other models, write
the modules of the stages yourself and give them to Pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..activations import router_loss
from ..activations.router_loss import StageSums, of_stage
from ..errors import ConfigError
from ..utils import torch_compat
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import FakeTensorMode

_FIRST, _LAST = "before the blocks", "after the blocks"


@dataclass
class Place:
    """Position of a stage: its number, the number of stages, the numbers of its blocks; and what its forward has to know.

    While a stage runs, `received` are the hidden states that it was given, and `sent` its own, for the next stage.
    """

    index: int
    count: int
    blocks: range
    ties: tuple[dict[int, str], ...]  # parameters that two stages hold: number of a stage -> the parameter's name in it
    kwargs: dict[str, object]  # default keyword arguments for the model's forward
    dtype: torch.dtype  # of the model's input
    leading: int  # number of leading dimensions in which input and hidden states agree
    tail: tuple[int, ...]  # the input's other dimensions
    width: tuple[int, ...]  # the hidden states' other dimensions
    experts: int = 0  # whose load-balancing loss the model adds to its own: sums for it are sent as well; 0: it adds none
    received: Tensor | None = None
    sent: Tensor | None = None

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


class Stage:
    """First base class of a stage's class, before the model's own class; `pipeline_stage` is the stage's Place."""

    pipeline_stage: Place

    def forward(self, *args: Tensor, **kwargs: object) -> Tensor | tuple | None:
        """Return hidden states, or logits in the last stage; beside them the sums, or the value, of the router's loss if there is one."""
        place, device = self.pipeline_stage, find_tensors((args, kwargs))[0].device
        sums = StageSums(device, place.last)
        if place.index > 0:
            hidden, *received = args
            place.received, sums.received = hidden, next(iter(received), None)
            # zeros: masks and positions come from the shape
            args = (torch.zeros(*hidden.shape[: place.leading], *place.tail, dtype=place.dtype, device=device),)
        try:
            with of_stage(sums):
                output = super().forward(*args, **place.kwargs | kwargs)  # type: ignore[misc]
            sent = place.sent
        finally:
            place.received = place.sent = None
        if sums.experts != place.experts:
            raise ConfigError(
                f"{type(self).__name__} computes its router's loss in this forward alone, or not in this one: set "
                "config.output_router_logits before the model is cut into stages, and do not pass it."
            )
        result = logits_of(output) if place.last else sent
        return (result, sums.sent) if place.experts else result


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, an output of Transformers, or a tuple that begins with them."""
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


class StageBlocks(nn.ModuleList):
    """The blocks of one stage under their names in the whole model. Iterating wraps the first and the last in an `_End`."""

    def __init__(self, blocks: dict[str, nn.Module], place: Place) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        blocks: list[nn.Module | _End] = list(torch_compat.own_modules(self).values())
        if self._place.index > 0:
            blocks[0] = _End(blocks[0], self._place, receives=True)
        if not self._place.last:
            blocks[-1] = _End(blocks[-1], self._place, sends=True)
        return iter(blocks)

    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]


class _End:
    """Wrapper of a stage's first block, to pass it the received hidden states, or of its last, to keep its output for sending."""

    def __init__(self, block: nn.Module | _End, place: Place, receives: bool = False, sends: bool = False) -> None:
        self._block, self._place, self._receives, self._sends = block, place, receives, sends

    def __call__(self, *args: object, **kwargs: object) -> Tensor | tuple:
        if self._receives and args:
            args = (self._place.received, *args[1:])
        elif self._receives:
            kwargs[_hidden_argument(kwargs)] = self._place.received
        output: Tensor | tuple = self._block(*args, **kwargs)
        if not self._sends:
            return output
        sent: Tensor = output[0] if isinstance(output, tuple) else output
        # the modules after the blocks belong to another stage: no graph is needed here
        self._place.sent, hidden = sent, sent.detach()
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _hidden_argument(kwargs: dict[str, object]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor))


class StandIn(nn.Module):
    """Replacement for a module of another stage: returns zeros of its output's shape, without memory.

    shape: the module's output shape for the example, with None for dimensions that equal the input's (rows, positions), or ... for
    all of these where the output begins with them: the input may be (positions,) in the example, and (rows, positions) later.
    Attributes that the model reads (`self.embeddings.projection.weight.dtype`) come from a copy of the module on the meta device.
    """

    def __init__(self, place: Place, shape: tuple, module: nn.Module) -> None:
        super().__init__()
        self._place, self.shape = place, shape
        tensors = [*module.parameters(), *module.buffers()]
        without_memory = {id(t): torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in tensors}
        self.__dict__["_copy"] = copy.deepcopy(module, without_memory)  # in __dict__, so that its parameters are not the stage's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_copy" not in self.__dict__:
                raise
            return getattr(self.__dict__["_copy"], name)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        given = find_tensors((args, kwargs))[0]
        hidden = self._place.received if self._place.received is not None else given
        zero = torch.zeros((), device=given.device, dtype=hidden.dtype)
        if self.shape[:1] == (...,):
            return zero.expand(*given.shape, *self.shape[1:])
        return zero.expand(*(given.shape[number] if size is None else size for number, size in enumerate(self.shape)))


# -- where to cut ------------------------------------------------------------------------------------------------


def cut_by_cost(costs: Sequence[float], stages: int) -> list[range]:
    """Divide blocks into one range per stage, so that the costliest stage costs least; ties give earlier stages more blocks."""
    count, sums = len(costs), [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [sums[:]]  # best[s][i]: the costliest of s + 1 stages over the first i blocks
    begins = [[0] * (count + 1)]
    for stage in range(1, stages):
        row, starts = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                worst = max(best[-1][start], sums[stop] - sums[start])
                if worst <= row[stop]:  # of equal cuts the one with the later start, so that earlier stages get more blocks
                    row[stop], starts[stop] = worst, start
        best.append(row)
        begins.append(starts)
    result, stop = [], count
    for starts in reversed(begins):
        result.append(range(starts[stop], stop))
        stop = starts[stop]
    return result[::-1]


def _cuts_as_asked(cuts: Sequence[int | str], names: list[str], stages: int) -> list[range]:
    given = [names.index(cut) if isinstance(cut, str) and cut in names else cut for cut in cuts]
    numbers = [cut for cut in given if isinstance(cut, int) and 0 < cut < len(names)]
    if numbers != given or len(numbers) != stages - 1 or sorted(set(numbers)) != numbers:
        raise ConfigError(
            f"cuts: expected the {stages - 1} blocks with which stages 1 to {stages - 1} begin, in order, as numbers from 1 to "
            f"{len(names) - 1} or as names like {names[-1]!r}; got {list(cuts)!r}."
        )
    return [range(start, stop) for start, stop in zip([0, *numbers], [*numbers, len(names)], strict=True)]


def find_block_list(model: nn.Module, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return (name, nn.ModuleList) of a model's blocks. Raise ConfigError if there is no such list.

    name: name of the list. None: of the outermost lists whose members are of one class and have submodules, the one with the most
    parameters.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if name is not None:
        if name not in found:
            raise ConfigError(f"blocks: {type(model).__name__} has no nn.ModuleList named {name!r}; it has {sorted(found)}.")
        return name, found[name]
    alike = {n: m for n, m in found.items() if len({type(b) for b in m}) == 1 and next(m[0].children(), None) is not None}
    outermost = {n: m for n, m in alike.items() if not any(n != other and n.startswith(f"{other}.") for other in alike)}
    if not outermost:
        raise ConfigError(
            f"{type(model).__name__} has no nn.ModuleList of blocks to cut between. Write the module of each stage yourself, "
            "and give those of this rank to zs.Pipeline."
        )
    return max(outermost.items(), key=lambda item: sum(param.numel() for param in item[1].parameters()))


# -- recorded uses -----------------------------------------------------------------------------------------------


class _Uses(TorchFunctionMode):
    """The uses of parameters outside of the blocks, and the order of the blocks, recorded in one forward by the constructor.

    If any tensor of the model is on "meta", all become fake; else the few tokens of the example pass the real parameters.

    Attributes:
        phases: name of a parameter -> phases in which it is used (_FIRST, _LAST, ...).
        outputs: name of a module -> shape of its output, as of a StandIn.
        order: numbers of blocks in the order of calls.
        experts: their number, if the forward computes a load-balancing loss that crosses stages; else 0.
        direct: parameters that are used outside of their module's forward.
        untold: modules whose output is not one tensor.
        leading: number of leading dimensions in which input and hidden states agree.
        tail, width: the other dimensions of the input, and of the hidden states.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], example: Tensor, kwargs: dict[str, object]) -> None:
        super().__init__()
        params = list(model.named_parameters(remove_duplicate=False))
        tensors = [*params, *model.named_buffers(remove_duplicate=False)]
        fake: contextlib.AbstractContextManager = contextlib.nullcontext()
        if any(tensor.is_meta for _, tensor in tensors):
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with fake:
                shadow = {id(t): torch.empty(t.shape, dtype=t.dtype) for _, t in tensors}
                example = torch.zeros(example.shape, dtype=example.dtype)
        else:  # copies of buffers, since this forward must not change running statistics
            shadow = {id(t): t if isinstance(t, nn.Parameter) else t.detach().clone() for _, t in tensors}
        self.example = example.to(next(iter(shadow.values())).device)
        inside = {id(param) for block in blocks for param in block.parameters()}
        self.outer: dict[int, list[str]] = {}  # id of a tensor of the forward -> names of the parameter
        for name, param in params:
            if id(param) not in inside:
                self.outer.setdefault(id(shadow[id(param)]), []).append(name)
        self.phases: dict[str, set[str]] = {name: set() for names in self.outer.values() for name in names}
        self.outputs: dict[str, tuple] = {}
        self.order: list[int] = []
        self.direct, self.untold = set[str](), set[str]()
        self.leading = 0
        self.tail: tuple[int, ...] = ()
        self.width: tuple[int, ...] = ()
        self.running: list[str] = []  # modules outside of the blocks whose forwards are running
        self.phase, self.last = _FIRST, len(blocks) - 1
        handles = []
        for number, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(partial(self._block_begins, number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._block_ends))
        for name, module in model.named_modules(remove_duplicate=False):
            outside = any(p is not None and id(p) not in inside for p in torch_compat.own_parameters(module).values())
            if name and outside:
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name)))
                handles.append(module.register_forward_hook(partial(self._ends, name), with_kwargs=True))
        try:
            # dropout here must not advance the program's generators
            with fake, self, torch.random.fork_rng(enabled=not tensors[0][1].is_meta):
                replaced = {n: shadow[id(t)] for n, t in tensors if shadow[id(t)] is not t}
                sums = StageSums(self.example.device, last=False)
                with of_stage(sums):
                    torch.func.functional_call(model, replaced, (self.example,), kwargs, tie_weights=False)
                self.experts = sums.experts
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # without tensors in the result the function only read a shape or dtype
        for tensor in find_tensors((args, kwargs)) if find_tensors(result) else ():
            names = self.outer.get(id(tensor), ())
            of_running = [name for name in names if name.rpartition(".")[0] in self.running]
            for name in of_running:
                self.phases[name].add(self.phase)
            if not of_running:
                self.direct.update(names)
        return result

    def _block_begins(self, number: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs[_hidden_argument(kwargs)]
        given, shape = self.example.shape, hidden.shape
        agree = enumerate(zip(given, shape, strict=False))
        self.leading = next((n for n, (x, y) in agree if x != y), min(len(given), len(shape)))
        self.tail, self.width = tuple(given[self.leading :]), tuple(shape[self.leading :])
        self.order.append(number)
        self.phase = f"in block {number}"

    def _block_ends(self, *_: object) -> None:
        self.phase = _LAST if self.order[-1] == self.last else "between the blocks"

    def _ends(self, name: str, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        self.running.pop()
        if isinstance(output, Tensor):
            given = find_tensors((args, kwargs))[0].shape
            equal = tuple(None if given[n : n + 1] == (size,) else size for n, size in enumerate(output.shape))
            begins = output.shape[: len(given)] == given
            self.outputs[name] = (..., *output.shape[len(given) :]) if begins else equal
        else:
            self.untold.add(name)


def _check_uses(model: nn.Module, uses: _Uses, count: int, path: str) -> None:
    remedy = "Write the module of each stage yourself, and give those of this rank to zs.Pipeline."
    if uses.order != list(range(count)):
        raise ConfigError(
            f"the forward of {type(model).__name__} calls the blocks {uses.order} in this order: stages need a model that calls each of "
            f"its {count} blocks once, one after the other. {remedy}"
        )
    if uses.direct:
        raise ConfigError(
            f"{sorted(uses.direct)[0]} of {type(model).__name__} is used outside of the forward of the module that holds it, so no stage "
            f"can do without it. {remedy}"
        )
    holding = [name for name in uses.phases if f"{path}.".startswith(f"{name.rpartition('.')[0]}.")]
    if holding:
        raise ConfigError(
            f"{holding[0]} of {type(model).__name__} belongs to the module that holds the blocks, so it can not be left out of the other "
            f"stages: give it a module of its own. {remedy}"
        )
    if router_loss.coefficient(model) and not uses.experts:
        raise ConfigError(
            f"{type(model).__name__} adds to its loss one of its routers (output_router_logits=True) that is not Transformers' "
            "load_balancing_loss_func, and can not cross stages: set config.output_router_logits = False, or leave the axis pp out."
        )
    if uses.untold:
        raise ConfigError(
            f"{sorted(uses.untold)[0]} of {type(model).__name__} has parameters and returns something other than one tensor, so the stages "
            f"that do without it can not put an empty tensor in its place. {remedy}"
        )
    for name, phases in uses.phases.items():
        if phases - {_FIRST, _LAST}:
            raise ConfigError(f"{name} of {type(model).__name__} is used {sorted(phases)[-1]}: several stages need it. {remedy}")


# -- the stages --------------------------------------------------------------------------------------------------


def cut_stages(
    model: nn.Module,
    stages: int,
    own: Sequence[int],
    *,
    cuts: Sequence[int | str] | None = None,
    blocks: str | None = None,
    embedding_weight: float = 1.0,
    head_weight: float = 1.0,
    example: Tensor | None = None,
) -> list[nn.Module]:
    """Return the modules of some stages of a model. The model is not changed; the stages share its blocks.

    Args:
        model: any nn.Module with one nn.ModuleList of blocks (the family of Transformers), also on the meta device. Parameters
            keep their names. Stages refer only to the tensors that they use: drop the model, and the others are freed.
        stages: number of stages in all.
        own: numbers of the stages to return.
        cuts: the blocks with which stages 1, 2, ... begin, as numbers or names ("model.layers.8"). None: by cost. A block costs
            its number of parameters; the first block also those before the blocks, times embedding_weight, and the last block
            also those after them, times head_weight. (An embedding takes the memory of its parameters, but next to no time.)
        blocks: name of the list of blocks, if it is not the one with the most parameters.
        example: an input of the model, of any values and with any number of rows; None: a batch of tokens, (2, 3) int64.

    Raises:
        ConfigError: there are more stages than blocks, cuts are wrong, the model does not take the input, or it cannot be cut
            between its blocks.
    """
    path, block_list = find_block_list(model, blocks)
    names = [f"{path}.{name}" if path else name for name in torch_compat.own_modules(block_list)]
    count = len(names)
    if not 1 <= stages <= count:
        raise ConfigError(
            f"{stages} pipeline stages for a {type(model).__name__} of {count} blocks ({path}): each stage needs one at least, so between "
            f"1 and {count} stages; the nearest is {min(max(stages, 1), count)}."
        )
    members = list(torch_compat.own_modules(block_list).values())
    takes = inspect.signature(model.forward).parameters
    kwargs: dict[str, object] = (
        {"use_cache": False} if "use_cache" in takes or hasattr(getattr(model, "config", None), "use_cache") else {}
    )
    if example is not None and not isinstance(example, Tensor):
        raise ConfigError(f"example: expected an input of {type(model).__name__}, a tensor, got {type(example).__name__}.")
    given = torch.zeros(2, 3, dtype=torch.long) if example is None else example
    router_loss.replace(model)
    try:
        uses = _Uses(model, members, given, kwargs)
    except Exception as error:
        tokens = "tokens, " if example is None else ""
        raise ConfigError(
            f"the forward of {type(model).__name__}, which runs once to find where the model can be cut, failed on {tokens}"
            f"{tuple(given.shape)} {str(given.dtype).removeprefix('torch.')}: {type(error).__name__}: {error}. Pass an input that it takes, "
            "of any values: example=torch.zeros(rows, ...)."
        ) from error
    _check_uses(model, uses, count, path)
    costs = [float(sum(param.numel() for param in block.parameters())) for block in members]
    sizes = dict(model.named_parameters(remove_duplicate=False))
    costs[0] += embedding_weight * sum(sizes[name].numel() for name, phases in uses.phases.items() if _FIRST in phases)
    costs[-1] += head_weight * sum(sizes[name].numel() for name, phases in uses.phases.items() if _LAST in phases)
    ranges = cut_by_cost(costs, stages) if cuts is None else _cuts_as_asked(cuts, names, stages)
    ties = _ties(model, uses, stages)
    for name in {name for names_of_tie in ties for name in names_of_tie.values()}:
        sizes[name].__dict__["unit_of_its_own"] = True  # a flat buffer shared with other parameters would differ between stages
    made = []
    for index in own:
        mine = tuple(tie for tie in ties if index in tie)
        place = Place(index, stages, ranges[index], mine, kwargs, given.dtype, uses.leading, uses.tail, uses.width, uses.experts)
        made.append(_make_stage(model, path, uses, place))
    return made


def _ties(model: nn.Module, uses: _Uses, stages: int) -> tuple[dict[int, str], ...]:
    """Return the names, by stage, of each parameter that is used both before and after the blocks."""
    if stages == 1:
        return ()
    found: dict[int, dict[int, str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, phases in uses.phases.items():
        for phase in phases:
            found.setdefault(id(params[name]), {})[0 if phase == _FIRST else stages - 1] = name
    return tuple(names for names in found.values() if len(names) > 1)


def _make_stage(model: nn.Module, path: str, uses: _Uses, place: Place) -> nn.Module:
    """Return one stage of a model: copies of the modules outside of the blocks, with the model's own tensors."""
    whole = config = getattr(model, "config", None)
    rows = {k: v for k, v in getattr(whole, "__dict__", {}).items() if isinstance(v, list) and len(v) == len(uses.order)}
    if rows and len(place.blocks) < len(uses.order):  # cut per-layer lists to this stage's layers: Transformers' loops begin at 0
        config = copy.copy(whole)
        vars(config).update({key: row[place.blocks.start : place.blocks.stop] for key, row in rows.items()})
    own: dict[int, nn.Parameter] = {}
    for names in place.ties if place.index > 0 else ():  # copies, since both stages may be on this rank
        param = model.get_parameter(names[place.index])
        own[id(param)] = nn.Parameter(param.detach().clone(), param.requires_grad)
        own[id(param)].__dict__.update(param.__dict__)
    here = {_FIRST: place.index == 0, _LAST: place.last}
    finished: dict[int, nn.Module] = {}

    def copied(name: str, module: nn.Module) -> nn.Module:
        if id(module) in finished:
            return finished[id(module)]
        prefix = f"{name}." if name else ""
        used = [uses.phases[prefix + key] for key in torch_compat.own_parameters(module) if prefix + key in uses.phases]
        if name == path:
            members = list(torch_compat.own_modules(module).items())
            made: nn.Module = StageBlocks(dict(members[place.blocks.start : place.blocks.stop]), place)
        elif used and not any(here[phase] for phase in set().union(*used) or (_FIRST,)):  # unused parameters belong to stage 0
            # a module that the forward never calls has no recorded output shape, and needs none
            made = StandIn(place, uses.outputs.get(name, ()), module)
        else:
            made = copy.copy(module)
            made.__dict__.update({k: v.copy() for k, v in module.__dict__.items() if isinstance(v, dict)})
            if config is not None and module.__dict__.get("config") is whole:
                made.__dict__["config"] = config
            params = torch_compat.own_parameters(made)
            params.update({key: own.get(id(param), param) for key, param in params.items()})
            finished[id(module)] = made
            members_of_copy = torch_compat.own_modules(made)
            for key, child in torch_compat.own_modules(module).items():
                members_of_copy[key] = None if child is None else copied(prefix + key, child)
        finished[id(module)] = made
        made.training = module.training
        return made

    stage = copied("", model)
    finished.clear()  # `copied` refers to itself, so only the garbage collector frees what it holds
    own.clear()
    stage.__class__ = type(f"{type(model).__name__}Stage", (Stage, type(model)), {})
    stage.pipeline_stage = place  # type: ignore[assignment]
    return stage
