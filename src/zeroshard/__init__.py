"""zeroshard: the Zero Redundancy Optimizer, whole, in pure Python on PyTorch.

    import zeroshard as zs
    model, optimizer = zs.shard(model, optimizer, stage=3)      # the rest of the loop stays as it is
"""

from . import io
from .activations.checkpoints import checkpoint_activations
from .activations.report import ActivationReport, activation_report
from .activations.tiled_loss import tiled_cross_entropy
from .activations.tiling import tile
from .api import (
    accumulate,
    backward,
    clip_grad_norm_,
    close,
    full_gradients,
    full_optimizer_state,
    full_state_dict,
    shard,
)
from .birth import init
from .checkpoint import Exported, Inspection, Loaded, Save, export, inspect_checkpoint, load, save
from .config import Config, Offload
from .errors import (
    BaseModelMismatch,
    CheckpointCorrupt,
    CheckpointError,
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
    SwapError,
    ZeroshardError,
)
from .optim.lion import Lion
from .optim.record import StepRecord
from .plan.forecast import Forecast, forecast
from .report import Report, report
from .sampler import ShardedSampler
from .version import __version__
from .weights import save_safetensors
from .whole import gathered

__all__ = [
    "ActivationReport", "BaseModelMismatch", "CheckpointCorrupt", "CheckpointError", "CheckpointMismatch",
    "CheckpointNotFound", "CheckpointReadError", "CheckpointWriteError", "CollectiveMismatch", "Config", "ConfigError",
    "Exported", "Forecast", "HostMemoryError", "Inspection", "Lion", "Loaded", "ModelChanged", "ModelClosed",
    "ModelMismatch", "NonFiniteError", "Offload", "OffloadIOError", "PeerFailed", "Report", "Save",
    "ShardedAccessError", "ShardedSampler", "ShardedWriteError", "StallError", "StepRecord", "SwapError",
    "ZeroshardError", "__version__", "accumulate", "activation_report", "backward", "checkpoint_activations",
    "clip_grad_norm_", "close", "export", "forecast", "full_gradients", "full_optimizer_state", "full_state_dict",
    "gathered", "init", "inspect_checkpoint", "io", "load", "report", "save", "save_safetensors", "shard", "tile",
    "tiled_cross_entropy",
]  # fmt: skip
