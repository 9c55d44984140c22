"""From a model to units: layouts, buffers, initial values, and the exchange of the parameter objects.

The user's own Parameter objects stay what optimizers, ties and closures refer to: in a sharded unit each becomes, in
place, the sharded parameter, and its old tensor becomes the compute parameter over the flat buffer (hooks go with it).
"""

from __future__ import annotations

import hashlib
import math
import pickle
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .buffer import GradientBuffer, ParameterBuffer
from .comm.base import Comm
from .config import Config, Placement, Tier
from .errors import ConfigError, ModelMismatch
from .layout import FlatLayout
from .memory.ledger import MASTERS, Ledger
from .memory.pool import BufferPool, StagingPool
from .memory.tiers import Tiers
from .partition import UnitPlan
from .sharded import ReplicatedParameter, ShardedParameter, ShardedTensor
from .unit import ParamGroup, ParamSpec, Unit

_STAGING_BUFFERS = 2  # gradients of two units under way: one being filled, one being reduced


def check_same_model(comm: Comm, specs: list[ParamSpec], config: Config) -> None:
    """Raise ModelMismatch on every rank, naming the first differing parameter of each, if ranks differ (B15)."""
    if comm.world_size == 1:
        return
    described = [(s.name, s.shape, str(s.original.dtype), s.requires_grad, len(s.owners)) for s in specs]
    described.append(("(options)", str(config)))
    digest = hashlib.sha256(pickle.dumps(described)).digest()
    if len(set(comm.exchange(digest, "zs.shard: compare models"))) == 1:
        return
    everyone = [pickle.loads(part) for part in comm.exchange(pickle.dumps(described), "zs.shard: find difference")]
    longest = max(map(len, everyone))
    for position in range(longest):
        entries = [model[position] if position < len(model) else None for model in everyone]
        if len(set(entries)) > 1:
            lines = "; ".join(f"rank {rank}: {_describe(entry)}" for rank, entry in enumerate(entries))
            raise ModelMismatch(
                f"ranks built different models or gave different options. First difference, at parameter "
                f"{position}: {lines}. Build the same model with the same options on every rank."
            )
    raise AssertionError("digests differ, descriptions do not")


def _describe(entry: tuple | None) -> str:
    if entry is None:
        return "no such parameter"
    if entry[0] == "(options)":
        return f"end of the parameters, options {entry[1]}"
    name, shape, dtype, requires_grad, owners = entry
    tied = f", tied {owners} times" if owners > 1 else ""
    return f"{name} {tuple(shape)} {dtype}{'' if requires_grad else ' frozen'}{tied}"


def agree_on_values(comm: Comm, tensors: list[tuple[str, Tensor]]) -> list[str]:
    """Give every rank rank 0's values where ranks differ; the names that differed. tensors: whole ones only."""
    if comm.world_size == 1 or comm.imagined:
        return []
    sums = [zlib.crc32(_bytes(tensor)) for _, tensor in tensors]
    everyone = [pickle.loads(part) for part in comm.exchange(pickle.dumps(sums), "zs.shard: compare values")]
    differing = [i for i in range(len(tensors)) if len({sums[i] for sums in everyone}) > 1]
    for i in differing:
        name, tensor = tensors[i]
        data = bytes(_bytes(tensor)) if comm.rank == 0 else b""
        given = comm.exchange(data, f"zs.shard: values of {name}")[0]
        if comm.rank != 0:
            with torch.no_grad():
                flat = torch.frombuffer(bytearray(given), dtype=tensor.dtype)
                tensor.data.copy_(flat.view(tensor.shape))
    return [tensors[i][0] for i in differing]


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


_DISK_SLACK = 1.02  # padding of shards and of regions to whole pages


