"""The facts of this machine and Python environment that matter to training, and the judgement of `zeroshard doctor` on them.

`look` changes nothing and imports no peer (a library of PEERS). It tries a backend, each GPU, direct I/O and a step of two
ranks, each at the smallest size. Sizes are bytes; None stands for values that the system does not tell.

A PROBLEM prevents training, a WARNING makes training slow or some features fail, a NOTE is for information.
"""

import contextlib
import io
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs

from ..testing import run_threads
from ..tiers.io import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS, filesystem_of, open_file
from ..utils.host_memory import limits
from ..utils.version import TESTED_TORCH
from .arguments import how_to_install
from .ranks import VARIABLES, available_cores
from .sheets import gigabytes

try:
    import resource
except ImportError:  # no POSIX system
    resource = None  # type: ignore[assignment]

PEERS = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "deepspeed")
EXTRAS = {"rich": "tables in frames", "matplotlib": "pictures"}  # optional library of the commands -> its use
PROBLEM, WARNING, NOTE = "problem", "warning", "note"
OLDEST_TORCH = (2, 11)  # as in pyproject.toml
_LITTLE_MEMORY_NBYTES = 2 << 30  # less gives a warning, as for the next two; torch and its libraries take half of it
_LITTLE_SHARED_MEMORY_NBYTES = 1 << 30  # containers have 64 MiB by default
_LITTLE_DISK_NBYTES = 5 << 30
BACKENDS = ("gloo", "nccl", "mpi")
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """A GPU. problem: error of the smallest kernel on it; None if it ran."""

    name: str
    nbytes: int
    capability: str
    problem: str | None


@dataclass(frozen=True)
class Disk:
    """A folder. direct: its files can be read and written without the page cache; problem: error of making a file in it."""

    role: str
    path: str
    filesystem: str
    free_nbytes: int | None
    direct: bool
    problem: str | None


@dataclass(frozen=True)
class Host:
    """The host. memory_left: bytes that each limit leaves, by its name. locked_nbytes: limit of pinned memory; None: none."""

    cores: int  # cores that this process may use
    machine_cores: int
    memory_nbytes: int | None
    memory_left: dict[str, int]
    locked_nbytes: int | None
    memfd: bool  # ranks of one host can share memory
    shared_memory_nbytes: int | None  # size of /dev/shm
    shared_memory_free_nbytes: int | None


@dataclass(frozen=True)
class DeepSpeed:
    """The module that `import deepspeed` would find. resolves_to: "nothing", "deepspeed" or "zeroshard"."""

    resolves_to: str
    path: str | None = None


@dataclass(frozen=True)
class Environment:
    """All facts. trials: name of what was tried -> its error; None if it works."""

    python: str
    executable: str
    platform: str
    zeroshard: str
    torch: str
    build: str  # "CUDA 13.0", "ROCm 7.0" or "CPU"
    backends: dict[str, bool]
    gpus: list[Gpu]
    driver: str | None  # version of NVIDIA's driver, also if torch cannot use it
    host: Host
    disks: list[Disk]
    packages: dict[str, str | None]
    deepspeed: DeepSpeed
    compiler: str | None
    variables: dict[str, str] = field(default_factory=dict)
    trials: dict[str, str | None] = field(default_factory=dict)


def look() -> Environment:
    """Find all facts. This takes seconds, most of which torch needs for its first optimizer."""
    backends = {name: dist.is_available() and bool(getattr(dist, f"is_{name}_available")()) for name in BACKENDS}
    trials: dict[str, Callable[[], object]] = {"a step of two ranks": lambda: run_threads(2, _step, timeout_s=30.0)}
    if backends["gloo"]:
        trials["gloo"] = _gloo
    driver: str | None = None
    packages = dict[str, str | None].fromkeys((*PEERS, *EXTRAS))
    with contextlib.suppress(OSError):  # there is no driver, or a container hides it
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        zeroshard=zs.__version__,
        torch=torch.__version__,
        build=f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU",
        backends=backends,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        driver=driver,
        host=_host(),
        disks=[_disk("temporary files", tempfile.gettempdir()), _disk("current folder", os.getcwd())],
        packages=packages,
        deepspeed=_deepspeed(),
        compiler=next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None),
        variables={name: os.environ[name] for name in (*VARIABLES, "LOCAL_RANK", "CUDA_VISIBLE_DEVICES") if name in os.environ},
        trials={name: _problem(trial) for name, trial in trials.items()},
    )


