"""Formats of optimizer states in one process: bytes, time and losses, beside AdamW of torchao and bitsandbytes in 8 and 4 bits.

    zeroshard bench --sections states          10.8M parameters, one thread, 300 steps of every contender, in turns: 15 minutes

All begin with the same weights and read the same batches, of the quickstart's text; losses are of text that is held out. Curves
over more steps, of one seed after the other, are in state_quality.py.

torchao compiles its steps. Where that fails (no C++ compiler) they run as eager operators, and a note says so.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.data.text import Batches, held_out_windows, read_corpus
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.utils.sheets import PLAIN, WARNING, Sheet
from zeroshard.utils.state_format import FORMATS

from .micro_benchmark import median_ratio, one_line, take_turns
from .tables import Column, sheet_of

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
PEERS = (*(("torchao", name) for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")), ("bitsandbytes", "AdamW8bit"))
SHAPE = GPTConfig(seq_len=32, dim=384, layers=6, heads=6)
TURN = 10  # steps
HELD_OUT_NBYTES = 1 << 15
COLUMNS = (
    Column("", itemgetter("name")),
    Column("states, bytes a parameter", itemgetter("state_nbytes"), ".3f"),
    Column("step ms", itemgetter("ms"), ".1f"),
    Column("cpu ms", itemgetter("cpu_ms"), ".1f"),
    Column("/ fp32", itemgetter("ratio"), ".2f"),
    Column("bits a byte", itemgetter("loss"), ".4f"),
    Column("to fp32", itemgetter("worse"), "+.2%"),
)
NOTE = (
    "step: optimizer.step() alone, median. cpu, / fp32: its processor time, and the median of the ratios within a round.\n"
    "bits a byte: of held-out text after the last step."
)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def ours(form: str | zs.StateFormat, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW of a model, sharded on one rank, with states in a format."""
    return zs.shard(model, torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS), stage=1, optimizer_states=form)[1]


class Run:
    """The training of one contender: a GPT with the weights of a seed (or `start`), its optimizer, and batches of text."""

    def __init__(
        self, make: Make, text: Tensor, *, shape: GPTConfig, rows: int, seed: int, start: dict[str, Tensor] | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = GPT(shape)
        if start is not None:
            self.model.load_state_dict(start)
        self.numel = sum(param.numel() for param in self.model.parameters())
        self.optimizer, self.batches, self.taken = make(self.model), Batches(text, shape.seq_len, rows, seed), 0

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Take steps; return the seconds and the processor seconds that each spent in optimizer.step()."""
        times = []
        for _ in range(count):
            self.model(*self.batches.rows(self.taken, 0, self.batches.batch)).backward()
            wall, cpu = time.perf_counter(), time.process_time()
            self.optimizer.step()
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
            self.optimizer.zero_grad()
            self.taken += 1
        return times

    @torch.no_grad()
    def loss(self, text: Tensor) -> float:
        """Return the bits a byte of a text, (nbytes,) uint8, cut into windows without overlap."""
        windows, scored = held_out_windows(text, self.batches.seq, self.batches.seq)
        nats = 0.0
        for rows, mask in zip(windows.split(16), scored.split(16), strict=True):
            each = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
            nats += float(each[mask.flatten()].double().sum())
        return nats / math.log(2) / int(scored.sum())

    def state_nbytes(self) -> float:
        """Return the bytes of optimizer states a parameter, scales and tables of levels included."""
        if hasattr(self.optimizer, "core"):  # sharded by zeroshard
            nbytes = zs.report(self.model).at_rest["optimizer states"]
        else:
            tensors = _plain(value for states in self.optimizer.state.values() for value in states.values())
            nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.dim()}.values())
        return nbytes / self.numel


def _plain(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors of states; one of torchao consists of several."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from _plain(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value


def _peers() -> tuple[dict[str, Make], dict[str, str], str]:
    """Return the peers that step on this machine, the reasons why others do not, and a note if torchao's are not compiled."""
    makes: dict[str, Make] = {}
    reasons: dict[str, str] = {}
    note = ""
    for library, cls in PEERS:
        try:
            peer = getattr(importlib.import_module(f"{library}.optim"), cls)
            name = f"{library} {metadata.version(library)} {cls}"
        except (ImportError, AttributeError, OSError) as error:
            reasons[f"{library} {cls}"] = one_line(error)
            continue
        makes[name] = lambda model, peer=peer: peer(model.parameters(), **OPTIONS)  # type: ignore[misc]
        trial = partial(Run, makes[name], torch.zeros(1 << 10, dtype=torch.uint8), shape=SHAPE, rows=1, seed=0)
        try:
            trial().steps(1)
        except Exception as error:
            try:
                torch.compiler.set_stance("force_eager")
                trial().steps(1)
                note = f"torchao's steps ran as eager operators, since compiling failed: {one_line(error)}"
            except Exception as error:
                reasons[name] = one_line(error)
                del makes[name]
    return makes, reasons, note


def measure(steps: int = 300, seed: int = 0) -> list[dict[str, Any]]:
    """Train every contender in turns of TURN steps on one thread; return one row for each.

    Keys: name; numel: parameters; steps; state_nbytes: bytes a parameter; ms, cpu_ms: medians of optimizer.step(); ratio: its processor time to that of
    fp32; loss: bits a held-out byte; worse: its relative difference to fp32's. A peer that cannot run has name and skipped.
    """
    torch.set_num_threads(1)
    corpus = read_corpus()
    peers, reasons, note = _peers()
    makes = {**{name: partial(ours, name) for name in FORMATS}, **peers}
    runs = {name: Run(make, corpus.train, shape=SHAPE, rows=1, seed=seed) for name, make in makes.items()}
    samples = take_turns({name: partial(run.steps, TURN) for name, run in runs.items()}, steps // TURN)
    held_out = corpus.held_out[:HELD_OUT_NBYTES]
    losses = {name: run.loss(held_out) for name, run in runs.items()}
    cpu = {name: [median(cpu for _, cpu in turn) for turn in turns] for name, turns in samples.items()}
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        rows.append({
            "name": name, "numel": run.numel, "steps": run.taken, "state_nbytes": run.state_nbytes(),
            "ms": 1e3 * median(wall for turn in samples[name] for wall, _ in turn), "cpu_ms": 1e3 * median(cpu[name]),
            "ratio": median_ratio(cpu[name], cpu["fp32"]), "loss": losses[name], "worse": losses[name] / losses["fp32"] - 1,
        })  # fmt: skip
    rows += [{"name": name, "skipped": why} for name, why in reasons.items()]
    return rows + ([{"name": "torchao", "note": note}] if note else [])


def measure_section() -> list[dict[str, Any]]:
    """Return the rows of `measure` in a process that `apart` has started: a single process, though it has a rank's environment."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return measure()


def sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the rows of one `measure` as a table."""
    notes = [(NOTE, PLAIN), *((f"{row['name']}: skipped: {row['skipped']}", WARNING) for row in rows if "skipped" in row)]
    notes += [(row["note"], WARNING) for row in rows if "note" in row]
    measured = [row for row in rows if "ms" in row]
    title = f"States of AdamW, a GPT of {measured[0]['numel'] / 1e6:.1f}M parameters, {measured[0]['steps']} steps, 1 thread"
    return sheet_of(title, COLUMNS, measured, notes)
