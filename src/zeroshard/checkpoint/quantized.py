"""Quantize the weights of an export: 8 bits and a scale for each output, in the format of the library compressed-tensors.

    NAME.weight          int8 or float8_e4m3fn (rows, columns): w / scale, rounded to the nearest
    NAME.weight_scale    (rows, 1): the largest |w| of the row / 127 (int8) or 448 (fp8)
    config.json          quantization_config: how the weights of which modules are stored, and which stay as they are

A checkpoint has names and shapes alone, so a module says which matrices are those of nn.Linear: the user's own, or the one
that Transformers builds from the configuration, without memory. Each row is quantized by itself, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, did_you_mean
from ..utils.dtypes import is_narrow
from ..utils.module_names import own_name
from ..utils.torch_compat import original
from .source import Opened, first_of

IGNORED = ("lm_head", "gate", "router", "shared_expert_gate")  # modules that stay as they are unless ignore= says others


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights. largest: the largest number that it holds. kind: what compressed-tensors calls its type."""

    dtype: torch.dtype
    largest: float
    kind: str

    def quantize(self, rows: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return fp32 rows (n, m) in this format, and their scales (n, 1). Overwrites `rows`.

        The scale is rounded to its dtype first, so that a product with it is as near to the weight as it can be.
        """
        scale = (rows.abs().amax(1, keepdim=True) / self.largest).to(scale_dtype)
        scale[scale == 0] = 1  # a row of zeros, or one whose scale is too small for fp16
        rows.div_(scale.float())
        if not self.dtype.is_floating_point:
            rows.round_()
        return rows.clamp_(-self.largest, self.largest).to(self.dtype), scale


WEIGHT_FORMATS = {"int8": WeightFormat(torch.int8, 127, "int"), "fp8": WeightFormat(torch.float8_e4m3fn, 448, "float")}


@dataclass(frozen=True)
class Quantization:
    """The choice of one export. names: tensors to quantize. ignored: nn.Linear modules that stay as they are. architecture: the
    model's class, if it is one of Transformers."""

    form: WeightFormat
    names: frozenset[str]
    ignored: list[str]
    architecture: str | None

    @property
    def settings(self) -> dict[str, object]:
        """The `quantization_config` of a config.json."""
        kind = self.form.kind
        weights: dict[str, object] = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        # vLLM serves fp8 weights with inputs of 16 bits, but int8 weights with int8 inputs only, which it rounds as it computes
        inputs = {**weights, "strategy": "token", "dynamic": True} if kind == "int" else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": self.ignored, "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }  # fmt: skip

    def described(self, settings: Mapping[str, Any]) -> dict[str, object]:
        """Return what a Hugging Face configuration gets: how weights are stored, and the model's class, which vLLM asks for."""
        unnamed = self.architecture is not None and not settings.get("architectures")
        return {"quantization_config": self.settings} | ({"architectures": [self.architecture]} if unnamed else {})


