"""The TFLOPS a device of published configurations, by simulating a step: ZeRO, figures 2, 3, 7, 8; ZeRO-Infinity, figure 5.

    configuration --Profile.of_shape, loads_of--> tasks of a rank --as_published--> tasks --step_seconds on `v100-32gb`--> seconds

Devices and links are those of simulator/hardware.toml, which gives the source of each number; none is from these charts. One
number, `REDUCED`, was fitted to ZeRO's nine bars of figure 2: it is little more than the least with which all are within 20%.
They differ from runs of this library: no communication was overlapped with computation (Megatron-LM reduced gradients after
backward, and so did DeepSpeed unless overlap_comm was set), so the seconds of all tasks add up; and Megatron-LM recomputes all of
a block, including its last all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from zeroshard.config import Tier
from zeroshard.planner.models.gpt import GPTConfig
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.load import Load, Part, loads_of, step_seconds
from zeroshard.planner.search.profile import Profile
from zeroshard.planner.simulator.hardware import Curve, Hardware
from zeroshard.planner.simulator.simulate import SAYS, kind_of
from zeroshard.planner.simulator.trace import Resource

from .table import SIMULATED, WITHIN, Cell, Row, Table, bounded, printed, rank_correlation, stated

HARDWARE, SEQ = "v100-32gb", 1024
_RATE = "TFLOPS a device"
REDUCED = 1.4  # factor on the time that data parallelism's traffic needs on these links, in DeepSpeed and Megatron-LM of 2019-20
# Matrix products on a V100 with the libraries of 2019 and 2020: 62 to 78 TFLOPS for hidden 8K to 64K and 2,048 tokens on a DGX-2
# (ZeRO-Infinity, section 4.2); for smaller ones the curve of square products in hardware.toml.
_PRODUCTS = Curve((4e6, 2.7e8, 1.7e10, 1.1e12, 7e13), (0.0025, 0.16, 0.44, 0.496, 0.624))
_STAGES = {"": 2, "C1": 1, "C2": 1, "C3": 2, "C4": 2, "C5": 2}  # ZeRO stage by config; "": ZeRO-100B of figures 2 and 3, Pos+g
_TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "NVMe": Tier.DISK}
_WHY = {
    ("40B", "Baseline"): "as printed it takes 95 ms a block, and 60B takes 37, which sends as much a block between nodes (batch "
    "4, hidden 6144; groups of 4 nodes, not 2) and has products half as large: no speed of links or devices gives both",
}


@dataclass(frozen=True)
class Configuration:
    """A published run. config: C1 to C5 of ZeRO-R, or "". mp: ranks of a model-parallel group; batch: sequences of a group."""

    model: str
    system: str
    gpus: int
    mp: int
    layers: int
    hidden: int
    heads: int
    batch: int
    config: str = ""

    @staticmethod
    def of(row: Row) -> Configuration:
        names = ("gpus", "mp", "layers", "hidden", "heads", "batch_per_mp_group")
        gpus, mp, layers, hidden, heads, batch = (int(row[name]) for name in names)
        config = row["config"].partition("-")[0]
        return Configuration(row["model"], row["system"], gpus, mp, layers, hidden, heads, batch, config)

    @property
    def profile(self) -> Profile:
        """The profile of a GPT with GPT-2's vocabulary, padded as Megatron-LM pads it (arXiv 1909.08053, section 3).

        Kernels are eager, as in 2019."""
        vocab = -(-50257 // (128 * self.mp)) * 128 * self.mp
        shape = GPTConfig(vocab, SEQ, self.hidden, self.layers, self.heads, bias=True, tied=True)
        return Profile.of_shape(shape, self.model, kernels="eager")

    @property
    def layout(self) -> Layout:
        """The layout. Checkpoints: Pa ("partitioned") in ZeRO-100B but C1 and C3; "host" in C5, and for 170B, a C5 run (table 5)."""
        zero = self.system == "ZeRO"
        checkpointing = "partitioned" if zero and self.mp > 1 and self.config not in ("C1", "C3") else "blocks"
        if zero and (self.config == "C5" or self.model == "170B"):
            checkpointing = "host"
        return Layout(
            dp=self.gpus // self.mp, tp=self.mp, stage=_STAGES[self.config] if zero else 0, micro_batch=self.batch,
            checkpointing=checkpointing, precision="fp16", gradient_itemsize=2,
            node_size=Hardware.named(HARDWARE).devices_per_node,
        )  # fmt: skip


def of_2019(hardware: Hardware) -> Hardware:
    """Return a DGX-2 with the libraries of ZeRO's time: slower products, attention as products, all-reduces over trees."""
    links = {**hardware.links, Resource.BETWEEN: replace(hardware.links[Resource.BETWEEN], trees=True)}
    return replace(hardware, device=replace(hardware.device, efficiency=_PRODUCTS, attention=None), links=links)


