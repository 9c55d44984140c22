"""The measurements of a GPU: the parts of scripts/gpu_day.sh, each of which writes one JSON that `page` joins; the largest models.

    python -m benchmarks.gpu_day PART OUT [--dry-run]     one of PARTS; --dry-run: tiny sizes, on the CPU over gloo
    python -m benchmarks.gpu_day page OUT PART ...        results.json and results.md from the parts' JSON

OUT/PART.json: part, status ("done", "skipped", "failed"; "running" if the process was killed), why, device, dry_run, seconds, facts
(of the part) and rows. It is written again after each row, so that a part that is ended keeps what it has measured. A row has a
`status`, too: "ran", "skipped: why" or "failed: why". Contenders have the device to themselves, one after the other.

`largest_models`, the section gpu of `zeroshard bench`, searches for the largest model that each contender trains in bf16: a trial,
of a number of layers, is a process of its own that builds the model on the meta device, makes two steps and ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.cli.sheets import say
from zeroshard.config import Tier
from zeroshard.formats import state_codecs
from zeroshard.packing.codecs import CODECS, block_quantization, codec_of
from zeroshard.planner.dry_run import observe
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import KEPT
from zeroshard.utils.host_memory import available_nbytes
from zeroshard.utils.sheets import PLAIN, Sheet
from zeroshard.utils.state_format import StateFormat

from . import predictions
from .contenders import OFFLOADS
from .micro import one_line
from .plan import SOCKET_CONTENDERS, Contender, ModelShape, Rounds, Workload
from .predictions import Case
from .race import Outcome, compared_losses, missing_reason, race
from .sections import swap_folder
from .tables import Measured, Row
from .worker import parameter_count
from .worker_group import Team, TeamFailed
from .workload import build_llama

TINY = ModelShape(vocab_size=64, seq_len=32, dim=32, layers=3, heads=2)
BILLION = ModelShape(vocab_size=32768, seq_len=1024, dim=2048, layers=24, heads=16)  # 1.3B parameters
SHAPE = ModelShape(vocab_size=32768, seq_len=1024, dim=1024, layers=20, heads=16)  # 320M: states outweigh activations
EIGHT = ModelShape(vocab_size=32768, seq_len=1024, dim=4096, layers=39, heads=32)  # 8B
WIDE_SHAPE = dataclasses.replace(BILLION, layers=1)  # of the search for the largest model: 50M parameters a layer
STEPPING = (
    *(Contender("zs", stage, "bf16") for stage in (3, 2, 0)),
    *(Contender(*each, "bf16") for each in (("local", None), ("ddp", None), ("fsdp2", None), ("ds", 3))),
)
SUMMED = tuple(dataclasses.replace(each, precision="bf16") for each in SOCKET_CONTENDERS)  # of several ranks
TIERS = tuple(Contender("zs", 3, "bf16", offload) for offload in ("", "opthost", "host", "disk", "infinity"))
PEERS = (Contender("fsdp2", None, "bf16", "offload"), Contender("ds", 3, "bf16", "offload"))
TUNING = (Contender("zs", 3, "bf16", "host8"), Contender("zs", 3, "bf16", "host"), *PEERS)
# Bytes a parameter on device, host and disk, rounded up, by offload: for a search's first size, and its limit on the host.
STATE_NBYTES = {
    "": (18, 0, 0),  # bf16 parameter; fp32 gradient, master, two moments
    "backend": (18, 0, 0),
    "opthost": (2, 16, 0),
    "host": (0, 18, 0),
    "host8": (0, 11, 0),  # split masters 4, gradient 4, moments 2, and their scales
    "disk": (2, 4, 12),
    "infinity": (0, 0, 18),
    "offload": (0, 20, 0),
}
HOST_SHARE = 0.9  # of the host's free memory that states may take: the kernel would kill a process, perhaps not ours
USABLE = 0.8  # share of each memory that model states may fill in the first trial of a search
DEVICE_LIMIT_NBYTES, BEGAN = 24 << 30, time.perf_counter()


class OutOfTime(BaseException):
    """Raised by SIGTERM, which `timeout` sends: files on disk are removed, and the JSON says so."""


@dataclass
class Part:
    """The findings of one part so far. `write` keeps them in OUT/name.json."""

    name: str
    out: Path
    dry: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def ranks(self) -> int:
        """The number of ranks that share the work: the GPUs of this machine, in a dry run two processes."""
        return 2 if self.dry else torch.cuda.device_count()

    def workload(self, shape: ModelShape, ranks: int = 1, **options: Any) -> Workload:
        """Return the work of a race; in a dry run it is tiny."""
        shape = TINY if self.dry else shape
        return Workload(shape, sequences=4, ranks=ranks, device=self.device, forked=self.dry, **options)

    def add(self, name: str, status: str = "ran", **values: Any) -> dict[str, Any]:
        """Add a row, and write all."""
        self.rows.append({"name": name, "status": status, **values})
        self.write("running")
        return self.rows[-1]

    def attempt(self, name: str, what: Callable[[], dict[str, Any]]) -> None:
        """Add the row of what a function returns; of one that raises, the reason."""
        try:
            self.add(name, **what())
        except Exception as error:  # the other rows are measured all the same
            self.add(name, f"failed: {one_line(error)}")
        gc.collect()

    def write(self, status: str, why: str = "") -> None:
        """Write the JSON."""
        told = {"part": self.name, "status": status, "why": why, "dry_run": self.dry, "device": self.device,
                "seconds": round(time.perf_counter() - BEGAN, 1), "facts": self.facts, "rows": self.rows}  # fmt: skip
        (self.out / f"{self.name}.json").write_text(json.dumps(told, indent=1, default=str) + "\n")


# -- environment and tests -----------------------------------------------------------------------------------------------


def environment(part: Part) -> None:
    """Versions and what `zeroshard doctor` finds, nvidia-smi's table, and each GPU as torch sees it."""
    from zeroshard.cli.environment import findings, look

    here, nccl = look(), torch.cuda.nccl.version() if dist.is_nccl_available() else None
    part.facts = asdict(here) | {"findings": [asdict(each) for each in findings(here)]}
    for command in ("nvidia-smi", "git describe --always --dirty"):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=30)
        part.facts[command] = done.stdout.strip() or f"skipped: {done.stderr.strip()}"
    part.add("torch", version=torch.__version__, cuda=torch.version.cuda, nccl=nccl, gpus=len(here.gpus))
    for gpu in here.gpus:
        part.add(**asdict(gpu))


