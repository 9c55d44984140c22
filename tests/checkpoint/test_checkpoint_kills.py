"""Checkpoints and processes. B06: ranks are killed at any point of a save; the last complete one loads, and what was left goes.

    starter (fresh process)    fork 2 ranks | a save has begun: wait at random, kill | fork 2 ranks | ...
    ranks                      load the newest, compare with what was noted before that save | train, note, save, train, save ...

Random moments find what was not thought of. That no moment is missed shows the second test, where a process dies at its
first, second, ... call of the system that changes something on the disk. All runs are forks of one fresh process.
"""

import hashlib
import itertools
import json
import os
import random
import select
import signal
import threading
import time
import traceback
from pathlib import Path

import numpy
import pytest
import torch
from checkpoint_kit import LowRank, build, snapshot, train
from residence import Peak

import zeroshard as zs
from zeroshard.checkpoint import directory
from zeroshard.checkpoint.file_writer import BUFFER_NBYTES, ROTATING
from zeroshard.comm.launch import run_processes
from zeroshard.tiers.io.async_file import Syscalls

SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
KILLS = 200 if SLOW else 20
WORLD = 2
# by the clock, and so for a machine that serves twenty others as well: whatever hangs is ended all the same
PATIENCE_S = 1100


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that a checkpoint holds of a model (collective)."""
    saved, digest = snapshot(model, optimizer), hashlib.sha256()
    states = {f"{name}.{key}": value for name, state in saved.states.items() for key, value in state.items()}
    for name, value in sorted({**saved.weights, **states}.items()):
        digest.update(f"{name} {torch.as_tensor(value).tolist()}".encode())
    return digest.hexdigest()


def small(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = LowRank(24)
    return model.requires_grad_(True)


def made() -> tuple:
    return build(small(0), stall_timeout_s=60.0)


def batch_of(step: int) -> list:
    generator = torch.Generator().manual_seed(step)
    return [[(torch.randn(4, 24, generator=generator),) for _ in range(WORLD)]]


def check_last(root: Path, notes: Path, rank: int, model, optimizer) -> int:
    """Load the newest complete checkpoint and compare with the note that was made before it was saved; its step."""
    complete = directory.complete(root)
    if not complete:
        return 0
    step = zs.load(root, model, optimizer).step
    assert step == max(int(name.removeprefix("step-")) for name in complete), "the newest"
    noted = dict(line.split() for line in notes.read_text().splitlines())
    assert fingerprint(model, optimizer) == noted[str(step)], f"step {step} is not what was saved"
    return step


def live(rank: int, store: str, root: Path, notes: Path, asynchronous: bool, begun: int) -> None:
    """A rank until it is killed. Says on the pipe when its second save begins."""
    join_group(store, "kill", rank)
    model, optimizer = made()
    step = check_last(root, notes, rank, model, optimizer)
    previous = 0.0  # seconds of the last save
    for number in itertools.count():
        train(model, optimizer, rank, batch_of(step))
        step += 1
        noted = fingerprint(model, optimizer)
        if rank == 0:
            with notes.open("a") as file:
                file.write(f"{step} {noted}\n")
        begin = time.monotonic()
        if number == 1:
            os.write(begun, f"{previous:.6f}\n".encode())
        save = zs.save(root, model, optimizer, step=step, keep_last=2, overwrite=True, asynchronous=asynchronous)
        train(model, optimizer, rank, batch_of(-1)) if asynchronous else None  # while it is written: not what is saved
        save.wait()
        previous = time.monotonic() - begin
        assert rank or not list(root.glob(".*")), "what earlier runs left is gone"
        if asynchronous:
            zs.load(root, model, optimizer)


def forked(body, *args) -> int:
    child = os.fork()
    if child:
        return child
    try:
        body(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_often(root: str, kills: int, seed: int) -> dict:
    """Returns what was seen."""
    draw, where, seen = random.Random(seed), Path(root) / "run", {"kills": 0, "torn": 0, "steps": 0}
    notes = Path(root) / "notes"
    notes.touch()
    for number in range(kills):
        reader, writer = os.pipe()
        (Path(root) / f"run{number}").mkdir()
        args = (f"{root}/run{number}", where, notes, number % 2 == 1, writer)
        children = [forked(live, r, *args) for r in range(WORLD)]
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], PATIENCE_S)
        said = os.read(reader, 100) if ready else b""
        if said:
            time.sleep(draw.uniform(0, 0.9) * float(said.split()[0]))
        for child in children:
            os.kill(child, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.close(reader)
        assert said and ends == [-signal.SIGKILL] * WORLD, f"run {number} ended by itself: {ends}"
        seen["kills"] += 1
        seen["torn"] += bool(list(where.glob(".*.draft")))
    model, optimizer = build_alone()
    seen["steps"] = check_last(where, notes, 0, model, optimizer)
    zs.save(where, model, optimizer, name="last")
    assert not list(where.glob(".*"))
    return seen


def warm_up(root: Path) -> None:
    """What torch imports when it is first used, forked ranks then need not import."""
    model, optimizer = build_alone()
    train(model, optimizer, 0, batch_of(0))
    zs.save(root, model, optimizer)
    zs.load(root, model, optimizer)
    zs.close(model)


def build_alone() -> tuple:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return made()


# -- at every call -------------------------------------------------------------------------------------------------------

CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open")


class Doom:
    """Kills this process before its n-th call that changes the disk; counts them."""

    def __init__(self) -> None:
        self.left, self.lock = -1, threading.Lock()

    def count(self) -> None:
        with self.lock:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """From now on."""
        for name in CALLS:
            setattr(os, name, self._counting(getattr(os, name)))
        plain = Syscalls.pwritev
        Syscalls.pwritev = lambda *args: (self.count(), plain(*args))[1]

    def _counting(self, plain):
        return lambda *args, **kwargs: (self.count(), plain(*args, **kwargs))[1]


def die_at_every_call(root: str) -> int:
    """At its n-th call a process replaces a checkpoint, removes an old one, and dies. Returns how many n there were."""
    model, optimizer = build_alone()
    where, noted = Path(root) / "run", {}
    for step, name in enumerate(("other", "pinned")):
        train(model, optimizer, 0, batch_of(step))
        noted[step] = fingerprint(model, optimizer)
        zs.save(where, model, optimizer, name=name, step=step)
    zs.close(model)
    for number in itertools.count(1, 1 if SLOW else 2):
        child = forked(replace_one, where, noted, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return number - 1
        assert code == -signal.SIGKILL, f"call {number}: {code}"


def replace_one(where: Path, noted: dict[int, str], number: int) -> None:
    """See above. Whatever died before: there is a newest complete checkpoint, and it is one of the two."""
    model, optimizer = made()
    step = zs.load(where, model, optimizer).step
    assert fingerprint(model, optimizer) == noted[step]
    names = directory.complete(where).keys()
    for name in [name for name in ("other", "pinned") if name not in names]:  # what is removed, and what is replaced
        zs.save(where, model, optimizer, name=name, step=step)
    doom = Doom()
    doom.watch()
    doom.left = number
    zs.save(where, model, optimizer, name="pinned", step=step, overwrite=True, keep_last=1)
    doom.left = -1
    left = sorted(path.name for path in where.iterdir())
    assert left == ["latest", "pinned"], left


# -- processes that end as they should -----------------------------------------------------------------------------------


def join_group(root: str, name: str, rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD))
    store = f"file://{root}/store-{name}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)


def with_random_numbers(rank: int, root: str, kind: str) -> None:
    """torch's, Python's and NumPy's generators are drawn from in every step; writes down the last losses and the weights."""
    join_group(root, kind, rank)
    if kind == "whole":  # in a resumed run, whatever was drawn before the load does not matter
        torch.manual_seed(7 + rank), random.seed(8 + rank), numpy.random.seed(9 + rank)
    module = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    model, optimizer = build(module, stage=3)
    if kind == "resumed":
        assert zs.load(f"{root}/generators", model, optimizer).rng == "restored"
    seen = []
    for step in range(3 if kind == "resumed" else 0, 5):
        if step == 3 and kind == "whole":
            zs.save(f"{root}/generators", model, optimizer)
        noise = torch.rand(4, 5) + random.random() + float(numpy.random.rand())
        loss = model(noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    result = seen[-2:], {name: value.tolist() for name, value in zs.full_state_dict(model).items()}
    Path(f"{root}/{kind}-{rank}").write_text(repr(result))


def draw_again(root: str) -> dict[str, str]:
    """What each rank of both runs saw."""
    for kind in ("whole", "resumed"):
        wait_for([forked(with_random_numbers, rank, root, kind) for rank in range(WORLD)])
    return {f"{kind}-{rank}": Path(f"{root}/{kind}-{rank}").read_text() for kind in ("whole", "resumed") for rank in range(WORLD)}


def wait_for(children: list[int]) -> None:
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)


