"""Sequences longer than a rank has memory for: their tokens over 1 to 6 ranks, then with checkpoints on the host and tiles.

    python examples/long_sequences.py

Ranks are threads here. Under torchrun the mesh is init_device_mesh("cuda", (dp, sp), mesh_dim_names=("dp", "sp")); the rest stays.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs
from zeroshard.testing import run_threads

TOKENS, STEPS = 960, 3
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
)


def batches() -> list[dict[str, Tensor]]:
    """One sequence a step, the same for all ranks along sp."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, CONFIG.vocab_size, (1, TOKENS), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each} for each in ids]


class Kept:
    """Bytes of activations that autograd keeps on this rank from a forward to its backward."""

    def __init__(self, size: int) -> None:
        part, among = TOKENS // size, math.gcd(size, CONFIG.num_attention_heads)  # `among` ranks exchange tokens for heads
        self.lengths, self.storages = {TOKENS, part, part * among, 60}, dict[int, int]()  # 60: of tiles

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None and self.lengths & set(tensor.shape):  # not a parameter, mask or index
            self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> "Kept":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    @property
    def nbytes(self) -> int:
        return sum(self.storages.values())


def train(rank: int, models: list[LlamaForCausalLM], size: int, tiles: bool) -> tuple[float, int, int, int]:
    """Return the last loss, the bytes kept on the device and on the host, and those sent along sp in a step."""
    model, mesh = models[rank], {"sp": size}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if tiles:
        model, optimizer = zs.long_context(model, optimizer, mesh=mesh, stage=3, loss_tokens=60, mlp_tokens=60)
    else:
        model, optimizer = zs.shard(model, optimizer, mesh=mesh, stage=3)
    for batch in zs.SequenceLoader(batches(), model):
        with Kept(size) as kept:
            loss = model(**batch).loss
        zs.backward(model, loss, weight=batch["num_items_in_batch"])
        optimizer.step()
        optimizer.zero_grad()
    sent = zs.report(model).communication.get("all-to-all along sp")
    host = zs.activation_report(model).peak["host"] if tiles else 0
    if rank == 0 and tiles:
        for note in zs.report(model).deviations:
            print(f"note: {note}")
    return loss.item(), kept.nbytes, host, 0 if sent is None else sent.nbytes // STEPS


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for size, tiles in ((1, False), (2, False), (4, False), (6, False), (4, True)):
        models = []
        for _ in range(size):  # the same on every rank
            torch.manual_seed(0)
            models.append(LlamaForCausalLM(CONFIG))
        found = run_threads(size, train, models, size, tiles)
        loss = sum(each[0] for each in found) / size
        rows.append(f"{size} rank{'s' * (size > 1):1}  {'long_context' * tiles:12}  loss {loss:.4f}  {found[0][1]:>12,} "
                    f"{found[0][2]:>10,} {found[0][3]:>12,}")  # fmt: skip
    print(f"{'bytes of a rank':37}{'kept':>13} {'on host':>10} {'sent':>12}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
