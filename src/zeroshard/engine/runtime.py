"""The runtime of a sharded model: called by hooks of nn.Module and autograd, it gathers, reduces and releases the units.

    forward           pre-hook: gather the unit, install compute parameters     hook: remove them, release, put hooks on outputs
    backward          first gradient of an output: gather the unit again        last gradient of the unit: reduce, release
    end of backward   one callback: reduce units that lack gradients (zeros in their place), wait for all reductions

There is no wrapper module and no full-backward hook. At the end of a backward ranks exchange which units and parameters
they have gradients for; a rank that did not use a unit sends zeros to the reduction of the ranks that did. The code is the
same for all ZeRO stages: each unit's buffers know whether they are sharded, partial or replicated.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import ModelClosed, ShardedAccessError, ZeroshardError
from ..tensor.home import Shown
from ..tensor.sharded_tensor import ShardedTensor
from ..utils import torch_compat
from ..utils.autograd import ended, in_backward, leads_to_all, marked, memory_of, next_node, running_forward, transforming
from ..utils.tensor_tree import Exchanged, cast_floating, caster, find_tensors, map_tensors
from .freezing import Freezing
from .gradient_account import GradientAccount
from .inner_optimizer import members_of
from .masters import masters_shown
from .mixed_precision import Progress
from .optimizers import ModelOptimizers
from .parameter import ParamHome
from .prefetch import Prefetcher
from .reduction import Agreed, Reductions
from .rest import Tiers
from .saved_parameters import SavedParameters
from .schedule import Schedule, Visit
from .topology import Topology
from .unit import ModelForward, Phase, Unit, UnitForward
from .verbs import begin
from .watch import ModelWatch, Watches
from .write_gate import WriteGate

# entry of a module's __dict__: a function that shards the model at its first use, and returns the module that has the runtime
FIRST_USE = "_zeroshard_first_use"

_WRITE_OUTSIDE = (
    "Write it before or after the forward, under torch.no_grad(): what nn.Embedding(max_norm=...) does, after each step in `with "
    "zs.gathered(module, write=True)`"
)


class Backward:
    """State of one backward; a new object is made for each. begun: it has reached a unit; scaled: the loss scale was applied.

    thread: number of the thread on which its first hook ran; None once it has failed. Autograd does not call the callback of a
    backward that fails, and reports the failure to nobody: it only drops the callback. So this keeps a weak reference to it: if
    that is dead before the end was reached, the backward has failed.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """Construct it inside the backward; `at_end` is called when the backward ends, if it has begun."""
        self.begun = self.scaled = False
        self.thread: int | None = threading.get_ident()

        def end() -> None:
            if self.begun:
                at_end()

        self._end = weakref.ref(end)
        torch_compat.at_end_of_backward(end)

    @property
    def alive(self) -> bool:
        """True until autograd has dropped the callback: the backward has ended or failed."""
        return self._end() is not None


