"""SwapFolder: the folder of one process on a local disk, for tensors that do not fit in memory.

    <path>/zeroshard-swap-<hostname>-<pid>-<token>/
        lock                    held by flock as long as the process lives, however it ends
        <name>, <name>, ...     one file for each `file(name, nbytes)`

The folder is removed by `close`, or at exit. The folder of a killed process is recognised by its lock, which no process
holds, and removed by the next SwapFolder on that path. Many processes may make and clean folders at the same time:

    create   mkdir; make `lock` and flock it; is it still there? (else a cleaner was faster: try another name); write the
             process id into it
    clean    open `lock`, flock it without waiting (held: the folder is in use, leave it); is it still there? (else
             another cleaner has done the work); remove the files, `lock` last, then the folder

So a folder whose lock is held is never touched, and of two cleaners one gets the lock. A folder without a lock, or with
an empty one, is being made, or its process was killed while making it: it is removed when it is older than a minute.
"""

from __future__ import annotations

import multiprocessing.util
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from pathlib import Path

from torch import Tensor

from ...errors import SwapError
from ...utils.aligned import empty_aligned, round_up
from .async_file import Engine, File, Handle, open_file
from .filesystems import MEMORY_FILESYSTEMS, filesystem_of

_NAME = re.compile(r"zeroshard-swap-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
_LOCK, _KEEP = "lock", "keep"  # files in the folder
_HALF_MADE_S = 60.0  # a younger folder without a lock may be in the making
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.", "lustre", "gpfs", "ceph", "beegfs", "afs", "glusterfs")


class SwapFolder:
    """A folder for swap files that is removed when its process ends.

    Args:
        path: an existing folder on a local disk.
        rank: this rank, for messages.
        needed_nbytes: bytes that the files of this rank will take.
        host_needed_nbytes: bytes that files of all ranks on this host will take on that filesystem; None: only this rank's.
        any_filesystem: accept memory (tmpfs) and network filesystems; print a line about it.
        keep: leave the folder when it is closed; no other SwapFolder removes it then.

    Raises:
        SwapError: the path cannot be used: missing, not a folder, not writable, read-only, too small, in memory, remote.
    """

    path: Path
    lock_fd: int
    files: dict[str, File]

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        rank: int,
        needed_nbytes: int,
        host_needed_nbytes: int | None = None,
        any_filesystem: bool = False,
        keep: bool = False,
    ) -> None:
        parent = Path(path).absolute()  # the process may change its working directory
        where = f"rank {rank}: swap folder {parent}"
        remote = _check_place(parent, where, any_filesystem)
        try:
            remove_leftovers(parent, remote=remote)
        except OSError as error:
            raise SwapError(f"{where}: {_refusal(error)}") from None
        self._parent, self._where = parent, where
        self.check_space(needed_nbytes, max(needed_nbytes, host_needed_nbytes or 0))
        self.path, self.lock_fd = _make_folder(parent, where)
        if keep:
            (self.path / _KEEP).touch()
        self.files = {}
        self._end = weakref.finalize(self, _end, self.path, self.lock_fd, keep, os.getpid())
        # a child of multiprocessing runs no atexit handlers, but it runs these finalizers
        self._at_exit = multiprocessing.util.Finalize(None, self._end, exitpriority=0)

    def check_space(self, needed_nbytes: int, host_needed_nbytes: int) -> None:
        """Raise SwapError where less is free than these bytes, of this rank and of all ranks of this host."""
        space = os.statvfs(self._parent)
        if space.f_flag & os.ST_RDONLY:
            raise SwapError(f"{self._where} is on a filesystem mounted read-only; name a folder that can be written")
        free_nbytes = space.f_bavail * space.f_frsize
        if free_nbytes < host_needed_nbytes:
            ranks = f" by all ranks of this host, {needed_nbytes} by this one" if host_needed_nbytes > needed_nbytes else ""
            raise SwapError(
                f"{self._where} is too small: {host_needed_nbytes} bytes ({host_needed_nbytes / 2**30:.2f} GiB) are needed"
                f"{ranks}, {free_nbytes} bytes ({free_nbytes / 2**30:.2f} GiB) are free; free "
                f"{(host_needed_nbytes - free_nbytes) / 2**30:.2f} GiB, name a folder on a larger disk, or offload less"
            )

    @property
    def device(self) -> int:
        """Number of the filesystem: equal for folders on the same one."""
        return self._parent.stat().st_dev

    def file(self, name: str, nbytes: int, *, reserve: bool = False) -> File:
        """Return a new file of `nbytes` zero bytes. reserve: as in `open_file`."""
        if not self._end.alive:
            raise ValueError(f"expected an open swap folder, got {self.path}, which is closed")
        if not name or "/" in name or name in (_LOCK, _KEEP, ".", ".."):
            raise ValueError(f"expected a plain file name, got {name!r}")
        if name in self.files:
            raise ValueError(f"expected a new name, got {name!r}, which this swap folder has already")
        self.files[name] = open_file(self.path / name, nbytes, create=True, reserve=reserve)
        return self.files[name]

    def close(self) -> None:
        """Close the files and remove the folder with everything in it. Further calls do nothing."""
        for file in self.files.values():
            file.close()
        self._end()
        self._at_exit.cancel()

    def __enter__(self) -> SwapFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_place(parent: Path, where: str, any_filesystem: bool) -> bool:
    """Return whether the folder is remote. Raises SwapError where it is no folder, or not on a disk of this host."""
    try:
        status = parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise SwapError(f"{where} does not exist; create it on a local disk (mkdir -p), on every host") from None
    except OSError as error:
        raise SwapError(f"{where}: {_refusal(error)}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise SwapError(f"{where} is not a folder; name a folder on a local disk")
    kind = filesystem_of(parent)
    remote = kind.startswith(NETWORK_FILESYSTEMS)
    if kind in MEMORY_FILESYSTEMS:
        problem = f"is on {kind}, which is memory: swapping there frees nothing"
    elif remote:
        problem = f"is on {kind}, which is not a disk of this host: each step would wait for the network"
    else:
        return False
    if not any_filesystem:
        raise SwapError(f"{where} {problem}; name a folder on a local disk (NVMe), or pass any_filesystem=True")
    print(f"zeroshard: {where} {problem}; used as any_filesystem=True was given", file=sys.stderr)
    return remote


def _make_folder(parent: Path, where: str) -> tuple[Path, int]:
    """Make a folder; return its path and the descriptor of its lock, which this process holds."""
    while True:
        path = parent / f"zeroshard-swap-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir(mode=0o700)
            lock_fd = _lock(path, create=True)
        except FileExistsError:  # the token is in use
            continue
        except FileNotFoundError:
            if not parent.exists():
                raise SwapError(f"{where} was removed; create it again") from None
            continue  # a cleaner was faster
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise SwapError(f"{where}: {_refusal(error)}") from None
        if lock_fd is not None:
            return path, lock_fd


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "localhost"


def _refusal(error: OSError) -> str:
    """Return why a folder could not be made there, and a remedy."""
    if error.errno in (EACCES, EPERM):
        return (
            f"not readable and writable by user {os.geteuid()}; "
            "name a folder of this user, or change its permissions (chmod, chown)"
        )
    if error.errno == EROFS:
        return "the filesystem is mounted read-only; name a folder that can be written"
    if error.errno in (ENOSPC, EDQUOT):
        return f"no space left for a folder ({error.strerror}); free some, or name a folder on another disk"
    return f"a folder cannot be made there ({error.strerror}); name a folder on a local disk"


def _lock(folder: Path, create: bool) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process holds it, or has removed it meanwhile.

    With `create`, wait for a cleaner that holds the lock while it is still empty; it releases it at once.
    """
    import fcntl  # POSIX only; this file can be imported elsewhere

    fd = os.open(folder / _LOCK, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if create else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(folder / _LOCK)):
            if create:
                os.write(fd, f"{os.getpid()}\n".encode())
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def remove_leftovers(parent: Path, *, remote: bool = False) -> int:
    """Remove the folders of ended runs in a folder; return the bytes freed, after a line on stderr if there were any.

    Args:
        parent: where swap folders are made.
        remote: other hosts use it, too; their folders are left, since this host may not see their locks.
    """
    count = freed_nbytes = 0
    for folder in parent.iterdir():
        match = _NAME.fullmatch(folder.name)
        if match is None or (remote and match["host"] != _host()):  # not a swap folder; or its lock may not be visible here
            continue
        try:
            freed = _remove_if_ended(folder)
        except OSError:  # another cleaner is at work
            continue
        if freed is not None:
            count, freed_nbytes = count + 1, freed_nbytes + freed
    if count:
        print(
            f"zeroshard: removed {count} swap folder{'s' * (count > 1)} that ended runs left in {parent} "
            f"({freed_nbytes} bytes freed)",
            file=sys.stderr,
        )
    return freed_nbytes


def _remove_if_ended(folder: Path) -> int | None:
    """Remove a folder whose process has ended; return the bytes freed. None if it is in use, kept, gone, or not this user's."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or (folder / _KEEP).exists():
        return None  # in a folder like /tmp another user may have made a link of this name, to files that only root can remove
    try:
        fd = _lock(folder, create=False)
    except FileNotFoundError:  # the lock is not made yet, or already removed
        return None if _is_young(folder) else _remove(folder)
    if fd is None:
        return None
    try:
        return None if os.fstat(fd).st_size == 0 and _is_young(folder) else _remove(folder)
    finally:
        os.close(fd)


def _is_young(folder: Path) -> bool:
    return time.time() - folder.stat().st_mtime < _HALF_MADE_S


def _remove(folder: Path) -> int:
    """Remove a folder's files, its lock last, and the folder; return the bytes that they took."""
    freed_nbytes = 0
    names = sorted(os.listdir(folder), key=lambda name: name == _LOCK)
    for name in names:
        freed_nbytes += os.lstat(folder / name).st_blocks * 512  # st_blocks counts 512 bytes on every filesystem
        os.unlink(folder / name)
    os.rmdir(folder)
    return freed_nbytes


def _end(folder: Path, lock_fd: int, keep: bool, process: int) -> None:
    """Finalizer of a SwapFolder: remove the folder in the process that made it; do nothing in a forked child."""
    if process != os.getpid():
        return
    try:
        if not keep:
            _remove(folder)
    except FileNotFoundError:  # removed by hand
        pass
    finally:
        os.close(lock_fd)


def measure(path: str | os.PathLike, nbytes: int = 256 << 20) -> tuple[float, float]:
    """Return read and write speed of a folder's disk in bytes per second, from a short probe that leaves nothing behind.

    Args:
        path: a folder.
        nbytes: most bytes to write and to read; on a slow disk each stops after about half a second.
    """
    chunk_nbytes, patience_s = min(16 << 20, round_up(nbytes)), 0.4
    memory = empty_aligned(chunk_nbytes).fill_(1)
    name = Path(path) / f".zeroshard-probe-{os.getpid()}-{secrets.token_hex(4)}"
    file = open_file(name, max(nbytes // chunk_nbytes, 1) * chunk_nbytes, create=True)
    os.unlink(name)  # the open descriptor keeps the file; it vanishes with the process, however that ends
    with Engine() as engine:
        written, write_s = _timed(engine.write, file, memory, file.nbytes, patience_s)
        read, read_s = _timed(engine.read, file, memory, written, patience_s)
    file.close()
    return read / read_s, written / write_s


def _timed(
    request: Callable[[File, int, Tensor], Handle], file: File, memory: Tensor, limit_nbytes: int, patience_s: float
) -> tuple[int, float]:
    """Return the bytes moved in chunks, two of them at a time, and the seconds that this took."""
    begin, moved, under_way = time.perf_counter(), 0, []
    while moved < limit_nbytes and time.perf_counter() - begin < patience_s:
        under_way.append(request(file, moved, memory))
        moved += memory.nbytes
        if len(under_way) == 2:  # one request runs while the other is waited for
            under_way.pop(0).wait()
    for handle in under_way:
        handle.wait()
    return moved, time.perf_counter() - begin
