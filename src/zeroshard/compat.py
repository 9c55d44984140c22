"""What differs between the supported releases of torch (>= 2.11), in one place."""

from __future__ import annotations

import torch.distributed as dist

# renamed in torch 2.13; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