def tests(part: Part) -> None:
    """The tests marked gpu, counted as they end. A dry run has those of one file, which are skipped without a GPU."""
    where, rows = "tests/gpu/test_state_codecs_on_gpu.py" if part.dry else "tests", dict[str, dict[str, Any]]()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rs", "-p", "no:cacheprovider", where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if ended := re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", line):
                name, outcome = ended[1], ended[2].lower()
                row = rows.get(outcome) or rows.setdefault(outcome, part.add(outcome, tests=0))
                row["tests"] += 1
                if outcome in ("failed", "error"):
                    row["status"] = f"{row['status'].replace('ran', 'failed:')} {name}"
                part.write("running")
    if process.returncode:
        part.add("pytest", f"failed: exit code {process.returncode}")


# -- plans ---------------------------------------------------------------------------------------------------------------


def six(dry: bool) -> list[Case]:
    """Return the six models whose peaks are compared with their plans, with options of zs.shard; in a dry run all are tiny."""
    bf16, batch = {"precision": "bf16"}, (2, 16) if dry else (4, 1024)
    sizes = (512, 128, 256, 2, 2, 1) if dry else (128256, 2048, 8192, 16, 32, 8)
    llama = partial(build_llama, *sizes, use_cache=False, tie_word_embeddings=True)

    def gpt(dim: int, layers: int, heads: int) -> Callable[[], torch.nn.Module]:
        dim, layers, heads = (128, 2, 2) if dry else (dim, layers, heads)
        return lambda: GPT(GPTConfig(vocab_size=512 if dry else 50304, seq_len=1024, dim=dim, layers=layers, heads=heads))

    cases = (
        ("GPT 124M, stage 1, fp32", gpt(768, 12, 12), {"stage": 1}),
        ("GPT 354M, stage 2, bf16", gpt(1024, 24, 16), {"stage": 2, **bf16}),
        ("GPT 774M, stage 3, bf16, checkpoints", gpt(1280, 36, 20), {"stage": 3, **bf16}),
        ("GPT 1.3B, stage 3, bf16", gpt(2048, 24, 16), {"stage": 3, **bf16}),
        ("Llama 1.2B, stage 3, bf16, checkpoints", llama, {"stage": 3, **bf16}),
        ("GPT 2.7B, stage 3, bf16, all on the host, checkpoints", gpt(2560, 32, 32), {"stage": 3, **bf16, **OFFLOADS["host"]}),
    )
    return [Case(name, model, batch, options, checkpointing="checkpoints" in name) for name, model, options in cases]


