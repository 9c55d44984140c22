"""The folder of a run's checkpoints: complete checkpoints are visible, everything else is hidden.

    runs/7/                         a root
      step-00000100/                complete: manifest.json, .metadata, rank-00000.distcp, ...
      step-00000200/
      latest                        the name of the checkpoint saved last; while the next one is being renamed, a second line
                                    has the previous name. If `latest` is missing or wrong, zs.load takes the newest one
      .step-00000300.1f2e3d.draft/  a *draft*: being written (its lock is held), or left by a run that ended

A draft becomes a checkpoint by one rename. A save that replaces a checkpoint first renames the old one to `.NAME.TOKEN.old`,
which is found as NAME until the new one is in place. The next save removes drafts whose lock nobody holds. The *newest*
checkpoint has the highest step, and among equals the latest time, both read from manifests: copying changes times of files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from errno import EACCES, EAGAIN, EEXIST, ENOTEMPTY
from pathlib import Path

from ..errors import CheckpointError, CheckpointIncomplete, CheckpointNotFound, ConfigError
from ..utils.host import host_identity

MANIFEST, LATEST, LOCK = "manifest.json", "latest", "lock"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_NBYTES = 220  # filesystems allow 255; drafts and scratch files have longer names
_OLD = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{6}\.old")
_DRAFT = re.compile(r"\..+\.[0-9a-f]{6}\.draft")  # only drafts end so: exports and other scratch files end in .tmp
_BOTH = "latest-two"  # file in a draft that becomes `latest` until the draft is renamed
_DATA = "rank-*.distcp"  # data files of zs.save; other writers of DCP's format use other names
_TAKEN = "{} exists; save with overwrite=True, another step or name."
_PUT_BACK = f"Put the {MANIFEST} back from a copy, or move the folder away"
_HEAD_NBYTES = 1 << 16  # first bytes of a manifest, which have its step and time
_UNLOCKED_S = 24 * 3600.0  # where there are no locks, a draft untouched for this long counts as abandoned
_said: set[int] = set()  # filesystems (st_dev) for which the lack of locks has been printed


def plain_name(name: str) -> bool:
    """Return whether a name has only letters, digits, '.', '_' and '-', and is no reserved name of this folder."""
    return isinstance(name, str) and bool(_PLAIN.fullmatch(name)) and valid_name(name)


def valid_name(name: str) -> bool:
    """Return whether a checkpoint can have this name: one component of a path, one line of `latest`, and not reserved."""
    if not isinstance(name, str) or not name or name == LATEST or name.startswith(".") or name.endswith(".tmp"):
        return False
    return not set("/\\") & set(name) and name.isprintable() and name == name.strip() and len(name.encode()) <= _NAME_NBYTES


def absolute(path: str | os.PathLike) -> str:
    """Return the absolute path. `..` is kept: behind a symbolic link only the system can resolve it. Raises ConfigError."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"path: expected that of a folder, got {path!r:.80}; the order is path, model, optimizer.")
    return str(Path(path).absolute())


def remove(path: Path) -> None:
    """Remove a folder with its content, or only the link if it is a symbolic link. Errors are ignored: the rest stays."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_free(root: Path, name: str, overwrite: bool) -> None:
    """Raise CheckpointError if the name is taken: by a file or folder that is no checkpoint or, without `overwrite`, by any."""
    target = root / name
    if not os.path.lexists(target):
        return
    if not (target / MANIFEST).is_file():
        raise CheckpointError(f"{target} exists and is not a checkpoint, so zs.save keeps it; save with another step or name.")
    if not overwrite:
        raise CheckpointError(_TAKEN.format(target))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, content: bytes, *, named: bool = True) -> None:
    """Write a file atomically: it has all its content or does not exist. named: sync the folder too, to make the name durable."""
    # in the same folder: os.replace is atomic within a filesystem
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(3)}.tmp")
    # opened before: a rank that waits for the file may rename the folder (a draft) as soon as it sees the name
    folder = os.open(path.parent, os.O_RDONLY) if named else None
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        if folder is not None:
            os.fsync(folder)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    finally:
        if folder is not None:
            os.close(folder)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, and sync their names. Raises OSError, CheckpointError (a dangling link)."""
    missing = []
    while not path.exists():
        if path.is_symlink():
            where = os.readlink(path)
            raise CheckpointError(f"{path} is a link to {where}, which does not exist: make that folder, or remove the link.")
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a folder may be writable without being readable
            sync(folder.parent)


