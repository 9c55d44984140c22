"""The largest models of the papers' figures: the most layers whose states, activations and buffers fit, by `memory_of`.

ZeRO figures 6 and 7 (memory of C1 to C5), ZeRO-Offload figure 7, ZeRO-Infinity figure 6a. From simulator/hardware.toml: the
memory and bandwidths of DGX-2 nodes (ZeRO-Infinity figure 2b), and ZeRO-Offload's table 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zeroshard.config import Tier
from zeroshard.planner.models.gpt import GPTConfig
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.memory import memory_of
from zeroshard.planner.search.profile import Profile
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.trace import Resource

from .infinity import numel_of
from .table import CODE, WITHIN, Cell, Table, digits, near, printed
from .throughput import HARDWARE, SEQ, Configuration
from .zero import DEVICE_NBYTES

_TILED = {"micro_batch": 5, "checkpointing": "host", "max_unit_numel": 1 << 29}  # of the 1T model: table 4; tiles of 1 GB
_GRADIENT_NBYTES = 6  # in fp16, and in fp32 for the step: 20 bytes a parameter in all (ZeRO-Infinity, section 3)
_STATES_OFF = {"optimizer": Tier.HOST, "gradient": Tier.HOST}
_C2 = "Pa alone frees more than was used: the states of 60B are 17 GB; the next shape that was tried is not told"
_TRIED = "the largest that was tried, not the largest that fits: 170B ran as C5 as well (figure 2)"
_STEPS = "shapes were tried in steps: 98 layers of 4096 fit, and the next shape that was tried is not told"
_MEGATRON = (
    "20 bytes a parameter over all ranks of model parallelism, and a batch of 1; the batch of these runs is not told, and "
    "checkpoints of Megatron-LM are whole on each of them"
)
_SLOWER = "the one size of the five that is slower than 3.9e9 parameters/s (3.3e9): larger and smaller ones are not"
_ROUND = 0.08  # largest relative rounding in names of models
_NAMED = {
    "70B": "a misprint: 125 layers of 8192 are 100B, as in table 1; 70B have 87",
    "1.4B": "40 layers of 1536 are 1.1B, 1.2B with embeddings",
    "900M": "one layer of 8192 is 0.8B; the others of this figure are named by their layers alone",
    "275M": "5 layers of 2048 are 0.25B; the others of this figure are named by their layers alone",
}
_CACHED = "what the allocator has cached, which grows as far as there is memory; computed is what is held at once"


def device_nbytes(profile: Profile, layout: Layout) -> int:
    """Return the device memory of the fullest rank, in bytes, with the CUDA context."""
    hardware = Hardware.named(HARDWARE)
    stages = {0, layout.pp - 1}
    return hardware.overhead_nbytes + max(sum(memory_of(profile, layout, stage)[Tier.DEVICE].values()) for stage in stages)


def fits(profile: Profile, layout: Layout) -> bool:
    """Return True if a layout fits into the memory of each device, of its host and of its disks."""
    hardware = Hardware.named(HARDWARE)
    ranks = min(layout.ranks, hardware.devices_per_node)
    found = memory_of(profile, layout)
    limits = {Tier.HOST: hardware.host_memory_nbytes, Tier.DISK: hardware.disk_nbytes}
    shared = all(ranks * sum(found.get(tier, {}).values()) <= nbytes for tier, nbytes in limits.items())
    return shared and device_nbytes(profile, layout) <= DEVICE_NBYTES  # 32e9: 7% of 32 GiB are left to fragmentation


def largest(hidden: int, heads: int, layout: Layout) -> float:
    """Return the parameters, in billions, of a GPT with the most layers that fit."""

    def fit(layers: int) -> bool:
        shape = GPTConfig(51200, SEQ, hidden, layers, heads, bias=True, tied=True)
        return fits(Profile.of_shape(shape, kernels="eager"), layout)

    low, high = 0, layout.pp
    while fit(high):
        low, high = high, 2 * high
    while high - low > max(layout.pp, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return numel_of(low, hidden, heads) / 1e9


def zero_fig6() -> Table:
    """Compute ZeRO's figure 6: the largest model of C1 to C5, with the appendix's shape and batch but for the layers."""
    file, cells = printed("zero_measured"), []
    shapes = {row["config"]: Configuration.of(row) for row in printed("zero_appendix").rows if row["fig_arxiv_v3"] == "6"}
    for row in (row for row in file.rows if row["fig_arxiv"] == "6"):
        shape, why = shapes[row["config"]], {"C2": _C2, "C5": _TRIED}.get(row["config"], "")
        value = largest(shape.hidden, shape.heads, shape.layout)
        cells.append(near(row["config"], "billions", row["value"], value, ".0f", why=why))
    title = "ZeRO-R: largest model of C1 to C5, 400 devices, model parallelism 16"
    return Table("zero-fig6", title, file.source, cells, bars="billions")


def zero_cached() -> Table:
    """Compute ZeRO's figure 7: memory of the 40B and 100B models with C1 to C5, and which of them do not fit."""
    file, cells = printed("zero_measured"), []
    measured = {(row["model"], row["config"]): row["value"] for row in file.rows if row["fig_arxiv"] == "7"}
    for row in (row for row in printed("zero_appendix").rows if row["fig_arxiv_v3"] == "7"):
        for config in ("C1", "C2", "C3", "C4", "C5"):
            shape = replace(Configuration.of(row), config=config)
            value, chart = device_nbytes(shape.profile, shape.layout) / 1e9, measured.get((row["model"], config))
            if chart is None:
                found = "out of memory" if not fits(shape.profile, shape.layout) else f"{value:.1f}"
                cells.append(Cell(row["model"], config, "out of memory", found, CODE))
            else:
                cells.append(near(row["model"], config, chart, value, ".1f", why=_CACHED))
    return Table("zero-cached", "ZeRO-R: GB of device memory of C1 to C5", file.source, cells, bars="GB")