def peaks(part: Part) -> None:
    """The planned peak of a device beside what its allocator gave; on a CPU beside what an observed run held."""
    dist.init_process_group("gloo" if part.dry else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not part.dry:
        predictions.warm_device()
    for case in six(part.dry):
        part.attempt(case.name, partial(_peak, part, case))


def _peak(part: Part, case: Case) -> dict[str, Any]:
    settings, began = case.settings("") | {"separate": not part.dry}, time.perf_counter()
    plan = zs.plan(case.model, ranks=1, **settings)
    plan_s = time.perf_counter() - began
    if part.dry:  # device and host are one memory, of which the C library keeps some that nobody holds
        seen = observe(case.model, ranks=1, rank=0, **settings)
        how, planned, measured = "observe", *(predictions.held_nbytes(each, (KEPT,)) for each in (plan, seen))
    else:
        how, planned = "torch.cuda.max_memory_allocated", plan.peak(Tier.DEVICE)
        measured, _ = predictions.measure_device(case, "", 3)
        torch.cuda.empty_cache()
    ratio = planned / measured
    return {"planned_nbytes": planned, "measured_nbytes": measured, "planned / measured": ratio, "by": how, "plan_s": plan_s}


# -- races ---------------------------------------------------------------------------------------------------------------


def steps(part: Part) -> None:
    """Time steps of a GPT of 1.3B parameters in bf16 on all GPUs."""
    rounds = Rounds(warmup=2, rounds=1, steps=2 if part.dry else 8, memory_steps=1)
    _alone(part, (*STEPPING, *(SUMMED if part.ranks > 1 else ())), part.workload(BILLION, ranks=part.ranks), rounds)


def offload(part: Part) -> None:
    """The link, then steps of a GPT of 320M parameters with states on each tier, on one GPU."""
    nbytes = 1 << (20 if part.dry else 30)
    on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=not part.dry)
    on_device = torch.empty_like(on_host, device=part.device)
    for name, target, source in (("copy to the device", on_device, on_host), ("copy to the host", on_host, on_device)):
        part.add(name, nbytes=nbytes, bytes_per_s=nbytes / _seconds(part.device, partial(target.copy_, source)))
    del on_host, on_device, target, source
    rounds = Rounds(warmup=1, rounds=1, steps=1 if part.dry else 3, memory_steps=1, lead_in=0 if part.dry else 1)
    with swap_folder(None, part.out) as path:
        _alone(part, (*TIERS[1:], *PEERS, TIERS[0]), part.workload(SHAPE, swap_path=path), rounds)


def finetune(part: Part) -> None:
    """All parameters of 8B in bf16 on 24 GB of a device; where a host cannot hold a peer's states, a race of fewer layers, too."""
    workload, rounds = part.workload(EIGHT, checkpoint=True, limit_nbytes=DEVICE_LIMIT_NBYTES), Rounds(1, 1, 2, 1)
    have = available_nbytes() or 0
    part.facts = {"device_limit_nbytes": DEVICE_LIMIT_NBYTES, "host_nbytes": have}
    _alone(part, TUNING, workload, rounds)
    if any(short_of_memory(each, workload, have) for each in TUNING):
        most = HOST_SHARE * have / max(STATE_NBYTES[each.offload][1] for each in TUNING) / parameter_count(workload)
        layers = max(1, int(workload.shape.layers * min(most, 1 / 3)))  # time is short, too
        _alone(part, TUNING, dataclasses.replace(workload, shape=dataclasses.replace(workload.shape, layers=layers)), rounds)


