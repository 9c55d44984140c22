"""Builds units from a model: lays out parameters, makes buffers, copies values, and exchanges the parameter objects.

Optimizers, ties and closures keep the user's own Parameter objects: in a sharded unit each of them becomes, in place,
the sharded parameter, and its old tensor becomes the compute parameter over the flat buffer (hooks go with it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Config, Offload, Placement, Tier
from ..errors import OffloadIOError
from ..tensor.attributes import attributes_of
from ..tensor.sharded_tensor import ReplicatedParameter, ShardedParameter, ShardedTensor
from ..tensor.state_column import StatePlan
from ..utils import torch_compat
from ..utils.torch_compat import carry_hooks, swap
from .comm.base import Comm
from .comm.pool import StagingPool
from .flat_buffer import ParameterBuffer
from .flat_layout import ALIGNMENT, FlatLayout, round_up
from .ledger import MASTERS
from .masters import masters_shown
from .parameter import ParamSpec
from .reduction import GradientBuffer
from .rest import Rest
from .sizes import Buffers, Group, rests_away
from .topology import Topology
from .unit import ParamGroup, Unit
from .user_hooks import adopt

if TYPE_CHECKING:
    from .runtime import Runtime


@dataclass(eq=False)
class UnitPlan:
    """Plan of a unit: its name, the modules whose forward enters it, and its parameters."""

    name: str
    modules: list[nn.Module]
    specs: list[ParamSpec] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """Layout of one ParamGroup, and what it takes on this rank.

    specs: in the order of their slots. topology: the ranks over which it is sharded. values, gradients: the Comms that gather and
    reduce it, plain or quantizing. sizes: of its states, with dtypes and tiers. plan: forms in which optimizer states rest.
    """

    specs: list[ParamSpec]
    layout: FlatLayout
    topology: Topology
    values: Comm
    gradients: Comm
    sizes: Group
    plan: StatePlan


@dataclass(frozen=True, eq=False)
class Inventory:
    """The parts of a model that zs.shard lays out, at whatever stage and on whatever tiers.

    states: id of a parameter -> plan of its optimizer states; empty if neither an optimizer nor an option tells them. group_of:
    id of a parameter -> index of its optimizer group.
    """

    units: list[UnitPlan]
    states: dict[int, StatePlan]
    group_of: dict[int, int]

    def lay_out(self, config: Config, topology: Topology) -> ModelLayout:
        """Return where all states lie on this rank. Nothing is allocated or written.

        Parameters of a unit share a flat buffer (bucket) if they are alike in dtype, requires_grad, whole at rest, quantized, cut
        along model axes, and format of states. In it they are sorted by optimizer group, matrices before vectors. The fraction
        of the states that is offloaded is spread evenly over the units.
        """
        sharded, whole, room = config.row.parameter is Placement.SHARDED, set(), config.model_persistence_threshold
        for spec in sorted((spec for unit in self.units for spec in unit.specs), key=lambda spec: spec.number):
            numel = math.prod(spec.shape)  # small parameters stay whole at rest, the model's first ones while there is room
            if sharded and numel <= min(config.param_persistence_threshold, room):
                whole.add(spec)
                room -= numel
        units: list[list[GroupLayout]] = []
        stepped_numel = offloaded_numel = 0
        for unit in self.units:
            buckets: dict[tuple, list[ParamSpec]] = {}
            for spec in unit.specs:
                packs = topology.of(spec.axes).packs(spec.name, len(spec.shape))  # whether (values, gradients) may be packed
                states = self.states.get(id(spec.original), StatePlan())
                key = (packs, spec in whole, spec.dtype, spec.requires_grad, spec.axes, states if states.coded else None)
                buckets.setdefault(key, []).append(spec)
            units.append([])
            for (packs, at_rest, dtype, trained, *_), bucket in buckets.items():
                bucket.sort(key=lambda s: (self.group_of.get(id(s.original), -1), len(s.shape) < 2))
                plans, own = [self.states.get(id(s.original), StatePlan()) for s in bucket], topology.of(bucket[0].axes)
                alignment = math.lcm(ALIGNMENT, *(column.elements for column in plans[0].columns))
                layout = FlatLayout.build([spec.shape for spec in bucket], own.shards.world_size, alignment)
                values, gradients = own.values_of(packs[0], layout.numel), own.gradients_of(packs[1], layout.numel)
                sizes = Group(layout.numel, layout.shard_numel, dtype, whole=at_rest)
                if trained:
                    offload, numel = config.offload_optimizer, layout.shard_numel
                    stepped_numel += numel
                    if offload.tier is Tier.DEVICE or offloaded_numel + numel / 2 > offload.ratio * stepped_numel:
                        offload = Offload()
                    else:
                        offloaded_numel += numel
                    tier = config.offload_param.tier if sharded and not at_rest else Tier.DEVICE
                    # a quantized gather also overwrites this rank's own values, so that ranks compute alike: masters are exact
                    rounded = (at_rest or not sharded) and values is not own.shards
                    master = _master_dtype(config, dtype, tier, offload.tier, topology.control.streams.separate_host, rounded)
                    gradient = dtype if dtype == torch.float64 else config.gradient_dtype
                    columns, unpadded = max((plan.columns for plan in plans), key=len), round_up(layout.slots[-1].stop, alignment)
                    sizes = Group(layout.numel, numel, dtype, gradient, offload, master, columns, at_rest, unpadded)
                elif masters_shown.get() and any(spec.given_dtype.itemsize > dtype.itemsize for spec in bucket):
                    sizes = Group(
                        layout.numel, layout.shard_numel, dtype, states=config.offload_param, master=torch.float32, whole=at_rest
                    )
                plan = plans[0] if trained else StatePlan()  # a frozen group has no gradient, masters or states
                units[-1].append(GroupLayout(bucket, layout, own, values, gradients, sizes, plan))
        return ModelLayout(self, config, topology, units)


def _master_dtype(
    config: Config, dtype: torch.dtype, values: Tier, states: Tier, separate: bool, rounded: bool
) -> torch.dtype | None:  # fmt: skip
    """Return the masters' dtype, or None; int16: the bits that bf16 values lack. values, states: tiers. rounded: values are."""
    if config.master_weights and dtype in (torch.bfloat16, torch.float16):
        return torch.int16 if config.master_weights == "split" and dtype == torch.bfloat16 else torch.float32
    # masters are needed where the step can not reach the values, or runs beside forward and backward (a delayed update)
    steps_on_host = states is not Tier.DEVICE
    away = (separate and values is Tier.DEVICE) if steps_on_host else rests_away(values, separate)
    return dtype if away or rounded or (steps_on_host and config.delayed_update is not None) else None


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """Layout of a model on this rank, with one configuration. units: the groups of each unit of the inventory."""

    inventory: Inventory
    config: Config
    topology: Topology
    units: list[list[GroupLayout]]

    @property
    def groups(self) -> list[GroupLayout]:
        """The groups of all units."""
        return [group for groups in self.units for group in groups]

    @property
    def separate(self) -> bool:
        """True if the device has a memory of its own."""
        return self.topology.control.streams.separate_host

    def buffers(self) -> list[tuple[Topology, Buffers]]:
        """Return, for each topology, the sizes of the buffers of groups that are sharded over its ranks; the model's is first."""
        divided = [] if self.topology.divided is None else [self.topology.divided]
        members = [(each, [group.sizes for group in self.groups if group.topology is each]) for each in (self.topology, *divided)]
        return [(topology, Buffers.of(self.config, self.separate, groups)) for topology, groups in members]

    def exceptions(self) -> Iterator[str]:
        """Yield, for the report, what is exempt from quantization, and parameters that stay whole though others are sharded."""
        groups, weights, sent = self.groups, self.topology.weights, self.topology.sent
        packed = [each for each in groups if weights is not None and each.values is not each.topology.values]
        trained = [each for each in groups if sent is not None and each.sizes.gradient is not None]
        reduced = [each for each in trained if each.gradients is not each.topology.gradients]
        for what, plain in (("parameters", packed), ("gradients", reduced)):
            if plain:
                names = [spec.name for group in plain for spec in group.specs]
                numel = sum(group.layout.true_numel for group in plain)
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                yield f"{what} of {len(names)} parameters ({numel:,} elements) sent unquantized: {shown}"
        whole = [slot.numel for group in groups if group.sizes.whole for slot in group.layout.slots]
        if whole:
            yield (
                f"{len(whole)} of {sum(len(group.specs) for group in groups)} parameters ({sum(whole):,} elements) stay whole on every rank: "
                f"they have at most param_persistence_threshold={self.config.param_persistence_threshold:,} elements"
            )


