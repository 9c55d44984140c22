"""The folder of a run's checkpoints: complete ones are visible, everything else is not.

    runs/7/                         a root
      step-00000100/                complete: manifest.json, .metadata, rank-00000.distcp, ...
      step-00000200/
      latest                        the name of the newest, one line; if it is missing or wrong, the newest complete counts
      .step-00000300.1f2e3d.tmp/    a *draft*: being written (its lock is held), or left by a run that ended

A draft becomes a checkpoint by one rename. Replacing one of the same name first moves that to `.NAME.TOKEN.old`, which
counts as NAME until the new one is in place. Drafts whose lock nobody holds are removed by the next save.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointNotFound

MANIFEST, LATEST, LOCK = "manifest.json", "latest", "lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OLD = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{6}\.old")


def step_name(step: int) -> str:
    """'step-00000100'."""
    return f"step-{step:08d}"


def valid_name(name: str) -> bool:
    """Whether a name can be that of a checkpoint."""
    return bool(_NAME.fullmatch(name)) and name != LATEST and not name.endswith(".tmp")


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, have reached the disk for good."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, content: bytes) -> None:
    """Make a file that is there with all its content or not at all, for good."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(3)}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)


class Draft:
    """A checkpoint that is being written; its owner holds its lock as long as it lives."""

    def __init__(self, root: Path, name: str) -> None:
        """Makes the folder. Raises OSError."""
        self.root, self.name, self.token = root, name, secrets.token_hex(3)
        self.path = root / f".{name}.{self.token}.tmp"
        root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        try:
            self._lock: int | None = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def publish(self) -> Path:
        """Give the complete checkpoint its name, for good, and point `latest` to it. Raises OSError, with nothing changed.

        The pointer comes first: as long as there is no checkpoint of that name it is as good as none, and one rename makes
        both right. Not so where a checkpoint is replaced, to which it would point meanwhile.
        """
        target, old = self.root / self.name, self.root / f".{self.name}.{self.token}.old"
        pointer, replaces = self.root / LATEST, target.exists()
        before = pointer.read_bytes() if pointer.is_file() else None
        write_whole(self.path / LATEST, f"{self.name}\n".encode())
        try:
            if replaces:
                os.rename(target, old)
            else:
                os.replace(self.path / LATEST, pointer)
            os.rename(self.path, target)
            if replaces:
                os.replace(target / LATEST, pointer)
            sync(self.root)
        except OSError:
            self._take_back(target, old, before)
            raise
        shutil.rmtree(old, ignore_errors=True)
        (target / LOCK).unlink(missing_ok=True)  # only now: a draft without it would be taken for abandoned
        self._unlock()
        return target

    def _take_back(self, target: Path, old: Path, pointed: bytes | None) -> None:
        """A save that fails leaves the folder as it found it: a checkpoint that was disowned would be in the way."""
        with suppress(OSError):
            if target.exists() and not self.path.exists():
                os.rename(target, self.path)
            if old.exists() and not target.exists():
                os.rename(old, target)
            if pointed is None:
                (self.root / LATEST).unlink(missing_ok=True)
            elif (self.root / LATEST).read_bytes() != pointed:
                write_whole(self.root / LATEST, pointed)

    def discard(self) -> None:
        """Remove what was written; the inverse of making it. Does nothing to what is published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def sweep(root: Path) -> int:
    """Remove drafts of saves that ended before their time, and old checkpoints that were replaced; how many."""
    count = 0
    for path in sorted(root.glob(".*.tmp")):
        if path.is_dir() and abandoned(path / LOCK):
            shutil.rmtree(path, ignore_errors=True)
            count += 1
    for path in sorted(root.glob(".*.old")):
        found = _OLD.fullmatch(path.name)
        if found and (root / found["name"] / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)
            count += 1
        elif found and not (root / found["name"]).exists():  # a run ended between two renames: it counts again
            os.rename(path, root / found["name"])
    return count


def hold(path: Path) -> int | None:
    """Lock a file until the descriptor is closed, or this process is gone. None where the filesystem has no locks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def abandoned(lock: Path) -> bool:
    """Whether nobody holds the lock on a file, or it is gone."""
    try:
        fd = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held: alive
    finally:
        os.close(fd)
    return True


def complete(root: Path) -> dict[str, Path]:
    """Complete checkpoints by name, the oldest first (by step where the name tells, else by time)."""
    found: dict[str, Path] = {}
    for path in root.iterdir() if root.is_dir() else ():
        old = _OLD.fullmatch(path.name)
        name = old["name"] if old else path.name
        if (old or valid_name(name)) and (path / MANIFEST).is_file() and not (old and name in found):
            found[name] = path
    return dict(sorted(found.items(), key=lambda item: _age(*item)))


def _age(name: str, path: Path) -> tuple[int, float, str]:
    return (path / MANIFEST).stat().st_mtime_ns, 0.0, name


def find(where: Path, name: str | None = None) -> Path:
    """The checkpoint that is meant: `where` itself, `name` in it, or the newest complete one in it.

    Raises CheckpointNotFound, saying what there is.
    """
    if name is None and (where / MANIFEST).is_file():
        return where
    present = complete(where)
    if name is not None:
        if name in present:
            return present[name]
        raise CheckpointNotFound(f"{where}: no complete checkpoint {name!r}; there are: {', '.join(present) or 'none'}.")
    if not present:
        drafts = len(list(where.glob(".*.tmp"))) if where.is_dir() else 0
        state = f"only {drafts} unfinished ones" if drafts else "none" if where.is_dir() else "no such folder"
        raise CheckpointNotFound(f"{where}: expected a folder with a complete checkpoint, found {state}.")
    try:
        pointed = (where / LATEST).read_text().strip()
    except OSError:
        pointed = ""
    newest = next(reversed(present))
    return present.get(pointed, present[newest])


def previous(path: Path) -> Path | None:
    """The complete checkpoint before this one, to fall back to."""
    present = list(complete(path.parent).values())
    earlier = present[: present.index(path)] if path in present else []
    return earlier[-1] if earlier else None


def prune(root: Path, keep_last: int | None, keep: Callable[[Path], bool]) -> list[str]:
    """Remove complete checkpoints but the last `keep_last` and those for which `keep(path)`; the names removed."""
    if keep_last is None:
        return []
    removed = []
    for name, path in list(complete(root).items())[:-keep_last]:
        if not keep(path):
            scratch = root / f".{name}.{secrets.token_hex(3)}.tmp"  # invisible at once, whatever happens during removal
            os.rename(path, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            removed.append(name)
    return removed
