"""Builds units from a model: lays out parameters, makes buffers, copies values, and exchanges the parameter objects.

Optimizers, ties and closures keep the user's own Parameter objects: in a sharded unit each of them becomes, in place,
the sharded parameter, and its old tensor becomes the compute parameter over the flat buffer (hooks go with it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.base import Comm, DirectComm
from ..comm.codec import exchange_values
from ..comm.mesh.compressed import CompressedGathers
from ..comm.mesh.topology import Topology, needed
from ..comm.pool import BufferPool, StagingPool
from ..config import Config, Offload, Placement, Tier
from ..errors import ConfigError, HostMemoryError, OffloadIOError, did_you_mean
from ..memory.estimate import BUFFERS, Buffers, Group, Need, Place, needs, rests_away, shortage
from ..memory.host_memory import keep_freed_memory, limits
from ..memory.ledger import GATHERED, GRADIENTS, MASTERS, Ledger
from ..offload.storage import SplitRest, Tiers
from ..tensor.attributes import attributes_of
from ..tensor.flat_layout import ALIGNMENT, FlatLayout, round_up
from ..tensor.sharded_tensor import ReplicatedParameter, ShardedParameter, ShardedTensor
from ..tensor.state_codecs import Formats
from ..tensor.state_column import StateColumn, StatePlan, declared_columns
from ..utils import torch_compat
from ..utils.host import host_identity
from ..utils.state_format import StateFormat
from ..utils.torch_compat import carry_hooks, swap
from .auto_wrap import ROOT, UnitPlan, partition
from .flat_buffer import ParameterBuffer
from .out_of_memory import FAILURES, tell_shortage
from .parameter import ParamSpec
from .prefetch import most_gathered
from .rank_consistency import optimizer_groups
from .reduction import GradientBuffer
from .unit import ParamGroup, Unit
from .user_hooks import adopt

Pair = tuple[list[ParamSpec], FlatLayout]  # a bucket (the parameters of one group) and its layout


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


def open_tiers(
    config: Config, comm: DirectComm, ledger: Ledger, specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None
) -> Tiers:
    """Make the tiers of a model; raise on all ranks if a folder on disk can not be used (collective). No check of free space.

    From now on the host's allocator keeps freed memory or, if even parameters rest on disk, returns it to the system.
    """
    if config.offload_param.tier is Tier.DISK:
        keep_freed_memory(large=False)
    elif config.keep_host_memory and comm.device.type == "cpu":
        keep_freed_memory()
    tiers = Tiers(comm, ledger)
    tiers.state_plans = state_plans(config, optimizer, specs)
    if not comm.imagined:  # the host's memory that parameters and states take until their values are in the buffers
        values: list[Any] = [s.original._local if isinstance(s.original, ShardedTensor) else s.original for s in specs]
        states = optimizer.state.values() if optimizer is not None else ()
        values += [value for entries in states for value in entries.values() if type(value) is Tensor]
        on_host = [value for value in values if value is not None and value.device.type == "cpu"]
        tiers.released_nbytes = sum(value.nbytes for value in on_host)
    offloads = (config.offload_param, config.offload_gradient, config.offload_optimizer)
    problem: Exception | None = None
    try:
        for offload in offloads:
            tiers.open_folder(offload)
    except (ConfigError, OSError) as error:
        problem = error
    if any(offload.tier is Tier.DISK for offload in offloads):
        try:
            _agree_on(problem, tiers, "zs.shard: offload folders")
        except BaseException:
            tiers.close()
            raise
    return tiers


def _agree_on(problem: Exception | None, tiers: Tiers, label: str) -> None:
    """Raise the first rank's problem on every rank (collective)."""
    everyone = exchange_values(tiers.comm, problem, label)
    found = next((error for error in everyone if error is not None), None)
    if found is not None:
        raise found


def check_room(
    config: Config, tiers: Tiers, find: Callable[[], dict[Place, int]], what: str,
    changes: Callable[[set[Tier]], Iterable[tuple[dict[str, object], dict[str, int]]]] = lambda on_host: (),
) -> None:  # fmt: skip
    """Raise, on every rank, HostMemoryError or SwapError if the ranks of some host have too little memory or disk (collective).

    find: returns the bytes that this rank will hold beside what it holds now. changes: returns, for the tiers that are in the
    host's memory, options under which it would hold less, as `estimate.shortage` takes them.
    """
    comm, offloads = tiers.comm, (config.offload_param, config.offload_gradient, config.offload_optimizer)
    if comm.imagined or (comm.device.type != "cpu" and all(offload.tier is Tier.DEVICE for offload in offloads)):
        return
    on_host = {Tier.HOST} | ({Tier.DEVICE} if comm.device.type == "cpu" else set())
    mine = Need.of(find(), on_host, tiers.released_nbytes, limits())
    everyone = [Need.told(*other) for other in exchange_values(comm, astuple(mine), f"{what}: memory")]
    text = shortage(everyone, changes(on_host))
    if text is not None:
        raise HostMemoryError(text)
    if any(other.disk for other in everyone):
        check_disk(tiers, mine.disk, what)


