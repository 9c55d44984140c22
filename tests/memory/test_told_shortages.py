"""An allocation that fails inside of a sharded model is told with what the rank holds and what makes it less, on the rank itself.

Failures are made: torch.OutOfMemoryError, as CUDA raises it, in a module's forward and backward, in an optimizer's step, in the
allocation of a unit's buffers; one of the host is real (a limit of the address space).
"""

import contextlib
import copy
import gc
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from helpers import adamw, differences, seeded
from torch import nn

import zeroshard as zs
from zeroshard.engine.flat_buffer import ParameterBuffer
from zeroshard.engine.ledger import GRADIENTS, OPTIMIZER, PARAMETERS
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import OUT_OF_MEMORY_PAGE
from zeroshard.guard import out_of_memory
from zeroshard.testing import run_threads

WORLD, WIDTH = 2, 64
TORCHS = "CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 MiB is free."
DATA = torch.randn(WORLD, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Grad(torch.autograd.Function):
    """Nothing in forward; in backward what `Hungry` says."""

    @staticmethod
    def forward(ctx, x, hungry):
        ctx.hungry = hungry
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.hungry.eat("backward")
        return grad, None


class Hungry(nn.Module):
    """A layer that has no memory where its `meal` says: "forward" or "backward"."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.meal = nn.Linear(WIDTH, WIDTH), None
        self.error = lambda: torch.OutOfMemoryError(TORCHS)

    def eat(self, where: str) -> None:
        if self.meal == where:
            raise self.error()

    def forward(self, x):
        self.eat("forward")
        return Grad.apply(self.layer(x), self)


class HungrySGD(torch.optim.SGD):
    """Whose step has no memory where it is told so."""

    hungry = threading.local()

    def step(self, closure=None):
        if getattr(self.hungry, "now", False):
            raise torch.OutOfMemoryError(TORCHS)
        return super().step(closure)


MODEL = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Hungry(), nn.Linear(WIDTH, WIDTH)))


def step(model, optimizer, rank):
    loss = model(DATA[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def failing(rank: int, where: str, stage: int) -> tuple[Exception, dict[str, int]]:
    """The error of the second step, on a rank that fails in it as all do; what its ledger had then."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, HungrySGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage, units="leaf")
    step(model, optimizer, rank)
    model[1].meal, HungrySGD.hungry.now = where, where == "step"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, optimizer, rank)
    held = dict(runtime_of(model).tiers.ledger.now)
    model[1].meal, HungrySGD.hungry.now = None, False
    optimizer.zero_grad()
    step(model, optimizer, rank)  # training goes on
    zs.close(model)
    return caught.value, held


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_error_says_what_the_rank_holds_and_what_makes_it_less(where, stage):
    for rank, (error, held) in enumerate(run_threads(WORLD, failing, where, stage)):
        assert type(error) is zs.DeviceMemoryError and isinstance(error, zs.ZeroshardError)
        assert type(error.__cause__) is torch.OutOfMemoryError and str(error.__cause__) == TORCHS
        text = str(error)
        assert text.startswith(TORCHS) and OUT_OF_MEMORY_PAGE in text
        names = {"forward": "the forward", "backward": "the backward", "step": "the optimizer's step"}
        assert f"rank {rank} of {WORLD} had no memory for this in {names[where]} of step 2 (stage {stage}, fp32)" in text
        for name in (PARAMETERS, OPTIMIZER, *([GRADIENTS] if where == "step" else [])):
            assert re.search(rf"^  {name} +{re.escape(out_of_memory.size(held[name]))}$", text, re.MULTILINE), text
        assert "  1. " in text and "could not be computed" not in text
        assert "zs.checkpoint_activations(model): up to" in text and "computes" in text


def test_peers_are_told_with_the_report_and_nobody_hangs():
    def rank_run(rank: int) -> None:
        model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3, map_shared=False)
        model[1].meal = "backward" if rank == 1 else None
        if rank == 1:
            model(DATA[rank]).sum().backward()
        with pytest.raises(zs.PeerFailed, match=r"rank 1 (?s:.)*had no memory for this in the backward of step 1"):
            model(DATA[rank]).sum().backward()

    with pytest.raises(zs.DeviceMemoryError):
        run_threads(WORLD, rank_run)


