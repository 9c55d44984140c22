"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .axes.along_axis import Line
from .comm.backend_select import OWN_COMMS
from .comm.wrapped import WrappedComm
from .config import OWN_RESTS
from .engine import verbs
from .engine.auto_wrap import LARGE_FRACTION, ROOT, collect, find_blocks, partition
from .engine.comm.base import Collective, Comm, DirectComm
from .engine.comm.control import Control, Sent, operation
from .engine.comm.messages import decode, encode, exchange_values
from .engine.comm.pool import StagingPool
from .engine.comm.streams import streams_for
from .engine.comm.sums import GPU_CHUNK_NUMEL, RECEIVED_NBYTES
from .engine.flat_layout import ALIGNMENT, round_up
from .engine.ledger import (
    AVERAGES,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OF_ACTIVATIONS,
    OPTIMIZER,
    PARAMETERS,
    PARTIAL,
    RESIDUALS,
    SECONDARY,
    STAGING,
    Ledger,
    Observer,
    Traffic,
    listener,
    making,
)  # fmt: skip
from .engine.mixed_precision import LossScaler
from .engine.parameter import ParamHome
from .engine.part import Part
from .engine.prefetch import most_gathered
from .engine.rest import Links, Rest
from .engine.runtime import Runtime, runtime_of
from .engine.sizes import BUFFERS, Group, rests_away
from .engine.tensor.chunks import Box, boxes_of, overlap
from .engine.tensor.sharded_tensor import ReplicatedParameter, ShardedParameter, ShardedTensor
from .engine.tensor.state_column import StateColumn
from .engine.topology import Parts, Topology, needed
from .errors import ConfigError
from .packing.codecs import Codec
from .reports.snapshot import Snapshot, snapshot_of
from .state.slices import NamedPart, StateSlice, loaded, slices_of
from .tiers.pool import BufferPool
from .utils.compression import OWN_CODECS
from .utils.registry import Registered
from .utils.work import OVER, Work

__all__ = [  # noqa: RUF022  # by subject
    # a sharded model
    "Engine", "NamedPart", "Snapshot", "StateSlice", "abort_peers", "engine_of", "find_engine", "loaded", "memory_of",
    # what bytes are held for, and who is told of them
    "AVERAGES", "GATHERED", "GRADIENTS", "MASTERS", "OF_ACTIVATIONS", "OPTIMIZER", "PARAMETERS", "PARTIAL", "RESIDUALS",
    "SECONDARY", "STAGING", "Ledger", "Observer", "Traffic", "listener", "making",
    # ranks and what they say to each other
    "Collective", "Comm", "DirectComm", "Parts", "Sent", "Topology", "decode", "encode", "exchange_values", "needed", "operation",
    "streams_for",
    # what a program adds by name: wire formats, resting places, communicators
    "Codec", "OVER", "Registered", "Rest", "Work", "WrappedComm", "register",
    # memory of constant size, and copies between tiers
    "BufferPool", "Links", "StagingPool",
    # tensors of which a rank holds a slice, and parts of larger ones
    "Box", "Part", "ReplicatedParameter", "ShardedParameter", "ShardedTensor", "StateColumn", "boxes_of", "overlap",
    # how a model is laid out, for formulas
    "ALIGNMENT", "BUFFERS", "GPU_CHUNK_NUMEL", "Group", "LARGE_FRACTION", "RECEIVED_NBYTES", "ROOT", "collect", "find_blocks",
    "most_gathered", "partition", "rests_away", "round_up",
]  # fmt: skip


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    The rank's own thread uses it, outside of forwards and backwards of the model unless a method says otherwise.
    """

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def model(self) -> nn.Module:
        """The sharded model itself, without the wrapper of `torch.compile`."""
        return self._runtime.model

    @property
    def ranks(self) -> DirectComm:
        """The Comm of the data-parallel ranks, which train the same part of the model on other data. All of them call its methods."""
        return self._runtime.comm

    @property
    def world(self) -> DirectComm:
        """The Comm of all ranks that train the model, on whatever part of it."""
        return self._runtime.topology.world

    @property
    def stages(self) -> int:
        """Number of pipeline stages; ranks of different stages have different modules."""
        return len(self._runtime.topology.stages)

    @property
    def divided(self) -> bool:
        """True if a rank has only a part of the model: a stage, layers cut by tensor parallelism, some of the experts."""
        return len(self._runtime.topology.places) > 1

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scale with its rule; None unless precision is fp16. `loss_scale` is the factor alone."""
        return self._runtime.progress.scaler

    @property
    def loss_scale(self) -> float:
        """Factor by which gradients are multiplied as they enter the model; 1 unless precision is fp16."""
        return self._runtime.progress.loss_scale

    @property
    def weight(self) -> float | None:
        """The weight of the backward that runs (`zs.backward`); None if it has none."""
        return self._runtime.account.weighing

    def snapshot(self) -> Snapshot:
        """Return what this rank holds, in bytes, what it has sent and moved so far, and what formulas need (not collective).

        Raise ConfigError if the model's optimizer was made since zs.shard and is refused.
        """
        return snapshot_of(self._runtime)

    def slices(self, *kinds: str) -> list[StateSlice]:
        """Return this rank's slices of the model's states, by name; not collective, and it waits for nothing.

            for each in engine.slices("master", "optimizer"):
                if each.counted and not each.single:
                    print(each.kind, each.name, each.extents, f"[{each.start}, {each.stop})", each.host(0, each.stop - each.start))

        kinds, each in the order of the model's units (of optimizer states: of its groups):

            "value"             parameters as they rest
            "master"            what the optimizer steps: fp32 masters, or values where there are none
            "optimizer"         all states of the model's optimizer, of kinds "optimizer:exp_avg" and so on; none before the first step
            "optimizer:NAME"    one of them
            "average:NUMBER"    averages of the trained parameters; the number counts calls of zs.ema

        Raise ConfigError for another kind.
        """
        return slices_of(self._runtime, kinds)

    def begin(self, verb: str, *also: str, note: bool = True) -> None:
        """Raise unless the model is as a public function needs it. verb: its name, as in the table of docs/reference/errors.md.

        also, note: see `engine.verbs.begin`.
        """
        verbs.begin(self._runtime, verb, *also, note=note)

    def observe(self, observer: Observer) -> RemovableHandle:
        """Tell an observer of each allocation, collective and copy of this rank from now on, until `remove()` of the handle.

        class Gathers(Observer):
            def sent(self, kind, label, inside, between):
                if kind.startswith("gather"):
                    print(label, inside + between)

        handle = engine_of(model).observe(Gathers())
        """
        return self._runtime.tiers.ledger.observe(observer)

    def note(self, text: str) -> None:
        """Add a line to the notes of `zs.report`, once."""
        self._runtime.schedule.note(text)

    def line(self, axis: str, ranks: Parts) -> Line:
        """Open the line of an axis that this rank is in (collective). ranks: those of the mesh along each line of it."""
        return Line(self._runtime, axis, ranks)

    def also_remove(self, handles: Iterable[Any]) -> None:
        """Let `zs.close` remove hooks as well; a handle is any object with a method `remove`."""
        self._runtime.handles += handles

    def unused_parameters(self) -> list[str]:
        """Reduce the gradients that were summed locally; return the names of trained parameters without one (collective)."""
        self._runtime.flush()
        trained = [group for group in self._runtime.groups if group.trainable]
        return [spec.name for group in trained for spec, active in zip(group.specs, group.active, strict=True) if not active]


