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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError
from ..utils import torch_compat
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import FakeTensorMode

_FIRST, _LAST = "before the blocks", "after the blocks"


@dataclass(frozen=True)
class Tie:
    """A parameter of the whole model that two stages hold. names: number of a stage -> the parameter's name in it."""

    names: dict[int, str]


@dataclass
class Passage:
    """The hidden states that a running stage has received, and its own, to be sent to the next stage."""

    received: Tensor | None = None
    sent: Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Position of a stage: its number, the number of stages, the numbers of its blocks, parameters tied to other stages."""

    index: int
    count: int
    blocks: range
    ties: tuple[Tie, ...]
    passage: Passage = field(default_factory=Passage, compare=False)
    kwargs: dict[str, Any] = field(default_factory=dict)  # default keyword arguments for the model's forward
    example: Callable[[Tensor], Tensor] | None = None  # hidden states -> an input of the model with matching shape
    hidden: Callable[[Tensor], torch.Size] | None = None  # an input of the model -> shape of the hidden states


class Stage:
    """First base class of a stage's class, before the model's own class; `pipeline_stage` is the stage's Place."""

    pipeline_stage: Place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = self.pipeline_stage
        passage = place.passage
        if place.index > 0:
            (received,) = args
            passage.received = received
            assert place.example is not None
            args = (place.example(received),)  # zeros: masks and positions come from the shape
        try:
            output = super().forward(*args, **place.kwargs | kwargs)  # type: ignore[misc]
            sent = passage.sent
        finally:
            passage.received = passage.sent = None
        if place.index < place.count - 1:
            return sent
        return output if isinstance(output, Tensor) else output[0]


class StageBlocks(nn.ModuleList):
    """The blocks of one stage under their names in the whole model. Iterating wraps the first and the last in an `_End`."""

    def __init__(self, blocks: dict[str, nn.Module], passage: Passage, receives: bool, sends: bool) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)
        self._ends = passage, receives, sends

    def _met(self) -> list[Any]:
        blocks: list[Any] = list(torch_compat.own_modules(self).values())
        passage, receives, sends = self._ends
        if receives:
            blocks[0] = _End(blocks[0], passage, receives=True)
        if sends:
            blocks[-1] = _End(blocks[-1], passage, sends=True)
        return blocks

    def __iter__(self) -> Any:
        return iter(self._met())

    def __getitem__(self, index: int | slice) -> Any:
        return self._met()[index]


class _End:
    """Wrapper of a stage's first block, to pass it the received hidden states, or of its last, to keep its output for sending."""

    def __init__(self, block: Any, passage: Passage, receives: bool = False, sends: bool = False) -> None:
        self._block, self._passage, self._receives, self._sends = block, passage, receives, sends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._receives and args:
            args = (self._passage.received, *args[1:])
        elif self._receives:
            kwargs[_hidden_argument(kwargs)] = self._passage.received
        output = self._block(*args, **kwargs)
        if not self._sends:
            return output
        self._passage.sent = output[0] if isinstance(output, tuple) else output
        hidden = self._passage.sent.detach()  # the modules after the blocks belong to another stage: no graph is needed here
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _hidden_argument(kwargs: dict[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor))


class StandIn(nn.Module):
    """Replacement for a module of another stage: returns zeros of its output's shape, without memory.

    shape: the module's output shape for the example, with None for dimensions that equal the input's (rows, positions).
    Attributes that the model reads (`self.embeddings.projection.weight.dtype`) come from a copy of the module on the meta device.
    """

    def __init__(self, passage: Passage, shape: tuple[int | None, ...], module: nn.Module) -> None:
        super().__init__()
        self._passage, self.shape = passage, shape
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

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = find_tensors((args, kwargs))[0]
        hidden = self._passage.received if self._passage.received is not None else given
        zero = torch.zeros((), device=given.device, dtype=hidden.dtype)
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


def _numel(parameters: Any) -> int:
    return sum(param.numel() for param in parameters)


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
    return max(outermost.items(), key=lambda item: _numel(item[1].parameters()))


# -- recorded uses -----------------------------------------------------------------------------------------------


@dataclass
class _Uses:
    """The uses of parameters outside of the blocks, and the order of the blocks, recorded in one forward."""

    phases: dict[str, set[str]]  # name of a parameter -> phases in which it is used (_FIRST, _LAST, ...)
    outputs: dict[str, tuple[int | None, ...]]  # name of a module -> shape of its output; None: the input's dimension
    order: list[int]  # numbers of blocks in the order of calls
    direct: set[str]  # parameters that are used outside of their module's forward
    untold: set[str]  # modules whose output is not one tensor
    leading: int  # number of leading dimensions in which input and hidden states agree
    tail: tuple[int, ...]  # the input's other dimensions
    width: tuple[int, ...] = ()  # the hidden states' other dimensions


