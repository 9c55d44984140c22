"""The command `zeroshard doctor`: show the facts of this machine and environment, and problems that training would meet.

    zeroshard doctor
    zeroshard doctor --json

`findings` judges the facts of environment.py: a PROBLEM prevents training (exit code 1), a WARNING makes training slow or
some features fail, a NOTE is for information. Each names the remedy.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..memory.io.filesystems import MEMORY_FILESYSTEMS
from ..memory.io.swap_folder import NETWORK_FILESYSTEMS
from ..utils.sheets import Sheet
from ..utils.version import TESTED_TORCH
from .arguments import ExitCode, Parser, how_to_install, quiet
from .environment import EXTRAS, PEERS, Disk, Environment, look
from .ranks import VARIABLES
from .sheets import gigabytes, print_json, show

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
OLDEST_TORCH = (2, 11)  # as in pyproject.toml
_LITTLE_MEMORY_NBYTES = 2 << 30  # less gives a warning, as for the next two; torch and its libraries take half of it
_LITTLE_SHARED_MEMORY_NBYTES = 1 << 30  # containers have 64 MiB by default
_LITTLE_DISK_NBYTES = 5 << 30


@dataclass(frozen=True)
class Finding:
    """A problem, warning or note on this environment, with its remedy."""

    level: str
    what: str
    remedy: str


def main(argv: Sequence[str]) -> int:
    """Print the facts and findings; return the exit code, 1 if something prevents training."""
    parser = Parser(
        prog="zeroshard doctor",
        description="Show what this machine and environment offer, and what would go wrong; "
        "exit code 1 if nothing can train here.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: an object with environment, findings and can_train")
    options = parser.parse(argv)
    here = look()
    found = sorted(findings(here), key=lambda finding: (PROBLEM, WARNING, NOTE).index(finding.level))
    can_train = all(finding.level != PROBLEM for finding in found)
    if options.json:
        facts = {"environment": dataclasses.asdict(here), "findings": [dataclasses.asdict(each) for each in found]}
        print_json({**facts, "can_train": can_train})
    else:
        show(Sheet(f"zeroshard {here.zeroshard}", rows=list(facts_of(here))))
        if found:
            rows = [(each.level, each.what, each.remedy) for each in found]
            show(Sheet(header=("", "what would go wrong", "what to do"), rows=rows))
        for each in found:
            if quiet() and each.level != NOTE:
                print(f"{each.level}: {each.what}; {each.remedy}")
        print("This environment can train." if can_train else "Something prevents training: see the problems above.")
    return ExitCode.DONE if can_train else ExitCode.NO


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
