"""Formats of optimizer states in one process: bytes, time and losses, beside AdamW of torchao and bitsandbytes in 8 and 4 bits.

    zeroshard bench --sections states     1.9M parameters, 300 steps of every contender, and larger matrices: some minutes
    zeroshard bench --sections states --path FOLDER    also a whole step of larger matrices in bf16 with all states on that disk

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
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.data.text import Batches, held_out_windows, read_corpus
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.utils.sheets import PLAIN, WARNING
from zeroshard.utils.state_format import FORMATS

from .contenders import OFFLOADS
from .micro import Case, measure, one_line
from .tables import Measured

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
PEERS = (*(("torchao", name) for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")), ("bitsandbytes", "AdamW8bit"))
SHAPE = GPTConfig(seq_len=32, dim=192, layers=4, heads=6)
TURN = 10  # steps
HELD_OUT_NBYTES = 1 << 15
BYTES, LOSS = "states, bytes a parameter", "bits a held-out byte"
NOTE = "ms, / fp32: processor time of optimizer.step(). Losses: of held-out text after the last step."

TIERS: dict[str, dict[str, Any]] = {  # zs.shard's options of the larger steps
    "fp32": {},
    "bf16": {"optimizer_states": "bf16"},
    "int8": {"optimizer_states": "int8"},
    "int8, split masters": {"optimizer_states": "int8", "master_weights": "split"},
    "int4, split masters": {"optimizer_states": "int4", "master_weights": "split"},
}

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

    def steps(self, count: int) -> float:
        """Take steps; return the median of the processor seconds that each spent in optimizer.step()."""
        times = []
        for _ in range(count):
            self.model(*self.batches.rows(self.taken, 0, self.batches.batch)).backward()
            begin = time.process_time()
            self.optimizer.step()
            times.append(time.process_time() - begin)
            self.optimizer.zero_grad()
            self.taken += 1
        return median(times)

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
            reasons[f"{library} {cls}"] = f"skipped: {one_line(error)}"
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
                reasons[name] = f"skipped: {one_line(error)}"
                del makes[name]
    return makes, reasons, note


def section(path: str | None) -> list[Measured]:
    """Return all tables. `apart` runs this in a rank's environment, though it is a single process: the environment is changed."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    return [contenders(), matrices(), *([matrices(path)] if path else [])]


def matrices(path: str | None = None, layers: int = 12, dim: int = 2048, rounds: int = 4) -> Measured:
    """Measure steps of square matrices in bf16: the processor time of optimizer.step() in memory, on a disk the whole step.

    A whole step takes as long as the clock says; its processor time, which a busy machine changes less, is a column.
    """
    on_disk = OFFLOADS["infinity"] | {"offload_path": path} if path else {}
    cases, cpu = [], dict[str, list[float]]()
    for name, options in TIERS.items():
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        model, optimizer = zs.shard(model, optimizer, stage=3, precision="bf16", **on_disk, **options)
        rows = torch.randn(4, dim, dtype=torch.bfloat16)
        cases.append(
            Case(name, partial(_step, model, optimizer, rows, cpu.setdefault(name, []), path is not None), own_clock=True)
        )
    where = "a whole step, everything on disk" if path else "optimizer.step() in memory"
    found = measure(f"{where}: {layers * dim * dim / 1e6:.1f}M parameters in bf16, 1 thread", cases, rounds, warmup=2)
    for row in found.rows:
        row.facts["cpu ms" if path else "ns an element"] = median(cpu[row.name][2:]) * (
            1e3 if path else 1e9 / (layers * dim * dim)
        )
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, cpu: list[float], whole: bool) -> float:
    """Take a step; add the processor seconds of optimizer.step(), or of the `whole` step, to `cpu`. Return these, or the clock's."""
    began, cpu_began = time.perf_counter(), time.process_time()
    model(rows).float().square().sum().backward()
    if not whole:
        cpu_began = time.process_time()
    optimizer.step()
    cpu.append(time.process_time() - cpu_began)
    optimizer.zero_grad()
    return time.perf_counter() - began if whole else cpu[-1]


def contenders(steps: int = 300, seed: int = 0) -> Measured:
    """Train every contender in turns of TURN steps; the times are processor seconds of optimizer.step()."""
    corpus = read_corpus()
    peers, reasons, note = _peers()
    makes = {**{name: partial(ours, name) for name in FORMATS}, **peers}
    runs = {name: Run(make, corpus.train, shape=SHAPE, rows=1, seed=seed) for name, make in makes.items()}
    cases = [Case(name, partial(run.steps, TURN), own_clock=True) for name, run in runs.items()]
    title = f"States of AdamW, a GPT of {runs['fp32'].numel / 1e6:.1f}M parameters, {steps // TURN * TURN} steps, 1 thread"
    found = measure(title, cases, steps // TURN, warmup=0)
    losses = {name: run.loss(corpus.held_out[:HELD_OUT_NBYTES]) for name, run in runs.items()}
    for row in found.rows:
        above = 100 * (losses[row.name] / losses["fp32"] - 1)
        row.facts = {BYTES: runs[row.name].state_nbytes(), LOSS: losses[row.name], "over fp32's, %": above}
    found.skipped = reasons
    found.notes = [(NOTE, PLAIN), *([(note, WARNING)] if note else [])]
    return found
