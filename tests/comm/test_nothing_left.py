"""Nothing is left running of a library whose models are closed or gone, or whose process group is."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def _model(choice: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, comm=choice)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def _life(rank: int, world_size: int, choice: str, folder: str) -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    found = {}
    model, optimizer = _model(choice)
    _step(model, optimizer)
    zs.save(f"{folder}/saved", model)
    found["after a save"] = _threads()
    other, _ = _model(choice)
    zs.close(model)
    found["one is open"] = _threads()
    zs.close(other)
    found["all are closed"] = _threads()
    model, optimizer = _model(choice)  # as before, over the same group
    found["open again"] = _threads()
    saving = zs.save(f"{folder}/beside", model, asynchronous=True)
    saving.wait()
    del saving, model, optimizer, other
    gc.collect()
    found["dropped"] = _threads()
    part, whole = dist.new_group(list(range(world_size))), dist.group.WORLD  # as torch.distributed.nn keeps it, in defaults
    models = [_model(each) for each in (choice, part)]
    for model, optimizer in models:
        _step(model, optimizer)
    dist.destroy_process_group()
    assert not dist.is_initialized() and whole is not None
    found["group destroyed"] = _threads()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "choice"), [(1, "shared"), (2, "shared"), (2, "dist")])
def test_threads_end_with_the_last_model_and_with_the_process_group(ranks, choice, tmp_path):
    desk = ["zeroshard-desk"] * (ranks > 1)
    for found in run_processes(_life, ranks, choice, str(tmp_path)):
        gloo = found["after a save"][len(desk) :] if choice == "dist" else []
        assert all(name.startswith("zeroshard-gloo") for name in gloo)
        quiet = {moment: [name for name in names if not name.startswith("zeroshard-gloo")] for moment, names in found.items()}
        assert quiet == {
            "after a save": desk,
            "one is open": desk,
            "all are closed": [],
            "open again": desk,
            "dropped": [],
            "group destroyed": [],
        }


def _asked_again(rank: int, world_size: int) -> str:
    dist.init_process_group("gloo")
    model, optimizer = _model("shared")
    zs.close(model)
    model, optimizer = _model("shared")
    if rank == 1:
        raise SystemExit("enough")
    try:
        _step(model, optimizer)
    except zs.PeerFailed as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_desk_that_rested_answers_again():
    first = run_processes(_asked_again, 2, check=False)[0]
    assert "rank 1" in str(first.value) and "enough" in str(first.value)
