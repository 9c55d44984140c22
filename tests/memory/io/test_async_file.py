"""The file engine: what is read is what was written, at any offset and alignment; every fault is raised, none hidden.

Files lie on a real disk (direct I/O) and in /dev/shm (the buffered fallback). Faults are injected below the engine, in
place of preadv and pwritev.
"""

import errno
import gc
import itertools
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from faulty_disk import Faults, fails
from hypothesis import given, settings
from hypothesis import strategies as st

import zeroshard as zs
from zeroshard.errors import OffloadIOError, ZeroshardError
from zeroshard.tiers.io import ALIGN, Engine, Syscalls, async_file, empty_aligned, open_file
from zeroshard.tiers.io.async_file import Checksums
from zeroshard.tiers.io.filesystems import MEMORY_FILESYSTEMS, filesystem_of

NBYTES = 5 * ALIGN + 1234  # of most files: neither whole blocks nor a round number
BLOCK_NBYTES = 2 * ALIGN  # pieces are small, so that small requests have several


@pytest.fixture(scope="module")
def disk():
    """A folder on a filesystem with direct I/O: where pytest keeps its own, or beside this file."""
    for place in (tempfile.gettempdir(), Path(__file__).parent):
        if filesystem_of(place) not in MEMORY_FILESYSTEMS:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                file = open_file(Path(folder) / "probe", ALIGN, create=True)
                file.close()
                if file.direct:
                    yield Path(folder)
                    return
    pytest.skip("no filesystem with direct I/O here")  # what falls back to buffered I/O is tested on /dev/shm below


@pytest.fixture(scope="module")
def shm():
    if filesystem_of("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")  # the only filesystem without direct I/O that is there without mounting one
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def engine():
    with Engine(threads=3, block_nbytes=BLOCK_NBYTES) as engine:
        yield engine


_names = itertools.count()


def make(folder: Path, nbytes: int = NBYTES):
    return open_file(folder / f"file{next(_names)}", nbytes, create=True)


def random_bytes(nbytes: int, misalignment: int = 0) -> torch.Tensor:
    """Bytes that begin `misalignment` bytes after an aligned address."""
    whole = empty_aligned(nbytes + misalignment)
    return whole[misalignment:].random_(0, 256)


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


# -------------------------------------------------------------------------------------------- what comes back is right

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
requests = st.lists(
    st.tuples(
        st.booleans(),  # write, else read
        st.integers(0, NBYTES) | st.sampled_from([0, ALIGN, 2 * ALIGN - 1, 3 * ALIGN + 8]),  # offset
        st.integers(0, NBYTES) | st.sampled_from([1, ALIGN, 2 * ALIGN]),  # bytes
        st.sampled_from(DTYPES),
        st.sampled_from([0, 8, 64, 1024]),  # misalignment of the memory
    ),
    max_size=12,
)


@pytest.mark.parametrize("place, checksum", [("disk", False), ("disk", True), ("shm", False)])
@settings(max_examples=40)
@given(requests=requests)
def test_any_requests_equal_a_bytearray(request, place, checksum, requests):
    folder = request.getfixturevalue(place)
    file, model = make(folder), bytearray(NBYTES)
    with Engine(threads=2, block_nbytes=BLOCK_NBYTES, checksum=checksum) as engine:
        for number, (writes, offset, nbytes, dtype, misalignment) in enumerate(requests):
            numel = min(nbytes, NBYTES - offset) // dtype.itemsize
            tensor = random_bytes(numel * dtype.itemsize, misalignment).view(dtype)
            end = offset + tensor.nbytes
            if writes:
                engine.write(file, offset, tensor).wait()
                model[offset:end] = content(tensor)
            else:
                engine.read(file, offset, tensor).wait()
                assert content(tensor) == model[offset:end], number
    file.close()
    assert Path(file.path).read_bytes() == model  # in size, too
    os.unlink(file.path)


