"""The TFLOPS a device of runs that others published, on V100, A100 and H100. No constant of the simulator was fitted to them.

Each run is simulated with one task after the other, but for those whose software overlaps communication with computation
(column `beside` of data/throughput_others.csv). Pipelines have one stage a rank here; some of Megatron-LM's interleave several.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from zeroshard.config import Tier
from zeroshard.planner.models.gpt import GPTConfig
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.load import loads_of, step_seconds
from zeroshard.planner.search.profile import Profile
from zeroshard.planner.simulator.hardware import Hardware

from .table import SIMULATED, WITHIN, Cell, Row, Table, near, printed, rank_correlation
from .throughput import REDUCED, as_published, of_2019

# Speed of FlashAttention-2 over FlashAttention in Triton, which MPT's benchmarks used (submit_benchmarks.py, --attn_impl): 1.3
# to 1.5 forward, about 2 backward (FlashAttention-2, arXiv 2307.08691, section 4.1); forward takes a quarter of the time.
_TRITON = 1.85
_STATES = {"device": Tier.DEVICE, "host": Tier.HOST}
_WHY = {
    "8.3B": "24.8 if the one number of ZeRO's bars did not hold here (what data parallelism sends takes 1.4 times as long); "
    "a device of a DGX-2H may take 450 W, of a DGX-2 350",
    "1.2B v1.0": "60% faster than the same model on the same device two rows above, by software alone; its products are faster "
    "than those that ZeRO-Infinity measured on a DGX-2; a device of a DGX-2H may take 450 W, not 350",
    "ZeRO-3": "as printed, what parameters of three passes send goes at 20 to 46 GB/s a device, the slower the more devices "
    "there are: not a bandwidth. It may be the latency of rings of all ranks, parameter by parameter, in DeepSpeed of 2021; "
    "FSDP's runs of this shape on 512 devices hide their gathers",
    "Azure": "DeepSpeed's ZeRO-3 a year later: gathers at 40 to 60 GB/s a device would explain it, and links give more",
    "BLOOM": "Jean Zay's nodes have 4 links of 100 Gb/s, a quarter of a DGX A100's: with them 165",
    "70B 64x2": "a batch of 2, which leaves little to hide gathers behind; with nothing sent beside computation 140",
    "30B 8K": "as printed a third slower in hardware flops than 13B at 8K, and alike so on A100 and H100: one sequence at a time fills the memory, "
    "and torch's allocator may have to free and ask again",
    "13B H100": "as printed 2.1 times what the same source has for an A100, where products can be 3 times as fast (792 and 268 "
    "TFLOPS): kernels of 2023",
}


def tflops(row: Row) -> float:
    """Return the simulated TFLOPS a device of a run, with the operations counted as the row's source counts them."""
    names = ("gpus", "tp", "pp", "layers", "hidden", "heads", "vocab", "seq", "stage", "micro_batch", "sequences")
    gpus, tp, pp, layers, hidden, heads, vocab, seq, stage, micro, sequences = (int(row[name]) for name in names)
    hardware, dp, states = Hardware.named(row["device"]), gpus // tp // pp, _STATES[row["states"]]
    device = hardware.device
    if "v100" in row["device"] and row["kernels"] == "eager":
        hardware = of_2019(hardware)
    elif row["kernels"] == "triton" and device.attention is not None:  # MPT's runs
        causal = tuple(part / _TRITON for part in device.attention.causal)
        hardware = replace(hardware, device=replace(device, attention=replace(device.attention, causal=causal)))
    kernels = "flash" if row["kernels"] == "triton" else row["kernels"]
    profile = Profile.of_shape(GPTConfig(vocab, seq, hidden, layers, heads, bias=True, tied=True), kernels=kernels)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, stage=stage, optimizer=states, gradient=states, micro_batch=micro,
        micro_batches=max(round(sequences / dp / micro), 1), checkpointing=row["checkpointing"],
        precision="fp16" if "v100" in row["device"] else "bf16", node_size=min(gpus, hardware.devices_per_node),
        gradient_itemsize=2, prefetch_nbytes=8 << 30, stops_early=False, hops="one", rings=True,
    )  # fmt: skip
    blocks = sum(layer.flops for layer in profile.blocks)
    ways = {"8P": 8 * profile.numel, "repeated": 4 * blocks + 3 * (profile.flops - blocks), "model": 3 * profile.flops}
    reduced = REDUCED if row["kernels"] == "eager" and row["beside"] == "no" else 1.0
    loads = [as_published(load, reduced=reduced) for load in loads_of(profile, layout)]
    seconds, _ = step_seconds(profile, layout, hardware, row["beside"] == "yes", loads)
    return ways[row["count"]] * layout.sequences * seq / gpus / seconds / 1e12


@functools.cache
def throughput_others() -> Table:
    """Compute the TFLOPS a device of all runs, and how close they are by device."""
    file, cells, pairs = printed("throughput_others"), [], []
    for row in file.rows:
        value, label = tflops(row), f"{row['paper']}, {row['model']}: {row['gpus']} x {row['device']}"
        note = next((why for name, why in _WHY.items() if name in f"{row['paper']} {row['model']}"), "")
        cells.append(near(label, "TFLOPS a device", row["value"], value, ".1f", SIMULATED, note))
        cells.append(Cell(label, "assumed", "", row["assumed"], SIMULATED))
        pairs.append((row["device"], float(row["value"]), value))
    remarks = [
        "TFLOPS a device. ~: within 20%. Hardware: simulator/hardware.toml. Two of its figures were chosen after a look at these runs: docs/planning.md."
    ]
    for device in dict.fromkeys(device for device, *_ in pairs):
        of = [(theirs, ours) for each, theirs, ours in pairs if each == device]
        close, error = sum(abs(ours / theirs - 1) <= WITHIN for theirs, ours in of), sum(ours / theirs - 1 for theirs, ours in of)
        told = f"{device}: within {WITHIN:.0%}: {close} of {len(of)}; mean error {error / len(of):+.0%}; rank correlation "
        remarks.append(f"{told}(Spearman) {rank_correlation(of):.2f}.")
    return Table("throughput-others", "Training runs of others", file.paper, cells, remarks, corner="run")