def infinity_fig6a() -> Table:
    """Compute ZeRO-Infinity's figure 6a: the largest model of 16 devices, a DGX-2."""
    ranks, tiers = 16, {"optimizer": Tier.HOST, "gradient": Tier.HOST, "parameter": Tier.HOST}
    systems = {
        "Data parallel": (1536, 16, _layout(dp=ranks, stage=0)),
        "ZeRO-2": (4096, 16, _layout(dp=ranks, stage=2)),
        "ZeRO-Offload": (4096, 16, _layout(dp=ranks, stage=2, **_STATES_OFF)),
        "ZeRO-3": (4096, 32, _layout(dp=ranks, stage=3)),
        "3D parallelism": (4096, 32, _layout(pp=4, tp=4, stage=0)),
        "ZeRO-Inf-CPU": (8192, 32, _layout(dp=ranks, stage=3, **tiers)),
        "ZeRO-Inf-NVMe": (25600, 256, _layout(dp=4, tp=4, stage=3, **dict.fromkeys(tiers, Tier.DISK), **_TILED)),
    }
    notes = {
        "3D parallelism": _STEPS,
        "ZeRO-Inf-NVMe": "the largest that was tried: 20 bytes a parameter of 28 TB of disks are 1.4T",
    }
    file = printed("zero_infinity_measured")
    values = {row["series"]: row["value"] for row in file.rows if row["fig"] == "6a"}
    title = "ZeRO-Infinity, figure 6a: largest model of one DGX-2"
    return _sizes("infinity-fig6a", title, file.source, values, systems, notes)