def check_disk(tiers: Tiers, mine: dict[str, int], what: str) -> None:
    """Raise, on every rank, SwapError if a disk of some host is too small for its ranks (collective). mine: bytes by folder."""
    everyone = exchange_values(tiers.comm, (host_identity(), mine), f"{what}: space on disks")
    problem: Exception | None = None
    try:
        tiers.check_space(mine, [theirs for host, theirs in everyone if host == host_identity()])
    except (ConfigError, OSError, OffloadIOError) as error:
        problem = error
    _agree_on(problem, tiers, f"{what}: do they have room")


class Builder:
    """Builds the units of one model."""

    def __init__(self, config: Config, topology: Topology, tiers: Tiers, group_of: dict[int, int], serial: int) -> None:
        """group_of: id of a parameter -> its optimizer group, so that groups lie together. serial: number of this model."""
        self.config, self.topology, self.tiers, self.group_of = config, topology, tiers, group_of
        self.comm = topology.shards
        # of each topology, and of experts apart: the buffers from which gradients are sent, and shards that rest elsewhere
        self.pools: dict[int, tuple[StagingPool, StagingPool | None]] = {}
        self.tag = serial << 20  # number of the newest buffer: each model has 2**20 numbers of its own
        self._sharded = config.row.parameter is Placement.SHARDED
        # id of a trainable bucket's first spec -> dtype of gradients at rest, tier of masters and states, dtype of masters
        # (int16: split) or None
        self._states: dict[int, tuple[torch.dtype, Offload, torch.dtype | None]] = {}
        self.replaced: dict[int, nn.Parameter] = {}  # id of a given parameter -> the object that took its place

    def _lay_out(self, plans: list[UnitPlan]) -> list[list[Pair]]:
        """Return the buckets and layouts of each unit; plan the states of the trainable ones.

        A unit's parameters are in buckets by dtype, requires_grad, whole at rest, quantized, cut along model axes, and format of
        states. Within a bucket they are sorted by optimizer group, matrices before vectors.
        """
        config, room = self.config, self.config.model_persistence_threshold
        for spec in sorted((spec for plan in plans for spec in plan.specs), key=lambda spec: spec.number):
            numel = math.prod(spec.shape)  # small parameters stay whole at rest, the model's first ones while there is room
            spec.whole = self._sharded and numel <= min(config.param_persistence_threshold, room)
            room -= numel * spec.whole
        plans_of = self.tiers.state_plans
        units: list[list[Pair]] = []
        for plan in plans:
            buckets: dict[tuple, list[ParamSpec]] = {}
            for spec in plan.specs:
                packs = self.topology.of(spec.distribution).packs(spec.name, len(spec.shape))
                axes = spec.distribution.axes if spec.distribution is not None else ()
                states = plans_of.get(id(spec.original), StatePlan())
                key = (str(spec.dtype), spec.requires_grad, spec.whole, packs, axes, states if states.coded else None)
                buckets.setdefault(key, []).append(spec)
            units.append([])
            for bucket in buckets.values():
                bucket.sort(key=lambda s: (self.group_of.get(id(s.original), -1), len(s.shape) < 2))
                columns = plans_of.get(id(bucket[0].original), StatePlan()).columns
                alignment = math.lcm(ALIGNMENT, *(column.elements for column in columns))
                ranks = self.topology.of(bucket[0].distribution).shards.world_size
                layout = FlatLayout.build([spec.shape for spec in bucket], ranks, alignment)
                units[-1].append((bucket, layout))
        self._plan_states([pair for unit in units for pair in unit if pair[0][0].requires_grad])
        return units

    def _plan_states(self, trainable: list[Pair]) -> None:
        """Set `_states`. The fraction of the states that is offloaded is spread evenly over the units."""
        config, self._states = self.config, {}
        stepped_numel = offloaded_numel = 0
        for bucket, layout in trainable:
            spec, offload, numel = bucket[0], config.offload_optimizer, layout.shard_numel
            stepped_numel += numel
            if offload.tier is Tier.DEVICE or offloaded_numel + numel / 2 > offload.ratio * stepped_numel:
                offload = Offload()
            else:
                offloaded_numel += numel
            sharded = self._sharded and not spec.whole
            values = config.offload_param if sharded else Offload()
            low = config.master_weights and spec.dtype in (torch.bfloat16, torch.float16)
            steps_on_host = offload.tier is not Tier.DEVICE
            # masters are needed where the step can not reach the values, or runs beside forward and backward (a delayed update)
            separate = self.tiers.separate
            away = (separate and values.tier is Tier.DEVICE) if steps_on_host else rests_away(values.tier, separate)
            # a quantized gather overwrites this rank's own values, too, so that all ranks compute alike: masters keep the exact ones
            comm = self.topology.of(spec.distribution).shards
            rounded = values.tier is Tier.DEVICE and not sharded and self._values_comm(spec, layout) is not comm
            needed_anyway = away or rounded or (steps_on_host and config.delayed_update is not None)
            gradient_dtype = spec.dtype if spec.dtype == torch.float64 else config.gradient_dtype
            split = low and config.master_weights == "split" and spec.dtype == torch.bfloat16
            master = torch.int16 if split else torch.float32 if low else spec.dtype if needed_anyway else None
            self._states[id(spec)] = gradient_dtype, offload, master

    def needs(self, plans: list[UnitPlan]) -> dict[Place, int]:
        """Return the bytes that this rank would hold, gathered units included. Nothing is allocated, and `build` may follow."""
        units, away = self._lay_out(plans), rests_away(self.config.offload_param.tier, self.tiers.separate)
        found = self._needs([pair for unit in units for pair in unit])
        mapped = self.comm.copies and self.config.map_shared and not away
        if self._sharded and self.comm.world_size > 1 and not mapped:
            nbytes = {
                plan.name: sum(layout.numel * bucket[0].dtype.itemsize for bucket, layout in unit if not bucket[0].whole)
                for plan, unit in zip(plans, units, strict=True)
            }
            order, limit = [name for name in nbytes if name != ROOT], self.config.prefetch_limit_nbytes
            found[GATHERED, Tier.DEVICE, None] = nbytes.get(ROOT, 0) + most_gathered(order, nbytes, limit and (not away) * limit)
        return found

    def build(self, plans: list[UnitPlan]) -> list[Unit]:
        """Build all units, with the parameters' present values in their buffers (collective)."""
        laid_out, tiers, ledger = self._lay_out(plans), self.tiers, self.tiers.ledger
        pairs = [pair for unit in laid_out for pair in unit]
        try:
            check_room(self.config, tiers, lambda: self._needs(pairs), "zs.shard", lambda on_host: self._farther(plans, on_host))
        except BaseException:
            tiers.close()
            raise
        sizes = Buffers.of(self.config, tiers.separate, [self._group_need(*pair) for pair in pairs])
        for topology, members in self._by_topology(pairs):
            own = Buffers.of(self.config, tiers.separate, [self._group_need(*pair) for pair in members])
            sent = StagingPool(topology.shards, ledger, *own.sent)
            fetched = None if own.fetched is None else StagingPool(topology.shards, ledger, *own.fetched)
            self.pools[id(topology)] = sent, fetched
            tiers.pools += [sent] if fetched is None else [sent, fetched]
        if sizes.fetched is not None and tiers.separate:  # buffers of constant size for shards that pass between tiers
            nbytes, count, _ = sizes.fetched
            tiers.slots = BufferPool(ledger, count, nbytes, tiers.host_buffer, Tier.HOST)
        nbytes, count = sizes.landed
        if nbytes:
            tiers.landings = BufferPool(ledger, count, nbytes, tiers.device_buffer, Tier.DEVICE)
            tiers.arrivals = BufferPool(ledger, count, nbytes, tiers.host_buffer, Tier.HOST)
        units = []
        for number, (plan, unit) in enumerate(zip(plans, laid_out, strict=True)):
            groups = [self._group(plan, bucket, layout) for bucket, layout in unit]
            units.append(Unit(plan.name, plan.modules, groups, number))
        self.topology.open()
        self._note_exceptions([group for unit in units for group in unit.groups])
        return units

    def _by_topology(self, pairs: list[Pair]) -> list[tuple[Topology, list[Pair]]]:
        """Return each topology with the buckets that are sharded over its ranks; the model's own comes first."""
        topologies = [self.topology, *([] if self.topology.divided is None else [self.topology.divided])]
        return [(each, [pair for pair in pairs if self.topology.of(pair[0][0].distribution) is each]) for each in topologies]

    def _note_exceptions(self, groups: list[ParamGroup]) -> None:
        """Note, for the report, what is exempt from quantization, and the parameters that stay whole though others are sharded."""
        topology = self.topology
        packed = [group for group in groups if topology.weights is not None and group.values.comm is not group.topology.values]
        sent = [group for group in groups if group.grads is not None and topology.sent is not None]
        sent = [group for group in sent if group.gradients.comm is not group.topology.gradients]
        for what, plain in (("parameters", packed), ("gradients", sent)):
            if plain:
                names = [spec.name for group in plain for spec in group.specs]
                numel = sum(group.layout.true_numel for group in plain)
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                topology.notes.append(f"{what} of {len(names)} parameters ({numel:,} elements) sent unquantized: {shown}")
        specs = [spec for group in groups for spec in group.specs]
        whole = [math.prod(spec.shape) for spec in specs if spec.whole]
        if whole:
            topology.notes.append(
                f"{len(whole)} of {len(specs)} parameters ({sum(whole):,} elements) stay whole on every rank: they have at most "
                f"param_persistence_threshold={self.config.param_persistence_threshold:,} elements"
            )

    def _farther(self, plans: list[UnitPlan], on_host: set[Tier]) -> Iterator[tuple[dict[str, object], dict[str, int]]]:
        """Yield the options that lead to higher stages and further tiers, with what a rank would hold of the host's memory then."""
        for options in self.config.farther():
            try:
                config = replace(self.config, offload_path=self.config.offload_path or ".", **options)
            except ConfigError:  # it conflicts with another option
                continue
            other = Builder(config, self.topology, self.tiers, self.group_of, 0)
            found = other._needs([pair for unit in other._lay_out(plans) for pair in unit])
            yield options, Need.of(found, on_host, 0, []).parts

    def _needs(self, pairs: list[Pair]) -> dict[Place, int]:
        """Return the bytes that this rank will hold, without gathered units."""
        found = needs(self.config, self.tiers.separate, [self._group_need(bucket, layout) for bucket, layout in pairs])
        own = [
            needs(self.config, self.tiers.separate, [self._group_need(*each) for each in some])
            for _, some in self._by_topology(pairs)
        ]
        found[BUFFERS, Tier.DEVICE, None] = sum(each[BUFFERS, Tier.DEVICE, None] for each in own)  # pools of their own
        if not self.tiers.state_plans:  # no optimizer: gradients on the device take no memory before the first backward
            found.pop((GRADIENTS, Tier.DEVICE, None), None)
        # secondary shards, partial sums between hops, quantized buffers, and quantization errors that are kept
        values, slices = [], []
        for (spec, *_), layout in pairs:
            values.append((self._values_comm(spec, layout), (layout.shard_numel, spec.dtype)))
            if spec.requires_grad:
                reserved = layout.shard_numel, self.config.sent_dtype(spec.dtype)
                slices.append((self._grads_comm(spec, layout), reserved))
        found[BUFFERS, Tier.DEVICE, None] += needed(values, slices)
        return found

    def _group_need(self, bucket: list[ParamSpec], layout: FlatLayout) -> Group:
        plans = [self.tiers.state_plans.get(id(spec.original), StatePlan()) for spec in bucket]
        dtype, columns = bucket[0].dtype, [plan.columns for plan in plans]
        if not bucket[0].requires_grad:  # frozen: no gradient, masters or states
            return Group(layout.numel, layout.shard_numel, dtype, whole=bucket[0].whole)
        states, unpadded = self._states[id(bucket[0])], round_up(layout.slots[-1].stop, layout.alignment)
        return Group(layout.numel, layout.shard_numel, dtype, *states, max(columns, key=len), bucket[0].whole, unpadded)

    def _group(self, plan: UnitPlan, bucket: list[ParamSpec], layout: FlatLayout) -> ParamGroup:
        config, dtype = self.config, bucket[0].dtype
        label, topology = f"{plan.name} ({dtype})", self.topology.of(bucket[0].distribution)
        self.tag += 1
        values = ParameterBuffer(
            layout, dtype, config, self._values_comm(bucket[0], layout), self.tiers, self.tag, f"gather {label}",
            self._sharded and not bucket[0].whole, self.pools[id(topology)][1],
        )  # fmt: skip
        grads = None
        if bucket[0].requires_grad:
            self.tag += 1
            gradient_dtype, offload, master_dtype = self._states[id(bucket[0])]
            comm = self._grads_comm(bucket[0], layout)
            comm.expect(self.tag, [(slot.offset, slot.shape) for slot in layout.slots], layout.numel)
            grads = GradientBuffer(
                layout, gradient_dtype, config.sent_dtype(dtype), config, comm, self.pools[id(topology)][0], self.tiers,
                self.tag, f"reduce {label}", topology.summed,
            )  # fmt: skip
        group = ParamGroup(bucket, layout, topology, values, grads)
        group.masters.whole = config.row.optimizer is Placement.REPLICATED
        if isinstance(values.comm, CompressedGathers):
            values.comm.precise[values.number] = group.masters.precise
        if grads is not None:
            group.offload = offload
            if master_dtype is not None:
                numel = layout.numel if group.masters.whole else layout.shard_numel
                group.masters.rest = self.tiers.rest(MASTERS, group.offload, numel, master_dtype)
                if master_dtype is torch.int16:
                    high = self.tiers.over(values.full) if group.masters.whole else values.rest
                    group.masters.rest = SplitRest(high, group.masters.rest)
            group.plan = self.tiers.state_plans.get(id(bucket[0].original), group.plan)
        for index, spec in enumerate(bucket):
            self._place(group, index, spec)
        return group

    def _values_comm(self, spec: ParamSpec, layout: FlatLayout) -> Comm:
        """Return the communicator for a group's values, plain or quantizing. spec: the group's first parameter."""
        topology = self.topology.of(spec.distribution)
        return topology.values_of(topology.packs(spec.name, len(spec.shape))[0], layout.numel)

    def _grads_comm(self, spec: ParamSpec, layout: FlatLayout) -> Comm:
        """Return the communicator for a group's gradients, plain or quantizing. spec: the group's first parameter."""
        topology = self.topology.of(spec.distribution)
        return topology.gradients_of(topology.packs(spec.name, len(spec.shape))[1], layout.numel)

    def _place(self, group: ParamGroup, index: int, spec: ParamSpec) -> None:
        """Copy a parameter's value into the buffers, and exchange its object for the sharded (or replicated) parameter."""
        original = spec.original
        if not original.is_meta:
            write_value(group, index, original)
            given = original._local if isinstance(original, ShardedTensor) else original
            if given.is_cuda:  # its memory is freed below, and may have been allocated on another stream
                given.record_stream(torch.cuda.current_stream(given.device))
        view, attributes = group.values.views[index], attributes_of(original)
        fresh = nn.Parameter(view, requires_grad=original.requires_grad)
        fresh.__dict__.update(attributes)
        if not group.values.sharded:
            if original.is_meta or isinstance(original, ShardedTensor):
                self._replace(spec, fresh)
            else:
                original.data = view  # the object stays, with its hooks
            fresh = spec.original
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
            dtype=spec.dtype, device=self.comm.device,
        )  # fmt: skip
        old = self._replace(spec, facade)
        if isinstance(old, ShardedTensor) or old is None or old.is_meta:
            compute = fresh
        else:
            old.data = view
            compute = old
        carry_hooks(original, compute)  # after the swap, torch's hook tables are still with the user's object
        adopt(group, index, compute)
        param = spec.original
        param.__dict__.update(attributes)
        param._compute = compute  # type: ignore[attr-defined]
        group.params.append(param)
        group.compute.append(compute)

    def _replace(self, spec: ParamSpec, new: Any) -> nn.Parameter | None:
        """Turn the user's object into `new`. Return the object that now has the old tensor, or None.

        Where torch can not swap (weak references, a live graph), the modules get the new object, and the old one an empty
        tensor: who still refers to the old one finds no elements, instead of freed memory.
        """
        original = spec.original
        if swap(original, new):
            return new
        for owner, attribute in spec.owners:
            torch_compat.own_parameters(owner)[attribute] = new
        self.replaced[id(original)] = spec.original = new
        if not isinstance(original, ShardedTensor) and not original.is_meta:
            original.data = original.data.new_empty(0)
        return None


def build_units(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, topology: Topology, tiers: Tiers,
    specs: list[ParamSpec],
) -> list[Unit]:  # fmt: skip
    """Build the units of a model (collective).

    The model's modules, the optimizer's groups and its states refer to the sharded parameters afterwards.
    """
    comm = topology.control
    builder = Builder(config, topology, tiers, optimizer_groups(optimizer), comm.new_serial())
    comm.fence_write(synchronised=True)  # peers must not read the new buffers before `fence_read`; nobody reads them yet
    plans = partition(model, config, specs)
    try:
        units = builder.build(plans)
        comm.fence_read()  # all ranks have written their values
    except OffloadIOError as error:  # the disk is full after all, with a part of the values written: every rank must fail
        tiers.close()
        tiers.fail(error)
    except FAILURES as error:
        tell_shortage(error, model, config, tiers.ledger, comm, "zs.shard", {plan.name: plan.specs for plan in plans})
        raise
    tiers.released_nbytes = 0
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
