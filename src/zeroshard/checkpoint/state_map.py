"""Content of one rank's part of a checkpoint: which elements of each tensor the rank writes, from where, and plain objects.

    model.<name>              parameters (fp32 masters where there are any) and persistent buffers
    optim.state.<name>.<key>  optimizer states: of the parameter's shape, or one number for each parameter (step)
    optim.state.<name>.<key>@<label>    the bytes of an encoded state (uint8); label: its encoding, as e3m4/256
    optim.param_groups        options of the groups with the names of their members
    zeroshard.state           steps taken, loss scale
    zeroshard.rng.<rank>      random generators
    extra.<name>              the user's extras; extra.<name>.<rank> where ranks gave different ones
    slices.<extra>.<name>     values that an extra keeps for each parameter, in its shape (user_state.slices_of, zs.ema)

Names are those of whole parameters, without tiles, tensor-parallel shards, wrappers, units and flat buffers, so that any other
partition can read the checkpoint. Replicated states are divided among ranks as sharded ones are. If several ranks along model
axes hold the same elements, one of them writes these (`group.counts`); if several pipeline stages have the same name, the first.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from ..config import Tier
from ..errors import ConfigError
from ..offload.storage import CodedRest, MemoryRest, Rest
from ..optim.sharded_optimizer import OptimizerCore
from ..tensor.chunks import Box, boxes_of
from ..tensor.tiled_parameter import Part
from ..utils.module_names import own_state
from ..zero.parameter import ParamSpec
from ..zero.runtime import Runtime
from ..zero.unit import ParamGroup
from .dcp import MAX_BLOB_NBYTES, storable
from .safetensors import names_of, prefixes_of

if TYPE_CHECKING:
    from .stages import Stages

MODEL, STATE, GROUPS, OWN, RNG, EXTRA, SLICES = (
    "model.", "optim.state.", "optim.param_groups", "zeroshard.state", "zeroshard.rng.", "extra.", "slices.",
)  # fmt: skip
CODED = "@"  # between the name of an optimizer state and the label of its encoding


@dataclass(frozen=True)
class Entry:
    """The elements of a named tensor that a rank holds: [start, stop) of the flattened part, or of the whole tensor."""

    name: str
    keys: tuple[str, ...]  # path of the name in nested state dicts
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    part: Part | None = None

    def boxes(self) -> Iterator[tuple[Box, int]]:
        """Yield (box of the whole tensor, index of its first element among the rank's), in order; each box fits a blob."""
        shape = self.shape if self.part is None else self.part.extents
        if self.start == self.stop and 0 in shape:
            yield Box(tuple(0 for _ in shape), shape), 0  # an empty tensor has one box, so that its shape is saved
        step = MAX_BLOB_NBYTES // self.dtype.itemsize
        for begin in range(self.start, self.stop, step):
            end, at = min(begin + step, self.stop), begin
            if self.part is not None:
                yield from ((box, first - self.start) for box, first in self.part.boxes(begin, end))
                continue
            for box in boxes_of(shape, begin, end):
                yield box, at - self.start
                at += box.numel


@dataclass
class Contents:
    """Tensors and plain values (objects, by name) that a rank saves. entries[i] lies in sources[i] from element begins[i] on.

    guarded[i]: True if every writer of sources[i] first waits for the save (zero/write_gate.py), which may then copy it while
    training goes on.
    """

    entries: list[Entry] = field(default_factory=list)
    sources: list[Rest] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    objects: dict[str, object] = field(default_factory=dict)
    scalars: set[str] = field(default_factory=set)  # keys of optimizer states that are one number for each parameter
    ties: dict[str, str] = field(default_factory=dict)  # other name of a tied parameter -> its name
    frozen: list[tuple[ParamGroup, int]] = field(default_factory=list)  # parameters left out, of which identities are saved

    def nbytes(self, on_disk: bool) -> int:
        """Return the bytes of the elements that rest on disk, or of the others."""
        pairs = zip(self.entries, self.sources, strict=True)
        return sum((at.stop - at.start) * at.dtype.itemsize for at, rest in pairs if (rest.tier is Tier.DISK) == on_disk)

    def add(self, entry: Entry, source: Rest, begin: int, guarded: bool) -> None:
        """Add one part of a tensor. Raises ConfigError for dtypes that cannot be stored."""
        if not storable(entry.dtype):
            raise ConfigError(
                f"zs.save: {entry.name} is {entry.dtype}, which a checkpoint can not hold: keep its int_repr(), its scale and "
                "its zero point in buffers of their own, or register it with persistent=False."
            )
        self.entries.append(entry)
        self.sources.append(source)
        self.begins.append(begin)
        self.guarded.append(guarded)


Slices = list[tuple[ParamGroup, Rest]]  # for groups, a flat shard with one value for each element of the group's shard


def collect(
    runtime: Runtime, core: OptimizerCore | None, *, frozen: bool, names: Stages, slices: dict[str, Slices] | None = None
) -> Contents:
    """Collect everything that this rank writes of a model and, with `core`, its optimizer. frozen: also frozen parameters.

    names: says which stage of a pipeline writes a name. slices: slices that extras keep of parameters, by the extra's name.
    """
    contents, prefixes, model = Contents(), prefixes_of(runtime.model), runtime.model
    rank, topology = runtime.topology.world.rank, runtime.topology
    for group in runtime.groups:
        for index in _written(group, names):
            name = group.specs[index].whole_name
            contents.ties |= {alias: name for alias in names_of(prefixes, group.specs[index]) if alias != name}
            if not (frozen or group.trainable):
                contents.frozen.append((group, index))
                continue
            home, (rest, begin) = group.homes[index], group.masters.slice(index)
            if home.stop > home.start or _first(group, index):
                # a replicated parameter is the user's own tensor
                guarded = group.masters.rest is not None or group.values.sharded
                contents.add(_entry(group, index, ("model", ""), rest.dtype), rest, begin, guarded)
    if rank == topology.stages[topology.stage][0]:  # one rank of a stage writes what the state dict has besides parameters
        params = {id(param) for group in runtime.groups for param in group.params}
        for name, value in own_state(model).items():
            if id(value) in params or not names.writes(name):
                continue
            if isinstance(value, Tensor):
                _add_whole(contents, runtime, f"{MODEL}{name}", ("model", name), value.detach())
            else:
                contents.objects[f"{MODEL}{name}"] = value
    if core is not None:
        _add_states(contents, runtime, core, names)
        if rank == 0:
            contents.objects[GROUPS] = names.groups()
    for extra, shards in (slices or {}).items():
        for group, rest in shards:
            for index in _written(group, names):
                home = group.homes[index]
                if home.stop > home.start or _first(group, index):
                    contents.add(_entry(group, index, ("slices", extra, ""), rest.dtype), rest, home.begin, guarded=True)
    if rank == 0:
        contents.objects[OWN] = runtime.progress.state()
    contents.objects[f"{RNG}{rank}"] = generators(runtime.comm.device)
    return contents


def _entry(group: ParamGroup, index: int, keys: tuple[str, ...], dtype: torch.dtype) -> Entry:
    """Return the entry of a tensor of a parameter's shape. keys: path before the parameter's name, and last the key after it."""
    spec, home = group.specs[index], group.homes[index]
    keys = (*keys[:-1], spec.whole_name, *(keys[-1:] if keys[-1] else ()))
    return Entry(".".join(keys), keys, dtype, spec.whole_shape, home.start, home.stop, spec.part)


def _as_it_rests(entry: Entry, rest: Rest, begin: int, spec: ParamSpec) -> tuple[Entry, Rest, int]:
    """Return the entry of a state, its Rest and position in it, of the bytes at rest where the state is encoded.

    Blocks are counted from the beginning of what a rank has of the parameter along model axes. Where these are not blocks of the
    whole parameter as well, for all ranks alike, the state is saved decoded, as that of a tile is.
    """
    if not isinstance(rest, CodedRest):
        return entry, rest, begin
    column, inner = rest.column, rest.inner
    if column.elements == 1 and not column.label and inner.dtype.is_floating_point and column.values == 1:
        return replace(entry, dtype=inner.dtype), inner, begin  # a dtype of its own, which a load converts
    before, stretch = 0, 0  # elements of the whole parameter before this part; of each part
    if entry.part is not None:
        stretch = 0 if spec.distribution is None else spec.distribution.stretch
        before = entry.part.start * math.prod(entry.shape[1:])
    if not column.label or (entry.part is not None and (not stretch or stretch % column.elements)):
        return entry, rest, begin
    bounds = before + entry.start, before + entry.stop, math.prod(entry.shape)
    start, stop, numel = (column.count(column.blocks(0, each)[1]) for each in bounds)
    keys = (*entry.keys[:-1], f"{entry.keys[-1]}{CODED}{column.label}")
    return Entry(".".join(keys), keys, torch.uint8, (numel,), start, stop), inner, column.count(begin)


def _first(group: ParamGroup, index: int) -> bool:
    """Return whether this rank writes a parameter's single values (step): the rank with its first element does, or rank 0."""
    home, numel, part = group.homes[index], math.prod(group.specs[index].shape), group.specs[index].part
    if part is not None and any(part.unpacked.box.offsets):
        return False
    return group.comm.rank == 0 if numel == 0 else home.start == 0 and home.stop > 0


def _written(group: ParamGroup, names: Stages) -> list[int]:
    """Return the numbers of the parameters of a group whose elements this rank writes."""
    # counts: False on ranks whose copy another rank along a model axis writes
    return [index for index, spec in enumerate(group.specs) if group.counts and names.writes(spec.whole_name)]


def _add_whole(contents: Contents, runtime: Runtime, name: str, keys: tuple[str, ...], value: Tensor) -> None:
    entry = Entry(name, keys, value.dtype, tuple(value.shape), 0, value.numel())
    on_host = value.detach().to("cpu").contiguous().reshape(-1)  # a copy: it is small
    contents.add(entry, MemoryRest(on_host, Tier.HOST, runtime.tiers), 0, guarded=False)


def _add_states(contents: Contents, runtime: Runtime, core: OptimizerCore, names: Stages) -> None:
    written = {id(group): set(_written(group, names)) for group in runtime.groups}
    for run in (run for runs in core.runs for run in runs):
        state, mine = run.states.load(), written[id(run.group)]
        for index in run.indices if state else ():
            if index not in mine:
                continue
            home, name, first = run.group.homes[index], run.group.specs[index].whole_name, _first(run.group, index)
            for key, value in state.items():
                if run.holds(value):
                    if home.stop > home.start or first:
                        entry = _entry(run.group, index, ("optim", "state", key), value.dtype)
                        rest, begin = run.place(value, index)
                        begin += home.start if core.replicated else 0
                        spec = run.group.specs[index]
                        contents.add(*_as_it_rests(entry, rest, begin, spec), guarded=not core.replicated)
                    continue
                contents.scalars.add(key)
                if first:  # one rank writes the number for the whole parameter
                    shown, full_name = run.unmark(value), f"{STATE}{name}.{key}"
                    if isinstance(shown, Tensor):
                        _add_whole(contents, runtime, full_name, ("optim", "state", name, key), shown)
                    else:
                        contents.objects[full_name] = shown


def param_groups(runtime: Runtime, core: OptimizerCore) -> list[dict[str, Any]]:
    """Return the optimizer's groups: options, and the names of their members (of tiles: of the whole parameter)."""
    names = {
        id(param): spec.whole_name for group in runtime.groups for param, spec in zip(group.params, group.specs, strict=True)
    }
    return [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": list(dict.fromkeys(names[id(p)] for p in group["params"])),
        }
        for group in core.outer.param_groups
    ]


# -- random generators -------------------------------------------------------------------------------------------


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, Python's and NumPy's global random generators on this rank."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        # a tensor: torch.load(weights_only=True) refuses arrays
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def set_generators(states: dict[str, Any], device: torch.device) -> None:
    """Set the global random generators to states that `generators` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(_tuples(states["python"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def seed_generators(states: dict[str, Any], number: int) -> None:
    """Seed the global random generators from saved states and a number that differs between ranks."""
    seed = int(xxhash.xxh3_64_hexdigest(bytes(states["torch"].numpy())), 16) % 2**63 + number
    torch.manual_seed(seed % 2**63)  # seeds every device's generator
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _tuples(value: object) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
