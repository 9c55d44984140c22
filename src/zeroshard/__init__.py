"""zeroshard: the Zero Redundancy Optimizer, whole, in pure Python on PyTorch.

import zeroshard as zs
model, optimizer = zs.shard(model, optimizer, stage=3)      # the rest of the loop stays as it is
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .activations.checkpoint import checkpoint_activations
from .activations.cross_entropy import tiled_cross_entropy
from .activations.report import ActivationReport, activation_report
from .activations.tile import tile
from .api import (
    accumulate,
    backward,
    clip_grad_norm_,
    close,
    full_gradients,
    full_optimizer_state,
    full_optimizer_state_dict,
    full_state_dict,
    shard,
)
from .checkpoint import Exported, Inspection, Loaded, Save, export, inspect_checkpoint, load, save
from .checkpoint.safetensors import save_safetensors
from .config import Config, Offload, Tier
from .data.sampler import ShardedSampler
from .data.sequence import SequenceLoader, shard_sequence
from .data.uneven import join, stop_together
from .errors import (
    BaseModelMismatch,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointReadError,
    CheckpointWriteError,
    CollectiveMismatch,
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    ModelChanged,
    ModelClosed,
    ModelMismatch,
    NonFiniteError,
    OffloadIOError,
    PeerFailed,
    ShardedAccessError,
    ShardedWriteError,
    StallError,
    StatesAway,
    SwapError,
    ThreadsMet,
    ZeroshardError,
    missing_name,
)
from .memory import io
from .optim.averaged_model import AveragedModel, ema
from .optim.lion import Lion
from .optim.muon import Muon
from .optim.offload_states import offload_states, reload_states
from .optim.parameter_access import gradient_of, state_of, value_of
from .optim.sharded_optimizer import StepRecord
from .optim.whole_matrix import whole_matrix
from .utils.compression import Compression
from .utils.state_format import StateFormat
from .utils.version import __version__
from .zero import out_of_memory
from .zero.gathered_parameters import gathered
from .zero.init_context import init
from .zero.method_forward import register_forward
from .zero.tensor_stream import stream_full_tensors

sys.modules[f"{__name__}.io"] = io  # zeroshard.io is public, wherever its folder is

if TYPE_CHECKING:
    from .parallel import tensor_parallel as tensor_parallel
    from .parallel.experts import Experts as Experts
    from .parallel.experts import divide_experts as divide_experts
    from .parallel.experts import expert_imbalance as expert_imbalance
    from .parallel.long_context import long_context as long_context
    from .parallel.parallelize import Parallel as Parallel
    from .parallel.parallelize import parallelize as parallelize
    from .parallel.pipeline import Pipeline as Pipeline
    from .parallel.pipeline import stages_of as stages_of
    from .parallel.stages import cut_stages as cut_stages
    from .parallel.styles import styles_for as styles_for
    from .planner.dry_run import plan as plan
    from .planner.measure.forecast import Forecast, forecast
    from .planner.measure.report import Report, report
    from .planner.plan import Plan as Plan

_LATER = {  # what takes a second to import, by name: where it is
    "parallelize": ".parallel.parallelize", "Parallel": ".parallel.parallelize", "Pipeline": ".parallel.pipeline",
    "cut_stages": ".parallel.stages", "stages_of": ".parallel.pipeline", "styles_for": ".parallel.styles",
    "Experts": ".parallel.experts", "divide_experts": ".parallel.experts", "expert_imbalance": ".parallel.experts",
    "long_context": ".parallel.long_context",
    "tensor_parallel": ".parallel.tensor_parallel", "plan": ".planner.dry_run", "Plan": ".planner.plan",
    "Forecast": ".planner.measure.forecast", "forecast": ".planner.measure.forecast", "Report": ".planner.measure.report", "report": ".planner.measure.report",
}  # fmt: skip

_INSTEAD = {  # names of PyTorch, FairScale and DeepSpeed: the line to write
    **dict.fromkeys(("fully_shard", "FSDP", "FullyShardedDataParallel"), "model, optimizer = zs.shard(model, optimizer, stage=3)"),
    **dict.fromkeys(("ShardedDataParallel", "ShardedDDP"), "model, optimizer = zs.shard(model, optimizer, stage=2)"),
    **dict.fromkeys(("OSS", "ZeroRedundancyOptimizer"), "model, optimizer = zs.shard(model, optimizer, stage=1)"),
    **dict.fromkeys(("DDP", "DistributedDataParallel"), "model, optimizer = zs.shard(model, optimizer, stage=0)"),
    **dict.fromkeys(("MixedPrecision", "MixedPrecisionPolicy"), "model, optimizer = zs.shard(model, optimizer, precision='bf16')"),
    **dict.fromkeys(("CPUOffload", "CPUOffloadPolicy"), "model, optimizer = zs.shard(model, optimizer, offload_optimizer='cpu')"),
    **dict.fromkeys(("initialize", "init_distributed", "DeepSpeedEngine"), "import zeroshard.deepspeed as deepspeed"),
    "Init": "with zs.init(): ...", "no_sync": "with zs.accumulate(model): ...",
    **dict.fromkeys(("GatheredParameters", "summon_full_params"), "with zs.gathered(model): ..."),
    "register_fsdp_forward_method": "zs.register_forward(model, 'generate')",
    "apply_activation_checkpointing": "zs.checkpoint_activations(model)",
    "get_model_state_dict": "state = zs.full_state_dict(model)", "clip_grad_norm": "norm = zs.clip_grad_norm_(model, 1.0)",
    "plan_for": "zs.styles_for",  # an earlier name
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            module = importlib.import_module(_LATER[name], __name__)
            return module if name == "tensor_parallel" else getattr(module, name)
        remedy = f" Write instead: {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise missing_name(f"module {__name__!r} has no attribute {name!r}.{remedy}", sys._getframe(1))


def _advise(shortage: out_of_memory.Shortage) -> list[str]:
    """Return the planner's changes for a model that has run out of memory; the planner is imported with the first such error."""
    return importlib.import_module(".planner.remedies.running", __name__).advise(shortage)


out_of_memory.advise = _advise


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "ActivationReport", "AveragedModel", "BaseModelMismatch", "CheckpointCorrupt", "CheckpointError", "CheckpointIncomplete",
    "CheckpointMismatch", "CheckpointNotFound", "CheckpointReadError", "CheckpointWriteError", "CollectiveMismatch",
    "Compression", "Config", "ConfigError", "DeviceMemoryError",
    "Exported", "Forecast", "HostMemoryError", "Inspection", "Lion", "Loaded", "ModelChanged", "ModelClosed",
    "ModelMismatch", "Muon", "NonFiniteError", "Offload", "OffloadIOError", "PeerFailed", "Report", "Save", "SequenceLoader",
    "ShardedAccessError", "ShardedSampler", "ShardedWriteError", "StallError", "StateFormat", "StatesAway", "StepRecord", "SwapError",
    "ThreadsMet", "Tier", "ZeroshardError", "__version__", "accumulate", "activation_report", "backward", "checkpoint_activations",
    "clip_grad_norm_", "close", "ema", "export", "forecast", "full_gradients", "full_optimizer_state", "full_optimizer_state_dict",
    "full_state_dict", "gathered", "gradient_of", "init", "inspect_checkpoint", "io", "join", "load", "offload_states", "register_forward",
    "reload_states", "report", "save", "save_safetensors", "shard", "shard_sequence", "state_of", "stop_together", "stream_full_tensors", "tile",
    "tiled_cross_entropy", "value_of", "whole_matrix",
]  # fmt: skip