class _Watch(TorchFunctionMode):
    def __init__(self, seen: Callable[[int], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if find_tensors(result):  # else the function only read a shape or dtype
            for tensor in find_tensors((args, kwargs)):
                self.seen(id(tensor))
        return result


@torch.no_grad()
def _stand_ins(tensors: list[tuple[str, Tensor]]) -> tuple[dict[int, Tensor], Any]:
    """Return the tensors for a recorded forward, by the id of the model's tensor that each replaces, and a context to run it in.

    Buffers are copied, since this forward must not change running statistics. If any tensor is on "meta", all become fake.
    """
    if not any(tensor.is_meta for _, tensor in tensors):  # compute three tokens with the real parameters
        return {id(t): t if isinstance(t, nn.Parameter) else t.clone() for _, t in tensors}, contextlib.nullcontext()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        return {id(t): torch.empty(t.shape, dtype=t.dtype) for _, t in tensors}, fake


def _watch_forward(model: nn.Module, blocks: list[nn.Module], example: Tensor, kwargs: dict[str, Any]) -> _Uses:
    inside = {id(param) for block in blocks for param in block.parameters()}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    shadow, fake = _stand_ins(tensors)
    if any(tensor.is_meta for _, tensor in tensors):
        with fake:
            example = torch.zeros(example.shape, dtype=example.dtype)
    example = example.to(next(iter(shadow.values())).device)
    outer: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in inside:
            outer.setdefault(id(shadow[id(param)]), []).append(name)
    uses = _Uses({name: set() for names in outer.values() for name in names}, {}, [], set(), set(), 0, ())
    running: list[str] = []
    phase = [_FIRST]

    def seen(key: int) -> None:
        for name in outer.get(key, ()):
            if name.rpartition(".")[0] in running and running:
                uses.phases[name].add(phase[0])
            elif not any(other.rpartition(".")[0] in running for other in outer[key]):
                uses.direct.add(name)

    def block_begins(number: int) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs[_hidden_argument(kwargs)]
            uses.order.append(number)
            agree = enumerate(zip(example.shape, hidden.shape, strict=False))
            uses.leading = next((n for n, (x, y) in agree if x != y), min(example.ndim, hidden.ndim))
            uses.tail, uses.width = tuple(example.shape[uses.leading :]), tuple(hidden.shape[uses.leading :])
            phase[0] = f"in block {number}"

        return hook

    def block_ends(*_: Any) -> None:
        phase[0] = _LAST if uses.order[-1] == len(blocks) - 1 else "between the blocks"

    def begins(name: str) -> Callable:
        return lambda *_: running.append(name)

    def ends(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            running.pop()
            if not isinstance(output, Tensor):
                uses.untold.add(name)
            else:
                given = find_tensors((args, kwargs))[0].shape
                uses.outputs[name] = tuple(None if given[n : n + 1] == (size,) else size for n, size in enumerate(output.shape))

        return hook

    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(block_begins(number), with_kwargs=True))
        handles.append(block.register_forward_hook(block_ends))
    for name, module in model.named_modules(remove_duplicate=False):
        outside = any(p is not None and id(p) not in inside for p in torch_compat.own_parameters(module).values())
        if name and outside:
            handles.append(module.register_forward_pre_hook(begins(name)))
            handles.append(module.register_forward_hook(ends(name), with_kwargs=True))
    try:
        # dropout here must not advance the program's generators
        with fake, _Watch(seen), torch.random.fork_rng(enabled=not tensors[0][1].is_meta):
            replaced = {n: shadow[id(t)] for n, t in tensors if shadow[id(t)] is not t}
            torch.func.functional_call(model, replaced, (example,), kwargs, tie_weights=False)
    finally:
        for handle in handles:
            handle.remove()
    return uses


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
    kwargs = {"use_cache": False} if "use_cache" in takes or hasattr(getattr(model, "config", None), "use_cache") else {}
    if example is not None and not isinstance(example, Tensor):
        raise ConfigError(f"example: expected an input of {type(model).__name__}, a tensor, got {type(example).__name__}.")
    given = torch.zeros(2, 3, dtype=torch.long) if example is None else example
    try:
        uses = _watch_forward(model, members, given, kwargs)
    except Exception as error:
        tokens = "tokens, " if example is None else ""
        raise ConfigError(
            f"the forward of {type(model).__name__}, which runs once to find where the model can be cut, failed on {tokens}"
            f"{tuple(given.shape)} {str(given.dtype).removeprefix('torch.')}: {type(error).__name__}: {error}. Pass an input that it takes, "
            "of any values: example=torch.zeros(rows, ...)."
        ) from error
    _check_uses(model, uses, count, path)
    costs = [float(_numel(block.parameters())) for block in members]
    sizes = dict(model.named_parameters(remove_duplicate=False))
    costs[0] += embedding_weight * sum(sizes[name].numel() for name, phases in uses.phases.items() if _FIRST in phases)
    costs[-1] += head_weight * sum(sizes[name].numel() for name, phases in uses.phases.items() if _LAST in phases)
    ranges = cut_by_cost(costs, stages) if cuts is None else _cuts_as_asked(cuts, names, stages)
    ties = _ties(model, uses, stages)
    for name in {name for tie in ties for name in tie.names.values()}:
        sizes[name].__dict__["unit_of_its_own"] = True  # a flat buffer shared with other parameters would differ between stages
    return [_Cutter(model, path, uses, kwargs, given).stage(index, ranges, ties) for index in own]


def _ties(model: nn.Module, uses: _Uses, stages: int) -> tuple[Tie, ...]:
    """Return the parameters that are used both before and after the blocks."""
    if stages == 1:
        return ()
    found: dict[int, dict[int, str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, phases in uses.phases.items():
        for phase in phases:
            found.setdefault(id(params[name]), {})[0 if phase == _FIRST else stages - 1] = name
    return tuple(Tie(names) for names in found.values() if len(names) > 1)


class _Cutter:
    """Makes one stage of a model: copies of the modules outside of the blocks, with the model's own tensors."""

    def __init__(self, model: nn.Module, path: str, uses: _Uses, kwargs: dict[str, Any], example: Tensor) -> None:
        self.model, self.path, self.uses, self.kwargs, self.example = model, path, uses, kwargs, example

    def stage(self, index: int, ranges: list[range], ties: tuple[Tie, ...]) -> nn.Module:
        mine = tuple(tie for tie in ties if index in tie.names)
        dtype, leading, tail, width = self.example.dtype, self.uses.leading, self.uses.tail, self.uses.width

        def example(hidden: Tensor) -> Tensor:
            return torch.zeros(*hidden.shape[:leading], *tail, dtype=dtype, device=hidden.device)

        def hidden(given: Tensor) -> torch.Size:
            return torch.Size((*given.shape[:leading], *width))

        self.place = Place(index, len(ranges), ranges[index], mine, kwargs=self.kwargs, example=example, hidden=hidden)
        self.config = self._config()
        self.made: dict[int, nn.Module] = {}
        shared = [] if index == 0 else [self.model.get_parameter(tie.names[index]) for tie in mine]
        self.own: dict[int, nn.Parameter] = {}
        for param in shared:  # copies, since both stages may be on this rank
            self.own[id(param)] = nn.Parameter(param.detach().clone(), param.requires_grad)
            self.own[id(param)].__dict__.update(param.__dict__)
        stage = self._copy("", self.model)
        stage.__class__ = type(f"{type(self.model).__name__}Stage", (Stage, type(self.model)), {})
        stage.pipeline_stage = self.place  # type: ignore[assignment]
        return stage

    def _config(self) -> Any:
        """Return the config with its per-layer lists cut to this stage's layers: Transformers' loops index them from 0."""
        config, count = getattr(self.model, "config", None), self.place.blocks.stop
        whole = len(self.uses.order)
        rows = {k: v for k, v in getattr(config, "__dict__", {}).items() if isinstance(v, list) and len(v) == whole}
        if not rows or count - self.place.blocks.start == whole:
            return config
        own = copy.copy(config)
        own.__dict__.update({key: value[self.place.blocks.start : count] for key, value in rows.items()})
        return own

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        if id(module) in self.made:
            return self.made[id(module)]
        if name == self.path:
            place, members = self.place, list(torch_compat.own_modules(module).items())
            chosen = {key: members[number][1] for number, (key, _) in enumerate(members) if number in place.blocks}
            made: nn.Module = StageBlocks(chosen, place.passage, place.index > 0, place.index < place.count - 1)
        elif self._elsewhere(name, module):
            # a module that the forward never calls has no recorded output shape, and needs none
            made = StandIn(self.place.passage, self.uses.outputs.get(name, ()), module)
        else:
            made = copy.copy(module)
            made.__dict__.update({k: v.copy() for k, v in module.__dict__.items() if isinstance(v, dict)})
            if self.config is not None and module.__dict__.get("config") is self.model.config:
                made.__dict__["config"] = self.config
            params = torch_compat.own_parameters(made)
            params.update({key: self.own.get(id(param), param) for key, param in params.items()})
            self.made[id(module)] = made
            for key, child in torch_compat.own_modules(module).items():
                torch_compat.own_modules(made)[key] = (
                    None if child is None else self._copy(f"{name}.{key}" if name else key, child)
                )
        self.made[id(module)] = made
        made.training = module.training
        return made

    def _elsewhere(self, name: str, module: nn.Module) -> bool:
        """Return whether the module has parameters of its own and none belongs to this stage."""
        prefix = f"{name}." if name else ""
        used = [self.uses.phases[prefix + key] for key in torch_compat.own_parameters(module) if prefix + key in self.uses.phases]
        here = {_FIRST: self.place.index == 0, _LAST: self.place.index == self.place.count - 1}
        phases = set().union(*used) if used else set()
        return bool(used) and not any(here[phase] for phase in phases or (_FIRST,))  # unused parameters belong to stage 0
