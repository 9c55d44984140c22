"""The torch operations that compute with the elements of a parameter, for which it must be gathered (unsharded).

    x @ self.emb.weight.T        in the forward of the model, while `emb`, a unit of its own, is not gathered

A unit's own modules find compute parameters; all other code finds sharded ones. In a forward, an operation that computes with a
sharded parameter runs as a small forward of its unit (`Runtime.run_inside`): gather, compute with the compute parameter, watch
the output for backward, release. Operations that read shapes or write act on the parameter at rest, as outside of a forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# attributes that return elements; all others read none
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_LOOK = frozenset(  # methods that read no elements of any argument: they act on the parameter at rest
    "__deepcopy__ __dir__ __dlpack_device__ __format__ __len__ __reduce__ __reduce_ex__ __repr__ __setstate__ _is_view can_cast "
    "const_data_ptr data_ptr dim dim_order element_size get_device has_names is_coalesced is_complex is_conj is_contiguous "
    "is_distributed is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement "
    "new new_empty new_empty_strided new_full new_ones new_tensor new_zeros numel register_hook register_post_accumulate_grad_hook "
    "result_type retain_grad size storage storage_offset storage_type stride untyped_storage".split()
)
_LOOK_AT_OTHERS = frozenset("expand_as reshape_as to type_as view_as".split())  # they read elements of the first argument only
_WRITE = frozenset(
    "__delitem__ __setitem__ backward module_load share_memory".split()
    + [f"__i{name}__" for name in "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()]
)
# reductions to one or a few numbers: at rest, a parameter is gathered for them (`_of_whole` in tensor/sharded_tensor.py)
READS = frozenset("allclose amax amin argmax argmin count_nonzero equal item max mean median min prod std sum var".split())
NORMS = frozenset("frobenius_norm linalg_matrix_norm linalg_norm linalg_vector_norm norm nuclear_norm".split())
_ALIAS = frozenset(["detach"])  # a write to the result is a write to the parameter


def computes(func: Callable, args: tuple, kwargs: dict[str, object], kind: type) -> bool:
    """Return whether a function of torch reads elements of its arguments of class `kind`, and writes none in place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func in _VIEWS
    if name in ("__set__", "__delete__") or name in _LOOK or name in _WRITE or name in _ALIAS:
        return False
    if name in _LOOK_AT_OTHERS:
        return isinstance(args[0], kind)
    return kwargs.get("out") is None and (not name.endswith("_") or name.endswith("__"))  # one underscore at the end: in place
