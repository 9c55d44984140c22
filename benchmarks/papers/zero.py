"""The tables of ZeRO, arXiv 1910.02054: memory of model states (tables 1, 2), communication, ZeRO-R's buffers and activations."""

from __future__ import annotations

from zeroshard.activations.report import checkpoint_nbytes

from . import counted
from .table import CODE, FORMULA, RUNTIME, Cell, Table, digits, printed, stated

DEVICE_NBYTES = 32e9  # memory of a V100, as the paper counts it
STAGES = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
_SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 10**12}
_FIVE = (
    "6 all-reduces a block in Megatron-LM: two in forward, two in backward, two in the forward that is repeated. Here a "
    "repeated forward ends when backward has what it needs, before the block's last all-reduce: 5 of them, 10 b s h."
)


def table1() -> Table:
    """Compute ZeRO's table 1; for each cell the runtime runs the stage with as many parameters and ranks."""
    file, cells, fitted = printed("zero_table1"), [], set()
    for row in file.rows:
        for column, text in list(row.items())[1:]:
            size, stage = column.split("_")
            found = counted.count(_SIZES[size], int(row["dp"]), matrices=1, stage=STAGES[stage]).states_nbytes
            # rounding removes the few kB of padding of flat buffers, which the table does not count
            nbytes = round(found / 1e9, 4)
            first = column not in fitted and nbytes * 1e9 <= DEVICE_NBYTES
            fitted |= {column} if first else set()
            value = digits(nbytes, text.rstrip("*"), truncate=size != "7.5B") + "*" * first
            cells.append(Cell(row["dp"], f"{size} {stage}", text, value, RUNTIME))
    remark = "The 7.5B columns are rounded, those of 128B and 1T cut off, as the paper's are. *: the fewest ranks that fit 32 GB."
    return Table("zero-table1", "ZeRO, table 1: GB of model states a device", file.source, cells, [remark], corner="ranks")


def table2() -> Table:
    """Compute ZeRO's table 2: 32 GB over the runtime's bytes a parameter, to one decimal, times the model-parallel degree."""
    file, cells = printed("zero_table2"), []
    stages = {"baseline": 0, **STAGES}
    per_parameter = {name: round(counted.count(10**9, 64, stage=stage).states_nbytes / 1e9, 5) for name, stage in stages.items()}
    powers_of_two = {512: "0.5T", 1024: "1T", 2048: "2T"}  # so the table writes its largest sizes, others as 2B and 7.6B
    for row in file.rows:
        for name, nbytes in per_parameter.items():
            largest = float(digits(DEVICE_NBYTES / nbytes / 1e9, "0.0")) * int(row["mp"])
            text = powers_of_two[int(largest)] if largest >= 500 else f"{largest:.1f}".removesuffix(".0") + "B"
            cells.append(Cell(row["mp"], name, row[f"theory_{name}"], text, RUNTIME))
        for column, name in (("measured_baseline", "baseline"), ("measured_ZeRO-DP(Pos)", "Pos")):
            share = float(row[column][:-1]) / (float(row["mp"]) * DEVICE_NBYTES / 1e9 / per_parameter[name])
            cells.append(Cell(row["mp"], column.replace("_", " "), "", f"{row[column]}: {share:.0%} of theory"))
    remark = "What was measured is below the theory, which counts model states alone: activations and buffers take the rest."
    title = "ZeRO, table 2: largest model, 64 data-parallel ranks"
    return Table("zero-table2", title, file.source, cells, [remark], corner="mp")


def volumes() -> Table:
    """Compute ZeRO's sections 7 and 8: elements that a rank sends in a step, in units of the number of parameters."""
    numel, ranks, cells = 4 << 20, 64, []
    found = {}
    for stage, key in enumerate(("volume_dp", "volume_Pos", "volume_Pos+g", "volume_Pos+g+p")):
        found[key] = counted.count(numel, ranks, stage=stage).sent_nbytes / 2 / numel * ranks / (ranks - 1)
    found["volume_mp"] = counted.tensor_parallel_elements(hidden=512, heads=16, batch=2, seq=128, tp=16) / (2 * 128 * 512)
    for key, value in found.items():
        row = stated(key)
        shown, text = (f"{number} {row['unit']}" for number in (row["value"], digits(value, row["value"])))
        cells.append(Cell(row["what"], "x (N-1)/N", shown, text, RUNTIME, note=_FIVE if key == "volume_mp" else ""))
    source = f"{printed('zero_table1').paper}, sections 7 and 8 (printed)"
    remark = f"Counted by rank 0 of {ranks}. Tables in circulation with 1.5 Psi and 2.5 Psi are wrong."
    return Table("zero-volumes", "ZeRO, sections 7 and 8: what a rank sends in a step", source, cells, [remark])


def zero_r() -> Table:
    """Compute the numbers that ZeRO's text gives of ZeRO-R: activations, Pa, Pa+cpu and buffers of constant size."""
    shape = {"batch": 32, "seq": 1024, "hidden": 8192, "layers": 125}
    whole, part = checkpoint_nbytes(**shape), checkpoint_nbytes(**shape, world_size=16)
    note = f"the paper counts elements and writes GB: in fp16 it is {whole / 1e9:.1f} GB before, {part / 1e9:.1f} GB with Pa"
    cells = []
    for key, value, by in (
        ("states_1.5B", counted.count(1_500_000_000, 1, stage=0).states_nbytes / 1e9, RUNTIME),
        ("activations_1.5B", 2 * 12 * 1600 * 32 * 1024 * 48 / 1e9, FORMULA),
        ("checkpoints_100B", whole / 2 / 1e9, CODE),
        ("checkpoints_100B_Pa", part / 2 / 1e9, CODE),
        ("fused_1.5B", 4 * 1_500_000_000 / 1e9, FORMULA),
        ("volume_Pa", 100 / 12, FORMULA),
        ("volume_Pa_cpu", 2, FORMULA),
    ):
        row = stated(key)
        text = digits(value, row["value"], truncate=key == "checkpoints_100B")
        cells.append(Cell(f"{row['what']}, {row['unit']}", "", row["value"], text, by, note=note if by == CODE else ""))
    for place, numel in ((5, 1_500_000_000), (6, 3_000_000_000)):  # with units of equal size
        nbytes = counted.count(numel, 64, stage=2, matrices=numel // 125_000_000).buffers
        label = f"buffers of gradients in the runtime, {numel / 1e9:g}B in units of 125M, GB"
        cells.insert(place, Cell(label, "", "", f"{nbytes / 1e9:.3f}", RUNTIME))
    remark = (
        "Activations: 12 x hidden x batch x seq x layers elements. Checkpoints: 2 x batch x seq x hidden x layers bytes, "
        "with Pa over the ranks of model parallelism. CB: buffers depend on the unit, not on the model. Pa: one all-gather of "
        "b s h beside 12 b s h."
    )
    source = f"{printed('zero_table1').paper}, sections 3, 6 and 8 (printed)"
    return Table("zero-r", "ZeRO-R: activations and buffers", source, cells, [remark])
