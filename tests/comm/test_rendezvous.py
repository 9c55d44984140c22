"""Who may speak to a rank: the processes that the process group has named, whatever else connects meanwhile."""

import contextlib
import os
import pickle
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from met_ranks import world

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.comm.rendezvous import Door
from zeroshard.comm.shared_memory import SharedComm
from zeroshard.comm.transport import ProcessTransport

# elsewhere ranks never meet so: they take torch.distributed, which test_failures and test_collective_ends try as comm="dist"
pytestmark = pytest.mark.skipif(
    not hasattr(socket, "SO_PEERCRED") or not hasattr(os, "memfd_create"), reason="ranks meet so on Linux alone"
)
# only root can become another user; that another process of this user is shown out is tested for everybody
as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to become another user")
NOBODY = 65534


class Harm:
    """Makes a folder if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def raised_by(what):
    with pytest.raises(Exception) as caught:
        what()
    return caught.value


def payload(rank, path):
    """What was taken for a peer once: a rank's number, a length, a pickle."""
    message = pickle.dumps(("exchange", "zs.shard", Harm(path)))
    return struct.pack("<II", rank, len(message)) + message


@contextlib.contextmanager
def other_process(work, user=None):
    """A process, of another user if one is named, that does `work(say)` during the block; gives its first word."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if user is not None:
                os.setgroups([]), os.setgid(user), os.setuid(user)
            work(lambda word: os.write(writer, word))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        yield os.read(reader, 1000)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def connected(address, data=b""):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(address)
    sock.sendall(data)
    return sock


def speak(ends):
    """All is as if nobody else had been there."""
    comms = [SharedComm(end, torch.device("cpu"), 10.0) for end in ends]
    got = {}
    talk = lambda rank: got.update({rank: comms[rank].exchange(b"%d" % rank, "hello")})  # noqa: E731
    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {rank: [b"%d" % other for other in range(len(ends))] for rank in range(len(ends))}
    for comm in comms:
        comm.leave()


def is_closed(sock):
    try:
        while sock.recv(1000):
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@as_root
def test_another_user_before_the_late_peer_is_shown_out(tmp_path):
    """With the peer's number and a pickle, as often as it likes: nothing is run, the peer is served."""
    tmp_path.chmod(0o777)
    mine = [Door(), Door()]
    address, _ = mine[0].address

    def work(say):
        socks = [connected(address, payload(1, tmp_path / "made")) for _ in range(50)]
        say(b"come")
        if all(is_closed(sock) for sock in socks):
            time.sleep(60)

    def wait():
        time.sleep(0.5)

    with other_process(work, NOBODY) as word:
        assert word == b"come"
        speak(world(mine, before_last=wait))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", ["payload", "nothing", "half", "noise", "much"])
def test_another_process_of_this_user_is_shown_out(data, tmp_path):
    """Whatever it says, or if it says nothing: the peer is served all the while."""
    mine = [Door(), Door()]
    reader, writer = os.pipe()
    sent = {
        "payload": payload(1, tmp_path / "made"), "nothing": b"", "half": struct.pack("<I", 1) + b"n" * 10,
        "noise": os.urandom(100), "much": struct.pack("<I", 1) + b"n" * 100_000,
    }[data]  # fmt: skip

    def work(say):
        socks = [connected(mine[0].address[0]) for _ in range(100)]
        say(b"come")
        for sock in socks:
            with contextlib.suppress(ConnectionError):  # it was shown out already
                sock.sendall(sent[:50_000])
        os.write(writer, b"shown out" if all(is_closed(sock) for sock in socks) else b"let in")

    with other_process(work) as word:
        assert word == b"come"
        speak(world(mine, before_last=lambda: time.sleep(0.5)))
        assert os.read(reader, 100) == b"shown out"
    assert not list(tmp_path.iterdir())
    os.close(reader), os.close(writer)


