"""Memory and traffic of offload in closed formulas, read off the real runtime on 8 and on 1,024 imagined ranks.

Fake tensors have sizes and no memory, FakeComm imagines the peers and the disk, `Instant` the copies. S: elements of this
rank's shards (Psi / N and padding); R: those of them that are stepped (all but the padding at the end of a shard). bf16
parameters, fp32 masters, AdamW. Bytes at rest (ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, 2104.07857, section 3)

                 parameters      gradients    masters + moments
    stage 3      2 S             4 S          4 S + 8 R               each on the device, on the host or on disk
    stage 2      2 Psi, device   4 S          4 S + 8 R
    stage 1      2 Psi, device   4 Psi        4 S + 8 R

Bytes over each link in a step with one backward, by what is offloaded

    gradients    device -> host   2 S      in the dtype in which they were sent
                 host -> disk     4 S      (nvme) they rest in fp32
    optimizer    device -> host   4 S      only if gradients rest on the device
                 disk -> host     4 R      only if gradients rest on disk
                 disk -> host    12 R      (nvme) masters and both moments; from the second step on
                 host -> disk    12 R      (nvme)
                 host -> device   2 R      new parameters; host -> disk if those rest there, nothing if on the host
    parameters   host -> device   4 S      fetched for forward and for backward
                 disk -> host     4 S      (nvme) the same
                 (and new parameters back, where the device steps: see `expected_traffic`)
"""

from collections import Counter

import pytest
import torch
from imagined import LARGE, SMALL, Checkpointed
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.config import Offload, Tier
from zeroshard.engine.comm.streams import Streams
from zeroshard.engine.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, STAGING
from zeroshard.engine.runtime import Runtime, runtime_of
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.tiers import cpu_kernels, slab_step

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
TRILLION = GPTConfig(vocab_size=50304, seq_len=2048, dim=81920, layers=13, heads=160)
SHAPES = {8: SMALL, 1024: LARGE}
TIER = {"none": DEVICE, "cpu": HOST, "nvme": DISK}


class Instant(Streams):
    """Copies between a device of its own and the host that nobody has to make."""

    separate_host = True

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, up: bool) -> None:
        assert target.nbytes == source.nbytes  # what travels is not converted on the way


def build(shape: GPTConfig, world_size: int, places: tuple, blocks: type | None = None, buffers: dict | None = None, **options):
    """places: of parameters, gradients, optimizer states."""
    comm = FakeComm(0, world_size)
    comm.streams = Instant()
    model = GPT(shape)
    named = dict(zip(("offload_param", "offload_gradient", "offload_optimizer"), places, strict=True))
    offload = {
        name: Offload(device, path="/nowhere" if device == "nvme" else None, **(buffers or {})) for name, device in named.items()
    }
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), comm=comm, precision="bf16", **offload, **options)
    if blocks is not None:
        model.blocks.__class__ = blocks
    return model, optimizer, torch.zeros(1, shape.seq_len, dtype=torch.long)


def step(model, optimizer, tokens) -> Counter:
    """One step; bytes over each link in it."""
    moved = runtime_of(model).tiers.ledger.moved
    before = Counter(moved)
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Counter(moved) - before


def sizes(runtime: Runtime) -> tuple[int, int, int]:
    """(Psi, S, R), padding included."""
    whole = sum(group.layout.numel for group in runtime.groups)
    shard = sum(group.layout.shard_numel for group in runtime.groups)
    return whole, shard, sum(run.numel for runs in runtime.optimizers.core.runs for run in runs)


ROWS = [
    (1, "none", "none", "cpu"),
    (1, "none", "none", "nvme"),
    (2, "none", "cpu", "cpu"),  # ZeRO-Offload
    (2, "none", "nvme", "nvme"),
    (3, "none", "cpu", "cpu"),
    (3, "none", "none", "cpu"),
    (3, "cpu", "cpu", "cpu"),  # ZeRO-Infinity on the host
    (3, "cpu", "cpu", "nvme"),
    (3, "nvme", "cpu", "cpu"),
    (3, "nvme", "nvme", "nvme"),  # ZeRO-Infinity on disk
    (3, "cpu", "cpu", "none"),
    (3, "nvme", "none", "none"),
]
CASES = [(8, row) for row in ROWS] + [(1024, ROWS[number]) for number in (2, 6, 9)]


def expected_at_rest(row: tuple, psi: int, s: int, r: int) -> dict[Tier, Counter]:
    """Bytes of the model states on each tier."""
    stage, *places = row
    parameter, gradient, optimizer = (TIER[place] for place in places)
    held = {tier: Counter() for tier in Tier}
    held[parameter][PARAMETERS] += 2 * (s if stage == 3 else psi)
    held[gradient][GRADIENTS] += 4 * (psi if stage == 1 else s)
    held[optimizer][MASTERS] += 4 * s
    held[optimizer][OPTIMIZER] += 8 * (r if optimizer is DEVICE else s)  # columns of whole shards, or tensors of runs
    return held