def offload_fig7() -> Table:
    """Compute ZeRO-Offload's figure 7: the largest model of 1, 4 and 16 devices."""
    systems: dict[str, tuple[int, int, Layout]] = {}
    notes = dict.fromkeys(("4 GPU, Megatron", "16 GPU, Megatron"), _MEGATRON)
    for ranks, mp, wide in ((1, 1, 4096), (4, 2, 8192), (16, 8, 9216)):  # mp: of ZeRO-Offload (table 3), and its width
        width, name = 2304 if ranks > 1 else 1536, f"{ranks} GPU, ZeRO-Offload" + "(+MP)" * (mp == 8)
        systems |= {
            f"{ranks} GPU, PyTorch": (1536, 16, _layout(dp=ranks, stage=0)),
            f"{ranks} GPU, Megatron": (width, 16, _layout(tp=ranks, stage=0)),
            f"{ranks} GPU, ZeRO-2": (width, 16, _layout(dp=ranks, stage=2)),
            name: (wide, 32, _layout(dp=ranks // mp, tp=mp, stage=2, **_STATES_OFF)),
        }
    file = printed("zero_offload")
    values = {f"{row['x']}, {row['series']}": row["value"] for row in file.rows if row["what"] == "fig7_max_model"}
    title = "ZeRO-Offload, figure 7: largest model, billions"
    return _sizes("offload-fig7", title, file.source, values, systems, notes)


def adam_rates() -> Table:
    """Compute ZeRO-Offload's table 4: seconds of a CPU-Adam step, at one rate of parameters/s."""
    rate, file, cells = Hardware.named(HARDWARE).host_step_rate, printed("zero_offload"), []
    for row in (row for row in file.rows if row["what"] == "table4_adam_latency"):
        if row["series"] != "CPU-Adam":
            cells.append(Cell(row["x"], f"{row['series']} (printed)", "", row["value"]))
        else:
            cells.append(near(row["x"], row["series"], row["value"], float(row["x"][:-1]) * 1e9 / rate, ".2f", why=_SLOWER))
    remark = f"{rate / 1e9:g}e9 parameters/s of a node: `host_step_rate` of {HARDWARE}."
    return Table("offload-table4", "ZeRO-Offload, table 4: seconds of an Adam step", file.source, cells, [remark])


def fig2b() -> Table:
    """Compute ZeRO-Infinity's figure 2b: memory and bandwidths of a cluster of DGX-2, from those of one node."""
    hardware, file, cells = Hardware.named(HARDWARE), printed("zero_infinity_fig2b"), []
    device, place = hardware.device, hardware.devices_per_node
    for row in file.rows:
        nodes, ranks = int(row["nodes"]), int(row["gpus"])
        here = min(ranks, place)
        found = {
            "gpu_mem_TB": ranks * device.memory_nbytes / 2**40,
            "cpu_mem_TB": nodes * hardware.host_memory_nbytes / 1e12,
            "nvme_TB": nodes * hardware.disk_nbytes / 1e12,
            "cpu_GBs_per_gpu": hardware.link(Resource.UP).rate(here, place) / 1e9,
            "nvme_GBs_per_gpu": hardware.link(Resource.READ).rate(here, place) / 1e9,
        }
        for column, value in found.items():
            text = digits(value, row[column])
            note = "0.032 TB are 32 GB; the other rows divide by 1024" if text != row[column] else ""
            cells.append(Cell(f"{nodes} x {here}", column.replace("_", " "), row[column], text, CODE, note=note))
        speeds = {"gpu_mem_GBs_per_gpu": device.memory_bandwidth / 1e9, "gpu_gpu_GBs_per_gpu": None}
        if ranks > 1:  # of gathers: of one device inside of a node, of all devices of a node between nodes
            inside, between = (hardware.link(link).bandwidth / 1e9 for link in (Resource.INSIDE, Resource.BETWEEN))
            speeds["gpu_gpu_GBs_per_gpu"] = inside if ranks <= place else between * place
        for column, speed in speeds.items():
            low, _, high = row[column].partition("-")
            text = row[column] if speed is None or float(low) <= speed <= float(high) else f"{speed:.0f}"
            cells.append(Cell(f"{nodes} x {here}", column.replace("_", " "), row[column], text, CODE))
    remark = "Bandwidths are ranges in the paper: = says that what the simulator uses is in them. Between nodes: of a node."
    return Table("infinity-fig2b", "ZeRO-Infinity, figure 2b: a cluster of DGX-2", file.source, cells, [remark], corner="nodes")


def shapes() -> Table:
    """Compute the parameters, 12 layers hidden^2, of the configurations of ZeRO-Infinity's tables, beside their names."""
    cells = []
    for name in ("zero_infinity_table1", "zero_infinity_appendix"):
        for row in printed(name).rows:
            label = (row.get("params") or row["model"]).partition(" ")[0]
            column = f"{name.removeprefix('zero_infinity_')}, {label[-1]}"
            value = numel_of(int(row["layers"]), int(row["hidden"]), 1) / {"T": 1e12, "B": 1e9, "M": 1e6}[label[-1]]
            form = label[:-1] if "." in label else f"{label[:-1]}.0" if value < 10 else label[:-1]
            note = _NAMED.get(label, "") if abs(value / float(label[:-1]) - 1) > _ROUND else ""
            cells.append(Cell(f"{row['layers']} x {row['hidden']}", column, label[:-1], digits(value, form), CODE, _ROUND, note))
    cells = list({(cell.row, cell.column): cell for cell in cells}.values())
    title = "ZeRO-Infinity, table 1 and appendix: parameters by shape"
    return Table("infinity-shapes", title, printed("zero_infinity_table1").source, cells, corner="layers x hidden")


def _layout(**chosen: Any) -> Layout:
    usual = {"precision": "fp16", "node_size": 16, "gradient_itemsize": _GRADIENT_NBYTES, "checkpointing": "blocks"}
    return Layout(**usual | chosen)


def _sizes(
    name: str, title: str, source: str, values: dict[str, str], systems: dict[str, tuple[int, int, Layout]], notes: dict[str, str]
) -> Table:
    """Return the table of the largest models. values: printed, by system; systems: width, heads and layout."""
    cells = [
        near(system, "billions", values[system], largest(*given), ".3g", why=notes.get(system, ""))
        for system, given in systems.items()
    ]
    remarks = [
        f"By layers at the width of the paper's configuration, {_GRADIENT_NBYTES + 14} bytes a parameter. ~: within {WITHIN:.0%}."
    ]
    if others := sorted(set(values) - set(systems)):
        remarks.append(f"Not computed, since they are other systems: {', '.join(others)}.")
    return Table(name, title, source, cells, remarks, bars="billions")
