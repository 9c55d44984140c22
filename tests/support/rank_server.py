"""The server whose forks are the ranks of `run_processes` is a fork of this process, after collection.

Python's own fork server is a fresh interpreter: it imports torch again, and each rank its test file, with transformers where
that asks for it. A fork has them all: 5 s of a core for each server and up to 2 s for a rank are saved. It is made where that is
safe: once, before the first test, when no thread but those of pytest-xdist and no team of OpenMP has been started.
"""

import contextlib
import os
import sys
import warnings
from multiprocessing import forkserver, resource_tracker, util


def start() -> None:
    """Start it, if the system is Linux; elsewhere the first rank starts Python's own."""
    if sys.platform != "linux":
        return
    resource_tracker.ensure_running()
    plain, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = plain


def _fork(path: bytes, arguments: list[str], open_fds: list[int]) -> int:
    """As `spawnv_passfds`: a process that runs the last argument, Python's text, and has these files open. Returns its number."""
    with (
        warnings.catch_warnings()
    ):  # Python 3.12 warns of threads, which may hold locks: those of pytest-xdist hold none that matter
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        for number in map(int, os.listdir("/proc/self/fd")):  # of pytest and xdist: an end of a pipe that stays open ends nothing
            if number not in (0, 1, 2, *open_fds):
                with contextlib.suppress(OSError):  # the listing's own
                    os.fstat(number)
                    os.dup2(2, number)  # not closed: a logger that holds pytest's stream would write into the number's next file
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False, buffering=1) for number, mode in enumerate("rww"))  # noqa: SIM115
        forkserver._forkserver.__init__()  # its lock is held, above
        resource_tracker._resource_tracker.__init__()
        exec(arguments[-1], {})
    finally:
        os._exit(0)  # the frames of pytest above this one are not left
