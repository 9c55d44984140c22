"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .assembly.registering import register
from .axes.along_axis import Line
from .comm.wrapped import WrappedComm
from .config import Config, Tier
from .diagnostics.aborting import abort_peers
from .engine import verbs
from .engine.comm.base import Collective, Comm, DirectComm
from .engine.comm.control import Sent, operation
from .engine.comm.messages import decode, encode, exchange_values
from .engine.comm.pool import StagingPool
from .engine.comm.streams import streams_for
from .engine.comm.sums import GPU_CHUNK_NUMEL, RECEIVED_NBYTES
from .engine.flat_layout import ALIGNMENT, round_up
from .engine.inner_optimizer import Options, State, inner_copy
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
)
from .engine.masters import masters_shown
from .engine.mixed_precision import Progress
from .engine.parameter import ParamSpec
from .engine.prefetch import most_gathered
from .engine.rest import Links, Rest
from .engine.runtime import FIRST_USE, Runtime, runtime_of
from .engine.saved_parameters import SavedParameters
from .engine.sizes import BUFFERS, Group, rests_away
from .engine.topology import Parts, Topology, needed
from .engine.user_hooks import ONE_OPTIMIZER
from .guard import telling
from .guard.uneven import Batch, Together, joining
from .packing.codecs import Codec
from .policies import LARGE_FRACTION, ROOT, collect, find_blocks, partition
from .reports.snapshot import Snapshot, snapshot_of
from .state.parameter_info import ParameterInfo, info_of, memory_of
from .state.slices import NamedPart, StateSlice, loaded, slices_of
from .state.state_loading import Optimizers, StatesAtRest, kind_of
from .state.tied_copy import TiedCopy
from .tensor.attributes import NOT_SHARDED, stays_whole
from .tensor.chunks import Box, boxes_of, overlap
from .tensor.home import Shown
from .tensor.part import Part
from .tensor.sharded_tensor import ReplicatedParameter, ShardedParameter, ShardedTensor
from .tensor.state_column import StateColumn
from .tiers.pool import BufferPool
from .tiers.rehearsal import Rehearsal, copy_rates, rehearsal
from .utils.registry import Registered
from .utils.work import OVER, Work
from .values import take_interface
from .values.averages import Averages
from .values.by_hand import HeldGradients, ModuleUnits
from .values.init_context import generators_of_rank_0

