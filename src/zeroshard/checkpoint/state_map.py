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
axes hold the same elements, one of them writes these (`StateSlice.counted`); if several pipeline stages have the same name, the first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from ..errors import ConfigError
from ..seam import Box, Optimizers, Part, StateSlice, boxes_of
from ..utils.module_names import own_state
from ..utils.work import OVER, Work
from .dcp import MAX_BLOB_NBYTES, storable

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


class HostCopy:
    """A copy on the host of a tensor that is no parameter, which is small: it is read as a StateSlice is."""

    guarded = on_disk = False

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor.detach().to("cpu").contiguous().view(-1)

    def read(self, first: int, out: Tensor) -> Work:
        """Copy elements from number `first` on to `out` (n,)."""
        out.copy_(self.values[first : first + out.numel()])
        return OVER


@dataclass
class Contents:
    """Tensors and plain values (objects, by name) that a rank saves. The elements of entries[i] are those of sources[i]."""

    entries: list[Entry] = field(default_factory=list)
    sources: list[StateSlice | HostCopy] = field(default_factory=list)
    objects: dict[str, object] = field(default_factory=dict)
    scalars: set[str] = field(default_factory=set)  # keys of optimizer states that are one number for each parameter
    ties: dict[str, str] = field(default_factory=dict)  # other name of a tied parameter -> its name
    frozen: list[StateSlice] = field(default_factory=list)  # parameters left out, of which identities are saved

    def nbytes(self, on_disk: bool) -> int:
        """Return the bytes of the elements that rest on disk, or of the others."""
        pairs = zip(self.entries, self.sources, strict=True)
        return sum((at.stop - at.start) * at.dtype.itemsize for at, source in pairs if source.on_disk == on_disk)

    def add(self, of: StateSlice | Tensor, *keys: str) -> None:
        """Add a slice, or a tensor that is no parameter, under a path of names. Raises ConfigError for dtypes that cannot be stored."""
        start, stop, part = (of.start, of.stop, of.part) if isinstance(of, StateSlice) else (0, of.numel(), None)
        entry = Entry(".".join(keys), keys, of.dtype, tuple(of.shape), start, stop, part)
        if not storable(entry.dtype):
            raise ConfigError(
                f"zs.save: {entry.name} is {entry.dtype}, which a checkpoint can not hold: keep its int_repr(), its scale and "
                "its zero point in buffers of their own, or register it with persistent=False."
            )
        self.entries.append(entry)
        self.sources.append(of if isinstance(of, StateSlice) else HostCopy(of))


def collect(stages: Stages, *, frozen: bool, slices: dict[str, list[StateSlice]] | None = None) -> Contents:
    """Collect everything that this rank writes of a model and, if `stages` has one, its optimizer. frozen: also frozen parameters.

    stages: says which stage of a pipeline writes a name. slices: slices that extras keep of parameters, by the extra's name.
    """
    contents, engine, model, rank = Contents(), stages.engine, stages.model, stages.world.rank
    held = engine.slices("master", *["optimizer"] if stages.optimizer is not None else [])
    masters = [each for each in held if each.kind == "master"]
    for each in filter(stages.writes, masters):
        contents.ties |= dict.fromkeys(each.names[1:], each.name)
        if not (frozen or each.trainable):
            contents.frozen.append(each)
        elif each.stop > each.start or each.leads:
            contents.add(each, "model", each.name)
    if stages.leads:  # one rank of a stage writes what the state dict has besides parameters
        params = {id(each.param) for each in masters}
        for name, value in own_state(model).items():
            if id(value) in params or not stages.has_first(name):
                continue
            if isinstance(value, Tensor):
                contents.add(value.detach(), "model", name)
            else:
                contents.objects[f"{MODEL}{name}"] = value
    for each in filter(stages.writes, held[len(masters) :]):
        key = each.kind.partition(":")[2]
        if not each.single:
            if each.stop > each.start or each.leads:
                saved = each.at_rest()
                contents.add(saved, "optim", "state", each.name, f"{key}{CODED}{saved.encoded}" if saved.encoded else key)
            continue
        contents.scalars.add(key)
        if each.leads and isinstance(each.scalar, Tensor):  # one rank writes the number for the whole parameter
            contents.add(each.scalar, "optim", "state", each.name, key)
        elif each.leads:
            contents.objects[f"{STATE}{each.name}.{key}"] = each.scalar
    if stages.optimizer is not None and rank == 0:
        contents.objects[GROUPS] = stages.groups()
    for extra, kept in (slices or {}).items():
        for each in filter(stages.writes, kept):
            if each.stop > each.start or each.leads:
                contents.add(each, "slices", extra, each.name)
    if rank == 0:
        contents.objects[OWN] = engine.progress.state()
    contents.objects[f"{RNG}{rank}"] = generators(engine.ranks.device)
    return contents


def param_groups(values: list[StateSlice], optimizer: Optimizers) -> list[dict[str, Any]]:
    """Return the optimizer's groups: options, and the names of their members (of tiles: of the whole parameter). values: its slices."""
    names = {id(each.param): each.name for each in values}
    return [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": list(dict.fromkeys(names[id(p)] for p in group["params"])),
        }
        for group in optimizer.param_groups
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