def _alone(part: Part, contenders: Iterable[Contender], workload: Workload, rounds: Rounds) -> None:
    """Add a row for each contender, which has the machine to itself, and the difference of its losses from the reference's."""
    ran: list[Outcome] = []
    rows: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        if why := short_of_memory(contender, workload, available_nbytes() or 0):
            part.add(contender.name, f"skipped: {why}", parameters=parameter_count(workload))
            continue
        ran += race([contender], workload, rounds, part.out / "logs" / part.name)
        rows[contender.name] = part.add(contender.name, ran[-1].status, **_row(ran[-1], workload))
        for compared, reference, difference in compared_losses(ran):
            same, name = difference <= max(compared.tolerance, reference.tolerance), reference.contender.name
            rows[compared.contender.name] |= {"losses of": name, "difference": difference, "same": same}
    part.write("running")


def short_of_memory(contender: Contender, workload: Workload, host_nbytes: int) -> str | None:
    """Return why a host with so many free bytes cannot hold a contender's states; None if it can."""
    needed = STATE_NBYTES[contender.offload][1] * parameter_count(workload)
    if needed <= HOST_SHARE * host_nbytes:
        return None
    return f"{needed / 2**30:.0f} GiB of host memory needed, {host_nbytes / 2**30:.0f} available"


def step_flops(workload: Workload) -> float:
    """Return the floating-point operations of one rank's step (PaLM, arXiv 2204.02311, appendix B).

    For each token 6 for each weight of a matrix, and 6 x layers x dim x seq for attention: the half of it that is causal.
    """
    s = workload.shape
    weights = 12 * s.layers * s.dim**2 + s.vocab_size * s.dim
    return workload.sequences * s.seq_len * (6.0 * weights + 6.0 * s.layers * s.dim * s.seq_len)


def _row(outcome: Outcome, workload: Workload) -> dict[str, Any]:
    """Return what a contender's timed steps gave, also if it failed later: speeds are of all ranks, bytes of the fullest one."""
    if not outcome.rounds_step_s:
        return {}
    step_s, tokens = median(outcome.round_s), workload.ranks * workload.sequences * workload.shape.seq_len
    row: dict[str, Any] = {
        "parameters": outcome.numel, "ms": 1e3 * step_s, "tokens_per_s": tokens / step_s,
        "tflops": workload.ranks * step_flops(workload) / step_s / 1e12,
        "peak_nbytes": outcome.cuda_peak if workload.device == "cuda" else outcome.peak_rss, "losses": outcome.losses,
    }  # fmt: skip
    if moved := outcome.moved[-1]:
        row["moved_bytes_per_s"] = {link: nbytes / step_s for link, nbytes in moved.items()}
    if outcome.disk:
        row["disk_bytes_per_s"] = asdict(outcome.disk[-1])
    if outcome.overlap is not None:
        row |= {"copies_ms": outcome.overlap.copies_ms, "beside_kernels": outcome.overlap.fraction()}
    return row


# -- codecs --------------------------------------------------------------------------------------------------------------


def codecs(part: Part) -> None:
    """Codecs of messages and of states, each way: torch's operators beside Triton's kernels, whose bytes are the same."""
    numbers = torch.randn(1 << (14 if part.dry else 28), device=part.device)
    for name in CODECS:
        codec, out = codec_of(name), torch.empty_like(numbers)
        packed = torch.empty(codec.packed_nbytes(numbers.numel()), dtype=torch.uint8, device=part.device)
        for way, source, to in (("pack", numbers, packed), ("unpack", packed, out)):
            call = partial(getattr(codec, way), source, to)
            part.attempt(f"{name}, {way}", partial(_beside_torch, block_quantization, numbers, call, to))
        del out, packed, source, to, call  # of a GiB each
    for name, state in itertools.product(("int8", "fp8", "int4"), ("exp_avg", "exp_avg_sq")):
        column = state_codecs.coded_column(state, StateFormat(name))
        given = numbers.square() if state == "exp_avg_sq" else numbers
        coded = column.encode(given)
        for way, call in (("encode", partial(column.encode, given)), ("decode", partial(column.decode, coded))):
            part.attempt(f"{state} in {name}, {way}", partial(_beside_torch, state_codecs, numbers, call))