def as_published(load: Load, kept: int = 1, reduced: float = 1.0) -> Load:
    """Return the load as the run had it. kept: ranks that share each copy to the host (Pa). reduced: REDUCED."""
    factors = {"keep": 1 / kept, "fetch": 1 / kept, "reduce": reduced, "publish": reduced}

    def changed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        found = []
        for task, times in parts:
            factor = factors.get(kind_of(task), 1.0)
            found.append((replace(task, nbytes={resource: amount * factor for resource, amount in task.nbytes.items()}), times))
        return tuple(found)

    return replace(load, each=changed(load.each), once=changed(load.once))


@functools.lru_cache(maxsize=256)
def tflops(configuration: Configuration, published: bool = True) -> float:
    """Return the TFLOPS of a device as the papers count them: 8 x parameters x tokens, which includes recomputation.

    published: without overlap of communication, as the run was; else with the overlap of this library's runtime.
    """
    profile, layout = configuration.profile, replace(configuration.layout, stops_early=not published, hops="one", rings=True)
    loads = loads_of(profile, layout)
    if published:
        loads = [as_published(load, configuration.mp, REDUCED) for load in loads]
    step_s, _ = step_seconds(profile, layout, of_2019(Hardware.named(HARDWARE)), beside=not published, loads=loads)
    return 8 * profile.numel * layout.micro_batch * SEQ / layout.tp / step_s / 1e12


def _figure(name: str, number: str, title: str, label: Callable[[Configuration], str]) -> Table:
    """Return the table of one figure: each configuration of the appendix, with printed values where the chart was read."""
    measured = {
        (row["model"], "ZeRO" if row["system"] == "ZeRO" else "Baseline", row["gpus"], row["config"]): row["value"]
        for row in printed("zero_measured").rows
        if row["fig_arxiv"] == number and row["metric"] == "TFLOPS/GPU"
    }
    cells, pairs = [], []
    for row in (row for row in printed("zero_appendix").rows if row["fig_arxiv_v3"] == number):
        configuration = Configuration.of(row)
        system = configuration.system.partition("-")[0]
        value = tflops(configuration)
        chart = measured.get((configuration.model, system, row["gpus"], ""), "")
        note = _WHY.get((configuration.model, system), "") if chart else ""
        cells.append(Cell(label(configuration), system, chart, f"{value:.1f}", SIMULATED, WITHIN, note))
        pairs += [(float(chart), value)] if chart else []
        if system == "ZeRO":
            beside = tflops(configuration, published=False)
            cells.append(Cell(label(configuration), "ZeRO, sent beside computation", "", f"{beside:.1f}", SIMULATED))
    remarks = [f"TFLOPS a device. ~: within {WITHIN:.0%}. Hardware: {HARDWARE} of simulator/hardware.toml."]
    if pairs:
        close = sum(abs(ours / theirs - 1) <= WITHIN for theirs, ours in pairs)
        remarks.append(
            f"Within {WITHIN:.0%}: {close} of {len(pairs)}; rank correlation (Spearman) {rank_correlation(pairs):.2f}."
        )
    else:
        remarks.append("The chart was not read: nothing is printed beside the computed values.")
    return Table(name, title, printed("zero_measured").source, cells, remarks, bars="TFLOPS a device", corner="model")


@functools.cache
def fig2() -> Table:
    """Compute ZeRO's figure 2: ZeRO-100B beside Megatron-LM on 400 devices, 1.5B to 170B parameters, and the speedups."""
    table = _figure("zero-fig2", "2", "ZeRO, figure 2: throughput, ZeRO-100B and Megatron-LM", lambda c: c.model)
    found = {(cell.row, cell.column): cell for cell in table.cells}
    speedups = []
    for row in (row for row in printed("zero_measured").rows if row["metric"] == "speedup"):
        value = float(found[row["model"], "ZeRO"].computed) / float(found[row["model"], "Baseline"].computed)
        note = found[row["model"], "Baseline"].note
        if not note and abs(value / float(row["value"]) - 1) > WITHIN:
            note = "each of the two bars is within the limit, one above and one below what was printed"
        speedups.append(Cell(row["model"], "times faster", row["value"], f"{value:.2f}", SIMULATED, WITHIN, note))
    return replace(table, cells=(*table.cells, *speedups), apart=("times faster",))


