"""torch.distributed.pipelining with stages that fully_shard was called on: micro-batches sum their gradients, and one reduction follows.

torch's stage asks FSDP2 for its inner state after the last micro-batch. Schedules that split a backward (zero bubble) compute
gradients of weights later, from parameters that are released by then: here the first half runs the whole backward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..utils.torch_compat import replace_stage_methods
from .calls import call_of
from .module import FSDPModule


def serve_pipelines() -> None:
    """Let torch's pipeline stages train modules of this door, from now on and for the process, if the program has imported them."""
    if "torch.distributed.pipelining.stage" in sys.modules:
        _replace()


@functools.cache
def _replace() -> None:
    replace_stage_methods(backward_maybe_with_nosync=_backward, perform_reduce_grad=_reduce)


def _backward(
    stage: Any, plain: Callable[..., Any], backward_type: str, bwd_kwargs: dict[str, Any], *last: Any, **named: Any
) -> Any:
    """Run the backward of a micro-batch: "full", "input" (all of it), or "weight" (nothing is left)."""
    if not isinstance(stage.submod, FSDPModule) or backward_type == "full":
        return plain(stage, backward_type, bwd_kwargs, *last, **named)
    if backward_type == "weight":
        return (), None
    if bwd_kwargs["output_grads"] is None:  # the last stage: torch has put its loss into a tuple
        bwd_kwargs = bwd_kwargs | {"stage_output": bwd_kwargs["stage_output"][0]}
    return plain(stage, "full", bwd_kwargs, *last, **named)[0], []


def _reduce(stage: Any, plain: Callable[..., Any], grad_scale_factor: int) -> None:
    """Reduce the gradients of all micro-batches (collective), and divide them by `grad_scale_factor`."""
    if not isinstance(stage.submod, FSDPModule):
        return plain(stage, grad_scale_factor)
    root = call_of(stage.submod).complete()
    stage.submod.set_requires_gradient_sync(True)
    if root.engine is not None:
        root.engine.flush()
    if grad_scale_factor != 1:
        stage.scale_grads(grad_scale_factor)