class Draft:
    """The hidden folder of a checkpoint that is being written; the process that writes it holds its lock."""

    def __init__(self, root: Path, name: str) -> None:
        """Make the folder and lock it. Raises OSError, CheckpointError."""
        self.root, self.name, self.token = root, name, secrets.token_hex(3)
        self.path = root / f".{name}.{self.token}.draft"
        self._lock: int | None = None
        make_folders(root)
        self.path.mkdir()
        try:
            (self.path / LOCK).touch(0o600)
            self._lock = hold(self.path / LOCK)
            (self.path / LOCK).write_text(json.dumps(_this_process()))  # for filesystems without locks: see `abandoned`
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        if self._lock is None and (device := root.stat().st_dev) not in _said:
            _said.add(device)
            print(
                f"zeroshard: {root}: this filesystem has no file locks (flock); files that a killed save leaves there are removed by a "
                "later save on the same host, or after a day",
                file=sys.stderr,
            )

    def publish(self, overwrite: bool = False, latest: bool = True) -> None:
        """Rename the draft to its name and, if `latest`, write the name to `latest`.

        Raise OSError, or CheckpointError if another save has taken the name meanwhile; nothing has changed then.

        `latest` is written first, with the previous name on a second line. A reader takes the first line that names a complete
        checkpoint, so the rename of the draft also switches `latest` from the second line to the first. If a checkpoint of this
        name is replaced, `latest` is written after the rename, since the first line would name the old one at once.
        """
        check_free(self.root, self.name, overwrite)
        target, old = self.root / self.name, self.root / f".{self.name}.{self.token}.old"
        pointer, replaces = self.root / LATEST, target.exists()
        before, present = pointer.read_bytes() if pointer.is_file() else None, complete(self.root)
        counts = next((name for name in _names_in_latest(self.root) if name in present), "")
        if latest:
            write_whole(self.path / LATEST, f"{self.name}\n".encode(), named=False)
        try:
            if latest and not replaces:
                both = "".join(f"{name}\n" for name in (self.name, counts) if name)
                write_whole(self.path / _BOTH, both.encode(), named=False)
            sync(self.path)  # make the names of its files durable before the rename
            if replaces:
                os.rename(target, old)
            elif latest:
                os.replace(self.path / _BOTH, pointer)
            os.rename(self.path, target)
            if latest:
                os.replace(target / LATEST, pointer)
            sync(self.root)
        except OSError as error:
            if error.errno in (EEXIST, ENOTEMPTY) and not replaces:  # another save took the name, and `latest` names it rightly
                raise CheckpointError(_TAKEN.format(target)) from error
            self._take_back(target, old, before)
            raise
        remove(old)  # only now: until `latest` and the folder are durable, the old checkpoint may be needed
        (target / LOCK).unlink(missing_ok=True)  # not earlier: a draft without its lock would count as abandoned
        self._unlock()

    def _take_back(self, target: Path, old: Path, pointed: bytes | None) -> None:
        """Undo the renames of a failed `publish` and restore `latest`, so that the next save finds the name free."""
        pointer = self.root / LATEST
        with suppress(OSError):
            if target.exists() and not self.path.exists():
                os.rename(target, self.path)
            if old.exists() and not target.exists():
                os.rename(old, target)
            if pointed is None:
                pointer.unlink(missing_ok=True)
            elif not pointer.is_file() or pointer.read_bytes() != pointed:
                write_whole(pointer, pointed)

    def discard(self) -> None:
        """Remove the draft and release its lock. Does nothing to a published checkpoint."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _this_process() -> dict[str, object]:
    """Identify this process: where its pid is unique (host, boot, pid namespace), its pid, and its start time (pids are reused)."""
    place = list(host_identity())
    with suppress(OSError):
        place.append(os.readlink("/proc/self/ns/pid"))
    return {"place": place, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def sweep(root: Path) -> None:
    """Remove abandoned drafts and the old folders of replaced checkpoints."""
    for path in sorted(root.glob(".*")):
        if _DRAFT.fullmatch(path.name) and (path.is_symlink() or (path.is_dir() and abandoned(path))):
            remove(path)
    for path in sorted(root.glob(".*.old")):
        found = _OLD.fullmatch(path.name)
        if found and (root / found["name"] / MANIFEST).exists():
            remove(path)
        elif found and not (root / found["name"]).exists():  # a run ended between the two renames of a replacement: undo it
            os.rename(path, root / found["name"])


def hold(path: Path) -> int | None:
    """Lock a file until the returned descriptor is closed or this process ends. None if the filesystem has no locks."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS grants exclusive locks only on descriptors open for writing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def held(path: Path) -> bool | None:
    """Return whether a process holds the lock on a file; None if this is unknown (no locks, no permission)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (EAGAIN, EACCES) else None
    finally:
        os.close(fd)
    return False


def abandoned(draft: Path) -> bool:
    """Return whether the process that made a draft has ended."""
    locked = held(draft / LOCK)
    if locked is not None:
        return not locked
    try:
        maker = json.loads((draft / LOCK).read_text())
        if maker["place"] == _this_process()["place"]:
            return _started(maker["pid"]) != maker["started"]
        touched = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
    except (OSError, ValueError, KeyError, TypeError):  # the draft is just being made or removed, or is not readable
        return False
    return time.time() - touched > _UNLOCKED_S


def complete(root: Path) -> dict[str, Path]:
    """Return complete checkpoints by name, the newest last: sorted by the steps, then the times, in their manifests."""
    found: dict[str, Path] = {}
    for path in root.iterdir() if root.is_dir() else ():
        old = _OLD.fullmatch(path.name)
        name = old["name"] if old else path.name
        if (old or valid_name(name)) and (path / MANIFEST).is_file() and not (old and name in found):
            found[name] = path
    ages = {name: age for name, path in found.items() if (age := _age(name, path)) is not None}
    return {name: found[name] for name in sorted(ages, key=ages.__getitem__)}


def _age(name: str, path: Path) -> tuple[int, str, int, str] | None:
    """Return a checkpoint's sort key (step, time, modification time, name). None if it has just been removed."""
    head, written = b"", 0
    try:
        written = (path / MANIFEST).stat().st_mtime_ns  # breaks ties, since the manifest's time is in whole seconds
        with open(path / MANIFEST, "rb") as file:
            head = file.read(_HEAD_NBYTES)
    except FileNotFoundError:
        return None
    except OSError:  # the manifest is not readable: take the step from the name, if it has one
        pass
    step, when = re.search(rb'"step":(\d+)', head), re.search(rb'"time":"([^"]*)"', head)
    named = re.fullmatch(r"step-(\d+)", name)
    number = int(step[1]) if step else int(named[1]) if named else -1
    return number, when[1].decode(errors="replace") if when else "", written, name


