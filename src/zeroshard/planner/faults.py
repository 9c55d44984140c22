"""Errors of a dry run in one sentence, which names the unit of the model at work and the innermost line of the user's own code.

Fake tensors check shapes but not always dtypes: `check_dtypes` refuses what real kernels refuse, on CPUs and GPUs alike.
"""

from __future__ import annotations

import contextlib
import functools
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ZeroshardError
from ..utils.torch_compat import DataDependentOutputException, DynamicOutputShapeException, without_fake_logs


class OutOfTime(TimeoutError):
    """Raised when a dry run takes longer than it was given."""


NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__).parent
_MODELS = _HERE / "models"
_INSTALLED = tuple({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
_PYTHON = Path(sysconfig.get_path("stdlib"))
_ALIKE = {  # operator -> positions of the arguments that real kernels want in one dtype
    "mm": (0, 1), "addmm": (1, 2, 0), "addbmm": (1, 2, 0), "mv": (0, 1), "addmv": (1, 2, 0), "linear": (0, 1, 2),
    "convolution": (0, 1, 2), "convolution_overrideable": (0, 1, 2), "index_put": (0, 2), "index_put_": (0, 2), "_unsafe_index_put": (0, 2),
    "index_add": (0, 3), "index_add_": (0, 3), "index_copy": (0, 3), "index_copy_": (0, 3), "binary_cross_entropy": (0, 1, 2),
    "nll_loss_forward": (0, 2), "nll_loss2d_forward": (0, 2), "_cdist_forward": (0, 1), "grid_sampler_2d": (0, 1),
    "grid_sampler_3d": (0, 1), "_embedding_bag": (0, 6), "_embedding_bag_forward_only": (0, 6), "bmm": (0, 1), "baddbmm": (1, 2),
}  # fmt: skip
_NORMS = {  # likewise; but an input in low precision with parameters in fp32 is computed, the other way round is not
    "native_layer_norm": (0, 2, 3), "native_group_norm": (0, 1, 2), "native_batch_norm": (0, 1, 2), "_native_batch_norm_legit": (0, 1, 2),
    "_native_batch_norm_legit_no_training": (0, 1, 2), "cudnn_batch_norm": (0, 1, 2), "_batch_norm_with_update": (0, 1, 2),
}  # fmt: skip


@functools.cache
def _places(func: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return an operator's name, and the places of operands that must have one dtype."""
    name = func._schema.name.removeprefix("aten::")
    return name, _ALIKE.get(name) or _NORMS.get(name)


def check_dtypes(func: Any, args: tuple) -> None:
    """Raise RuntimeError, as the real kernel does, where an operator's operands have dtypes that it does not combine."""
    name, places = _places(func)
    if places is None:
        return
    given = [
        (func._schema.arguments[at].name, args[at].dtype) for at in places if at < len(args) and isinstance(args[at], Tensor)
    ]
    first, dtype = given[0]
    for other, found in given[1:]:
        if found == dtype or (name in _NORMS and found == torch.float32):
            continue
        if "index_put" in name and args[2].numel() == 1:  # one number where a mask is True: masked_fill, which converts its dtype
            masks = [each for each in args[1] if each is not None]
            if len(masks) == 1 and masks[0].dtype in (torch.bool, torch.uint8):
                continue
        words = " and ".join(str(each).removeprefix("torch.") for each in (dtype, found))
        raise RuntimeError(f"{first} and {other} must have the same dtype, but got {words} ({name})")


@contextlib.contextmanager
def told(what: str, unit: Callable[[], str], remedy: str = "") -> Iterator[None]:
    """Turn an exception of the user's code in this block into a ConfigError; errors of this library pass. what: the work it does;
    unit: returns the name of the unit at work; remedy: the advice where the work reads values of tensors."""
    try:
        with without_fake_logs():
            yield
    except (ZeroshardError, OutOfTime):
        raise
    except Exception as error:
        own = unit()
        cause: BaseException = error
        while not where(cause) and cause.__cause__ is not None:  # torch's pipeline wraps the error in its own
            cause = cause.__cause__
        place = where(cause)
        at = f" in or after unit {own!r}" * bool(own) + f", {place}" * bool(place)
        if isinstance(cause, NO_NUMBERS):
            raise ConfigError(f"{what} reads values of tensors ({cause.func}){at}, and a plan has none: {remedy}") from error
        if not place and _is_ours(cause):
            raise
        raise ConfigError(f"{what} fails{at}: {type(cause).__name__}: {first_line(cause)}. A run would fail, too.") from error


def where(error: BaseException) -> str:
    """Return the innermost line of the user's own code, else of another library's, as "in Head (model.py:12)"; "" for none."""
    found = ["", ""]  # of libraries, of the user
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        library = any(folder in path.parents for folder in _INSTALLED)
        if (
            _TORCH in path.parents
            or (_HERE.parent in path.parents and _MODELS not in path.parents)
            or path.name.startswith("<frozen ")
        ):
            continue
        if _PYTHON in path.parents and not library:
            continue
        owner = frame.f_locals.get("self")
        kind = type(owner).__name__ if isinstance(owner, nn.Module) else frame.f_code.co_name
        shown = path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path
        found[not library] = f"in {kind} ({shown}:{line})"
    return found[1] or found[0]


def _is_ours(error: BaseException) -> bool:
    """Check whether this library itself has raised the error, and not code that it called."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = Path(frame.f_code.co_filename)
        if isinstance(frame.f_locals.get("self"), (nn.Module, torch.optim.Optimizer)):
            return False
        if not (_TORCH in path.parents or path.parent == _HERE):  # frames of torch and of the dry run pass operators on
            return _HERE.parent in path.parents
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop; with the second line if the first ends in a colon."""
    text = [line.strip() for line in str(error).strip().splitlines()]
    found = " ".join(text[: 1 + text[0].endswith(":")]) if text else type(error).__name__
    return found.rstrip(".")