def over_a_network(rank: int, root: str) -> None:
    """Ranks that do not share memory: a round trip; then a call by one rank only (B03)."""
    join_group(root, "network", rank)
    options = {"comm": "dist", "stall_timeout_s": 10.0}
    for asynchronous in (False, True):
        model, optimizer = build(small(0), **options)
        train(model, optimizer, rank, batch_of(0))
        zs.save(f"{root}/network", model, optimizer, name=f"{asynchronous}", asynchronous=asynchronous).wait()
        saved = fingerprint(model, optimizer)
        zs.close(model)
        model, optimizer = build(small(1), **options)
        zs.load(f"{root}/network", model, optimizer)
        assert fingerprint(model, optimizer) == saved
    try:
        zs.save(f"{root}/network", model, optimizer) if rank == 0 else train(model, optimizer, rank, batch_of(0))
    except zs.ZeroshardError as error:
        assert "Rank 0 called zs.save() in step" in str(error) and "and rank 1 did not: call it on all ranks" in str(error), error
        return
    raise AssertionError("a call by one rank only was not noticed")


def outlive(rank: int, root: str) -> None:
    """Rank 1 is killed while both write: rank 0 neither publishes nor waits for it, and can end."""
    join_group(root, "outlive", rank)
    model, optimizer = build(small(0), stall_timeout_s=3600.0)  # it does not wait until it misses rank 1
    if rank == 1:
        Syscalls.pwritev = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    save = zs.save(f"{root}/outlived", model, optimizer, asynchronous=True)
    save._thread.join()
    assert "ranks [1] ended before they had written their parts" in str(save._error)
    try:
        save.wait()
    except zs.PeerFailed:
        return
    raise AssertionError("a peer that was killed was not noticed")


