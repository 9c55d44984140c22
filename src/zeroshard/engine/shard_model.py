"""Builds units from a model: lays out parameters, makes buffers, copies values, and exchanges the parameter objects.

Optimizers, ties and closures keep the user's own Parameter objects: in a sharded unit each of them becomes, in place,
the sharded parameter, and its old tensor becomes the compute parameter over the flat buffer (hooks go with it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..axes.topology import Topology, needed
from ..config import Config, Offload, Placement, Tier
from ..errors import ConfigError, HostMemoryError, OffloadIOError, did_you_mean
from ..formats.state_codecs import Formats
from ..guard.out_of_memory import FAILURES, tell_shortage
from ..guard.rank_consistency import optimizer_groups
from ..packing.compressed import CompressedGathers
from ..tiers.estimate import BUFFERS, Buffers, Group, Need, Place, needs, rests_away, shortage
from ..tiers.host_memory import keep_freed_memory, limits
from ..tiers.storage import Rest, SplitRest, Tiers
from ..utils import torch_compat
from ..utils.host import host_identity
from ..utils.state_format import StateFormat
from ..utils.torch_compat import carry_hooks, swap
from .auto_wrap import ROOT, UnitPlan, partition
from .comm.base import Comm, DirectComm
from .comm.messages import exchange_values
from .comm.pool import BufferPool, StagingPool
from .flat_buffer import ParameterBuffer
from .flat_layout import ALIGNMENT, FlatLayout, round_up
from .ledger import GATHERED, GRADIENTS, MASTERS, Ledger
from .parameter import ParamSpec
from .prefetch import most_gathered
from .reduction import GradientBuffer
from .tensor.attributes import attributes_of
from .tensor.sharded_tensor import ReplicatedParameter, ShardedParameter, ShardedTensor
from .tensor.state_column import StateColumn, StatePlan, declared_columns
from .unit import ParamGroup, Unit
from .user_hooks import adopt

if TYPE_CHECKING:
    from .runtime import Runtime

_ADAM = ("exp_avg", "exp_avg_sq")
# names of states as large as the parameter, by class of optimizer (subclasses included) and its options
_COLUMNS: dict[str, Callable[[dict], tuple[str, ...]]] = {
    "Adagrad": lambda options: ("sum",),
    "ASGD": lambda options: ("ax",),
    "Lion": lambda options: ("exp_avg",),
    "Muon": lambda options: ("momentum_buffer",) if options.get("use_muon", True) else _ADAM,
    "SGD": lambda options: ("momentum_buffer",) * (options.get("momentum", 0) != 0),
    "RMSprop": lambda options: (
        "square_avg",
        *("momentum_buffer",) * (options.get("momentum", 0) > 0),
        *("grad_avg",) * bool(options.get("centered")),
    ),
    "Adam": lambda options: _ADAM + ("max_exp_avg_sq",) * bool(options.get("amsgrad")),
    "AdamW": lambda options: _ADAM + ("max_exp_avg_sq",) * bool(options.get("amsgrad")),
}


def state_plans(config: Config, optimizer: torch.optim.Optimizer | None, specs: list[ParamSpec]) -> dict[int, StatePlan]:
    """Return id of each parameter -> its plan of states; for an unknown class, two of a first step's states.

    Without an optimizer only `optimizer_states` plans any: those of an optimizer that is made later, of a class not yet known. Raise
    ConfigError if `optimizer_states` names a state that a known class does not keep.
    """
    known = next((_COLUMNS[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in _COLUMNS), None)
    declared, given = tuple(declared_columns(optimizer).values()), config.optimizer_states
    by_name = tuple(given.items()) if isinstance(given, Mapping) else ()
    others = given if isinstance(given, StateFormat) else None
    spec_of = {id(spec.original): spec for spec in specs}
    plans: dict[int, StatePlan] = {}
    later = [{"params": [spec.original for spec in specs if spec.requires_grad]}] if given is not None else []
    for group in later if optimizer is None else optimizer.param_groups:
        unknown = tuple(column.name for column in declared) or (*dict(by_name), "", "")[: max(2, len(by_name))]
        names = known(group) if known is not None else unknown
        for name, _ in by_name:
            if known is not None and name not in names:
                raise ConfigError(
                    f"optimizer_states: {type(optimizer).__name__} keeps {', '.join(names) or 'no such states'}, not {name!r}."
                    f"{did_you_mean(name, names)}"
                )
        for param in group["params"]:
            spec = spec_of.get(id(param))
            kept = [] if spec is None else [(name, form) for name, form in by_name if not _spared(form, spec)]
            rest = None if others is None or spec is None or _spared(others, spec) else others
            codes = any(form.format != "fp32" for form in (*dict(kept).values(), *filter(None, (rest,))))
            make = Formats(declared, tuple(kept), rest) if declared or codes else None
            plans[id(param)] = StatePlan(tuple(StateColumn(n) if make is None else make(n) for n in names), make)
    return plans


def _spared(form: StateFormat, spec: ParamSpec) -> bool:
    """Return whether a parameter keeps fp32 states: a small one, no matrix, one that the format exempts, or an embedding."""
    embeds = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module, _ in spec.owners)
    embeds |= getattr(spec.original, "unit_of_its_own", False)  # tied to another pipeline stage's, which may be an embedding
    return embeds or form.spares(spec.whole_name, math.prod(spec.whole_shape), len(spec.whole_shape))


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

    states: id of a parameter -> plan of its optimizer states; empty if neither an optimizer nor an option tells them. group_of: id -> its optimizer group.
    """

    units: list[UnitPlan]
    states: dict[int, StatePlan]
    group_of: dict[int, int]

    @classmethod
    def of(cls, model: nn.Module, config: Config, specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None) -> Inventory:
        """Partition a model into units. Raise ConfigError for an option that names no module of it, or no state of its optimizer."""
        states = state_plans(config, optimizer, specs)
        return cls(partition(model, config, specs), states, optimizer_groups(optimizer))

    def lay_out(self, config: Config, topology: Topology) -> ModelLayout:
        """Return where all states lie on this rank. Nothing is allocated or written.

        A unit's parameters are in buckets by dtype, requires_grad, whole at rest, quantized, cut along model axes, and format of
        states. Within a bucket they are sorted by optimizer group, matrices before vectors. The fraction of the states that is
        offloaded is spread evenly over the units.
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
                packs = topology.of(spec.distribution).packs(spec.name, len(spec.shape))
                axes = spec.distribution.axes if spec.distribution is not None else ()
                states = self.states.get(id(spec.original), StatePlan())
                key = (packs, spec in whole, spec.dtype, spec.requires_grad, axes, states if states.coded else None)
                buckets.setdefault(key, []).append(spec)
            units.append([])
            for (packs, at_rest, dtype, trained, *_), bucket in buckets.items():
                bucket.sort(key=lambda s: (self.group_of.get(id(s.original), -1), len(s.shape) < 2))
                plans, own = [self.states.get(id(s.original), StatePlan()) for s in bucket], topology.of(bucket[0].distribution)
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
                    # a quantized gather overwrites this rank's own values, too, so that all ranks compute alike: masters keep the exact ones
                    rounded = (at_rest or not sharded) and values is not own.shards
                    master = _master_dtype(config, dtype, tier, offload.tier, topology.control.streams.separate_host, rounded)
                    gradient = dtype if dtype == torch.float64 else config.gradient_dtype
                    columns, unpadded = max((plan.columns for plan in plans), key=len), round_up(layout.slots[-1].stop, alignment)
                    sizes = Group(layout.numel, numel, dtype, gradient, offload, master, columns, at_rest, unpadded)
                plan = plans[0] if trained else StatePlan()  # a frozen group has no gradient, masters or states
                units[-1].append(GroupLayout(bucket, layout, own, values, gradients, sizes, plan))
        return ModelLayout(self, config, topology, units)


def _master_dtype(
    config: Config, dtype: torch.dtype, values: Tier, states: Tier, separate: bool, rounded: bool
) -> torch.dtype | None:  # fmt: skip
    """Return the dtype of a group's masters (int16: split), or None. values, states: tiers. rounded: values at rest are not exact."""
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
        """Return, for each topology, the sizes of the buffers of the groups that are sharded over its ranks; the model's comes first."""
        divided = [] if self.topology.divided is None else [self.topology.divided]
        members = [(each, [group.sizes for group in self.groups if group.topology is each]) for each in (self.topology, *divided)]
        return [(topology, Buffers.of(self.config, self.separate, groups)) for topology, groups in members]

    def needs(self) -> dict[Place, int]:
        """Return the bytes that this rank will hold, without gathered units."""
        groups = [(group, (group.sizes.shard_numel, group.sizes.dtype)) for group in self.groups]
        found = needs(self.config, self.separate, [group.sizes for group, _ in groups])
        if not self.inventory.states:  # no optimizer: gradients on the device take no memory before the first backward
            found.pop((GRADIENTS, Tier.DEVICE, None), None)
        # secondary shards, partial sums between hops, quantized buffers, and quantization errors that are kept
        values = [(group.values, shard) for group, shard in groups]
        trained = [(group.gradients, shard) for group, shard in groups if group.sizes.gradient is not None]
        beside = needed(values, [(comm, (numel, self.config.sent_dtype(dtype))) for comm, (numel, dtype) in trained])
        found[BUFFERS, Tier.DEVICE, None] = beside + sum(sizes.device_nbytes for _, sizes in self.buffers())
        return found

    def held(self) -> dict[Place, int]:
        """Return the bytes that this rank will hold, gathered units included."""
        found, config, shards = self.needs(), self.config, self.topology.shards
        away = rests_away(config.offload_param.tier, self.separate)
        mapped = shards.copies and config.map_shared and not away
        if config.row.parameter is Placement.SHARDED and shards.world_size > 1 and not mapped:
            sizes = [[group.sizes for group in groups if not group.sizes.whole] for groups in self.units]
            numbered = zip(self.inventory.units, sizes, strict=True)
            nbytes = {unit.name: sum(each.numel * each.dtype.itemsize for each in groups) for unit, groups in numbered}
            order, limit = [name for name in nbytes if name != ROOT], config.prefetch_limit_nbytes
            found[GATHERED, Tier.DEVICE, None] = nbytes.get(ROOT, 0) + most_gathered(order, nbytes, limit and (not away) * limit)
        return found

    def farther(self, on_host: set[Tier]) -> Iterator[tuple[dict[str, object], dict[str, int]]]:
        """Yield the options that lead to higher stages and further tiers, with what a rank would hold of the host's memory then."""
        for options in self.config.farther():
            try:
                config = replace(self.config, offload_path=self.config.offload_path or ".", **options)
            except ConfigError:  # it conflicts with another option
                continue
            yield options, Need.of(self.inventory.lay_out(config, self.topology).needs(), on_host, 0, []).parts

    def exceptions(self) -> Iterator[str]:
        """Yield, for the report, what is exempt from quantization, and the parameters that stay whole though others are sharded."""
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