def test_a_process_that_the_group_has_not_named_is_refused_on_both_sides():
    mine = [Door(), Door()]
    ends = world(mine, places=[(door.address[0], os.getppid()) for door in mine], timeout_s=1.0)
    assert isinstance(ends[0], zs.StallError) and "ranks [1] have not connected" in str(ends[0])
    assert isinstance(ends[1], zs.PeerFailed) and ends[1].rank == 0 and "another process" in str(ends[1])
    mine = [Door(), Door()]
    ends = world(mine, places=[mine[0].address, (mine[1].address[0], os.getppid())], timeout_s=1.0)
    assert isinstance(ends[0], zs.StallError) and "ranks [1] have not connected" in str(ends[0])


@pytest.mark.parametrize("user", [None, NOBODY], ids=["this user", "another user"])
def test_an_impostor_behind_a_ranks_address_learns_nothing(user):
    """Not even the caller's rank; the caller is told."""
    if user is not None and os.getuid() != 0:
        pytest.skip("needs root, to become another user")  # the case of this user runs
    reader, writer = os.pipe()

    def work(say):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"")
        listener.listen()
        say(listener.getsockname())
        sock, _ = listener.accept()
        sock.settimeout(3)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := sock.recv(1000):
                heard += part
        os.write(writer, struct.pack("<I", len(heard)) + heard)

    with other_process(work, user) as address:
        error = raised_by(lambda: ProcessTransport(1, Door(), [(address, os.getpid()), (b"unused", 0)], 10.0))
        assert isinstance(error, zs.PeerFailed) and "another process" in str(error), error
        assert os.read(reader, 100_000) == struct.pack("<I", 0)
    os.close(reader), os.close(writer)


def test_nobody_can_take_an_address_first():
    """The kernel chooses it when the door is made; it is told afterwards."""
    door = Door()
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address, _ = door.address
    assert address.startswith(b"\0") and address != Door().address[0]
    assert isinstance(raised_by(lambda: other.bind(address)), OSError)
    other.close(), door.close()


def test_a_rank_that_has_gone_is_named():
    gone = Door()
    gone.close()
    error = raised_by(lambda: ProcessTransport(1, Door(), [gone.address, (b"unused", 0)], 5.0))
    assert isinstance(error, zs.PeerFailed) and error.rank == 0


def late_rank(rank, world_size, folder):
    """A rank of a training, the last of which is late. The folder tells addresses, as /proc/net/unix does."""
    listen, connect = socket.socket.listen, ProcessTransport.__init__

    def told(self, *args):
        listen(self, *args)
        if self.family == socket.AF_UNIX:
            scratch = Path(folder, f".{rank}.{self.fileno()}")
            scratch.write_bytes(self.getsockname())
            scratch.rename(Path(folder, f"{rank}.{self.fileno()}"))

    def late(*args, **options):
        time.sleep(1.5)
        connect(*args, **options)

    socket.socket.listen = told
    ProcessTransport.__init__ = late if rank == 1 else connect
    torch.distributed.init_process_group("gloo")
    model, _ = zs.shard(torch.nn.Linear(3, 2), None, stage=3)
    total = float(model.weight.full_tensor().sum())
    zs.close(model)
    torch.distributed.destroy_process_group()
    return total


@pytest.mark.processes
@as_root
def test_a_training_whose_host_has_another_user(tmp_path):
    """It connects to every socket of this training before the late rank can, and says that it is that rank."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with tempfile.TemporaryDirectory() as folder:  # others see nothing in tmp_path
        os.chmod(folder, 0o755)

        def work(say):
            say(b"ready")
            seen, socks = set(), []
            while True:
                for path in set(Path(folder).glob("[01].*")) - seen:
                    seen.add(path)
                    with contextlib.suppress(ConnectionError):  # it has been closed
                        socks.append(connected(path.read_bytes(), payload(1, tmp_path / "made")))
                        os.write(writer, b".")
                time.sleep(0.01)

        with other_process(work, NOBODY):
            totals = run_processes(late_rank, 2, folder)
    assert totals[0] == totals[1] and not list(tmp_path.iterdir())
    assert os.read(reader, 1000), "it did not get to try"
    os.close(reader), os.close(writer)


def test_three_ranks_meet_in_any_order():
    speak(world([Door(), Door(), Door()], before_last=lambda: time.sleep(0.2)))
