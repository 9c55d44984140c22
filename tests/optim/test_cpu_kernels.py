"""Host stepping kernels: the bits of torch's fused optimizers, whole or in chunks; mixed precision; threads; Lion."""

import os
import queue
import threading
from contextlib import closing

import pytest
import torch
from torch import nn

import zeroshard as zs
from benchmarks.cases import adam
from zeroshard.tiers import cpu_kernels
from zeroshard.tiers.cpu_kernels import Team, kernel_for, matches, step_stretch, stepping_threads
from zeroshard.utils.host import cache_nbytes

STEPS = 4
SIZES = (1, 31, 33, 1000, 4096 + 17, 100_003)
CHUNKS = (32, 96, 4096, 1 << 16)

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "adam decoupled": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam amsgrad maximize": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd decay maximize": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "momentum dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad decay": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "maximize": True}),
    "lion": (zs.Lion, {"lr": 1e-2}),
    "lion decay maximize": (zs.Lion, {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
}
NAMES = pytest.mark.parametrize("name", OPTIMIZERS)


def build(name: str, numel: int, **options) -> torch.optim.Optimizer:
    cls, defaults = OPTIMIZERS[name]
    fused = {} if cls is zs.Lion else {"fused": True}
    torch.manual_seed(numel)
    return cls([nn.Parameter(torch.randn(numel))], **{**defaults, **fused, **options})


def gradients(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Values of all sizes, zeros of both signs among them."""
    torch.manual_seed(numel + 1)
    made = [torch.randn(numel) * 10.0 ** torch.randint(-9, 2, (numel,)) for _ in range(STEPS)]
    for grad in made:
        grad[::7] = 0.0
        grad[3::7] = -0.0
    return [grad.to(dtype) for grad in made]


def run_torch(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """The optimizer's own steps on the whole tensor; its learning rate changes on the way."""
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9
    return param.detach(), dict(optimizer.state[param])


@torch.no_grad()
def run_kernel(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], **how) -> tuple[torch.Tensor, dict]:
    """The same with the kernel, from the state it creates."""
    options = optimizer.param_groups[0]
    master = options["params"][0].detach().clone()
    kernel = kernel_for(optimizer, options)
    state = kernel.create(master)
    for grad in grads:
        step_stretch(kernel, master, grad, state, options, **how)
        options["lr"] = options["lr"] * 0.9
    return master, state


def same_bits(got: tuple[torch.Tensor, dict], expected: tuple[torch.Tensor, dict]) -> bool:
    def bits(tensor):
        return tensor.detach().view(torch.int32)

    (master, state), (param, torch_state) = got, expected
    torch_state = {key: value for key, value in torch_state.items() if value is not None}  # SGD without momentum
    return list(state) == list(torch_state) and all(
        torch.equal(bits(a), bits(b)) for a, b in [(master, param), *((state[k], torch_state[k]) for k in state)]
    )


# -- bits --------------------------------------------------------------------------------------------------------


@NAMES
def test_a_kernel_has_the_bits_of_the_fused_optimizer_whole_and_in_chunks(name):
    for numel in SIZES:
        grads = gradients(numel)
        expected = run_torch(build(name, numel), grads)
        for chunk in CHUNKS:
            if numel / chunk < 200:  # enough chunks
                assert same_bits(run_kernel(build(name, numel), grads, chunk=chunk), expected), (numel, chunk)


@NAMES
def test_the_number_of_threads_does_not_change_bits(name):
    numel = 300_007
    grads = gradients(numel)
    expected = run_torch(build(name, numel), grads)
    for threads in (2, 3):
        with stepping_threads(threads), closing(Team(threads)) as team:
            assert same_bits(run_torch(build(name, numel), grads), expected)
            assert same_bits(run_kernel(build(name, numel), grads), expected)
            assert same_bits(run_kernel(build(name, numel), grads, team=team), expected)
            assert same_bits(run_kernel(build(name, numel), grads, team=team, chunk=4096), expected)
            assert torch.get_num_threads() == threads


@NAMES
def test_one_step_as_a_caller_writes_it(name):
    """Steps of slices, counters cloned for each; columns in torch's order; create() is the first state."""
    numel, chunk = 1000, 320
    (grad, *_) = gradients(numel)
    optimizer = build(name, numel)
    options = optimizer.param_groups[0]
    kernel = kernel_for(optimizer, options)
    master = options["params"][0].detach().clone()
    state = kernel.create(master)
    assert tuple(key for key in state if key not in ("step", "fresh")) == kernel.columns
    counters = {key: value for key, value in state.items() if key not in kernel.columns}
    with torch.no_grad():
        for start in range(0, numel, chunk):
            cut = slice(start, start + chunk)
            part = {k: state[k][cut] for k in kernel.columns}
            part |= {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in counters.items()}
            step_stretch(kernel, master[cut], grad[cut], part, options)
    state = {k: state[k] if k in kernel.columns else part[k] for k in state if k in part}
    if "step" in state:
        assert state["step"] == 1
    assert same_bits((master, state), run_torch(build(name, numel), [grad]))


@NAMES
def test_state_of_torch_is_continued(name):
    """Steps of the optimizer itself, then of the kernel on its state (as loaded from a checkpoint)."""
    numel = 500
    grads = gradients(numel)
    expected = run_torch(build(name, numel), grads)
    optimizer = build(name, numel)
    param, state = run_torch(optimizer, grads[:2])
    state = {key: value for key, value in state.items() if value is not None}
    options = optimizer.param_groups[0]
    with torch.no_grad():
        for grad in grads[2:]:
            step_stretch(kernel_for(optimizer, options), param, grad, state, options, chunk=96)
            options["lr"] = options["lr"] * 0.9
    assert same_bits((param, state), expected)


@NAMES
def test_the_optimizers_default_step_is_the_same_mathematics(name):
    numel = 1000
    plain = build(name, numel, **({} if name.startswith("lion") else {"fused": None}))
    grads = [torch.randn(numel) for _ in range(STEPS)]
    expected, states = run_torch(plain, grads)
    got, state = run_kernel(build(name, numel), grads)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for key in state:
        torch.testing.assert_close(state[key], states[key], rtol=1e-5, atol=1e-6)


def test_a_stretch_of_no_elements_counts_its_step():
    optimizer = build("adamw", 1)
    state: dict = {}
    with torch.no_grad():
        options = optimizer.param_groups[0]
        step_stretch(kernel_for(optimizer, options), torch.empty(0), torch.empty(0), state, options)
    assert state["step"] == 1 and state["exp_avg"].numel() == 0


# -- which optimizers --------------------------------------------------------------------------------------------


def test_which_optimizers_have_a_kernel():
    class Derived(torch.optim.AdamW):  # only its defaults, or how it is built, are its own
        def __init__(self, params, fused=None):
            super().__init__(params, lr=0.5, fused=fused)

    class Stepping(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Starting(zs.Lion):
        def _init_group(self, *args):
            raise NotImplementedError

    params = [nn.Parameter(torch.zeros(3))]
    assert kernel_for(Derived(params), Derived(params).param_groups[0]) is not None
    assert matches(Derived(params, fused=True)) and not matches(Derived(params))
    others = (Stepping(params), Starting(params), torch.optim.Adam(params, differentiable=True))
    for optimizer in (torch.optim.RMSprop(params), *others):
        assert kernel_for(optimizer, optimizer.param_groups[0]) is None
        assert not matches(optimizer)
    learned = torch.optim.SGD(params, lr=torch.tensor(0.1, requires_grad=True))
    assert kernel_for(learned, learned.param_groups[0]) is None
    assert matches(torch.optim.AdamW(params, fused=True)) and matches(zs.Lion(params))
    assert not matches(torch.optim.AdamW(params)) and not matches(torch.optim.SGD(params, fused=False))
    two = torch.optim.SGD([{"params": params}, {"params": [nn.Parameter(torch.zeros(2))], "fused": False}], fused=True)
    assert not matches(two)


def test_tensors_that_would_be_read_past_their_end_are_refused():
    optimizer = build("adamw", 8)
    options = optimizer.param_groups[0]
    kernel = kernel_for(optimizer, options)
    param, state = torch.zeros(8), kernel.create(torch.zeros(8))
    for grad in (torch.zeros(7), torch.zeros(16)[::2]):
        with pytest.raises(AssertionError):
            step_stretch(kernel, param, grad, state, options)


# -- mixed precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", (1.0, 0.3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("name", ("adamw", "momentum", "lion"))
def test_sixteen_bit_gradients_and_parameters(name, dtype, scale):
    numel = 70_001
    grads = [torch.randn(numel).to(dtype) for _ in range(STEPS)]
    kept = [grad.clone() for grad in grads]
    expected = run_torch(build(name, numel), [grad.float() * scale for grad in grads])
    out = torch.empty(numel, dtype=dtype)
    got = run_kernel(build(name, numel), grads, scale=scale, out=out, chunk=1 << 14)
    assert same_bits(got, expected)
    assert torch.equal(out, got[0].to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True)), "gradients were written to"


def test_a_step_uses_the_scratch_it_is_given_or_none():
    optimizer = build("sgd", 64)
    options = optimizer.param_groups[0]
    kernel = kernel_for(optimizer, options)
    scratch = torch.full((100,), 7.0)
    with torch.no_grad():
        step_stretch(kernel, torch.zeros(64), torch.ones(64), {}, options)
        step_stretch(kernel, torch.zeros(64), torch.ones(64), {}, options, scale=0.5, scratch=scratch)
    assert (scratch[:64] == 0.5).all() and (scratch[64:] == 7).all()


# -- threads -----------------------------------------------------------------------------------------------------


def test_threads_of_a_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu_kernels.host_threads() == 16
    for ranks, threads in ((1, 16), (3, 5), (4, 4), (8, 2), (16, 1), (40, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert cpu_kernels.host_threads() == threads


def test_thread_count_is_restored():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), stepping_threads(3):
        assert torch.get_num_threads() == 3
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_a_team_shares_the_chunks_and_leaves_torchs_threads_alone():
    before = torch.get_num_threads()
    seen = queue.SimpleQueue()
    meeting = threading.Barrier(3, timeout=20)

    def work():
        meeting.wait()  # passed only if three threads are here at once
        seen.put((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    with closing(Team(3)) as team, torch.no_grad():
        team.run(work)
    told = [seen.get() for _ in range(3)]
    assert len({thread for thread, *_ in told}) == 3
    assert {tuple(rest) for _, *rest in told} == {(1, False)}
    assert torch.get_num_threads() == before
    fresh = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: fresh.put(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh.get() == before, "threads started later have another number"


def test_an_error_of_a_helper_reaches_the_caller():
    def work():
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError

    with closing(Team(2)) as team, pytest.raises(ZeroDivisionError):
        team.run(work)


def test_threads_are_told(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "visible_cores", lambda: 2)
    assert cpu_kernels.describe_threads(1) == "1 thread a rank, 2 cores"
    assert cpu_kernels.describe_threads(2) == "2 threads a rank, 2 cores"


# -- Lion --------------------------------------------------------------------------------------------------------


def test_lion_against_its_definition():
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = zs.Lion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    theta, mean = param.detach().clone(), torch.zeros_like(param)
    for _ in range(5):
        param.grad = torch.randn(5, 3, dtype=torch.float64)
        param.grad[0] = 0
        update = torch.sign(0.9 * mean + 0.1 * param.grad)
        theta = theta - 0.1 * (update + 0.2 * theta)
        mean = 0.99 * mean + 0.01 * param.grad
        optimizer.step()
    torch.testing.assert_close(param.detach(), theta)
    torch.testing.assert_close(optimizer.state[param], {"exp_avg": mean.detach()})


def test_lion_skips_parameters_without_gradient_and_calls_closures():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = zs.Lion(params, lr=torch.tensor(0.5), maximize=True)

    def closure():
        loss = params[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert params[0].tolist() == [1.5, 1.5] and params[1].tolist() == [1.0, 1.0]
    assert params[1] not in optimizer.state


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr >= 0, got -1"),
        ({"lr": torch.ones(2)}, "tensor of 1 element, got 2"),
        ({"betas": (0.9, 1.0)}, r"betas .* got \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "weight_decay >= 0, got -0.1"),
    ],
)
def test_lion_refuses_options_outside_their_range(options, text):
    with pytest.raises(ValueError, match=text):
        zs.Lion([nn.Parameter(torch.ones(2))], **options)


def test_lion_refuses_sparse_gradients():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="expected dense gradients"):
        zs.Lion(embedding.parameters()).step()


def test_lion_is_sharded_like_any_optimizer():
    from zeroshard.testing import run_threads

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    batch = torch.randn(3, 8)

    def rank_run(rank):
        copy = nn.Linear(8, 4)
        copy.load_state_dict(model.state_dict())
        copy, optimizer = zs.shard(copy, zs.Lion(copy.parameters(), lr=0.01, weight_decay=0.1), stage=3)
        for _ in range(2):
            optimizer.zero_grad()
            copy(batch).square().sum().backward()
            optimizer.step()
        return zs.full_state_dict(copy)

    results = run_threads(2, rank_run)
    optimizer = zs.Lion(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    for weights in results:
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


# -- the benchmark -----------------------------------------------------------------------------------------------


def test_the_benchmark_runs_and_judges():
    found = adam(threads=2, numel=5000, rounds=2, deepspeed=False)
    assert [row.name for row in found.rows] == ["zeroshard", "memory copy", "torch fused", "torch foreach"]
    assert found.row("zeroshard").nbytes == 28 * 5000
    assert [goal.limit for goal in found.goals] == [0.9, 1.0, 4.0]
    assert [goal.verdict == "not measured" for goal in found.goals] == [False, True, False]


@pytest.mark.parametrize(
    ("second", "third", "expected"),
    [(2 << 20, 105 << 20, 1 << 16), (1 << 20, 32 << 20, 1 << 18), (1 << 20, 16 << 20, 1 << 17), (None, None, 1 << 16)],
)  # fmt: skip
def test_chunks_fit_a_cache(second, third, expected):
    """The second level where it holds 2^16 parameters, else a quarter of the third at most."""
    assert cpu_kernels._chunk_for(second, third) == expected


def test_the_machine_tells_its_caches():
    """Sizes rise with the level; a level that does not exist has none."""
    known = [size for level in (1, 2, 3) if (size := cache_nbytes(level)) is not None]
    assert known == sorted(known) and cache_nbytes(9) is None and all(size >= 1 << 10 for size in known)
