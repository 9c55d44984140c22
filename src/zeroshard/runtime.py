"""The runtime: connects what happens in an nn.Module and in autograd to units and schedule.

    forward    pre-hook: gather, put compute parameters in        hook: take them out, release, watch the outputs
    backward   gradient of an output: gather again                last gradient of the unit: reduce, release
    its end    one callback: units without (all) gradients join with zeros, reductions are waited for

No wrapper module and no full-backward hooks. A unit that took no part on this rank but did on another joins the
reduction with zeros: at the end of backward ranks exchange which units and parameters they had gradients for. What
depends on the stage is in the units' placements, never here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .comm.base import Comm
from .compat import idle_nodes
from .config import Config
from .errors import CheckpointError, ModelClosed, ShardedAccessError, ShardedWriteError, ZeroshardError
from .graph import Marked, ended, in_backward, memory_of, next_node, nodes_since, running_forward, transforming
from .memory.ledger import Ledger
from .memory.pool import StagingPool
from .memory.tiers import Tiers
from .precision import LossScaler, cast_floating, find_tensors, look_through, map_tensors
from .reductions import Reductions
from .schedule import Schedule, Visit
from .sharded import ShardedTensor, clear_local_grad, local_grad
from .tiles import Tile
from .unit import ParamGroup, Phase, Unit
from .watch import ModelWatch

_LOOKAHEAD = 8  # visits: bounds the host work of prefetching when units are tiny


class _End:
    """What autograd calls at the end of one backward: it keeps this for as long as that backward runs, or until it has failed."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self) -> None:
        if self.runtime._active:
            self.runtime.end_backward()


