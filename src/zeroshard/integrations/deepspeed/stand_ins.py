"""Names of DeepSpeed that programs import, inherit from or test with isinstance, but that zeroshard does not implement.

A *stand-in* is a class or function that can be imported; making an instance or calling it raises `NotSupported`, whose message
has the replacement. The base classes of optimizers are no stand-ins: the class of the engine's optimizer derives from them. An
operator builder tells whether zeroshard has the operation, and loads the module that has it: nothing is compiled.
"""

from __future__ import annotations

import importlib
from abc import ABC
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import ConfigError, ZeroshardError

MIN_SWAPPABLE_BYTES = 2**20  # deepspeed.runtime.swap_tensor: DeepSpeed's tests make tensors of at least this size


class NotSupported(ZeroshardError, NotImplementedError):
    """Raised for a part of DeepSpeed that zeroshard does not have; the message has the replacement."""


def _stand_in(name: str, remedy: str, base: type = object) -> Any:
    """Make a class of that name. It may be derived from, but making an instance of it or a subclass raises NotSupported."""

    def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
        derived = "" if cls.__name__ == name else f" (for {cls.__name__})"
        raise NotSupported(f"zeroshard.deepspeed has no {name}{derived}: {remedy}")

    return type(name, (base,), {"__new__": refuse, "__module__": __name__, "__doc__": f"Not in zeroshard: {remedy}"})


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    """Make a function of that name that raises NotSupported when called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotSupported(f"zeroshard.deepspeed has no {name}: {remedy}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not in zeroshard: {remedy}"
    return refuse


# -- optimizer classes that scripts test for with isinstance --------------------------------------------------------------


class DeepSpeedOptimizer(ABC):  # noqa: B024  # DeepSpeed's has no abstract methods either
    """Base class of `engine.optimizer`; an ABC, so that an optimizer class may also be registered."""


def _kind(name: str, base: type = DeepSpeedOptimizer) -> Any:
    return type(name, (base,), {"__module__": __name__})


ZeROOptimizer = _kind("ZeROOptimizer")  # of stages 1, 2 and 3
DeepSpeedZeroOptimizer = _kind("DeepSpeedZeroOptimizer", ZeROOptimizer)  # of stages 1 and 2
DeepSpeedZeroOptimizer_Stage3 = _kind("DeepSpeedZeroOptimizer_Stage3", ZeROOptimizer)
BF16_Optimizer = _kind("BF16_Optimizer", ZeROOptimizer)  # of stage 0 or 1 in bf16 with fp32 masters
FP16_Optimizer = _kind("FP16_Optimizer")  # of stage 0 in fp16
FP16_UnfusedOptimizer = _kind("FP16_UnfusedOptimizer")  # of stage 0 in fp16, for optimizers that need whole parameters


class ZeRORuntimeException(Exception):
    """Raised for impossible combinations of ZeRO's options, as in DeepSpeed."""


# -- what zeroshard has not, and what to use instead ----------------------------------------------------------------------

_SEQUENCE = "call UlyssesSPAttentionHF.register_with_transformers, or shard over a mesh with an axis sp (zs.shard)."
_INFER = "call deepspeed.initialize without an optimizer (stage 3), or export the model to an inference engine."
_AUTOTP = 'say {"tensor_parallel": {"autotp_size": N}} in the configuration, or call deepspeed.tp_model_init.'
_LAYER = "use torch.nn.TransformerEncoderLayer."
_LAMB = "use FusedAdam, with a warm-up for large batches, or FusedLion; LAMB takes norms of whole parameters."

DistributedAttention = _stand_in("DistributedAttention", _SEQUENCE, nn.Module)
InferenceEngine = _stand_in("InferenceEngine", _INFER, nn.Module)
DeepSpeedHybridEngine = _stand_in("DeepSpeedHybridEngine", _INFER, nn.Module)
DeepSpeedInferenceConfig = _stand_in("DeepSpeedInferenceConfig", _INFER)
DeepSpeedTransformerLayer = _stand_in("DeepSpeedTransformerLayer", _LAYER, nn.Module)
DeepSpeedTransformerConfig = _stand_in("DeepSpeedTransformerConfig", _LAYER)
FlopsProfiler = _stand_in("FlopsProfiler", "use torch.utils.flop_counter.FlopCounterMode on the model before it is sharded.")
FusedLamb = _stand_in("FusedLamb", _LAMB, torch.optim.Optimizer)

init_inference = _refused("init_inference", _INFER)
replace_transformer_layer = _refused("replace_transformer_layer", _INFER)
set_autotp_mode = _refused("set_autotp_mode", _AUTOTP)
get_cuda_rng_tracker = _refused("get_cuda_rng_tracker", "there is no tensor parallelism here; use torch's generators.")

# -- deepspeed.ops.op_builder ---------------------------------------------------------------------------------------------


class OpBuilder:
    """An operation of DeepSpeed: NAME, and the module of zeroshard that implements it, or None."""

    NAME = "op"
    module: str | None = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether zeroshard has the operation; scripts ask before they use an optimizer or a disk."""
        if verbose and self.module is None:
            print(f"{self.name}: not in zeroshard")
        return self.module is not None

    def load(self, verbose: bool = True) -> ModuleType:
        """Return zeroshard's module for the operation, which has its own names. Raises ConfigError if there is none."""
        if self.module is None:
            raise ConfigError(
                f"deepspeed.ops.op_builder.{type(self).__name__}: zeroshard compiles nothing and has no {self.name}. Ask "
                "is_compatible() first, and leave out what needs it."
            )
        return importlib.import_module(self.module)

    builder = load


_ROOT, _OPTIMIZERS = __name__.partition(".")[0], f"{__package__}.cpu_optimizers"
_MODULES = {  # operation -> module of zeroshard that has it
    **dict.fromkeys(("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion"), _OPTIMIZERS),
    "async_io": f"{_ROOT}.tiers.io.async_file",
    "pin_memory": f"{_ROOT}.engine.comm.pool",
}
BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": op, "module": _MODULES.get(op), "__module__": __name__, "__doc__": f"The operation {op!r}."})
    for name, op in {
        "CPUAdamBuilder": "cpu_adam", "CPUAdagradBuilder": "cpu_adagrad", "CPULionBuilder": "cpu_lion",
        "FusedAdamBuilder": "fused_adam", "FusedLionBuilder": "fused_lion", "FusedLambBuilder": "fused_lamb",
        "AsyncIOBuilder": "async_io", "PinMemoryBuilder": "pin_memory", "GDSBuilder": "gds",
        "EvoformerAttnBuilder": "evoformer_attn", "FPQuantizerBuilder": "fp_quantizer", "InferenceBuilder": "transformer_inference",
        "QuantizerBuilder": "quantizer", "SpatialInferenceBuilder": "spatial_inference", "TransformerBuilder": "transformer",
        "UtilsBuilder": "utils",
    }.items()
}  # fmt: skip
globals().update(BUILDERS)
compatible_ops = {builder.NAME: builder.module is not None for builder in BUILDERS.values()}  # deepspeed.ops.__compatible_ops__