def test_parts_of_a_file_that_was_there_before_are_kept(disk, engine):
    """A last block that is not whole: written around, and the file keeps its size."""
    path, before = disk / "old", random.Random(0).randbytes(2 * ALIGN + 100)
    path.write_bytes(before)
    file = open_file(path, 2 * ALIGN + 60)  # less than there is
    source = random_bytes(50)
    engine.write(file, 2 * ALIGN + 10, source).wait()
    file.close()
    assert path.read_bytes() == before[: 2 * ALIGN + 10] + content(source) + before[2 * ALIGN + 60 :]


@pytest.mark.parametrize("files_of_the_path", [1, 2])
def test_neighbours_in_one_block_written_at_once(disk, files_of_the_path):
    """Edges of a block are read, changed and written one after the other, also through two Files of one path."""

    def slow(mode, file, offset, nbytes):
        if mode == "read":
            time.sleep(2e-4)  # between reading a block and writing it: time for a neighbour to interfere

    generator = random.Random(0)
    cuts = sorted({0, NBYTES, *(generator.randrange(NBYTES) for _ in range(60))})
    file = make(disk)
    handles = [file, open_file(file.path, NBYTES)][:files_of_the_path]
    with Engine(threads=8, block_nbytes=BLOCK_NBYTES, calls=Faults(slow)) as engine:
        for _ in range(3):
            source, extents = random_bytes(NBYTES), list(itertools.pairwise(cuts))
            generator.shuffle(extents)
            running = [engine.write(handles[i % files_of_the_path], a, source[a:b]) for i, (a, b) in enumerate(extents)]
            for handle in running:
                handle.wait()
            out = torch.empty_like(source)
            engine.read(file, 0, out).wait()
            assert torch.equal(out, source)


def test_two_readers_and_a_writer_of_neighbouring_bytes(disk, engine):
    file, mine, theirs = make(disk, ALIGN), random_bytes(1000), random_bytes(1000)
    engine.write(file, 500, mine).wait()
    for _ in range(30):
        out = torch.empty_like(mine)
        running = [engine.write(file, 1500, theirs), engine.read(file, 500, out)]
        for handle in running:
            handle.wait()
        assert torch.equal(out, mine)


def test_any_contiguous_tensor_on_the_cpu_will_do(disk, engine):
    file = make(disk)
    plain = torch.randn(3, 5, 7)
    for tensor in (plain, plain.mean(), plain.clone().requires_grad_(), torch.empty(0), plain > 0, plain[1]):
        out = torch.zeros_like(tensor)
        engine.write(file, 3, tensor).wait()
        engine.read(file, 3, out).wait()
        assert torch.equal(out, tensor)


def test_a_buffer_can_still_be_released_after_a_request(disk, engine):
    """`tensor.numpy()` would forbid `resize_` of its storage for ever."""
    file, tensor = make(disk), torch.randn(1000)
    engine.write(file, 0, tensor).wait()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="released"):
        engine.read(file, 0, tensor)


def test_memory_that_is_not_aligned_passes_through_little_of_another(disk):
    """Whatever the size of a piece: each thread has 1 MiB, and no request is lost at its ends."""
    seen = []

    class Sizes(Syscalls):
        def preadv(self, file, buffers, offset):
            seen.append(buffers[0].nbytes)
            return super().preadv(file, buffers, offset)

        def pwritev(self, file, buffers, offset):
            seen.append(buffers[0].nbytes)
            return super().pwritev(file, buffers, offset)

    nbytes = 5 * async_file._BOUNCE_NBYTES // 2 + 4321
    file, source, back = make(disk, nbytes + 999), random_bytes(nbytes, 64), random_bytes(nbytes, 128)
    with Engine(threads=1, calls=Sizes()) as engine:
        engine.write(file, 999, source).wait()
        engine.read(file, 999, back).wait()
    assert torch.equal(source, back) and max(seen) == async_file._BOUNCE_NBYTES
    file.close()


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_b22_an_error_of_the_device_is_raised_by_every_wait_and_no_other_request(disk, mode, number):
    file, source = make(disk), random_bytes(NBYTES)
    with Engine(threads=2, block_nbytes=BLOCK_NBYTES, calls=Faults(fails(mode, 3 * ALIGN, number))) as engine:
        good = engine.write(file, 0, source[:ALIGN])
        bad = getattr(engine, mode)(file, 0, source)
        also_good = getattr(engine, mode)(file, 0, source[: 2 * ALIGN])
        for _ in range(2):
            with pytest.raises(OffloadIOError) as caught:
                bad.wait()
        error = caught.value
        assert (error.file, error.offset, error.errno) == (file.path, 2 * ALIGN, number)  # the piece that failed
        for part in (file.path, str(2 * ALIGN), errno.errorcode[number], "folder"):
            assert part in str(error)
        good.wait()
        also_good.wait()
        assert bad.done() and good.done()