@functools.cache
def fig3() -> Table:
    """Compute ZeRO's figure 3: 60B on 64 to 400 devices, with superlinear speedup, since freed memory allows larger batches."""
    table = _figure("zero-fig3", "3", "ZeRO, figure 3: 60B on 64 to 400 devices", lambda c: f"{c.gpus}")
    totals = []
    for cell in table.cells:
        if cell.column == "ZeRO":
            petaflops = (f"{float(text) * int(cell.row) / 1e3:.2f}" for text in (cell.printed, cell.computed))
            totals.append(Cell(cell.row, "all devices, PFLOPS", *petaflops, SIMULATED, WITHIN))
    order = rank_correlation([(float(cell.printed), float(cell.computed)) for cell in totals])
    first, second = (float(cell.computed) for cell in totals[:2])
    remarks = (
        *table.remarks,
        f"All devices together: rank correlation {order:.2f}; from 64 to 128 devices {second / first:.2f} times as much. The "
        "three larger runs differ by 6% a device in the chart, about as well as it can be read.",
    )
    return replace(table, cells=(*table.cells, *totals), remarks=remarks, corner="devices", apart=("all devices, PFLOPS",))


def fig8() -> Table:
    """Compute ZeRO's figure 8: 128 devices without model parallelism."""
    title = "ZeRO, figure 8 (4 of the arXiv version): 128 devices without model parallelism"
    table = _figure("zero-fig8", "4", title, lambda c: c.model)
    bars = [float(cell.computed) for cell in table.cells if cell.column == "ZeRO"]
    largest = float(table.cells[-1].computed)  # the larger of the two of plain data parallelism
    over, below = stated("fig8_zero")["value"], stated("fig8_baseline")["value"]
    text = Cell("text", "ZeRO", over, f"{sum(bars) / len(bars):.1f}", SIMULATED, WITHIN)
    cells = (*table.cells, text, bounded("text", "Baseline", f"< {below}", largest, SIMULATED))
    remark = f"Text: over {over} on average, and less than {below} for the largest of plain data parallelism."
    return replace(table, cells=cells, remarks=(*table.remarks, remark))


def fig7() -> Table:
    """Compute ZeRO's figure 7: throughput of C1 to C5, which differ in the batch that fits."""
    title = "ZeRO, figure 7 (8 of the arXiv version): throughput of C1 to C5"
    return _figure("zero-fig7", "8", title, lambda c: f"{c.model} {c.config}")


@functools.cache
def infinity_fig5() -> Table:
    """Compute ZeRO-Infinity's figure 5: runs of 10B to 20T, with one task after the other, and with this library's overlap."""
    file, cells, totals = printed("zero_infinity_table1"), [], {}
    for row in file.rows:
        states, mp = _TIERS[row["opt_state_on"]], int(row["mp"])
        batch = round(float(row["batch_per_gpu"]) * mp)
        layout = Layout(
            dp=int(row["gpus"]) // mp, tp=mp, stage=3, optimizer=states, gradient=states, parameter=_TIERS[row["fp16_param_on"]],
            micro_batch=batch, checkpointing="partitioned" if states is Tier.DEVICE else "host", precision="fp16",
            node_size=Hardware.named(HARDWARE).devices_per_node, gradient_itemsize=2, prefetch_nbytes=8 << 30, stops_early=False,
            hops="one", rings=True,
        )  # fmt: skip
        shape = GPTConfig(51200, SEQ, int(row["hidden"]), int(row["layers"]), 64, bias=True, tied=True)
        profile = Profile.of_shape(shape, row["params"], kernels="fused")
        label, hardware = f"{row['params']}, {row['gpus']} devices", of_2019(Hardware.named(HARDWARE))
        found = [step_seconds(profile, layout, hardware, beside) for beside in (False, True)]
        value, beside = (8 * profile.numel * batch * SEQ / mp / step_s / 1e12 for step_s, _ in found)
        least, text = stated("infinity_100B")["value"], f"{value:.1f}"
        if row["gpus"] == "16" and row["params"] in ("10B", "50B", "100B"):
            cells.append(bounded(label, _RATE, f"> {least}", float(text), SIMULATED))
        else:
            told = {"5T": "infinity_5T", "10T": "infinity_10T", "20T": "infinity_20T"}.get(row["params"])
            cells.append(Cell(label, _RATE, stated(told)["value"] if told else "", text, SIMULATED, WITHIN))
        cells.append(Cell(label, "sent beside computation", "", f"{beside:.1f}", SIMULATED))
        cells.append(Cell(label, "then bound by", "", SAYS[found[1][1]], SIMULATED))
        totals[row["params"]] = value * int(row["gpus"]) / 1e3
    most, best = stated("infinity_petaflops")["value"], max(totals.values())
    cells.append(bounded("most of 512 devices", "PFLOPS", f"> {most}", best, SIMULATED))
    remark = (
        "The chart was not read: printed is what the text says, where 49 is the most of all, put beside 5T here. Computed "
        "with nothing sent beside computation, though the paper "
        f"describes that; with it, the column beside. The abstract has over {most} PFLOPS on 512 devices; computed: {best:.1f}."
    )
    return Table("infinity-fig5", "ZeRO-Infinity, figure 5 and table 1: throughput", file.source, cells, [remark])
