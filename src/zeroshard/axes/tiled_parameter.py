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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TiledAccessError
from ..tensor.part import Cut, Piece
from ..tensor.sharded_tensor import ShardedTensor
from ..utils import torch_compat


class Tile(Piece):
    """A module with a part of the parameters of the `Tiled` module around it."""

    def whole_name(self, name: str) -> str:
        return whole_name(name)

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing_keys: list[str], *lists: list[str]
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *lists)
        for name in map(whole_name, missing):  # report the whole's name, once, and not beside an error of its shape
            if name not in missing_keys and not any(f" {name}:" in error for error in lists[-1]):
                missing_keys.append(name)


class Tiled(Cut):
    """A module that was cut into tiles, in place. It keeps its attributes, except for the parameters, which are in the tiles."""

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