@pytest.mark.parametrize("error", [ValueError("of the program"), RuntimeError("of the program"), MemoryError("of the host")])
def test_other_errors_stay_what_they_are(error):
    model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3)
    model[1].error = lambda: error
    for where in ("forward", "backward"):
        model[1].meal = where
        with pytest.raises(type(error)) as caught:
            model(DATA[0]).sum().backward()
        if type(error) is MemoryError:
            assert type(caught.value) is zs.HostMemoryError and caught.value.__cause__ is error
        else:
            assert caught.value is error and caught.value.__cause__ is None


@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize("late", [False, True], ids=["at-first", "once-taken"])
def test_a_gather_without_memory_names_its_unit(monkeypatch, world, late):
    """Wherever it is begun: in a forward, an evaluation, by zs.gathered, in a backward. Then all goes on."""
    wanted, plain = threading.local(), ParameterBuffer.gather

    def gather(buffer):
        fails = buffer.label.startswith(f"gather {getattr(wanted, 'unit', None)} ")
        if fails and not late:
            raise torch.OutOfMemoryError(TORCHS)
        work = plain(buffer)
        if fails:
            work.wait()
            raise torch.OutOfMemoryError(TORCHS)
        return work

    monkeypatch.setattr(ParameterBuffer, "gather", gather)

    def forward(model):
        model(DATA[0])

    def evaluation(model):
        with torch.no_grad():
            model(DATA[0])

    def program(model):
        with zs.gathered(model):
            pass

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, units="leaf", map_shared=False)
        assert [unit.name for unit in runtime_of(model).units] == ["0", "1.layer", "2"]
        step(model, optimizer, rank)
        for use in (forward, evaluation, program, None):  # None: a backward
            loss = model(DATA[rank]).square().mean() if use is None else None
            wanted.unit = "1.layer"
            with pytest.raises(zs.DeviceMemoryError) as caught:
                loss.backward() if use is None else use(model)
            wanted.unit = None
            lines = str(caught.value).splitlines()
            assert lines[0] == TORCHS and str(caught.value).count("had no memory") == 1
            assert lines[1].startswith(
                f"rank {rank} of {world} had no memory for this in the gather of 1.layer of step 2 (stage 3, fp32)"
            )
            assert type(caught.value.__cause__) is torch.OutOfMemoryError
            optimizer.zero_grad()
        step(model, optimizer, rank)
        assert not optimizer.last_step.skipped and optimizer.last_step.grad_norm > 0

    run_threads(world, rank_run)


def test_it_is_told_once_where_one_sharded_model_calls_another():
    inner, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return inner(self.own(x))

    outer, _ = zs.shard(Outer(), None, stage=3)
    inner[1].meal = "forward"
    with pytest.raises(zs.DeviceMemoryError) as caught:
        outer(DATA[0])
    assert type(caught.value.__cause__) is torch.OutOfMemoryError and str(caught.value).count("had no memory") == 1


def test_a_backward_of_another_model_is_left_alone_while_ranks_are_threads():
    def rank_run(rank: int) -> None:
        model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=2)
        plain = copy.deepcopy(MODEL)
        plain[1].meal = model[1].meal = "backward"
        with pytest.raises(zs.DeviceMemoryError):  # nobody takes the next one for this one's
            model(DATA[rank]).sum().backward()
        meeting.wait()  # with one sharded model in the process it would be taken for that of the loss
        with pytest.raises(torch.OutOfMemoryError) as caught:
            plain(DATA[rank]).sum().backward()
        assert type(caught.value) is torch.OutOfMemoryError
        meeting.wait()

    meeting = threading.Barrier(WORLD, timeout=20)
    run_threads(WORLD, rank_run)


def test_the_buffers_of_a_unit_have_no_room_in_shard(monkeypatch):
    plain, made = ParameterBuffer.__init__, []

    def make(self, *args, **kwargs):
        made.append(self)
        if len(made) == 2:
            raise torch.OutOfMemoryError(TORCHS)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(ParameterBuffer, "__init__", make)
    model = copy.deepcopy(MODEL)
    with pytest.raises(zs.DeviceMemoryError, match=r"had no memory for this in zs\.shard \(stage 2, bf16\)") as caught:
        zs.shard(model, adamw(model.parameters()), stage=2, precision="bf16", units="leaf")
    assert re.search(r"^  parameters +\d", str(caught.value), re.MULTILINE) and OUT_OF_MEMORY_PAGE in str(caught.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_the_failed_batch_held_is_free_when_the_error_has_been_caught(where):
    """Without Python's collector: no ring of frames and errors keeps the activations."""
    model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3)
    model[1].meal = where
    seen = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            model(DATA[0]).sum().backward()
        (activation,) = seen
        assert activation() is None
    finally:
        gc.enable()


