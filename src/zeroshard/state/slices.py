"""Slices: which elements of which named tensor this rank holds, where they rest, how they are read and written.

    rank 0     blocks.0.weight (4, 5)   "value": elements [0, 12)     "optimizer:exp_avg": [0, 12)     "optimizer:step": 3
    rank 1     blocks.0.weight (4, 5)   "value": elements [12, 20)    "optimizer:exp_avg": [12, 20)    "optimizer:step": 3

`Engine.slices` (seam.py) lists them. How a model is cut into units and flat buffers can not be seen in them. Replicated states are divided among ranks as
sharded ones are: at every stage the slices of all ranks, those that are `counted`, are the tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Tier
from ..engine.parameter import ParamSpec
from ..engine.rest import Rest
from ..engine.runtime import Runtime
from ..engine.shard_model import write_value
from ..engine.unit import ParamGroup
from ..errors import ConfigError
from ..tensor.part import Distribution, Part, Piece
from ..utils.aligned import empty
from ..utils.module_names import own_name
from ..utils.work import OVER, Work
from .state_loading import Reader, copy_to_rest


@dataclass(eq=False)  # not frozen: a save makes thousands
class NamedPart:
    """A parameter of this rank's model, and the named tensor that it is, or is a part of.

    own_name: its name in this model; a tile has one of its own. names: those of the whole tensor, with all of its ties.
    shape: of the whole tensor. part: position in it of a tile, or of a shard along model axes; None if the parameter is all of it.
    distribution: how the ranks along model axes divide the tensor, if they do.
    """

    own_name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    part: Part | None
    distribution: Distribution | None

    @property
    def name(self) -> str:
        """The first name of the whole tensor."""
        return self.names[0]

    @property
    def tile(self) -> bool:
        """True if the part is a tile: this rank's model has the other parts as well."""
        return self.part is not None and self.distribution is None

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.shape if self.part is None else self.part.extents