def open_tiers(config: Config, comm: DirectComm, ledger: Ledger) -> Tiers:
    """Make the tiers of a model; raise on all ranks if a folder on disk can not be used (collective). No check of free space.

    From now on the host's allocator keeps freed memory or, if even parameters rest on disk, returns it to the system.
    """
    if config.offload_param.tier is Tier.DISK:
        keep_freed_memory(large=False)
    elif config.keep_host_memory and comm.device.type == "cpu":
        keep_freed_memory()
    tiers, offloads = Tiers(comm, ledger), (config.offload_param, config.offload_gradient, config.offload_optimizer)

    def open_folders() -> None:
        for offload in offloads:
            tiers.open_folder(offload)

    if any(offload.tier is Tier.DISK for offload in offloads):
        try:
            _agree(open_folders, tiers, "zs.shard: offload folders")
        except BaseException:
            tiers.close()
            raise
    return tiers


def _agree(attempt: Callable[[], object], tiers: Tiers, label: str) -> None:
    """Call a function that uses disks, and raise the error of the first rank where it failed on every rank (collective)."""
    problem: Exception | None = None
    try:
        attempt()
    except (ConfigError, OSError, OffloadIOError) as error:
        problem = error
    found = next((error for error in exchange_values(tiers.comm, problem, label) if error is not None), None)
    if found is not None:
        raise found


