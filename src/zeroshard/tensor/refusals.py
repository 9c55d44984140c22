"""Remedies in the errors for operations that slices do not allow. A test tries each remedy (tests/zero/test_refusals.py)."""

from __future__ import annotations

_METHOD = 'In a method of another name than forward: zs.register_forward(module, "encode").'
_NORMS = ("aten::linalg_vector_norm", "aten::_foreach_norm", "aten::norm")


def remedy_of(operation: str, of_gradient: bool, writes: bool, grows: bool) -> str:
    """Return the remedy for an operation that is not possible on slices. grows: autograd would record the operation."""
    if operation == "aten::_amp_foreach_non_finite_check_and_unscale_":
        return (
            "torch.amp.GradScaler needs whole gradients: leave it out, and give precision='fp16' to zs.shard(), which scales "
            "the loss and skips steps with overflows itself (optimizer.last_step)."
        )
    if operation in _NORMS and not of_gradient:
        return "For its norm take that of `p.full_tensor()`, on all ranks, or ask for it under torch.no_grad()."
    if of_gradient:
        return "Take `p.grad.full_tensor()`, or zs.full_gradients(model)."
    if writes:
        return "Run it inside `with zs.gathered(module, write=True):`."
    if grows:
        return (
            f"Do it in the model's forward, or with `p.full_tensor()`, on all ranks: gradients go through both. {_METHOD} To look at "
            "values alone, `with torch.no_grad(), zs.gathered(module):` (write=True to change them)."
        )
    return (
        "Do it in the model's forward, run it inside `with zs.gathered(module):` (write=True to change it), or take "
        f"`p.full_tensor()`, on all ranks. {_METHOD}"
    )


def remedy_of_whole(of_gradient: bool) -> str:
    """Return the remedy for changing a whole tensor by a sharded one. of_gradient: the sharded one is a gradient."""
    remedy = (
        "A whole tensor is to be changed here: take `full_tensor()` of what is sharded (`p.grad.full_tensor()`), on all ranks."
    )
    average = (
        " For a moving average of the model (torch.optim.swa_utils.AveragedModel) take zs.ema(model, decay), which keeps slices and "
        "follows each step."
    )
    return remedy if of_gradient else remedy + average
