"""The typed sections of a DeepSpeed configuration: objects with a field for each key of config_keys.KEYS.

Values are converted if that loses nothing (5e8, "3"). An unknown key, a fraction for a whole number or a value outside its range
raises ValidationError with the name of the key. "auto" means the default.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...errors import did_you_mean
from .config_keys import ALIASES, KEYS, Key, Treatment, Values, is_on, keys_of


class DeepSpeedConfigError(Exception):
    """Raised for a configuration with unsupported or contradictory keys; the message names the key and the remedy."""


try:  # programs catch pydantic's ValidationError, which DeepSpeed raises
    from pydantic_core import PydanticCustomError, ValidationError
except ImportError:

    class ValidationError(ValueError):  # type: ignore[no-redef]
        """Raised for an unknown key of a typed section, or a value that is not of its key's kind."""


def invalid(section: str, told: str) -> ValidationError:
    """Return the ValidationError of a typed section: pydantic's if that is installed."""
    if not hasattr(ValidationError, "from_exception_data"):
        return ValidationError(told)
    line = {"type": PydanticCustomError("deepspeed_config", "{told}", {"told": told}), "input": None}
    return ValidationError.from_exception_data(section, [line], hide_input=True)  # type: ignore[list-item]


# tier on which states rest
OffloadDeviceEnum = Enum("OffloadDeviceEnum", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, type=str)


# states that `engine.offload_states` can move
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", {
    "optim_states": "optim_states", "hp_params": "hp_params", "lp_params": "lp_params", "lp_grads": "lp_grads",
    "contiguous_grad_buffer": "contiguous_grad_buffer"}, type=str)  # fmt: skip


Reader = Callable[[Any], Any]  # makes the value of a field from that of the key, or raises
_BOOLS = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True}
_BOOLS |= {"false": False, "f": False, "no": False, "n": False, "off": False, "0": False}


