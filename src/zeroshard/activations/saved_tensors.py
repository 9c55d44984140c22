"""The store of activation checkpoints: saved-tensor hooks that keep slices of tensors from forward to backward.

    pack    tensor -> Packed      this rank copies its slice to its Backing              (forward, as autograd saves)
    unpack  Packed -> tensor      slices are brought back and all-gathered             (backward; perhaps more than once)

Autograd holds the `Packed`, and frees it after its backward, with a dropped loss, or after a forward that raised. A finalizer
then only records the slot, since finalizers may run in any thread; the store's next call releases the slot.

Copies of a model share its store and may run in several threads; one thread is inside the store at a time.

The store never packs parameters and views of their memory, small tensors, tensors that require no gradient (masks, positions:
all blocks refer to the same one), and tensors saved while a backward recomputes. A tensor that several checkpoints of a forward
keep, such as the encoder's output in every block of a decoder, is packed once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import OffloadIOError, SwapError, ZeroshardError
from ..seam import DirectComm, Ledger, SavedParameters, abort_peers, memory_of
from ..utils import saved_tensors, torch_compat
from ..utils.one_thread import one_thread
from ..utils.saved_tensors import Outer, Saved
from ..utils.torch_compat import FakeTensor
from .partition import Slices
from .storage import Backing, Kept


class Packed:
    """A tensor in the store. Its strides are restored too, since kernels may sum in another order along other strides."""

    __slots__ = ("__weakref__", "dense", "forward", "kept", "name", "number", "shape", "storage", "stride")

    def __init__(self, tensor: Tensor, dense: bool, kept: Kept, number: int, name: str, forward: int) -> None:
        self.shape, self.stride, self.dense = tensor.shape, tensor.stride(), dense
        self.kept, self.number, self.name, self.forward = kept, number, name, forward
        self.storage = StorageWeakRef(tensor.untyped_storage())  # while this lives, no other storage has its address

    def restore(self, flat: Tensor) -> Tensor:
        """Return the tensor, from its elements in the order of memory, flat: (numel,) or longer."""
        numel = self.shape.numel()
        if self.dense:
            return flat[:numel].as_strided(self.shape, self.stride)
        whole = torch.empty_strided(self.shape, self.stride, dtype=flat.dtype, device=flat.device)
        return whole.copy_(flat[:numel].view(self.shape))


class Store:
    """All packed tensors of one model on this rank.

    Threads: any, one at a time (`turn`): forwards run in the rank's main thread, on a GPU backwards in autograd's.
    Finalizers of tensors run in any thread without the lock, and only append to `_freed`.

    Args:
        model: the model, whose parameters are never packed.
        backing: where slices rest. comm: the ranks that share the activations; None: this rank keeps all.
        prefetch: number of slices that are brought back ahead of use.
        min_numel: tensors of fewer elements are not packed.
        check_equal: compare the values, not only the shapes, that ranks pack (for debugging: it reads everything).
        speaks: whether this rank prints messages.
    """

    def __init__(
        self, model: nn.Module, backing: Backing, comm: DirectComm | None, ledger: Ledger, prefetch: int, min_numel: int,
        check_equal: bool, speaks: bool,
    ) -> None:  # fmt: skip
        self.model, self.backing, self.ledger, self.prefetch, self.min_numel = model, backing, ledger, prefetch, min_numel
        self.slices = Slices(comm, ledger, check_equal)
        self.comm = self.slices.comm
        self.alike: list[str] = []  # names of blocks whose inputs are expected to be of one size, in order
        self.messages: list[str] = []
        self.speaks = speaks
        self.packed, self.unpacked = 0, 0  # number of tensors since the store was made
        self.whole_nbytes = self.whole_peak = 0  # whole bytes of the tensors packed now, and at most
        self.largest_nbytes, self.most = 0, 0  # bytes of the largest tensor; most tensors at a time
        self.closed = False
        self.users = 1  # number of models (deep copies) that use the store
        self._forward, self._number = 0, 0
        self._live: dict[int, Kept] = {}  # by number, in order of packing
        self._known: dict[tuple, weakref.ref[Packed]] = {}  # by `key` in `pack`
        self._freed: deque[tuple[int, tuple, Kept, int]] = deque()  # appended by finalizers: number, key, slice, whole nbytes
        self._ahead: list[Kept] = []
        self.turn = threading.RLock()
        self._parameters: dict[int, StorageWeakRef] = {}  # storages that parameters are views of, by id
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose forwards have run: this one and its copies

    @one_thread
    def __deepcopy__(self, memo: dict) -> Store:
        self.users += 1
        memo[id(self)] = self  # else each part of the copy that refers to the store would count
        return self  # a copy of the model uses the same store

    def __reduce_ex__(self, protocol: object) -> tuple:
        raise ZeroshardError(
            "a model with zs.checkpoint_activations can not be pickled. Save its state_dict(), or first call "
            "zs.checkpoint_activations(model, off=True)."
        )

    @one_thread
    def begin_forward(self, model: nn.Module, args: tuple = ()) -> None:
        """Forward pre-hook of a model: note that its forward begins."""
        self._forward += 1
        self._models.add(model)

    def say(self, text: str) -> None:
        """Record a message, and print it on stderr once."""
        if text not in self.messages:
            self.messages.append(text)
            if self.speaks:
                print(f"zeroshard: {text}", file=sys.stderr)

    # -- pack ------------------------------------------------------------------------------------------------

    @one_thread
    def pack(self, tensor: Tensor, name: str) -> Packed | Saved:
        """Return the object that autograd keeps in place of a checkpoint's input."""
        self._reap()
        if not self._live:
            self._between_steps()
        flat = None if not self._takes(tensor) else _in_order_of_memory(tensor.detach())
        if flat is None:
            return Saved(tensor)
        self.slices.record(self._forward, name, tensor)
        if not self.packed and name in self.alike:  # the very first slice: the disk is checked for the blocks after it, too
            self.backing.foreseen = len(self.alike) - self.alike.index(name) - 1
        # two tensors of a forward share a key only if they have the same elements (while their storage lives)
        key = (torch_compat.storage_id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
               torch_compat.version(tensor), self._forward)  # fmt: skip
        known = self._known[key]() if key in self._known else None
        if known is not None and not known.storage.expired():  # the same tensor, kept by an earlier checkpoint of this forward
            return known
        with torch.no_grad(), self._aborting():
            kept = self.backing.put(*self.slices.cut(flat))
        self._number += 1
        dense = torch_compat.storage_id(flat.untyped_storage()) == torch_compat.storage_id(tensor.untyped_storage())
        packed = Packed(tensor, dense, kept, self._number, name, self._forward)
        self._live[packed.number] = kept
        self._known[key] = weakref.ref(packed)
        # not at the interpreter's exit, after which no call would release the slot
        weakref.finalize(packed, self._freed.append, (packed.number, key, kept, tensor.nbytes)).atexit = False
        self.packed += 1
        self.whole_nbytes += tensor.nbytes
        self.whole_peak = max(self.whole_peak, self.whole_nbytes)
        self.largest_nbytes, self.most = max(self.largest_nbytes, tensor.nbytes), max(self.most, len(self._live))
        return packed

    def _takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is packed. This depends on shapes and on the model only, so it is the same on all ranks."""
        known = (Tensor, FakeTensor) if self.backing.imagines else (Tensor,)
        if type(tensor) not in known or not tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        if tensor.numel() < max(self.min_numel, 1) or torch_compat.storage_id(tensor.untyped_storage()) in self._parameters:
            return False
        if tensor.device.type != self.backing.device.type:
            self.say(
                f"activations on {tensor.device} are not stored: the model was on {self.backing.device} when "
                "zs.checkpoint_activations was called. Move the model before that call."
            )
            return False
        return True

    def _between_steps(self) -> None:
        """Grow the arena if needed, and look up the parameters' storages again. Called when nothing is packed."""
        self.slices.forget()
        message = self.backing.settle()
        if message is not None:
            self.messages.append(message)
            if not message.partition(": ")[2].startswith("0 ->") and self.speaks:  # the first allocation is not printed
                print(f"zeroshard: {message}", file=sys.stderr)
        self._parameters = {}
        for held in map(memory_of, self.model.parameters()):
            if held.layout is torch.strided:
                storage = held.untyped_storage()
                self._parameters[torch_compat.storage_id(storage)] = StorageWeakRef(storage)

    # -- unpack ----------------------------------------------------------------------------------------------

    @one_thread
    def unpack(self, packed: Packed | Saved) -> Tensor:
        """Return a packed tensor in new memory (collective if partitioned)."""
        if isinstance(packed, Saved):
            return packed.restore()
        if self.closed:
            raise ZeroshardError("call backward() before zs.checkpoint_activations(model, off=True), which drops what it needs.")
        self._reap()
        with torch.no_grad(), self._aborting():
            self.slices.agree(packed.forward)
            wanted = [packed.kept]  # and the `prefetch` slices packed before it, which backward needs next
            for number in reversed(self._live):
                if len(wanted) > self.prefetch:
                    break
                if number < packed.number:
                    wanted.append(self._live[number])
            for kept in self._ahead:
                if kept not in wanted:
                    self.backing.done(kept)  # backward went in another order than expected
            self._ahead = wanted
            for kept in wanted:
                self.backing.fetch(kept, wait=kept is packed.kept)
            whole = self.slices.gather(self.backing.get(packed.kept), packed.name)
            self.backing.done(packed.kept)
            self.unpacked += 1
            return packed.restore(whole)

    def _reap(self) -> None:
        """Release the slots of tensors that autograd has freed."""
        while self._freed:
            number, key, kept, nbytes = self._freed.popleft()
            del self._live[number]
            if key in self._known and self._known[key]() is None:
                del self._known[key]
            self.backing.drop(kept)
            self.whole_nbytes -= nbytes

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Context in which a disk failure aborts the Comms of all ranks that may wait for this one, before it is raised."""
        try:
            yield
        except (OffloadIOError, SwapError) as error:
            abort_peers(error, [] if self.comm is None else [self.comm], self._models)
            raise

    @one_thread
    def alive(self) -> int:
        """Return the number of tensors packed now."""
        self._reap()
        return len(self._live)

    @one_thread
    def close(self) -> None:
        """Release the store for one model; the last one frees all memory and files."""
        self._reap()
        self.users -= 1
        if self.users:
            return
        self.closed = True
        self.slices.close()
        self.backing.close()


class InputHooks:
    """Hooks that pack the inputs of checkpoints, and pass other tensors to `outer`, the saved-tensor hooks around them."""

    def __init__(self, store: Store) -> None:
        self.store, self.outer, self.count = store, Outer(), 0

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the tensor.

        The calling frames show whether torch.utils.checkpoint itself saves the tensor. Non-reentrant checkpoints save their inputs
        in a function of that file (torch 2.13: SavedTensor; before: an autograd function), reentrant ones in
        `CheckpointFunction.apply`, called there. Tensors saved inside a checkpoint do not reach these hooks: non-reentrant
        checkpoints have hooks of their own, reentrant ones save nothing.
        """
        passing = (torch.autograd.function.__file__, __file__, inspect.getfile(SavedParameters), saved_tensors.__file__)
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename in passing:
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != torch.utils.checkpoint.__file__:
            return self.outer.pack(tensor).restore
        self.count += 1
        return functools.partial(self.store.unpack, self.store.pack(tensor, f"checkpoint input {self.count}"))


def _in_order_of_memory(tensor: Tensor) -> Tensor | None:
    """Return all elements as one flat tensor: a view if they lie without gaps, else a copy. None if elements share memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    extent = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < extent:
            return None  # expanded: a copy would take more memory than the tensor
        extent = stride * length
    if extent == tensor.numel():
        return tensor.as_strided((extent,), (1,))
    return tensor.contiguous().view(-1)