def expected_traffic(row: tuple, s: int, r: int) -> Counter:
    """Bytes over each link in a step, from the second on: see the docstring of this file."""
    _, *places = row
    parameter, gradient, optimizer = (TIER[place] for place in places)
    moved = Counter()
    if parameter is not DEVICE:
        moved[HOST, DEVICE] += 2 * 2 * s  # for forward and backward
    if parameter is DISK:
        moved[DISK, HOST] += 2 * 2 * s
    if gradient is not DEVICE:
        moved[DEVICE, HOST] += 2 * s
    if gradient is DISK:
        moved[HOST, DISK] += 4 * s
    if optimizer is DEVICE:  # the device steps: gradients come back (as they went; from disk in fp32), parameters go
        moved[HOST, DEVICE] += {DEVICE: 0, HOST: 2 * s, DISK: 4 * s}[gradient]
        moved[DISK, HOST] += 4 * s if gradient is DISK else 0
        moved[DEVICE, HOST] += 2 * s if parameter is not DEVICE else 0
        moved[HOST, DISK] += 2 * s if parameter is DISK else 0
        return +moved
    moved[DEVICE, HOST] += 4 * r if gradient is DEVICE else 0
    moved[DISK, HOST] += 4 * r if gradient is DISK else 0
    moved[HOST, DEVICE] += 2 * r if parameter is DEVICE else 0
    moved[HOST, DISK] += 2 * r if parameter is DISK else 0
    if optimizer is DISK:
        moved[DISK, HOST] += 12 * r
        moved[HOST, DISK] += 12 * r
    return +moved


@pytest.mark.parametrize("world_size, row", CASES, ids=str)
def test_bytes_at_rest_and_bytes_moved_are_the_closed_formulas(world_size, row):
    stage, *places = row
    with FakeTensorMode():
        model, optimizer, tokens = build(SHAPES[world_size], world_size, tuple(places), stage=stage, prefetch_nbytes=0)
        runtime = runtime_of(model)
        first = step(model, optimizer, tokens)
        psi, s, r = sizes(runtime)
        assert 0.999 * psi / world_size <= s and 0.98 * s <= r <= s
        expected = expected_traffic(row, s, r)
        assert step(model, optimizer, tokens) == expected
        if places[2] != "nvme":
            assert first == expected
        held = expected_at_rest(row, psi, s, r)
        ledger = runtime.tiers.ledger
        for tier, now in ((DEVICE, ledger.now), *ledger.elsewhere.items()):
            assert {name: now.get(name, 0) for name in (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER)} == {
                name: held[tier][name] for name in (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER)
            }, tier
        # what else the device holds at its worst moment: buffers of constant number (test_fake_world: 2 for gradients)
        whole = {unit.name: sum(g.layout.numel * g.values.full.itemsize for g in unit.groups) for unit in runtime.units}
        largest, root = max(whole.values()), whole["(root)"]
        shards = max(group.layout.shard_numel for group in runtime.groups)
        landings = 3 * 4 * shards if places[1] != "none" else 0
        fetched = 5 * (2 * shards + world_size) if places[0] != "none" else 0  # 4 ahead, and one for a need that can not wait
        assert ledger.peak[STAGING] <= 2 * largest + landings + fetched
        assert ledger.peak[GATHERED] <= (root + 2 * largest if stage == 3 else 0)
        assert ledger.total_peak <= sum(held[DEVICE].values()) + ledger.peak[STAGING] + ledger.peak[GATHERED]


def test_the_paper_s_numbers():
    """ZeRO-Offload on one GPU, sections 3 and 4.1: 2 Psi bytes on the device and the least traffic possible, 4 Psi."""
    with FakeTensorMode():
        model, optimizer, tokens = build(SMALL, 1, ("none", "cpu", "cpu"), stage=2)
        runtime = runtime_of(model)
        psi = sizes(runtime)[0]
        moved = step(model, optimizer, tokens)
        assert moved == {(DEVICE, HOST): 2 * psi, (HOST, DEVICE): 2 * psi}
        assert sum(runtime.tiers.ledger.now.values()) - runtime.tiers.ledger.now[STAGING] == 2 * psi


def test_a_trillion_parameters_on_disk_take_a_few_units_of_device_memory(monkeypatch):
    """ZeRO-Infinity's aim: no model state rests on the device.

    Gathered at one time: the root and a block in use, and the next block. Gradients: a block's being filled and one being
    reduced. Shards in passing are 1 / N of a block each: 4 on their way up (bf16), 3 on their way down (4 bytes an element).
    """
    monkeypatch.setattr(cpu_kernels, "CHUNK_NUMEL", 1 << 40)
    monkeypatch.setattr(slab_step, "CHUNK_NUMEL", 1 << 40)
    world_size, disks, buffers = 1024, ("nvme", "nvme", "nvme"), {"buffer_nbytes": 1 << 34}
    with FakeTensorMode():
        model, optimizer, tokens = build(TRILLION, world_size, disks, Checkpointed, buffers, stage=3, prefetch_nbytes=0)
        runtime = runtime_of(model)
        for _ in range(2):
            moved = step(model, optimizer, tokens)
        psi, s, r = sizes(runtime)
        assert psi > 10**12 and s == -(-psi // world_size)
        assert moved == expected_traffic((3, "nvme", "nvme", "nvme"), s, r)
        root = next(unit.gathered_nbytes for unit in runtime.units if unit.name == "(root)")
        block = max(unit.gathered_nbytes for unit in runtime.units)
        passing = (4 * 1 + 3 * 2) * block // world_size + 4 * world_size
        assert runtime.tiers.ledger.total_peak <= root + 2 * block + 2 * block + passing
        disk = runtime.tiers.ledger.elsewhere[DISK]
        assert sum(disk.values()) == 18 * s
        host = runtime.tiers.ledger.elsewhere[HOST]
        assert {name for name, nbytes in host.items() if nbytes} == {STAGING}


def test_prefetch_bucket_size_counts_elements():
    peaks = []
    for options in ({"prefetch_nbytes": 2 * 7_000_000}, {"prefetch_bucket_size": 7_000_000}, {"prefetch_nbytes": 0}):
        with FakeTensorMode():
            model, optimizer, tokens = build(SMALL, 8, ("none", "none", "none"), stage=3, **options)
            for _ in range(2):
                step(model, optimizer, tokens)
            peaks.append(runtime_of(model).tiers.ledger.peak[GATHERED])
    assert peaks[0] == peaks[1] > peaks[2]
