"""`zeroshard-deepspeed`: read the arguments of the `deepspeed` launcher, and run torchrun with them, on this machine.

    zeroshard-deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json

Each rank gets torchrun's variables, `--local_rank=N` (unless --no_local_rank), and an environment in which `import deepspeed`
finds zeroshard. With several hosts the launcher starts nothing and prints the command for each host; with --no_ssh --node_rank N
it starts this host's ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...comm.launch import free_port
from ...errors import ConfigError
from .accelerator import get_accelerator
from .communication import TORCH_DISTRIBUTED_DEFAULT_PORT
from .door import child_environment

DLTS_HOSTFILE = "/job/hostfile"
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_REFUSED = {
    "autotuning": "zs.report(model) tells what a rank holds, zs.forecast(model, ...) what a step takes",
    "elastic_training": "start torchrun itself with --nnodes=MIN:MAX",
    "min_elastic_nodes": "start torchrun itself with --nnodes=MIN:MAX",
    "max_elastic_nodes": "start torchrun itself with --nnodes=MIN:MAX",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("zeroshard-deepspeed", description="Start a DeepSpeed script on zeroshard, with torchrun.")
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines of `host slots=N`; a file that is not there: this machine")
    add("-i", "--include", default="", help="hosts and their devices to use: host:0,1@other:2")
    add("-e", "--exclude", default="", help="hosts and their devices not to use, written the same way")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts of the hostfile")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host: its devices 0..N-1")
    add("--master_port", type=int, default=None, help="of the first rank; default: a free one, 29500 with several hosts")
    add("--master_addr", default="", help="of the first rank; default: 127.0.0.1, the first host with several hosts")
    add("--node_rank", type=int, default=-1, help="this host's number, with --no_ssh")
    add("--no_ssh", action="store_true", help="start this host's ranks; --node_rank says which")
    add("--no_local_rank", action="store_true", help="do not give --local_rank=N to the script")
    add("--no_python", action="store_true", help="the script is a program to execute")
    add("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    add("--bind_cores_to_rank", action="store_true", help="give each rank cores of its own")
    add("--bind_core_list", default=None, help="those to give: 0-3,8")
    add("--enable_each_rank_log", default="None", help="a folder: each rank's output goes to a file in it")
    add("--save_pid", action="store_true", help="write this process's number N to N.deepspeed in the temporary folder")
    add("-q", "--quiet", action="store_true", help="do not print the command that is started")
    add("--log_level", default="info", help="other than info: as --quiet")
    for name, kind in (("launcher", str), ("launcher_args", str), ("ssh_port", int), ("venv_script", str)):
        add(f"--{name}", type=kind, help="of starting other hosts, which is not done from here")
    for name in ("no_ssh_check", "force_multi"):
        add(f"--{name}", action="store_true", help="of starting other hosts, which is not done from here")
    for name, remedy in _REFUSED.items():
        how: dict[str, Any] = {"action": "store_const", "const": True} if name == "elastic_training" else {}
        add(f"--{name}", help=f"refused: {remedy}", **how)
    add("user_script", help="script, or module or program")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None, execute: Callable[..., object] = os.execve) -> int:
    """Replace this process by torchrun, with `execute`. With several hosts, print a command for each and return 2.

    Raises ConfigError for arguments that contradict each other, name something that does not exist, or are not supported.
    """
    args = _parser().parse_args(argv)
    for name, remedy in _REFUSED.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is not supported: {remedy}.")
    if args.no_python and args.module:
        raise ConfigError("--no_python and --module exclude each other: a module is run by python.")
    hosts = _hosts(args)
    several = (len(hosts) > 1 or args.force_multi) and not args.no_ssh
    if not several and not args.module and not (shutil.which if args.no_python else os.path.isfile)(args.user_script):
        kind = "program" if args.no_python else "script"
        raise ConfigError(f"there is no {kind} {args.user_script!r} (--module runs a module).")
    env = _environment(args, hosts)
    if several:
        print("zeroshard-deepspeed starts no other hosts. Start this on each of them:", file=sys.stderr)
        address = [] if args.master_addr else [f"--master_addr={next(iter(hosts))}"]
        given = [*address, *(sys.argv[1:] if argv is None else argv)]
        for number, host in enumerate(hosts):
            print(f"{host}: {shlex.join(['zeroshard-deepspeed', '--no_ssh', f'--node_rank={number}', *given])}")
        return 2
    node = args.node_rank if args.no_ssh else 0
    if not 0 <= node < len(hosts):
        raise ConfigError(f"--node_rank: expected 0 to {len(hosts) - 1} with --no_ssh, the place in {list(hosts)}, got {node}.")
    command = _torchrun(args, hosts, node)
    if args.save_pid:
        Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed").write_text(str(os.getpid()))
    if not args.quiet and args.log_level == "info":
        print("zeroshard-deepspeed:", shlex.join(command), file=sys.stderr, flush=True)
    execute(command[0], command, env)
    return 0


# -- where -------------------------------------------------------------------------------------------------------


def fetch_hostfile(path: str) -> dict[str, int] | None:
    """Return host -> slots, in the order of the file; None if there is no file. Raises ConfigError for other lines."""
    if not os.path.isfile(path):
        return None
    hosts: dict[str, int] = {}
    for line in filter(None, (line.split("#")[0].strip() for line in Path(path).read_text().splitlines())):
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None or match[1] in hosts:
            why = "a host is named once" if match else "expected `host slots=N`"
            raise ConfigError(f"hostfile {path}: {why}, got {line!r}.")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(f"hostfile {path}: it names no host. Give lines of `host slots=N`, or no hostfile at all.")
    return hosts


def _hosts(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return host -> devices to use on it, from the hostfile, the filters and the counts."""
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise ConfigError("--num_nodes and --num_gpus exclude --include and --exclude: name devices or count them.")
    if args.include and args.exclude:
        raise ConfigError("--include and --exclude exclude each other: name what is used, or what is not.")
    listed = fetch_hostfile(args.hostfile)
    if listed is None and args.num_nodes > 1:
        raise ConfigError(
            f"--num_nodes {args.num_nodes}: expected a hostfile that names the hosts, {args.hostfile!r} is not there."
        )
    if listed is None:
        here = get_accelerator().device_count()
        if get_accelerator()._name == "cuda" and (args.include or args.exclude):  # also devices hidden by CUDA_VISIBLE_DEVICES
            here = max(1, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))), here)
        listed = {"localhost": here}
    pool = {host: list(range(count)) for host, count in listed.items()}
    if args.include or args.exclude:
        pool = _filtered(pool, args.include or args.exclude, keep=bool(args.include))
    if args.num_nodes > len(pool):
        raise ConfigError(f"--num_nodes {args.num_nodes}: there are {len(pool)} hosts: {list(pool)}.")
    names = list(pool)[: args.num_nodes] if args.num_nodes > 0 else list(pool)
    return {name: list(range(args.num_gpus)) if args.num_gpus > 0 else pool[name] for name in names}


