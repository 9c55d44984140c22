"""Several ranks against one process, on GPUs over NCCL (or what stands in for them) or on the CPU over gloo.

Each rank is a process. Every case trains a small model while released and new memory holds NaN, and compares parameters with
plain PyTorch on the CPU, where one process computes the gradients of all ranks: the same but for the order of additions, and
for what low precision rounds.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import Branches, OddGPT, Rounding, Task, reference, seeded, token_batches
from poison import poisoned_memory
from torch import Tensor

import zeroshard as zs

STEPS, MICRO, LIMIT_S, TIMEOUT_S = 3, 2, 400, 60
HOST = {"offload_optimizer": "cpu", "offload_gradient": "cpu"}
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}  #: of parameters, absolute


@dataclass(frozen=True)
class Trial:
    """What to train and the options of zs.shard."""

    task: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return self.options.get("precision", "fp32")


@dataclass
class Result:
    """Parameters on the host (none if it failed: then `trace`), faults of order, seconds."""

    state: dict[str, Tensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trace: str = ""


def _adamw(params: object) -> torch.optim.Optimizer:
    """A large epsilon: the gradient of a bias of keys is zero but for rounding, which nothing shall blow up."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def _sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def tasks(world: int) -> dict[str, Task]:
    """Dense; clipped; and branches that differ between ranks."""
    gpt, tokens = seeded(lambda: OddGPT(dim=24, layers=2)), token_batches(STEPS, MICRO, world)
    generator, chosen = torch.Generator().manual_seed(4), [(0, 1, 2), (2, 0, 1), (1,)]
    ragged = [[[(torch.randn(4, 6, generator=generator), chosen[rank % 3]) for rank in range(world)]] for _ in range(STEPS)]
    return {
        "gpt": Task(gpt, tokens, _adamw),
        "clipped": Task(gpt, tokens, _adamw, clip=dict.fromkeys(range(STEPS), 0.05)),
        "ragged": Task(seeded(Branches), ragged, _sgd),
    }


