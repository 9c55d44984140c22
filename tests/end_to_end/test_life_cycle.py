"""C14: build, train, close; nothing remains (DS#5674, DS#7204, A#253). Two engines at once: test_training_loops.py."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref

import psutil
import pytest
import torch
from offloading import tiers
from residence import in_own_process, wait_for_threads
from torch import nn
from zoo import MixtureOfExperts, Stack, adamw, normal_batches, run_threads, seeded, square

import zeroshard as zs


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def live_nbytes() -> int:
    """Bytes that malloc has given out and not got back, holes in its arenas aside; 0 where the C library can not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}], ids=str)
@in_own_process
def test_c14_life_cycle_returns_to_the_start(options):
    batches = normal_batches(2, 2, 4, 256)

    def cycle(rank, models):
        model = models[rank]
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
        for ranks in batches:
            square(model, ranks[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        zs.close(model)
        assert all(type(p) is nn.Parameter and p.numel() == p.untyped_storage().nbytes() // 4 for p in model.parameters())
        square(model, ranks[rank]).backward()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def count():
        wait_for_threads(threads)  # each has up to 1.4 MB of its own
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        process = psutil.Process()
        memory = process.memory_info()
        return tensors, process.num_fds(), live_nbytes(), getattr(memory, "shared", 0), memory.rss

    models = [seeded(Stack, dim=256) for _ in range(2)]  # 520,000 parameters: a leak of gradients alone would be 62 MB
    counts, threads = [], psutil.Process().num_threads()
    for number in range(20):
        run_threads(2, cycle, models)
        for model in models:
            model.zero_grad()
        if number in (4, 19):
            counts.append(count())
    (tensors, files, *nbytes), (tensors_after, files_after, *nbytes_after) = counts
    assert tensors_after <= tensors and files_after == files
    live, shared, resident = (after - before for before, after in zip(nbytes, nbytes_after, strict=False))
    assert live < 1 << 20 and shared < 8 << 20
    assert resident < 128 << 20  # threads leave holes in malloc's arenas, up to 50 MB seen; leaked states would be 190


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@in_own_process
def test_a_model_that_is_dropped_without_being_closed_is_collected(stage, disk):
    def run(rank):
        model = seeded(Stack)
        options = tiers(disk, *(["nvme"] * 3 if stage == 3 else ["none", "none", "nvme" if stage else "none"]))
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, **options)
        for _ in range(2):
            square(model, (torch.ones(2, 7),)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(model), weakref.ref(model._zeroshard)

    gc.collect()
    files, threads = psutil.Process().num_fds(), psutil.Process().num_threads()
    for refs in run_threads(2, run):
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
    wait_for_threads(threads)  # writes that are under way when their model goes are finished, and hold their file until then
    assert psutil.Process().num_fds() == files and not os.listdir(disk)


def test_c14_closed_optimizers_and_models_do_not_keep_one_another_alive():
    def run(rank):
        model = seeded(MixtureOfExperts)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        square(model, (torch.ones(2, 6),)).backward()
        optimizer.step()
        runtime = weakref.ref(model._zeroshard)
        zs.close(model)
        del optimizer
        gc.collect()
        return runtime() is None

    assert run_threads(1, run) == [True]
