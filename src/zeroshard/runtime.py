"""The runtime: connects what happens in an nn.Module and in autograd to units and schedule.

    forward    pre-hook: gather, put compute parameters in        hook: take them out, release, watch the outputs
    backward   gradient of an output: gather again                last gradient of the unit: reduce, release
    its end    one callback: units without (all) gradients join with zeros, reductions are waited for

No wrapper module and no full-backward hooks. A unit that took no part on this rank but did on another joins the
reduction with zeros: at the end of backward ranks exchange which units and parameters they had gradients for. What
depends on the stage is in the units' placements, never here.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .comm.base import Comm
from .config import Config
from .errors import CheckpointError, ModelChanged, ModelClosed, ShardedAccessError, ZeroshardError
from .memory.ledger import Ledger
from .memory.pool import StagingPool
from .memory.tiers import Tiers
from .precision import LossScaler, cast_floating, find_tensors, look_through, map_tensors
from .schedule import Schedule, Visit
from .sharded import clear_local_grad, local_grad
from .tiles import Tile
from .unit import ParamGroup, Phase, Unit

_LOOKAHEAD = 8  # visits: bounds the host work of prefetching when units are tiny


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Marked(torch.autograd.Function):
    """Identity on a frozen unit's inputs: its backward runs when nothing inside the unit remains to be computed."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        ctx.done()
        return (None, *grads)


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
        self.num_params = sum(len(group.specs) for group in self.groups)
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
        self.messages: list[str] = []
        self._tree = _Tree(model)
        self._firsts = [group.params[0] for group in self.groups]  # whoever converts the model converts these
        self._dtypes = [param.dtype for param in self._firsts]
        self._active = False  # inside a backward
        self._training = False  # inside a forward that was entered with gradients
        self._scaled = False  # the loss scale was applied in this backward
        self._touched: set[int] = set()  # parameters that got a gradient since the last reduction
        self._reduced: set[int] = set()  # units whose reduction this backward started
        self._order = [unit.number for unit in reversed(units) if unit.expected]  # agreed, for ordered comms
        self._completed: list[int] = []  # in this backward, in this rank's order
        self._agreed = False  # the order is that of a backward; until then it is that of the definition, reversed
        self._departing: list[int] = []  # units whose reduced gradients have not left for where they rest
        self._kept: list[Unit] = []  # units whose memory an output still refers to
        self.handles: list[Any] = []  # hooks, for close
        self.compiled: list[tuple[nn.Module, Any]] = []

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ShardedAccessError(
            f"a sharded {type(self.model).__name__} can not be copied or pickled. Copy it before zs.shard(), or take "
            "zs.full_state_dict(model)."
        )

    # -- forward ---------------------------------------------------------------------------------------------

    def root_enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before the model's own forward: state left by a failed backward goes, inputs are cast."""
        if self.closed:
            raise ModelClosed("this model was closed with zs.close(); zs.shard() it again to train it sharded.")
        if self.unusable:
            raise CheckpointError(self.unusable)
        self.tiers.check()
        if self._active and not _in_backward():
            self._abandon()
        if not self._active:
            self._training = torch.is_grad_enabled()
            self._release_kept()
            self._check_modules()
            for unit in self.units:
                unit.check_unchanged()
        if self.config.precision != "fp32":
            args, kwargs = cast_floating((args, kwargs), self.config.compute_dtype)
        return args, kwargs

    def _check_modules(self) -> None:
        """Raise ModelChanged where parameters came, went or got another dtype (a submodule may be wrapped)."""
        if [param.dtype for param in self._firsts] != self._dtypes:
            self._complain_dtype()
        if self._tree.stands() or any(unit.pinned for unit in self.units):
            return
        names = {id(p): spec.name for group in self.groups for p, spec in zip(group.params, group.specs, strict=True)}
        present = {id(p): name for name, p in self.model.named_parameters()}
        gone = [name for key, name in names.items() if key not in present]
        new = [name for key, name in present.items() if key not in names]
        if gone or new:
            raise ModelChanged(
                f"parameter {(gone + new)[0]} was replaced, added or removed after zs.shard(). "
                "zs.close(model) first, change the model (resize, adapt), then zs.shard() it again."
            )
        self._tree = _Tree(self.model)

    def _complain_dtype(self) -> None:
        for group, param, known in zip(self.groups, self._firsts, self._dtypes, strict=True):
            if param.dtype != known:
                raise ModelChanged(
                    f"parameter {group.specs[0].name} was converted from {known} to {param.dtype} after zs.shard(), by half(), "
                    "to(dtype) or the like. Give precision='bf16' or 'fp16' to zs.shard(), or convert the model before it."
                )

    def root_exit(self, output: Any) -> Any:
        """After the model's own forward: fp16 outputs leave as fp32, and their gradients enter scaled."""
        self._training = False
        if not torch.is_grad_enabled():
            self.schedule.end(training=False)
        else:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._check_open)
        if self.scaler is None or output is None:
            return output
        output = cast_floating(output, torch.float32)
        return map_tensors(self._scale_gradient, output)

    def _check_open(self, _: Tensor) -> None:
        if self.closed:
            raise ModelClosed("backward() through a model that was closed with zs.close().")

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
            self._open(unit, backward=unit.in_backward)
        unit.depth += 1

    def exit(self, unit: Unit, output: Any) -> None:
        """A forward inside the unit has ended (output None: by an exception)."""
        if unit.depth == 0:
            return  # it was refused before it began
        unit.depth -= 1
        if unit.depth > 0 or unit.pinned:
            return
        if output is not None:
            self._gather_staged()
        if torch.is_grad_enabled() and output is not None:
            self._watch(unit, output)
            if self._active and unit.sharded and not isinstance(unit.modules[0], Tile):
                unit.in_backward = True  # recomputation: the unit's backward follows at once; before a tile's, other tiles'
        if unit.in_backward or not unit.sharded:
            return
        unit.swap_out()
        if not self.schedule.repeats(Visit(unit.number, False), self._in_training()) and not self._lives_on(unit):
            self._release(unit)

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
        tensors = [t for t in find_tensors((args, kwargs)) if t.requires_grad]
        if not tensors or not torch.is_grad_enabled() or not unit.sharded:
            return args, kwargs

        def done() -> None:
            if unit.arrived == 0 or not unit.expected:
                self._leave_backward(unit)

        marked = dict(zip(map(id, tensors), _Marked.apply(done, *tensors), strict=True))
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
        if self.optimizer is not None:
            self.optimizer.core.poll()
        if self.config.overlap:
            self._prefetch(training)

    def _prefetch(self, training: bool) -> None:
        """Fetch ahead from other tiers as far as buffers allow, and gather ahead: the next unit, more within the budget.

        Over shared memory a gather is a copy by this rank: nothing is won by an early one, unless peers wait for it. A
        shard that is still on its way is not waited for here; ordered comms gather it at `_gather_staged`, since there
        ranks must start collectives in one order, whatever their disks do.
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
            if (unit.fetched and not self.comm.ordered) if unit.staged else not self.comm.shares_memory:
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
        """Let the first gradient that reaches an output of the unit gather it again."""
        if not unit.sharded:
            return
        memories = None if unit.groups[0].values.mapped else {
            group.values.full.untyped_storage()._cdata for group in unit.groups
        }  # fmt: skip

        def arrived(_: Any) -> None:
            self.begin_unit_backward(unit)

        found = False
        tensors, complete = look_through(output)
        for tensor in tensors:
            if memories is not None and tensor.untyped_storage()._cdata in memories:
                self._keep(unit)  # the output is (a view of) a parameter: its memory must outlive the forward
            if not tensor.requires_grad:
                continue
            found = True
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)
                base = tensor._base
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(arrived)  # a view's hook is lost if the view is modified in place
        if not (found and complete) and unit.expected and memories is not None:
            self._keep(unit)  # outputs that can not be seen: backward may still come through them

    def _keep(self, unit: Unit) -> None:
        """Hold the unit's memory until the backward (or the next forward) is over."""
        if not unit.kept:
            unit.kept = True
            self._kept.append(unit)

    # -- backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every event of backward; the first one orders the callback at its end."""
        if not self._active:
            if self.closed:
                raise ModelClosed("backward() through a model that was closed with zs.close().")
            self._active = True
            Variable._execution_engine.queue_callback(self.end_backward)

    def begin_unit_backward(self, unit: Unit) -> None:
        """A gradient has reached an output of the unit."""
        self.begin_backward()
        if unit.in_backward or unit.pinned:
            return
        unit.in_backward = True
        if unit.sharded:
            self._open(unit, backward=True)

    def gradient(self, unit: Unit, group: ParamGroup, index: int, param: Tensor) -> None:
        """The local gradient of one parameter is complete: it moves to the buffer that will be sent."""
        self.begin_backward()
        grad = local_grad(param)
        if grad is None:
            return
        clear_local_grad(param)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        assert group.grads is not None
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                group.grads.add(index, grad.detach(), self.sync)
        else:
            group.grads.add(index, grad, self.sync)
        self._touched.add(group.specs[index].number)
        self.unweighted |= not self.weighing
        unit.arrived += 1
        if unit.arrived == unit.expected:
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """All gradients of the unit are there."""
        unit.arrived = 0
        self._gather_staged()
        if self.sync:
            self._completed.append(unit.number)
            if self.comm.ordered:
                self._reduce_in_order()
            else:
                self._reduce(unit)
        if not unit.has_frozen:
            self._leave_backward(unit)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit.number)
        for group in unit.trainable:
            assert group.grads is not None
            with torch.no_grad():
                group.grads.reduce()
                if not self.config.overlap:
                    group.grads.settle()
        self.comm.poll()
        self._depart(unit)

    def _depart(self, latest: Unit) -> None:
        """Gradients that rest elsewhere leave while backward goes on; the device's only stream does not wait for the latest."""
        for number in self._departing:
            if number != latest.number:
                for group in self.units[number].trainable:
                    group.grads.depart()
        self._departing = [
            number
            for number in [*self._departing, latest.number]
            if any(group.grads.departing for group in self.units[number].trainable)
        ]
        if self.optimizer is not None:
            self.optimizer.core.poll()

    def _reduce_in_order(self) -> None:
        """Start what may start: a reduction waits for those before it in the agreed order."""
        done = set(self._completed)
        for number in self._order:
            if number in self._reduced:
                continue
            if number not in done:
                return
            self._reduce(self.units[number])

    def _leave_backward(self, unit: Unit) -> None:
        if not unit.in_backward:
            return
        unit.in_backward = False
        if unit.depth == 0 and not unit.pinned:
            unit.swap_out()
            self._release(unit)

    def end_backward(self) -> None:
        """The end of backward: join what others reduced, wait for all reductions, release all units."""
        if self.scaler is not None and self._touched and not self._scaled:
            raise ZeroshardError(
                "fp16: gradients reached the model by a way other than the outputs of its forward (an attribute, a "
                "submodule called directly), so the loss scale could not be applied. Return such losses from forward."
            )
        with torch.no_grad():
            if self.sync:
                self._join()
                self._finish_reductions()
        for unit in self.units:
            unit.arrived = 0
            self._leave_backward(unit)
        self._release_kept()
        self.schedule.end(training=True)
        self._active = self._scaled = False

    def _join(self) -> None:
        """Agree on units and parameters with gradients; reduce (with zeros) what only others completed."""
        started = {u.number for u in self.units if any(g.grads.pending or g.grads.holds for g in u.trainable)}
        mine = self._reduced | started
        units, params = self._exchange_masks(mine, self._touched)
        missing = sorted(units - self._reduced, reverse=True)
        if self.comm.ordered:
            missing = [number for number in self._order if number in missing]
        for number in missing:
            self._reduce(self.units[number])
        for group in self.groups:
            for index, spec in enumerate(group.specs):
                if spec.number in params:
                    group.active[index] = True

    def _exchange_masks(self, units: set[int], params: set[int]) -> tuple[set[int], set[int]]:
        """The unions over ranks. In the usual case all ranks send the same few bytes."""
        order = [number for number in self._completed] if not self._agreed and self.comm.ordered else []
        if self.comm.world_size == 1:
            if order:
                self._agree_on_order(order)
            return units, params
        unit_mask = sum(1 << number for number in units)
        param_mask = sum(1 << number for number in params)
        unit_nbytes, param_nbytes = len(self.units) // 8 + 1, self.num_params // 8 + 1
        payload = unit_mask.to_bytes(unit_nbytes, "little") + param_mask.to_bytes(param_nbytes, "little")
        payload += struct.pack(f"<{len(order)}I", *order)
        everyone = self.comm.exchange(payload, f"end of backward (model of {self.num_params} parameters)")
        if self.comm.ordered and not self._agreed:
            packed = everyone[0][unit_nbytes + param_nbytes :]
            self._agree_on_order(list(struct.unpack(f"<{len(packed) // 4}I", packed)))
        if all(part == payload for part in everyone):
            return units, params
        for part in everyone:
            unit_mask |= int.from_bytes(part[:unit_nbytes], "little")
            param_mask |= int.from_bytes(part[unit_nbytes : unit_nbytes + param_nbytes], "little")
        return _bits(unit_mask), _bits(param_mask)

    def _agree_on_order(self, first: list[int]) -> None:
        """Reductions are matched by order: take that in which rank 0 completed its units."""
        self._order = first + [number for number in self._order if number not in first]
        self._agreed = True

    def _finish_reductions(self) -> None:
        reduced = [group.grads for number in sorted(self._reduced) for group in self.units[number].trainable]
        replicated = [grads for grads in reduced if grads.replicated]
        carried = any(grads.carries for grads in replicated)
        for grads in reduced:
            grads.finish()
        if replicated:
            if carried:
                self.comm.exchange(b"", "gradients in place")  # `finish` has moved them where peers will read
            for work in [grads.gather() for grads in replicated]:
                work.wait()
            self.comm.exchange(b"", "gradients gathered")  # before any rank overwrites what peers copy
        self.accumulated = not self.sync
        self._reduced, self._touched, self._completed, self._departing = set(), set(), [], []

    # -- the rest --------------------------------------------------------------------------------------------

    def _release(self, unit: Unit) -> None:
        if not unit.kept:
            unit.release()

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, []
        for unit in kept:
            unit.kept = False
            if unit.depth == 0 and not unit.in_backward and not unit.pinned:
                self._release(unit)

    def settle(self) -> None:
        """Before shards are written: no unit keeps what was gathered or fetched from them."""
        for unit in self.units:
            if unit.depth == 0 and not unit.pinned:
                unit.release()
                unit.forget()
            for group in unit.groups:
                group.values.settle()

    def before_change(self) -> None:
        """Values, masters or states are about to be written: a save in the background copies them first."""
        if self.saver is not None:
            self.saver.await_copy()

    def _abandon(self) -> None:
        """A backward ended by an exception: drop what it left, so that the next step starts clean."""
        self._active = self._scaled = False
        self.weight, self.unweighted = 0.0, False
        self._reduced, self._touched, self._completed, self._departing = set(), set(), [], []
        for unit in self.units:
            unit.arrived, unit.depth, unit.in_backward = 0, 0, False
            unit.swap_out()
            self._release(unit)
            unit.forget()
            for group in unit.trainable:
                group.grads.discard()

    def flush(self) -> None:
        """Before gradients are used: reduce what zs.accumulate held back if no reduced backward followed (collective)."""
        if not self.accumulated:
            return  # whether there was one is the same on every rank; whether it left gradients is not
        with torch.no_grad():
            self._join()
            self._finish_reductions()

    def drop_gradients(self) -> None:
        """zero_grad: no gradient remains, on any rank."""
        self.forget_backwards()
        for group in self.groups:
            if group.grads is not None:
                group.grads.drop()
                group.active = [False] * len(group.specs)

    def forget_backwards(self) -> None:
        """What is known of the backwards since the last zero_grad; their gradients are the caller's."""
        self.weight, self.unweighted, self.accumulated = 0.0, False, not self.sync
        self._touched = set()


class _Tree:
    """The modules of a model and which parameters they have: seen in microseconds whether any came or went."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._params = [module._parameters for module in modules]
        self._counts = [*map(len, self._params)]
        absent = [(params, name) for params in self._params for name, param in params.items() if param is None]
        self._absent = [params for params, _ in absent], [name for _, name in absent]

    def stands(self) -> bool:
        """True if every module has the children and the number of parameters that it had."""
        return (
            all(modules == known for modules, known in self._children)
            and [*map(len, self._params)] == self._counts
            and all(map(operator.is_, map(dict.get, *self._absent), repeat(None)))
        )


def _bits(mask: int) -> set[int]:
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model. Raises ZeroshardError for one that is not sharded."""
    runtime = model.__dict__.get("_zeroshard")
    if runtime is None:
        raise ZeroshardError(f"this {type(model).__name__} is not sharded: call zs.shard(model, optimizer, ...) first.")
    return runtime
