"""What a model will take of host memory and disks is known, and refused on every rank where it is not there (B22, B23)."""

import copy
import ctypes
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import adamw, seeded
from torch import nn

import zeroshard as zs
from zeroshard.comm import backend_select, launch
from zeroshard.comm.launch import run_processes
from zeroshard.config import Tier
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.runtime import runtime_of
from zeroshard.engine.sizes import BUFFERS
from zeroshard.errors import HostMemoryError
from zeroshard.formats import state_plans
from zeroshard.testing import run_threads
from zeroshard.tiers import room
from zeroshard.tiers.estimate import Need, shortage
from zeroshard.tiers.gradient_offload import NarrowRest
from zeroshard.tiers.io.swap_folder import SwapFolder
from zeroshard.tiers.pool import BufferPool
from zeroshard.tiers.storage import FurtherTiers
from zeroshard.utils import aligned, host_memory
from zeroshard.utils.aligned import empty_aligned
from zeroshard.utils.host_memory import Limit

MODEL = seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
DATA = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(1))
PAGE = 4096


def trained(rank: int, options: dict, make_optimizer=adamw):
    """A model after three steps, to be looked at."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, make_optimizer(model.parameters()), units="leaf", **options)
    for _ in range(3):
        model(DATA[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- disks -------------------------------------------------------------------------------------------------------

ALL = {"stage": 3, "offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme", "precision": "bf16"}
ON_DISK = {
    "adam": ({"stage": 3, "offload_optimizer": "nvme"}, {}),
    "a third": ({"stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.34}}, {}),
    "a tenth of one unit": ({"stage": 2, "offload_optimizer": {"device": "nvme", "ratio": 0.1}}, {}),
    "amsgrad": ({"stage": 1, "offload_optimizer": "nvme"}, {"amsgrad": True}),
    "everything": (ALL, {}),
    "gradients and their twins": (
        {"stage": 2, "offload_optimizer": "cpu", "offload_gradient": "nvme", "delayed_update": 1},
        {},
    ),
}


@pytest.mark.parametrize("name", ON_DISK)
def test_b22_what_is_checked_for_is_what_the_swap_files_take(name, tmp_path, monkeypatch):
    options, hyper = ON_DISK[name]

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2, **hyper)

    checked: dict[int, tuple[int, int]] = {}
    plain = SwapFolder.check_space

    def check(self, needed_nbytes, host_needed_nbytes):
        checked[id(self)] = (needed_nbytes, host_needed_nbytes)
        plain(self, needed_nbytes, host_needed_nbytes)

    monkeypatch.setattr(SwapFolder, "check_space", check)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # nobody's word is taken for how many ranks share the disk

    def rank_run(rank: int) -> tuple:
        model = trained(rank, {**options, "offload_path": str(tmp_path)}, optimizer)
        tiers = runtime_of(model).tiers
        (folder,) = tiers._folders.values()
        runtime_of(model).gate.before()  # a delayed step is over, and what was read ahead dropped
        runtime_of(model).optimizers.core.host.pool.drain()
        for file in folder.swap.files.values():
            os.fsync(file.fd)
        taken = sum(os.stat(file.path).st_blocks * 512 for file in folder.swap.files.values())
        entered = sum(-(-nbytes // PAGE) * PAGE for _, nbytes, tier in tiers._entered if tier is Tier.DISK)
        result = checked[id(folder.swap)], taken, entered
        zs.close(model, restore=False)
        return result

    for (needed, on_host), taken, entered in run_threads(2, rank_run):
        assert needed == entered and on_host == 2 * needed
        assert 0.97 * needed <= taken <= needed


OPTIMIZERS = {
    torch.optim.Adam: [{}, {"amsgrad": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True}],
    torch.optim.NAdam: [{}],
    torch.optim.RAdam: [{}],
    torch.optim.Adamax: [{}],
    torch.optim.Adadelta: [{}],
    torch.optim.Rprop: [{}],
    torch.optim.Adagrad: [{}],
    torch.optim.ASGD: [{}],
    torch.optim.RMSprop: [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9}],
    torch.optim.SGD: [{}, {"momentum": 0.9}],
    zs.Lion: [{}],
}


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_states_are_foreseen(cls):
    for options in OPTIMIZERS[cls]:
        param = nn.Parameter(torch.ones(7))
        optimizer = cls([param], lr=0.1, **options)
        foreseen = state_plans.state_plans(zs.Config(), optimizer, [])
        param.grad = torch.ones(7)
        optimizer.step()
        made = [name for name, value in optimizer.state[param].items() if getattr(value, "shape", None) == param.shape]
        names = [column.name for column in foreseen[id(param)].columns]
        assert foreseen.keys() == {id(param)} and len(names) == len(made) and (not any(names) or set(names) == set(made)), options


# -- host memory -------------------------------------------------------------------------------------------------

IN_MEMORY = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2, "precision": "bf16"},
    "stage 3": {"stage": 3},
    "cpu": {"stage": 3, "offload_optimizer": "cpu", "precision": "bf16"},
    "late": {"stage": 1, "offload_optimizer": "cpu", "delayed_update": 1},
    "nvme": {"stage": 3, "offload_optimizer": "nvme"},
    "all on nvme": ALL,
}


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    """What the first rank to be asked has heard of all."""
    seen: list[Need] = []

    def look(everyone, config):
        seen[:] = seen or everyone
        return shortage(everyone, config)

    monkeypatch.setattr(room, "shortage", look)
    return seen


@pytest.mark.parametrize(
    ("name", "separate"),
    [(name, separate) for name in IN_MEMORY for separate in (False, True) if not (separate and name.startswith("stage"))],
)
def test_b23_what_is_foreseen_is_what_is_taken(name, separate, tmp_path, monkeypatch, strict_device):
    """Against the ledger after three steps; the model's own bytes are what is given back."""
    seen = seen_by(monkeypatch)
    options = {**IN_MEMORY[name], "offload_path": str(tmp_path)}

    def rank_run(rank: int) -> dict:
        strict_device(rank, separate)
        model = trained(rank, options)
        ledger = runtime_of(model).tiers.ledger
        taken = {key: ledger.now[key] + ledger.elsewhere[Tier.HOST][key] for key in {*ledger.now, *ledger.elsewhere[Tier.HOST]}}
        zs.close(model, restore=False)
        return taken

    everyone = run_threads(2, rank_run)
    for taken, need in zip(everyone, seen, strict=True):
        assert need.released_nbytes == sum(param.nbytes for param in MODEL.parameters())
        for category, nbytes in need.parts.items():
            found = taken.get("staging" if category == BUFFERS else category, 0)
            # buffers are made when they are first needed, and not all may have been
            assert found == nbytes if category != BUFFERS else nbytes * 0.3 <= found <= 1.05 * nbytes + PAGE, category


