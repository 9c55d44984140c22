"""What every test shares: one thread per rank, a hard time limit, and markers that choose what can run here.

A limit is of processor time, of the test and of the processes that it started, so that a busy machine fails no test. A test
that stands still, asking for less than a twentieth of a core for as long, has exceeded it too. It fails with the stacks of all
threads on stderr (SIGALRM in the main thread, where pytest and `run_threads` wait). One that cannot even be interrupted,
because it hangs in C, ends the whole run a little later (faulthandler). Limits: 60 s, 240 s for tests that start processes, or
`@pytest.mark.limit(seconds)`. The same limit holds for what makes a test's fixtures. `run_threads` and `run_processes`, whose
limits are by the clock, here have one that no load reaches.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

# the command line takes all cores: threads that wait in a loop for the next product take five times the processor time of the work
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import rank_server
import torch
from offloading import emptied, strict_devices
from sample import sampled

from zeroshard.comm import backend_select
from zeroshard.comm.launch import run_processes, share_imports
from zeroshard.testing import run_threads


class TestExpired(BaseException):
    """The limit of a test has passed. No Exception: neither the test nor hypothesis shall take it for one of theirs."""

    __test__ = False


LIMIT_S, PROCESSES_LIMIT_S, GRACE_S = 60, 240, 30
STANDING_STILL = 0.05  # of a core: what ranks use that only look again and again whether a peer has come

LONGEST = (  # files, those first that take longest: from 60 s to 10 on two busy cores
    "style", "throughput", "remedies", "schedule_by_formula", "repeat", "commands", "out_of_memory", "one_estimator", "gpu_day", "site", "architecture",
    "engine_resume", "profile", "fake_world", "parallelize", "lightning", "programs", "beside_deepspeed", "two_nodes", "mesh_processes", "parallel_checkpoints",
    "engine", "examples", "plans", "equivalence", "tensor_parallel", "parallel_volumes", "pipeline", "equivalence_wide", "processes",
    "failures", "plan_command", "checkpoint_kept", "uneven_data", "freezing", "recovery", "private_memory", "checkpoint_kills", "optimizer", "user_models",
    "tiers_placements", "tiers_faults", "reproductions", "hidden_paths", "save_beside", "accumulation", "delayed_update", "cli", "cli_resume",
    "checkpoint_edges", "load_memory", "door", "tiling_experts", "checkpoint_loading", "late_gradients", "saving_by_others", "process_exit",
    "tiers_fake", "precision", "checkpoint_faults", "checkpoint_damage", "save", "export", "tiling", "activation_memory",
    "cpu_kernels", "activations", "models", "bench_tiers", "importers", "tiers", "checkpoint", "bench", "checkpoint_format",
    "init_context", "training_loops", "host_memory", "async_file", "tiers_options", "life_cycle",
)  # fmt: skip

STDERR = pytest.StashKey()

for run_ranks in (run_threads, run_processes):
    run_ranks.__kwdefaults__["timeout_s"] = 3600.0  # by the clock; the test's own limit ends it earlier

os.environ.pop("COLUMNS", None)  # of pytest-xdist: tables are as wide as they are without a terminal
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


def pytest_configure(config):
    # torch imports _dynamo, half of itself, with the first optimizer: once in the server, not in each rank
    share_imports(["torch", "torch.distributed", "torch._dynamo", "zeroshard", "helpers"])
    config.addinivalue_line("markers", "slow: what the suite has no time for; ZEROSHARD_SLOW=1 runs it")
    config.addinivalue_line("markers", "night: takes long, and ./test has another test of the same: ./test --all runs it")
    config.addinivalue_line("markers", "limit(seconds): the longest this test may take")
    torch.set_num_threads(1)  # ranks share the cores
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # the real one: a run that is ended shows nothing else
    try:
        from hypothesis import settings
    except ImportError:
        return
    # no deadline: the machine may be busy. derandomize: a failure is the commit's, not the day's.
    settings.register_profile("zeroshard", deadline=None, derandomize=True, database=None)
    settings.load_profile("zeroshard")


def pytest_collection_modifyitems(config, items):
    """Long files first, so that no core is idle at the end while another has one left; of the whole suite a sample (sample.py).

    A run of named files or tests, and `./test --all`, have all cases.

    Tests marked `gpu` measure the device itself, streams and allocator: without one there is nothing to check.
    """
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    slow = os.environ.get("ZEROSHARD_SLOW") == "1"
    if os.environ.get("ZEROSHARD_SAMPLE") == "1":
        items[:], left = sampled(items, slow)
        config.hook.pytest_deselected(items=left)
    for item in () if slow else items:
        if item.get_closest_marker("slow"):
            # each mark says beside it what is tested in its place
            item.add_marker(pytest.mark.skip(reason="takes long: ZEROSHARD_SLOW=1 runs it"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            # without one: fakes, in test_ordered_comm, _device_paths, _pinned, _streams
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What is imported by now stays: no collection of garbage shall go through it again, and forked ranks have it all."""
    import torch._dynamo  # noqa: F401

    import zeroshard.parallel.parallelize  # noqa: F401

    if "transformers" in sys.modules:  # it imports what its models share, 1.5 s of a core, when a rank asks for the first
        _ = sys.modules["transformers"].LlamaForCausalLM

    gc.collect()
    gc.freeze()


