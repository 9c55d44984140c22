"""A rank fails, leaves or stands still: what the others are told, on shared memory and over gloo, in real processes.

Whoever waits hears which rank it was first and what it said, once; of a stall where every rank stands, and the stack of
the one that computes. Every run has a hard time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import seeded
from torch import nn

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.comm.launch import free_port, rank_environment, run_processes
from zeroshard.diagnostics import endings
from zeroshard.diagnostics.flight_recorder import describe
from zeroshard.engine.comm.base import Region
from zeroshard.engine.comm.desk import GONE, Failure
from zeroshard.engine.comm.progress import Progress
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

COMMS = ("shared", "dist")
STALL_S, NEVER_S = 3.0, 3600.0  # longer than any test may take: what ends sooner was told, and not missed
TRACEBACK = "Traceback (most recent call last)"


class Block(nn.Module):
    """A layer that may do something else first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.before = None

    def forward(self, x):
        if self.before is not None:
            self.before()
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    """Blocks, in an order that may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


def dawdle_in_the_tokenizer():
    time.sleep(9.0)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose_the_image():
    raise KeyError("no such image")


def train(rank: int, comm: str, culprit: int, what, stage: int = 3, steps: int = 8) -> None:
    """A loop in which the rank `culprit` does something in its third step."""
    model = seeded(Net)
    model, optimizer = zs.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, comm=comm, stall_timeout_s=NEVER_S if what in (lose_the_image, die) else STALL_S
    )  # fmt: skip
    for step in range(steps):
        if rank == culprit and step == 2:
            if isinstance(what, list):
                model.order = what
            else:
                model.blocks[1].before = what
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def outcome(rank: int, ranks: int, comm: str, culprit: int, what, stage: int = 3):
    """(class, rank, text) of what this library raised here; other exceptions end the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(rank, comm, culprit, what, stage)
    except zs.ZeroshardError as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)


def run(ranks: int, *args):
    return run_processes(outcome, ranks, *args, grace_s=100.0, check=False)


@pytest.mark.processes
@pytest.mark.parametrize("comm", COMMS)
def test_b04_an_exception_on_rank_2_of_4_is_told_once_and_as_its_own(comm):
    """No victim is taken for the culprit, though victims end and break connections as well."""
    results = run(4, comm, 2, lose_the_image)
    assert results[2].value is None and "KeyError: 'no such image'" in results[2].error
    for rank in (0, 1, 3):
        kind, culprit, text = results[rank].value
        assert (kind, culprit) == ("PeerFailed", 2), text
        assert "KeyError: 'no such image'" in text and text.count(TRACEBACK) == 1, text


@pytest.mark.processes
@pytest.mark.parametrize("comm", COMMS)
def test_b05_a_rank_that_is_killed_is_named_by_all_with_the_signal(comm):
    results = run(3, comm, 1, die)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        kind, culprit, text = results[rank].value
        assert (kind, culprit) == ("PeerFailed", 1), text
        assert "killed" in text and TRACEBACK not in text


@pytest.mark.processes
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])  # the wait is the same, 10 s each
@pytest.mark.parametrize("comm", COMMS)
def test_a_rank_that_sleeps_in_its_forward_is_found_with_its_stack(comm, stage):
    results = run(3, comm, 1, dawdle_in_the_tokenizer, stage)
    for result in results:  # the one that slept is told as well
        kind, _, text = result.value
        assert kind == "StallError", text
        head, stack = text.split("The Python stack of rank 1", 1)
        assert "rank 1 computes or sleeps in `blocks.1`, in dawdle_in_the_tokenizer (test_failures.py:" in head
        assert "ranks 0, 2 wait at" in head and "step 3" in head
        assert "Last collectives: " in head and "gather blocks.0 (torch.float32)" in head
        assert "dawdle_in_the_tokenizer" in stack and ", in train" in stack
        assert (") (gather #2); ranks 0, 2 wait at" in head) == (stage == 3), head


@pytest.mark.processes
@pytest.mark.parametrize("order", [[0, 2, 3], [0, 2, 1, 3]], ids=["skips", "other order"])
def test_b01_a_rank_that_uses_other_blocks_is_named_over_gloo_and_served_in_shared_memory(order):
    for rank, result in enumerate(run(3, "shared", 1, order)):
        assert result.ok and result.value is None, (rank, result)
    results = run(3, "dist", 1, order)
    if len(order) == 3:  # the record tells which gathers the others make
        assert all(result.ok and result.value is None for result in results), results
        return
    for result in results:  # the rank took what comes later for skipped
        kind, _, text = result.value
        assert kind == "StallError", text
        assert "ranks 0, 2 wait at `blocks." in text and "rank 1 waits at" in text, text
        assert "step 3" in text and "Last collectives: " in text, text


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))


def gathered(model: nn.Module) -> None:
    with zs.gathered(model):
        pass


