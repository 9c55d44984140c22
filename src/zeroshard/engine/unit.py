"""Units: each holds parameters that are gathered and reduced together.

A unit is usually one block of the model. Parameters of it that are alike (in dtype, requires_grad and four more properties: see
`Inventory.lay_out`) form a `ParamGroup`, with one flat buffer of values and one of gradients. A sharded unit's memory has phases:

    SHARDED -> [FETCHING ->] GATHERING -> READY -> SHARDED     an illegal step raises with both phases and the unit's name
    SHARDED (replicated units: READY) -> AWAY -> back          while zs.offload_states has moved the parameters

FETCHING: shards that rest on the host or on disk are being copied to the device, ahead of the gather.

While READY and in use, the modules hold the *compute* parameters (views of the flat buffer); at rest they hold the
sharded parameters. A unit is in use while a forward runs inside it (`depth`), and from its first gradient to its last
(`in_backward`); it is pinned inside `zs.gathered`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ModelChanged, ShardedAccessError, ShardedWriteError
from ..tensor.part import Piece
from ..tensor.released_parameter import AwayParameter, ReleasedParameter
from ..tensor.sharded_tensor import ReplicatedParameter, ShardedTensor, set_data, slice_like
from ..utils import torch_compat
from ..utils.autograd import memory_of
from ..utils.tensor_tree import Exchanged
from ..utils.torch_compat import references
from .comm.base import Collective, Comm
from .flat_buffer import ParameterBuffer
from .masters import Masters
from .module_entries import ModuleEntries
from .parameter import ParamHome
from .rest import Rest

if TYPE_CHECKING:
    from .reduction import GradientBuffer
    from .runtime import Runtime
    from .shard_model import GroupLayout


class Phase(Enum):
    """Phase of a unit's memory; the module's docstring shows the transitions, `_ALLOWED` lists them."""

    SHARDED = "sharded"
    FETCHING = "fetching"
    GATHERING = "gathering"
    READY = "ready"
    AWAY = "away"


_ALLOWED = {
    Phase.SHARDED: {Phase.FETCHING, Phase.GATHERING, Phase.AWAY},
    Phase.FETCHING: {Phase.GATHERING, Phase.SHARDED},
    Phase.GATHERING: {Phase.READY, Phase.SHARDED},
    Phase.READY: {Phase.SHARDED, Phase.AWAY},
    Phase.AWAY: {Phase.SHARDED, Phase.READY},
}


class ParamGroup:
    """Parameters of a unit that are alike (`Inventory.lay_out` says in what): one flat buffer of values, one of gradients.

    topology: the ranks over which it is sharded and reduced; for experts that a data-parallel axis cuts, `Topology.divided`.
    params: parameters that the user sees, sharded or ordinary. compute: the compute parameters, which autograd sees.
    active: for each parameter, whether any rank had a gradient for it since the last zero_grad (the same on every rank).
    """

    def __init__(
        self, unit: Unit, given: GroupLayout, values: ParameterBuffer, grads: GradientBuffer | None, masters: Rest | None
    ) -> None:  # fmt: skip
        """masters: where these rest; None if the optimizer steps the values. The builder then adds `params` and `compute`."""
        self.unit, self.runtime, self.values, self.grads = unit, unit.runtime, values, grads
        self.specs, self.layout, self.topology = list(given.specs), given.layout, given.topology
        self.comm: Comm = given.topology.shards
        self.whole = given.sizes.whole  # stays whole at rest though others are sharded (param_persistence_threshold)
        self.offload = given.sizes.states  # tier of masters and optimizer states
        self.plan = given.plan  # forms in which optimizer states rest
        self.columns: dict[str, Rest] = {}  # offloaded or coded optimizer states of the shard, by name
        self.averages: list[Rest] = []  # moving averages of the shard, one for each zs.ema
        self.params: list[nn.Parameter] = []
        self.compute: list[nn.Parameter] = []
        self.active = [False] * len(self.specs)
        self.own_references = 0  # number of references to the gathered memory that this library holds
        # True on exactly one of the ranks that hold copies of the same shard: its shard enters sums over all ranks
        self.counts = self.comm.replica == 0 and self.specs[0].counts
        self.homes = [ParamHome(self, index) for index in range(len(self.specs))]
        self.masters = Masters(self, masters)

    @property
    def trainable(self) -> bool:
        return self.grads is not None

    @property
    def gradients(self) -> GradientBuffer:
        """Gradient buffer of a trainable group."""
        assert self.grads is not None, "a frozen group has no gradients"
        return self.grads

    def begin_write(self) -> None:
        """Prepare a user's write to values, masters or states: wait for readers, invalidate copies (see WriteGate)."""
        self.runtime.attendance.refuse("a write to a parameter or an optimizer state")
        self.runtime.gate.before(self.unit)

    @property
    def referred(self) -> bool:
        """True if a tensor of the program, or one that autograd has saved, refers to the gathered memory."""
        return references(self.values.full) > self.own_references

    def count_write(self) -> None:
        """Count a write to this rank's shard, which leaves the wholes that ranks keep behind."""
        self.unit.writes += 1
        self.values.behind = self.values.kept

    def gather(self) -> Collective:
        """Start to gather the values (collective). After a write to slices where each rank steps the whole, make masters whole."""
        if self.values.behind and self.masters.whole:
            self.masters.complete()
        return self.values.gather()

    def detach(self) -> None:
        """Let the tensors that refer to the gathered memory keep it; later gathers of this group allocate other memory."""
        self.values.detach()
        for compute, view in zip(self.compute, self.values.views, strict=True):
            set_data(compute, view)
        self.own_references = references(self.values.full)

    def set_local(self, index: int, value: Tensor) -> None:
        """Write `value` to this rank's slice of parameter `index`."""
        self._begin_set()
        self.values.rest.store(self.homes[index].begin, value)

    def place(self, index: int) -> Tensor | None:
        """Return a 1-D view of this rank's slice, for the caller to write at once; None if the host can not write there."""
        home = self.homes[index]
        view = self.values.rest.view(home.begin, home.begin + home.stop - home.start)
        if view is not None:
            self._begin_set()
        return view

    def _begin_set(self) -> None:
        self.count_write()
        self.values.cancel_fetch()  # a fetched copy has the old value
        self.values.invalidate()  # so have copies that the communicator keeps

    def mark_written(self) -> None:
        """Count a step's write, which autograd did not see, so that the backward of an earlier forward raises, as in torch."""
        if self.values.sharded:
            self.count_write()
        else:
            before = [torch_compat.version(param) for param in self.params]
            torch.autograd.graph.increment_version(self.params)
            # what each counter has advanced by is no write of the program: more than 1 for fake tensors, which share one counter
            steps = [torch_compat.version(param) - seen for param, seen in zip(self.params, before, strict=True)]
            self.masters.versions = [version + step for version, step in zip(self.masters.versions, steps, strict=False)]

    def put_whole(self, index: int) -> None:
        """Record that the whole of replicated parameter `index` and its master were written, which autograd did not see."""
        if not self.values.sharded:
            torch.autograd.graph.increment_version(self.params[index])
        self.masters.written(index)

    def gradient(self, index: int) -> Tensor | None:
        """Return the reduced gradient of parameter `index` as a sharded (stage 0: plain) tensor, or None if it has none."""
        if self.grads is None:
            return None
        self.runtime.moved.check("gradients")
        if self.grads.holds and (self.runtime.hides_sums or (self.waits and not self.has_reduced)):
            return None
        if self.grads.holds and not self.waits:
            raise ShardedAccessError(
                f"{self.specs[index].name}.grad: backwards inside zs.accumulate, or after set_requires_gradient_sync(False), have added to "
                "it what only this rank has. Run the last backward outside of it, after set_requires_gradient_sync(True), first; or take "
                "zs.full_gradients(model) (collective)."
            )
        if not self.grads.reduced or not self.active[index]:  # no backward yet, or no rank had a gradient for it
            return None
        self.runtime.unscale()
        if self.grads.replicated:
            slot = self.layout.slots[index]
            return self.grads.full[slot.offset : slot.stop].view(slot.shape)
        gradient = self.homes[index].wrap(None, self.grads.dtype)
        gradient._of_gradient = True
        return gradient

    def set_gradient(self, index: int, value: Tensor | None) -> None:
        """Assign gradient `index`: sharded like its parameter, whole, or None. Raise ModelChanged while sums are held back."""
        if self.grads is None:
            if value is not None:
                raise ModelChanged(f"{self.specs[index].name} is frozen (requires_grad=False) and takes no gradient.")
            return
        home, slot, grads = self.homes[index], self.layout.slots[index], self.grads
        if value is None and self.grads.holds and (self.waits or self.runtime.hides_sums):  # it has none
            return
        if grads.holds:
            raise ModelChanged(
                f"{self.specs[index].name}.grad was assigned while gradients of backwards inside zs.accumulate, or after "
                "set_requires_gradient_sync(False), are held back: they would be added to it. Run the last backward outside of it, after "
                "set_requires_gradient_sync(True), or optimizer.zero_grad() first."
            )
        if value is not None:
            wanted = slot.shape if home.hidden_cut is None and not isinstance(value, ShardedTensor) else home.shape
            if (got := tuple(value.shape)) != wanted:
                raise ModelChanged(f"{home.name}.grad was assigned a tensor of shape {got}: expected the parameter's, {wanted}.")
            self.refuse_gradient_write()
            if isinstance(value, ShardedTensor):
                slice_like(value, home, wanted, whole=grads.replicated)
            elif home.hidden_cut is not None:
                value = home.wrap(home.slice_of(value), value.dtype)
        self.runtime.unscale()
        if value is not None and not grads.reduced:
            grads.zero()  # parameters without a gradient have values of an earlier step in the buffer
        place = grads.full[slot.offset : slot.stop] if grads.replicated else grads.load(home.begin, home.end)
        if value is None:
            place.zero_()
        elif isinstance(value, ShardedTensor):
            place.copy_(value.gathered().reshape(-1) if grads.replicated else value._local)
        else:
            place.copy_(value.reshape(-1) if grads.replicated else value.reshape(-1)[home.start : home.stop])
        if not grads.replicated:
            grads.store(home.begin, place)
        grads.reduced = grads.reduced or value is not None
        self.active[index] = value is not None
        account, key = self.runtime.account, id(self.params[index])
        if value is not None and not account.weighed:
            account.divided.add(key)
        if value is None:
            account.drops({key})
            if not any(group.has_gradients and not group.waits for group in self.runtime.groups):
                self.runtime.forget_backwards()  # the program has set every p.grad = None: the same as zero_grad

    @property
    def waits(self) -> bool:
        """True if this rank holds sums back by FSDP2's switch of this unit alone. As in FSDP2 nobody sees or drops them until they are
        reduced; while all of the model is held back, they are as the others."""
        return self.runtime.shows_masters and not self.runtime.account.held and self.grads is not None and self.grads.holds

    def parts(self, without: Collection[int]) -> list[int] | None:
        """Return the parameters with gradients that are not in `without` (ids); None if none of those with gradients is in it."""
        active = [index for index, active in enumerate(self.active) if active]
        left = [index for index in active if id(self.params[index]) not in without]
        return None if len(left) == len(active) else left

    @property
    def has_reduced(self) -> bool:
        """True if some rank has a gradient of the group, and it was reduced."""
        return self.grads is not None and self.grads.reduced and any(self.active)

    @property
    def has_gradients(self) -> bool:
        """True if some parameter has a gradient, or a sum that is held back."""
        return any(self.active) or (self.grads is not None and self.grads.holds)

    def drop_gradients(self, indices: Collection[int], to_zeros: bool) -> None:
        """Drop the gradients of some parameters, reduced ones and sums held back; to_zeros: set reduced ones to zero instead."""
        if not self.waits:
            self.gradients.unhold(indices)
        dropped = [index for index in indices if self.active[index]]
        for index in indices if not to_zeros else ():
            self.active[index] = False
        if to_zeros or self.has_gradients:
            self.change_gradients(dropped, torch.Tensor.zero_)  # the next backward adds to these
        else:
            self.gradients.drop()

    def change_gradients(self, indices: Iterable[int], change: Callable[[Tensor], Tensor]) -> None:
        """Change the reduced gradients of some parameters in place."""
        for index in indices:
            home, slot, grads = self.homes[index], self.layout.slots[index], self.gradients
            if grads.replicated and grads.carry is None:  # else its place has local sums
                change(grads.full[slot.offset : slot.stop])
            else:
                grads.store(home.begin, change(grads.load(home.begin, home.end)))

    def refuse_gradient_write(self) -> None:
        """Raise ZeroshardError where ranks whose data has ended could not write their slices of the gradient."""
        self.runtime.attendance.refuse(f"a write to the gradient of {self.specs[0].name} or others")