def survive(root: str) -> list[int]:
    """How both ended."""
    children = [forked(outlive, rank, root) for rank in range(WORLD)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def leave_at_once(root: str) -> None:
    """The program ends while a save is under way, and nobody waits for it."""
    model, optimizer = build_alone()
    train(model, optimizer, 0, batch_of(0))
    plain = Syscalls.pwritev
    Syscalls.pwritev = lambda *args: (time.sleep(0.3), plain(*args))[1]
    save = zs.save(f"{root}/left", model, optimizer, name="x", asynchronous=True)
    assert not save.done()
    threading._shutdown()  # what the interpreter does first when it ends


def works_in_little_memory(root: str) -> tuple[int, ...]:
    """(bytes of the model, resident bytes beyond it at the peak of a load that verifies before, of one on the way, of a save)."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(48)))
    nbytes = sum(param.numel() * 4 for param in model.parameters())
    model, _ = zs.shard(model, None, stage=3)
    if not Path(f"{root}/large").exists():
        zs.save(f"{root}/large", model)
    peaks = []
    for verify in ("before", True):
        with Peak() as peak:
            zs.load(f"{root}/large", model, verify=verify)
        peaks.append(peak.added_nbytes)
    with Peak() as peak:
        zs.save(f"{root}/again", model, overwrite=True)
    return nbytes, *peaks, peak.added_nbytes


def in_little_memory(root: str) -> tuple[int, ...]:
    build_alone()
    reader, writer = os.pipe()
    for _ in range(2):  # the first process saves, and its peak is that of the save
        wait_for([forked(lambda: os.write(writer, json.dumps(works_in_little_memory(root)).encode() + b"\n"))])
    return tuple(json.loads(os.read(reader, 1000).splitlines()[-1]))


# -- the tests -------------------------------------------------------------------------------------------------------------


def start(rank: int, world: int, root: str, kills: int) -> dict:
    """The fresh process."""
    torch.set_num_threads(1)
    warm_up(Path(root) / "warm")
    network = [forked(over_a_network, rank, root) for rank in range(WORLD)]  # it mostly waits: beside the others
    seen = {"kills": kill_often(root, kills, 1), "drawn": draw_again(root), "memory": in_little_memory(root)}
    wait_for([forked(leave_at_once, root)])
    seen["survived"] = survive(root)
    wait_for(network)
    return seen | {"calls": die_at_every_call(f"{root}/calls")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    (found,) = run_processes(start, 1, str(root), KILLS)
    return found | {"root": root}


pytestmark = [
    pytest.mark.processes,
    pytest.mark.limit(1200 if SLOW else 240),
    # each kill ends a forked copy of one started process: hundreds of fresh ones would take hours. Elsewhere test_checkpoint_damage
    # loads what such kills leave behind
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a kill ends a forked process"),
]


def test_b06_killed_at_random_points_of_a_save_the_last_complete_one_loads(seen):
    """Half of the saves beside training. More than a few of the kills must have hit a save, or nothing was shown."""
    found = seen["kills"]
    assert found["kills"] == KILLS and found["torn"] >= KILLS // 10, found
    assert KILLS <= found["steps"] <= 2 * KILLS, found


def test_b06_killed_before_any_call_of_a_save_a_complete_one_loads(seen):
    """One process that replaces a checkpoint and removes the one before, killed before each (here: every second) of its calls."""
    assert seen["calls"] > 12


def test_random_generators_of_each_rank_go_on(seen):
    drawn = seen["drawn"]
    assert [drawn[f"resumed-{rank}"] for rank in range(WORLD)] == [drawn[f"whole-{rank}"] for rank in range(WORLD)]
    assert drawn["whole-0"].split("]")[0] != drawn["whole-1"].split("]")[0], "ranks draw different numbers"


def test_a_program_that_ends_lets_its_save_end(seen):
    assert list(directory.complete(seen["root"] / "left")) == ["x"]
    model, optimizer = made()
    assert zs.load(seen["root"] / "left", model, optimizer).step == 1
    zs.close(model)


def test_b05_the_survivor_of_a_save_beside_training_does_not_wait_for_the_dead(seen):
    assert seen["survived"] == [0, -signal.SIGKILL]
    assert not directory.complete(seen["root"] / "outlived")


def test_b03_over_a_network_a_round_trip_and_a_call_by_one_rank_only(seen):
    """What was seen there is asserted there; here, that it came so far: the call that failed left nothing."""
    assert sorted(directory.complete(seen["root"] / "network")) == ["False", "True"]


def test_c13_a_load_takes_a_few_buffers_beside_the_model(seen):
    """Not a second copy of what is loaded (201 MB here), or (verified on the way) one at most, and what is read at a time."""
    nbytes, before, on_the_way, _ = seen["memory"]
    assert nbytes == 48 * 4 << 20 and before < 40 << 20 and on_the_way < nbytes + (60 << 20), seen["memory"]


def test_a_save_takes_its_buffers_beside_the_model(seen):
    """ROTATING of BUFFER_NBYTES: 64 MiB, whatever the model's size."""
    nbytes, *_, saving = seen["memory"]
    assert ROTATING * BUFFER_NBYTES // 2 < saving < ROTATING * BUFFER_NBYTES + (16 << 20) < nbytes, seen["memory"]