def _problem(trial: Callable[[], object]) -> str | None:
    """Call `trial`; return its error on one line, None if it does not raise."""
    try:
        trial()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _step(rank: int) -> None:
    """Train a small model for one step that gathers, reduces and steps."""
    model = nn.utils.skip_init(nn.Linear, 8, 8)  # values without random numbers, whose generator the two ranks share
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, keep_host_memory=False)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    zs.close(model)


def _gloo() -> None:
    """Make a gloo group of one rank with a store of its own: it opens the network device, as groups of several ranks do."""
    made: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # has a name: it must outlive `wait`
    made.allreduce([torch.ones(1)]).wait()


def _gpu(index: int) -> Gpu:
    known = torch.cuda.get_device_properties(index)
    problem = _problem(lambda: (torch.ones(1, device=f"cuda:{index}") + 1).item())  # noqa: PLW0108  # each call may fail
    return Gpu(known.name, known.total_memory, f"{known.major}.{known.minor}", problem)


def _host() -> Host:
    locked = shared = None
    if resource is not None and hasattr(resource, "RLIMIT_MEMLOCK"):
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if limit == resource.RLIM_INFINITY else limit
    with contextlib.suppress(OSError):
        shared = os.statvfs(_SHARED_MEMORY)
    known = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
    return Host(
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        memory_nbytes=nbytes,
        # a limit above the machine's memory has no effect
        memory_left={limit.name: limit.nbytes for limit in limits() if nbytes is None or limit.nbytes <= nbytes},
        locked_nbytes=locked,
        memfd=hasattr(os, "memfd_create"),
        shared_memory_nbytes=shared.f_blocks * shared.f_frsize if shared else None,
        shared_memory_free_nbytes=shared.f_bavail * shared.f_frsize if shared else None,
    )


def _disk(role: str, path: str) -> Disk:
    free, direct, name = None, False, Path(path) / f".zeroshard-doctor-{secrets.token_hex(4)}"

    def probe() -> None:
        nonlocal free, direct
        free = shutil.disk_usage(path).free
        with contextlib.redirect_stderr(io.StringIO()):  # hides the warning about direct I/O, which facts_of shows
            file = open_file(name, 4096, create=True)
        direct = file.direct
        file.close()

    problem = _problem(probe)
    name.unlink(missing_ok=True)
    return Disk(role, path, filesystem_of(path), free, direct, problem)


def _deepspeed() -> DeepSpeed:
    """Return the module that `import deepspeed` would find, without importing it."""
    try:
        spec = util.find_spec("deepspeed")
    except (ImportError, ValueError):  # raised by a finder, or for a module without a spec
        spec = None
    if spec is None:
        return DeepSpeed("nothing")
    path = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    ours = path is not None and Path(path).resolve().is_relative_to(Path(zs.__file__).resolve().parent)
    return DeepSpeed("zeroshard" if ours else "deepspeed", path)


@dataclass(frozen=True)
class Finding:
    """A problem, warning or note on this environment, with its remedy."""

    level: str
    what: str
    remedy: str


