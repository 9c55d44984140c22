"""The volumes and memory of ZeRO++ (arXiv 2306.10209), and the values that DeepSpeed's documentation gives for its estimators."""

from __future__ import annotations

from typing import Any

from . import counted
from .infinity import GIB
from .table import RUNTIME, Cell, Row, Table, digits, printed, stated

_NODES, _PLACE = 128, 8
_KINDS = {"forward": "forward all-gather", "backward": "backward all-gather", "reduce": "gradient reduction"}
_BLOCK, _SCALE_NBYTES = 256, 4  # qwZ and qgZ: values of a block, and bytes of its scale
_SCALED = 1 << 10  # the runtime counts at 1/_SCALED of the parameters, since with offload it allocates host buffers


def zeropp_volumes() -> Table:
    """Compute ZeRO++'s table 1: the bytes that a node sends to others in a step, in units of M."""
    numel, cells = 256 << 20, []
    packed = {"zero_hpz_partition_size": _PLACE, "zero_quantized_weights": "int8", "zero_quantized_gradients": "int4"}
    for column, suffix, options in (("ZeRO-3", "_zero3", dict[str, Any]()), ("ZeRO++", "", packed)):
        found = counted.count(numel, _NODES * _PLACE, node_size=_PLACE, stage=3, **options)
        for kind, nbytes in found.between.items():
            row, value = stated(f"zeropp_{kind}{suffix}"), nbytes * _PLACE / (2 * numel) * _NODES / (_NODES - 1)
            scales = _SCALE_NBYTES / _BLOCK / 2 if suffix == "" and nbytes else 0.0  # in M: of values that take 2 bytes unpacked
            cells.append(Cell(_KINDS[kind], column, f"{row['value']} M", f"{digits(value - scales, row['value'])} M", RUNTIME))
            if not suffix:
                cells.append(Cell(_KINDS[kind], "with scales", "", f"{value:.4f} M", RUNTIME))
    remark = (
        f"Counted by rank 0 of {_NODES} nodes of {_PLACE}, x R/(R-1). M: bytes of the parameters in fp16; two hops in both. "
        "The paper counts values alone; with every block of 256 travels a scale of 4 bytes."
    )
    source = "ZeRO++, arXiv 2306.10209, table 1 (printed)"
    return Table("zeropp-volumes", "ZeRO++: volumes between nodes", source, cells, [remark])


def zeropp_memory() -> Table:
    """Compute ZeRO++'s section 4.2: memory of hpZ at 100B parameters."""
    found = counted.count(100_000_000_000, 1024, node_size=16, stage=3, zero_hpz_partition_size=16)
    nbytes, plain = found.states_nbytes + found.secondary, counted.count(100_000_000_000, 1024, stage=0).states_nbytes
    cells = []
    for key, value in (("hpz_memory", nbytes / 1e9), ("hpz_saving", plain / nbytes)):
        row = stated(key)
        cells.append(Cell(row["what"], row["unit"], row["value"], digits(round(value, 4), row["value"]), RUNTIME))
    return Table("zeropp-memory", "ZeRO++: memory of hpZ", "ZeRO++, arXiv 2306.10209, section 4.2 (printed)", cells)


def estimators() -> Table:
    """Compute DeepSpeed's estimates, and beside them the bytes of model states that the runtime keeps."""
    file, cells = printed("deepspeed_estimators"), []
    for row in file.rows:
        offload: dict[str, Any] = {name: row[name] for name in ("offload_optimizer", "offload_param") if row[name] == "cpu"}
        label = ", ".join([f"stage {row['stage']}", *offload, *(["zero_init"] if row["zero_init"] == "1" else [])])
        place, numel = int(row["gpus_per_node"]), round(float(row["params"]) / _SCALED / 32) * 32
        states = counted.count(numel, place, stage=int(row["stage"]), **offload)
        here = {"GPU": states.states_nbytes - states.elsewhere, "host": states.elsewhere * place}
        host, device = estimate(row)
        cells += [
            Cell(label, "host, all ranks", row["cpu_GiB"], digits(host / GIB, row["cpu_GiB"])),
            Cell(label, "GPU", row["gpu_GiB"], digits(device / GIB, row["gpu_GiB"])),
            *(Cell(label, f"{tier}: states here", "", digits(n * _SCALED / GIB, "0.00"), RUNTIME) for tier, n in here.items()),
        ]
    remark = (
        "GiB, labelled GB there; T5-3B, 8 GPUs a node. Estimates leave out activations, buffers and the context, and "
        "on the host have a margin of 1.5. The runtime's columns: at rest between steps, with the papers' 2 + 2 + 12 bytes."
    )
    return Table("deepspeed-estimators", "DeepSpeed: estimates of memory", file.source, cells, [remark])


def estimate(row: Row) -> tuple[float, float]:
    """Return the bytes of the host and of a GPU by the rules that DeepSpeed's documentation gives.

    The host's bytes include a factor of 1.5 for buffers, as DeepSpeed's do.
    """
    numel, largest, place = float(row["params"]), float(row["largest_layer_params"]), int(row["gpus_per_node"])
    ranks = place * int(row["nodes"])
    states, loading = row["offload_optimizer"] == "cpu", 4 * numel * place  # every rank builds the model in fp32
    if row["stage"] == "2":
        return 1.5 * (max(loading, 16 * numel) if states else loading), 2 * numel if states else 4 * numel + 16 * numel / ranks
    if row["zero_init"] == "1":
        loading = 4 * largest * place
    kept = (18 if row["offload_param"] == "cpu" else 16) * numel if states else 0.0
    device = 4 * largest
    if row["offload_param"] != "cpu":
        device += (2 if states else 18) * numel / ranks
    return 1.5 * max(loading, kept), device
