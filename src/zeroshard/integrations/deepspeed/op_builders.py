"""deepspeed.ops.op_builder: the available operations. Nothing is compiled; `load` returns zeroshard's module for an operation.

`is_compatible()` returns True for operations that zeroshard has; scripts call it before they use an optimizer or a disk.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from ...errors import ConfigError

_PACKAGE = __name__.split(".")[0]
_OPTIMIZERS = f"{__package__}.cpu_optimizers"


class OpBuilder:
    """An operation of DeepSpeed: NAME, and the module of zeroshard that implements it, or None."""

    NAME = "op"
    module: str | None = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether zeroshard has the operation. verbose: print if it has not."""
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


_NAMES = {
    "CPUAdamBuilder": ("cpu_adam", _OPTIMIZERS),
    "CPUAdagradBuilder": ("cpu_adagrad", _OPTIMIZERS),
    "CPULionBuilder": ("cpu_lion", _OPTIMIZERS),
    "FusedAdamBuilder": ("fused_adam", _OPTIMIZERS),
    "FusedLionBuilder": ("fused_lion", _OPTIMIZERS),
    "AsyncIOBuilder": ("async_io", f"{_PACKAGE}.memory.io.async_file"),
    "PinMemoryBuilder": ("pin_memory", f"{_PACKAGE}.comm.pool"),
    "FusedLambBuilder": ("fused_lamb", None),
    "GDSBuilder": ("gds", None),
    "DeepCompileBuilder": ("dc", None),
    "EvoformerAttnBuilder": ("evoformer_attn", None),
    "FPQuantizerBuilder": ("fp_quantizer", None),
    "InferenceBuilder": ("transformer_inference", None),
    "InferenceCoreBuilder": ("inference_core_ops", None),
    "InferenceCutlassBuilder": ("cutlass_ops", None),
    "QuantizerBuilder": ("quantizer", None),
    "RaggedOpsBuilder": ("ragged_device_ops", None),
    "RaggedUtilsBuilder": ("ragged_ops", None),
    "RandomLTDBuilder": ("random_ltd", None),
    "SpatialInferenceBuilder": ("spatial_inference", None),
    "StochasticTransformerBuilder": ("stochastic_transformer", None),
    "TransformerBuilder": ("transformer", None),
    "UtilsBuilder": ("utils", None),
    "CCLCommBuilder": ("deepspeed_ccl_comm", None),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", None),
    "NotImplementedBuilder": ("deepspeed_not_implemented", None),
}
BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": op, "module": module, "__module__": __name__, "__doc__": f"The operation {op!r}."})
    for name, (op, module) in _NAMES.items()
}
globals().update(BUILDERS)

ALL_OPS = {builder.NAME: builder() for builder in BUILDERS.values()}
compatible_ops = {name: op.is_compatible() for name, op in ALL_OPS.items()}  # deepspeed.ops.__compatible_ops__
installed_ops = dict.fromkeys(ALL_OPS, False)  # none is compiled beforehand


def _short(version: str | tuple | None) -> str:
    """Shorten a version: '2.13.0+cpu' -> '2.13'. '0.0' for None, as in DeepSpeed."""
    parts = version if isinstance(version, tuple) else (version or "0.0").split("+")[0].split(".")
    return ".".join(map(str, parts[:2]))


torch_info: dict[str, object] = {
    "version": _short(torch.__version__),
    "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": _short(torch.cuda.nccl.version() if torch.version.cuda and torch.cuda.is_available() else None),
    "hip_version": _short(torch.version.hip),
}