def facts_of(here: Environment) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each fact, as text for the terminal."""
    host, tested = here.host, TESTED_TORCH.get(_release(here))
    yield "Python", f"{here.python}, {here.executable}"
    others = f" of {host.machine_cores}" if host.cores < host.machine_cores else ""
    yield "machine", f"{here.platform}, {host.cores} cores{others}"
    told = f"zeroshard's tests passed with it on {tested}" if tested else "zeroshard was not tested with it"
    yield "torch", f"{here.torch}, built for {here.build}; {told}"
    yield "backends", ", ".join(name for name, there in here.backends.items() if there) or "none"
    for number, gpu in enumerate(here.gpus):
        yield f"GPU {number}", f"{gpu.name}, {gigabytes(gpu.nbytes)}, compute capability {gpu.capability}"
    if not here.gpus:
        yield "GPUs", "none that torch can use" + (f" (NVIDIA driver {here.driver})" if here.driver else "")
    yield "memory", gigabytes(host.memory_nbytes) if host.memory_nbytes is not None else "unknown"
    for name, nbytes in host.memory_left.items():
        yield "  left", f"{gigabytes(nbytes)} by {name}"
    yield "  may be locked", "any" if host.locked_nbytes is None else f"{host.locked_nbytes >> 10} KiB (ulimit -l)"
    shared = "" if host.shared_memory_nbytes is None else f"; /dev/shm: {gigabytes(host.shared_memory_nbytes)}"
    yield "shared memory", ("ranks of this host share theirs" if host.memfd else "none between ranks") + shared
    for disk in here.disks:
        free = "?" if disk.free_nbytes is None else gigabytes(disk.free_nbytes)
        direct = "direct I/O" if disk.direct else "no direct I/O"
        yield disk.role, f"{disk.path}: {disk.filesystem or 'unknown'}, {free} free, {direct}"
    peers = ", ".join(f"{name} {here.packages[name]}" for name in PEERS if here.packages.get(name))
    yield "peers of bench", peers or "none installed"
    finds = {"nothing": "finds nothing", "zeroshard": f"zeroshard's ({here.deepspeed.path})"}
    real = f"the real one, {here.packages.get('deepspeed') or 'of unknown version'} ({here.deepspeed.path})"
    yield "import deepspeed", finds.get(here.deepspeed.resolves_to, real)
    yield "C++ compiler", here.compiler or "none (zeroshard needs none)"
    for name, problem in here.trials.items():
        yield f"tried: {name}", problem or "works"


def findings(here: Environment) -> Iterator[Finding]:
    """Yield the findings on an environment."""
    yield from _of_torch(here)
    yield from _of_hardware(here)
    for disk in here.disks:
        yield from _of_disk(disk)
    yield from _of_packages(here)


def _release(here: Environment) -> str:
    """Return torch's release without the build: "2.13.0" for 2.13.0+cu130."""
    return here.torch.split("+")[0]


