"""A benchmark of training over a slow link between two nodes of two ranks: bytes sent over the link, and time of a step.

    zeroshard bench --sections network                              200 Mbit/s, some 3 minutes on 2 cores
    zeroshard bench --sections network --bandwidths 100M,200M,1G

A proxy of that bandwidth stands between the nodes (nodes.py). Zeroshard's ranks of one node share memory, as on one host;
FSDP2's use gloo there. All contenders are alive in the same four processes and take turns in each round; times are of the
slowest rank, medians over rounds, ratios medians of the ratios within a round. Bytes sent are those that the proxy counts from
node 0. They include messages beside the collectives; the formulas of `zs.report` beside them, summed over node 0's ranks, do
not. The *bound* of a step is the bytes sent over the bandwidth; the rest of a step is computation, for which the four ranks
share the machine's cores, and waiting.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.comm.launch import ProcessesFailed, run_processes
from zeroshard.utils.sheets import PLAIN, WARNING, Sheet

from .contenders import plain_step
from .micro_benchmark import LIMIT_S, Unmeasured, median_ratio
from .nodes import Nodes
from .plan import ModelShape, Workload
from .tables import GB, Column, Goal, sheet_of
from .worker import parameter_count
from .worker_group import turned
from .workload import batch, blocks, build_model, build_optimizer

RANKS, RANKS_HERE = 4, 2
SHAPE = ModelShape(vocab_size=256, seq_len=32, dim=512, layers=3)  # few operations for the bytes that it sends
WORKLOAD = Workload(shape=SHAPE, sequences=1, ranks=RANKS)
GOAL_BANDWIDTH, SPEED_GOAL, BYTES_GOAL = 200e6, 2.5, 0.05
LOSS_TOLERANCE = 2e-5  # between ways that compress nothing; see statistics.py


@dataclass(frozen=True)
class Way:
    """One way to train at stage 3. options: for zs.shard; None: FSDP2 on a mesh of shape `mesh`."""

    name: str
    label: str
    options: dict[str, Any] | None = None
    mesh: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """True if nothing is compressed."""
        return not any(name.startswith("zero_quantized") for name in self.options or ())


_HPZ, _QWZ, _QGZ = {"zero_hpz_partition_size": RANKS_HERE}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
WAYS = (
    Way("flat", "one hop", {"hierarchical": False}),
    Way("two-hops", "two hops", {}),
    Way("hsdp", "HSDP", {"shard_size": RANKS_HERE}),
    Way("hpz", "hpZ", _HPZ),
    Way("qwz", "qwZ", _QWZ),
    Way("qgz", "qgZ", _QGZ),
    Way("all", "hpZ + qwZ + qgZ", _HPZ | _QWZ | _QGZ),
    Way("all-int4", "the same, gradients int4", _HPZ | _QWZ | {"zero_quantized_gradients": "int4"}),
    Way("low-rank", "gradients of low rank", {"zero_quantized_gradients": "low_rank"}),
    Way("top-k", "gradients' top 1%", {"zero_quantized_gradients": "top_k"}),
    Way("fsdp2", "FSDP2", mesh=(RANKS,)),
    Way("fsdp2-hsdp", "FSDP2, 2-D mesh", mesh=(RANKS // RANKS_HERE, RANKS_HERE)),
)


@dataclass
class Crossed:
    """The measurements of one way. step_s: by round, of the slowest rank. sent, theory: bytes that node 0 sends in a step."""

    name: str
    label: str
    plain: bool
    step_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    theory: float | None = None  # None for FSDP2, of which there is no formula
    losses: list[float] = field(default_factory=list)

    @property
    def of_theory(self) -> float | None:
        return median(self.sent) / self.theory if self.theory else None


@dataclass(frozen=True)
class Crossing:
    """The measurements of all ways at one bandwidth, in bits a second."""

    bandwidth: float
    numel: int
    ways: list[Crossed]

    def times_faster(self, ours: Crossed, theirs: str) -> float:
        """Return how many times faster a step of `ours` is than one of `theirs`: median of the ratios within a round."""
        other = next(way for way in self.ways if way.name == theirs)
        return median_ratio(other.step_s, ours.step_s)

    def bound_s(self, way: Crossed) -> float:
        """Return the least seconds of a step: the bytes that node 0 sends in it, over the bandwidth."""
        return 8 * median(way.sent) / self.bandwidth

    @property
    def goals(self) -> list[Goal]:
        at, found = f"{self.bandwidth / 1e6:.0f} Mbit/s", []
        ours = next(way for way in self.ways if way.name == "all")
        for name, what in (("flat", "stage 3 in one hop"), ("two-hops", "stage 3 in two hops")):
            if self.bandwidth == GOAL_BANDWIDTH:
                text = f"{at}: hpZ + qwZ + qgZ, times faster than {what}"
                found.append(Goal(text, self.times_faster(ours, name), SPEED_GOAL, "network", at_least=True))
        differences = [abs(way.of_theory - 1) for way in self.ways if way.of_theory is not None]
        text = f"{at}: counters, largest distance from the formulas"
        return [*found, Goal(text, max(differences), BYTES_GOAL, "network")]

    @property
    def losses_agree(self) -> bool:
        """True if the losses of all ways that compress nothing are the same."""
        first, *others = [way.losses for way in self.ways if way.plain]
        return all(abs(a - b) <= LOSS_TOLERANCE * abs(a) for other in others for a, b in zip(first, other, strict=True))


# ------------------------------------------------------------------------------------------------------- measuring


def run(bandwidths: tuple[float, ...], rounds: int = 3) -> list[Crossing]:
    """Measure at each bandwidth, in bits a second. Raises Unmeasured where a rank failed."""
    try:
        with Nodes(max(bandwidths)) as nodes:
            ranks = run_processes(_rank, RANKS, bandwidths, rounds, nodes, timeout_s=LIMIT_S)
    except ProcessesFailed as error:
        raise Unmeasured(str(error).strip().splitlines()[-1]) from error
    numel, here = ranks[0][0], [ways for _, ways in ranks]
    for bandwidth, ways in here[0].items():
        for place, way in enumerate(ways):
            alike = [each[bandwidth][place] for each in here]
            way.step_s = [max(seconds) for seconds in zip(*(each.step_s for each in alike), strict=True)]
            way.theory = sum(each.theory for each in alike[:RANKS_HERE]) if way.theory is not None else None
            way.losses = [sum(losses) / RANKS for losses in zip(*(each.losses for each in alike), strict=True)]
    return [Crossing(bandwidth, numel, ways) for bandwidth, ways in here[0].items()]


def _rank(
    rank: int, world_size: int, bandwidths: tuple[float, ...], rounds: int, nodes: Nodes
) -> tuple[int, dict[float, list[Crossed]]]:
    """Train in all ways; return the model's number of parameters, and this rank's measurements by bandwidth."""
    nodes.enter(rank // RANKS_HERE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=nodes.init_method)
    trained, number, found = {way.name: _build(way) for way in WAYS}, 0, {}
    steps = {name: plain_step(model, optimizer) for name, (model, optimizer) in trained.items()}
    for bandwidth in bandwidths:
        if rank == 0:
            nodes.shape(bandwidth)
        seen = {way.name: Crossed(way.name, way.label, way.plain) for way in WAYS}
        for index in range(-1, rounds):  # round -1 is not measured: it warms up memory and the sockets' windows
            for way in turned(list(WAYS), max(index, 0)):
                part = batch(WORKLOAD, number, rank)
                dist.barrier()
                sent, begin = nodes.sent_nbytes(), time.perf_counter()
                loss = steps[way.name](*part)
                step_s = time.perf_counter() - begin
                dist.barrier()  # until then other ranks of this node may still send for this step
                if index >= 0:
                    seen[way.name].step_s.append(step_s)
                    seen[way.name].sent.append(nodes.sent_nbytes() - sent)
                    seen[way.name].losses.append(loss.item())
            number += 1
        for way in (way for way in WAYS if way.options is not None):
            report = zs.report(trained[way.name][0])
            counted = way.name == "low-rank"  # there is no formula for its factors, whose sizes vary by matrix
            theory = report.measured_between_nbytes_per_step if counted else report.theory_between_nbytes_per_step
            seen[way.name].theory = theory
        found[bandwidth] = list(seen.values())
    return parameter_count(WORKLOAD), found


def _build(way: Way) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(WORKLOAD)
    if way.options is not None:
        return zs.shard(model, build_optimizer(model.parameters(), WORKLOAD), stage=3, **way.options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(way.mesh) :]
    mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=names)
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh)
    return model, build_optimizer(model.parameters(), WORKLOAD)


# ---------------------------------------------------------------------------------------------------------- tables


def sheet(result: Crossing) -> Sheet:
    """Return the measurements at one bandwidth as a table."""
    columns = (
        Column("", lambda way: way.label),
        Column("ms", lambda way: median(way.step_s), ".0f", 1e3),
        Column("bound", result.bound_s, ".0f", 1e3),
        Column("x one hop", lambda way: result.times_faster(way, "flat"), ".2f"),
        Column("x two hops", lambda way: result.times_faster(way, "two-hops"), ".2f"),
        Column("MB", lambda way: median(way.sent), ".2f", 1e3 / GB),
        Column("formula", lambda way: way.theory, ".2f", 1e3 / GB),
        Column("/formula", lambda way: way.of_theory, ".3f"),
        Column("of M", lambda way: median(way.sent) / (4 * result.numel), ".2f"),
        Column("loss", lambda way: way.losses[-1], ".5f"),
    )
    notes = [
        ("ms: median step. x one hop, x two hops: times faster than these. bound: MB over the bandwidth, in ms.", PLAIN),
        ("MB: what left a node in a step, without headers; of M: over the bytes of all parameters in fp32.", PLAIN),
    ]
    if not result.losses_agree:
        notes.append(("losses of what sends everything plain differ", WARNING))
    title = f"Two nodes of two ranks, {result.bandwidth / 1e6:.0f} Mbit/s between them, {result.numel / 1e6:.1f}M parameters"
    return sheet_of(f"{title}, stage 3, fp32", columns, result.ways, notes)


def bandwidths_of(text: str) -> tuple[float, ...]:
    """Return the bits a second that a text such as "200M,1G" stands for."""
    found, units = [], {"M": 1e6, "G": 1e9}
    for each in map(str.strip, text.split(",")):
        number, unit = each[:-1], each[-1:].upper()
        if unit not in units or not number.replace(".", "", 1).isdigit() or not float(number):
            raise argparse.ArgumentTypeError(f"expected a bandwidth such as 200M or 1G, in bits a second, got {each!r}")
        found.append(float(number) * units[unit])
    return tuple(found)