def _beside_torch(module: Any, numbers: torch.Tensor, call: Callable[[], Any], out: torch.Tensor | None = None) -> dict[str, Any]:
    """Time a call with torch's operators and with Triton's kernels. out: where its result lies, if it does not return it."""

    def result() -> torch.Tensor:
        returned = call()
        return (returned if out is None else out).clone()

    device = numbers.device.type
    with mock.patch.object(module, "has_triton", lambda device: False):
        plain, plain_s = result(), _seconds(device, call)
    row: dict[str, Any] = {"numel": numbers.numel(), "torch_ms": 1e3 * plain_s, "torch_bytes_per_s": numbers.nbytes / plain_s}
    if device != "cuda" or not module.has_triton(numbers.device):
        return row | {"triton_ms": None, "triton": "skipped: needs Triton, and a GPU of compute capability 8.0 or later"}
    row["same"], seconds = torch.equal(plain, result()), _seconds(device, call)
    return row | {"triton_ms": 1e3 * seconds, "triton_bytes_per_s": numbers.nbytes / seconds, "torch / triton": plain_s / seconds}


def _seconds(device: str, call: Callable[[], object], rounds: int = 5) -> float:
    """Return the median seconds of a call, of all that it starts on the device, too; the first call does not count."""
    wait, taken = torch.cuda.synchronize if device == "cuda" else lambda: None, []
    for _ in range(1 + rounds):
        wait()
        began = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


# -- the largest model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The result of a search. fits: layers of the largest model that was trained; fails: layers of the smallest that was not.

    complete: fits and fails differ by at most an eighth; False where the time was over. why: message of the last failure.
    """

    fits: int | None = None
    fails: int | None = None
    complete: bool = False
    why: str = ""
    trials: int = 0

    @property
    def numel(self) -> int | None:
        return None if self.fits is None else parameter_count(Workload(dataclasses.replace(WIDE_SHAPE, layers=self.fits)))


def search(
    attempt: Callable[[int], str | None], first: int, time_s: float, clock: Callable[[], float] = time.monotonic
) -> Largest:
    """Search for the largest number of layers that fits, to an eighth: double or halve it from `first`, then bisect.

    Args:
        attempt: layers -> None where they fit, else the reason why not.
        first: layers of the first trial, at least 1.
        time_s: seconds after which no trial is begun.
    """
    end, found = clock() + time_s, Largest()
    while clock() < end:
        if found.fits is None:
            layers = first if found.fails is None else found.fails // 2
        elif found.fails is None:
            layers = 2 * found.fits
        else:
            known = found.fails - found.fits <= max(1, found.fits // 8)
            layers = 0 if known else (found.fits + found.fails) // 2
        if not layers:
            return dataclasses.replace(found, complete=True)
        why = attempt(layers)
        news = {"fits": layers} if why is None else {"fails": layers, "why": why}
        found = dataclasses.replace(found, **news, trials=found.trials + 1)
    return found


def first_layers(contender: Contender, room: tuple[int, int, int]) -> int:
    """Return about as many layers as the tiers of a contender hold. room: bytes on device, host and disk."""
    per_layer = 12 * WIDE_SHAPE.dim**2
    limits = [
        USABLE * have / (need * per_layer) for have, need in zip(room, STATE_NBYTES[contender.offload], strict=True) if need
    ]
    return max(1, int(min(limits)))


def largest_models(seed: int, swap_path: str | None, out: Path, search_s: float) -> list[Measured]:
    """Search for the largest model of each contender that offloads or is zeroshard's; return the table. search_s: seconds for each."""
    device_nbytes = torch.cuda.mem_get_info()[1]
    wide = Workload(WIDE_SHAPE, sequences=1, ranks=1, seed=seed, device="cuda", swap_path=swap_path, meta=True, checkpoint=True)
    largest = dict[str, Largest]()
    for contender in (*TIERS, *PEERS):
        if missing := missing_reason(contender, wide):
            largest[contender.label] = Largest(why=missing)
            continue
        disk_nbytes = shutil.disk_usage(swap_path).free if swap_path else 0
        room = (device_nbytes, available_nbytes() or 0, disk_nbytes)
        attempt = partial(trial, contender, wide, room[1], out / "logs-largest")
        largest[contender.label] = search(attempt, first_layers(contender, room), search_s)
        say(f"  {contender.name:18s} {describe(largest[contender.label])}")
    return [largest_table(largest)]


