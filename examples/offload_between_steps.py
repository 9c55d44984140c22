"""Between steps all states leave the device, and come back as the same bits: for RLHF, where another engine generates meanwhile.

Run: python examples/offload_between_steps.py FOLDER, where FOLDER is on a local disk (without one, a temporary folder).
Prints what the device holds before, while the states are away, and after; and the losses, which are those of a run without the break.
On a GPU the default place is host memory. On a CPU host memory is the device's, so here the states go into files.
"""

import copy
import sys
import tempfile

import torch

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    torch.manual_seed(0)
    start = GPT(GPTConfig(vocab_size=64, seq_len=32, dim=64, layers=2, heads=4))
    without = train(copy.deepcopy(start), None)
    with_break = train(copy.deepcopy(start), folder)
    print(
        f"losses {', '.join(f'{loss:.4f}' for loss in with_break[::3])}: {'the same' if with_break == without else 'NOT the same'} as without a break"
    )


def train(model: GPT, folder: str | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = zs.shard(model, optimizer, stage=3)
    draw, losses = torch.Generator().manual_seed(0), []
    for step in range(10):
        tokens = (torch.randint(64, (8, 1), generator=draw) + torch.arange(33)) % 64  # rows that count upwards
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if folder is not None and step == 4:
            generate_elsewhere(model, folder)
    return losses


def generate_elsewhere(model: GPT, folder: str) -> None:
    held = lambda: f"{on_device(zs.report(model)):,} bytes on the device"  # noqa: E731
    print(f"before: {held()}")
    zs.offload_states(model, device=folder)
    print(f"away:   {held()}")
    try:
        model(torch.zeros(1, 32, dtype=torch.long))  # a forward needs the parameters
    except zs.StatesAway as error:
        print(f"zs.StatesAway: {str(error).splitlines()[0]}")
    zs.reload_states(model)
    print(f"after:  {held()}")


def on_device(report: zs.Report) -> int:
    """Parameters, gradients and optimizer states, but for what rests elsewhere."""
    elsewhere = sum(
        nbytes
        for held in report.elsewhere.values()
        for name, nbytes in held.items()
        if name in (*report.at_rest, "master weights")
    )
    return sum(report.at_rest.values()) - elsewhere


if __name__ == "__main__":
    main()
