"""Two "nodes" on one machine: network namespaces joined by a link of a chosen bandwidth (iproute2's `ip netns` and `tc`).

    with Nodes(rate_bits_per_s=200e6) as nodes:      each rank: nodes.enter(node), before it opens any connection

    node 0: 10.77.0.1 zs0 --tbf-->            <--tbf-- zs0 10.77.0.2 :node 1       a pair of veth devices, shaped at both ends

Ranks of one node share memory, as on one host; between nodes there is only the link, whose counters see every byte. The
namespaces are removed at the end; those of a process that was killed are removed when the next `Nodes` is entered.
Needs root, or to be root of a user namespace: `AS_ROOT`. Where both are refused, use proxied_nodes.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from pathlib import Path

DEVICE = "zs0"
_FOLDER, _PREFIX = "/run/netns", "zeroshard-"
_CLONE_NEWNET = 0x40000000
_BURST_S, _LEAST_BURST_NBYTES, _QUEUE = 0.004, 1 << 18, "50ms"
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
# the start of a command that runs as root of a user namespace, with mounts and devices of its own (util-linux): needs no root
AS_ROOT = (*_UNSHARE, "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh")


class NodesUnavailable(RuntimeError):
    """Raised if this machine does not let the process make or use such nodes; the message says why, in one line."""


class Nodes:
    """Two namespaces and their link, which exist while the context is open. It can be pickled and sent to ranks."""

    init_method = "env://"  # for torch.distributed.init_process_group, after `enter`

    def __init__(self, rate_bits_per_s: float) -> None:
        self.rate_bits_per_s = rate_bits_per_s
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self.names = [f"{name}-{node}" for node in range(2)]

    def __enter__(self) -> Nodes:
        for name in os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ():  # remove those that killed processes have left
            owner, _, _ = name.removeprefix(_PREFIX).partition("-")
            if name.startswith(_PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
                _delete(name)
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            first, second = self.names
            _run("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
            for node, name in enumerate(self.names):
                _run("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none")  # no IPv6 packets in the counters
                _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", DEVICE)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", DEVICE, "up")
            self.shape(self.rate_bits_per_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def shape(self, rate_bits_per_s: float) -> None:
        """Give the link this bandwidth, in bits a second, in each direction."""
        self.rate_bits_per_s = rate_bits_per_s
        burst = f"{burst_nbytes(rate_bits_per_s)}b"
        bucket = ("tbf", "rate", f"{rate_bits_per_s:.0f}bit", "burst", burst, "latency", _QUEUE)
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *bucket)

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def enter(self, node: int, ranks_here: int) -> None:
        """Move the calling process to a node, and set the variables that gloo reads. Call it before other threads start."""
        with open(f"{_FOLDER}/{self.names[node]}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.names[node]}")
        os.environ |= {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": DEVICE, "LOCAL_WORLD_SIZE": str(ranks_here)}

    def sent_nbytes(self) -> int:
        """Return the bytes that the calling process's node has sent over the link so far, headers included."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == DEVICE:
                return int(counters.split()[8])
        raise NodesUnavailable(f"this process has not entered a node (Nodes.enter): it has no network device {DEVICE}")

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _delete(name)


def burst_nbytes(rate_bits_per_s: float) -> int:
    """Return the bytes that a node may send at once after a pause."""
    return max(_LEAST_BURST_NBYTES, int(rate_bits_per_s / 8 * _BURST_S))


def _delete(name: str) -> None:
    """Remove a namespace, and its end of the link, if it exists."""
    with contextlib.suppress(NodesUnavailable):
        _run("ip", "netns", "del", name)


def why_not() -> str | None:
    """Return in one line why this process cannot make namespaces; None where it can."""
    try:
        with Nodes(1e9):
            return None
    except NodesUnavailable as error:
        return str(error)


def user_namespace_refused() -> str | None:
    """Return why a user namespace cannot make namespaces, else None. Runs the programs of `Nodes` in sh, faster than Python."""
    bucket = f"tc -n x qdisc replace dev {DEVICE} root tbf rate 1gbit burst {_LEAST_BURST_NBYTES} latency {_QUEUE}"
    try:
        _run(*AS_ROOT, "sh", "-c", f"ip netns add x && ip -n x link add {DEVICE} type veth && {bucket}")
        return None
    except NodesUnavailable as error:
        return str(error)


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NodesUnavailable(f"the program `{command[0]}` is not installed: install iproute2 and util-linux")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NodesUnavailable(f"`{' '.join(command)}` is refused: {said}")