__all__ = [  # noqa: RUF022  # by subject
    # a sharded model
    "Engine", "NamedPart", "ParamSpec", "ParameterInfo", "Snapshot", "StateSlice", "FIRST_USE", "abort_peers", "ally", "engine_behind",
    "engine_of", "find_engine", "info_of", "loaded", "memory_of", "masters_shown",
    # objects that an engine returns, each for one kind of work
    "HeldGradients", "ModuleUnits", "StatesAtRest", "TiedCopy",
    # what bytes are held for, and who is told of them
    "AVERAGES", "GATHERED", "GRADIENTS", "MASTERS", "OF_ACTIVATIONS", "OPTIMIZER", "PARAMETERS", "PARTIAL", "RESIDUALS",
    "SECONDARY", "STAGING", "Ledger", "Observer", "Traffic", "listener", "making",
    # ranks and what they say to each other
    "Collective", "Comm", "DirectComm", "Parts", "Sent", "Topology", "decode", "encode", "exchange_values", "needed", "operation",
    "streams_for",
    # what a program adds by name: wire formats, resting places, communicators
    "Codec", "OVER", "Registered", "Rest", "Work", "WrappedComm", "register",
    # memory of constant size, and copies between tiers
    "BufferPool", "Links", "Rehearsal", "StagingPool",
    # tensors of which a rank holds a slice, and parts of larger ones
    "Box", "NOT_SHARDED", "Part", "ReplicatedParameter", "SavedParameters", "ShardedParameter", "ShardedTensor", "Shown", "StateColumn", "boxes_of", "overlap", "stays_whole",
    # optimizers
    "ONE_OPTIMIZER", "Optimizers", "Options", "State", "inner_copy", "kind_of",
    # how a model is laid out, for formulas
    "ALIGNMENT", "BUFFERS", "GPU_CHUNK_NUMEL", "Group", "LARGE_FRACTION", "RECEIVED_NBYTES", "ROOT", "collect", "find_blocks",
    "most_gathered", "partition", "rests_away", "round_up",
]  # fmt: skip


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    Its members, by subject: the model, its ranks, what they hold, units, states, optimizer and step, gradients, uneven data, the rest.
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
    def config(self) -> Config:
        """The model's configuration."""
        return self._runtime.config

    @property
    def closed(self) -> bool:
        """True after zs.close."""
        return self._runtime.closed

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which the model casts floating-point inputs; None where it casts none."""
        return self._runtime.input_dtype

    @property
    def separate(self) -> bool:
        """True if the device has memory of its own, so that host and device are two tiers."""
        return self._runtime.tiers.separate

    @property
    def replicated(self) -> bool:
        """True if every rank steps all of the parameters: stage 0. The model must have an optimizer."""
        return self._runtime.optimizers.cores[0].replicated

    @property
    def gathers(self) -> bool:
        """True if each forward gathers some units (stage 3)."""
        return any(unit.sharded for unit in self._runtime.units)

    @property
    def weight(self) -> float | None:
        """The weight of the backward that runs (`zs.backward`); None if it has none."""
        return self._runtime.account.weighing

    @property
    def ranks(self) -> DirectComm:
        """The Comm of the data-parallel ranks, which train the same part of the model on other data. All of them call its methods."""
        return self._runtime.comm

    @property
    def world(self) -> DirectComm:
        """The Comm of all ranks that train the model, on whatever part of it."""
        return self._runtime.topology.world

    @property
    def topology(self) -> Topology:
        """The model's Comms, and which ranks hold which part of it (`places`, `stages`; `place`, `stage`: this rank's). Only read it."""
        return self._runtime.topology

    def line(self, axis: str, ranks: Parts) -> Line:
        """Open the line of an axis that this rank is in (collective). ranks: those of the mesh along each line of it."""
        return Line(self._runtime, axis, ranks)

    def snapshot(self) -> Snapshot:
        """Return what this rank holds, in bytes, what it has sent and moved so far, and what formulas need (not collective).

        Raise ConfigError if the model's optimizer was made since zs.shard and is refused.
        """
        return snapshot_of(self._runtime)

    @property
    def ledger(self) -> Ledger:
        """The record of the bytes that this rank holds, sends and moves."""
        return self._runtime.tiers.ledger

    def observe(self, observer: Observer) -> RemovableHandle:
        """Tell an observer of each allocation, collective and copy of this rank from now on, until `remove()` of the handle."""
        return self._runtime.tiers.ledger.observe(observer)

    def note(self, text: str) -> None:
        """Add a line to the notes of `zs.report`, once."""
        self._runtime.schedule.note(text)

    def units(self, modules: Collection[nn.Module]) -> ModuleUnits:
        """Return the units that forwards of these modules gather, to gather and release them by hand."""
        return ModuleUnits(self._runtime, modules)

    def modules_of_units(self) -> list[tuple[str, list[nn.Module]]]:
        """Return the name of each unit, and the modules whose forwards gather it."""
        return [(unit.name, list(unit.modules)) for unit in self._runtime.units]

    def computed_parameters(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each sharded parameter with the tensor that stands in its place while it is gathered."""
        groups = [group for group in self._runtime.groups if group.values.sharded]
        return [pair for group in groups for pair in zip(group.params, group.compute, strict=True)]

    def show(self, shown: Shown) -> None:
        """Let sharded parameters show a DeviceMesh and placements, as DTensors do, and be read by any operation (collective)."""
        self._runtime.shown = shown

    def draw_alike(self) -> None:
        """Let draws in place on sharded parameters be from the default generator of the stage's first rank; its ranks then meet."""
        peers = self._runtime.topology.peers  # stages have other parameters, and another number of draws
        self._runtime.drawing = lambda: generators_of_rank_0(peers, "draws of parameters", in_turn=True)

    def slices(self, *kinds: str) -> list[StateSlice]:
        """Return this rank's slices of the model's states, by name; not collective, and it waits for nothing.

        kinds, each in the order of the model's units (of optimizer states: of its groups):

            "value"             parameters as they rest
            "master"            what the optimizer steps: fp32 masters, or values where there are none
            "optimizer"         all states of the model's optimizer, of kinds "optimizer:exp_avg" and so on; none before the first step
            "optimizer:NAME"    one of them
            "average:NUMBER"    averages of the trained parameters; the number counts calls of zs.ema

        Raise ConfigError for another kind.
        """
        return slices_of(self._runtime, kinds)

    @property
    def states(self) -> StatesAtRest:
        """The states of the model for who saves and loads them: waits, checks, and the loads of optimizers' states."""
        return StatesAtRest(self._runtime)

    @property
    def saver(self) -> Any:
        """The object that saves in the background, or None: writes to states call its `await_copy()`, zs.close its `close()`."""
        return self._runtime.gate.saver

    @saver.setter
    def saver(self, saver: Any) -> None:
        self._runtime.gate.saver = saver

    def begin(self, verb: str, *also: str, note: bool = True) -> None:
        """Raise unless the model is as a public function needs it. verb: its name, as in the table of docs/reference/errors.md.

        also, note: see `engine.verbs.begin`.
        """
        verbs.begin(self._runtime, verb, *also, note=note)

    def staging_pool(self, nbytes: int) -> BufferPool:
        """Return a pool, still empty, of host buffers of so many bytes each, counted in this model's ledger."""
        return BufferPool(self.ledger, 0, nbytes, self._runtime.tiers.host_buffer, Tier.HOST)

    def beside_comm(self) -> AbstractContextManager[None]:
        """Context in which a second thread, or code that may not communicate, reads tiers: failures are raised in it alone."""
        return self._runtime.tiers.beside_comm()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The sharded optimizer, or None; one made since zs.shard is taken over now. Raise ConfigError if there are several."""
        return self._runtime.optimizers.one

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All sharded optimizers of the model, in the order of their first parameters."""
        return list(self._runtime.optimizers)

    def expected_optimizer(self) -> str:
        """Return what to say where the model's optimizer is needed, and there is none."""
        return self._runtime.optimizers.text_without_one()

    @property
    def progress(self) -> Progress:
        """The number of steps, and the loss scale with its rule (`scaler`, None unless precision is fp16), which checkpoints store."""
        return self._runtime.progress

    def after_step(self, function: Callable[[], object]) -> RemovableHandle:
        """Call a function after each step of the optimizer that was not skipped, until `remove()` of what is returned."""
        functions = self._runtime.optimizers.core.after_step
        handle = RemovableHandle(functions)
        functions[handle.id] = function
        return handle

    def averages(self) -> Averages:
        """Return averages of the trained parameters, which begin as copies of them, on the tier of the optimizer's states."""
        return Averages(self._runtime)

    def publish(self) -> None:
        """Send replicated parameters that each rank steps a slice of to all ranks, as every step does at its end (collective)."""
        self._runtime.optimizers.cores[0].publish([group for group in self._runtime.groups if group.trainable])

    def rehearse_step(self, accumulate: int = 1) -> Rehearsal:
        """Return a rehearsal of the longest run that the host steps, on zeros of its own. accumulate: backwards of a step."""
        return rehearsal(self._runtime.optimizers.core, accumulate)

    def copy_rates(self) -> tuple[float, float]:
        """Measure the bytes per second from the device to pinned host memory and back."""
        return copy_rates(self._runtime.tiers)

    def read_ahead(self) -> None:
        """Go on to read the next step's states from disk, as forwards and backwards do."""
        self._runtime.gate.read_ahead()

    @property
    def held_gradients(self) -> HeldGradients:
        """The gradients that backwards, or a pipeline by hand, sum on this rank before they are reduced."""
        return HeldGradients(self._runtime)

    def flush(self) -> None:
        """Reduce the gradients that were summed locally (collective)."""
        self._runtime.flush()

    def unused_parameters(self) -> list[str]:
        """Reduce the gradients that were summed locally; return the names of trained parameters without one (collective)."""
        self._runtime.flush()
        trained = [group for group in self._runtime.groups if group.trainable]
        return [spec.name for group in trained for spec, active in zip(group.specs, group.active, strict=True) if not active]

    def zero_grad(self) -> None:
        """Drop the model's gradients."""
        self._runtime.zero_grad()

    def recover(self) -> None:
        """Clear what a forward or backward that raised has left on this rank, and drop the gradients."""
        self._runtime.recover()
        self._runtime.zero_grad()

    def tied_copy(self, param: nn.Parameter, counted: bool) -> TiedCopy:
        """Return access to a parameter of which other stages hold a copy. counted: norms count this one."""
        return TiedCopy(self._runtime, param, counted)

    def joining(self) -> AbstractContextManager[None]:
        """Run a training loop inside, then take part in the other ranks' loops until all have ended (collective; see `zs.join`)."""
        return joining(self._runtime)

    def stopping_together(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return an iterable over a loader that ends on every rank with the shortest loader (see `zs.stop_together`)."""
        return Together(self._runtime, loader)

    def refuse_ended(self, verb: str) -> None:
        """Raise ZeroshardError if the data of some rank has ended (`zs.join`), so that it can not take part in `verb`."""
        self._runtime.attendance.refuse(verb)

    def telling(self, what: str) -> AbstractContextManager[None]:
        """Context in which an error of no memory is replaced by one that says what was held, `what` ran, and what helps."""
        return telling(self._runtime, what)

    def show_as_module(self) -> None:
        """Undo that the model has the interface of DistributedDataParallel: it is of the program's own class again."""
        take_interface(self._runtime)

    def also_remove(self, handles: Iterable[Any]) -> None:
        """Let `zs.close` remove hooks as well; a handle is any object with a method `remove`."""
        self._runtime.handles += handles

    def abandon(self) -> None:
        """Remove this run's files and buffers without reading anything back: the model can not be used any more."""
        self._runtime.tiers.close()


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model, also of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, ZeroshardError if it is not sharded.
    """
    return Engine(runtime_of(model))


def engine_behind(optimizer: Any) -> Engine:
    """Return the engine of the model that a sharded optimizer steps; AttributeError for another optimizer."""
    return Engine(optimizer.core.runtime)


def find_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a module that was itself given to zs.shard, else None."""
    runtime = model.__dict__.get("_zeroshard")
    return None if runtime is None else Engine(runtime)


def ally(engines: Iterable[Engine]) -> None:
    """Let the optimizers of models that train together share one gradient norm, and one decision to skip a step."""
    cores = [engine.optimizer.core for engine in engines if engine.optimizer is not None]  # type: ignore[attr-defined]
    for core in cores:
        core.allied = cores
