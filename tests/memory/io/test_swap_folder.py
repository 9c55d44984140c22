"""SwapFolder: refused at once where it cannot serve; gone when its process is gone, however that ends."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from zeroshard.errors import ConfigError, SwapError
from zeroshard.tiers.io import Engine, SwapFolder, measure, swap_folder
from zeroshard.tiers.io.filesystems import filesystem_of


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """Folders of pytest may lie in memory; tests of what that means set it back."""
    monkeypatch.setattr(swap_folder, "filesystem_of", lambda path: "ext4")


def make(path, **options) -> SwapFolder:
    return SwapFolder(path, **{"rank": 0, "needed_nbytes": 1000, **options})


def abandoned(parent: Path, name: str = "zeroshard-swap-host-7-0123abcd", lock: str | None = "7\n", age_s: float = 0) -> Path:
    """A folder as a killed process leaves it."""
    folder = parent / name
    folder.mkdir()
    (folder / "data").write_bytes(bytes(100_000))
    if lock is not None:
        (folder / "lock").write_text(lock)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


# --------------------------------------------------------------------------------------------------- files, and the end


def test_files_live_and_go_with_the_folder(tmp_path):
    folder, source = make(tmp_path, rank=3), torch.randn(10_000)
    assert re.fullmatch(r"zeroshard-swap-.+-\d+-[0-9a-f]{8}", folder.path.name) and folder.path.parent == tmp_path
    with Engine() as engine:
        file = folder.file("masters", source.nbytes)
        engine.write(file, 0, source).wait()
        out = torch.empty_like(source)
        engine.read(file, 0, out).wait()
    assert torch.equal(out, source)
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "masters"]
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        folder.file("more", 1)


def test_a_dropped_folder_is_removed_and_a_kept_one_stays(tmp_path):
    make(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with make(tmp_path, keep=True) as kept:
        kept.file("data", 5000)
    assert (kept.path / "data").stat().st_size == 5000
    make(tmp_path).close()
    assert (kept.path / "data").exists()


def test_a_folder_that_somebody_removed_is_no_error_at_the_end(tmp_path):
    folder = make(tmp_path)
    (folder.path / "lock").unlink()
    folder.path.rmdir()
    folder.close()


@pytest.mark.parametrize("name", ["", "a/b", "..", "lock", "keep"])
def test_names_of_files_are_plain_and_new(tmp_path, name):
    with make(tmp_path) as folder:
        with pytest.raises(ValueError, match="plain"):
            folder.file(name, 1)
        folder.file("one", 1)
        with pytest.raises(ValueError, match="already"):
            folder.file("one", 1)


def test_a_relative_path_holds_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make(".")
    monkeypatch.chdir("/")
    folder.file("data", 1)
    folder.close()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ preflight


def refused(path, **options) -> str:
    with pytest.raises(SwapError) as caught:
        make(path, **{"rank": 5, **options})
    assert isinstance(caught.value, ConfigError) and "rank 5" in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_b22_missing_and_not_a_folder(tmp_path):
    assert "mkdir" in refused(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "not a folder" in refused(tmp_path / "file")
    assert "does not exist" in refused(tmp_path / "file" / "below")


def test_b22_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    nobody = os.geteuid() == 0  # root may write everywhere
    try:
        for above in [tmp_path, *tmp_path.parents][1:4] if nobody else []:
            if above.owner() == "root" and above.stat().st_mode & 0o777 == 0o700:
                above.chmod(0o711)
        os.seteuid(65534) if nobody else None
        message = refused(tmp_path)
    finally:
        os.seteuid(0) if nobody else None
        tmp_path.chmod(0o700)
    assert "not readable and writable by user" in message and "chmod" in message


@pytest.mark.parametrize(
    "number, says",
    [(errno.EROFS, "read-only"), (errno.ENOSPC, "no space"), (errno.EDQUOT, "no space"), (errno.ENOLCK, "lock")],
)
def test_b22_what_the_system_answers_when_the_folder_is_made(tmp_path, monkeypatch, number, says):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock" if number == errno.ENOLCK else "pathlib.Path.mkdir", refuse)
    assert says in refused(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_b22_read_only(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert "mounted read-only" in refused(tmp_path)


def test_b22_too_small(tmp_path):
    space = os.statvfs(tmp_path)
    free_nbytes = space.f_bavail * space.f_frsize
    needed = free_nbytes + (50 << 30)
    message = refused(tmp_path, needed_nbytes=needed)
    assert f"{needed} bytes" in message and "GiB) are free" in message and "larger disk" in message
    message = refused(tmp_path, needed_nbytes=1000, host_needed_nbytes=needed)
    assert f"{needed} bytes" in message and "by all ranks of this host, 1000 by this one" in message


def test_b22_in_memory(capsys, monkeypatch):
    monkeypatch.setattr(swap_folder, "filesystem_of", filesystem_of)
    if filesystem_of("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")  # another filesystem is refused for another reason, or not at all
    message = refused("/dev/shm")
    assert "tmpfs, which is memory" in message and "any_filesystem=True" in message
    with make("/dev/shm", any_filesystem=True) as folder:
        folder.file("data", 100)
    lines = [line for line in capsys.readouterr().err.splitlines() if "any_filesystem" in line]
    assert len(lines) == 1 and "tmpfs" in lines[0]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre", "9p"])
def test_b22_on_the_network(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(swap_folder, "filesystem_of", lambda path: kind)
    message = refused(tmp_path)
    assert f"{kind}, which is not a disk of this host" in message and "any_filesystem=True" in message
    theirs, ours = abandoned(tmp_path), abandoned(tmp_path, f"zeroshard-swap-{swap_folder._host()}-7-0123abcd")
    make(tmp_path, any_filesystem=True).close()
    assert theirs.exists() and not ours.exists()  # locks of other hosts may not be visible here
    assert kind in capsys.readouterr().err


MOUNTS = r"""22 27 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 0:30 / /data rw - xfs /dev/vdb rw
41 27 0:31 / /data rw - nfs4 server:/export rw
42 27 0:32 / /data\040of\040mine rw - tmpfs tmpfs rw
43 41 0:33 / /data/fast rw - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    "path, kind",
    [("/", "ext4"), ("/home/x", "ext4"), ("/data", "nfs4"), ("/data/y", "nfs4"), ("/data of mine/z", "tmpfs"),
     ("/data/fast", "fuse.sshfs"), ("/data/faster", "nfs4"), ("/database", "ext4")],
)  # fmt: skip
def test_the_filesystem_is_that_of_the_innermost_and_latest_mount(monkeypatch, path, kind):
    monkeypatch.setattr(Path, "read_text", lambda self, **_: MOUNTS)
    monkeypatch.setattr(os.path, "realpath", lambda path: str(path))
    assert filesystem_of(path) == kind


