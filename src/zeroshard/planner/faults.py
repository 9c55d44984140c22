"""What goes wrong in a dry run, as one sentence: which unit of the model was at work, and the innermost line of the user's own code.

Fake tensors check shapes, and not always dtypes: `check_dtypes` refuses what real kernels refuse, on CPUs and GPUs alike.
"""

from __future__ import annotations

import contextlib
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
    """A dry run takes longer than it was given."""


NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__).parent
_MODELS = _HERE / "models"
_INSTALLED = tuple({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
_PYTHON = Path(sysconfig.get_path("stdlib"))
_ALIKE = {  # operator -> arguments whose dtypes real kernels want to be one
    "mm": (0, 1), "addmm": (1, 2, 0), "addbmm": (1, 2, 0), "mv": (0, 1), "addmv": (1, 2, 0), "linear": (0, 1, 2),
    "convolution": (0, 1, 2), "convolution_overrideable": (0, 1, 2), "index_put": (0, 2), "index_put_": (0, 2), "_unsafe_index_put": (0, 2),
    "index_add": (0, 3), "index_add_": (0, 3), "index_copy": (0, 3), "index_copy_": (0, 3), "binary_cross_entropy": (0, 1, 2),
    "nll_loss_forward": (0, 2), "nll_loss2d_forward": (0, 2), "_cdist_forward": (0, 1), "grid_sampler_2d": (0, 1),
    "grid_sampler_3d": (0, 1), "_embedding_bag": (0, 6), "_embedding_bag_forward_only": (0, 6),
}  # fmt: skip
_NORMS = {  # low precision with parameters in fp32 is computed, the other way round is not
    "native_layer_norm": (0, 2, 3), "native_group_norm": (0, 1, 2), "native_batch_norm": (0, 1, 2), "_native_batch_norm_legit": (0, 1, 2),
    "_native_batch_norm_legit_no_training": (0, 1, 2), "cudnn_batch_norm": (0, 1, 2), "_batch_norm_with_update": (0, 1, 2),
}  # fmt: skip


def check_dtypes(func: Any, args: tuple) -> None:
    """Raise RuntimeError, as the real kernel does, where operands of an operator of torch have other dtypes than it computes with."""
    name = func._schema.name.removeprefix("aten::")
    places = _ALIKE.get(name) or _NORMS.get(name)
    if places is None:
        return
    given = [
        (func._schema.arguments[at].name, args[at].dtype) for at in places if at < len(args) and isinstance(args[at], Tensor)
    ]
    first, dtype = given[0]
    for other, found in given[1:]:
        if found == dtype or (name in _NORMS and found == torch.float32) or ("index_put" in name and _fills(args)):
            continue
        raise RuntimeError(f"{first} and {other} must have the same dtype, but got {_short(dtype)} and {_short(found)} ({name})")


def _fills(args: tuple) -> bool:
    """One number where a mask says so: masked_fill, which converts."""
    masks = [each for each in args[1] if each is not None]
    return args[2].numel() == 1 and len(masks) == 1 and masks[0].dtype in (torch.bool, torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def told(what: str, unit: Callable[[], str], remedy: str = "") -> Iterator[None]:
    """What the user's code raises meanwhile becomes a ConfigError. what: is done; unit: of the model, at work; remedy: where `what`
    asks for numbers. Errors of this library pass."""
    try:
        with without_fake_logs():
            yield
    except (ZeroshardError, OutOfTime):
        raise
    except Exception as error:
        own = unit()
        cause: BaseException = error
        while not where(cause) and cause.__cause__ is not None:  # torch's pipeline puts its own around it
            cause = cause.__cause__
        place = where(cause)
        at = f" in or after unit {own!r}" * bool(own) + f", {place}" * bool(place)
        if isinstance(cause, NO_NUMBERS):
            raise ConfigError(f"{what} reads values of tensors ({cause.func}){at}, and a plan has none: {remedy}") from error
        if not place and _is_ours(cause):
            raise
        raise ConfigError(f"{what} fails{at}: {type(cause).__name__}: {first_line(cause)}. A run would fail, too.") from error


def where(error: BaseException) -> str:
    """ "in Head (model.py:12)": the innermost line of the user's own code, or else of another library's; "" where there is none."""
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
        found[not library] = f"in {kind} ({_relative(path)}:{line})"
    return found[1] or found[0]


def _is_ours(error: BaseException) -> bool:
    """Raised by this library itself, and not by what it has called."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = Path(frame.f_code.co_filename)
        if isinstance(frame.f_locals.get("self"), (nn.Module, torch.optim.Optimizer)):
            return False
        if not (_TORCH in path.parents or path.parent == _HERE):  # the dispatch of operators
            return _HERE.parent in path.parents
    return False


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if Path.cwd() in path.parents else str(path)


def first_line(error: BaseException) -> str:
    """Of its message, without a full stop; with the next one where it announces that."""
    text = [line.strip() for line in str(error).strip().splitlines()]
    found = " ".join(text[: 1 + text[0].endswith(":")]) if text else type(error).__name__
    return found.rstrip(".")