class Builder:
    """Builds the units of one model as its layout says."""

    def __init__(self, runtime: Runtime, layout: ModelLayout, serial: int) -> None:
        """serial: number of this model."""
        self.runtime, self.layout, self.config, self.tiers = runtime, layout, layout.config, runtime.tiers
        # by id of a Topology (experts have their own): buffers that gradients are sent from; buffers for shards from another tier
        self.pools: dict[int, tuple[StagingPool, StagingPool | None]] = {}
        self.tag = serial << 20  # number of the newest buffer: each model has 2**20 numbers of its own
        self.replaced: dict[int, nn.Parameter] = {}  # id of a given parameter -> the object that took its place

    def build(self) -> list[Unit]:
        """Build all units, with the parameters' present values in their buffers (collective)."""
        layout, tiers, ledger = self.layout, self.tiers, self.tiers.ledger
        for topology, own in layout.buffers():
            sent = StagingPool(topology.shards, ledger, *own.sent)
            fetched = None if own.fetched is None else StagingPool(topology.shards, ledger, *own.fetched)
            self.pools[id(topology)] = sent, fetched
            tiers.pools += [sent] if fetched is None else [sent, fetched]
        sizes = Buffers.of(self.config, tiers.separate, [group.sizes for group in layout.groups])
        tiers.reserve(sizes)
        laid_out = enumerate(zip(layout.inventory.units, layout.units, strict=True))
        units = [Unit(self.runtime, plan.name, plan.modules, number, groups, self._group) for number, (plan, groups) in laid_out]
        layout.topology.open()
        layout.topology.notes.extend(layout.exceptions())
        return units

    def _group(self, unit: Unit, given: GroupLayout) -> ParamGroup:
        config, sizes, layout = self.config, given.sizes, given.layout
        label, (sent, fetched) = f"{unit.name} ({sizes.dtype})", self.pools[id(given.topology)]
        self.tag += 1
        cut = config.row.parameter is Placement.SHARDED and not sizes.whole
        values = ParameterBuffer(
            layout, sizes.dtype, config, given.values, self.tiers, self.tag, f"gather {label}",
            cut or self.runtime.shows_masters, not cut, fetched,
        )  # fmt: skip
        grads: GradientBuffer | None = None
        masters: Rest | None = None
        if sizes.gradient is not None:
            self.tag += 1
            given.gradients.expect(self.tag, [(slot.offset, slot.shape) for slot in layout.slots], layout.numel)
            grads = GradientBuffer(
                layout, sizes.gradient, config.sent_dtype(sizes.dtype), config, given.gradients, sent, self.tiers, self.tag,
                f"reduce {label}", given.topology.summed,
            )  # fmt: skip
        if sizes.master is not None:
            whole = config.row.optimizer is Placement.REPLICATED
            masters = self.tiers.rest(MASTERS, sizes.states, layout.numel if whole else layout.shard_numel, sizes.master)
            if sizes.master is torch.int16:
                masters = self.tiers.halves(self.tiers.over(values.full) if whole else values.rest, masters)
        group = ParamGroup(unit, given, values, grads, masters)
        values.comm.read_precise(values.number, group.masters.precise)
        for index in range(len(group.specs)):
            self._place(group, index)
        return group

    def _place(self, group: ParamGroup, index: int) -> None:
        """Copy a parameter's value into the buffers, and exchange its object for the sharded (or replicated) parameter."""
        spec = group.specs[index]
        original = spec.original
        if not original.is_meta:
            _store(group, index, original)
            given = original._local if isinstance(original, ShardedTensor) else original
            if given.is_cuda:  # its memory is freed below, and may have been allocated on another stream
                given.record_stream(torch.cuda.current_stream(given.device))
        view, attributes = group.values.views[index], attributes_of(original)
        fresh = nn.Parameter(view, requires_grad=original.requires_grad)
        fresh.__dict__.update(attributes)
        if not group.values.sharded:
            if original.is_meta or isinstance(original, ShardedTensor):
                self._replace(group, index, fresh)
            else:
                original.data = view  # the object stays, with its hooks
            fresh = group.specs[index].original
            if type(fresh) is nn.Parameter:
                fresh.__class__ = ReplicatedParameter
            fresh._home = group.homes[index]  # type: ignore[attr-defined]
            adopt(group, index, fresh)
            group.params.append(fresh)
            group.compute.append(fresh)
            group.masters.versions.append(torch_compat.version(fresh))
            return
        facade = ShardedParameter(
            group.homes[index].held(), group.homes[index].shape, group.homes[index], original.requires_grad,
            dtype=group.masters.stepped.dtype if group.homes[index].shows_master else spec.dtype, device=group.comm.device,
        )  # fmt: skip
        old = self._replace(group, index, facade)
        if isinstance(old, ShardedTensor) or old is None or old.is_meta:
            compute = fresh
        else:
            old.data = view
            compute = old
        carry_hooks(original, compute)  # after the swap, torch's hook tables are still with the user's object
        adopt(group, index, compute)
        param = group.specs[index].original
        param.__dict__.update(attributes)
        param._compute = compute  # type: ignore[attr-defined]
        group.params.append(param)
        group.compute.append(compute)

    def _replace(self, group: ParamGroup, index: int, new: Any) -> nn.Parameter | None:
        """Turn the user's object into `new`. Return the object that now has the old tensor, or None.

        Where torch can not swap (weak references, a live graph), the modules get the new object, and the old one an empty
        tensor: who still refers to the old one finds no elements, instead of freed memory.
        """
        spec = group.specs[index]
        original = spec.original
        if swap(original, new):
            return new
        for owner, attribute in spec.owners:
            torch_compat.own_parameters(owner)[attribute] = new
        self.replaced[id(original)] = new
        group.specs[index] = replace(spec, original=new)
        if isinstance(original, ShardedTensor):
            original._held = original._local.new_empty(0)  # the layout still refers to it
        elif not original.is_meta:
            original.data = original.data.new_empty(0)
        return None