# ------------------------------------------------------------------------------------------------------------ leftovers


def test_leftovers_go_and_the_bytes_are_told(tmp_path, capsys):
    folders = [abandoned(tmp_path, f"zeroshard-swap-my-host-{n}-0123abcd") for n in (1, 2)]
    space = sum(os.stat(folder / "data").st_blocks * 512 for folder in folders)
    make(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    (line,) = capsys.readouterr().err.splitlines()
    told = int(re.search(r"(\d+) bytes freed", line)[1])
    assert "2 swap folders" in line and str(tmp_path) in line and space <= told < space + 20_000


def test_what_is_no_leftover_stays(tmp_path, capsys):
    alive = make(tmp_path)
    others = [
        abandoned(tmp_path, "zeroshard-swap"),
        abandoned(tmp_path, "zeroshard-swap-host-7-0123abc"),
        abandoned(tmp_path, "my-zeroshard-swap-host-7-0123abcd"),
        abandoned(tmp_path, "zeroshard-swap-host-1-0123abcd", lock=None),  # may be in the making
        abandoned(tmp_path, "zeroshard-swap-host-2-0123abcd", lock=""),
    ]
    link = tmp_path / "zeroshard-swap-host-3-0123abcd"
    link.symlink_to(abandoned(tmp_path, "precious"))
    make(tmp_path).close()
    assert alive.path.exists() and link.is_symlink() and (tmp_path / "precious" / "data").exists()
    assert all((folder / "data").exists() for folder in others)
    assert capsys.readouterr().err == ""
    alive.close()


@pytest.mark.parametrize("lock", [None, ""])
def test_what_was_never_finished_goes_after_a_minute(tmp_path, lock):
    folder = abandoned(tmp_path, lock=lock, age_s=100)
    make(tmp_path).close()
    assert not folder.exists()


def test_many_at_once_remove_leftovers_and_never_each_other(tmp_path, capsys):
    failures, begin = [], threading.Barrier(4)

    def rank(number: int) -> None:
        try:
            begin.wait()
            for turn in range(25):
                with contextlib.suppress(FileExistsError, FileNotFoundError):  # a cleaner, or another rank, was faster
                    abandoned(tmp_path, f"zeroshard-swap-host-{turn % 3}-{turn:08x}")
                with make(tmp_path, rank=number) as folder:
                    folder.file("data", 10)
                    time.sleep(1e-4)
                    assert sorted(os.listdir(folder.path)) == ["data", "lock"]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    make(tmp_path).close()
    left = list(tmp_path.iterdir())
    assert all(not (folder / "lock").exists() for folder in left)  # made by two at once: without a lock, and young


def test_a_cleaner_that_is_faster_than_the_maker(tmp_path, monkeypatch):
    """Somebody removes the folder between its lock's making and its locking: the maker takes another name."""
    real, removed = fcntl.flock, []

    def late(fd, flags):
        if not removed:
            (folder,) = tmp_path.iterdir()
            removed.append(folder)
            shutil.rmtree(folder)
        real(fd, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = make(tmp_path)
    assert removed and folder.path != removed[0] and (folder.path / "lock").exists()

    theirs = abandoned(tmp_path)

    def other_cleaner(fd, flags):
        shutil.rmtree(theirs)
        real(fd, flags)

    monkeypatch.setattr(fcntl, "flock", other_cleaner)
    assert swap_folder.remove_leftovers(tmp_path) == 0  # nothing that this one has freed
    monkeypatch.undo()
    folder.close()


def test_a_removal_that_is_cut_short_can_be_taken_up_again(tmp_path, monkeypatch):
    """The lock goes last: what is left is still seen to be a leftover."""
    folder, real = abandoned(tmp_path), os.unlink

    def fail(path):
        raise OSError(errno.EIO, "as if killed") if "data" in str(path) else real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        make(tmp_path, keep=True).close()
    assert (folder / "lock").exists()
    make(tmp_path).close()
    assert not folder.exists()


LIVES = """
import multiprocessing, os, sys, time
from zeroshard.io import SwapFolder
from zeroshard.tiers.io import swap_folder as swap
swap.filesystem_of = lambda path: "ext4"

def use():
    folder = SwapFolder(sys.argv[1], rank=0, needed_nbytes=0)
    folder.file("data", 1 << 20, reserve=True)
    return folder

def tell(*words):  # in one write, shorter than PIPE_BUF: lines of two processes do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

folder = use()
held = []
child = multiprocessing.get_context("fork").Process(target=lambda: held.append(use()))  # removes its own when it ends
child.start(), child.join()
assert os.listdir(sys.argv[1]) == [folder.path.name]
if os.fork() == 0:
    sys.exit()  # does not remove that of its parent
os.wait()
pid = os.fork()
if pid == 0:
    folder = use()
    tell("child", os.getpid(), folder.path)
    time.sleep(1000)
tell("parent", os.getpid(), folder.path)
sys.stdin.readline()
raise KeyError("on purpose")
"""


def told_by(process: subprocess.Popen) -> tuple[str, tuple[int, Path]]:
    """Who says its process id and its folder. What else a process may print is passed over."""
    for line in iter(process.stdout.readline, ""):
        who, *words = line.split() or [""]
        if who in ("parent", "child"):
            return who, (int(words[0]), Path(words[1]))
    raise AssertionError(f"the process ended: {process.communicate()[1]}")


@pytest.mark.processes
@pytest.mark.limit(60)
def test_b22_folders_of_live_processes_stay_those_of_killed_ones_go(tmp_path, capsys):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LIVES, str(tmp_path)], start_new_session=True, **pipes)
    try:
        told = dict(told_by(process) for _ in range(2))  # in any order
        (_, parents), (pid, childs) = told["parent"], told["child"]
        make(tmp_path).close()
        assert (parents / "data").stat().st_size == (childs / "data").stat().st_size == 1 << 20
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while childs.exists() and time.monotonic() < deadline:  # until the kernel has ended it
            make(tmp_path).close()
        assert list(tmp_path.iterdir()) == [parents]
        (line,) = capsys.readouterr().err.splitlines()
        assert (1 << 20) <= int(re.search(r"(\d+) bytes freed", line)[1]) < (1 << 20) + 10_000
        _, stderr = process.communicate("go\n")
        assert process.returncode == 1 and "on purpose" in stderr, stderr
        assert list(tmp_path.iterdir()) == []  # an error of the program is an end like others
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children, too
        process.communicate()


# ---------------------------------------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("nbytes", [1000, 10 << 20, 64 << 20])
def test_a_short_probe_of_the_disk(tmp_path, nbytes):
    read, write = measure(tmp_path, nbytes)
    assert read > 0 and write > 0
    assert list(tmp_path.iterdir()) == []
