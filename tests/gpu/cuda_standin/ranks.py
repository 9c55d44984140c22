"""Several ranks on the stand-in against one process: `tests/gpu/cuda_standin/run ranks.py [world]` (2 ranks unless given).

Each rank is a process with the stand-in's "nccl", which keeps stream order and moves bytes with gloo. Every case trains a
small model, and compares parameters with plain PyTorch on the CPU, where one process computes the gradients of all ranks:
the same but for the order of additions, and for what low precision rounds. Prints a line for each; exits with 1 if one fails.
"""

from __future__ import annotations

import cuda_standin  # isort: skip  (before torch; processes that are started import this file first)

import os
import sys
import tempfile
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


def _build(task: Task, folder: Path, **options: Any) -> tuple[Any, Any]:
    model = seeded(lambda: type(task.model)(dim=24, layers=2) if isinstance(task.model, OddGPT) else Branches())
    model = model.cuda()
    return zs.shard(model, task.make_optimizer(model), offload_path=str(folder / "swap"), **options)


def _train(model: Any, optimizer: Any, task: Task, rank: int, first: int = 0) -> None:
    for step in task.data[first:]:
        for micro in step:
            model(*(given.cuda() if isinstance(given, Tensor) else given for given in micro[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: Any) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in zs.full_state_dict(model, masters=True).items()}


def _trained(trial: Trial, task: Task, rank: int, folder: Path) -> dict[str, Tensor]:
    model, optimizer = _build(task, folder, **trial.options)
    _train(model, optimizer, task, rank)
    state = _whole(model)
    zs.close(model)
    return state


def _resumed(task: Task, rank: int, folder: Path) -> dict[str, Tensor]:
    """Saved asynchronously after one step at stage 3, continued at stage 2 with states and gradients on the host."""
    model, optimizer = _build(task, folder, stage=3)
    first = Task(task.model, task.data[:1], task.optimizer)
    _train(model, optimizer, first, rank)
    save = zs.save(folder / "saved", model, optimizer, asynchronous=True)
    _train(model, optimizer, task, rank, 1)  # meanwhile
    save.wait()
    loaded, stepper = _build(task, folder, stage=2, **HOST)
    zs.load(folder / "saved", loaded, stepper)
    _train(loaded, stepper, task, rank, 1)
    return _whole(loaded)


def _measured(run: Callable[..., dict[str, Tensor]], *args: Any) -> Result:
    started = time.time()
    try:
        return Result(run(*args), cuda_standin.errors(), time.time() - started)
    except Exception:
        return Result(trace=traceback.format_exc())


def _rank(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    todo, results = tasks(world), {}
    for name, trial in trials().items():
        results[name] = _measured(_trained, trial, todo[trial.task], rank, folder)
        if results[name].trace:  # the other ranks wait in a collective: nothing more can be done together
            break
    else:
        results["saved at stage 3, loaded at stage 2"] = _measured(_resumed, todo["gpt"], rank, folder)
    torch.save(results, folder / f"results.{rank}")
    os._exit(any(result.trace != "" for result in results.values()))


# -- all of them -------------------------------------------------------------------------------------------------------


def _run(world: int, folder: Path) -> None:
    """Start the ranks, wait for them, end those that hang."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, folder)) for rank in range(world)]
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


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "swap").mkdir()
        _run(number, Path(name))
        sys.exit(not _compare(number, Path(name)))