def test_the_rest_of_a_failed_request_is_spared(disk):
    faults = Faults(fails("write", 0, errno.EIO))
    with Engine(threads=1, block_nbytes=ALIGN, calls=faults) as engine, pytest.raises(OffloadIOError):
        engine.write(make(disk, 64 * ALIGN), 0, random_bytes(64 * ALIGN)).wait()
    assert len(faults.calls) == 1


def test_what_goes_wrong_in_the_engine_itself_is_an_error_too(disk):
    def rule(mode, file, offset, nbytes):
        raise KeyError("surprise")

    with Engine(calls=Faults(rule)) as engine, pytest.raises(OffloadIOError, match="surprise"):
        engine.write(make(disk), 0, random_bytes(100)).wait()


def test_a_file_that_cannot_be_cut_to_its_size_is_an_error_of_its_last_request(disk, monkeypatch):
    gate = threading.Event()
    with Engine(threads=1, calls=Faults(lambda *_: gate.wait() and None)) as engine:
        file = make(disk)
        handle = engine.write(file, 0, random_bytes(NBYTES))
        file.close()
        monkeypatch.setattr(os, "ftruncate", lambda *_: os.close(-1))  # fails, too
        gate.set()
        with pytest.raises(OffloadIOError, match="closing"):
            handle.wait()
        monkeypatch.undo()


def test_an_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(OffloadIOError("/nvme/file", 4096, errno.EIO, "reading")))
    assert (error.file, error.offset, error.errno) == ("/nvme/file", 4096, errno.EIO)
    assert "reading of /nvme/file" in str(error)


@pytest.mark.parametrize("place", ["disk", "shm"])
@pytest.mark.parametrize("most_nbytes", [4096, 5000, 8191])
def test_short_transfers_are_continued(request, place, most_nbytes):
    file, source = make(request.getfixturevalue(place)), random_bytes(NBYTES)
    faults = Faults(lambda mode, file, offset, nbytes: most_nbytes)
    with Engine(threads=2, block_nbytes=4 * ALIGN, calls=faults) as engine:
        engine.write(file, 0, source).wait()
        out = torch.empty_like(source)
        engine.read(file, 0, out).wait()
    assert torch.equal(out, source) and len(faults.calls) > 6


@pytest.mark.parametrize("place", ["disk", "shm"])
@pytest.mark.parametrize("mode", ["read", "write"])
def test_transfers_without_progress_end_in_an_error(request, place, mode):
    file = make(request.getfixturevalue(place))
    stuck = Faults(lambda called, file, offset, nbytes: 0 if called == mode else None)
    with Engine(block_nbytes=BLOCK_NBYTES, calls=stuck) as engine, pytest.raises(OffloadIOError):
        getattr(engine, mode)(file, 0, random_bytes(NBYTES)).wait()


@pytest.mark.parametrize("mode", ["read", "write"])
def test_less_than_a_block_at_a_time_is_no_progress_for_direct_io(disk, mode):
    stuck = Faults(lambda called, file, offset, nbytes: 100 if called == mode else None)
    with Engine(block_nbytes=BLOCK_NBYTES, calls=stuck) as engine, pytest.raises(OffloadIOError):
        getattr(engine, mode)(make(disk), 0, random_bytes(BLOCK_NBYTES)).wait()


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_calls_are_made_again(disk, number):
    file, source, out = make(disk), random_bytes(NBYTES), torch.empty(NBYTES, dtype=torch.uint8)
    with Engine(block_nbytes=BLOCK_NBYTES, calls=Faults(fails("write", 5000, number, times=3))) as engine:
        engine.write(file, 0, source).wait()
        engine.read(file, 0, out).wait()
    assert torch.equal(out, source)


