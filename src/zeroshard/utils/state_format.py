"""The format in which optimizer states rest: the values of zs.shard's option `optimizer_states`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ConfigError, did_you_mean
from .option_kinds import BOOL, Kind, check_fields, check_names, is_whole

FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
_FIELDS = {
    "block": Kind(
        "a power of two from 32 to 4096", lambda value: type(value) is int and 32 <= value <= 1 << 12 and not value & (value - 1)
    ),
    "stochastic_rounding": BOOL,
    "min_numel": Kind("a whole number of at least 0", lambda value: is_whole(value) and value >= 0),
    "exempt": Kind(
        "a tuple of name patterns", lambda value: isinstance(value, tuple) and all(isinstance(pattern, str) for pattern in value)
    ),
}


@dataclass(frozen=True)
class StateFormat:
    """The format in which optimizer states rest. Options of this type also accept a str, which is the `format`.

    A state is decoded before its step, in the dtype of the stepped values, and encoded after it.

    format: "fp32": as the optimizer has them; "bf16"; "fp8" (e4m3), "int8", "int4": with one fp32 scale for each block.
    block: elements that share a scale: a power of two from 32 to 4096. Blocks begin with each parameter; no rank's shard and no
        transfer cuts a block, so that stages and world sizes compute the same bits.
    stochastic_rounding: round up or down at random, so that the mean of many roundings is the value itself. The random numbers
        depend on the step, the parameter, the state and the element alone.
    min_numel: parameters with fewer elements keep fp32 states, as do all of fewer than two dimensions (norms, biases).
    exempt: name patterns of further parameters with fp32 states. Embeddings always have them: 8-bit states made
        embeddings unstable (arXiv 2110.02861, section 2.3).
    """

    format: str = "int8"
    block: int = 256
    stochastic_rounding: bool = False
    min_numel: int = 4096
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            known = ", ".join(map(repr, FORMATS))
            raise ConfigError(
                f"optimizer_states: expected one of {known}, got {self.format!r}.{did_you_mean(str(self.format), FORMATS)}"
            )
        if isinstance(self.exempt, (list, set)):
            object.__setattr__(self, "exempt", tuple(self.exempt))
        check_fields(self, _FIELDS, "optimizer_states ")

    def spares(self, name: str, numel: int, dim: int) -> bool:
        """Return whether a parameter of this name, size and number of dimensions keeps fp32 states."""
        return dim < 2 or numel < self.min_numel or any(fnmatchcase(name, pattern) for pattern in self.exempt)

    @classmethod
    def of(cls, given: object) -> StateFormat | Mapping[str, StateFormat] | None:
        """Return the StateFormat that an option's value means, or one for each state's name; None: all states as they are."""
        if given is None or isinstance(given, StateFormat):
            return given
        if isinstance(given, str):
            return cls(given)
        if isinstance(given, Mapping) and "format" in given:
            check_names(cls, given, "optimizer_states")
            return cls(**given)
        if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
            found = {name: cls.of(each) for name, each in given.items()}
            if wrong := [name for name, each in found.items() if not isinstance(each, StateFormat)]:
                raise ConfigError(f"optimizer_states: {wrong[0]!r}: expected a format, got {given[wrong[0]]!r}.")
            return {name: each for name, each in found.items() if isinstance(each, StateFormat)}
        raise ConfigError(
            "optimizer_states: expected a format ('int8', 'bf16', ...), a zs.StateFormat, or a mapping from names of states to "
            f"formats, got {given!r}."
        )