@dataclass(eq=False)
class StateSlice(NamedPart):
    """Elements [start, stop) of a flattened parameter (of `extents`), or of a state of its shape, which this rank holds.

    It is valid until the optimizer next steps or loads. A state that is one number for the whole parameter (`step`) is a slice
    without elements that has the number, `scalar`, with the number's dtype (fp32 where that is no tensor).

    counted: of the ranks that hold copies of the same shard (replicas, ranks along model axes) this is the one that saves it.
    leads: this rank says what is said once for a tensor, if its slice is counted. It has the first element; rank 0 of an empty one.
    guarded: every writer waits for a background save (engine/write_gate.py), which may copy the elements while training goes on.
    encoded: label of the encoding; the elements are bytes (see `at_rest`).
    """

    kind: str
    param: nn.Parameter = field(repr=False)
    dtype: torch.dtype
    start: int
    stop: int
    counted: bool
    leads: bool
    guarded: bool
    _group: ParamGroup = field(repr=False)
    _index: int = field(repr=False)
    _rest: Rest | None = field(repr=False)
    _begin: int = field(repr=False)  # position of the slice in _rest
    scalar: object = None
    encoded: str = ""

    @property
    def trainable(self) -> bool:
        """True if the parameter had requires_grad at zs.shard."""
        return self._group.trainable

    @property
    def single(self) -> bool:
        """True if the state is one number for the whole parameter."""
        return self._rest is None

    @property
    def on_disk(self) -> bool:
        """True if the elements rest in a file."""
        return self._elements.tier is Tier.DISK

    @property
    def _elements(self) -> Rest:
        assert self._rest is not None, "one number for the whole parameter: see `scalar`"
        return self._rest

    # -- read: states must be at rest, for which `refresh` waits ---------------------------------------------------------

    def refresh(self) -> None:
        """Wait until states are at rest; copy what the program has written to parameters since the last step into their masters."""
        self._group.runtime.gate.refresh([self._group])

    def read(self, first: int, out: Tensor) -> Work:
        """Start to copy elements, from the slice's number `first` on, to `out` (n,), host memory, converted to its dtype."""
        if self.dtype == out.dtype:
            return self._elements.read(self._begin + first, out)
        out.copy_(self.host(first, first + out.numel()))
        return OVER

    def host(self, first: int, last: int) -> Tensor:
        """Return the slice's elements with numbers [first, last) on the host: a view where there is one, else a copy."""
        return self._elements.host(self._begin + first, self._begin + last)

    def at_rest(self) -> StateSlice:
        """Return the slice of the bytes that rest, (n,) uint8 of all blocks of the tensor, if the state is encoded; else itself.

        Blocks are counted from the beginning of what a rank has of the parameter along model axes. Where these are not blocks of the
        whole tensor as well, for all ranks alike, the slice stays one of decoded values, as that of a tile does. A state that rests
        in a dtype of its own, which a load converts, is returned in that dtype.
        """
        rest = self._rest
        if rest is None or rest.encoding is None:
            return self
        column, inner = rest.encoding
        if column.elements == 1 and not column.label and inner.dtype.is_floating_point and column.values == 1:
            return replace(self, dtype=inner.dtype, _rest=inner)
        before, stretch = 0, 0  # elements of the whole tensor before this part; of each part
        if self.part is not None:
            stretch = 0 if self.distribution is None else self.distribution.stretch
            before = self.part.start * math.prod(self.shape[1:])
        if not column.label or (self.part is not None and (not stretch or stretch % column.elements)):
            return self
        bounds = before + self.start, before + self.stop, math.prod(self.shape)
        start, stop, numel = (column.count(column.blocks(0, each)[1]) for each in bounds)
        return replace(
            self, encoded=column.label, dtype=torch.uint8, shape=(numel,), start=start, stop=stop, part=None, _rest=inner,
            _begin=column.count(self._begin),
        )  # fmt: skip

    # -- write, of slices of kind "value" but for `fill`: the caller has passed the gate before writes, and the fence where ranks
    #    read each other's values ----------------------------------------------------------------------------------------

    def fill(self, stored: Reader) -> None:
        """Write the slice's elements of a stored tensor, some MiB at a time."""
        copy_to_rest(stored, self.start, self.stop, self._elements, self._begin)

    def receive(self, given: torch.dtype, device: str) -> tuple[int, Tensor, Callable[[Tensor], object]]:
        """Return (first element, memory (n,), put): the caller fills the memory with the stored elements from the first on, then
        calls `put(memory)`.

        given: dtype of the stored tensor. A replicated parameter is read whole. The memory is fp32 if a master can hold what is
        stored; it may be the value's own. device: "cpu", or "meta" to learn the size only.
        """
        assert self.kind == "value"
        group, masters = self._group, self._group.masters.rest
        if group.values.replicated:
            return 0, empty(math.prod(self.extents), given, device), self.write
        if device == "cpu" and masters is None and (place := group.place(self._index)) is not None:
            return self.start, place, lambda values: None
        dtype = torch.float32 if masters is not None and given != self.dtype else self.dtype
        return self.start, empty(self.stop - self.start, dtype, device), self.write

    def write(self, values: Tensor) -> None:
        """Write a value (n,), of a replicated parameter the whole, and the same to its master."""
        assert self.kind == "value"
        group, index = self._group, self._index
        if group.values.replicated:
            write_value(group, index, values.view(self.extents))
            group.put_whole(index)
            return
        group.set_local(index, values)
        if group.masters.rest is not None:
            group.masters.rest.store(group.homes[index].begin, values)


def loaded(slices: Iterable[StateSlice]) -> None:
    """Record, after a load on all ranks, that all agree on these slices, and that none of the values is newer than its master."""
    for each in slices:
        masters, (what, _, name) = each._group.masters, each.kind.partition(":")
        if what == "value":
            masters.written(each._index)
        else:
            masters.traces.pop((each._index, "states" if what == "optimizer" else f"average {name}"), None)


