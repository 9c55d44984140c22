"""A plan in Python: what one rank of a run would hold and send, known before anything runs.

Run: python examples/plan_in_python.py (one process; no memory is taken for the model and no other rank is needed).
Prints a line for each stage of ZeRO, then the lowest one that fits 20 GiB, and what holds the memory there. Stage 0 sends more than
stage 1: its ranks exchange sums of gradients, which are in fp32, and those of stage 1 exchange parameters, in bf16.
"""

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig

RANKS, BATCH, ROOM = 8, (4, 1024), 20 << 30  # BATCH: sequences of one forward, tokens of each; ROOM: bytes of a device


def make_model() -> GPT:
    """1.6 billion parameters. zs.plan calls this on the meta device, where tensors have shapes and no memory."""
    return GPT(GPTConfig(vocab_size=50304, seq_len=1024, dim=4096, layers=6, heads=32))


def main() -> None:
    plans = {}
    for stage in range(4):
        # The options are those of zs.shard. Two steps of the library itself run on a rank that has no memory and no peers.
        plans[stage] = zs.plan(make_model, ranks=RANKS, batch=BATCH, checkpointing=True, stage=stage, precision="bf16")
        plan = plans[stage]
        peak, sent = plan.peak(zs.Tier.DEVICE), sum(plan.sent.values())
        print(f"stage {stage}: {plan.num_parameters / 1e9:.2f}B parameters, peak {peak / 2**30:5.1f} GiB a device, "
              f"sends {sent / 1e9:5.1f} GB a step")  # fmt: skip

    # A plan says what takes the memory, phase by phase.
    stage = next(stage for stage, plan in plans.items() if plan.peak(zs.Tier.DEVICE) <= ROOM)
    fullest = max(plans[stage].phases, key=lambda phase: phase.nbytes(zs.Tier.DEVICE))
    print(f"stage {stage} is the lowest that fits {ROOM >> 30} GiB. Its fullest phase is {fullest.name}:")
    for category, nbytes in sorted(fullest.held[zs.Tier.DEVICE].items(), key=lambda item: -item[1]):
        print(f"  {category:<24}{nbytes / 2**30:6.2f} GiB")


if __name__ == "__main__":
    main()
