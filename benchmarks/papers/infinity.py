"""The tables of ZeRO-Infinity, arXiv 2104.07857: memory (figure 2a), tiles (6b), efficiency by bandwidth (section 4.2)."""

from __future__ import annotations

import torch

from zeroshard.activations.report import checkpoint_nbytes
from zeroshard.planner.models.gpt import Block, GPTConfig

from . import counted
from .table import CODE, FORMULA, RUNTIME, Cell, Table, bounded, digits, printed, stated

TIB, GIB = 2**40, 2**30
SEQ, PER_NODE, PER_DEVICE = 1024, 32, 2  # tokens of a sequence; sequences of a node and of a device, in figure 2a
_STATES_NBYTES = 20  # a parameter: fp16 parameter and gradient, fp32 parameter, gradient and two moments (section 3)
_PIECE_NBYTES = 2 << 30  # figure 6b: memory was fragmented on purpose
_WHOLE = "16K in one tile takes 2 GiB exactly, as 32K in 4 and 64K in 16 do, and these ran; why it did not is not told"
_MISPRINT = "a misprint: 4 hd x 4 hd bytes are {} GiB at this width, as in the rows below"


def numel_of(layers: int, hidden: int, heads: int) -> int:
    """Return the number of parameters in the matrices of `layers` blocks of the library's GPT: 12 hd^2 for each block."""
    with torch.device("meta"):
        block = Block(GPTConfig(dim=hidden, heads=heads))
    return layers * sum(each.numel() for each in block.parameters() if each.ndim == 2)


def fig2a() -> Table:
    """Compute figure 2a: memory of models of 0.1T to 100T parameters."""
    file, cells = printed("zero_infinity_fig2a"), []
    for row in file.rows:
        layers, hidden, heads = (int(row[name]) for name in ("layers", "hidden", "heads"))
        numel = numel_of(layers, hidden, heads)
        awm = SEQ * (16 * hidden + 2 * heads * SEQ)  # elements of a block and a sequence
        operator = counted.count(4 * hidden * hidden, 16, matrices=1, stage=3)  # a linear layer hd -> 4 hd
        found = {
            "params_T": (numel / 1e12, CODE),
            "model_states_TB": (_STATES_NBYTES * numel / TIB, FORMULA),
            "full_act_TB_per_node": (2 * PER_NODE * awm * layers / TIB, FORMULA),
            "act_ckpt_TB_per_node": (checkpoint_nbytes(PER_NODE, SEQ, hidden, layers) / TIB, CODE),
            "working_model_state_GB_per_gpu": ((operator.gathered + operator.buffers) / GIB, RUNTIME),
            "working_act_GB_per_gpu": (2 * PER_DEVICE * awm / GIB, FORMULA),
        }
        for column, (value, by) in found.items():
            text = digits(value, row[column])
            note = _MISPRINT.format(text) if (row["params_T"], column) == ("0.10", "working_model_state_GB_per_gpu") else ""
            cells.append(Cell(f"{row['layers']} x {row['hidden']}", column.replace("_", " "), row[column], text, by, note=note))
    remark = (
        "TB are TiB and GB are GiB. Model states: 20 bytes a parameter (16 and 18 are other conventions). Working memory of "
        "model states: parameters and gradients of the largest operator, as the runtime gathers and reduces it."
    )
    title = "ZeRO-Infinity, figure 2a: memory"
    return Table("infinity-fig2a", title, file.source, cells, [remark], corner="layers x hidden")


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Return the efficiency of computation that waits for its reads (section 4.2). Units: flops a byte, bytes/s, flops/s."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def intensities(batch: int, hidden: int = 8192) -> dict[str, float]:
    """Return flops a byte of parameters and gradients, of optimizer states, and of activation checkpoints (section 4.1)."""
    return {"parameters": SEQ * batch, "states": SEQ * batch / 4, "checkpoints": 24 * hidden}


def fig6b() -> Table:
    """Compute figure 6b: the largest width of a linear layer hd -> 4 hd, cut into tiles, with memory in pieces of 2 GiB."""
    file, cells = printed("zero_infinity_measured"), []
    for row in (row for row in file.rows if row["fig"] == "6b"):
        tiles = int(row["x"].split()[1])
        widths = [width for width in (8, 16, 32, 64, 128) if 2 * 4 * (width << 10) ** 2 / tiles <= _PIECE_NBYTES]
        note = _WHOLE if str(widths[-1]) != row["value"] else ""
        cells.append(Cell(row["x"], "K", row["value"], str(widths[-1]), note=note))
    remark = "2 x 4 hd^2 / tiles bytes in fp16 are to be in one piece; widths that are powers of two."
    return Table("infinity-fig6b", "ZeRO-Infinity, figure 6b: largest hidden size by tiles", file.source, cells, [remark])


def requirements() -> Table:
    """Compute the efficiency at the bandwidths that section 4.2 asks for, and the curves of figure 3."""
    peak, cells = float(stated("infinity_peak")["value"]) * 1e12, []
    for name, kind, batch, unit in (("params", "parameters", 1, 1e9), ("states", "states", 2, 1e12)):
        bandwidth, least = stated(f"infinity_{name}_bandwidth"), stated(f"infinity_{name}_efficiency")["value"]
        found = efficiency(intensities(batch)[kind], float(bandwidth["value"]) * unit, peak) * 100
        needed = float(least) / 100
        least_bandwidth = needed / (1 - needed) * peak / intensities(batch)[kind] / unit
        row = f"{kind}, batch {batch}, {bandwidth['value']} {bandwidth['unit']}"
        cells.append(bounded(row, "efficiency", f"> {least} %", found))
        cells.append(Cell(row, "computed", "", f"{found:.1f} %"))
        cells.append(Cell(row, "just enough", "", f"{least_bandwidth:.2f} {bandwidth['unit']}"))
    drawn = {
        f"{kind}, batch {batch}": intensities(batch)[kind] for kind in ("parameters", "states") for batch in (1, 2, 4, 8, 16)
    }
    drawn |= {f"checkpoints, hidden {hidden}": intensities(1, hidden)["checkpoints"] for hidden in (2048, 8192, 16384, 65536)}
    bandwidths = [10 ** (n / 8) for n in range(-8, 29)]  # GB/s
    lines = {name: (bandwidths, [efficiency(each, gb * 1e9, peak) * 100 for gb in bandwidths]) for name, each in drawn.items()}
    return Table(
        "infinity-efficiency", "ZeRO-Infinity, section 4.2 and figure 3: efficiency by bandwidth",
        f"{printed('zero_infinity_fig2a').paper}, section 4.2 (printed)", cells,
        [f"intensity x bandwidth / (intensity x bandwidth + peak), peak {peak / 1e12:g} TFLOPS."],
        curves=("bandwidth, GB/s", "efficiency, %", lines),
    )  # fmt: skip
