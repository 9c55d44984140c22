"""The tables of ZeRO, arXiv 1910.02054: memory of model states (tables 1, 2), communication, ZeRO-R's buffers and activations."""

from __future__ import annotations

from zeroshard.activations.report import checkpoint_nbytes

from . import counted
from .reference import printed, stated
from .table import CODE, FORMULA, RUNTIME, Cell, Table, digits

DEVICE_NBYTES = 32e9  # memory of a V100, as the paper counts it
STAGES = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
_SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 10**12}


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
    remarks = (
        "The 7.5B columns are rounded, those of 128B and 1T cut off, as the paper's are. *: the fewest ranks that fit 32 GB.",
    )
    return Table("zero-table1", "ZeRO, table 1: GB of model states a device", file.source, tuple(cells), remarks, corner="ranks")


def table2() -> Table:
    """Compute ZeRO's table 2: 32 GB over the runtime's bytes a parameter, to one decimal, times the model-parallel degree."""
    file, cells = printed("zero_table2"), []
    per_parameter = {f"theory_{name}": _bytes_a_parameter(stage) for name, stage in {"baseline": 0, **STAGES}.items()}
    for row in file.rows:
        for column, nbytes in per_parameter.items():
            largest = float(digits(DEVICE_NBYTES / nbytes / 1e9, "0.0")) * int(row["mp"])
            cells.append(Cell(row["mp"], column.removeprefix("theory_"), row[column], _billions(largest), RUNTIME))
        for column, stage in (("measured_baseline", 0), ("measured_ZeRO-DP(Pos)", 1)):
            share = float(row[column][:-1]) / (
                float(row["mp"]) * DEVICE_NBYTES / 1e9 / per_parameter[f"theory_{['baseline', *STAGES][stage]}"]
            )
            cells.append(Cell(row["mp"], column.replace("_", " "), "", f"{row[column]}: {share:.0%} of theory", FORMULA))
    remarks = ("What was measured is below the theory, which counts model states alone: activations and buffers take the rest.",)
    return Table(
        "zero-table2", "ZeRO, table 2: largest model, 64 data-parallel ranks", file.source, tuple(cells), remarks, corner="mp"
    )


def _bytes_a_parameter(stage: int, ranks: int = 64) -> float:
    numel = 10**9
    return round(counted.count(numel, ranks, stage=stage).states_nbytes / numel, 5)


def _billions(value: float) -> str:
    """Return a size as table 2 writes it: 2B, 7.6B; powers of two from 512B as 0.5T, 1T and 2T."""
    if value >= 500:
        return {512: "0.5T", 1024: "1T", 2048: "2T"}[int(value)]
    return f"{value:.1f}".removesuffix(".0") + "B"


def volumes() -> Table:
    """Compute ZeRO's sections 7 and 8: elements that a rank sends in a step, in units of the number of parameters."""
    numel, ranks, cells = 4 << 20, 64, []
    for stage, key in enumerate(("volume_dp", "volume_Pos", "volume_Pos+g", "volume_Pos+g+p")):
        row, found = stated(key), counted.count(numel, ranks, stage=stage)
        value = found.sent_nbytes / 2 / numel * ranks / (ranks - 1)
        cells.append(
            Cell(
                row["what"], "x (N-1)/N", f"{row['value']} {row['unit']}", f"{digits(value, row['value'])} {row['unit']}", RUNTIME
            )
        )
    row = stated("volume_mp")
    value = counted.tensor_parallel_elements(hidden=512, heads=16, batch=2, seq=128, tp=16) / (2 * 128 * 512)
    note = (
        "6 all-reduces a block in Megatron-LM: two in forward, two in backward, two in the forward that is repeated. Here a "
        "repeated forward ends when backward has what it needs, before the block's last all-reduce: 5 of them, 10 b s h."
    )
    cells.append(
        Cell(
            row["what"],
            "x (N-1)/N",
            f"{row['value']} {row['unit']}",
            f"{digits(value, row['value'])} {row['unit']}",
            RUNTIME,
            note=note,
        )
    )
    source = f"{printed('zero_table1').paper}, sections 7 and 8 (printed)"
    remarks = (f"Counted by rank 0 of {ranks}. Tables in circulation with 1.5 Psi and 2.5 Psi are wrong.",)
    return Table("zero-volumes", "ZeRO, sections 7 and 8: what a rank sends in a step", source, tuple(cells), remarks)


def zero_r() -> Table:
    """Compute the numbers that ZeRO's text gives of ZeRO-R: activations, Pa, Pa+cpu and buffers of constant size."""
    cells = []

    def add(key: str, value: float, by: str, note: str = "", truncate: bool = False) -> None:
        row = stated(key)
        cells.append(
            Cell(f"{row['what']}, {row['unit']}", "", row["value"], digits(value, row["value"], truncate), by, note=note)
        )

    half = counted.count(1_500_000_000, 1, stage=0).states_nbytes
    add("states_1.5B", half / 1e9, RUNTIME)
    activations = 2 * 12 * 1600 * 32 * 1024 * 48
    add("activations_1.5B", activations / 1e9, FORMULA)
    shape = {"batch": 32, "seq": 1024, "hidden": 8192, "layers": 125}
    whole, part = checkpoint_nbytes(**shape), checkpoint_nbytes(**shape, world_size=16)
    note = f"the paper counts elements and writes GB: in fp16 it is {whole / 1e9:.1f} GB before, {part / 1e9:.1f} GB with Pa"
    add("checkpoints_100B", whole / 2 / 1e9, CODE, note, truncate=True)
    add("checkpoints_100B_Pa", part / 2 / 1e9, CODE, note)
    add("fused_1.5B", 4 * 1_500_000_000 / 1e9, FORMULA)
    for numel in (1_500_000_000, 3_000_000_000):  # with units of equal size
        found = counted.count(numel, 64, stage=2, matrices=numel // 125_000_000)
        cells.append(
            Cell(
                f"buffers of gradients in the runtime, {numel / 1e9:g}B in units of 125M, GB",
                "",
                "",
                f"{found.buffers / 1e9:.3f}",
                RUNTIME,
            )
        )
    add("volume_Pa", 100 / 12, FORMULA)
    add("volume_Pa_cpu", 2, FORMULA)
    remarks = (
        "Activations: 12 x hidden x batch x seq x layers elements. Checkpoints: 2 x batch x seq x hidden x layers bytes, "
        "with Pa over the ranks of model parallelism. CB: buffers depend on the unit, not on the model. Pa: one all-gather of "
        "b s h beside 12 b s h.",
    )
    return Table(
        "zero-r",
        "ZeRO-R: activations and buffers",
        f"{printed('zero_table1').paper}, sections 3, 6 and 8 (printed)",
        tuple(cells),
        remarks,
    )