def trials() -> dict[str, Trial]:
    everything = {**HOST, "offload_param": "cpu"}
    made = {f"stage {stage}, overlap {overlap}": Trial("gpt", {"stage": stage, "overlap": overlap})
            for stage in range(4) for overlap in (True, False)}  # fmt: skip
    made["stage 3, clipped"] = Trial("clipped", {"stage": 3, "max_grad_norm": 0.05})
    made["stage 1, states on the host"] = Trial("gpt", {"stage": 1, "offload_optimizer": "cpu"})
    made["stage 2, gradients too"] = Trial("gpt", {"stage": 2, **HOST})
    made["stage 3, everything on the host"] = Trial("gpt", {"stage": 3, **everything})
    made["stage 3, everything on disk"] = Trial("gpt", {"stage": 3, **dict.fromkeys(everything, "nvme")})
    made |= {f"stage {stage}, {precision}": Trial("gpt", {"stage": stage, "precision": precision, **scale})
             for stage in (1, 2, 3) for precision, scale in (("bf16", {}), ("fp16", {"loss_scale": 128.0}))}  # fmt: skip
    made |= {f"stage {stage}, ranks take other branches": Trial("ragged", {"stage": stage}) for stage in (1, 2)}
    summed: dict[str, Any] = {"sums": "backend"}
    made |= {f"stage {stage}, sums by NCCL": Trial("gpt", {"stage": stage, **summed}) for stage in range(4)}
    made["stage 2, sums by NCCL, ranks take other branches"] = Trial("ragged", {"stage": 2, **summed})
    made["stage 2, sums by NCCL of gradients on the host"] = Trial("gpt", {"stage": 2, **HOST, **summed})
    for precision, options in (("bf16", {}), ("bf16", {"reduce_dtype": "bf16"}), ("fp16", {"loss_scale": 128.0})):
        name = f"stage 3, sums by NCCL, {precision}" + ", sent in bf16" * bool("reduce_dtype" in options)
        made[name] = Trial("gpt", {"stage": 3, "precision": precision, **options, **summed})
    return made


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank works. faults: returns the faults of order since its last call; released: what was released, see poison.py."""

    rank: int
    device: str
    folder: Path
    faults: Callable[[], list[str]]
    released: list[str]


def _build(task: Task, place: Place, **options: Any) -> tuple[Any, Any]:
    """Ranks on a CPU would release no memory of their own if they shared it."""
    model = seeded(lambda: type(task.model)(dim=24, layers=2) if isinstance(task.model, OddGPT) else Branches())
    model, swap = model.to(place.device), str(place.folder / "swap")
    return zs.shard(model, task.make_optimizer(model), offload_path=swap, map_shared=False, **options)


def _train(model: Any, optimizer: Any, task: Task, place: Place, first: int = 0) -> None:
    for step in task.data[first:]:
        for micro in step:
            model(*(given.to(place.device) if isinstance(given, Tensor) else given for given in micro[place.rank])).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: Any) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in zs.full_state_dict(model, masters=True).items()}


def _trained(trial: Trial, task: Task, place: Place) -> dict[str, Tensor]:
    place.released.clear()
    model, optimizer = _build(task, place, **trial.options)
    _train(model, optimizer, task, place)
    assert place.released or trial.options["stage"] != 3, "no released memory was filled with NaN"
    state = _whole(model)
    zs.close(model)
    return state


def _resumed(task: Task, place: Place) -> dict[str, Tensor]:
    """Saved asynchronously after one step at stage 3, continued at stage 2 with states and gradients on the host."""
    model, optimizer = _build(task, place, stage=3)
    first = Task(task.model, task.data[:1], task.optimizer)
    _train(model, optimizer, first, place)
    save = zs.save(place.folder / "saved", model, optimizer, asynchronous=True)
    _train(model, optimizer, task, place, 1)  # meanwhile
    save.wait()
    loaded, stepper = _build(task, place, stage=2, **HOST)
    zs.load(place.folder / "saved", loaded, stepper)
    _train(loaded, stepper, task, place, 1)
    return _whole(loaded)


def _measured(run: Callable[..., dict[str, Tensor]], *args: Any) -> Result:
    """Return what `run` gives with these arguments, of which the last is a Place."""
    started = time.time()
    try:
        return Result(run(*args), args[-1].faults(), time.time() - started)
    except Exception:
        return Result(trace=traceback.format_exc())


def _rank(rank: int, world: int, folder: Path, device: str, faults: Callable[[], list[str]]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    todo, results = tasks(world), {}
    with poisoned_memory() as released:
        place = Place(rank, device, folder, faults, released)
        for name, trial in trials().items():
            results[name] = _measured(_trained, trial, todo[trial.task], place)
            if results[name].trace:  # the other ranks wait in a collective: nothing more can be done together
                break
        else:
            results["saved at stage 3, loaded at stage 2"] = _measured(_resumed, todo["gpt"], place)
    torch.save(results, folder / f"results.{rank}")
    os._exit(any(result.trace != "" for result in results.values()))


# -- all of them -------------------------------------------------------------------------------------------------------


def equal_one_process(world: int, folder: Path, device: str = "cuda", faults: Callable[[], list[str]] = list) -> bool:
    """Train every case on so many ranks; print a line for each, and return whether all parameters are those of one process.

    faults: returns the faults of order that a process has seen since the last call; a case that has some fails.
    """
    (folder / "swap").mkdir()
    _run(world, folder, device, faults)
    return _compare(world, folder)


def _run(world: int, *args: Any) -> None:
    """Start the ranks, wait for them, end those that hang."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, *args)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.time() + LIMIT_S
    while any(process.is_alive() for process in ranks):
        late = time.time() > deadline
        failed = any(process.exitcode not in (None, 0) for process in ranks)
        if late or failed:
            time.sleep(5)  # the others may be about to write what they know
            for process in ranks:
                process.kill()
        time.sleep(0.2)


def _verdict(result: Result, expected: dict[str, Tensor], tolerance: float) -> tuple[bool, str]:
    if result.trace:
        return False, f"failed\n{result.trace}"
    difference = max((result.state[name] - value).abs().max().item() for name, value in expected.items())
    faults = "".join(f"\n    {fault}" for fault in dict.fromkeys(result.faults[:3]))
    good = difference <= tolerance and not faults
    return good, f"{difference:.1e} of {tolerance:.0e} in {result.seconds:.1f} s{faults}"


def _compare(world: int, folder: Path) -> bool:
    todo = tasks(world)
    expected = {name: reference(task, world, rounding=Rounding()).weights for name, task in todo.items()}
    good = True
    for rank in range(world):
        path = folder / f"results.{rank}"
        results = torch.load(path, weights_only=False) if path.exists() else {}
        missing = [name for name in trials() if name not in results]
        good = good and not missing
        for name, result in results.items():
            trial = trials().get(name, Trial("gpt"))
            passed, text = _verdict(result, expected[trial.task], TOLERANCE[trial.precision])
            good = good and passed
            print(f"rank {rank}  {'ok  ' if passed else 'BAD '} {name}: {text}")
        if missing:
            print(f"rank {rank}  BAD  not run: {', '.join(missing)}")
    return good