def test_a_device_that_is_busy_for_ever_is_an_error(disk, monkeypatch):
    monkeypatch.setattr(async_file, "_AGAIN_S", 0.02)
    with Engine(calls=Faults(fails("write", 0, errno.EAGAIN))) as engine, pytest.raises(OffloadIOError, match="EAGAIN"):
        engine.write(make(disk), 0, random_bytes(ALIGN)).wait()


@pytest.mark.parametrize("place", ["disk", "shm"])
def test_a_removed_file_stays_readable_and_a_cut_one_is_an_error(request, place, engine):
    file, source = make(request.getfixturevalue(place)), random_bytes(NBYTES)
    engine.write(file, 0, source).wait()
    os.truncate(file.path, ALIGN + 10)
    os.unlink(file.path)
    out = torch.empty_like(source)
    engine.read(file, 0, out[: ALIGN + 10]).wait()
    assert torch.equal(out[: ALIGN + 10], source[: ALIGN + 10])
    with pytest.raises(OffloadIOError, match="ENODATA.*cut") as caught:
        engine.read(file, 0, out).wait()
    assert caught.value.errno == errno.ENODATA and caught.value.offset >= ALIGN


@pytest.mark.parametrize("where", [0, 1, 3 * ALIGN + 5, NBYTES - 1])
def test_checksums_find_what_was_changed_behind_the_engine(disk, where):
    file, source = make(disk), random_bytes(NBYTES)
    with Engine(block_nbytes=BLOCK_NBYTES, checksum=True) as engine:
        engine.write(file, 0, source).wait()
        out = torch.empty_like(source)
        engine.read(file, 0, out).wait()
        with open(file.path, "r+b") as other:
            other.seek(where)
            other.write(bytes([content(source)[where] ^ 1]))
        with pytest.raises(OffloadIOError, match="wrong checksum") as caught:
            engine.read(file, 0, out).wait()
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.offset == where // BLOCK_NBYTES * BLOCK_NBYTES
        engine.write(file, 0, source).wait()  # written anew, it is right again
        engine.read(file, 0, out).wait()
        assert torch.equal(out, source)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=20))
def test_a_checksum_is_forgotten_as_soon_as_a_byte_of_its_extent_is_written(extents):
    checksums, model = Checksums(), {}
    checksums._CELL_NBYTES = 8
    for number, (start, nbytes) in enumerate(extents):
        end = start + nbytes
        checksums.forget(start, end)
        model = {extent: crc for extent, crc in model.items() if extent[1] <= start or end <= extent[0]}
        checksums.record(start, end, number)
        model[start, end] = number
        for extent in itertools.product(range(45), range(62)):
            if extent[0] < extent[1] and extent[0] % 7 == number % 7:
                assert checksums.expected(*extent) == model.get(extent)
        for extent, crc in model.items():
            assert checksums.expected(*extent) == crc


# ---------------------------------------------------------------------------------------------------- opening, closing


def test_opening_says_what_is_wrong(disk, shm):
    with pytest.raises(OffloadIOError, match="ENOENT") as caught:
        open_file(disk / "nowhere", 10)
    assert caught.value.errno == errno.ENOENT and caught.value.file == str(disk / "nowhere")
    with pytest.raises(OffloadIOError, match="ENOENT"):
        open_file(disk / "no folder" / "file", 10, create=True)
    (disk / "short").write_bytes(bytes(100))
    with pytest.raises(OffloadIOError, match="ENODATA"):
        open_file(disk / "short", 101)
    with pytest.raises(ValueError, match="nbytes"):
        open_file(disk / "negative", -1, create=True)
    with pytest.raises(OffloadIOError, match="ENOSPC.*more room"):  # tmpfs refuses at once and takes nothing
        open_file(shm / "huge", 1 << 50, create=True, reserve=True)
    assert not (shm / "huge").exists()


