"""The names of torch.distributed.fsdp's FSDP2: programs written for fully_shard run on zeroshard's engine.

    from zeroshard.fsdp import fully_shard         # in the place of torch.distributed.fsdp; the program stays as it is
    python -m zeroshard.fsdp train.py              # the same for a script that is not changed at all

    for block in model.blocks:
        fully_shard(block)                         # a unit
    fully_shard(model)                             # the rest, and the model's root
    optimizer = torch.optim.AdamW(model.parameters())

What a program gains beside it, by `configure(...)` or by options of the command: host and disk for any state, a step on the
host, small optimizer states, quantized and hierarchical traffic, stages 1 and 2, a report and a plan.
"""

from torch.distributed import fsdp as _torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from .calls import track_optimizers
from .configuration import configure
from .module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from .sharding import fully_shard
from .torch_names import serve_state_dicts

DataParallelMeshDims = getattr(_torch_fsdp, "DataParallelMeshDims", None)  # since torch 2.13

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "configure",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

serve_state_dicts()
track_optimizers()