def test_the_bytes_of_model_states_are_foreseen(monkeypatch):
    """Beside what runs of both stages hold."""
    seen: list[out_of_memory.Shortage] = []
    monkeypatch.setattr(
        out_of_memory, "advise", lambda shortage, plain=out_of_memory.advise: seen.append(shortage) or plain(shortage)
    )
    run_threads(WORLD, failing, "step", 0)
    from zeroshard.planner.remedies import running

    asked = running._request(seen[0])
    profile = running._profile(seen[0])
    foreseen = {}
    for stage in (0, 2):
        layout = running._layout(running.replace(asked, options={**asked.options, "stage": stage}))
        held = running._held(profile, layout, seen[0])
        foreseen[stage] = {name: held[name] for name in (PARAMETERS, GRADIENTS)}
    for stage, wanted in foreseen.items():
        _, held = run_threads(WORLD, failing, "step", stage)[0]
        assert {name: held[name] for name in wanted} == wanted


def test_frozen_parameters_have_no_states_to_move():
    shortage = seen_of(trained=0.0)
    assert not any("stage=1" in line or "stage=2" in line for line in out_of_memory.advise(shortage))
    assert any("stage=1" in line or "stage=2" in line for line in out_of_memory.advise(seen_of(trained=1.0)))


def seen_of(trained: float) -> out_of_memory.Shortage:
    """Of eight GPUs with a model of 24 blocks and few activations, at stage 0."""
    from zeroshard.comm.fake import FakeComm
    from zeroshard.config import Config
    from zeroshard.engine.ledger import Ledger

    units = {"(root)": (50_000_000,), **{f"blocks.{number}": (12_000_000,) for number in range(24)}}
    config = Config.build(None, stage=0, precision="bf16")
    return out_of_memory.Shortage(
        "GPT", config, Ledger(), FakeComm(0, 8), "a test", units, trained, True, 1 << 20, 1 << 20, False
    )


def test_an_advice_that_fails_hides_nothing(monkeypatch):
    def advise(shortage):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(out_of_memory, "advise", advise)
    model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3)
    model[1].meal = "forward"
    with pytest.raises(zs.DeviceMemoryError, match="could not be computed: KeyError: 'a fault of ours'") as caught:
        model(DATA[0])
    assert TORCHS in str(caught.value)


def test_the_same_bits_after_a_batch_for_which_there_was_no_memory():
    def rank_run(rank: int) -> None:
        states = []
        for meals in ([], ["forward", "backward"]):
            model = copy.deepcopy(MODEL)
            model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
            for meal in meals:
                model[1].meal = meal
                with pytest.raises(zs.DeviceMemoryError):
                    step(model, optimizer, rank)
                model[1].meal = None
                optimizer.zero_grad()
            step(model, optimizer, rank)
            states.append(zs.full_state_dict(model))
            zs.close(model)
        assert not differences(*states)

    run_threads(WORLD, rank_run)


CAGED = """
import resource, torch, torch._dynamo, zeroshard as zs
from pathlib import Path
from torch import nn
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
model = Wide()
model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
def step(rows):
    model(torch.ones(1, 256).expand(rows, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step(16)
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
try:
    step(1 << 20)  # activations of 1 GiB a layer: the first fails, and leaves room for the planner's modules
except RuntimeError as error:  # what torch raises
    print(type(error).__name__, type(error.__cause__).__name__)
    print(error)
step(16)
print("goes on")
"""


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc")
def test_a_real_limit_of_the_host_is_told_in_a_forward():
    run = subprocess.run([sys.executable, "-c", CAGED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, *lines, end = run.stdout.splitlines()
    assert first == "HostMemoryError RuntimeError" and end == "goes on"
    text = "\n".join(lines)
    for words in ("you tried to allocate", "in the forward of step 2 (stage 3, fp32)", "optimizer states", "RLIMIT_AS leaves",
                  "of the sequences at a time", "zs.checkpoint_activations(model)", OUT_OF_MEMORY_PAGE):  # fmt: skip
        assert words in text, text