def short_of(monkeypatch: pytest.MonkeyPatch, nbytes: int, **options) -> None:
    monkeypatch.setattr(room, "limits", lambda: [Limit("cgroup /somewhere", nbytes, "raise the memory limit", **options)])


@pytest.mark.parametrize("stage", [0, 3])
def test_b23_too_little_memory_is_refused_on_every_rank_before_anything_is_changed(stage, monkeypatch):
    def rank_run(rank: int) -> str:
        model = copy.deepcopy(MODEL)
        optimizer = adamw(model.parameters())
        before = [(id(p), type(p), p.data_ptr()) for p in model.parameters()]
        with pytest.raises(HostMemoryError) as caught:
            zs.shard(model, optimizer, stage=stage)
        assert before == [(id(p), type(p), p.data_ptr()) for p in model.parameters()]
        assert type(optimizer) is torch.optim.AdamW and "_zeroshard" not in model.__dict__
        meeting.wait()
        if rank == 0:
            short_of(monkeypatch, 1 << 30)
        meeting.wait()
        zs.close(trained(rank, {"stage": stage}))
        return str(caught.value)

    meeting = threading.Barrier(2, timeout=20)
    short_of(monkeypatch, 1 << 20)
    first, second = run_threads(2, rank_run)
    assert first == second
    for words in ("parameters", "gradients", "optimizer states", "given back", "2 rank(s)", "cgroup /somewhere", "available",
                  "raise the memory limit", "fewer ranks", "Nothing was allocated"):  # fmt: skip
        assert words in first, first
    changed = first.partition("To go on: ")[2].partition(";")[0]
    # of so small a model the buffers on the way to a disk take more than the states that would rest there
    assert ("stage=" in changed and "which alone is not enough" in changed) == (stage < 3), changed


GIB = 1 << 30


def need_of(parts: dict, left: int, host_name: str = "a", pid: int = 0, released: int = 0, of_process: bool = False) -> Need:
    return Need(parts, released, [Limit("RAM", left, "more", of_process)], {}, (host_name, ""), pid)


