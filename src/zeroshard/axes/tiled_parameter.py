"""Tiles: modules that each hold a part of a larger parameter, and the module that they replace. Structure, no arithmetic.

    head (Tiled)             weight (257, 64) in checkpoints and in full_state_dict; none of its own
      tiles.0 (Tile)         rows [0, 80)          each tile is a unit: gathered and released on its own
      tiles.1 (Tile)         rows [80, 160)
      tiles.2 (Tile)         rows [160, 257)

Parts of a parameter are in order, do not overlap and cover it. `state_dict` and `load_state_dict` of a tiled model use the
name and shape of the whole; `named_parameters` has the tiles' own names (head.tiles.0.weight). The operators are in
`activations/layers.py`; partition, weights and state dicts use this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.tensor.chunks import Box, boxes_of
from ..engine.tensor.sharded_tensor import ShardedTensor
from ..errors import TiledAccessError
from ..utils import torch_compat


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


class Tile(nn.Module):
    """A module with a part of the parameters of the `Tiled` module around it. Always a unit of its own."""

    parts: dict[str, Part]  # attribute -> part of the whole module's parameter of that name

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing_keys: list[str], *lists: list[str]
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *lists)
        for name in map(whole_name, missing):  # report the whole's name, once, and not beside an error of its shape
            if name not in missing_keys and not any(f" {name}:" in error for error in lists[-1]):
                missing_keys.append(name)


class Tiled(nn.Module):
    """A module that was cut into tiles, in place. It keeps its attributes, except for the parameters, which are in the tiles."""

    stands_for: type[nn.Module]
    tiles: Any  # a ModuleList of them

    def __getattr__(self, name: str) -> Any:
        if name in self._cut_attributes():
            raise TiledAccessError(
                f"{name} of a {type(self).__name__} is in its {len(self.tiles)} tiles. Call the module; for a loss over the "
                "vocabulary use zs.tiled_cross_entropy(hidden, head, targets); for values, zs.full_state_dict(model) or "
                f"module.tiles[i].{name}. Initialise and tie weights before zs.tile()."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name in self._cut_attributes():
            raise TiledAccessError(f"{name} of a {type(self).__name__} is in its tiles: replace or tie it before zs.tile().")
        super().__setattr__(name, value)

    def _cut_attributes(self) -> set[str]:
        """Return the names of the parameters that are in the tiles."""
        tiles: Any = torch_compat.early_modules(self).get("tiles", ())
        return {attribute for tile in tiles for attribute in tile.parts}

    @property
    def dim(self) -> int:
        """Dimension along which the weight was cut."""
        return self.tiles[0].parts["weight"].dim

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> Any:
        """Return the state dict of the whole module; with the tiles' names if values are sharded or with `keep_vars`."""
        result = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        names = {f"{prefix}tiles.{i}.{a}": part.dim for i, tile in enumerate(self.tiles) for a, part in tile.parts.items()}
        if not keep_vars and not any(isinstance(result[name], ShardedTensor) for name in names):
            for name, value in join({name: result.pop(name) for name in names}, names).items():
                result[name] = value
        return result

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, *lists: list[str]) -> None:
        for number, tile in enumerate(self.tiles):
            for attribute, part in tile.parts.items():
                given = state_dict.get(prefix + attribute)
                if given is not None and tuple(given.shape) == part.shape:
                    state_dict[f"{prefix}tiles.{number}.{attribute}"] = part.of(given)
                elif given is not None and number == 0:  # one error, not one for each tile
                    error = f"size mismatch for {prefix + attribute}: expected {part.shape}, got {tuple(given.shape)}."
                    lists[-1].append(error)
        for attribute in self._cut_attributes():
            state_dict.pop(prefix + attribute, None)  # else strict loading would report it as unexpected
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


def whole_name(name: str) -> str:
    """Return the whole's name of a tile's parameter: 'head.tiles.3.weight' -> 'head.weight'."""
    *path, tiles, _, attribute = name.split(".")
    assert tiles == "tiles", name
    return ".".join([*path, attribute])


def part_of(owner: nn.Module, attribute: str) -> Part | None:
    """Return the part of a larger parameter that `owner.attribute` is, or None for a whole one."""
    return owner.parts[attribute] if isinstance(owner, Tile) else None


def class_and_name(module: nn.Module, name: str) -> tuple[type[nn.Module], str]:
    """Return the class and name of a module, for rules by class or name; for a tile or a tiled module, the original module's."""
    if isinstance(module, Tile):
        name = whole_name(f"{name}.").removesuffix(".")
    return getattr(module, "stands_for", type(module)), name


def join(values: Mapping[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
    """Return `values` with the parts of each parameter concatenated under the whole's name, at the place of the first part.

    parts: name of a part -> dimension that was cut. Ties stay ties: the same parts give the same tensor.
    """
    pieces: dict[str, list[Tensor]] = {}
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts:
            pieces.setdefault(whole_name(name), []).append(value)
        result[whole_name(name) if name in parts else name] = value
    joined: dict[tuple, Tensor] = {}
    dims = {whole_name(name): dim for name, dim in parts.items()}
    for name, tensors in pieces.items():
        key = tuple(map(id, tensors))  # ties: joined once
        if key not in joined:
            joined[key] = torch.cat(tensors, dims[name]) if len(tensors) > 1 else tensors[0]
        result[name] = joined[key]
    return result


def parts_in(model: nn.Module, state: Mapping[str, object]) -> dict[str, int]:
    """Return `parts` for `join`: entries of a state dict (keep_vars=True) that are tiles' parameters, found by identity."""
    dims = {
        id(torch_compat.own_parameters(tile)[attribute]): part.dim
        for tile in model.modules()
        if isinstance(tile, Tile)
        for attribute, part in tile.parts.items()
    }
    return {name: dims[id(value)] for name, value in state.items() if id(value) in dims}