def test_a_new_file_takes_no_space_unless_it_is_reserved(disk):
    sparse = open_file(disk / "sparse", 1 << 40, create=True)
    assert os.stat(sparse.path).st_blocks == 0
    reserved = open_file(disk / "reserved", 1 << 20, create=True, reserve=True)
    assert os.stat(reserved.path).st_blocks * 512 >= 1 << 20
    reserved.sync()
    sparse.close()
    os.unlink(sparse.path)


def test_a_filesystem_without_direct_io_is_used_and_named_once(shm, disk, monkeypatch, capsys):
    monkeypatch.setattr(async_file, "_buffered", set())
    assert not make(shm).direct and not make(shm).direct
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "no direct I/O" in lines[0] and str(shm) in lines[0]

    real = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")  # as overlayfs and some network filesystems
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert not make(disk).direct and not make(disk).direct
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_is_closed_when_the_last_request_has_ended(disk):
    gate = threading.Event()
    file, source = make(disk), random_bytes(NBYTES)
    with Engine(threads=1, calls=Faults(lambda *_: gate.wait() and None)) as engine:
        handle = engine.write(file, 0, source)
        file.close()
        file.close()
        os.fstat(file.fd)  # still open: the number must not serve another file meanwhile
        with pytest.raises(ValueError, match="closed"):
            engine.read(file, 0, source)
        gate.set()
        handle.wait()
    with pytest.raises(OSError):
        os.fstat(file.fd)
    assert Path(file.path).read_bytes() == content(source)


def test_a_file_that_is_forgotten_is_closed(disk, engine):
    file = make(disk)
    engine.write(file, 0, random_bytes(100)).wait()
    fd = file.fd
    del file
    while os.path.exists(f"/proc/self/fd/{fd}"):
        gc.collect()  # the thread lets go of the request just after it is done