def build_units(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, layout: ModelLayout, room: AbstractContextManager[None]
) -> list[Unit]:
    """Build the units of a model (collective). room: context that raises, on every rank, if its states do not fit.

    The model's modules, the optimizer's groups and its states refer to the sharded parameters afterwards.
    """
    tiers, comm = runtime.tiers, runtime.comm
    built = False
    builder = Builder(runtime, layout, comm.new_serial())
    comm.fence_write(synchronised=True)  # peers must not read the new buffers before `fence_read`; nobody reads them yet
    try:
        with room:
            units = builder.build()
            comm.fence_read()  # all ranks have written their values
            built = True
    except OffloadIOError as error:  # the disk is full after all, with a part of the values written: every rank must fail
        tiers.close()
        tiers.fail(error)
    finally:
        if not built:  # the runtime is in a cycle: the program may try again before garbage is collected
            tiers.abandon()
    if optimizer is not None:
        replaced = builder.replaced
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]
        states = [(replaced.get(id(p), p), entries) for p, entries in optimizer.state.items()]
        optimizer.state.clear()  # the same dictionary is filled again: programs may refer to it
        optimizer.state.update(states)
    return units


@torch.no_grad()
def write_value(group: ParamGroup, index: int, value: Tensor) -> None:
    """Write a value of parameter `index`, whole or sharded, to this rank's values and masters.

    A sharded value that is cut in another way is gathered first (collective).
    """
    group.begin_write()
    _store(group, index, value)


@torch.no_grad()
def _store(group: ParamGroup, index: int, value: Tensor) -> None:
    home = group.homes[index]
    if isinstance(value, ShardedTensor):
        owner: Any = value._home
        # compare the cuts of all ranks: for a small parameter they may agree on some ranks alone, and the gather needs every rank
        alike = all(owner.cut(rank) == home.cut(rank) for rank in range(home.comm.world_size))
        piece = value._local if alike else value.gathered().reshape(-1)[home.start : home.stop]
    else:
        piece = value.detach().reshape(-1)[home.start : home.stop]
    behind = group.values.behind
    group.set_local(index, piece)
    if group.values.replicated:  # each rank writes the whole
        group.values.views[index].copy_(_whole_of(value))
        group.values.behind = behind
    masters = group.masters
    masters.dirty.discard(index)  # values and masters get the same write
    masters.traces.pop((index, "value"), None)
    if masters.rest is not None:
        masters.rest.store(masters.range(index)[0], _whole_of(value).reshape(-1) if masters.whole else piece)


def _whole_of(value: Tensor) -> Tensor:
    return value.gathered() if isinstance(value, ShardedTensor) else value.detach()
