"""A collective verb is over when it returns: what a rank does next, even waiting for others, holds up no peer."""

import gc
import os
import resource
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers import seeded
from met_ranks import world as connected_world

import zeroshard as zs
from zeroshard.comm import transport
from zeroshard.comm.launch import run_processes
from zeroshard.comm.rendezvous import Door
from zeroshard.comm.shared_memory import SharedComm
from zeroshard.errors import MalformedMessage

WIDTH = 1024  # each rank sends 2 MB of the weight: ten times what a socket holds


def made(comm, seed=0, **options):
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)), seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zs.shard(model, optimizer, stage=3, comm=comm, **options)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    zs.full_gradients(model)
    dist.barrier()
    return model, optimizer


def verbs_then_barriers(rank, world_size, comm, folder):
    """After each verb, ranks meet in a barrier of torch's own, where they serve nobody; descriptors that are left."""
    dist.init_process_group("gloo")
    model, optimizer = made(comm, seed=rank, stall_timeout_s=3600.0)  # other values: rank 0's go to all
    weight = model[0].weight

    def gathered():
        with zs.gathered(model, write=True), torch.no_grad():
            model[0].weight.mul_(0.5)

    for verb in (
        lambda: weight.full_tensor(), lambda: weight.grad.full_tensor(), lambda: zs.full_gradients(model),
        lambda: zs.full_state_dict(model), lambda: zs.full_optimizer_state(model), gathered,
        lambda: zs.save(folder, model, optimizer), lambda: zs.load(folder, model, optimizer),
        lambda: zs.save_safetensors(model, f"{folder}/model.safetensors"), optimizer.step,
        lambda: zs.close(model),
    ):  # fmt: skip
        verb()
        dist.barrier()
    with zs.init(stage=3, comm=comm):
        born = torch.nn.Linear(WIDTH, WIDTH)
    born.weight.full_tensor()
    dist.barrier()
    dist.destroy_process_group()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.processes
@pytest.mark.parametrize("comm", ["shared", "dist"])
def test_verbs_followed_by_a_barrier_of_torchs_own(comm, tmp_path):
    assert len(run_processes(verbs_then_barriers, 2, comm, str(tmp_path / "run"))) == 2  # nobody hangs


def uneven_waits(rank, world_size, comm, folder):
    """Rank 0 sleeps after the verb until rank 1 has its result, too."""
    dist.init_process_group("gloo")
    model, _ = made(comm, stall_timeout_s=3600.0)
    dist.barrier()
    model[0].weight.full_tensor()
    if rank == 1:
        open(f"{folder}/has it", "w").close()
    while not os.path.exists(f"{folder}/has it"):
        time.sleep(0.01)
    dist.barrier()
    zs.close(model)
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("comm", ["shared", "dist"])
def test_a_rank_that_sleeps_after_a_verb_holds_up_nobody(comm, tmp_path):
    assert run_processes(uneven_waits, 2, comm, str(tmp_path)) == [None, None]


# -- the transport -----------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    ends = connected_world([Door(), Door()])
    yield ends
    for end in ends:
        end.close()


def received(end, count, seconds=50.0):
    """So many messages, or what has come by then."""
    found, deadline = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        item = end.receive(0.1)
        found += [] if item is None else [item[1]]
    return found


def test_many_small_messages_arrive_though_the_sender_does_nothing_more(pair):
    """A socket holds some 300 of them."""
    messages = [("ready", number) for number in range(5000)]
    for message in messages:
        pair[0].send(1, message)
    assert pair[0].unsent()
    assert received(pair[1], len(messages)) == messages
    while pair[0]._writer is not None:
        time.sleep(0.01)
    assert not pair[0].unsent()


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, transport._LARGE_NBYTES, 3_000_000])
def test_bytes_of_any_length_arrive_in_order(pair, nbytes):
    content = os.urandom(nbytes)
    sent = [(kind, number, content) for number in range(20) for kind in ("one", "two")]
    both = [threading.Thread(target=lambda a=a: [pair[a].send(1 - a, message) for message in sent]) for a in (0, 1)]
    for thread in both:
        thread.start()
    for end in pair:
        assert received(end, len(sent)) == sent
    for thread in both:
        thread.join()


def test_large_messages_leave_no_descriptors_behind(pair):
    """Neither when they are read, nor when their receiver ends, nor their sender."""
    gc.collect()  # descriptors of earlier tests would be closed meanwhile
    before, content = len(os.listdir("/proc/self/fd")), bytes(1 << 20)
    for _ in range(50):
        pair[0].tell(("x", content))
        assert received(pair[1], 1) == [("x", content)]
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in range(5000):
        pair[0].send(1, ("x", 1))
    for _ in range(5):
        pair[0].send(1, ("x", content))
        pair[1].send(0, ("x", content))
    pair[1].receive(0.1)
    pair[1].close()
    assert ("lost", "its process exited or was killed") in received(pair[0], 6)
    pair[0].close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_descriptor_that_is_not_what_was_announced(pair):
    descriptor = os.memfd_create("short")
    os.write(descriptor, b"short")
    data = transport.encode(("exchange", "label", 1 << 40))
    socket.send_fds(pair[0]._peers[1], [transport._HEADER.pack(len(data), True) + data], [descriptor])
    os.close(descriptor)
    with pytest.raises(MalformedMessage, match="bytes and sent 5"):
        pair[1].receive(1.0)


def test_no_descriptor_left_to_receive_with_is_an_error_that_says_so(pair):
    pair[0].send(1, ("x", bytes(1 << 20)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/", os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))  # all below are taken
    try:
        with pytest.raises(zs.ZeroshardError, match="too many files are open"):
            pair[1].receive(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_exchange_has_left_this_rank_when_it_returns(pair):
    """Also what no thread could be started for."""
    comms = [SharedComm(end, torch.device("cpu"), 10.0) for end in pair]
    content, left = os.urandom(100_000), {}

    def talk(rank):
        for _ in range(30):  # below what goes through memory, beyond what a socket holds
            comms[rank].exchange(content, "hello")
            assert not pair[rank].unsent()
        left[rank] = True

    pair[0]._writer = pair[1]._writer = threading.current_thread()
    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == {0: True, 1: True}


def interrupted(rank, world_size):
    """Rank 0's own alarm ends a wait for a gather, and its program goes on with the same forward."""
    dist.init_process_group("gloo")
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    batch = torch.ones(2, 64)
    expected = model(batch).detach()
    model, _ = zs.shard(model, None, stage=3, units=["Linear"], comm="dist", prefetch_nbytes=0, overlap=False)
    torch.testing.assert_close(model(batch), expected)
    dist.barrier()
    alarmed = False
    if rank == 0:

        def late(*_):
            raise TimeoutError("the program's own limit")

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            model(batch)
        except TimeoutError:
            alarmed = True
    else:
        time.sleep(1.0)
    torch.testing.assert_close(model(batch), expected)
    dist.barrier()
    dist.destroy_process_group()
    return alarmed


@pytest.mark.processes
def test_a_wait_that_a_signal_has_ended_can_be_repeated():
    assert run_processes(interrupted, 3) == [True, False, False]
