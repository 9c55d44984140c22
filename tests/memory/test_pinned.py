"""Host memory that a device reads or writes by itself is neither overwritten nor given back before that is over.

A join orders the device's streams and lets the host go on: what the host does next to the same memory needs a wait of its
own. `StrictStreams` (offloading.py) stands for the device.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from activation_kit import activator
from helpers import OddGPT, adamw, seeded, token_batches
from offloading import offload
from torch import nn
from zoo import Stack, square

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.engine.comm.streams import Streams
from zeroshard.testing import run_threads
from zeroshard.utils import aligned

MODEL = seeded(lambda: OddGPT(dim=24, layers=2))
DATA = token_batches(3, 1, 1)

# -- parameters that rest on the host ------------------------------------------------------------------------------


def write_slice(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def write_states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in zs.full_state_dict(model).items()})


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    zs.load(folder, model, optimizer)


def write_gathered(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with zs.gathered(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    optimizer.step()


@pytest.mark.parametrize("optimizer_tier", ["none", "cpu"])
@pytest.mark.parametrize("write", [write_slice, write_states, write_gathered, load, step])
def test_parameters_on_the_host_are_written_after_their_uploads(write: Callable, optimizer_tier, tmp_path, strict_device):
    """A forward that the device has not run yet must still see what was there before."""

    def rank_run(rank: int) -> None:
        strict_device(rank)
        model = copy.deepcopy(MODEL)
        options = {"offload_param": offload("cpu", ""), "offload_optimizer": offload(optimizer_tier, "", fused=False)}
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, overlap=False, **options)
        zs.save(tmp_path, model, optimizer)
        model(*DATA[0][0][0]).backward()
        optimizer.step()
        model(*DATA[1][0][0])  # nobody looks at what comes of it
        write(model, optimizer, tmp_path)
        backend_select._local.comm.streams.check()
        zs.close(model)

    run_threads(1, rank_run)


# -- activation checkpoints on the host ----------------------------------------------------------------------------


class Watched(bytearray):
    """Host memory of which it is known when it goes."""


class Behind(Streams):
    """A device far behind the host: a copy of either direction is over when the host has waited for it, or for a later one."""

    separate_host = True

    def __init__(self) -> None:
        self.live: dict[int, range] = {}  # host memory: where it lies
        self.under_way: list[tuple[str, int]] = []  # direction, address in host memory
        self.given_back, self.early = 0, 0  # so far; while a copy used it

    def allocate(self, nbytes: int, pin: bool = False) -> torch.Tensor:
        memory = Watched(nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.live[id(memory)] = range(tensor.data_ptr(), tensor.data_ptr() + nbytes)
        weakref.finalize(memory, self._gone, id(memory))
        return tensor

    def _gone(self, key: int) -> None:
        place = self.live.pop(key)
        self.given_back += 1
        self.early += any(address in place for _, address in self.under_way)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, up: bool) -> tuple[str, int]:
        down = any(target.data_ptr() in place for place in self.live.values())
        ticket = ("down", target.data_ptr()) if down else ("up", source.data_ptr())
        target.copy_(source)
        self.under_way.append(ticket)
        return ticket

    def finish(self, ticket: tuple[str, int]) -> None:
        while ticket in self.under_way:
            self.under_way.remove(next(other for other in self.under_way if other[0] == ticket[0]))

    def finished(self, ticket: tuple[str, int]) -> bool:
        return ticket not in self.under_way


def test_activation_memory_is_given_back_after_its_copies(tmp_path, monkeypatch):
    """What lies beyond the arena, the arena when it grows, and at the end; used once and never used."""
    streams = Behind()
    monkeypatch.setattr("zeroshard.activations.checkpoint.streams_for", lambda device: streams)
    monkeypatch.setattr("zeroshard.engine.rest.empty_aligned", streams.allocate)
    gc.collect()
    model = activator(tmp_path)(seeded(lambda: Stack(8)), "cpu")
    for rows in (2, 4, 8):
        square(model, (torch.ones(rows, 8),)).backward()
        square(model, (torch.ones(rows, 8),))  # dropped without a backward
        assert not streams.early, rows
    square(model, (torch.ones(128, 8),)).backward()  # beyond the arena
    waiting, before = len(streams.live), streams.given_back
    streams.under_way.clear()  # the device has caught up
    square(model, (torch.ones(128, 8),)).backward()
    assert waiting == 1 + 3 and streams.given_back > before
    square(model, (torch.ones(128, 8),)).backward()
    zs.checkpoint_activations(model, off=True)
    assert not streams.early and not streams.live


# -- the last resort -----------------------------------------------------------------------------------------------


def test_a_device_is_idle_before_memory_is_unlocked(monkeypatch):
    """cudaHostUnregister is not documented to wait for copies."""
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append("lock") or 0,
        cudaHostUnregister=lambda address: calls.append("unlock"),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def synchronize(device: int) -> None:
        calls.append(f"wait for {device}")
        raise RuntimeError("an earlier kernel failed")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    memory = aligned.empty_aligned(5000, pin=True)
    assert calls == ["lock"] and memory.shape == (5000,)
    del memory
    gc.collect()
    assert calls == ["lock", "wait for 1", "unlock"]