def engine_of(model: nn.Module | torch.optim.Optimizer) -> Engine:
    """Return the engine of a sharded model (also of the one that `torch.compile(model)` wraps), or of a sharded optimizer.

    Raise TypeError if it is no nn.Module, ZeroshardError if it is not sharded, AttributeError for another optimizer.
    """
    return Engine(model.core.runtime if isinstance(model, torch.optim.Optimizer) else runtime_of(model))  # type: ignore[attr-defined]


def find_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a module that was itself given to zs.shard, else None."""
    runtime = model.__dict__.get("_zeroshard")
    return None if runtime is None else Engine(runtime)


def memory_of(param: nn.Parameter) -> Tensor:
    """Return the tensor whose memory a parameter is a view of while it is gathered; the parameter itself where it is not sharded."""
    home = getattr(param, "_home", None)
    return home.group.values.full if isinstance(home, ParamHome) and home.group.values.sharded else param


def abort_peers(error: Exception, comms: Iterable[Control], models: Iterable[nn.Module]) -> None:
    """Send an error to all ranks that may wait for this one: those of `comms`, and those that share parameters of the models now."""
    found = list(comms)
    for model in models:
        found += [engine.ranks for engine in map(find_engine, model.modules()) if engine is not None]
        homes = [getattr(param, "_home", None) for param in model.parameters()]
        found += [home.group.comm.control for home in homes if isinstance(home, ParamHome)]
    for comm in {id(comm): comm for comm in found}.values():
        if comm.world_size > 1:  # a copy of the error has no traceback, which would keep buffers alive
            comm.abort(f"rank {comm.rank}: {error}", copy.copy(error))


def register(
    name: str, *, codec: Codec | None = None, rest: type[Rest] | None = None, comm: type[WrappedComm] | None = None
) -> Registered:
    """Give a codec, a resting place or a communicator a name, by which options of this process then know it, until `remove()` of
    what is returned. Every rank registers the same, before zs.shard.

    codec: sends gradients or parameters: zero_quantized_gradients=name, zero_quantized_weights=name, zs.Compression(name, ...).
    rest: holds optimizer states and masters: offload_optimizer=name, zs.Offload(name, ...). The ledger and the check of the host's
        memory count its elements at their full size.
    comm: is put around the communicator of all ranks: comm=name, or ZEROSHARD_COMM.

    Raise ConfigError if the name is one of zeroshard's or registered already, if not one thing is given, or if the thing is none.
    """
    given = [thing for thing in (codec, rest, comm) if thing is not None]
    if len(given) != 1:
        raise ConfigError(f"register: expected one of codec=, rest= and comm=, got {len(given)} of them.")
    if codec is not None:
        if not isinstance(codec, Codec):
            raise ConfigError(f"register: codec: expected an object of a subclass of zeroshard.seam.Codec, got {codec!r}.")
        handle = OWN_CODECS.add(name, codec)
        codec.name = name
        return handle
    what, kind, found, registry = ("rest", Rest, rest, OWN_RESTS) if rest is not None else ("comm", WrappedComm, comm, OWN_COMMS)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"register: {what}: expected a subclass of zeroshard.seam.{kind.__name__}, got {found!r}.")
    if inspect.isabstract(found):
        raise ConfigError(f"register: {what}: {found.__name__} lacks {', '.join(sorted(found.__abstractmethods__))}.")
    return registry.add(name, found)