def test_a_file_that_must_not_be_written_can_be_read(disk, engine, monkeypatch):
    path, before = disk / "read-only", random.Random(1).randbytes(5000)
    path.write_bytes(before)
    real = os.open

    def refuse(path, flags, *more):
        if flags & os.O_RDWR:
            raise OSError(errno.EACCES, "Permission denied")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    file, out = open_file(path, 5000), torch.empty(5000, dtype=torch.uint8)
    engine.read(file, 0, out).wait()
    assert content(out) == before
    with pytest.raises(OffloadIOError, match="EBADF"):
        engine.write(file, 0, out).wait()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda e, f: e.read(f, 0, torch.empty(4, 4).t()), "contiguous"),
        (lambda e, f: e.read(f, 0, torch.empty(4, device="meta")), "CPU"),
        (lambda e, f: e.read(f, -1, torch.empty(4)), "within"),
        (lambda e, f: e.write(f, NBYTES - 3, torch.empty(1)), "within"),
    ],
)
def test_misuse_is_refused_at_once(disk, engine, wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong(engine, make(disk))


@pytest.mark.parametrize("settings", [{"threads": 0}, {"block_nbytes": 0}, {"block_nbytes": 5000}])
def test_wrong_settings_of_an_engine(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Engine(**settings)


# -------------------------------------------------------------------------------------------------- threads and lives


def test_threads_start_late_and_end_with_the_engine(disk):
    engine = Engine(threads=2)
    assert engine._running == []
    engine.write(make(disk), 0, random_bytes(100)).wait()
    running = list(engine._running)
    assert len(running) == 2 and all(thread.daemon for thread in running)
    engine.close()
    engine.close()
    assert not any(thread.is_alive() for thread in running)
    with pytest.raises(ZeroshardError, match="closed"):
        engine.write(make(disk), 0, random_bytes(100))

    dropped = Engine(threads=2)
    handle = dropped.write(make(disk), 0, random_bytes(NBYTES))
    running = list(dropped._running)
    del dropped
    gc.collect()
    handle.wait()  # what was asked for is done
    for thread in running:
        thread.join()  # the test's limit ends it


def test_closing_finishes_what_was_asked_for(disk):
    file, source = make(disk), random_bytes(NBYTES)
    engine = Engine(threads=1, block_nbytes=ALIGN, calls=Faults(lambda *_: time.sleep(1e-3)))
    handles = [engine.write(file, 0, source) for _ in range(3)]
    engine.close()
    assert all(handle.done() for handle in handles)


def test_requests_are_served_in_order_of_arrival(disk):
    faults = Faults(lambda *_: None)
    with Engine(threads=1, block_nbytes=ALIGN, calls=faults) as engine:
        file, source = make(disk, 8 * ALIGN), random_bytes(2 * ALIGN)
        offsets = [4 * ALIGN, 0, 6 * ALIGN, 2 * ALIGN]
        for handle in [engine.write(file, offset, source) for offset in offsets]:
            handle.wait()
    assert [call[1] for call in faults.calls] == [o + i for o in offsets for i in (0, ALIGN)]


def test_a_tensor_lives_until_its_request_is_done_and_no_longer(disk):
    gate = threading.Event()
    with Engine(threads=2, calls=Faults(lambda *_: gate.wait() and None)) as engine:
        source = random_bytes(NBYTES)
        expected, alive = content(source), weakref.ref(source)
        file = make(disk)
        handle = engine.write(file, 0, source)
        del source
        gc.collect()
        assert alive() is not None and not handle.done()
        gate.set()
        handle.wait()
        gc.collect()
        assert alive() is None
    file.close()
    assert Path(file.path).read_bytes() == expected


def test_the_names_that_users_see():
    """The page lists its members, and mkdocs renders them; the room has further names for the house."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "io.md").read_text()
    [members] = re.findall(r"members: \[(.*)\]", page)
    assert set(zs.io.__all__) == {*members.split(", "), "ALIGN", "OffloadIOError", "SwapError"}
    assert set(zs.io.__all__) == {name for name in vars(zs.io) if not name.startswith("_")}


LIVES = """
import os, sys, time, torch
from zeroshard.io import Engine, Syscalls, open_file

file, engine = open_file(sys.argv[1], 10000, create=True), Engine(threads=2)
source, out = torch.arange(10000, dtype=torch.uint8), torch.zeros(10000, dtype=torch.uint8)
engine.write(file, 0, source).wait()
child = os.fork()
if child == 0:  # has none of the threads
    engine.read(file, 0, out).wait()
    engine.close()
    os._exit(17 if torch.equal(out, source) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
engine.read(file, 0, out).wait()
assert torch.equal(out, source)

class Stuck(Syscalls):
    def pwritev(self, file, buffers, offset):
        time.sleep(1000)

stuck = Engine(calls=Stuck())
handle = stuck.write(file, 0, source)
time.sleep(0.05)
child = os.fork()
if child == 0:
    try:
        handle.wait()
    except RuntimeError as error:
        os._exit(18 if "fork" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 18
print("end")
"""


@pytest.mark.processes
@pytest.mark.limit(60)
def test_engines_survive_a_fork_and_do_not_hold_up_the_exit(disk):
    command = [sys.executable, "-c", LIVES, str(disk / "lives")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_request_that_is_over_holds_neither_its_file_nor_its_tensor(disk, engine, monkeypatch):
    """However late the thread that moved its last piece forgets it: who drops the file then finds the descriptor closed."""
    plain, forget = async_file.Handle._piece_done, threading.Event()

    def late(handle):
        plain(handle)
        assert forget.wait(30)

    monkeypatch.setattr(async_file.Handle, "_piece_done", late)
    try:
        file, data = make(disk, ALIGN), random_bytes(ALIGN)
        fd, kept = file.fd, weakref.ref(data)
        request = engine.write(file, 0, data)
        request.wait()
        del file, data
        assert kept() is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        request.wait()  # again, without its file
    finally:
        forget.set()