def open_tiers(
    config: Config, comm: Comm, ledger: Ledger, specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None
) -> Tiers:
    """The tiers of a model; folders on disk are checked on all ranks before anything is changed (B22)."""
    tiers = Tiers(comm, ledger)
    needed: dict[str, int] = {}
    trainable = [spec for spec in specs if spec.requires_grad]
    low = sum(4 * math.prod(s.shape) for s in trainable if s.dtype.itemsize < 4 and config.master_weights)
    moments = 2 if optimizer is not None else 0  # Adam's; others have fewer
    for offload, nbytes in (
        (config.offload_param, sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)),
        (config.offload_gradient, sum(math.prod(s.shape) * config.gradient_dtype.itemsize for s in trainable)),
        (config.offload_optimizer, low + moments * sum(4 * math.prod(s.shape) for s in trainable)),
    ):
        if offload.tier is Tier.DISK:
            needed[offload.path] = needed.get(offload.path, 0) + int(nbytes * _DISK_SLACK / comm.world_size)
    problem: Exception | None = None
    try:
        for offload in (config.offload_param, config.offload_gradient, config.offload_optimizer):
            tiers.open_folder(offload, needed.get(offload.path, 0))
    except (ConfigError, OSError) as error:
        problem = error
    if needed:
        everyone = [pickle.loads(part) for part in comm.exchange(pickle.dumps(problem), "zs.shard: offload folders")]
        found = next((error for error in everyone if error is not None), None)
        if found is not None:
            tiers.close()
            raise found
    return tiers


