"""The public names of zeroshard, which `__init__.py` shows: `zs.shard` is the `shard` of this file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import io
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
    init,
    shard,
)
from .checkpoint import Exported, Inspection, Loaded, Save, export, inspect_checkpoint, load, save
from .checkpoint.safetensors import save_safetensors
from .config import Config, Offload, Tier
from .data.sampler import ShardedSampler
from .data.sequence import SequenceLoader, shard_sequence
from .data.uneven import join, stop_together
from .engine.optimizer import StepRecord
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
)
from .guard.out_of_memory import DeviceMemoryError
from .optim.averaged_model import AveragedModel, ema
from .optim.lion import Lion
from .optim.muon import Muon
from .optim.whole_matrix import whole_matrix
from .reports.report import Report, report
from .state.parameter_access import gradient_of, state_of, value_of
from .tiers.offload_states import offload_states, reload_states
from .utils.compression import Compression
from .utils.state_format import StateFormat
from .utils.version import __version__
from .values.gathered_parameters import gathered
from .values.method_forward import register_forward
from .values.tensor_stream import stream_full_tensors

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
    from .planner.plan import Plan as Plan

_LATER = {  # what takes a second to import, by name: where it is
    "parallelize": ".parallel.parallelize", "Parallel": ".parallel.parallelize", "Pipeline": ".parallel.pipeline",
    "cut_stages": ".parallel.stages", "stages_of": ".parallel.pipeline", "styles_for": ".parallel.styles",
    "Experts": ".parallel.experts", "divide_experts": ".parallel.experts", "expert_imbalance": ".parallel.experts",
    "long_context": ".parallel.long_context",
    "tensor_parallel": ".parallel.tensor_parallel", "plan": ".planner.dry_run", "Plan": ".planner.plan",
    "Forecast": ".planner.measure.forecast", "forecast": ".planner.measure.forecast",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_LATER[name], __package__)
        return module if name == "tensor_parallel" else getattr(module, name)


__all__ = [
    "ActivationReport", "AveragedModel", "BaseModelMismatch", "CheckpointCorrupt", "CheckpointError", "CheckpointIncomplete",
    "CheckpointMismatch", "CheckpointNotFound", "CheckpointReadError", "CheckpointWriteError", "CollectiveMismatch",
    "Compression", "Config", "ConfigError", "DeviceMemoryError", "Experts", "Exported", "Forecast", "HostMemoryError",
    "Inspection", "Lion", "Loaded", "ModelChanged", "ModelClosed", "ModelMismatch", "Muon", "NonFiniteError", "Offload",
    "OffloadIOError", "Parallel", "PeerFailed", "Pipeline", "Plan", "Report", "Save", "SequenceLoader", "ShardedAccessError",
    "ShardedSampler", "ShardedWriteError", "StallError", "StateFormat", "StatesAway", "StepRecord", "SwapError", "ThreadsMet",
    "Tier", "ZeroshardError", "__version__", "accumulate", "activation_report", "backward", "checkpoint_activations",
    "clip_grad_norm_", "close", "cut_stages", "divide_experts", "ema", "expert_imbalance", "export", "forecast", "full_gradients",
    "full_optimizer_state", "full_optimizer_state_dict", "full_state_dict", "gathered", "gradient_of", "init",
    "inspect_checkpoint", "io", "join", "load", "long_context", "offload_states", "parallelize", "plan", "register_forward",
    "reload_states", "report", "save", "save_safetensors", "shard", "shard_sequence", "stages_of", "state_of", "stop_together",
    "stream_full_tensors", "styles_for", "tensor_parallel", "tile", "tiled_cross_entropy", "value_of", "whole_matrix",
]  # fmt: skip