@dataclass(frozen=True)
class Quantize:
    """The arguments of `zs.export` that say what to quantize. model: whose nn.Linear modules; None: the configuration's."""

    form: str
    model: nn.Module | None
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, quantize: object, model: object, ignore: Collection[str] | None, format: str) -> Quantize | None:
        """Check the arguments; return None if nothing is to be quantized. Raises ConfigError."""
        if quantize is None:
            if model is not None or ignore is not None:
                raise ConfigError("zs.export: model, ignore: they say what to quantize; give quantize= too, or leave them out.")
            return None
        if not isinstance(quantize, str) or quantize not in WEIGHT_FORMATS:
            raise ConfigError(f"zs.export: quantize: expected one of {', '.join(WEIGHT_FORMATS)}, or None, got {quantize!r}.")
        if format != "safetensors":
            raise ConfigError("zs.export: quantize: quantized weights are written as safetensors; use format='safetensors'.")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"zs.export: model: expected a torch.nn.Module, or None, got {type(model).__name__}.")
        ignore = IGNORED if ignore is None else ignore
        if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(each, str) for each in ignore):
            raise ConfigError(f"zs.export: ignore: expected names of modules, as ['lm_head'], got {ignore!r}.")
        return cls(quantize, model, tuple(ignore))

    def choose(self, opened: Opened, settings: Mapping[str, Any] | None) -> Quantization:
        """Choose the tensors to quantize. settings: the Hugging Face configuration, if any.

        A tensor is quantized if each of its names is the weight of an nn.Linear module that is not ignored: a head that is tied
        to an embedding stays. Raises ConfigError if there is no model, no such tensor, or one that is quantized already.
        """
        model = None if self.model is None else original(self.model)
        if model is None:
            if settings is None:
                raise ConfigError(
                    "zs.export: quantize: a checkpoint does not say which of its matrices are those of nn.Linear modules: give "
                    "config=, a Hugging Face configuration, or model=, a module of the same structure (on the meta device, "
                    "without memory: `with torch.device('meta'): model = MyModel()`)."
                )
            model = _model_of(settings)
        weights, modules = self._linears(model)
        ties: dict[str, set[str]] = {}
        for alias, name in opened.tied().items():
            ties.setdefault(name, set()).add(alias)
        aliases = set().union(*ties.values())
        names = [
            name for name, stored in opened.model.items()
            if name in weights and name not in aliases and ties.get(name, set()) <= weights and 0 not in stored.shape
        ]  # fmt: skip
        for name in names:
            dtype = opened.model[name].dtype
            if not dtype.is_floating_point or is_narrow(dtype) or f"{name}_scale" in opened.model:
                raise ConfigError(f"zs.export: quantize: {name} ({dtype}) is quantized already; export it without quantize=.")
        if not names:
            raise ConfigError(
                f"zs.export: quantize: the export has none of the weights that would be quantized: those of nn.Linear modules "
                f"of {type(model).__name__}, but for ignored and tied ones: {first_of(sorted(weights)) or 'there are none'}. "
                f"The export has {first_of(opened.model)}. Give the model of this checkpoint (config=, model=), or prefix=, "
                "ignore=."
            )
        quantized = {each.rpartition(".")[0] for name in names for each in (name, *ties.get(name, ()))}
        architecture = type(model).__name__ if hasattr(model, "get_output_embeddings") else None
        return Quantization(
            WEIGHT_FORMATS[self.form], frozenset(names), [name for name in modules if name not in quantized], architecture
        )

    def _linears(self, model: nn.Module) -> tuple[set[str], list[str]]:
        """Return the names of the weights that may be quantized, and of all nn.Linear modules. Raises ConfigError."""
        head = getattr(model, "get_output_embeddings", lambda: None)()  # of a model of Transformers
        modules = [name for name, module in _named(model) if isinstance(module, nn.Linear)]
        known = {".".join(parts[at:]) for parts in (name.split(".") for name in modules) for at in range(len(parts))}
        if unknown := [each for each in self.ignore if each not in known and each not in IGNORED]:
            near = did_you_mean(unknown[0], known)
            raise ConfigError(f"zs.export: ignore: {type(model).__name__} has no nn.Linear module {unknown[0]!r}.{near}")
        stays: dict[int, bool] = {}  # id of a parameter -> whether a module that uses it keeps it from being quantized
        for name, module in _named(model):
            ignored = any(f".{name}".endswith(f".{each}") for each in self.ignore)
            ignored |= module is head and "lm_head" in self.ignore  # which other models call embed_out, output, ...
            for key, parameter in module.named_parameters(recurse=False):
                allowed = isinstance(module, nn.Linear) and key == "weight" and not ignored
                stays[id(parameter)] = stays.get(id(parameter), False) or not allowed
        named = model.named_parameters(remove_duplicate=False)
        return {own_name(model, name) for name, parameter in named if not stays[id(parameter)]}, modules


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((own_name(model, name), module) for name, module in model.named_modules(remove_duplicate=False))


def _model_of(settings: Mapping[str, Any]) -> nn.Module:
    """Build the model of a Hugging Face configuration on the meta device. Raises ConfigError."""
    other = "give model=, a module of the same structure (on the meta device, without memory)"
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(
            "zs.export: quantize: Transformers, which builds the model of a configuration, is not installed: pip install "
            f"transformers, or {other}."
        ) from None
    fields = {key: value for key, value in settings.items() if key not in ("model_type", "quantization_config")}
    try:
        config = transformers.AutoConfig.for_model(settings["model_type"], **fields)
        made = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return made(config)
    except Exception as error:
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError(f"zs.export: quantize: Transformers cannot build the model of config= ({what}); {other}.") from error
