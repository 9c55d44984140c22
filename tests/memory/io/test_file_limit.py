"""EFBIG: a file larger than the process, or the filesystem, allows. Whoever meets it says which limit that is and what to do."""

import contextlib
import copy
import errno
import resource

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.comm.rendezvous import Door
from zeroshard.comm.transport import ProcessTransport
from zeroshard.errors import CheckpointWriteError, OffloadIOError, io_remedy
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import open_file

LIMIT = 1 << 20
SAID = r"EFBIG \(File too large\).*no file larger than 1,048,576 bytes \(ulimit -f\): raise that limit for all ranks"


@contextlib.contextmanager
def limited():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(rank, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), **options)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("what", ["save", "asynchronous save", "safetensors"])
def test_what_is_saved(what, tmp_path):
    def run(rank):
        model, optimizer = trained(rank)
        before = copy.deepcopy(zs.full_state_dict(model))
        path = tmp_path / "saved"
        if rank == 0:
            limits.enter_context(limited())
        model._zeroshard.comm.exchange(b"", "limited")
        kind = OffloadIOError if what == "safetensors" else CheckpointWriteError
        with pytest.raises(kind, match=SAID) as caught:
            if what == "safetensors":
                zs.save_safetensors(model, path)
            else:
                zs.save(path, model, optimizer, asynchronous=what != "save").wait()
        assert "check that the folder" not in str(caught.value) and "are free" not in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in zs.full_state_dict(model).items())

    with contextlib.ExitStack() as limits:
        run_threads(2, run)


def test_what_is_offloaded(tmp_path):
    with limited(), pytest.raises(OffloadIOError, match=SAID):
        trained(0, offload_optimizer=zs.Offload("nvme", path=str(tmp_path), any_filesystem=True))


def test_files_of_the_engine(tmp_path):
    with limited():
        with pytest.raises(OffloadIOError, match=f"making {LIMIT + 1} bytes of .*{SAID}"):
            open_file(tmp_path / "large", LIMIT + 1, create=True)
        open_file(tmp_path / "small", LIMIT, create=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_memory_that_ranks_share_is_a_file():
    door = Door()
    transport = ProcessTransport(0, door, [door.address])
    with (
        limited(),
        pytest.raises(
            zs.ZeroshardError, match=rf"2,097,152 bytes of memory that the ranks of this host share.*{SAID}.*comm='dist'"
        ),
    ):
        transport.export(2 * LIMIT)
    transport.close()


def test_a_limit_of_the_filesystem():
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit of its own")
    assert io_remedy(errno.EFBIG).startswith("the filesystem takes no file of that size: choose a folder on another one")
