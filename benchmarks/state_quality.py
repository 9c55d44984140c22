"""Losses with optimizer states in each format: curves of a small GPT over the quickstart's text, and a fine-tuning.

    python -m benchmarks.state_quality OUT --seeds 0       1,000 steps of twelve variants, one after the other: 3 minutes a seed
    python -m benchmarks.state_quality OUT --draw          only the table and picture of what OUT/state-quality.json has so far

One process, one thread, 4 sequences of 64 bytes a step; every hundred steps the loss of 32 KiB of text that is held out, in bits a
byte. A fine-tuning begins with weights that 300 steps of fp32 states have trained on the first half of the text, and takes 300
steps on the second half with a tenth of the learning rate, and new states.

zs.shard offers neither one scale for a whole tensor nor coded states of embeddings. `Recoded`, torch's AdamW whose states pass
through a codec after each step, stands for these variants; tests/benchmarks/test_bench_states.py compares its weights with those
of zs.shard, which are equal in all bits, in the formats that both have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.cli.sheets import say, show
from zeroshard.data.text import read_corpus
from zeroshard.formats import FloatCodec, coded_column
from zeroshard.planner.models import GPTConfig
from zeroshard.utils.state_format import FORMATS

from .pictures import picture
from .state_formats import HELD_OUT_NBYTES, OPTIONS, Make, Run, ours
from .tables import Measured, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPE = GPTConfig(seq_len=64, dim=64, layers=2, heads=2, ngram_rows=1024)  # 98,000 parameters in blocks, 217,000 in embeddings
STEPS, ROWS, BETWEEN = 1000, 4, 100
TUNING_STEPS, TUNING_SLOWER = 300, 10
FILE = "state-quality.json"
CODED = FORMATS[1:]


class Recoded(torch.optim.AdamW):
    """torch's AdamW whose moments are encoded and decoded after each step. block: elements of a scale; None: all of a tensor."""

    def __init__(self, form: str, model: nn.Module, *, block: int | None = 256, embeddings: bool = False) -> None:
        super().__init__(model.parameters(), fused=True, **OPTIONS)
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding) and not embeddings}
        self.coded = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= 4096 and id(p) not in tables]
        self.form, self.block = form, block

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.coded:
            for name in ("exp_avg", "exp_avg_sq"):
                coded: Tensor = self.state[param][name]
                known: Any = coded_column(name, zs.StateFormat(self.form)).codec
                codec = FloatCodec(self.block or coded.numel(), known.exponent, known.mantissa, known.squares)
                flat = F.pad(coded.view(-1), (0, -coded.numel() % codec.block))
                coded.copy_(codec.decode(codec.encode(flat))[: coded.numel()].view_as(coded))
        return loss


VARIANTS: dict[str, Make] = {
    **{name: partial(ours, name) for name in FORMATS},
    **{f"{form}, one scale a tensor": partial(Recoded, form, block=None) for form in ("int4", "int8", "fp8")},
    **{f"{form}, embeddings too": partial(Recoded, form, embeddings=True) for form in ("int4", "int8")},
    "int4, stochastic": partial(ours, zs.StateFormat("int4", stochastic_rounding=True)),
    "int4, blocks of 128": partial(ours, zs.StateFormat("int4", block=128)),
}
NAMES = (*VARIANTS, *(f"tuned, {name}" for name in FORMATS))


def measure(seed: int, known: dict[str, list[float]]) -> Iterator[tuple[str, list[float]]]:
    """Train the variants that are not `known` from one seed; yield each with its bits a held-out byte every BETWEEN steps.

    The names of fine-tunings begin with "tuned, "; "tuned, start" has the loss before them, at index 0.
    """
    corpus = read_corpus()
    held_out, half = corpus.held_out[:HELD_OUT_NBYTES], corpus.train.numel() // 2
    new = partial(Run, shape=SHAPE, rows=ROWS, seed=seed)

    def curve(run: Run, steps: int) -> list[float]:
        return [run.loss(held_out) for _ in range(0, steps, BETWEEN) if run.steps(BETWEEN)]

    for name, make in VARIANTS.items():
        if name not in known:
            yield name, curve(new(make, corpus.train), STEPS)
    tuned = [name for name in FORMATS if f"tuned, {name}" not in known]
    if tuned:
        before = new(partial(ours, "fp32"), corpus.train[:half])
        yield "tuned, start", curve(before, TUNING_STEPS)[-1:]
        start = zs.full_state_dict(before.model)
    for name in tuned:
        run = new(partial(ours, name), corpus.train[half:], start=start)
        for group in run.optimizer.param_groups:
            group["lr"] /= TUNING_SLOWER
        yield f"tuned, {name}", curve(run, TUNING_STEPS)


def worse(losses: dict[str, list[float]], name: str) -> list[float]:
    """Return by how much the losses of a variant are above those of fp32 states, as parts of the latter."""
    plain = losses["tuned, fp32" if name.startswith("tuned, ") else "fp32"]
    return [loss / least - 1 for loss, least in zip(losses[name], plain, strict=True)]


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the curves over fp32's, the mean of all seeds: the formats, and the variants."""

    def panel(names: list[str], axis: Axes) -> None:
        for name in (name for name in names if all(name in losses for losses in found.values())):
            curves = [worse(losses, name) for losses in found.values()]
            means = [100 * sum(values) / len(values) for values in zip(*curves, strict=True)]
            axis.plot(list(accumulate([BETWEEN] * len(means))), means, label=name, marker=".")
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xlabel("steps")
        axis.set_ylim(-1, 2)
        axis.set_ylabel("held-out loss over that of fp32 states, %")
        axis.legend(fontsize=6, frameon=False)
        axis.label_outer()

    variants = [name for name in VARIANTS if name not in FORMATS]
    tuned = [f"tuned, {name}" for name in CODED]
    title = f"AdamW's states in fewer bits, a GPT on Python's standard library, mean of seeds {', '.join(found)}"
    picture(path, title, [partial(panel, names) for names in (list(CODED), variants, tuned)], (9.0, 3.2))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_quality", description="Losses with states in each format.")
    parser.add_argument("out", type=Path, help="folder of the results; what it has is not run again")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--draw", action="store_true", help="only draw what the folder has")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / FILE
    found: dict[str, dict[str, list[float]]] = json.loads(file.read_text()) if file.exists() else {}
    for seed in [] if given.draw else given.seeds.split(","):
        for name, losses in measure(int(seed), found.setdefault(seed, {})):
            found[seed][name] = losses
            file.write_text(json.dumps(found, indent=1) + "\n")
            say(f"seed {seed}: {name}: {losses[-1]:.4f}")
    names = [name for name in NAMES if all(name in losses for losses in found.values())]
    rows = [Row(name, []) for name in names]
    for row in rows:
        for seed, losses in found.items():
            row.facts[f"bits a byte, seed {seed}"] = round(losses[row.name][-1], 4)
            row.facts[f"over fp32's, %, seed {seed}"] = round(100 * worse(losses, row.name)[-1], 2)
    table = Measured("Losses with optimizer states in fewer bits", rows).sheet()
    show(table)
    (given.out / "state-quality.md").write_text(table.markdown())
    draw(found, given.out / "state-quality.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