class Builder:
    """Builds the units of one model; holds what all of them need."""

    def __init__(
        self, config: Config, comm: Comm, ledger: Ledger, tiers: Tiers, group_of: dict[int, int], serial: int
    ) -> None:
        """group_of: id of a parameter -> its optimizer group, so that groups lie together. serial: of this model."""
        self.config, self.comm, self.ledger, self.tiers, self.group_of = config, comm, ledger, tiers, group_of
        self.tag = serial << 20
        self.pool: StagingPool | None = None
        self._stepped_numel = self._offloaded_numel = 0  # elements whose states were placed, and placed off the device
        self.replaced: dict[int, nn.Parameter] = {}  # id of a given parameter -> the object that took its place

    def build(self, plans: list[UnitPlan]) -> list[Unit]:
        """All units, with the parameters' present values in their buffers."""
        buckets = [self._buckets(plan) for plan in plans]
        layouts = [[self._layout(bucket) for bucket in unit] for unit in buckets]
        self.pool = self._make_pool(buckets, layouts)
        self._make_tier_pools(buckets, layouts)
        units = []
        for number, plan in enumerate(plans):
            groups = [
                self._group(plan, bucket, layout)
                for bucket, layout in zip(buckets[number], layouts[number], strict=True)
            ]
            units.append(Unit(plan.name, plan.modules, groups, number))
        return units

    def _buckets(self, plan: UnitPlan) -> list[list[ParamSpec]]:
        """The unit's parameters by (dtype, requires_grad); within, by optimizer group, matrices before vectors."""
        buckets: dict[tuple, list[ParamSpec]] = {}
        for spec in plan.specs:
            buckets.setdefault((str(spec.dtype), spec.requires_grad), []).append(spec)
        for bucket in buckets.values():
            bucket.sort(key=lambda s: (self.group_of.get(id(s.original), -1), len(s.shape) < 2))
        return list(buckets.values())

    def _layout(self, bucket: list[ParamSpec]) -> FlatLayout:
        return FlatLayout.build([spec.shape for spec in bucket], self.comm.world_size)

    def _make_tier_pools(self, buckets: list[list[list[ParamSpec]]], layouts: list[list[FlatLayout]]) -> None:
        """Buffers of constant size for shards that pass between tiers."""
        config, tiers = self.config, self.tiers
        pairs = [
            (bucket[0], layout.shard_numel)
            for unit, unit_layouts in zip(buckets, layouts, strict=True)
            for bucket, layout in zip(unit, unit_layouts, strict=True)
        ]
        if config.row.parameter is Placement.SHARDED and tiers.away(config.offload_param):
            nbytes = max(numel * spec.dtype.itemsize for spec, numel in pairs)
            count = min(max(config.offload_param.buffer_count // 2, 2), len(pairs))
            tiers.staging = StagingPool(self.comm, self.ledger, nbytes, count, min(len(pairs), 64))
            if tiers.separate:
                tiers.slots = BufferPool(self.ledger, count, nbytes, tiers.host_buffer, Tier.HOST)
        if config.row.gradient is Placement.SHARDED and tiers.away(config.offload_gradient):
            nbytes = max(numel * max(4, self.gradient_dtype(spec.dtype).itemsize) for spec, numel in pairs)
            tiers.landings = BufferPool(self.ledger, _STAGING_BUFFERS + 1, nbytes, tiers.device_buffer, Tier.DEVICE)
            tiers.arrivals = BufferPool(self.ledger, _STAGING_BUFFERS + 1, nbytes, tiers.host_buffer, Tier.HOST)

    def send_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype gradients of parameters of `dtype` travel."""
        return self.config.send_dtype or dtype

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype gradients of parameters of `dtype` rest."""
        return dtype if dtype == torch.float64 else self.config.gradient_dtype

    def _make_pool(self, buckets: list[list[list[ParamSpec]]], layouts: list[list[FlatLayout]]) -> StagingPool:
        sizes = []
        resting = self.config.row.gradient is not Placement.SHARDED
        for unit, unit_layouts in zip(buckets, layouts, strict=True):
            for bucket, layout in zip(unit, unit_layouts, strict=True):
                send = self.send_dtype(bucket[0].dtype)
                if bucket[0].requires_grad and not (resting and send == self.gradient_dtype(bucket[0].dtype)):
                    sizes.append(layout.numel * send.itemsize)
        limit = min(len(sizes), 64)
        return StagingPool(self.comm, self.ledger, max(sizes, default=0), min(_STAGING_BUFFERS, limit), limit)

    def _group(self, plan: UnitPlan, bucket: list[ParamSpec], layout: FlatLayout) -> ParamGroup:
        config, dtype = self.config, bucket[0].dtype
        label = f"{plan.name} ({dtype})"
        self.tag += 1
        values = ParameterBuffer(
            layout, dtype, config, self.comm, self.ledger, self.tiers, self.tag, f"gather {label}"
        )
        grads = None
        if bucket[0].requires_grad:
            self.tag += 1
            grads = GradientBuffer(
                layout, self.gradient_dtype(dtype), self.send_dtype(dtype), config, self.comm, self.ledger,
                self.pool, self.tiers, self.tag, f"reduce {label}",
            )  # fmt: skip
        group = ParamGroup(bucket, layout, self.comm, values, grads)
        if grads is not None:
            self._place_states(group)
        for index, spec in enumerate(bucket):
            self._place(group, index, spec)
        return group

    def _place_states(self, group: ParamGroup) -> None:
        """Choose the tier of masters and optimizer states, and make room for masters."""
        config, layout, dtype = self.config, group.layout, group.values.dtype
        if self._offloads_next(layout.shard_numel):
            group.offload = config.offload_optimizer
        low = config.master_weights and dtype in (torch.bfloat16, torch.float16)
        rest, steps_on_host = group.values.rest, group.offload.tier is not Tier.DEVICE
        # who steps needs the values within reach, and for itself while a delayed update runs beside forward and backward
        apart = (self.tiers.separate and rest.tier is Tier.DEVICE) if steps_on_host else not rest.resident
        if low or apart or (steps_on_host and config.delayed_update is not None):
            numel = layout.shard_numel if config.row.optimizer is Placement.SHARDED else layout.numel
            group.master = self.tiers.rest(MASTERS, group.offload, numel, torch.float32 if low else dtype)

    def _offloads_next(self, numel: int) -> bool:
        """Spread the offloaded fraction of the states evenly over the units."""
        ratio = self.config.offload_optimizer.ratio
        self._stepped_numel += numel
        if self.config.offload_optimizer.tier is Tier.DEVICE or self._offloaded_numel + numel / 2 > ratio * self._stepped_numel:
            return False
        self._offloaded_numel += numel
        return True

    def _place(self, group: ParamGroup, index: int, spec: ParamSpec) -> None:
        """Copy the value into the buffers and exchange the parameter object."""
        original = spec.original
        if not original.is_meta:
            write_value(group, index, original)
        view = group.values.views[index]
        fresh = nn.Parameter(view, requires_grad=original.requires_grad)
        if not group.values.sharded:
            if original.is_meta or isinstance(original, ShardedTensor):
                self._replace(spec, fresh)
            else:
                original.data = view  # hooks and identity stay
                fresh = original
            fresh = self.replaced.get(id(original), original)
            if type(fresh) is nn.Parameter and group.trainable:
                fresh.__class__ = ReplicatedParameter
                fresh._home = group.homes[index]  # type: ignore[attr-defined]
            group.params.append(fresh)
            group.compute.append(fresh)
            group.versions.append(fresh._version)
            return
        facade = ShardedParameter(
            None if group.values.staged else group.local(index), spec.shape, group.homes[index], original.requires_grad,
            dtype=spec.dtype, device=self.comm.device,
        )  # fmt: skip
        attributes = dict(original.__dict__) if not isinstance(original, ShardedTensor) else {}
        old = self._replace(spec, facade)
        if isinstance(old, ShardedTensor) or old is None or old.is_meta:
            compute = fresh
        else:
            old.data = view
            compute = old
        carry_hooks(original, compute)
        param = self.replaced.get(id(original), original)
        param.__dict__.update({k: v for k, v in attributes.items() if k not in param.__dict__})
        param._compute = compute  # type: ignore[attr-defined]
        group.params.append(param)
        group.compute.append(compute)

    def _replace(self, spec: ParamSpec, new: nn.Parameter) -> nn.Parameter | None:
        """Make the user's object be `new`. Returns the object that now has the old tensor, or None.

        Where torch can not swap (weak references, a live graph), the modules get the new object, and the old one an
        empty tensor, so that a stale reference reads nothing instead of freed memory.
        """
        original = spec.original
        if swap(original, new):
            return new
        for owner, attribute in spec.owners:
            owner._parameters[attribute] = new
        self.replaced[id(original)] = new
        if not isinstance(original, ShardedTensor) and not original.is_meta:
            original.data = original.data.new_empty(0)
        return None


def swap(one: Tensor, other: Tensor) -> bool:
    """Exchange what two tensor objects are. False where torch can not, or a live graph would be made unusable."""
    if one._use_count() > 1 or other._use_count() > 1:
        return False  # torch would swap, and poison the gradient accumulator that the graph keeps
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


def carry_hooks(source: Tensor, target: Tensor) -> None:
    """Tensor hooks follow to the tensor that autograd sees: swapping leaves their tables with the Python object."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, table)
        if hooks and getattr(target, table) is not hooks:
            setattr(target, table, hooks)


@torch.no_grad()
def write_value(group: ParamGroup, index: int, value: Tensor) -> None:
    """Put a whole (or alike sharded) value of parameter `index` into this rank's part of the buffers."""
    group.begin_write()
    home = group.homes[index]
    piece = _piece_of(value, home.start, home.stop)
    group.set_local(index, piece)
    if not group.values.sharded:
        group.values.views[index].copy_(_whole_of(value))
    if group.master is None:
        return
    if group.master.numel == group.layout.shard_numel:
        group.master.store(home.begin, piece)
    else:
        group.master.store(group.layout.slots[index].offset, _whole_of(value).reshape(-1))


def _piece_of(value: Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the flattened value. A born-sharded value is gathered first (collective)."""
    if isinstance(value, ShardedTensor):
        if (value._home.start, value._home.stop) == (start, stop):
            return value._local
        return value.full_tensor().reshape(-1)[start:stop]
    return value.detach().reshape(-1)[start:stop]


def _whole_of(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value.detach()


def optimizer_groups(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """id of each parameter -> index of its group."""
    groups: Sequence[dict] = optimizer.param_groups if optimizer is not None else ()
    return {id(param): number for number, group in enumerate(groups) for param in group["params"]}