def find(where: Path, name: str | None = None) -> Path:
    """Return the path of a checkpoint: `name` in the folder `where`; without a name, `where` itself if it is a checkpoint, else
    the one in it that `latest` names, else the newest.

    Raises CheckpointNotFound, with the names of those that exist; CheckpointIncomplete if the named checkpoint, or every
    existing one, lacks its manifest.
    """
    if name is None and (where / MANIFEST).is_file():
        return where
    present = complete(where)
    if name is not None:
        if name in present:
            return present[name]
        if valid_name(name) and _lacks_manifest(where / name):
            raise _incomplete_error(where / name, f"complete are: {', '.join(present) or 'none'}")
        raise CheckpointNotFound(f"{where}: no complete checkpoint {name!r}; there are: {', '.join(present) or 'none'}.")
    if present:
        return present[next((named for named in _names_in_latest(where) if named in present), next(reversed(present)))]
    lacking = [where] if _lacks_manifest(where) else _incomplete(where)
    if lacking:
        before = ", ".join(path.name for path in lacking[:-1])
        raise _incomplete_error(lacking[-1], f"so do: {before}" if before else "")
    drafts = sum(bool(_DRAFT.fullmatch(path.name)) for path in where.iterdir()) if where.is_dir() else 0
    absent = "a file" if where.exists() else "no such folder"
    state = f"only {drafts} unfinished ones" if drafts else "none" if where.is_dir() else absent
    raise CheckpointNotFound(f"{where}: expected a folder with a complete checkpoint, found {state}.")