CALLS = {  # what rank 0 calls alone, and how it is told
    "zs.full_state_dict()": zs.full_state_dict, "zs.gathered()": gathered, "the forward of Net, without gradients,": evaluated,
    "zs.full_optimizer_state_dict()": zs.full_optimizer_state_dict,
    "full_tensor() (or another whole tensor)": lambda model: next(model.parameters()).full_tensor(),
}  # fmt: skip


def alone(rank: int, ranks: int, comm: str, what: str):
    """Rank 0 makes a call in its second step; return the error."""
    if comm == "dist":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = zs.shard(model, optimizer, stage=3, stall_timeout_s=STALL_S, **({"comm": comm} if comm == "dist" else {}))
    try:
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step == 1:
                CALLS[what](model)
    except zs.StallError as error:
        return str(error)


@pytest.mark.processes
@pytest.mark.parametrize("what", [*list(CALLS)[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in list(CALLS)[3:])])
def test_a_stall_names_the_call_that_other_ranks_have_not_made(what):
    for text in run_processes(alone, 3, "dist", what):
        call = f"Rank 0 called {what} in step 3 (test_failures.py:"
        assert call in text and "), and ranks 1, 2 did not: call it on all ranks." in text and "data ended" not in text, text


@pytest.mark.parametrize("what", list(CALLS)[:3:2])
def test_a_call_on_one_rank_that_shared_memory_serves_is_told_once(what, capsys):
    assert run_threads(3, alone, 3, "threads", what) == [None] * 3
    assert capsys.readouterr().err.count(
        f"zeroshard: rank 0 called {what} before the backward of step 3, and ranks 1, 2 did not. Call it on all ranks: over torch."
    ) == 1  # fmt: skip