@dataclass(eq=False)
class ModelForward:
    """One running forward of a model. frame: of its call; None if compiled. given: its arguments if any is cast, else None."""

    frame: FrameType | None
    given: Exchanged | None


@dataclass
class UnitForward:
    """State of the outermost forward that runs inside a unit.

    first_node: number of the first autograd node that the forward makes. hooks: the saved-tensor hooks that it runs under.
    given: its arguments, if `Runtime.mark_inputs` has put marked tensors into copies of them. handled: the exception that the
    program handles around it, such as one that it repeats the forward for.
    """

    first_node: int
    handled: BaseException | None = None
    hooks: saved_tensors_hooks | None = None
    given: Exchanged | None = None


class Unit:
    """A named set of parameter groups with the modules through which it is entered."""

    def __init__(
        self, runtime: Runtime, name: str, modules: list[nn.Module], number: int, layouts: Iterable[GroupLayout],
        make: Callable[[Unit, GroupLayout], ParamGroup],
    ) -> None:  # fmt: skip
        """make: makes a group of this unit, with its parameters' present values, as a layout says."""
        self.runtime, self.name, self.modules, self.number = runtime, name, modules, number
        self.writes = 0  # number of times that this unit's shards have been written, the first values included
        self.depth = 0  # number of forwards that run inside (they nest)
        self.in_backward = False
        self.pinned = False  # inside zs.gathered: the modules hold whole copies
        # where `make` fails, parameters refer to this unit already
        self.groups, self.sharded, self.phase, self.entries = [], False, Phase.READY, ModuleEntries([])
        self.groups = groups = [make(self, given) for given in layouts]
        self.gathered = [group for group in groups if group.values.sharded]  # the other groups are whole at rest
        self._released = [group for group in self.gathered if group.values.released]
        self.sharded = bool(self.gathered)
        self.phase = Phase.SHARDED if self.sharded else Phase.READY
        self.lent = False  # the next release must let tensors that refer to the memory keep it (`ParamGroup.detach`)
        self.lends = False  # a forward of it has returned views of its memory, once or more
        # after what it stays gathered until the program releases it: True: a backward, False: a forward
        self.stays: set[bool] = set()
        self.forward: UnitForward | None = None  # the outermost forward that runs inside
        self.entries = ModuleEntries(groups)
        anew = [group for group in self.gathered if not group.values.kept]
        self.gathered_nbytes = sum(g.layout.numel * g.values.full.itemsize for g in anew)
        self.gathered_numel = sum(g.layout.numel for g in anew)
        self.releases = bool(self._released)
        for group in self.gathered:  # nobody else has any reference yet
            group.own_references = references(group.values.full)
        self.staged = any(g.values.staged for g in self.gathered)
        # a gather needs other ranks to take part, unless this rank copies from shared memory by itself
        self.meets = any(not g.values.comm.copies for g in self.gathered)
        self.trainable = [g for g in groups if g.trainable]
        # parameters of which this rank has no part (experts of other ranks) get no gradient
        self._here = [p for group in groups for p, s in zip(group.params, group.specs, strict=True) if not s.absent]
        self.num_params = len(self._here)
        self.piece = isinstance(modules[0], Piece)  # other pieces of the module run between its forward and its backward
        self.expect()
        self._works: list[Collective] = []
        self._guarded = [param for group in self._released for param in group.compute if type(param) is nn.Parameter]
        here = weakref.ref(self)  # weak, since parameters that the program keeps refer to the class that refers to the function

        def gather_for_backward() -> None:  # a backward uses a compute parameter that was kept beyond its forward
            unit = here()
            if unit is not None:
                unit.runtime.need(unit, unit.writes)

        self._released_class = ReleasedParameter.of_unit(gather_for_backward)
        self.guard(self.phase is Phase.SHARDED)  # nothing is gathered yet

    @property
    def inside(self) -> UnitForward:
        """State of the forward that runs inside; there must be one."""
        assert self.forward is not None
        return self.forward

    @property
    def memories(self) -> set[int | None]:
        """Identities of the storages of gathered parameters that a release gives up; empty where nothing is ever released."""
        return {memory_of(group.values.full) for group in self._released} if self.releases else set()

    @property
    def referred(self) -> bool:
        """True if anything but this library refers to the gathered memory."""
        return self.releases and any(group.referred for group in self._released)

    def expect(self) -> None:
        """Count the gradients that a backward brings; call it again after requires_grad of a parameter was switched."""
        self.expected = sum(param.requires_grad for param in self._here)

    @property
    def marked(self) -> bool:
        """True if its backward can end with gradients missing: then marks on the forward's inputs tell the end."""
        return self.expected < self.num_params or self.piece

    @property
    def in_use(self) -> bool:
        """True inside the unit's forward or backward and inside zs.gathered: modules do not hold the resting parameters."""
        return self.depth > 0 or self.in_backward or self.pinned

    def _move(self, phase: Phase) -> None:
        if phase not in _ALLOWED[self.phase]:
            raise AssertionError(f"unit {self.name}: illegal transition {self.phase.value} -> {phase.value}")
        self.phase = phase

    def fetch(self) -> bool:
        """Start to copy offloaded shards to the device (SHARDED -> FETCHING). Return False if no staging buffer is free."""
        if self.phase is not Phase.SHARDED or not self.staged:
            return True
        if not all(group.values.fetch() for group in self.gathered):
            return False  # groups whose copies have started keep them for the next call
        self._move(Phase.FETCHING)
        return True

    @property
    def fetched(self) -> bool:
        """True if the shards being fetched have all arrived in their staging buffers."""
        return self.phase is Phase.FETCHING and all(group.values.fetched for group in self.gathered)

    def cancel_fetch(self) -> None:
        """Drop shards that were fetched and not gathered (FETCHING -> SHARDED), since the shards at rest are about to change."""
        for group in self.groups:
            group.values.cancel_fetch()
        if self.phase is Phase.FETCHING:
            self._move(Phase.SHARDED)

    def unshard(self) -> None:
        """Start the all-gather (-> GATHERING); no-op if started or READY. If it raises (no memory), the unit is SHARDED again."""
        if self.phase is Phase.AWAY:
            self.runtime.moved.check("parameters")
        if self.phase not in (Phase.SHARDED, Phase.FETCHING):  # under way, or gathered
            return
        self._move(Phase.GATHERING)
        try:
            for group in self.gathered:
                self._works.append(group.gather())
        except BaseException as error:  # KeyboardInterrupt, too; the program may catch it and go on, with a smaller batch
            for work in self._works:
                work.wait()
            self._works = []
            for group in self.gathered:
                group.values.cancel_fetch()
                group.values.release()
            self._move(Phase.SHARDED)
            self.runtime.watches.tell(error, self.runtime, f"the gather of {self.name}")
            raise

    def wait_for_unshard(self) -> None:
        """Wait for the unit's all-gather, starting it if need be (-> READY)."""
        if self.phase is Phase.READY:
            return
        self.unshard()
        for work in self._works:
            work.wait()
        self._works = []
        self._move(Phase.READY)
        self.guard(False)

    def reshard(self) -> None:
        """Release the gathered memory (READY -> SHARDED); the inverse of `wait_for_unshard`. No-op for replicated units."""
        if not self.sharded or self.phase in (Phase.SHARDED, Phase.FETCHING, Phase.AWAY):
            return
        self.wait_for_unshard()  # a running all-gather still writes to the memory
        lent, self.lent = self.lent and self.referred, False
        for group in self._released:
            if lent and group.referred:
                group.detach()
            group.values.release()
        if lent:
            self.runtime.saved.follow(self)  # the parted groups have other storages now
        self._move(Phase.SHARDED)
        self.guard(True)

    def move_away(self) -> None:
        """Mark the parameters as moved to another tier (SHARDED, or READY if replicated, -> AWAY); used, they raise."""
        self._move(Phase.AWAY)
        for group in self.groups:
            for param in group.params:
                if group.values.sharded:
                    param._held = None  # type: ignore[attr-defined]  # reads then go to the resting place, which raises
                else:
                    param.__class__ = AwayParameter

    def move_back(self) -> None:
        """Mark the parameters as moved back to their own tier, perhaps to another address; the inverse of `move_away`."""
        self._move(Phase.SHARDED if self.sharded else Phase.READY)
        for group in self.groups:
            values = group.values
            for index, param in enumerate(group.params):
                if values.sharded:
                    param._held = group.homes[index].held()  # type: ignore[attr-defined]
                else:
                    param.__class__ = ReplicatedParameter
            if not values.sharded and values.views and values.views[0].data_ptr() != values.full.data_ptr():
                values.views = values.new_views()
                for param, view in zip(group.params, values.views, strict=True):
                    set_data(param, view)

    def cancel_unshard(self) -> None:
        """Complete a running all-gather and release it (GATHERING -> SHARDED): the caller gathers the buffers itself."""
        if self.phase is Phase.GATHERING:
            self.reshard()

    def invalidate(self) -> None:
        """Drop copies made ahead of use and wait until no copy reads the shards: the shards are about to be written."""
        if not self.in_use:
            self.give_back()
            self.reshard()
            self.cancel_fetch()
        for group in self.groups:
            group.values.invalidate()

    def guard(self, released: bool) -> None:
        """Set the class of compute parameters: if `released`, one that the program kept raises instead of reading its memory."""
        cls = self._released_class if released else nn.Parameter
        for param in self._guarded:
            param.__class__ = cls

    def check_unchanged(self) -> None:
        """Raise ModelChanged if a parameter of a replicated unit was replaced; `swap_in` checks the sharded units' parameters."""
        if not (self.sharded or self.pinned):
            self.entries.check_unchanged()

    def check_seen(self, seen: int) -> None:
        """Raise ShardedWriteError in a backward if the shards were written since the forward, when `writes` was `seen`."""
        if self.writes != seen:
            raise ShardedWriteError(
                f"{self.name}: its parameters were written (by a step, a load, in place) between a forward and its backward, whose "
                "gradients would be neither of the old values nor of the new ones. Call backward first, or the forward again."
            )

    def stays_after(self, backward: bool) -> bool:
        """Return whether it stays gathered after a backward, or after a forward, as the program asks (FSDP2's set_reshard_after_*)."""
        return self.releases and backward in self.stays

    def give_back(self) -> None:
        """Put the sharded parameters into the modules where a program's unshard() has put whole ones; no-op while it is in use."""
        if self.entries.swapped and not self.in_use:
            self.check_unwritten("after unshard()", "Write the sharded parameter, before unshard() or after reshard()")
            self.entries.swap_out()

    def check_unwritten(self, where: str, remedy: str) -> None:
        """Raise ShardedWriteError if a whole parameter was written in place; at each use from now on where the write stays."""
        written = self.entries.written()
        if not written:
            return
        if not self.in_backward:  # else the end of the unit's backward releases it
            self.entries.swap_out()
            self.reshard()
        values = [group.values for group in self.gathered if any(spec.name in written for spec in group.specs)]
        what, effect = f"{', '.join(written[:3])}: written in place {where}", "where each rank has a copy that is dropped"
        if lasts := not all(each.released for each in values):
            shared = any(each.mapped and not each.comm.control.alone for each in values)
            effect = (
                "in memory that ranks share (map_shared=True): all have" if shared else "where each rank keeps the whole: it has"
            )
            effect += " other values now. Load all parameters (model.load_state_dict, torch.distributed.checkpoint.load, zs.load)"
        error = ShardedWriteError(f"{what}, {effect}. {remedy}.")
        if lasts:
            kept = [group for unit in self.runtime.units for group in unit.gathered if not group.values.released]
            self.runtime.gate.mark(error, (home for group in kept for home in group.homes if not group.specs[home.index].absent))
        raise ShardedWriteError(*error.args)  # another object: each raise adds frames to it
