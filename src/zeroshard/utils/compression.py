"""The compression of collectives: the values of zs.shard's options zero_quantized_weights and zero_quantized_gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ConfigError, did_you_mean
from .option_kinds import BOOL, POSITIVE, Kind, check_fields, check_names, is_number, is_whole
from .registry import Registry

# codecs of blocks: name -> bits of a value's code, beside one fp32 step for each block
CODECS = {"int8": 8, "int4": 4, "fp8": 8}
GRADIENT_CODECS = (*CODECS, "top_k", "low_rank")
OWN_CODECS = Registry("codec", (*GRADIENT_CODECS, "none"))  # the program's: packing/codecs/base.py:Codec
_EXEMPT = ("*norm*", "*router*", "*embed*")
_ANY_COUNT = Kind("a whole number of at least 0", lambda value: is_whole(value) and value >= 0)
_FIELDS = {
    "block": Kind(
        "a power of two from 32 to 16384", lambda value: type(value) is int and 32 <= value <= 1 << 14 and not value & (value - 1)
    ),
    "warmup_steps": _ANY_COUNT,
    "min_numel": _ANY_COUNT,
    "rank": POSITIVE,
    "ratio": Kind("a number above 0, at most 0.5", lambda value: is_number(value) and 0 < value <= 0.5),
    "error_feedback": BOOL,
    "force": BOOL,
    "exempt": Kind(
        "a tuple of name patterns", lambda value: isinstance(value, tuple) and all(isinstance(pattern, str) for pattern in value)
    ),
}


@dataclass(frozen=True)
class Compression:
    """The compression of one kind of collective. An option that takes it also takes a str, its `codec`, and True for "int8".

    codec: "int8", "int4" (symmetric, by blocks), "fp8" (e4m3, by blocks); for gradients also "top_k" and "low_rank"; a name of
        `zeroshard.seam.register`. "none": nothing is packed.
    block: elements that share a scale: a power of two from 32 to 16384.
    warmup_steps: number of first steps without compression.
    exempt: name patterns of parameters without compression, in addition to all that are no matrices (norms, biases).
    min_numel: parameters with fewer elements in one unit are not compressed.
    error_feedback: gradients: keep the error of compression and add it to the next gradient. Takes 4 bytes an element and rank.
    ratio: "top_k": the fraction of the elements that is sent, above 0, at most 0.5.
    rank: "low_rank": columns of the two factors.
    force: compress also between ranks that share memory, which sends nothing faster.
    """

    codec: str = "int8"
    block: int = 256
    warmup_steps: int = 0
    exempt: tuple[str, ...] = _EXEMPT
    min_numel: int = 4096
    error_feedback: bool = False
    ratio: float = 0.01
    rank: int = 4
    force: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.exempt, (list, set)):
            object.__setattr__(self, "exempt", tuple(self.exempt))
        check_fields(self, _FIELDS, "compression ")

    def spares(self, name: str, dim: int) -> bool:
        """Return whether a parameter of this name and number of dimensions is sent without compression."""
        return dim < 2 or any(fnmatchcase(name, pattern) for pattern in self.exempt)

    @classmethod
    def of(cls, given: object, option: str, codecs: Collection[str]) -> Compression | None:
        """Return the Compression that an option's value (a Compression, codec, bool or mapping of fields) means; None: none."""
        if given is None or given is False:
            return None
        if isinstance(given, Mapping):
            check_names(cls, given, option)
            given = cls(**given)
        codecs = (*codecs, *OWN_CODECS)
        found = (
            given if isinstance(given, cls) else cls() if given is True else cls(codec=given) if isinstance(given, str) else None
        )
        if found is None or found.codec not in (*codecs, "none"):
            shown = given if found is None else found.codec
            hint = did_you_mean(shown, codecs) if isinstance(shown, str) else ""
            raise ConfigError(
                f"{option}: expected True, one of {', '.join(codecs)}, none, or a zs.Compression, got {shown!r}.{hint}"
            )
        return None if found.codec == "none" else found