def largest_table(largest: dict[str, Largest]) -> Measured:
    """Return the table of the largest models, by contender."""
    rows = [
        Row(name, [], facts={"G parameters": round(each.numel / 1e9, 2), "layers": each.fits} if each.fits and each.numel else {})
        for name, each in largest.items()
    ]
    title = f"GPU: largest model trained (dim {WIDE_SHAPE.dim}, {WIDE_SHAPE.seq_len} tokens, checkpointed blocks, 2 steps)"
    return Measured(title, rows, notes=[(f"{name}: {describe(each)}", PLAIN) for name, each in largest.items()])


def trial(contender: Contender, workload: Workload, host_nbytes: int, log_dir: Path, layers: int) -> str | None:
    """Try so many layers in a process of its own; return None if they train, else the reason why not."""
    shape = dataclasses.replace(workload.shape, layers=layers)
    if why := short_of_memory(contender, Workload(shape), host_nbytes):
        return why
    team = Team(contender, dataclasses.replace(workload, shape=shape), log_dir)
    try:
        team.wait_ready()
        team.ask("turn", 0, 2)
    except TeamFailed as error:
        return str(error)
    finally:
        team.close()
    return None


def describe(largest: Largest) -> str:
    """Return a result as one line of text."""
    if largest.fits is None or largest.numel is None:
        return f"none trained: {largest.why or 'no time'}"
    size = f"{largest.numel / 1e9:.2f}G parameters ({largest.fits} layers)"
    if largest.fails is None:
        return f"at least {size}: the time was over"
    return f"{size}; not {largest.fails} layers: {largest.why}" + ("" if largest.complete else " (the time was over)")


# -- the command ---------------------------------------------------------------------------------------------------------

PARTS = {each.__name__: each for each in (environment, tests, peaks, steps, offload, codecs, finetune)}


def run(part: Part) -> int:
    """Run a part and write what became of it. Return 1 if it or one of its rows failed, or a row is not the same as its reference."""
    part.write("running")
    if not part.dry and part.name != "environment" and not torch.cuda.is_available():
        part.write("skipped", "torch sees no CUDA device")
        return 0
    try:
        PARTS[part.name](part)
        why = ", ".join(row["name"] for row in part.rows if row["status"].startswith("failed") or row.get("same") is False)
    except OutOfTime:
        why = "out of time; rows are those that it had measured"
    except Exception as error:
        traceback.print_exc()
        why = one_line(error)
    part.write("failed" if why else "done", why)
    return int(bool(why))


def page(out: Path, names: Iterable[str]) -> int:
    """Join the parts' JSON in results.json, and show them in results.md. Return 1 if one did not end well."""
    parts = {}
    for name in names:
        file = out / f"{name}.json"
        parts[name] = json.loads(file.read_text()) if file.exists() else {"status": "failed", "why": "it has not begun"}
        if parts[name]["status"] == "running":
            parts[name] |= {"status": "failed", "why": f"it was killed; see {name}.log"}
    (out / "results.json").write_text(json.dumps(parts, indent=1) + "\n")
    told = [[name, *(_cell(each.get(key)) for key in ("status", "seconds", "why"))] for name, each in parts.items()]
    sheets = [Sheet("Parts", ("part", "status", "seconds", "why"), told)]
    for name, each in parts.items():
        rows = each.get("rows", ())
        columns = list(dict.fromkeys(key for row in rows for key in row))
        facts = [(f"{key}: {_cell(value)}", "") for key, value in each.get("facts", {}).items() if value]
        sheets.append(Sheet(name, columns, [[_cell(row.get(key)) for key in columns] for row in rows], notes=facts))
    here = "a dry run with tiny sizes on the CPU" if any(each.get("dry_run") for each in parts.values()) else "CUDA"
    text = "\n".join([f"# A day with a GPU: {here}", "", *(sheet.markdown() for sheet in sheets)])
    (out / "results.md").write_text(text)
    return int(any(each["status"] == "failed" for each in parts.values()))


def _cell(value: Any) -> str:
    """Return a value as the text of a cell: numbers with four digits, of losses the last."""
    if isinstance(value, dict):
        return "; ".join(f"{key} {_cell(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return _cell(value[-1]) if value and isinstance(value[-1], float) else ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("\n", "<br>")


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "page"))
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("names", nargs="*", help="page: the parts")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU over gloo")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "page":
        return page(given.out, given.names or PARTS)

    def end(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGTERM, end)
    return run(Part(given.part, given.out, given.dry_run))


if __name__ == "__main__":
    raise SystemExit(main())