def passed_over(root: Path, found: Path) -> str:
    """Return a warning, with the number of lost steps, if `found` is not the checkpoint saved last; else "".

    If `latest` has two lines and no folder has the first name, that save was killed before its last rename: it never reported
    success, so nothing is lost.
    """
    names = [name for name in _names_in_latest(root) if valid_name(name)]
    if len(names) > 1 and not (root / names[0]).exists():
        del names[0]
    age = _age(found.name, found)
    at = -1 if age is None else age[0]
    beyond = [] if names else [path.name for path in _incomplete(root) if (_step_of(path.name) or -1) > at]
    name = next(iter(names), None) or next(reversed(beyond), None)
    if name is None or name in complete(root):
        return ""
    there, step = (root / name).exists(), _step_of(name)
    which = f"latest names {name}, which" if names else name
    why = f"has no {MANIFEST} and so is not complete" if there else "is not there"
    lost = ", and the steps since are lost" if step is None else ""
    if step is not None and step > at:
        lost = f", and {step - at:,} steps are lost"
    remedy = f" {_PUT_BACK}: no save takes its name." if there else ""
    return f"{root}: {which} {why}: {found.name} is taken in its place{lost}.{remedy}"


def _incomplete_error(path: Path, others: str) -> CheckpointIncomplete:
    what = f"{path} lacks its {MANIFEST}, which says what lies where, so it is no complete checkpoint"
    return CheckpointIncomplete(f"{what}{f' ({others})' if others else ''}. {_PUT_BACK}.")


def _lacks_manifest(path: Path) -> bool:
    """Return whether a folder has data files of a save and no manifest."""
    return path.is_dir() and not (path / MANIFEST).is_file() and any(path.glob(_DATA))


def _incomplete(root: Path) -> list[Path]:
    """Return the checkpoints in a root that lack their manifest, those of the highest step last."""
    there = root.iterdir() if root.is_dir() else ()
    found = [path for path in there if valid_name(path.name) and _lacks_manifest(path)]
    return sorted(found, key=lambda path: (_step_of(path.name) or -1, path.name))


def _step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, None if it is not named by its step."""
    return int(name.removeprefix("step-")) if re.fullmatch(r"step-\d{8,}", name) else None


def _names_in_latest(root: Path) -> list[str]:
    """Return the lines of `latest`: the checkpoint saved last, and perhaps the one before. [] if it cannot be read."""
    try:
        lines = (root / LATEST).read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def previous(path: Path) -> Path | None:
    """Return the complete checkpoint before this one, or None."""
    present = list(complete(path.parent).values())
    earlier = present[: present.index(path)] if path in present else []
    return earlier[-1] if earlier else None


def prune(root: Path, saved: str, keep_last: int | None, keep: Callable[[Path], bool]) -> None:
    """Remove complete checkpoints except `saved`, `keep_last - 1` others (None: all) and those for which `keep` is true.

    Checkpoints named by their step and those with other names are counted apart, so that periodic saves do not remove "best".
    Of the others, those of steps up to `saved`'s are kept before those of higher steps, and newer ones before older ones: a run
    can fall back to the former, while the latter are left from before it resumed from an earlier checkpoint.
    """
    if keep_last is None:
        return
    present = complete(root)
    steps = {name: age[0] for name, path in present.items() if (age := _age(name, path)) is not None}
    alike = (name for name in steps if name != saved and (_step_of(name) is None) == (_step_of(saved) is None))
    others = [(name, present[name]) for name in alike]
    others.sort(key=lambda other: steps[other[0]] <= steps.get(saved, -1))  # stable: still by age within both
    for name, path in others[: max(len(others) + 1 - keep_last, 0)]:
        if not keep(path):
            # hidden at once; if this is killed, the next save removes it
            scratch = root / f".{name}.{secrets.token_hex(3)}.draft"
            os.rename(path, scratch)
            remove(scratch)