class Runtime:
    """Everything that zeroshard keeps about one sharded model. `runtime_of(model)` finds it."""

    def __init__(
        self, model: nn.Module, config: Config, comm: Comm, units: list[Unit], ledger: Ledger, pool: StagingPool,
        tiers: Tiers,
    ) -> None:  # fmt: skip
        self.model, self.config, self.comm, self.units, self.ledger, self.pool, self.tiers = (
            model, config, comm, units, ledger, pool, tiers,
        )  # fmt: skip
        self.schedule = Schedule([unit.name for unit in units])
        self.groups: list[ParamGroup] = [group for unit in units for group in unit.groups]
        for group in self.groups:
            group.runtime = self
        self.optimizer: Any = None
        self.saver: Any = None  # of checkpoints
        self.unusable = ""  # why, where a load ended half-way
        self.reductions = Reductions(units, config, comm, self._poll)
        self._alone = (comm.world_size == 1 or comm.imagined) and not comm.ordered
        self.sync = True  # False inside zs.accumulate
        self.accumulated = False  # there was a zs.accumulate since the last reduced backward
        self.closed = False
        self.weight = 0.0  # of this rank's weighted backwards since the last zero_grad (zs.backward)
        self.weighing = False  # inside zs.backward
        self.unweighted = False  # this rank had a plain backward since the last zero_grad
        self.steps = 0
        self.scaler: LossScaler | None = None
        if config.precision == "fp16":
            dynamic = config.loss_scale == "dynamic"
            scale = config.initial_loss_scale if dynamic else float(config.loss_scale)
            self.scaler = LossScaler(scale, dynamic, config.loss_scale_window)
        self.messages: deque[str] = deque(maxlen=100)
        self._model_watch = ModelWatch(model, self.groups)
        self._active = False  # inside a backward
        self._training = False  # inside a forward that was entered with gradients
        self._running: list[FrameType | None] = []  # forwards of the whole model
        self._scaled = False  # the loss scale was applied in this backward
        self._graphed = False  # this backward has create_graph=True
        self.completed = 0  # backwards since the last zero_grad
        self.lost = False  # the gradients of some of them, with one that failed
        self.unscaled = False  # reduced gradients have been divided by the loss scale
        self._ending: Callable[[], _End | None] = lambda: None  # the end of the backward that runs
        self._arrived: set[int] = set()  # parameters that got their gradient in this backward
        self._kept: list[Unit] = []  # units whose memory an output still refers to
        self._hidden = 0  # nodes of autograd's graph so far that no output of their unit leads to
        self._kept_before = 0  # how many of them when this forward began
        self.handles: list[Any] = []  # hooks, for close
        self.lend = torch.compiler.disable(self._lend)  # what a compiled block computes with others' parameters is not traced
        self.compiled: list[tuple[nn.Module, Any]] = []

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ShardedAccessError(
            f"a sharded {type(self.model).__name__} can not be copied or pickled. Copy it before zs.shard(), or take "
            "zs.full_state_dict(model)."
        )

    def check_model(self) -> None:
        """Raise ModelChanged where the model's parameters are not those of zs.shard()."""
        gathered = any(unit.pinned for unit in self.units)
        self._model_watch.check(gathered, thoroughly=True)
        for unit in () if gathered else self.units:
            unit.check_placed()

    # -- forward ---------------------------------------------------------------------------------------------

    def root_enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before the model's own forward: state left by a failed backward goes, inputs are cast."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close(); zs.shard() it again to train it sharded.")
        if self.unusable:
            raise CheckpointError(self.unusable)
        self.tiers.check()
        self.recover()
        if not self._active:
            self._training = torch.is_grad_enabled()
            if self._training or any(unit.outdated for unit in self._kept):
                self._release_kept()
            self._kept_before = len(self._kept)  # by a forward whose backward may follow an evaluation
            self._model_watch.check(any(unit.pinned for unit in self.units))
            for unit in self.units:
                unit.check_unchanged()
        if self.config.precision != "fp32":
            args, kwargs = cast_floating((args, kwargs), self.config.compute_dtype)
        self._running.append(running_forward())
        return args, kwargs

    def root_exit(self, output: Any) -> Any:
        """After the model's own forward: fp16 outputs leave as fp32, and their gradients enter scaled (None: by an exception)."""
        del self._running[-1:]  # it may have been refused before it began
        self._training = False
        if not torch.is_grad_enabled():
            self.schedule.end(training=False)
            if not self._active:
                self._release_viewed(output)
        else:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._reached)
        if self.scaler is None or output is None:
            return output
        output = cast_floating(output, torch.float32)
        return map_tensors(self._scale_gradient, output)

    def _reached(self, _: Tensor) -> None:
        """A gradient enters the model: the backward that ends the step, not one that reentrant checkpointing nests in it."""
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")
        self._await_end()

    def _scale_gradient(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = tensor.view_as(tensor) if tensor.is_leaf else tensor
            tensor.register_hook(self._scale)
        return tensor

    def _scale(self, grad: Tensor) -> Tensor:
        self._scaled = True
        assert self.scaler is not None
        return grad * self.scaler.scale

    def enter(self, unit: Unit) -> None:
        """A forward inside the unit begins."""
        if unit.depth == 0 and not unit.pinned and unit.sharded:
            if unit.memories and transforming():
                raise ShardedAccessError(
                    f"{unit.name}: torch.func differentiates a model of which each rank holds slices. Gather it around that: "
                    "`with zs.gathered(model):`."
                )
            self._open(unit, backward=unit.in_backward)
            if torch.is_grad_enabled():
                unit.first_node, unit.first_hidden = next_node(), self._hidden + idle_nodes()
        unit.depth += 1

    def exit(self, unit: Unit, output: Any) -> None:
        """A forward inside the unit has ended (output None: by an exception)."""
        if unit.depth == 0:
            return  # it was refused before it began
        unit.depth -= 1
        if unit.depth > 0 or unit.pinned:
            return
        if output is not None:
            unit.check_unwritten()
            self._gather_staged()
            self._watch(unit, output)
            if self._active and unit.sharded and torch.is_grad_enabled() and not isinstance(unit.modules[0], Tile):
                unit.in_backward = True  # recomputation: the unit's backward follows at once; before a tile's, other tiles'
        if unit.in_backward or not unit.sharded:
            return
        unit.swap_out()
        if not self.schedule.repeats(Visit(unit.number, False), self._in_training()) and not self._lives_on(unit):
            self._release(unit)

    def _lend(self, unit: Unit, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation with a parameter of the unit, as a forward of it; NotImplemented where no forward runs (nor is run again)."""
        running = bool(self._running) or any(each.depth for each in self.units) or (self._active and in_backward())
        if unit.pinned or not running:
            return NotImplemented
        return self.run_inside(unit, lambda *args, **kwargs: func(*unit.as_computed(args), **unit.as_computed(kwargs)), args, kwargs)

    def run_inside(self, unit: Unit, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A forward of the unit that is not that of one of its modules: a compiled call, an operation with its parameters."""
        outermost = unit.depth == 0
        self.enter(unit)
        output = None
        try:
            if outermost and unit.marked:
                args, kwargs = self.mark_inputs(unit, args, kwargs)
            output = function(*args, **kwargs)
        finally:
            self.exit(unit, output)
        return output

    def _lives_on(self, unit: Unit) -> bool:
        """True if the unit is needed again before more than `max_live_parameters` elements have been gathered."""
        left = self.config.max_live_parameters - unit.gathered_numel
        seen = {unit.number}
        for visit in self.schedule.upcoming(self._in_training()) if left >= 0 else ():
            if visit.unit == unit.number:
                return True
            if visit.unit not in seen:
                seen.add(visit.unit)
                left -= self.units[visit.unit].gathered_numel
            if left < 0:
                return False
        return False

    def _in_training(self) -> bool:
        """Which record a visit belongs to: reentrant checkpointing runs parts of a training step without gradients."""
        return torch.is_grad_enabled() or self._training or self._active

    def mark_inputs(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Units with frozen parameters: find out when their backward is over by marking the inputs."""
        tensors = [t for t in find_tensors((args, kwargs)) if t.requires_grad and not isinstance(t, ShardedTensor)]
        if not tensors or not torch.is_grad_enabled() or not unit.sharded:
            return args, kwargs

        def done() -> None:
            if not unit.arrived or not unit.expected:
                self._leave_backward(unit)

        marked = dict(zip(map(id, tensors), Marked.apply(done, *tensors), strict=True))
        swap = lambda tensor: marked.get(id(tensor), tensor)  # noqa: E731
        return tuple(map_tensors(swap, a) for a in args), {k: map_tensors(swap, v) for k, v in kwargs.items()}

    def _open(self, unit: Unit, backward: bool) -> None:
        """Make the unit usable now, and start the gathers of what comes next."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close().")
        training = backward or self._in_training()
        message = self.schedule.visit(Visit(unit.number, backward), training)
        if message is not None:
            self.messages.append(message)
        unit.ready()
        unit.swap_in()
        self._poll()
        if self.config.overlap:
            self._prefetch(training)

    def _prefetch(self, training: bool) -> None:
        """Fetch ahead from other tiers as far as buffers allow, and gather ahead: the next unit, more within the budget.

        Over shared memory a gather is a copy by this rank: nothing is won by an early one. What comes from another tier is
        gathered here only where there are no peers: whether it has arrived is a matter of each rank's disk, and a gather
        that only some ranks have begun could not be dropped again. Ordered comms gather it at `_gather_staged`.
        """
        upcoming = [self.units[visit.unit] for visit in self.schedule.upcoming(training)[:_LOOKAHEAD]]
        upcoming = [unit for unit in dict.fromkeys(upcoming) if unit.phase is not Phase.READY]  # those are still in use
        for unit in upcoming:
            if not unit.fetch():
                break
        ahead = 0
        for unit in upcoming:
            if ahead and ahead + unit.gathered_nbytes > self.config.prefetch_limit_nbytes:
                return
            ahead += unit.gathered_nbytes
            if unit.fetched and self._alone if unit.staged else not self.comm.shares_memory:
                unit.gather()

    def _gather_staged(self) -> None:
        """Ordered comms: gather the next unit that rests elsewhere, now that the device has been given its work."""
        if not self.comm.ordered or not self.config.overlap:
            return
        for visit in self.schedule.upcoming(self._in_training())[:1]:
            unit = self.units[visit.unit]
            if unit.staged and unit.phase is not Phase.READY:
                unit.gather()

    def _watch(self, unit: Unit, output: Any) -> None:
        """Let the first gradient that reaches an output of the unit gather it again; keep what an output still refers to."""
        training, memories = torch.is_grad_enabled(), unit.memories
        if not unit.sharded or not (training or memories):
            return

        seen = unit.writes

        def arrived(_: Any) -> None:
            if unit.writes != seen:
                raise ShardedWriteError(
                    f"{unit.name}: its parameters were written (by a step, a load, in place) between a forward and its backward, whose "
                    "gradients would be neither of the old values nor of the new ones. Call backward first, or the forward again."
                )
            self.begin_unit_backward(unit)

        found = False
        tensors, complete = look_through(output)
        for tensor in tensors:
            if memories and memory_of(tensor) in memories:
                self._keep(unit)  # the output is (a view of) a parameter: its memory must outlive the forward
            if not (training and tensor.requires_grad):
                continue
            found = True
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)
                base = tensor._base
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(arrived)  # a view's hook is lost if the view is modified in place
        if training and memories and not (self._encloses(unit, tensors) and (found or not unit.nodes) and complete):
            self._keep(unit)  # backward may come by another way than through outputs that can be seen

    def _encloses(self, unit: Unit, outputs: list[Tensor]) -> bool:
        """True if all that the forward has put into autograd's graph is reached through its outputs.

        An auxiliary loss that a module keeps as an attribute is not: backward may reach it first. Nodes are numbered in the
        order in which they are made; only where their number is not that of the last time are they looked at.
        """
        nodes = next_node() - unit.first_node
        inside = self._hidden + idle_nodes() - unit.first_hidden  # of units inside, which know of theirs, and of checkpoints
        if (nodes, inside) != (unit.nodes, unit.hidden_inside):
            unit.nodes, unit.hidden_inside = nodes, inside
            unit.hidden = nodes - len(nodes_since(unit.first_node, outputs)) - inside
            message = f"{unit.name}: not all that its forward computes leaves by its outputs; it stays gathered until backward"
            if unit.hidden and message not in self.messages:
                self.messages.append(message)
        self._hidden += unit.hidden
        return not unit.hidden

    def _keep(self, unit: Unit) -> None:
        """Hold the unit's memory until the backward (or the next forward) is over."""
        if not unit.kept:
            unit.kept, unit.outdated = True, False
            self._kept.append(unit)

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every event of backward; the first one orders the callback at its end."""
        if self._active and self._ending() is not None:
            return
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")
        self._await_end()
        self._active = True
        if self.unscaled:  # what this backward adds is not
            self._unscale(False)
        if self.optimizer is not None:
            self.optimizer.core.norm = None  # of other gradients

    def _await_end(self) -> None:
        """Have `end_backward` called when the backward that runs now is over; what an earlier one left that failed goes."""
        if self._ending() is not None:
            return
        if self._active:
            self._abandon()
        end = _End(self)
        self._ending = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def begin_unit_backward(self, unit: Unit) -> None:
        """A gradient has reached an output of the unit."""
        self.begin_backward()
        if unit.in_backward or unit.pinned:
            return
        unit.in_backward = True
        if unit.sharded:
            self._open(unit, backward=True)
            if torch.is_grad_enabled():  # create_graph=True: a backward of this backward reads the parameters again
                self._keep(unit)
                unit.graphed = self._graphed = True

    def gradient(self, unit: Unit, group: ParamGroup, index: int, param: Tensor) -> None:
        """The local gradient of one parameter is complete: it moves to the buffer that will be sent."""
        self.begin_backward()
        grad = local_grad(param)
        if grad is None:
            return
        clear_local_grad(param)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self.reductions.take(unit, group, index, grad.detach(), self.sync)
        else:
            self.reductions.take(unit, group, index, grad, self.sync)
        self.unweighted |= not self.weighing
        number, task = group.specs[index].number, torch._C._current_graph_task_id()
        if task != unit.task:  # a reentrant checkpoint's own backward brings all of its gradients
            unit.task = task
            unit.arrived.clear()
        unit.arrived.add(number)
        if number not in self._arrived:
            self._arrived.add(number)
            unit.complete += 1
            if unit.complete == unit.expected:
                self._gather_staged()
                if self.sync:
                    self.reductions.start(unit)
        if len(unit.arrived) == unit.expected:
            unit.arrived.clear()
            if not unit.has_frozen:
                self._leave_backward(unit)

    def _leave_backward(self, unit: Unit) -> None:
        if not unit.in_backward:
            return
        unit.in_backward = False
        if unit.depth == 0 and not unit.pinned:
            unit.swap_out()
            self._release(unit)

    def end_backward(self) -> None:
        """The end of backward: join what others reduced, wait for all reductions, release all units."""
        if self.scaler is not None and self.reductions.touched and not self._scaled:
            raise ZeroshardError(
                "fp16: gradients reached the model by a way other than the outputs of its forward (an attribute, a "
                "submodule called directly), so the loss scale could not be applied. Return such losses from forward."
            )
        with torch.no_grad():
            if self.sync:
                self._reduce_all()
        for unit in self.units:
            unit.arrived.clear()
            unit.complete = 0
            self._leave_backward(unit)
        self._release_kept(graphed=not self._graphed)
        self.schedule.end(training=True)
        self._arrived = set()
        self._active = self._scaled = self._graphed = False
        self.completed += 1

    def unscale(self) -> None:
        """Gradients are looked at: from here on they are free of the loss scale. Each rank by itself: a power of two is exact."""
        if self.scaler is not None and not self.unscaled and not self._active:
            self._unscale(True)

    @torch.no_grad()
    def _unscale(self, yes: bool) -> None:
        assert self.scaler is not None
        self.unscaled = yes
        for group in self.groups:
            if group.grads is not None and group.grads.reduced:
                group.grads.scale(1.0 / self.scaler.scale if yes else self.scaler.scale)

    def _reduce_all(self) -> None:
        self.reductions.finish()
        self.accumulated = not self.sync

    def _poll(self) -> None:
        if self.optimizer is not None:
            self.optimizer.core.poll()

    # -- the rest --------------------------------------------------------------------------------------------

    def _release(self, unit: Unit) -> None:
        if not unit.kept:
            unit.release()

    def _release_kept(self, first: int = 0, graphed: bool = False) -> None:
        """Units that were kept, from the `first` one on; those for a backward of a backward only where it is over."""
        stay = [unit for position, unit in enumerate(self._kept) if position < first or (unit.graphed and not graphed)]
        kept, self._kept = [unit for unit in self._kept if unit not in stay], stay
        for unit in kept:
            unit.kept = unit.graphed = False
            if unit.depth == 0 and not unit.in_backward and not unit.pinned:
                self._release(unit)

    def _release_viewed(self, output: Any) -> None:
        """After an evaluation: what it kept for views that were used inside of it."""
        kept = self._kept[self._kept_before :]
        memories = {memory for unit in kept for memory in unit.memories}
        if kept and not any(tensor.untyped_storage()._cdata in memories for tensor in find_tensors(output)):
            self._release_kept(self._kept_before)

    def settle(self) -> None:
        """Before shards are written: no unit keeps what was gathered or fetched from them."""
        self._release_kept(graphed=True)
        for unit in self.units:
            if unit.depth == 0 and not unit.pinned:
                unit.release()
                unit.forget()
            for group in unit.groups:
                group.values.settle()

    def before_change(self) -> None:
        """Values, masters or states are about to be written: a save in the background copies them first."""
        self.recover()
        if self.saver is not None:
            self.saver.await_copy()

    def recover(self) -> None:
        """Forget a backward that ended by an exception, and forwards that were interrupted, on whichever rank.

        Torch tells of neither: of a forward it reports what is an Exception, which KeyboardInterrupt is not.
        """
        interrupted = [frame for frame in self._running if frame is not None and ended(frame)]
        self._running = [frame for frame in self._running if frame not in interrupted]
        if self._active and not in_backward():
            self._abandon()
        elif interrupted and not self._running and not self._active:
            self._leave_all()

    def _abandon(self) -> None:
        """A backward ended by an exception: drop what it left, so that the next step starts clean."""
        self._active = self._scaled = self._graphed = False
        self.weight, self.unweighted = 0.0, False
        self.lost = self.lost or self.completed > 0
        self._arrived = set()
        self.reductions.clear()
        self._leave_all()
        for group in self.groups:
            if group.grads is not None:
                group.grads.discard()

    def _leave_all(self) -> None:
        for unit in self.units:
            unit.arrived.clear()
            unit.complete, unit.depth, unit.in_backward = 0, 0, False
            unit.swap_out()
            self._release(unit)
            unit.forget()

    def flush(self) -> None:
        """Before gradients are used: reduce what zs.accumulate held back if no reduced backward followed (collective)."""
        self.recover()
        if self.lost:
            raise ZeroshardError(
                "a backward failed after others since the last zero_grad, and the gradients of those went with it: call "
                "optimizer.zero_grad() and run their batches again."
            )
        if not self.accumulated:
            return  # whether there was one is the same on every rank; whether it left gradients is not
        with torch.no_grad():
            self._reduce_all()

    def drop_gradients(self) -> None:
        """zero_grad: no gradient remains, on any rank."""
        self.recover()
        self.forget_backwards()
        for group in self.groups:
            if group.grads is not None:
                group.grads.drop()
                group.active = [False] * len(group.specs)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """zero_grad(set_to_none=False): gradients there are become zeros; local sums held back are dropped."""
        self.recover()
        for group in self.groups:
            if group.grads is None:
                continue
            if group.grads.reduced and any(group.active):
                group.grads.zero()
            group.grads.drop_held()
        self.forget_backwards()

    def forget_backwards(self) -> None:
        """What is known of the backwards since the last zero_grad; their gradients are the caller's."""
        self.weight, self.unweighted, self.accumulated = 0.0, False, not self.sync
        self.completed, self.lost, self.unscaled = 0, False, False
        self.reductions.touched = set()
        if self.optimizer is not None:
            self.optimizer.core.norm = None


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model. Raises ZeroshardError for one that is not sharded, TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module that was given to zs.shard(), got {type(model).__name__}.")
    runtime = model.__dict__.get("_zeroshard")
    if runtime is None:
        raise ZeroshardError(f"this {type(model).__name__} is not sharded: call zs.shard(model, optimizer, ...) first.")
    return runtime
