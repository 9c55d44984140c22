"""The runtime: connects what happens in an nn.Module and in autograd to units and schedule.

    forward    pre-hook: gather, put compute parameters in        hook: take them out, release, watch the outputs
    backward   gradient of an output: gather again                last gradient of the unit: reduce, release
    its end    one callback: units without (all) gradients join with zeros, reductions are waited for

No wrapper module and no full-backward hooks. A unit that took no part on this rank but did on another joins the
reduction with zeros: at the end of backward ranks exchange which units and parameters they had gradients for. What
depends on the stage is in the units' placements, never here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import CheckpointError, ModelClosed, ShardedAccessError, ShardedWriteError, ZeroshardError
from ..memory.ledger import Ledger
from ..memory.pool import StagingPool
from ..mesh.topology import Topology
from ..offload.moved_states import MovedStates
from ..offload.storage import Tiers
from ..tensor.sharded_tensor import ShardedTensor, clear_local_grad, local_grad
from ..tensor.tiled_parameter import Tile
from ..utils.autograd import Marked, ended, in_backward, memory_of, running_forward, transforming
from ..utils.tensor_tree import cast_floating, find_tensors, look_through, map_tensors
from .attendance import Attendance
from .backward import Backward
from .freezing import Freezing
from .grad_reducer import Agreed, Reductions
from .gradient_account import GradientAccount
from .graph_coverage import GraphCoverage
from .mixed_precision import Progress
from .model_changes import ModelWatch, ValueWatch
from .prefetch import Prefetcher
from .schedule import Schedule, Visit
from .skipped_units import take_part
from .unit import Kept, ParamGroup, Unit
from .write_gate import WriteGate


class Runtime:
    """Everything that zeroshard keeps about one sharded model. `runtime_of(model)` finds it."""

    def __init__(
        self, model: nn.Module, config: Config, topology: Topology, units: list[Unit], ledger: Ledger, pool: StagingPool,
        tiers: Tiers,
    ) -> None:  # fmt: skip
        """world: all ranks of the mesh; comm: the data-parallel ones among them; shards: those among which a shard is one."""
        self.model, self.config, self.topology, self.units, self.ledger, self.pool, self.tiers = (
            model, config, topology, units, ledger, pool, tiers,
        )  # fmt: skip
        comm = self.comm = topology.control
        self.shards, self.world = topology.shards, topology.world
        self.schedule = Schedule([unit.name for unit in units])
        self.groups: list[ParamGroup] = [group for unit in units for group in unit.groups]
        for group in self.groups:
            group.runtime = self
        self.moved = MovedStates(tiers)
        self.optimizer: Any = None
        self.saver: Any = None  # of checkpoints
        self.unusable = ""  # why, where a load ended half-way
        self.gate = WriteGate(self)
        self.account = GradientAccount()
        self.attendance, self.frozen = Attendance(comm, units, self.account), Freezing(self.groups)
        self.reductions = Reductions(units, config, comm, self._poll, self.attendance, self.frozen)
        self.prefetcher = Prefetcher(units, self.schedule, config, comm, self.attendance.gather)
        self.coverage = GraphCoverage(len(units), self.tell)
        self.sync = True  # False inside zs.accumulate
        self.closed = False
        self.progress = Progress(config)
        self.messages: deque[str] = deque(topology.notes, maxlen=100)
        self._model_watch = ModelWatch(model, self.groups)
        self.values = ValueWatch(comm, self.groups)
        self._training = False  # inside a forward that was entered with gradients
        self._running: list[FrameType | None] = []  # forwards of the whole model
        self.backward: Backward | None = None  # the one that runs, or has failed and is not forgotten yet
        self._kept: list[Unit] = []  # units whose memory an output still refers to
        self._kept_before = 0  # how many of them when this forward began
        self.handles: list[Any] = []  # hooks, for close
        self.lend = torch.compiler.disable(self._lend)  # what a compiled block computes with others' parameters is not traced
        self.compiled: list[tuple[nn.Module, Any]] = []

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ShardedAccessError(
            f"a sharded {type(self.model).__name__} can not be copied or pickled. Copy it before zs.shard(), or take "
            "zs.full_state_dict(model)."
        )

    def tell(self, message: str) -> None:
        """Note a message for the report, once."""
        if message not in self.messages:
            self.messages.append(message)

    def check_model(self) -> None:
        """Raise ModelChanged where the model's parameters are not those of zs.shard()."""
        gathered = any(unit.pinned for unit in self.units)
        self._model_watch.check(gathered, thoroughly=True)
        for unit in () if gathered else self.units:
            unit.check_placed()

    @property
    def in_backward(self) -> bool:
        """Inside a backward, or after one that has failed."""
        return self.backward is not None and self.backward.begun

    @property
    def in_forward(self) -> bool:
        """While a forward runs, or is run again in a backward: operations with parameters compute with the gathered ones."""
        return bool(self._running) or any(unit.depth for unit in self.units) or (self.in_backward and in_backward())

    # -- forward ---------------------------------------------------------------------------------------------

    def root_enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before the model's own forward: state left by a failed backward goes, inputs are cast."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close(); zs.shard() it again to train it sharded.")
        if self.unusable:
            raise CheckpointError(self.unusable)
        self.moved.check("parameters")
        self.tiers.check()
        self.recover()
        if not self.in_backward:
            self.attendance.begin_forward()
            self._training = torch.is_grad_enabled()
            if self._training or any(unit.kept.outdated for unit in self._kept):
                self._release_kept()
            self._kept_before = len(self._kept)  # by a forward whose backward may follow an evaluation
            self._model_watch.check(any(unit.pinned for unit in self.units))
            self.frozen.follow()
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
            if not self.in_backward:
                self._release_viewed(output)
        else:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._reached)
        if self.progress.scaler is None or output is None:
            return output
        output = cast_floating(output, torch.float32)
        return map_tensors(self._scale_gradient, output)

    def _scale_gradient(self, output: Tensor) -> Tensor:
        """An output of the model whose gradient will enter it scaled."""
        if output.requires_grad and torch.is_grad_enabled():
            output = output.view_as(output) if output.is_leaf else output
            output.register_hook(self._scale)
        return output

    def scale_entering(self, grad: Tensor) -> Tensor:
        """A gradient that enters the model by none of its outputs, as that of p.full_tensor() does."""
        return grad if self.progress.scaler is None else self._scale(grad)

    def _scale(self, grad: Tensor) -> Tensor:
        self._await_end().scaled = True
        return grad * self.progress.loss_scale

    def _reached(self, _: Tensor) -> None:
        """A gradient enters the model: the backward that ends the step, not one that reentrant checkpointing nests in it."""
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")
        self._await_end()

    def enter(self, unit: Unit) -> None:
        """A forward inside the unit begins."""
        if unit.depth == 0:
            gathers = unit.sharded and not unit.pinned
            if gathers:
                self._begin(unit)
            unit.expose()
            if gathers and torch.is_grad_enabled():
                self.coverage.enter(unit)
        unit.depth += 1

    def _begin(self, unit: Unit) -> None:
        if unit.memories and transforming():
            raise ShardedAccessError(
                f"{unit.name}: torch.func differentiates a model of which each rank holds slices. Gather it around that: "
                "`with zs.gathered(model):`."
            )
        if not (self._running or self.in_backward):  # a part of the model by itself
            self.frozen.follow()
        self._open(unit, backward=unit.in_backward)

    def exit(self, unit: Unit, output: Any) -> None:
        """A forward inside the unit has ended (output None: by an exception)."""
        if unit.depth == 0:
            return  # it was refused before it began
        unit.depth -= 1
        if unit.depth > 0:
            return
        if not unit.in_backward:
            unit.hide()
        if unit.pinned:
            return
        if output is not None:
            unit.check_unwritten()
            self.prefetcher.staged(self._in_training())
            self._watch(unit, output)
            if self.in_backward and unit.sharded and torch.is_grad_enabled() and not isinstance(unit.modules[0], Tile):
                unit.in_backward = True  # recomputation: the unit's backward follows at once; before a tile's, other tiles'
        if unit.in_backward or not unit.sharded:
            return
        unit.swap_out()
        if not self.prefetcher.lives_on(unit, self._in_training()):
            self.release(unit)

    def _lend(self, unit: Unit, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation with a parameter of the unit, as a forward of it; NotImplemented where no forward runs (nor is run again)."""
        if unit.pinned or not self.in_forward:
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

    def _in_training(self) -> bool:
        """Which record a visit belongs to: reentrant checkpointing runs parts of a training step without gradients."""
        return torch.is_grad_enabled() or self._training or self.in_backward

    def mark_inputs(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Units with frozen parameters: find out when their backward is over by marking the inputs."""
        tensors = [t for t in find_tensors((args, kwargs)) if t.requires_grad and not isinstance(t, ShardedTensor)]
        if not tensors or not torch.is_grad_enabled() or not unit.sharded:
            return args, kwargs

        def done() -> None:
            if self.backward is None or not self.backward.awaits(unit) or not unit.expected:
                self._leave_backward(unit)

        marked = dict(zip(map(id, tensors), Marked.apply(done, *tensors), strict=True))
        swap = lambda tensor: marked.get(id(tensor), tensor)  # noqa: E731
        return tuple(map_tensors(swap, a) for a in args), {k: map_tensors(swap, v) for k, v in kwargs.items()}

    def _open(self, unit: Unit, backward: bool) -> None:
        """Make the unit usable now, and start the gathers of what comes next."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close().")
        training = backward or self._in_training()
        if training:
            take_part(self, Visit(unit.number, backward))
        message = self.schedule.visit(Visit(unit.number, backward), training)
        if message is not None:
            self.messages.append(message)
        self.attendance.gather(unit)
        unit.ready()
        unit.swap_in()
        self._poll()
        self.prefetcher.ahead(training)

    def _watch(self, unit: Unit, output: Any) -> None:
        """Let the first gradient that reaches an output of the unit gather it again; keep what an output still refers to."""
        training, memories = torch.is_grad_enabled(), unit.memories
        if not (unit.sharded or unit.distributed) or not (training or memories):
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
                self.keep(unit)  # the output is (a view of) a parameter: its memory must outlive the forward
            if not (training and tensor.requires_grad):
                continue
            found = True
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)
                base = tensor._base
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(arrived)  # a view's hook is lost if the view is modified in place
        if training and memories:
            covered = self.coverage.encloses(unit, tensors) and complete
            if not covered or not (found or self.coverage.is_empty(unit)):
                self.keep(unit)  # backward may read its memory by a path that does not pass through these outputs

    def keep(self, unit: Unit) -> None:
        """Hold the unit's memory until the backward (or the next forward) is over."""
        if not unit.kept:
            unit.kept = Kept()
            self._kept.append(unit)

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every event of backward; the first one orders the callback at its end."""
        if self.in_backward and self.backward.alive:
            return
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")
        self.moved.check("parameters", "gradients")
        backward = self._await_end()
        self.frozen.follow()  # as of now: also what was switched since the forward
        backward.begun = True
        self.before_gradients()

    def before_gradients(self) -> None:
        """Gradients of a backward are about to be added: what is there becomes a multiple of the mean, as they are."""
        if self.account.unscaled:
            self._unscale(False)
        if self.account.share != 1.0:
            self._scale_gradients(self.account.share)
            self.account.share = 1.0
        self.account.began()

    def _await_end(self) -> Backward:
        """The backward that runs now: `end_backward` is called when it is over. What an earlier one left that failed goes."""
        if self.backward is not None and self.backward.alive:
            return self.backward
        if self.in_backward:
            self._abandon()
        self.backward = Backward(self.end_backward)
        return self.backward

    def begin_unit_backward(self, unit: Unit) -> None:
        """A gradient has reached an output of the unit."""
        self.begin_backward()
        if unit.in_backward or unit.pinned:
            return
        unit.in_backward = True
        if unit.sharded:
            self._open(unit, backward=True)
            if torch.is_grad_enabled():  # create_graph=True: a backward of this backward reads the parameters again
                self.keep(unit)
                unit.kept.graphed = self.backward.graphed = True
        unit.expose()  # what is computed again finds what was there

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
        self.account.came()
        completes, leaves = self.backward.arrive(unit, group.specs[index].number)
        if completes:
            self.prefetcher.staged(self._in_training())
            if self.sync:
                self.reductions.start(unit)
        if leaves and not unit.has_frozen:
            self._leave_backward(unit)

    def _leave_backward(self, unit: Unit) -> None:
        if not unit.in_backward:
            return
        unit.in_backward = False
        if not unit.in_use:
            unit.hide()
            unit.swap_out()
            self.release(unit)

    def end_backward(self) -> None:
        """The end of backward: join what others reduced, wait for all reductions, release all units."""
        if self.progress.scaler is not None and self.reductions.touched and not self.backward.scaled:
            raise ZeroshardError(
                "fp16: gradients reached the model by a way other than the outputs of its forward (an attribute, a "
                "submodule called directly), so the loss scale could not be applied. Return such losses from forward; a loss of "
                "parameters alone is scaled where it is one of `p.full_tensor()`."
            )
        take_part(self, None)
        self.account.ending()
        if self.sync and self.reductions.waits:
            self.reduce_all()
        for unit in self.units:
            self._leave_backward(unit)
        self._release_kept(graphed=not self.backward.graphed)
        self.schedule.end(training=True)
        self.backward = None
        self.account.ended()

    def unscale(self) -> None:
        """Gradients are looked at: from here on they are free of the loss scale. Each rank by itself: a power of two is exact."""
        if self.progress.scaler is not None and not self.account.unscaled and not self.in_backward:
            self._unscale(True)

    def _unscale(self, yes: bool) -> None:
        self.account.unscaled = yes
        self._scale_gradients(1.0 / self.progress.loss_scale if yes else self.progress.loss_scale)

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        for group in self.groups:
            if group.grads is not None and group.grads.reduced:
                group.grads.scale(factor)

    @torch.no_grad()
    def hold(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Local gradients of whole parameters, (parameter, gradient), that no backward of autograd brings: held as in zs.accumulate."""
        self.before_gradients()
        self.account.held = True
        given = {id(param): grad for param, grad in gradients}
        for group in self.groups:
            for index, param in enumerate(group.compute):
                if id(param) in given:
                    self.reductions.take(group.unit, group, index, given[id(param)], False)
                    self.account.came()
        self.account.ending()
        self.account.ended()

    def begin_reductions(self) -> None:
        """Start to reduce what is held; `flush` waits for it, on all ranks."""
        for unit in reversed(self.units):
            if any(group.grads.holds for group in unit.trainable):
                self.reductions.start(unit)

    @torch.no_grad()
    def reduce_all(self, agreed: Agreed | None = None) -> None:
        """Reduce what backwards have left (collective), to the mean over the ranks that had a batch."""
        self.attendance.tell("reduce")
        self.reductions.finish(agreed)
        self.account.held = not self.sync
        if self.attendance.share != 1.0:
            self.account.share = self.attendance.share
            self._scale_gradients(1.0 / self.account.share)

    def _poll(self) -> None:
        if self.optimizer is not None:
            self.optimizer.core.poll()

    # -- the rest --------------------------------------------------------------------------------------------

    def release(self, unit: Unit) -> None:
        if not unit.kept:
            unit.release()

    def _release_kept(self, first: int = 0, graphed: bool = False) -> None:
        """Units that were kept, from the `first` one on; those for a backward of a backward only where it is over."""
        stay = [unit for position, unit in enumerate(self._kept) if position < first or (unit.kept.graphed and not graphed)]
        kept, self._kept = [unit for unit in self._kept if unit not in stay], stay
        for unit in kept:
            unit.kept = None
            if not unit.in_use:
                self.release(unit)

    def _release_viewed(self, output: Any) -> None:
        """After an evaluation: what it kept for views that were used inside of it."""
        kept = self._kept[self._kept_before :]
        memories = {memory for unit in kept for memory in unit.memories}
        if kept and not any(memory_of(tensor) in memories for tensor in find_tensors(output)):
            self._release_kept(self._kept_before)

    def settle(self) -> None:
        """Before shards are written: no unit keeps what was gathered or fetched from them."""
        self._release_kept(graphed=True)
        for unit in self.units:
            unit.outdate()

    def recover(self) -> None:
        """Forget a backward that ended by an exception, and forwards that were interrupted, on whichever rank.

        Torch tells of neither: of a forward it reports what is an Exception, which KeyboardInterrupt is not.
        """
        interrupted = [frame for frame in self._running if frame is not None and ended(frame)]
        self._running = [frame for frame in self._running if frame not in interrupted]
        if self.in_backward and not in_backward():
            self._abandon()
        elif interrupted and not self._running and not self.in_backward:
            self._leave_all()

    def _abandon(self) -> None:
        """A backward ended by an exception: drop what it left, so that the next step starts clean."""
        self.backward = None
        self.account.failed()
        self.reductions.clear()
        self._leave_all()
        for group in self.groups:
            if group.grads is not None:
                group.grads.discard()

    def _leave_all(self) -> None:
        for unit in self.units:
            unit.depth, unit.in_backward = 0, False
            unit.hide()
            unit.swap_out()
            self.release(unit)
            unit.forget()

    def flush(self) -> None:
        """Before gradients are used: reduce what zs.accumulate held back if no reduced backward followed (collective)."""
        self.moved.check("gradients")
        self.recover()
        if self.account.lost:
            raise ZeroshardError(
                "a backward failed after others since the last zero_grad, and the gradients of those went with it: call "
                "optimizer.zero_grad() and run their batches again."
            )
        if self.account.held:  # the same on every rank; whether it left gradients is not
            self.reduce_all()

    def drop_gradients(self) -> None:
        """zero_grad: no gradient remains, on any rank."""
        self.moved.check("gradients")
        self.recover()
        self.forget_backwards()
        for group in self.groups:
            if group.grads is not None:
                group.grads.drop()
                group.active = [False] * len(group.specs)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """zero_grad(set_to_none=False): gradients there are become zeros; local sums held back are dropped."""
        self.moved.check("gradients")
        self.recover()
        for group in self.groups:
            if group.grads is None:
                continue
            if group.grads.reduced and any(group.active):
                group.grads.zero()
            group.grads.drop_held()
        self.forget_backwards(to_zeros=True)

    def forget_backwards(self, to_zeros: bool = False) -> None:
        """What is known of the backwards since the last zero_grad; their gradients are the caller's."""
        self.account.zeroed(holding=not self.sync)
        self.attendance.zeroed[to_zeros] += 1
        self.reductions.touched = set()


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model. Raises ZeroshardError for one that is not sharded, TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module that was given to zs.shard(), got {type(model).__name__}.")
    runtime = model.__dict__.get("_zeroshard")
    if runtime is None:
        raise ZeroshardError(f"this {type(model).__name__} is not sharded: call zs.shard(model, optimizer, ...) first.")
    return runtime
