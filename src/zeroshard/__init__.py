"""zeroshard: the Zero Redundancy Optimizer, whole, in pure Python on PyTorch.

import zeroshard as zs
model, optimizer = zs.shard(model, optimizer, stage=3)      # the rest of the loop stays as it is

The first public name that a program asks for brings all of them (public.py), and torch. So a command, which imports this
package, has read its options before: `zeroshard --help` and a mistake in the call need no torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .errors import missing_name

if TYPE_CHECKING:
    from .public import *  # noqa: F403  # its __all__

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
        public = importlib.import_module(".public", __name__)
        if name == "__all__":
            return public.__all__
        found = {each: value for each, value in vars(public).items() if each in public.__all__}
        found |= {name: getattr(public, name)} if name in public.__all__ else {}
        globals().update({each: value for each, value in found.items() if each not in globals()})  # what a program set stays
        if name in globals():  # also a module of this package: zs.config
            return globals()[name]
        remedy = f" Write instead: {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise missing_name(f"module {__name__!r} has no attribute {name!r}.{remedy}", sys._getframe(1))


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(".public", __name__).__all__})
