"""Parameters that are parts of larger ones before ZeRO shards them: `Part` says where in the larger one such a parameter lies.

Options that go by name, class or shape mean the whole. A `Piece` is a module that holds parts of another module's parameters (a
tile), all of which this rank has. A parameter with a `Distribution` is cut over ranks along model axes (a shard of a DTensor):
whoever puts such a parameter into a model leaves the Distribution on it, as `_distribution`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .chunks import Box, boxes_of


@dataclass(frozen=True)
class Part:
    """Part of a parameter of `shape` that a tile, or a rank of tensor parallelism, holds: [start, stop) of dimension `dim`.

    maps: number of matrices that the dimension packs one after the other (queries, keys and values); the part has [start, stop)
    of each. around: set if a parameter is cut along two dimensions: `shape` is then that of the part `around`.
    """

    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    maps: int = 1
    around: Part | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= self.shape[self.dim] // self.maps, self
        assert self.maps == 1 or self.around is None, self  # packed matrices are cut along one dimension only

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape of the part."""
        mine = self.maps * (self.stop - self.start)
        return tuple(mine if dim == self.dim else extent for dim, extent in enumerate(self.shape))

    @property
    def unpacked(self) -> Part:
        """Part with the same elements in the same order, with a dimension for the maps, so that it is one box of the whole."""
        if self.maps == 1:
            return self
        shape = (*self.shape[: self.dim], self.maps, self.shape[self.dim] // self.maps, *self.shape[self.dim + 1 :])
        return Part(self.dim + 1, self.start, self.stop, shape)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[Box, int]]:
        """Yield (box of the whole, its first element in the flattened part) for elements [start, stop) of the flattened part."""
        flat, at, lead = self.unpacked, start, self.dim + 1
        for box in boxes_of(flat.extents, start, stop):
            if self.maps == 1:
                yield box.within(flat.box), at
                at += box.numel
                continue
            for indices in itertools.product(*map(range, box.sizes[:lead])):  # elements within one row of one map
                offsets = (*(o + i for o, i in zip(box.offsets, indices, strict=False)), *box.offsets[lead:])
                place = Box(offsets, (*(1,) * lead, *box.sizes[lead:])).within(flat.box)
                joined = place.offsets[self.dim] * flat.shape[lead] + place.offsets[lead]
                yield (
                    Box(
                        (*place.offsets[: self.dim], joined, *place.offsets[lead + 1 :]), (*(1,) * self.dim, *place.sizes[lead:])
                    ),
                    at,
                )
                at += place.numel

    @property
    def box(self) -> Box:
        """Box of the part in the whole; only for maps == 1."""
        assert self.maps == 1, "see `unpacked`"
        outer = self.around.box.offsets if self.around is not None else (0,) * len(self.shape)
        return Box(tuple(o + self.start * (dim == self.dim) for dim, o in enumerate(outer)), self.extents)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the outermost parameter, which is no part of another."""
        return self.shape if self.around is None else self.around.whole_shape

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of `whole`, the outermost parameter: a view, or a copy if maps > 1."""
        whole = whole if self.around is None else self.around.of(whole)
        if self.maps > 1:  # flatten copies
            whole = whole.unflatten(self.dim, (self.maps, -1)).narrow(self.dim + 1, self.start, self.stop - self.start)
            return whole.flatten(self.dim, self.dim + 1)
        return whole.narrow(self.dim, self.start, self.stop - self.start)


class Distribution(ABC):
    """Distribution over ranks of a parameter, of which each rank has a shard before ZeRO cuts this further.

    axes: names of the mesh axes along which the parameter is cut. part: position of this rank's shard in the whole parameter;
    None if the shard is the whole. stretch: elements of each rank's shard (the last ones may have fewer) if shards are stretches
    of the flattened parameter, else 0. absent: this rank has no part of the parameter, which then has no gradient here.
    """

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]: ...
    @property
    @abstractmethod
    def part(self) -> Part | None: ...
    @property
    @abstractmethod
    def stretch(self) -> int: ...
    @property
    def absent(self) -> bool:
        return False

    @abstractmethod
    def wrap(self, local: Tensor) -> Tensor:
        """Return the tensor that modules see (a DTensor) over this rank's shard, in the shard's autograd graph."""

    @abstractmethod
    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor, from the shards of all ranks of the mesh (collective among them)."""

    @abstractmethod
    def local(self, value: Tensor) -> Tensor:
        """Return this rank's shard of a wrapped or of a whole tensor; any other value as it is."""


class Piece(nn.Module):
    """A module with parts of the parameters of the `Cut` module around it. Always a unit of its own, to be gathered alone."""

    parts: dict[str, Part]  # attribute -> part of the whole module's parameter of that name

    def whole_name(self, name: str) -> str:
        """Return the whole's name of one of this module's parameters."""
        raise NotImplementedError


class Cut(nn.Module):
    """A module whose parameters are in the `Piece`s inside it. Rules by class apply to it as to `stands_for`."""

    stands_for: type[nn.Module]


def distribution_of(param: Tensor) -> Distribution | None:
    """Return the distribution of the DTensor that a local parameter replaces (see Localised), or None."""
    return param.__dict__.get("_distribution")


def part_of(owner: nn.Module, attribute: str) -> Part | None:
    """Return the part of a larger parameter that `owner.attribute` is, or None for a whole one."""
    return owner.parts[attribute] if isinstance(owner, Piece) else None


def class_and_name(module: nn.Module, name: str) -> tuple[type[nn.Module], str]:
    """Return the class and name of a module, for rules by class or name; for a piece or a cut module, the original's."""
    if isinstance(module, Piece):
        name = module.whole_name(f"{name}.").removesuffix(".")
    return getattr(module, "stands_for", type(module)), name