def named_parts(model: nn.Module, specs: Iterable[ParamSpec]) -> list[NamedPart]:
    """Return the named tensors that parameters of a model are, or are parts of."""
    prefixes: dict[int, list[str]] = {}  # id of a module -> its own names; one that is registered more than once has several
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefixes.setdefault(id(module), []).append(own_name(model, prefix))

    def names(spec: ParamSpec) -> Iterator[str]:
        yield spec.whole_name
        for owner, attribute in spec.owners:
            for prefix in prefixes.get(id(owner), ()):
                name = f"{prefix}.{attribute}" if prefix else attribute
                # a shard along model axes has the whole's name already
                yield owner.whole_name(name) if isinstance(owner, Piece) else name

    return [NamedPart(s.name, tuple(dict.fromkeys(names(s))), s.whole_shape, s.part, s.distribution) for s in specs]


def slices_of(runtime: Runtime, kinds: Iterable[str]) -> list[StateSlice]:
    """Return what `Engine.slices` describes."""
    every = [(group, index) for group in runtime.groups for index in range(len(group.specs))]
    named = named_parts(runtime.model, (group.specs[index] for group, index in every))
    about: dict[tuple[int, int], dict[str, Any]] = {}  # what slices of all kinds have of a parameter
    for (group, index), part in zip(every, named, strict=True):
        home, box = group.homes[index], None if part.part is None else part.part.unpacked.box
        first = home.start == 0 and home.stop > 0 if math.prod(part.extents) else group.comm.rank == 0
        about[id(group), index] = vars(part) | {
            "param": group.params[index], "counted": group.counts, "leads": first and (box is None or not any(box.offsets)),
            "_group": group, "_index": index,
        }  # fmt: skip
    found = []
    for what, group, index, rest, begin, guarded, scalar in (each for kind in kinds for each in _listed(runtime, kind, every)):
        home = group.homes[index]
        start, stop = (home.start, home.stop) if rest is not None else (0, 0)
        dtype = rest.dtype if rest is not None else getattr(scalar, "dtype", torch.float32)
        found.append(
            StateSlice(
                **about[id(group), index], kind=what, dtype=dtype, start=start, stop=stop, guarded=guarded, _rest=rest, _begin=begin,
                scalar=scalar,
            )
        )  # fmt: skip
    return found


def _listed(
    runtime: Runtime, kind: str, every: list[tuple[ParamGroup, int]]
) -> Iterator[tuple[str, ParamGroup, int, Rest | None, int, bool, object]]:
    """Yield (kind, group, index, where it rests, position there, guarded, scalar) of each slice of one kind."""
    what, _, name = kind.partition(":")
    averages = range(max((len(group.averages) for group in runtime.groups), default=0))
    if (
        kind not in ("value", "master", "optimizer")
        and not (what == "optimizer" and name)
        and kind not in map("average:{}".format, averages)
    ):
        expected = f"'value', 'master', 'optimizer', 'optimizer:NAME' or 'average:NUMBER' ({len(averages)} averages)"
        raise ConfigError(f"engine.slices: kind: expected {expected}, got {kind!r}.")
    for core in (each.core for each in runtime.optimizers.sharded) if what == "optimizer" else ():
        for run in core.all_runs:
            state = run.states.load()
            for index in run.indices:
                for key in state if not name else state.keys() & {name}:
                    value, full = state[key], f"optimizer:{key}"
                    if run.holds(value):
                        rest, begin = run.place(value, index)
                        begin += run.group.homes[index].start if core.replicated else 0
                        yield full, run.group, index, rest, begin, not core.replicated, None
                    else:
                        yield full, run.group, index, None, 0, False, run.unmark(value)
    for group, index in every if what != "optimizer" else ():
        home, masters = group.homes[index], group.masters
        if kind == "value":  # a replicated one is the program's own tensor
            yield kind, group, index, group.values.rest, home.begin, group.values.sharded, None
        elif kind == "master":
            yield kind, group, index, *masters.slice(index), masters.rest is not None or group.values.sharded, None
        elif group.trainable:
            yield kind, group, index, group.averages[int(name)], home.begin, True, None
