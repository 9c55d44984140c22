"""The facts of this machine and Python environment that matter to training; doctor.py judges them.

`look` changes nothing and imports no peer (a library of PEERS). It tries a backend, each GPU, direct I/O and a step of two
ranks, each at the smallest size. Sizes are bytes; None stands for values that the system does not tell.
"""

import contextlib
import io
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs

from ..memory.host_memory import limits
from ..memory.io.async_file import open_file
from ..memory.io.filesystems import filesystem_of
from ..testing import run_threads
from .ranks import VARIABLES, available_cores

try:
    import resource
except ImportError:  # no POSIX system
    resource = None  # type: ignore[assignment]

PEERS = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "deepspeed")
EXTRAS = {  # optional library of the commands -> its use
    "rich": "tables in frames", "matplotlib": "pictures",
}  # fmt: skip
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
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(8, 8)
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, keep_host_memory=False)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    zs.close(model)


def _gloo() -> None:
    """Make a gloo group of one rank with a store of its own: it opens the network device, as groups of several ranks do."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))  # has a name: it must outlive `wait`
    group.allreduce([torch.ones(1)]).wait()


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