def test_calls_of_all_ranks_are_told_of_no_rank(capsys):
    def body(rank: int) -> None:
        model = seeded(Net)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        for _ in range(3):
            evaluated(model)
            zs.full_state_dict(model)
            model(torch.ones(2, 4)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(50):  # of forwards without end little is kept
            evaluated(model)
        assert len(runtime_of(model).attendance.calls) < 40

    run_threads(3, body)
    assert "called" not in capsys.readouterr().err


def circle(rank: int, ranks: int, comm: str):
    if comm != "threads":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    choice = None if comm == "threads" else comm
    group = backend_select.current(choice, torch.device("cpu"), STALL_S)
    group.stall_timeout_s = STALL_S
    region = group.allocate(4, torch.float32, whole=False)
    group.fence_read()
    name = "attention" if rank == 0 else "mlp"
    full = torch.empty(4 * group.world_size)
    try:
        work = group.gather(full, Region(region.tensor, region.shards), f"gather {name} (torch.float32)", tag=rank)
        work.wait()
    except zs.StallError as error:
        return str(error)


@pytest.mark.parametrize("comm", ["threads", *(pytest.param(comm, marks=pytest.mark.processes) for comm in COMMS)])
def test_a_circle_of_waiting_ranks_is_told_alike(comm):
    if comm == "threads":
        texts = run_threads(2, circle, 2, comm)
    else:
        texts = run_processes(circle, 2, comm)
    for text in texts:
        assert "rank 0 waits at `attention` (gather #1)" in text and "rank 1 waits at `mlp` (gather #1)" in text, text
        assert "Last collectives: rank 0: " in text
        assert (" for rank 1" in text) == (comm != "dist")  # gloo does not tell whose part is missing


# -- interpreters of their own: what is told at exit ---------------------------------------------------------------


SCRIPT = """
import os, sys, time
sys.path[:0] = {folders!r}
import test_failures
from test_failures import *
test_failures.STALL_S = 20.0  # nobody stalls here, however busy the machine is
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch imports half of itself here: once, not in each child
rank = 0 if os.fork() else 1
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
if rank == 1:  # what it says is not asked for
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
for port, (comm, act) in zip({ports}, CASES):
    child = os.fork()
    if child == 0:
        break  # and go on as a script would
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    time.sleep(0.5 if rank == 1 else 0)  # a launcher that is not the quickest: peers can read how it ended
    os.waitpid(child, 0)
else:
    sys.exit()
os.environ["MASTER_PORT"] = str(port)
torch.set_num_threads(1)
dist.init_process_group("gloo")
try:
    train(rank, comm, 1, lambda: exec(act))
except zs.PeerFailed as error:
    print(f"{{comm}}, {{act}}: {{error.rank}}: {{error}}", flush=True)
    os._exit(7)
"""

ENDS = {  # what rank 1 does in a forward -> what rank 0 is told
    "sys.exit(3)": "rank 1 left by sys.exit(3)",
    "sys.exit()": "rank 1 left by sys.exit()",
    "raise SystemExit(4)": "",  # below
    "os._exit(5)": "its process ended with exit code 5",
    "os.kill(os.getpid(), 11)": "its process was killed by SIGSEGV",
    "1 / 0": "ZeroDivisionError: division by zero",
}
CASES = [(comm, act) for comm in COMMS for act in ENDS]


@pytest.fixture(scope="module")
def told():
    """What rank 0 prints of every case; rank 1 ends as a script does, with its interpreter."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    script = SCRIPT.format(folders=folders, ports=[free_port() for _ in CASES])
    environment = os.environ | rank_environment(0, 2, 1) | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    script = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True, **pipes)
    try:
        return script.communicate()[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


@pytest.mark.processes
@pytest.mark.parametrize("comm, act", CASES)
def test_b04_a_rank_that_leaves_is_told_as_that(told, comm, act):
    begin = told.index(f"{comm}, {act}: 1: ")
    after = [told.find(f"{other}, {theirs}: ", begin + 1) for other, theirs in CASES]
    text = told[begin : min((end for end in after if end > 0), default=len(told))]
    if act == "raise SystemExit(4)":  # who shares memory takes leave of its peers; over gloo they look
        assert ("left at the end of its script, or by SystemExit" if comm == "shared" else "with exit code 4") in text
    assert ENDS[act] in text and text.count(TRACEBACK) == (act == "1 / 0"), text


# -- by threads, and by themselves ---------------------------------------------------------------------------------


def test_a_victim_tells_of_the_rank_that_failed_first():
    """Ranks 0 and 2 hear of rank 1; what they then raise themselves is no news, also where it is another error."""
    seen = {}

    def body(rank):
        group = backend_select.current(None, torch.device("cpu"), 20.0)
        if rank == 1:
            raise ValueError("the first")
        try:
            group.exchange(b"", "somewhere") if rank == 0 else (time.sleep(1.0), group.exchange(b"", "later"))
        except zs.PeerFailed as error:
            seen[rank] = error
            raise RuntimeError("cleaning up failed, too") from error

    with pytest.raises((ValueError, RuntimeError)):
        run_threads(3, body)
    assert {rank: error.rank for rank, error in seen.items()} == {0: 1, 2: 1}
    for error in seen.values():
        assert "ValueError: the first" in str(error) and str(error).count(TRACEBACK) == 1


def test_failures_are_told_by_their_origin():
    first = zs.PeerFailed(5, "ValueError: no", "gather x")
    assert endings.failure_of(first, 2) == Failure(5, "ValueError: no")
    try:
        try:
            raise first
        except zs.PeerFailed:
            raise OSError("in a finally") from None
    except OSError as error:
        assert endings.failure_of(error, 2).rank == 5  # suppressed in the text, and still what happened
    own = endings.failure_of(ValueError("mine"), 2)
    assert own.rank == 2 and own.reason.endswith("ValueError: mine")
    left = zs.PeerFailed(2, endings.failure_of(SystemExit(3), 2).reason, "x")
    assert str(left) == "rank 2 left by sys.exit(3) (this rank was waiting for: x)"


def test_a_stall_leaves_no_thread_behind_and_a_desk_lets_no_stranger_in():
    from zeroshard.diagnostics.status_server import SILENT, ProcessDesk
    from zeroshard.engine.comm.progress import Progress, Report

    before = threading.active_count()
    mine, theirs = ProcessDesk(Progress(0), True), ProcessDesk(Progress(1), True)
    mine._addresses = [mine.address, theirs.address]
    assert isinstance(mine.ask([1])[1], Report)
    address, port, _, *rest = theirs.address
    mine._addresses[1] = (address, port, b"another secret", *rest)
    mine.tell([1], Failure(0, "not from a peer"))
    assert theirs.told is None and mine.ask([1])[1] in (GONE, SILENT)
    theirs.close()
    mine._addresses[1] = theirs.address
    assert mine.ask([1])[1] == GONE
    with socket.create_server((address, 0)) as stopped:  # as of a process that got SIGSTOP: its kernel still connects
        mine._addresses[1] = (*stopped.getsockname(), *theirs.address[2:])
        assert mine.ask([1])[1] == SILENT
    mine.close()
    assert threading.active_count() == before


def test_calls_before_a_step_of_all_ranks_and_ranks_on_their_way_accuse_nobody():
    one, two = Progress(0), Progress(1)
    one.note_call("the forward of Net, without gradients,")  # of rank 0 alone: nothing waited for rank 1
    for progress in (one, two):
        progress.step_over(1)
        progress.note_call("zs.full_state_dict()")
        progress.wait("gather a")
    assert "HINT" in describe(1.0, {0: one.report(), 1: two.report()}, " HINT")
    one.note_call("zs.save()")
    assert "Rank 0 called zs.save() in step 2" in (told := describe(1.0, {0: one.report(), 1: two.report()}, " HINT"))
    assert "and rank 1 did not: call it on all ranks." in told
    two.awake()
    assert "and rank 1 did not so far: every rank must call it." in describe(1.0, {0: one.report(), 1: two.report()}, "")


def test_an_evaluation_of_one_rank_inside_gathered_is_no_call_of_all(capsys):
    def body(rank: int) -> None:
        model = seeded(Net)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        for _ in range(2):
            with zs.gathered(model):
                if rank == 0:
                    evaluated(model)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    run_threads(2, body)
    assert "called" not in capsys.readouterr().err