def _limit_of(item) -> float:
    marker = item.get_closest_marker("limit")
    if marker is not None:
        return float(marker.args[0])
    return PROCESSES_LIMIT_S if item.get_closest_marker("processes") else LIMIT_S


def processor_s() -> tuple[float, float]:
    """Processor time of this process and of all that it started, living and ended; and that with what its living threads waited for.

    The second: the time for which they could have run, while a busy machine served others, counts as well.
    """
    if not os.path.exists("/proc/self/task"):
        used = sum(sum(each.cpu_times()[:4]) for each in (psutil.Process(), *psutil.Process().children(recursive=True)))
        return used, used
    ticks, waited_ns, pids = 0, 0, [os.getpid()]  # psutil looks at every process of the machine: 20 s in all
    while pids:
        folder = Path("/proc", str(pids.pop()))
        with contextlib.suppress(OSError):  # it has ended in this moment
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user, system, and both of its children that have ended
            for thread in (folder / "task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
                waited_ns += int((thread / "schedstat").read_text().split()[1])
    used = ticks / os.sysconf("SC_CLK_TCK")
    return used, used + waited_ns / 1e9


LATEST: list[tuple[float, tuple[float, float]]] = []  # when processor_s was called last, and what it returned


def recent_s() -> tuple[float, float]:
    """Return processor_s of at most half a second ago: a test that is quicker looks at no process, and a limit is of seconds."""
    if not LATEST or time.monotonic() - LATEST[-1][0] > 0.5:
        LATEST[:] = [(time.monotonic(), processor_s())]
    return LATEST[-1][1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    # again for each: a run of the command line in this process takes all cores, and two threads add in another order
    torch.set_num_threads(1)
    # an Exception: pytest keeps it for the other tests of the same fixture, which are then not tried one after the other
    with _limited(item, _limit_of(item), TimeoutError):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _limited(item, _limit_of(item), TestExpired):
        return (yield)


@contextlib.contextmanager
def _limited(item, limit_s: float, expired: type[BaseException]):
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    spent, asked = map(list, zip(recent_s(), strict=True))  # at the start, and whenever the limit has passed once more

    def expire(signum, frame):
        for sums, now in zip((spent, asked), processor_s(), strict=True):
            sums.append(now)
        if spent[-1] - spent[0] < limit_s and asked[-1] - asked[-2] >= STANDING_STILL * limit_s:
            begin()  # it works, on a machine that has others to serve
            return
        faulthandler.dump_traceback(file=item.config.stash[STDERR])
        told = f"{spent[-1] - spent[0]:.0f} s of processor time in {limit_s * (len(spent) - 1):.0f} s"
        raise expired(f"{item.nodeid}: not finished: {told}; its limit is {limit_s:.0f} s")

    def begin():
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[STDERR])

    previous = signal.signal(signal.SIGALRM, expire)
    begin()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# -- what tests of offload share (offloading.py) -------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A folder for swap files. Nothing may remain in it."""
    with emptied(tmp_path_factory.mktemp("disk")) as path:
        yield path


@pytest.fixture
def strict_device(monkeypatch):
    """(rank, strict): from now on that rank has a device with a memory of its own, as unfriendly as streams may be."""
    return strict_devices(monkeypatch)


# -- what tests of benchmarks share ----------------------------------------------------------------------------------


@pytest.fixture
def forked_teams(monkeypatch):
    """Ranks of a benchmark are forked from the server that has imported torch: 0.1 s a rank, not 6.

    (test_bench_tiers has fresh interpreters, as a benchmark has.)
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        plain = multiprocessing.get_context
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: plain("forkserver" if method == "spawn" else method))


@pytest.fixture(autouse=True, scope="session")
def _ranks_are_forks():
    """Before the first test, with pytest's capture on: what ranks print is captured as well."""
    rank_server.start()


@pytest.fixture(autouse=True)
def _commands_speak():
    """--quiet and --verbose of a command hold for its process: what a test prints must not depend on those that ran before."""
    yield
    if (arguments := sys.modules.get("zeroshard.cli.arguments")) is not None:
        arguments._chosen.update(quiet=False, verbose=False)


@pytest.fixture(autouse=True, scope="session")
def _single_process_was_said():
    """The line comes once a process: whether a test sees it must not depend on which tests ran before. test_bad_input asks for it."""
    backend_select._solo_said = True