class Runtime:
    """All state that zeroshard keeps for one sharded model; `runtime_of(model)` returns it."""

    def __init__(
        self, model: nn.Module, config: Config, topology: Topology, tiers: Tiers, progress: Progress,
        build: Callable[[Runtime], list[Unit]], optimizers: Callable[[Runtime], ModelOptimizers], watches: Watches,
        input_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Call `build` for the units, which belong to this runtime. `comm` are the data-parallel ranks (`topology.control`)."""
        self.model, self.config, self.topology, self.tiers, self.progress = model, config, topology, tiers, progress
        self.comm, self.watches = topology.control, watches
        self.input_dtype = input_dtype  # to which the model's floating-point inputs are cast; None: they are not
        self.moved = tiers.make_away()
        self.shows_masters = masters_shown.get()
        self.drawing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around draws on sharded parameters
        self.shown: Shown | None = None  # what sharded parameters show
        self.optimizers = optimizers(self)
        self.model_watch = ModelWatch()  # zs.shard sets one that notices
        self.gate = WriteGate(self)
        self.account = GradientAccount()  # of gradients since the last zero_grad
        self.sync = True  # False inside zs.accumulate
        self.closed = False
        self.forwards: list[ModelForward] = []  # that run now, the outermost first: they nest if the model calls itself
        self.training = False  # the model was entered with gradients enabled
        self.viewed: list[Unit] = []  # units that have returned views of their memory: gathered until the outermost forward ends
        self.backward: Backward | None = None  # the backward that runs, or a failed one that `recover` has not cleared yet
        self.handles: list[Any] = []  # handles of registered hooks, removed by zs.close
        self.lend = torch.compiler.disable(self._lend)  # so that torch.compile does not trace it inside compiled blocks
        self.compiled: list[tuple[nn.Module, Callable]] = []  # compiled calls that `attach` has wrapped; `detach` restores them

        def own(units: list[Unit]) -> None:
            """Take these units, and make the objects that gather and reduce them."""
            self.units, self.groups = units, [group for unit in units for group in unit.groups]
            self.schedule = Schedule([unit.name for unit in units], self.topology.notes)
            self.attendance, self.frozen = watches.attendance(self.comm, units, self.account), Freezing(self.groups)
            self.reductions = Reductions(units, self.config, self.comm, self.gate.read_ahead, self.attendance, self.frozen)
            self.prefetcher = Prefetcher(units, self.schedule, self.config, self.comm, self.attendance.gather)
            self.saved = SavedParameters(units)  # hooks by which autograd saves handles of gathered parameters
            self.values = watches.values(self.comm, self.groups)

        own([])  # so that all fields exist where `build` fails: parameters that it has placed refer to this
        own(build(self))
        self.end_answering = topology.world.desk.answer_for(self)  # call it to stop answering peers that ask for its state

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"a sharded {type(self.model).__name__} can not be copied or pickled. Copy it before zs.shard(), or take "
            "zs.full_state_dict(model); for a moving average zs.ema(model, decay)."
        )

    @property
    def built(self) -> bool:
        """False while zs.shard builds the units, and after it has failed."""
        return bool(self.units) or self.closed

    @property
    def in_backward(self) -> bool:
        """True from the first gradient of a backward to its end; after a failed backward, until `recover` clears it."""
        return self.backward is not None and self.backward.begun

    @property
    def in_forward(self) -> bool:
        """True while a forward runs (recomputation in backward included): operations on parameters use gathered values then."""
        if self.forwards or any(unit.depth for unit in self.units):
            return True
        return self.backward is not None and in_backward()  # it may have reached the model's outputs alone, and no unit yet

    # -- forward ---------------------------------------------------------------------------------------------

    def root_enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begin a forward of the model: clear the state of a failed backward, check the model, return its inputs, cast."""
        begin(self, "model.forward")
        if not self.in_backward:  # else a backward recomputes this forward
            self.attendance.begin_forward()
            self.training = torch.is_grad_enabled()
            if self.attendance.gathers and not self.training and not all(unit.pinned for unit in self.units if unit.sharded):
                self.attendance.note(f"the forward of {type(self.model).__name__}, without gradients,")
            self.model_watch.check(any(unit.pinned for unit in self.units))
            if self.training:  # what a forward without gradients switches on (PEFT's set_adapter) is not trained there
                self.frozen.follow()
            for unit in self.units:
                unit.check_unchanged()
            self.catch_up()
        exchanges = self.input_dtype is not None or self.progress.scaler is not None
        given = Exchanged(self._received, (args, kwargs)) if exchanges else None
        self.forwards.append(ModelForward(running_forward(), given))
        return (args, kwargs) if given is None else given.value

    def root_exit(self, output: object) -> object:
        """End a forward of the model (output None: it raised). In fp16, return fp32 outputs with hooks that scale gradients."""
        forward = self.forwards.pop() if self.forwards else None
        if forward is not None and forward.given is not None:
            forward.given.hand_back()
        self.training = False
        if not self.forwards:  # the outermost forward is over
            for unit in self.viewed:
                if not unit.in_use and not self.prefetcher.lives_on(unit, self.in_training()):
                    unit.reshard()
            self.viewed.clear()
        if not torch.is_grad_enabled():
            self.schedule.end(training=False)
        else:

            def reached(_: Tensor) -> None:
                # here, in the outer backward: a callback from a reentrant checkpoint's nested one would be called when that ends
                self._await_end()

            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(reached)
        if self.progress.scaler is None or output is None:
            return output
        if not self.forwards:
            return map_tensors(self._scale_gradient, cast_floating(output, torch.float32))
        # a nested forward: its gradients are scaled here only if backward starts at this output, before the outer forward ends;
        # a later backward starts at the outer forward's output, whose hook has scaled the gradient already
        outer = weakref.ref(self.forwards[0])  # weak: it has the call's frame and arguments, and the hook lives in the graph
        begins = lambda: bool(self.forwards) and self.forwards[0] is outer()  # noqa: E731
        return map_tensors(lambda tensor: self._scale_gradient(tensor, begins), output)

    def _received(self, given: Tensor) -> Tensor:
        """Return an input of the model, cast. A hook divides its gradient by the loss scale: model(model(x)) scales it anew."""
        if self.progress.scaler is not None and given.requires_grad and torch.is_grad_enabled() and not self.forwards:
            given = given.view_as(given)  # a hook on the caller's own tensor would act on gradients from elsewhere, too
            given.register_hook(lambda grad: grad / self.progress.loss_scale)
        return given if self.input_dtype is None else caster(self.input_dtype)(given)

    def _scale_gradient(self, output: Tensor, begins: Callable[[], bool] = lambda: True) -> Tensor:
        """Return the output with a hook that multiplies its gradient by the loss scale if `begins()` is true in backward."""
        if output.requires_grad and torch.is_grad_enabled():
            output = output.view_as(output) if output.is_leaf else output  # a leaf (a parameter) is in other graphs as well
            output.register_hook(lambda grad: self.scale_entering(grad) if begins() else grad)
        return output

    def scale_entering(self, grad: Tensor) -> Tensor:
        """Return a gradient times the loss scale; also for p.full_tensor(), whose gradient reaches no output of the model."""
        if self.progress.scaler is None:
            return grad
        self._await_end().scaled = True
        return grad * self.progress.loss_scale

    def enter(self, unit: Unit) -> None:
        """Begin a forward inside the unit; the outermost one gathers it and puts its compute parameters into the modules."""
        if unit.depth == 0:
            gathers = unit.sharded and not unit.pinned
            if gathers:
                unit.give_back()  # a write after unshard() is told as that
                if unit.memories and transforming():  # hooks do not see torch.func's backward, which would read released memory
                    raise ShardedAccessError(
                        f"{unit.name}: torch.func differentiates a model of which each rank holds slices. Gather it around that: "
                        "`with zs.gathered(model):`."
                    )
                # else `root_enter` has done this; here the program called a submodule
                if not (self.forwards or self.in_backward):
                    if torch.is_grad_enabled():
                        self.frozen.follow()
                    self.catch_up()
                self._open(unit, backward=unit.in_backward)
            unit.entries.expose()  # DTensors over the gathered shards, where parameters were DTensors
            unit.forward = UnitForward(next_node(), sys.exc_info()[1])
            if gathers and unit.memories:
                self.saved.push(unit)
        unit.depth += 1

    def catch_up(self) -> bool:
        """Gather the wholes that writes at rest left behind, whichever units this rank will use; return whether there are any."""
        if self.attendance.gathers:
            self.comm.fence_read()
        works = [group.gather() for group in self.groups if group.values.behind]
        for work in works:
            work.wait()
        return bool(works)

    def exit(self, unit: Unit, output: object) -> object:
        """End a forward inside the unit (output None: it raised, or returned None): release the unit, return the output with `_watch`'s hooks."""
        if unit.depth == 0:
            return output  # `enter` raised before it counted this forward
        unit.depth -= 1
        if unit.depth > 0:  # inside an enclosing forward of the unit
            return output
        self.saved.pop(unit)
        forward, unit.forward = unit.inside, None
        if forward.given is not None:
            forward.given.hand_back()
        if not unit.in_backward:
            unit.entries.hide()
        if unit.pinned:  # inside zs.gathered, which releases its copies itself
            return output
        if output is not None or sys.exc_info()[1] is forward.handled:  # it has not raised
            unit.check_unwritten("inside a forward", _WRITE_OUTSIDE)
            if output is not None:
                self.prefetcher.staged(self.in_training())  # starts the next unit's gather, on ordered communicators
            # without an output, too: a forward that returns None may have left views or nodes in its arguments
            output = self._watch(unit, output, forward.first_node)
        if output is not None and self.in_backward and unit.sharded and torch.is_grad_enabled() and not unit.piece:
            unit.in_backward = True  # recomputed: its backward follows at once (not a tile's: other tiles come first)
        if unit.in_backward or not unit.sharded:  # recomputed: the end of the unit's backward releases it
            return output
        unit.entries.swap_out()
        if not self.prefetcher.lives_on(unit, self.in_training()) and not (self.forwards and unit in self.viewed):
            unit.reshard()
        return output

    def _lend(self, unit: Unit, func: Callable, args: tuple, kwargs: dict) -> object:
        """Compute an operation on the unit's sharded parameters with gathered ones; NotImplemented outside of any forward."""
        if unit.pinned or not self.in_forward:  # whole already; or at rest, where the caller raises or gathers
            return NotImplemented
        return self.run_inside(
            unit, lambda *a, **k: func(*unit.entries.as_computed(a), **unit.entries.as_computed(k)), *args, **kwargs
        )

    def run_inside(self, unit: Unit, function: Callable, /, *args: object, **kwargs: object) -> object:
        """Call `function` with the unit gathered, as its forward is: a compiled call, or an operation with its parameters."""
        outermost = unit.depth == 0
        self.enter(unit)
        output = None
        try:
            if outermost and unit.marked:
                args, kwargs = self.mark_inputs(unit, args, kwargs)
            output = function(*args, **kwargs)
        finally:
            output = self.exit(unit, output)
        return output

    def in_training(self) -> bool:
        """True in a training step, also where reentrant checkpointing disables gradients: selects the schedule's record."""
        return torch.is_grad_enabled() or self.training or self.in_backward

    def mark_inputs(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments, passed through an identity whose backward tells that the unit's is over (see `Unit.marked`)."""
        tensors = [t for t in find_tensors((args, kwargs)) if t.requires_grad and not isinstance(t, ShardedTensor)]
        if not tensors or not torch.is_grad_enabled() or not unit.sharded:  # no backward passes these inputs
            return args, kwargs

        def done() -> None:
            awaits = self.backward is not None and bool(self.reductions.of[unit.number].since_left)
            if not (awaits and unit.expected):  # else gradients still come
                self.leave_backward(unit)

        views = dict(zip(map(id, tensors), marked(done, tensors), strict=True))
        unit.inside.given = Exchanged(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))
        return unit.inside.given.value

    def _open(self, unit: Unit, backward: bool) -> None:
        """Gather the unit, install its compute parameters in the modules, and start to gather the units that follow it."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close().")
        training = backward or self.in_training()
        if training:
            self._take_part(Visit(unit.number, backward))
        self.schedule.visit(Visit(unit.number, backward), training, not self.forwards)
        self.attendance.gather(unit)
        unit.wait_for_unshard()
        unit.entries.swap_in()
        self.gate.read_ahead()  # the optimizer's transfers for its next step on the host go on meanwhile
        self.prefetcher.ahead(training)  # gathers and fetches run while this unit computes

    def _take_part(self, visit: Visit | None) -> None:
        """Take part in other ranks' gathers of the units that this rank skips before `visit` (None: the end of the step).

        Each is gathered and released as on a rank that uses it. `Schedule.skipped` tells which units these are.
        """
        if not self.attendance.gathers_meet or self.comm.ordered or self.config.max_live_parameters:
            return
        visits = self.schedule.skipped(visit, not self.forwards)
        for visit in visits:
            unit = self.units[visit.unit]
            self.schedule.visit(visit, True, not self.forwards)
            self.attendance.gather(unit)
            unit.wait_for_unshard()
            if unit.in_use:  # a recorded visit inside a forward that still runs
                continue
            if unit.lends and not visit.backward:  # ranks that use it keep it until the forward is over
                self.lend_out(unit)
            elif not (unit.stays_after(True) if visit.backward else self.prefetcher.lives_on(unit, True)):
                unit.reshard()
        if visits:
            names = ", ".join(dict.fromkeys(self.units[visit.unit].name for visit in visits))
            self.schedule.note(f"not used by this rank in a step, and gathered because other ranks may use them: {names}")

    def _watch(self, unit: Unit, output: object, first_node: int) -> object:
        """Put hooks on the outputs that gather the unit in backward; set `lent` if its memory may be read after the release.

        first_node: number of the first autograd node that this forward made. Returns the output; a parameter in it is replaced
        by a view of its memory, since the Parameter object becomes a released one.
        """
        training, memories = torch.is_grad_enabled(), unit.memories
        if not (unit.sharded or unit.entries.distributed) or not (training or memories):
            return output

        seen = unit.writes

        def arrived(_: object) -> None:
            unit.check_seen(seen)
            self.begin_unit_backward(unit)

        tensors = find_tensors(output)
        views = any(memory_of(tensor) in memories for tensor in tensors)
        if views:
            self.lend_out(unit)
            own = nn.Parameter
            output = map_tensors(lambda x: x.view_as(x) if isinstance(x, own) and memory_of(x) in memories else x, output)
            tensors = find_tensors(output)
        for tensor in tensors if training else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)
                base = torch_compat.base(tensor)
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(arrived)  # autograd drops a view's hook when the view is modified in place
        if not views and unit.referred and not (training and leads_to_all(first_node, tensors)):
            unit.lent = True  # backward or the program may read its memory after the unit's release
        return output

    def lend_out(self, unit: Unit) -> None:
        """Keep a unit gathered until the model's forward ends, since its own forward has returned views of its parameters.

        For autograd these views are saved as handles, like parameters. Views that outlive the forward keep the gathered memory,
        and the unit's next gather uses new memory.
        """
        unit.lent = unit.lends = True
        if unit not in self.viewed:
            self.viewed.append(unit)

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward unless it has begun, and queue the callback of its end. Every hook of a backward calls this."""
        if self.backward is not None and self.backward.begun and self.backward.alive:
            return
        if not self.closed:  # else `_await_end` raises
            self.moved.check("parameters", "gradients")
        backward = self._await_end()
        self.frozen.follow()  # requires_grad may have been switched since the forward
        backward.begun = True
        self.before_gradients()

    def before_gradients(self) -> None:
        """Bring reduced gradients to the scale of those that a backward adds: times the loss scale, a mean over all ranks."""
        account = self.account
        factor = account.share * (self.progress.loss_scale if account.unscaled else 1.0)
        if factor != 1.0:
            self._scale_gradients(factor)
        account.unscaled, account.share = False, 1.0
        account.change()

    def _await_end(self) -> Backward:
        """Return the running backward; a new one has autograd call `end_backward` at its end. Clear an earlier, failed one."""
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")
        if self.backward is not None and self.backward.alive:
            return self.backward
        if self.in_backward:
            self._abandon()
        self.backward = Backward(self.end_backward)
        for reduction in self.reductions.of:
            reduction.begin()
        return self.backward

    def begin_unit_backward(self, unit: Unit) -> None:
        """Begin the unit's backward by gathering the unit again: a gradient has reached one of its outputs."""
        self.begin_backward()
        if unit.in_backward or unit.pinned:  # another output's gradient came first; or zs.gathered holds whole copies
            return
        unit.in_backward = True
        if unit.sharded:
            self._open(unit, backward=True)
            # create_graph=True: autograd saves tensors of this backward without our hooks
            unit.lent = unit.lent or torch.is_grad_enabled()
        unit.entries.expose()  # so that recomputation finds the same parameter objects as the forward

    def need(self, unit: Unit, seen: int) -> None:
        """Gather the unit for autograd, which saved its parameters when `unit.writes` was `seen`; raise if written since."""
        unit.check_seen(seen)
        if unit.phase is Phase.READY and unit.in_use:  # gathered by a gradient of its outputs, as usual
            return
        if not in_backward():
            raise ShardedAccessError(
                f"{unit.name}: a parameter was read through autograd's saved tensors (grad_fn._saved_...) outside of backward, where it is "
                "released. Read the parameter itself, in `with zs.gathered(model):`."
            )
        self.begin_unit_backward(unit)
        if unit.pinned:  # inside zs.gathered, whose whole copies are not the memory that autograd saved handles of
            self._open(unit, backward=True)

    def leave_backward(self, unit: Unit) -> None:
        """End the unit's backward, if it has begun: release the unit."""
        if not unit.in_backward:
            return
        unit.in_backward = False
        if not unit.in_use:
            unit.entries.hide()
            unit.entries.swap_out()
            if not unit.stays_after(backward=True):
                unit.reshard()

    def end_backward(self) -> None:
        """End a backward (collective): reduce units that only other ranks used, wait for all reductions, release all units."""
        if self.progress.scaler is not None and self.reductions.touched and not (self.backward and self.backward.scaled):
            raise ZeroshardError(
                "fp16: gradients reached the model by a way other than the outputs of its forward (an attribute, a "
                "submodule called directly), so the loss scale could not be applied. Return such losses from forward; compute a loss of "
                "parameters alone from `p.full_tensor()`; name a method that computes a loss to zs.register_forward."
            )
        self._take_part(None)
        self.account.ending()
        if self.sync and self.reductions.waits:
            self.reduce_all()
        for unit in self.units:
            self.leave_backward(unit)
        self.schedule.end(training=True)
        self.backward = None
        self.account.backwards += 1

    def unscale(self) -> None:
        """Divide gradients by the loss scale before anyone reads them (local; exact, since the scale is a power of two)."""
        if self.progress.scaler is not None and not self.account.unscaled and not self.in_backward:
            self.account.unscaled = True
            self._scale_gradients(1.0 / self.progress.loss_scale)

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        for group in self.groups:
            if group.grads is not None and group.grads.reduced:
                group.grads.scale(factor)

    @torch.no_grad()
    def reduce_all(self, agreed: Agreed | None = None) -> None:
        """Reduce all gradients not yet reduced (collective), to the mean over the ranks that had a batch."""
        self.attendance.tell("reduce")
        if self.attendance.serving:  # this rank's data has ended: it has no backward, which would have done this
            self.before_gradients()
        self.reductions.finish(agreed)
        self.account.held = not self.sync
        if self.attendance.share != 1.0:
            self.account.share = self.attendance.share
            self._scale_gradients(1.0 / self.account.share)

    # -- the rest --------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clear what a backward that raised, and forwards that were interrupted, have left on this rank.

        No hook of torch runs then: there is none for a failed backward, and forward hooks do not run after KeyboardInterrupt.
        """
        interrupted = [each for each in self.forwards if each.frame is not None and ended(each.frame)]
        self.forwards[:] = [each for each in self.forwards if each not in interrupted]
        if self.in_backward and not in_backward():
            self._abandon()
        elif interrupted and not self.forwards and not self.in_backward:
            self._leave_all()

    def _abandon(self) -> None:
        """Drop the gradients and release the units of a backward that raised, so that the next step starts clean."""
        self.backward = None
        self.account.failed(self.trained)
        self.reductions.clear()
        self._leave_all()
        for group in self.groups:
            if group.grads is not None:
                group.grads.discard()

    def _leave_all(self) -> None:
        for unit in self.units:
            unit.depth, unit.in_backward = 0, False
            self.saved.pop(unit)
            unit.forward = None
            unit.entries.hide()
            unit.entries.swap_out()
            unit.reshard()
            unit.cancel_fetch()

    @property
    def hides_sums(self) -> bool:
        """True while the program sees no gradients, as with FSDP2 (zeroshard.fsdp): it holds sums back, and none was reduced before."""
        return self.shows_masters and not self.sync and self.account.held and not any(group.has_reduced for group in self.groups)

    @property
    def trained(self) -> set[int]:
        """The ids of the parameters that may have gradients."""
        return {id(param) for group in self.groups if group.grads is not None for param in group.params}

    @property
    def with_gradients(self) -> set[int]:
        """The ids of the parameters for which some rank has a gradient."""
        return {id(param) for group in self.groups for param, active in zip(group.params, group.active, strict=True) if active}

    def flush(self, used: Collection[int] | None = None) -> None:
        """Reduce local sums held back, before gradients are used (collective); raise if a failed backward has lost gradients.

        used: ids of the parameters whose gradients are used; None: all.
        """
        self.moved.check("gradients")
        self.recover()
        if self.account.lost if used is None else not self.account.lost.isdisjoint(used):
            several = len(self.optimizers.sharded) > 1
            which = "zero_grad() of each optimizer that uses them" if several else "optimizer.zero_grad()"
            raise ZeroshardError(
                f"a backward failed after others since the last zero_grad, and the gradients of those went with it: call {which} and run their "
                "batches again."
            )
        if self.account.held:  # the same on every rank, while only some ranks may hold gradients
            self.reduce_all()

    def gradient_writes(self) -> list[int]:
        """Return the write counters of the gradients: they change whenever the program writes to one."""
        return [group.grads.writes for group in self.groups if group.grads is not None]

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True, keep: Collection[int] = ()) -> None:
        """Drop all gradients, reduced ones and local sums held back; set_to_none=False: set reduced ones to zero instead.

        keep: ids of parameters that keep theirs.
        """
        self.moved.check("gradients")
        self.recover()
        if keep:
            return self._zero_others(set_to_none, keep)
        for group in self.groups:
            if group.grads is None:
                continue
            if set_to_none:
                group.grads.drop_reduced() if group.waits else group.grads.drop()
                group.active = [False] * len(group.specs)
            else:
                if not group.waits:
                    group.grads.drop_held()  # first: at stage 1 sums are held where the reduced shard rests, which is elsewhere meanwhile
                if group.grads.reduced:
                    group.grads.zero()
        self.forget_backwards(to_zeros=not set_to_none)

    def _zero_others(self, set_to_none: bool, keep: Collection[int]) -> None:
        before = self.gradient_writes()
        for group in self.groups:
            if group.grads is not None:
                indices = [index for index, param in enumerate(group.params) if id(param) not in keep]
                self.reductions.touched -= {group.specs[index].number for index in indices if not group.waits}
                group.drop_gradients(indices, to_zeros=not set_to_none)
        now = self.gradient_writes()
        for core, found in self.account.clipped.items():  # a clip still holds for the gradients that are kept
            if found.writes == before:
                self.account.clipped[core] = replace(found, writes=now, partial=True)
        trained = self.trained
        self.account.drops(trained.difference(keep))
        # while sums are held back, ranks differ in which parameters have one
        left = self.account.held or any(group.has_gradients for group in self.groups)
        kept = trained - self.account.dropped if left else set()
        if not left or kept.isdisjoint(members_of(*self.optimizers.holding)):  # those that are left have no optimizer
            self.before_gradients()  # brings what is left to the scale of the next backward
            self.forget_backwards(to_zeros=not set_to_none, kept=kept)

    def forget_backwards(self, to_zeros: bool = False, kept: Collection[int] = ()) -> None:
        """Reset the account of backwards since the last zero_grad. The caller drops or zeroes the gradients, but those `kept`."""
        if not kept:
            self.reductions.touched &= {spec.number for group in self.groups if group.waits for spec in group.specs}
        self.account.zeroed(holding=not self.sync or (self.account.held and bool(kept)))
        self.attendance.zero_grad(to_zeros)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime of a sharded model, or of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, and ZeroshardError if it is not sharded: for a part of a sharded model, or a module
    that holds one, the error says which model to pass.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module that was given to zs.shard(), got {type(model).__name__}.")
    own = torch_compat.original(model).__dict__
    if "_zeroshard" not in own and (first_use := own.get(FIRST_USE)) is not None:
        own = first_use().__dict__
    runtime = model.__dict__.get("_zeroshard") or own.get("_zeroshard")
    if runtime is not None:
        return runtime
    what = f"this {type(model).__name__} is not sharded"
    inside = [name for name, module in model.named_modules() if "_zeroshard" in module.__dict__]
    if inside:
        raise ZeroshardError(f"{what} itself: pass its submodule {' or '.join(inside)}, which is.")
    homes = (getattr(param, "_home", None) for param in model.parameters())
    whole = next((home.group.runtime.model for home in homes if isinstance(home, ParamHome) and home.group.runtime.built), None)
    if whole is not None:
        raise ZeroshardError(
            f"{what} by itself: it is a part of a sharded {type(whole).__name__}. Pass that model; or give the part's parameters to a "
            "function of torch, such as torch.nn.utils.clip_grad_norm_(part.parameters(), max_norm)."
        )
    raise ZeroshardError(f"{what}: call zs.shard(model, optimizer, ...) first.")
