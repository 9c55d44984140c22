"""zeroshard: the Zero Redundancy Optimizer, whole, in pure Python on PyTorch.

    import zeroshard as zs
    model, optimizer = zs.shard(model, optimizer, stage=3)      # the rest of the loop stays as it is
"""

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
from .config import Config
from .errors import (
    CollectiveMismatch,
    ConfigError,
    ModelChanged,
    ModelClosed,
    ModelMismatch,
    NonFiniteError,
    PeerFailed,
    ShardedAccessError,
    ShardedWriteError,
    StallError,
    ZeroshardError,
)
from .optim.record import StepRecord
from .report import Report, report
from .whole import gathered

__all__ = [
    "CollectiveMismatch", "Config", "ConfigError", "ModelChanged", "ModelClosed", "ModelMismatch", "NonFiniteError",
    "PeerFailed", "Report", "ShardedAccessError", "ShardedWriteError", "StallError", "StepRecord", "ZeroshardError",
    "accumulate", "backward", "clip_grad_norm_", "close", "full_gradients", "full_optimizer_state", "full_state_dict", "gathered",
    "init", "report", "shard",
]  # fmt: skip
__version__ = "0.1.0"