def _given_back(specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of host memory that parameters and states take until their values are in the buffers."""
    values: list[Any] = [s.original._local if isinstance(s.original, ShardedTensor) else s.original for s in specs]
    states = optimizer.state.values() if optimizer is not None else ()
    values += [value for entries in states for value in entries.values() if type(value) is Tensor]
    return sum(value.nbytes for value in values if value is not None and value.device.type == "cpu")


def check_room(
    config: Config, tiers: Tiers, find: Callable[[], dict[Place, int]], what: str,
    changes: Callable[[set[Tier]], Iterable[tuple[dict[str, object], dict[str, int]]]] = lambda on_host: (), given_back: int = 0,
) -> None:  # fmt: skip
    """Raise, on every rank, HostMemoryError or SwapError if the ranks of some host have too little memory or disk (collective).

    find: returns the bytes that this rank will hold beside what it holds now. changes: returns, for the tiers that are in the
    host's memory, options under which it would hold less, as `estimate.shortage` takes them. given_back: bytes of the host's memory
    that this rank holds now, and will not then.
    """
    comm, offloads = tiers.comm, (config.offload_param, config.offload_gradient, config.offload_optimizer)
    if comm.imagined or (comm.device.type != "cpu" and all(offload.tier is Tier.DEVICE for offload in offloads)):
        return
    on_host = {Tier.HOST} | ({Tier.DEVICE} if comm.device.type == "cpu" else set())
    mine = Need.of(find(), on_host, given_back, limits())
    everyone = [Need.told(*other) for other in exchange_values(comm, astuple(mine), f"{what}: memory")]
    text = shortage(everyone, changes(on_host))
    if text is not None:
        raise HostMemoryError(text)
    if any(other.disk for other in everyone):
        check_disk(tiers, mine.disk, what)


def check_disk(tiers: Tiers, mine: dict[str, int], what: str) -> None:
    """Raise, on every rank, SwapError if a disk of some host is too small for its ranks (collective). mine: bytes by folder."""
    everyone = exchange_values(tiers.comm, (host_identity(), mine), f"{what}: space on disks")
    same = [theirs for host, theirs in everyone if host == host_identity()]
    _agree(lambda: tiers.check_space(mine, same), tiers, f"{what}: do they have room")


class Builder:
    """Builds the units of one model as its layout says."""

    def __init__(self, runtime: Runtime, layout: ModelLayout, serial: int) -> None:
        """serial: number of this model."""
        self.runtime, self.layout, self.config, self.tiers = runtime, layout, layout.config, runtime.tiers
        # of each topology, and of experts apart: the buffers from which gradients are sent, and shards that rest elsewhere
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
        if sizes.fetched is not None and tiers.separate:  # buffers of constant size for shards that pass between tiers
            nbytes, count, _ = sizes.fetched
            tiers.slots = BufferPool(ledger, count, nbytes, tiers.host_buffer, Tier.HOST)
        nbytes, count = sizes.landed
        if nbytes:
            tiers.landings = BufferPool(ledger, count, nbytes, tiers.device_buffer, Tier.DEVICE)
            tiers.arrivals = BufferPool(ledger, count, nbytes, tiers.host_buffer, Tier.HOST)
        laid_out = enumerate(zip(layout.inventory.units, layout.units, strict=True))
        units = [Unit(self.runtime, plan.name, plan.modules, number, groups, self._group) for number, (plan, groups) in laid_out]
        layout.topology.open()
        layout.topology.notes.extend(layout.exceptions())
        return units

    def _group(self, unit: Unit, given: GroupLayout) -> ParamGroup:
        config, sizes, layout = self.config, given.sizes, given.layout
        label, (sent, fetched) = f"{unit.name} ({sizes.dtype})", self.pools[id(given.topology)]
        self.tag += 1
        values = ParameterBuffer(
            layout, sizes.dtype, config, given.values, self.tiers, self.tag, f"gather {label}",
            config.row.parameter is Placement.SHARDED and not sizes.whole, fetched,
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
                masters = SplitRest(self.tiers.over(values.full) if whole else values.rest, masters)
        group = ParamGroup(unit, given, values, grads, masters)
        if isinstance(values.comm, CompressedGathers):
            values.comm.precise[values.number] = group.masters.precise
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
            None if group.values.staged else group.homes[index].fetch(gradient=False), spec.shape, group.homes[index], original.requires_grad,
            dtype=spec.dtype, device=group.comm.device,
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


def build_units(runtime: Runtime, optimizer: torch.optim.Optimizer | None, layout: ModelLayout) -> list[Unit]:
    """Build the units of a model (collective). Raise, on every rank, HostMemoryError or SwapError if its states do not fit.

    The model's modules, the optimizer's groups and its states refer to the sharded parameters afterwards.
    """
    tiers, comm, specs = runtime.tiers, runtime.comm, {unit.name: unit.specs for unit in layout.inventory.units}
    built = False
    builder = Builder(runtime, layout, comm.new_serial())
    comm.fence_write(synchronised=True)  # peers must not read the new buffers before `fence_read`; nobody reads them yet
    try:
        given_back = 0 if comm.imagined else _given_back([spec for unit in specs.values() for spec in unit], optimizer)
        try:
            check_room(layout.config, tiers, layout.needs, "zs.shard", layout.farther, given_back)
        except BaseException:
            tiers.close()
            raise
        units = builder.build()
        comm.fence_read()  # all ranks have written their values
        built = True
    except OffloadIOError as error:  # the disk is full after all, with a part of the values written: every rank must fail
        tiers.close()
        tiers.fail(error)
    except FAILURES as error:
        tell_shortage(error, runtime.model, layout.config, tiers.ledger, comm, "zs.shard", specs)
        raise
    finally:
        if not built:  # the runtime is in a cycle: the program may try again before garbage is collected
            tiers.pools, tiers.slots, tiers.landings, tiers.arrivals = [], None, None, None
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
        piece = value._local if alike else value.full_tensor().reshape(-1)[home.start : home.stop]
    else:
        piece = value.detach().reshape(-1)[home.start : home.stop]
    group.set_local(index, piece)
    if not group.values.sharded:
        group.values.views[index].copy_(_whole_of(value))
    masters = group.masters
    masters.dirty.discard(index)  # values and masters get the same write
    masters.traces.pop((index, "value"), None)
    if masters.rest is not None:
        masters.rest.store(masters.range(index)[0], _whole_of(value).reshape(-1) if masters.whole else piece)


def _whole_of(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value.detach()
