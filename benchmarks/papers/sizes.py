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
from .reference import Row, printed
from .table import CODE, Cell, Table, digits
from .throughput import HARDWARE, SEQ, WITHIN, Configuration
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
        shape = shapes[row["config"]]
        value = largest(shape.hidden, shape.heads, shape.layout)
        note = {"C2": _C2, "C5": _TRIED}.get(row["config"], "") if abs(value / float(row["value"]) - 1) > WITHIN else ""
        cells.append(Cell(row["config"], "billions", row["value"], f"{value:.0f}", CODE, WITHIN, note))
    return Table(
        "zero-fig6",
        "ZeRO-R: largest model of C1 to C5, 400 devices, model parallelism 16",
        file.source,
        tuple(cells),
        bars="billions",
    )


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
                note = _CACHED if abs(value / float(chart) - 1) > WITHIN else ""
                cells.append(Cell(row["model"], config, chart, f"{value:.1f}", CODE, WITHIN, note))
    return Table("zero-cached", "ZeRO-R: GB of device memory of C1 to C5", file.source, tuple(cells), bars="GB")


def infinity_fig6a() -> Table:
    """Compute ZeRO-Infinity's figure 6a: the largest model of 16 devices, a DGX-2."""
    ranks, tiers = 16, {"optimizer": Tier.HOST, "gradient": Tier.HOST, "parameter": Tier.HOST}
    systems: dict[str, tuple[int, int, Layout]] = {
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
    return _sizes("infinity-fig6a", "ZeRO-Infinity, figure 6a: largest model of one DGX-2", "6a", systems, notes)


def offload_fig7() -> Table:
    """Compute ZeRO-Offload's figure 7: the largest model of 1, 4 and 16 devices."""
    systems: dict[str, tuple[int, int, Layout]] = {}
    notes = dict.fromkeys(("4 GPU, Megatron", "16 GPU, Megatron"), _MEGATRON)
    for ranks in (1, 4, 16):
        mp = {1: 1, 4: 2, 16: 8}[ranks]  # degree of model parallelism of ZeRO-Offload: table 3
        width = 9216 if mp == 8 else 8192 if mp == 2 else 4096
        systems |= {
            f"{ranks} GPU, PyTorch": (1536, 16, _layout(dp=ranks, stage=0)),
            f"{ranks} GPU, Megatron": (2304 if ranks > 1 else 1536, 16, _layout(tp=ranks, stage=0)),
            f"{ranks} GPU, ZeRO-2": (2304 if ranks > 1 else 1536, 16, _layout(dp=ranks, stage=2)),
            f"{ranks} GPU, ZeRO-Offload" + "(+MP)" * (mp == 8): (
                width,
                32,
                _layout(dp=ranks // mp, tp=mp, stage=2, **_STATES_OFF),
            ),
        }
    return _sizes("offload-fig7", "ZeRO-Offload, figure 7: largest model, billions", "fig7_max_model", systems, notes)


def adam_rates() -> Table:
    """Compute ZeRO-Offload's table 4: seconds of a CPU-Adam step, at one rate of parameters/s."""
    rate, cells = Hardware.named(HARDWARE).host_step_rate, []
    rows = [row for row in printed("zero_offload").rows if row["what"] == "table4_adam_latency"]
    for row in rows:
        if row["series"] != "CPU-Adam":
            cells.append(Cell(row["x"], f"{row['series']} (printed)", "", row["value"]))
            continue
        value = float(row["x"][:-1]) * 1e9 / rate
        note = _SLOWER if abs(value / float(row["value"]) - 1) > WITHIN else ""
        cells.append(Cell(row["x"], row["series"], row["value"], f"{value:.2f}", CODE, WITHIN, note))
    remarks = (f"{rate / 1e9:g}e9 parameters/s of a node: `host_step_rate` of {HARDWARE}.",)
    return Table(
        "offload-table4", "ZeRO-Offload, table 4: seconds of an Adam step", printed("zero_offload").source, tuple(cells), remarks
    )


def fig2b() -> Table:
    """Compute ZeRO-Infinity's figure 2b: memory and bandwidths of a cluster of DGX-2, from those of one node."""
    hardware, file, cells = Hardware.named(HARDWARE), printed("zero_infinity_fig2b"), []
    device, place = hardware.device, hardware.devices_per_node
    for row in file.rows:
        nodes, ranks = int(row["nodes"]), int(row["gpus"])
        here = min(ranks, place)
        alone = hardware.link(Resource.READ).rate(here, place) / 1e9
        found = {
            "gpu_mem_TB": ranks * device.memory_nbytes / 2**40,
            "cpu_mem_TB": nodes * hardware.host_memory_nbytes / 1e12,
            "nvme_TB": nodes * hardware.disk_nbytes / 1e12,
            "cpu_GBs_per_gpu": hardware.link(Resource.UP).rate(here, place) / 1e9,
            "nvme_GBs_per_gpu": alone,
        }
        for column, value in found.items():
            text = digits(value, row[column])
            note = "0.032 TB are 32 GB; the other rows divide by 1024" if text != row[column] else ""
            cells.append(Cell(f"{nodes} x {here}", column.replace("_", " "), row[column], text, CODE, note=note))
        for column, speed in (
            ("gpu_mem_GBs_per_gpu", device.memory_bandwidth / 1e9),
            ("gpu_gpu_GBs_per_gpu", _between_gpus(ranks)),
        ):
            low, _, high = row[column].partition("-")
            inside = speed is None or float(low) <= speed <= float(high)
            cells.append(
                Cell(f"{nodes} x {here}", column.replace("_", " "), row[column], row[column] if inside else f"{speed:.0f}", CODE)
            )
    remarks = ("Bandwidths are ranges in the paper: = says that what the simulator uses is in them. Between nodes: of a node.",)
    return Table(
        "infinity-fig2b", "ZeRO-Infinity, figure 2b: a cluster of DGX-2", file.source, tuple(cells), remarks, corner="nodes"
    )


def _between_gpus(ranks: int) -> float | None:
    """Return the GB/s of gathers: of one device inside of a node, of all devices of a node between nodes."""
    hardware = Hardware.named(HARDWARE)
    if ranks == 1:
        return None
    if ranks <= hardware.devices_per_node:
        return hardware.link(Resource.INSIDE).bandwidth / 1e9
    return hardware.link(Resource.BETWEEN).bandwidth * hardware.devices_per_node / 1e9


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
    source = printed("zero_infinity_table1").source
    return Table(
        "infinity-shapes",
        "ZeRO-Infinity, table 1 and appendix: parameters by shape",
        source,
        tuple(cells),
        corner="layers x hidden",
    )


def _layout(**chosen: Any) -> Layout:
    options: dict[str, Any] = {
        "precision": "fp16",
        "node_size": 16,
        "gradient_itemsize": _GRADIENT_NBYTES,
        "checkpointing": "blocks",
    }
    return Layout(**options | chosen)


def _sizes(name: str, title: str, figure: str, systems: dict[str, tuple[int, int, Layout]], notes: dict[str, str]) -> Table:
    infinity = name.startswith("infinity")
    file, cells = printed("zero_infinity_measured" if infinity else "zero_offload"), []

    def key(row: Row) -> str:
        return row["series"] if infinity else f"{row['x']}, {row['series']}"

    values = {key(row): row["value"] for row in file.rows if row.get("fig" if infinity else "what") == figure}
    for system, given in systems.items():
        value = largest(*given)
        note = notes.get(system, "") if abs(value / float(values[system]) - 1) > WITHIN else ""
        cells.append(Cell(system, "billions", values[system], f"{value:.3g}", CODE, WITHIN, note))
    others = sorted(set(values) - set(systems))
    remarks = [
        f"By layers at the width of the paper's configuration, {_GRADIENT_NBYTES + 14} bytes a parameter. ~: within {WITHIN:.0%}."
    ]
    remarks += [f"Not computed, since they are other systems: {', '.join(others)}."] * bool(others)
    return Table(name, title, file.source, tuple(cells), tuple(remarks), bars="billions")