def test_who_shares_which_limit():
    parts = {"parameters": GIB, "optimizer states": 2 * GIB}
    states, all_away = {"offload_optimizer": "nvme"}, {"offload_optimizer": "nvme", "offload_param": "nvme"}
    changes = [(states, {"parameters": GIB}), (all_away, {"buffers": GIB // 4})]
    assert shortage([need_of(parts, 6 * GIB), need_of(parts, 6 * GIB)], changes) is None
    text = shortage([need_of(parts, 5 * GIB), need_of(parts, 6 * GIB)], changes)
    assert "rank 0" in text and "6.000 GiB are needed" in text and "5.000 GiB are available (RAM)" in text
    assert "offload_optimizer='nvme', offload_path='FOLDER' (4.000 GiB less)" in text and "offload_param" not in text
    text = shortage([need_of(parts, GIB), need_of(parts, GIB)], changes)
    assert "offload_param='nvme'" in text and "not enough" not in text
    text = shortage([need_of(parts, GIB // 4)] * 2, changes)
    assert "offload_param='nvme', offload_path='FOLDER' (5.500 GiB less, which alone is not enough); or fewer ranks" in text
    assert "To go on: fewer ranks" in shortage([need_of(parts, GIB)] * 2, [])
    assert shortage([need_of(parts, 5 * GIB), need_of(parts, 5 * GIB, "b")], changes) is None  # two hosts
    assert shortage([need_of(parts, 5 * GIB, pid=n, of_process=True) for n in (1, 2)], changes) is None  # two processes
    assert shortage([need_of(parts, 5 * GIB, pid=1, of_process=True) for _ in (1, 2)], changes) is not None  # two threads
    assert shortage([need_of(parts, 5 * GIB, released=GIB), need_of(parts, 5 * GIB)], changes) is None


def test_without_an_optimizer_gradients_on_the_device_count_for_nothing(monkeypatch):
    seen = seen_by(monkeypatch)
    run_threads(1, lambda rank: zs.close(zs.shard(copy.deepcopy(MODEL), None, stage=3)[0], restore=False))
    assert "gradients" not in seen[0].parts and seen[0].nbytes < seen[0].released_nbytes


CAGED = """
import resource, torch, torch._dynamo, zeroshard as zs  # torch imports _dynamo with the first optimizer: not within the limit
from pathlib import Path
from zeroshard.errors import HostMemoryError
for mib in (256, 1024):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))  # 128 MiB, and 384 more when it is stepped
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20), resource.RLIM_INFINITY))
    try:
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    except HostMemoryError as error:
        print(error)
    else:
        print("sharded")
"""


@pytest.mark.processes
# elsewhere the kernel does not say how much of the limit is used (/proc/self/statm); refusals by other limits are tested above
# limits that other systems do not enforce
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc")
def test_b23_a_real_limit_of_the_address_space_is_seen():
    run = subprocess.run([sys.executable, "-c", CAGED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    *refusal, end = run.stdout.splitlines()
    assert end == "sharded"
    assert all(words in "\n".join(refusal) for words in ("RLIMIT_AS", "ulimit -v", "offload_optimizer='nvme'"))


def test_limits_of_a_control_group_leave_cached_files_out(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 300\ninactive_file 200\n")
    monkeypatch.setattr(host_memory, "_own_groups", lambda root: [tmp_path] if root == "" else [])
    assert host_memory._groups_left() == [(tmp_path, 600)]
    assert host_memory.available_nbytes() == 600
    assert any(limit.name == f"cgroup {tmp_path}" and limit.nbytes >= 600 for limit in host_memory.limits())
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory._groups_left() == []


def test_limits_of_groups_around_count(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory.Path, "read_text", lambda self: "0::/slice/unit\n")
    assert [str(path) for path in host_memory._own_groups("")] == [
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/slice/unit",
        "/sys/fs/cgroup/slice",
    ]


# -- buffers, and gradients that arrive narrow ------------------------------------------------------------------


class Transfer:
    """Over when it is told so, or waited for."""

    over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def test_a_pool_whose_buffers_grow_drops_those_that_are_too_small():
    ledger = Ledger()
    pool = BufferPool(ledger, 2, 0, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), Tier.HOST, "grown")
    held = ledger.elsewhere[Tier.HOST]
    first, second = pool.take_fitting(64), pool.take_fitting(128)
    assert (first.nbytes, second.nbytes, held["grown"]) == (64, 128, 192)
    pool.give(first)  # too small by now
    assert held["grown"] == 128
    third, further = pool.take_fitting(100), pool.take_fitting(1)  # none is free: a third one is made
    assert (third.nbytes, further.nbytes, held["grown"]) == (128, 128, 384)
    for buffer in (second, third, further):
        pool.give(buffer)
    assert held["grown"] == 256
    pool.close()
    assert held["grown"] == 0


def test_a_buffer_beyond_the_usual_number_is_counted_and_given_up():
    ledger = Ledger()
    pool = BufferPool(ledger, 2, 100, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), Tier.HOST)
    held = ledger.elsewhere[Tier.HOST]
    usual = [pool.take(), pool.take()]
    assert pool.take(wait=True) is None and held["staging"] == 200
    further = pool.take_further()
    assert held["staging"] == 300
    first, second = Transfer(), Transfer()
    pool.give(further, first)
    pool.give(usual[0], second)
    assert held["staging"] == 300, "both are still read or written"
    first.over = True
    pool.give(usual[1], Transfer())
    assert held["staging"] == 200 and [buffer is further for buffer, _ in pool._free] == [False, False]
    pool.close()
    assert held["staging"] == 0


def test_a_need_that_finds_all_slots_taken_is_served_and_counted(tmp_path, strict_device):
    def rank_run(rank: int) -> None:
        strict_device(rank, True)
        model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3, units="leaf", offload_param="nvme", offload_path=str(tmp_path))
        tiers, rest = runtime_of(model).tiers, runtime_of(model).groups[0].values.rest
        held = tiers.ledger.elsewhere[Tier.HOST]
        while (taken := tiers.slots.take()) is not None:
            kept = taken
        usual, out = held["staging"], torch.empty(rest.numel, dtype=rest.dtype)
        assert tiers.fetch(rest, out, wait=False) is None
        pending = tiers.fetch(rest, out, wait=True)
        assert held["staging"] == usual + tiers.slots.nbytes
        pending.wait()
        assert torch.equal(out, rest.load(0, rest.numel))
        tiers.slots.give(kept)
        assert held["staging"] == usual
        zs.close(model, restore=False)

    run_threads(1, rank_run)


def test_a_narrow_gradient_reads_and_writes_like_any_other(strict_device):
    def rank_run(rank: int) -> None:
        strict_device(rank, True)
        comm = backend_select._local.comm
        tiers = FurtherTiers(comm, Ledger())
        rest = NarrowRest(torch.full((8,), 7.0), tiers, torch.bfloat16)
        rest.narrow.copy_(torch.arange(8))
        rest.is_narrow = True
        out = torch.empty(3)
        rest.read(2, out).wait()
        assert out.tolist() == [2, 3, 4]
        rest.write(1, torch.tensor([0.5])).wait()
        assert rest.view(0, 8).tolist() == [0, 0.5, 2, 3, 4, 5, 6, 7]
        rest.read(0, out).wait()
        assert out.tolist() == [0, 0.5, 2]

    run_threads(1, rank_run)


# -- pinned memory -----------------------------------------------------------------------------------------------


class Runtime(SimpleNamespace):
    """CUDA's, as far as memory is pinned by it."""

    def __init__(self, answer: int = 0) -> None:
        super().__init__(answer=answer, pinned={}, cudaGetErrorString=lambda code: f"error {code}")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.answer:
            self.pinned[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address) else 1


@pytest.fixture
def device(monkeypatch):
    """A function that installs such a runtime."""

    def install(answer: int = 0) -> Runtime:
        runtime = Runtime(answer)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(aligned, "_told_unpinned", False)
        return runtime

    return install


def test_b23_pinned_bytes_are_within_two_percent_of_those_asked_for(device):
    """Of what CUDA is told to lock, and of the pages mapped for it."""
    runtime = device()
    sizes = [3_000_001, (1 << 20) + 1, 5 << 20, 700_000, (1 << 22) - 1]
    kept = [empty_aligned(nbytes, pin=True) for nbytes in sizes]
    assert [tensor.numel() for tensor in kept] == sizes
    pages = [math.ceil(nbytes / PAGE) * PAGE for nbytes in runtime.pinned.values()]
    assert len(pages) == len(sizes) and sum(sizes) <= sum(pages) <= 1.02 * sum(sizes)
    libc = ctypes.CDLL(None, use_errno=True)
    resident = (ctypes.c_ubyte * (1 << 12))()
    for tensor, nbytes in zip(kept, sizes, strict=True):  # mincore fails where a page is not mapped
        mapped = math.ceil(nbytes / PAGE) * PAGE
        assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(mapped), resident) == 0
    del tensor, kept
    assert not runtime.pinned


def test_b23_memory_that_can_not_be_pinned_serves_unpinned_and_is_told_of_once(device, capfd):
    runtime = device(answer=2)
    first, second = empty_aligned(1 << 20, pin=True), empty_aligned(1 << 20, pin=True)
    first.fill_(1), second.fill_(2)
    del first, second  # nothing to be unregistered
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and all(word in told[0] for word in ("1048576 bytes", "error 2", "ulimit -l")), told
    assert not runtime.pinned


_HEAP = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
libc.mallopt(-1, 128 << 20), libc.mallopt(-3, 32 << 20)
begin, small = libc.sbrk(0), []
for _ in range(60):
    block = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(11 << 20))
    before, small = small, [libc.malloc(nbytes) for nbytes in (24, 40, 56, 72, 88, 104)]
    libc.free(block)
    for each in before:
        libc.free(each)
print(libc.sbrk(0) - begin >> 20)
"""


# later ones have no such fault to mend; that they are given no such variable is tested below, on every system
@pytest.mark.skipif("tcache_count" not in str(host_memory.quiet_heap({})), reason="of glibc before 2.39")
def test_a_freed_block_serves_the_next_one_of_its_size():
    """One block of 11 MiB at a time, and small ones that come and go: the heap has room for two, not for eight."""
    grown = []
    for more in (host_memory.quiet_heap({}), {"GLIBC_TUNABLES": ""}):
        found = subprocess.run(
            [sys.executable, "-S", "-c", _HEAP], env=os.environ | more, capture_output=True, text=True, check=True
        )
        grown.append(int(found.stdout))
    assert grown[0] <= 24 and grown[1] > 2 * grown[0]


def test_what_the_environment_says_of_the_heap_stays(monkeypatch):
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    cache, huge = "glibc.malloc.tcache_count=0", "glibc.malloc.hugetlb=1"
    assert host_memory.quiet_heap({}) == {"GLIBC_TUNABLES": f"{cache}:{huge}"}
    assert host_memory.quiet_heap({"GLIBC_TUNABLES": "a=1"}) == {"GLIBC_TUNABLES": f"a=1:{cache}:{huge}"}
    assert host_memory.quiet_heap({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}) == {
        "GLIBC_TUNABLES": f"glibc.malloc.tcache_count=7:{huge}"
    }
    assert host_memory.quiet_heap({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7:glibc.malloc.hugetlb=0"}) == {}
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("glibc", "2.39"))
    assert host_memory.quiet_heap({}) == {"GLIBC_TUNABLES": huge}
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("", ""))
    assert host_memory.quiet_heap({}) == {}


def _own_tunables(rank: int, world_size: int) -> bytes:
    return Path("/proc/self/environ").read_bytes()


# other C libraries have no such variables; that none is given there is tested above
@pytest.mark.skipif(not host_memory.quiet_heap({}), reason="of glibc")
def test_ranks_begin_with_a_quiet_heap(monkeypatch):
    monkeypatch.setattr(launch, "_method", "spawn")  # forks have what their server began with
    assert b"glibc.malloc.hugetlb=" in run_processes(_own_tunables, 1)[0]
    assert "GLIBC_TUNABLES" not in os.environ or "hugetlb" in os.environ["GLIBC_TUNABLES"]


_FRESH = """
import re, sys
import torch
from zeroshard.utils import host_memory
from zeroshard.utils.release import take_again

host_memory.keep_freed_memory(large=sys.argv[1] != "returned")
full, nbytes = torch.empty(int(sys.argv[2]), dtype=torch.uint8), int(sys.argv[2])
for _ in range(2):
    full.untyped_storage().resize_(0)
    take_again(full, nbytes)
    full.fill_(1)
middle, inside = full.data_ptr() + nbytes // 2, False
for line in open("/proc/self/smaps"):
    if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
    elif inside and line.startswith("VmFlags:"):
        print(*line.split()[1:])
"""
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


# asking has no effect there, and gathers are as in every other test
@pytest.mark.skipif(not _HUGE.exists() or "[never]" in _HUGE.read_text(), reason="the system gives no huge pages")
@pytest.mark.parametrize(("mode", "mib"), [("kept", 48), ("returned", 16)])
def test_a_gathered_unit_whose_memory_is_mapped_anew_has_huge_pages(mode, mib):
    """Of 4 KiB pages 48 MiB would be 12,288 faults, in each gather. That they are asked for ("hg"); the system may have none left."""
    command = [sys.executable, "-c", _FRESH, mode, str(mib << 20)]
    environment = os.environ | {"GLIBC_TUNABLES": "", "OMP_NUM_THREADS": "1"}  # as torchrun starts a rank
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "hg" in found.stdout.split()