def _filtered(pool: dict[str, list[int]], given: str, keep: bool) -> dict[str, list[int]]:
    """Return the devices of the pool that `given` (`host:0,1@other`) lists (keep), or does not list; drop hosts without any."""
    named: dict[str, set[int]] = {}
    option = "--include" if keep else "--exclude"
    for part in given.split("@"):
        host, _, slots = part.partition(":")
        if host not in pool:
            raise ConfigError(f"{option}: there is no host {host!r} among {list(pool)}.")
        wanted = set(_numbers(option, slots)) if slots else set(pool[host])
        if not wanted <= set(pool[host]):
            raise ConfigError(f"{host} has no slot {sorted(wanted - set(pool[host]))}; it has {pool[host]}.")
        named.setdefault(host, set()).update(wanted)
    left = {host: [slot for slot in slots if (slot in named.get(host, ())) is keep] for host, slots in pool.items()}
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise ConfigError(f"--exclude {given}: nothing is left of {list(pool)}.")
    return left


# -- the command -------------------------------------------------------------------------------------------------


def _environment(args: argparse.Namespace, hosts: dict[str, list[int]]) -> dict[str, str]:
    """Return this process's environment with this host's chosen devices visible, and zeroshard as deepspeed on PYTHONPATH."""
    env = {**os.environ, **child_environment()}
    node = args.node_rank if args.no_ssh and 0 <= args.node_rank < len(hosts) else 0
    slots = list(hosts.values())[node]
    chosen = args.include or args.exclude or (args.num_gpus > 0 and "CUDA_VISIBLE_DEVICES" not in env)
    if chosen and get_accelerator()._name == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    if len(slots) > 1:  # torchrun would set it to 1
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(slots))))
    return env


def _torchrun(args: argparse.Namespace, hosts: dict[str, list[int]], node: int) -> list[str]:
    """Return the command line of torchrun for this host's ranks, each of which rank_start.py starts."""
    alone = len(hosts) == 1
    address = args.master_addr or ("127.0.0.1" if alone else next(iter(hosts)))
    port = args.master_port or (free_port() if alone else TORCH_DISTRIBUTED_DEFAULT_PORT)
    ranks = len(list(hosts.values())[node])
    counts = {host: len(slots) for host, slots in hosts.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"expected as many ranks on each host, since torchrun counts so, got {counts}: use --num_gpus.")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node_rank={node}"]
    command += [f"--nproc_per_node={ranks}", f"--master_addr={address}", f"--master_port={port}", "--no_python"]
    program = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    program.append(args.user_script)
    cores, log, folder = None, None, args.enable_each_rank_log
    if args.bind_cores_to_rank:
        given = args.bind_core_list
        cores = sorted(os.sched_getaffinity(0)) if given is None else _numbers("--bind_core_list", given)
        if len(cores) < ranks:
            raise ConfigError(f"--bind_cores_to_rank: expected a core for each of {ranks} ranks, got {cores}.")
    if folder != "None":
        if os.path.isfile(folder):
            raise ConfigError(f"--enable_each_rank_log: expected a folder, got the file {folder}.")
        os.makedirs(folder, exist_ok=True)
        log = os.path.join(os.path.abspath(folder), time.strftime("%Y%m%d%H%M%S"))  # the beginning of the ranks' paths
    plan = {"position": None if args.no_local_rank else len(program), "cores": cores, "log": log}
    starter = str(Path(__file__).with_name("rank_start.py"))
    return [*command, sys.executable, starter, json.dumps(plan), *program, *args.user_args]


def _numbers(option: str, given: str) -> list[int]:
    """Return the numbers in a list: 0-2,7 -> [0, 1, 2, 7]. Raises ConfigError for another form."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", given):
        raise ConfigError(f"{option}: expected numbers like 0,2 or 0-3, got {given!r}.")
    parts = [part.split("-") for part in given.split(",")]
    return sorted({number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)})


def command() -> int:
    """Run the command line `zeroshard-deepspeed`; a ConfigError is printed as one line."""
    try:
        return main()
    except ConfigError as error:
        print(f"zeroshard-deepspeed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(command())
