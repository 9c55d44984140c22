"""The operators of an imagined rank, seen one by one on fake tensors: what each computes, moves, allocates and sends.

operators     flops, bytes read and written          -> the recorder's computation
              storages that are new                  -> the meter
collectives   tensor parallelism's functional ones, and sends between stages of a pipeline -> tasks on links
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..comm.fake import Ticket
from ..config import PRECISIONS
from ..parallel.traffic import ring_nbytes
from ..seam import ShardedTensor
from ..utils import torch_compat
from ..utils.axes import PP
from ..utils.torch_compat import TorchDispatchMode
from .faults import check_dtypes
from .recorder import Recorder
from .simulator.trace import AttentionWork, Resource, Trace

_FLOPS = {  # flops of operators that torch's table lacks; torch 2.11 counts no attention whose keys have fewer heads than queries
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, *kv, **_: sdpa_flop_count(q.shape, *_of_all_heads(q, kv)),
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        lambda grad, q, *kv, **_: sdpa_backward_flop_count(grad.shape, q.shape, *_of_all_heads(q, kv)),
}  # fmt: skip
_OVERWRITE = ("copy_", "zero_", "fill_", "normal_", "uniform_")  # these do not read the tensor that they write
_DEVICE = torch.ops.prim.device.default
_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


@dataclass(frozen=True)
class Groups:
    """The mesh behind the process groups of torch's own collectives. axes: a group's name -> (axis, number of ranks, their link).

    stage: this rank's place along pp; stage_link: the link to the stages beside it.
    """

    axes: dict[str, tuple[str, int, Resource]] = field(default_factory=dict)
    stage: int = 0
    stage_link: Resource = Resource.INSIDE


class Operators(TorchDispatchMode):
    """A dispatch mode that reports every operator to a recorder and its meter."""

    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        super().__init__()
        self.recorder, self.meter, self.groups = recorder, recorder.meter, groups
        self._under_way: weakref.WeakKeyDictionary[UntypedStorage, Ticket] = weakref.WeakKeyDictionary()
        self._messages: Counter[str] = Counter()
        self.subclasses: tuple[type, ...] = (ShardedTensor,)
        if groups.axes:
            from torch.distributed.tensor import DTensor

            self.subclasses = (ShardedTensor, DTensor)

    def begin(self, trace: Trace) -> None:
        """Write all that follows to a new trace."""
        self._messages.clear()
        self.recorder.begin(trace)

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple = (), kwargs: dict | None = None) -> object:
        # most calls: every look at a fake tensor's device is one
        if func is _DEVICE and type(args[0]) is torch_compat.FakeTensor:
            return args[0].fake_device
        if any(issubclass(kind, self.subclasses) for kind in types):
            return NotImplemented  # the subclass unwraps itself first, and its operators on plain tensors come here
        check_dtypes(func, args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._collective(func, args, result)
        elif func.namespace == "c10d":
            self._message(func, args)
        else:
            self._operator(func, args, kwargs or {}, result)
        return result

    def _operator(self, func: Any, args: tuple, kwargs: dict, result: object) -> None:
        """Report the storages that an operator allocates to the meter, its flops and bytes to the recorder."""
        lists = [x for given in args if isinstance(given, (tuple, list)) for x in _tensors(given)]
        results = _tensors(result if isinstance(result, (tuple, list)) else (result,))
        if not results and not lists:
            return
        tensors = _tensors((*args, *kwargs.values())) + lists
        # storages of results that no input lies in, by id
        known = {torch_compat.storage_id(x.untyped_storage()) for x in tensors}
        storages = {torch_compat.storage_id(x.untyped_storage()): x.untyped_storage() for x in results}
        fresh = {key: storage for key, storage in storages.items() if key not in known}
        if fresh and self.meter.looking:
            for storage in fresh.values():
                self.meter.born(storage)
            self.meter.sample()
        name, count, places = _facts(func)
        changed = [args[n] if n < len(args) else kwargs.get(each) for n, each in places]
        written = [x for value in changed for x in _tensors(value if isinstance(value, (tuple, list)) else (value,))]
        if (fresh or written) and tensors:
            made = [x for x in results if torch_compat.storage_id(x.untyped_storage()) in fresh]
            flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
            # it reads and writes each tensor once, those changed in place once for each
            over = written if name in _OVERWRITE else ()
            read = {id(x): x.nbytes for x in tensors if not any(x is each for each in over)}
            nbytes = sum(read.values()) + sum(x.nbytes for x in (*written, *made))
            attention = None  # that of a fused kernel, which with an explicit mask computes the whole square of scores
            if flops and "scaled_dot_product" in name:
                given: dict[str, Any] = {
                    **dict(zip((each.name for each in func._schema.arguments), args, strict=False)),
                    **kwargs,
                }
                attention = AttentionWork(flops, given["key"].shape[-2], bool(given.get("is_causal")), 1)
            self.recorder.compute(flops, nbytes, _NAMES.get(tensors[0].dtype, "fp32"), attention)

    def _collective(self, func: Any, args: tuple, result: object) -> None:
        """Report a functional collective of tensor parallelism: its start, and at wait_tensor the wait for it."""
        name = _name(func)
        if name == "wait_tensor":
            storage = args[0].untyped_storage()
            self.recorder.join(self._under_way.pop(storage, ()))
            return
        axis, size, link = self.groups.axes.get(args[-1] if isinstance(args[-1], str) else "", ("", 1, Resource.INSIDE))
        if axis and isinstance(result, Tensor):
            nbytes = ring_nbytes(func, args[0], result, size) or 0.0
            self.meter.born(result.untyped_storage())
            self.meter.sample()
            ticket = self.recorder.start(f"{axis} {name}", {link: nbytes}, size, axis)
            self._under_way[result.untyped_storage()] = ticket

    def _message(self, func: Any, args: tuple) -> None:
        """Report a send or receive between stages: a send runs beside the computation, a receive is waited for at once."""
        name, here = _name(func), self.groups.stage
        if name not in ("send", "recv_"):
            return
        way = f"stage {here} -> {args[2]}" if name == "send" else f"stage {args[2]} -> {here}"
        channel = f"{way} #{self._messages[way]}"
        self._messages[way] += 1
        nbytes = float(sum(x.nbytes for x in args[0]))
        ticket = self.recorder.start(
            f"{name.strip('_')} {way}", {self.groups.stage_link: nbytes} if name == "send" else {}, 2, PP, channel
        )
        if name == "recv_":
            self.recorder.join(ticket)


@functools.cache
def _facts(func: Any) -> tuple[str, Any, list[tuple[int, str]]]:
    """Return an operator's name, the function that counts its flops or None, and place and name of arguments that it writes."""
    written = [
        (n, each) for n, each in enumerate(func._schema.arguments) if each.alias_info is not None and each.alias_info.is_write
    ]
    count: Any = flop_registry.get(func.overloadpacket) or _FLOPS.get(_name(func))
    return _name(func), count, [(n, each.name) for n, each in written]


def _of_all_heads(query: Tensor, keys: tuple) -> list[tuple[int, ...]]:
    """Return the shapes of keys and values with the heads of the query, each of which computes with those of its group."""
    return [(*query.shape[:2], *tensor.shape[2:]) for tensor in keys[:2]]


def _name(func: Any) -> str:
    """Return an operator's name without its namespace."""
    return func._schema.name.partition("::")[2]


def _tensors(values: Iterable[object]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor)]