def _number(value: float | str) -> float:
    """Read a finite number, also from text."""
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _whole(value: float | str) -> int:
    """Read a whole number; 5e8 and "500000000" are accepted, "5e8" is not."""
    if isinstance(value, str):
        if not re.fullmatch(r"\s*[+-]?\d+\s*", value):
            raise ValueError
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if _number(value) != int(value):
        raise ValueError
    return int(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _within(read: Reader, low: float, high: float = math.inf) -> Reader:
    def bounded(value: object) -> object:
        if not low <= (number := read(value)) <= high:
            raise ValueError
        return number

    return bounded


READERS: dict[str, tuple[str, Reader]] = {
    "any": ("any value", lambda value: value),
    "bool": ("true or false", lambda value: bool(value) if value in (0, 1) else _BOOLS[value.lower()]),
    "whole": ("a whole number", _whole),
    "count": ("a whole number of at least 0", _within(_whole, 0)),
    "positive": ("a whole number above 0", _within(_whole, 1)),
    "stage": ("0, 1, 2 or 3", _within(_whole, 0, 3)),
    "power": ("a whole number from 0 to 1023", _within(_whole, 0, 1023)),  # powers of two that a float can hold
    "fraction": ("a number from 0 to 1", _within(_number, 0, 1)),
    "scale": ("a finite number of at least 0 (0: a dynamic loss scale)", _within(_number, 0)),
    "text": ("a text", _text),
    "texts": (
        "a text or a list of them",
        lambda value: list(dict.fromkeys(map(str, [value] if isinstance(value, str) else value))),  # without duplicates
    ),
    "path": ("a path", Path),
    "device": ('"none", "cpu" or "nvme"', OffloadDeviceEnum),
}


def without_auto(given: Values) -> dict[str, Any]:
    """Return a configuration or a section without the keys whose value is "auto", which means the default."""
    return {key: value for key, value in given.items() if not (isinstance(value, str) and value == "auto")}


class Section:
    """Base class of typed sections, made from keyword arguments.

    given: names of the fields that were given a value other than "auto". notes: warnings about them.
    """

    prefix: ClassVar[str]
    sections: ClassVar[dict[str, type[Section]]] = {}  # kind of a key -> class, for fields that are sections themselves
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a field; `config_keys` lists them."""

    def __init__(self, **given: object) -> None:
        self.notes: list[str] = []
        fields = [key.field for key in keys_of(self.prefix)]
        found: dict[str, object] = {}  # by field name, with aliases replaced
        for name, value in given.items():
            field = ALIASES.get(f"{self.prefix}.{name}", name).rpartition(".")[2]
            if field not in fields:
                raise invalid(self.prefix, f"{self.prefix}: unknown key {name!r}.{did_you_mean(name, fields)}")
            if field in found and found[field] != value:
                told = f"{self.prefix}: {field} is given under two names, {found[field]!r} and {value!r}: keep one."
                raise invalid(self.prefix, told)
            if not (isinstance(value, str) and value == "auto"):
                found[field] = value
        self._forward(found)
        self.given = frozenset(found)
        for key in keys_of(self.prefix):
            default = {} if key.kind == "leaf_module" else key.default  # not None, where it is not given
            setattr(self, key.field, self._read(key, found.get(key.field, default)))
        self._check()

    def _forward(self, found: dict[str, object]) -> None:
        """Move the values of deprecated keys to the keys that replace them."""

    def _read(self, key: Key, value: object) -> object:
        if value is None and key.default is None:
            return None
        kind = self.sections.get(key.kind)
        if kind is not None:
            return value if isinstance(value, kind) else kind.of(value)
        expected, read = READERS[key.kind]
        try:
            return read(value)
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
            raise invalid(self.prefix, f"{key.name}: expected {expected}, got {value!r}.") from None

    def _check(self) -> None:
        """Raise ValidationError for fields that contradict each other."""

    @classmethod
    def of(cls, given: object) -> Section:
        """Make a section from a mapping of keys. None: the defaults."""
        if given is not None and not isinstance(given, Mapping):
            raise invalid(cls.prefix, f"{cls.prefix}: expected a mapping of keys to values, got {given!r}.")
        return cls(**(given or {}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key.field}={getattr(self, key.field)!r}' for key in keys_of(self.prefix))})"


def _plain(name: str, prefix: str) -> type[Section]:
    """Make the class of a section without rules of its own."""
    return type(name, (Section,), {"prefix": prefix, "__module__": __name__, "__doc__": f"Section {prefix}."})


DeepSpeedZeroOffloadParamConfig = _plain("DeepSpeedZeroOffloadParamConfig", "zero_optimization.offload_param")
DeepSpeedZeroLeafModuleConfig = _plain("DeepSpeedZeroLeafModuleConfig", "zero_optimization.leaf_module")
DeepSpeedBF16Config = _plain("DeepSpeedBF16Config", "bf16")
TensorBoardConfig = _plain("TensorBoardConfig", "tensorboard")
CSVConfig = _plain("CSVConfig", "csv_monitor")
WandbConfig = _plain("WandbConfig", "wandb")
DeepSpeedThroughputTimerConfig = _plain("DeepSpeedThroughputTimerConfig", "timers.throughput")
CommsLoggerConfig = _plain("CommsLoggerConfig", "comms_logger")


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    """Section zero_optimization.offload_optimizer."""

    prefix = "zero_optimization.offload_optimizer"
    pipeline = property(lambda self: self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(Section):
    """Section zero_optimization, as DeepSpeedZeroConfig(stage=3, offload_param={"device": "cpu"})."""

    prefix = "zero_optimization"
    overlap_comm: bool
    sections: ClassVar[dict[str, type[Section]]] = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    }
    _DEPRECATED: ClassVar[dict[str, str]] = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }

    def _forward(self, found: dict[str, object]) -> None:
        for old, new in self._DEPRECATED.items():
            value = found.pop(old, None)
            if value is None:
                continue
            assert new not in found, f"zero_optimization: {old} is the old name of {new}, which is given too: keep {new}."
            on = self._read(KEYS[f"{self.prefix}.{old}"], value)
            found[new] = on if "weights" in old else {"device": "cpu"} if on else None
            if on:  # false has no effect, and so needs no warning
                self.notes.append(f"zero_optimization.{old} is deprecated: it is read as {new}.")

    def _check(self) -> None:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == 3
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise invalid(self.prefix, f"zero_optimization.compute_grad_norm: false needs stage 1 or 2, got stage {self.stage}.")
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1 and self.stage != 3:
            raise invalid(
                self.prefix, f"zero_optimization.offload_optimizer.ratio: below 1 needs stage 3, got stage {self.stage}."
            )


class DeepSpeedFP16Config(Section):
    """Section fp16."""

    prefix = "fp16"

    def _check(self) -> None:
        if not self.enabled or self.loss_scale:
            return
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
            if (value := getattr(self, name)) <= 0:
                told = f"fp16.{name}: expected a number above 0 with a dynamic loss scale (loss_scale 0), got {value}."
                raise invalid(self.prefix, told)


KEYS_BELOW = "its keys are below"  # text of a section's own row


@dataclass(frozen=True)
class Judgement:
    """Treatment of one key of a configuration, with its value.

    name: full name in config_keys.KEYS. written: name in the configuration, perhaps an alias. treatment: "served", "ignored" or
    "refused"; "off" for a key that is switched off; "open" for the value "auto", which the program that reads the file replaces.
    text: the effect of the key, the reason why it has none, or the remedy. note: warning about an ignored key, or "".
    key: the key's row in config_keys.KEYS, or None.
    """

    name: str
    written: str
    value: object
    treatment: str
    text: str
    note: str = ""
    key: Key | None = None


def judge(config: Values, prefix: str = "", written: str = "") -> Iterator[Judgement]:
    """Yield the treatment of each key of a configuration, or of a section of it; sections come before their keys.

    prefix: the section's name in config_keys.KEYS. written: its name in the configuration.
    """
    section, place = (f"{name}." if name else "" for name in (prefix, written))
    for name, value in config.items():
        full = ALIASES.get(f"{section}{name}", f"{section}{name}")
        key, this = KEYS.get(full), (full, f"{place}{name}", value)
        if "." in str(name):
            home, _, field = str(name).rpartition(".")
            remedy = f"write {field} into the section {section}{home}"
            yield Judgement(*this, "ignored", remedy, f"{section}{name} is ignored: {remedy}.")
        elif key is None:
            yield _unknown(*this)
        elif key.treatment is Treatment.REFUSED:
            # not refused here: the script may pass its own optimizer, and otherwise build_optimizer refuses
            on = prefix != "optimizer.params" and key.is_on(value) and value != key.default
            yield Judgement(*this, "refused" if on else "off", key.text, key=key)
        elif isinstance(value, Mapping) and keys_of(full):
            if "enabled" in value and not is_on(value["enabled"]) and not KEYS[f"{full}.enabled"].default:
                yield Judgement(*this, "off", "enabled is false, so that the section does nothing", key=key)
                continue
            yield Judgement(*this, "served", KEYS_BELOW, key=key)
            arguments = _arguments(full, config.get("type"))
            for found in judge(value, full, f"{place}{name}"):
                unknown = found.key is None and found.name.rpartition(".")[2] in arguments
                yield replace(found, treatment="served", text="argument of the class", note="") if unknown else found
        elif isinstance(value, str) and value == "auto":
            yield Judgement(*this, "open", "the program that reads the file fills it in; else it is the default", key=key)
        elif key.treatment is Treatment.NOTED:
            on = is_on(value) if isinstance(value, Mapping) else value is not None  # a section, or a single value
            heard = on and value not in key.fits and _differs(key, value)
            note = f"{full} = {value!r} has no effect: {key.text}." if heard else ""
            yield Judgement(*this, "ignored", key.text, note, key)
        else:
            yield Judgement(*this, "served", key.text, key=key)


def _unknown(full: str, written: str, value: object) -> Judgement:
    """Return the treatment of a key that the table lacks: refused if it resembles a known one (a typo), else ignored."""
    prefix, _, name = full.rpartition(".")
    fields = {key.field for key in keys_of(prefix)}
    names = fields | {alias.rpartition(".")[2] for alias in ALIASES if alias.rpartition(".")[0] == prefix}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=_NEAR)
    if near:
        text = f"it is not a key. Did you mean {near[0]!r}? Rename it, or leave it out"
        return Judgement(full, written, value, "refused", text)
    note = f"{full} is not a key, and is ignored.{did_you_mean(name, fields)}"
    return Judgement(full, written, value, "ignored", f"it is not a key.{did_you_mean(name, fields)}", note)


def _arguments(section: str, kind: object) -> frozenset[str]:
    """Return the argument names of torch's optimizer or scheduler class `kind`, for its params section; empty for others."""
    home = {"optimizer.params": torch.optim, "scheduler.params": torch.optim.lr_scheduler}.get(section)
    classes = {name.lower(): each for name, each in vars(home).items() if isinstance(each, type)} if home is not None else {}
    found = classes.get(str(kind).lower())
    return frozenset(inspect.signature(found).parameters) if found is not None else frozenset()


def examine(config: Values) -> list[str]:
    """Return warnings about the keys of a configuration, one sentence each. Raises DeepSpeedConfigError for a refused key."""
    notes = []
    for found in judge(config):
        told_later = found.key is None and found.name.rpartition(".")[0] in _TYPED  # typed sections raise ValidationError for it
        if found.treatment == "refused" and not told_later:
            shown = repr(found.value) if len(repr(found.value)) < 60 else "{...}"
            raise DeepSpeedConfigError(f"{found.name} = {shown} is not supported: {found.text}.")
        if found.note:
            notes.append(found.note)
    return notes


_NEAR = 0.8  # cutoff for difflib that takes 'stge' for 'stage', and does not take 'comment' for 'compile'
_TYPED = {kind.prefix for kind in Section.__subclasses__()}


def _differs(key: Key, value: object) -> bool:
    """Return whether a value, as read, differs from the default."""
    try:
        return READERS[key.kind][1](value) != (None if key.default is None else READERS[key.kind][1](key.default))
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
        return True  # the typed section raises for it