def _of_torch(here: Environment) -> Iterator[Finding]:
    release = _release(here).split(".")
    if tuple(int(part) if part.isdigit() else 0 for part in release[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        what = f"torch {here.torch} is older than {oldest}, which this library needs"
        yield Finding(PROBLEM, what, f"pip install 'torch>={oldest}'")
    elif _release(here) not in TESTED_TORCH:
        releases = ", ".join(f"{each} ({day})" for each, day in TESTED_TORCH.items())
        remedy = f"pip install torch=={list(TESTED_TORCH)[-1]}, or run the tests: pytest tests/utils/test_torch_compat.py first"
        yield Finding(NOTE, f"torch {here.torch} is none of the releases that were tested: {releases}", remedy)
    if not any(here.backends.values()):
        what = "torch has no backend (gloo, nccl): one process can train, several can not"
        yield Finding(WARNING, what, "install a build of torch with gloo")
    if (problem := here.trials.get("gloo")) is not None:
        remedy = "let the host's name resolve (/etc/hosts), or name the interface: export GLOO_SOCKET_IFNAME=lo"
        yield Finding(PROBLEM if not here.gpus else WARNING, f"a gloo group can not be made: {problem}", remedy)
    if (problem := here.trials.get("a step of two ranks")) is not None:
        remedy = "pip install --force-reinstall torch, then pip install -e . in a clone of zeroshard"
        yield Finding(PROBLEM, f"a training step of two ranks in this process fails: {problem}", remedy)
    missing = [name for name in VARIABLES if name not in here.variables]
    if {"RANK", "WORLD_SIZE"} & here.variables.keys() and missing:
        present = ", ".join(here.variables.keys() & set(VARIABLES))
        what = f"{present} set, but not {', '.join(missing)}: no process group can start"
        yield Finding(PROBLEM, what, "unset them, or start with torchrun, which sets all")


def _of_hardware(here: Environment) -> Iterator[Finding]:
    host = here.host
    for number, gpu in enumerate(here.gpus):
        if gpu.problem is not None:
            remedy = f"install a build of torch for compute capability {gpu.capability}, or hide it: export CUDA_VISIBLE_DEVICES="
            yield Finding(PROBLEM, f"GPU {number} ({gpu.name}) does not compute: {gpu.problem}", remedy)
    if here.gpus and any(here.backends.values()) and not here.backends.get("nccl"):
        yield Finding(WARNING, "torch has no nccl: several GPUs can not train together", "install a build of torch with nccl")
    if here.driver and not here.gpus and here.variables.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        why, remedy = f"({here.build}) finds no GPU", "compare nvidia-smi with the CUDA of torch; update the driver"
        if here.build == "CPU":
            why, remedy = "is built without CUDA", "install a CUDA build of torch"
        yield Finding(WARNING, f"NVIDIA's driver {here.driver} is loaded, but torch {why}: training is on the CPU", remedy)
    if here.gpus and host.locked_nbytes is not None:
        what = f"at most {host.locked_nbytes >> 10} KiB may be locked: unpinned copies of offloaded states are slower"
        yield Finding(NOTE, what, "raise it (ulimit -l unlimited; --ulimit memlock=-1 of a container)")
    for name, nbytes in host.memory_left.items():
        if nbytes < _LITTLE_MEMORY_NBYTES:
            what = f"{name} leaves {gigabytes(nbytes)} of memory: ranks may be killed"
            yield Finding(WARNING, what, "end what else runs, or raise the limit")
    if host.shared_memory_nbytes is not None and host.shared_memory_nbytes < _LITTLE_SHARED_MEMORY_NBYTES:
        what = f"/dev/shm has {gigabytes(host.shared_memory_nbytes)}: data loaders' workers and NCCL end with bus errors"
        remedy = "mount it larger (--shm-size=8g of a container, --ipc=host), or load data with num_workers=0"
        yield Finding(WARNING, what, remedy)
    if not host.memfd:
        what = "ranks of this host can not share memory (no memfd_create): they send copies over gloo"
        yield Finding(NOTE, what, "train on Linux for speed")


def _of_disk(disk: Disk) -> Iterator[Finding]:
    place = f"{disk.role} {disk.path}"
    if disk.problem is not None:
        what = f"{place}: no file can be made ({disk.problem}): neither checkpoints nor offloaded states"
        yield Finding(WARNING, what, "name a folder that you can write")
        return
    if disk.filesystem in MEMORY_FILESYSTEMS or disk.filesystem.startswith(NETWORK_FILESYSTEMS):
        memory = disk.filesystem in MEMORY_FILESYSTEMS
        what = (
            f"{place} is on {disk.filesystem}, {'which is memory' if memory else 'a network'}: offload to 'nvme' there is refused"
        )
        level = WARNING if memory and disk.role == "current folder" else NOTE
        yield Finding(level, what, "offload_path='...' of a folder on a local disk")
    elif not disk.direct:
        what = f"{place}: {disk.filesystem} has no direct I/O: what is offloaded there also takes the page cache"
        yield Finding(WARNING, what, "name a folder on ext4 or xfs on a local disk")
    if disk.free_nbytes is not None and disk.free_nbytes < _LITTLE_DISK_NBYTES:
        yield Finding(WARNING, f"{place} has {gigabytes(disk.free_nbytes)} free: checkpoints fill it soon", "free some")


def _of_packages(here: Environment) -> Iterator[Finding]:
    if missing := [name for name in EXTRAS if not here.packages.get(name)]:
        what = f"not installed: {', '.join(f'{name} ({EXTRAS[name]})' for name in missing)}"
        yield Finding(NOTE, what, how_to_install(missing[0]))
    routed = [name for name in ("accelerate", "transformers", "lightning", "pytorch-lightning") if here.packages.get(name)]
    if here.deepspeed.resolves_to == "nothing" and routed:
        what = f"{', '.join(routed)}: a DeepSpeed configuration fails, since `import deepspeed` finds nothing"
        yield Finding(NOTE, what, "python -m zeroshard.deepspeed script.py, or zeroshard.deepspeed.install() first")
    if here.deepspeed.resolves_to == "deepspeed":
        slow = "" if here.compiler else ", which finds no C++ compiler for its CPU optimizers and file I/O"
        remedy = "python -m zeroshard.deepspeed script.py takes zeroshard's without uninstalling it"
        yield Finding(NOTE if here.compiler else WARNING, f"`import deepspeed` is the real one{slow}", remedy)
    if not here.compiler:
        what = "no C++ compiler: torch.compile fails on the CPU; nothing else needs one"
        yield Finding(NOTE, what, "install g++ where you compile models")
