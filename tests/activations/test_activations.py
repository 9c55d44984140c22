"""Activation checkpoints, partitioned and offloaded: the same bits as without, one gather a block, memory that stays.

The plain model, one process and no checkpoints at all, is the oracle throughout. Ranks are threads.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from activation_kit import DIM, LAYERS, Nested, Own, OwnReentrant, activator, every_place, gradients, store_of
from offloading import TINY, tiers
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import (
    Case,
    Language,
    Stack,
    Trace,
    adamw,
    compare,
    normal_batches,
    reference,
    same,
    seeded,
    square,
    token_batches,
)

import zeroshard as zs
from zeroshard.testing import run_threads


@pytest.fixture
def activate(tmp_path):
    return activator(tmp_path)


class Dropped(nn.Module):
    """Attention and MLP with dropout, and a mask that all blocks share."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask))
        return F.dropout(x, 0.2, self.training)


class Masked(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, DIM)
        self.blocks = nn.ModuleList(Dropped(DIM) for _ in range(layers))

    def forward(self, tokens):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=mask)
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1).float(), tokens.flatten())


def train(model, steps=3, micro=2, seed=5, step=True):
    """(losses, gradients of every step, weights) of a language model on tokens, several backwards a step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = adamw(model.parameters())
    torch.manual_seed(seed)
    losses, grads = [], []
    for _ in range(steps):
        for _ in range(micro):
            loss = model(torch.randint(0, 11, (2, 5), generator=generator))
            loss.backward()
            losses.append(loss.item())
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    for mine, theirs in zip([*got[1], got[2]], [*wanted[1], wanted[2]], strict=True):
        for name, value in theirs.items():
            same(mine[name], value, name, 0.0)


# -- equality ------------------------------------------------------------------------------------------------------


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_process_with_dropout_equals_plain(activate, place, dtype):
    plain = seeded(Masked).to(dtype)
    model = activate(copy.deepcopy(plain), place)
    assert_same(train(model), train(plain))
    report = zs.activation_report(model)
    assert report.blocks == ("blocks.0", "blocks.1", "blocks.2") and report.packed == report.unpacked == LAYERS * 6
    assert report.held == {"device": 0, "host": 0, "disk": 0}


MODES = [None, {"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}]


def trained(rank, case, mode, before, act):
    """The trace of one rank. before: checkpoints first, then zs.shard (mode None: without it)."""
    model, trace = copy.deepcopy(case.model), Trace()
    optimizer = case.optimizer(model.parameters())
    model = act(model) if before else model
    if mode is not None:
        model, optimizer = zs.shard(model, optimizer, **mode)
    model = model if before else act(model)
    for batches in case.batches:
        loss = case.loss(model, batches[rank])
        loss.backward()
        trace.losses.append(loss.item())
        named = model.named_parameters()
        trace.grads.append({n: p.grad.clone() for n, p in named} if mode is None else zs.full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    trace.state = {n: v.clone() for n, v in model.state_dict().items()} if mode is None else zs.full_state_dict(model)
    trace.notes = zs.activation_report(model)
    zs.checkpoint_activations(model, off=True)
    assert set(model.state_dict()) == set(case.model.state_dict()) and "forward" not in model.blocks[0].__dict__
    if mode is not None:
        zs.close(model)
    return trace


@every_place
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_partitioned_and_sharded_equals_plain(activate, place, ranks):
    """Every rank has the same batch, as in a model-parallel group; the mean over ranks rounds as the reference's does."""
    batches = [[batch[0]] * ranks for batch in token_batches(2, 1, 17, 2, 5)]
    case = Case(seeded(Language, blocks=LAYERS), batches)
    alone = reference(Case(case.model, [batch[:1] for batch in batches]))
    together = reference(case)
    for number, mode in enumerate(MODES):
        act = lambda model: activate(model, place, partition="auto")  # noqa: E731
        traces = run_threads(ranks, trained, case, mode, number % 2 == 0, act)
        for rank, trace in enumerate(traces):
            compare(trace, alone[0] if mode is None else together[rank], 0.0)
            gathers = trace.notes.gathers
            # one all-gather of batch x seq x hidden for each block and backward, of which a rank sends its slice
            assert gathers.count == (LAYERS * 2 if ranks > 1 else 0)
            shard_nbytes = 4 * -(-(2 * 5 * DIM) // (32 * ranks)) * 32
            assert gathers.nbytes == gathers.count * shard_nbytes * (ranks - 1)
            peak = {"none": "device", "cpu": "host", "nvme": "disk"}[place]
            wanted = shard_nbytes if ranks > 1 else 4 * 2 * 5 * DIM
            assert trace.notes.peak[peak] == LAYERS * wanted
            assert trace.notes.whole_peak == LAYERS * 4 * 2 * 5 * DIM
            assert {p: n for p, n in trace.notes.peak.items() if p != peak} == dict.fromkeys(
                {"device", "host", "disk"} - {peak}, 0
            )


@every_place
def test_bf16_sharded_and_partitioned_equals_bf16_sharded(activate, place):
    case = Case(seeded(Language, blocks=LAYERS), [[b[0]] * 2 for b in token_batches(2, 1, 17, 2, 5)])
    mode = {"stage": 3, "precision": "bf16"}
    plain = run_threads(2, trained, case, mode, True, lambda model: activate(model, min_numel=1 << 30))
    traces = run_threads(2, trained, case, mode, False, lambda model: activate(model, place, partition="auto"))
    for mine, theirs in zip(traces, plain, strict=True):
        assert theirs.notes.packed == 0 and mine.notes.packed == 2 * LAYERS
        compare(mine, theirs, 0.0)


CROSSED = [  # stage, activations, partition, parameters, gradients, optimizer, has the device a memory of its own?
    (3, "cpu", None, "nvme", "cpu", "cpu", True),
    (3, "nvme", "auto", "cpu", "nvme", "nvme", True),
    (3, "none", "auto", "nvme", "none", "nvme", False),
    (1, "nvme", None, "none", "none", "nvme", False),
    (1, "cpu", "auto", "none", "none", "cpu", True),
]


@pytest.mark.parametrize("cell", CROSSED, ids=lambda cell: "-".join(map(str, cell)))
def test_activations_and_model_states_rest_where_they_may(activate, disk, strict_device, cell):
    """Both have streams, buffers and files at one time, and change no bit of a run that has neither."""
    stage, place, partition, *states, own_device = cell
    case = Case(seeded(Language, blocks=LAYERS), [[batch[0]] * 2 for batch in token_batches(3, 1, 17, 2, 5)])

    def body(rank):
        strict_device(rank, own_device)
        mode = {"stage": stage, "map_shared": False, **tiers(disk, *states, **TINY, fused=False)}
        return trained(rank, case, mode, False, lambda model: activate(model, place, partition=partition))

    for trace, wanted in zip(run_threads(2, body), reference(case), strict=True):
        compare(trace, wanted, 0.0)
        rests = {"none": "device", "cpu": "host", "nvme": "disk"}[place]
        assert trace.notes.peak[rests] > 0 and trace.notes.gathers.count == (3 * LAYERS if partition else 0)
        if own_device:
            assert trace.notes.moved["device -> host"] > 0 and trace.notes.moved["host -> device"] > 0


@pytest.mark.parametrize("before", [True, False])
def test_a_sharded_model_gathers_no_more_than_with_plain_checkpoints(activate, before):
    case = Case(seeded(Stack, DIM, 5), normal_batches(4, 2, 4, DIM), square)
    block_nbytes = 4 * (sum(p.numel() + 32 for p in case.model.blocks[0].parameters()) + 64)

    def body(rank):
        model, optimizer = copy.deepcopy(case.model), None
        model = activate(model, "cpu") if before else model
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, map_shared=False)
        model = model if before else activate(model, "cpu")
        for batches in case.batches:
            square(model, batches[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.report(model), zs.full_state_dict(model)

    for (report, state), wanted in zip(run_threads(2, body), reference(case), strict=True):
        assert report.deviations == ()
        assert report.peak["gathered units"] <= 3 * block_nbytes  # the root unit, a block, one gathered ahead
        for name, value in wanted.state.items():
            same(state[name], value, name, 0.0)


def test_frozen_blocks_with_adapters(activate):
    """Units with frozen parameters are released when their inputs have their gradients: also around a checkpoint."""

    class Adapted(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.base, self.down, self.up = nn.Linear(dim, dim), nn.Linear(dim, 2), nn.Linear(2, dim)
            self.base.requires_grad_(False)

        def forward(self, x):
            return x + self.base(x).tanh() + self.up(self.down(x))

    model = seeded(Stack, DIM, 3, Adapted)
    model.first.requires_grad_(False)
    case = Case(model, [batch * 2 for batch in normal_batches(2, 1, 4, DIM)], square)

    def body(rank, mode):
        model = activate(copy.deepcopy(case.model), "cpu", partition="auto")
        model, optimizer = zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), **mode)
        for batches in case.batches:
            square(model, batches[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert zs.activation_report(model).packed == 2 * 2  # the first block's input has no gradient
        return zs.full_state_dict(model)

    for mode in ({"stage": 2}, {"stage": 3, "map_shared": False}):
        for state, wanted in zip(run_threads(2, body, mode), reference(case), strict=True):
            for name, value in wanted.state.items():
                same(state[name], value, name, 0.0)


@pytest.mark.parametrize("how, when", [("in place", "first"), ("in place", "last"), ("wrapped", "last")])
def test_compiled_blocks(activate, how, when):
    plain, batches = seeded(Stack, DIM), normal_batches(3, 1, 4, DIM)
    wanted = reference(Case(plain, batches, square))[0].state
    torch._dynamo.reset()
    model = copy.deepcopy(plain)

    def compile_blocks():
        for number, block in enumerate(model.blocks):
            if how == "in place":
                block.compile(backend="aot_eager")
            else:
                model.blocks[number] = torch.compile(block, backend="aot_eager")

    if when == "first":
        compile_blocks()
    activate(model, partition="auto")
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, map_shared=False)
    if when == "last":
        compile_blocks()
    for ((batch,),) in batches:
        square(model, (batch,)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zs.activation_report(model).packed == zs.activation_report(model).unpacked == 3 * LAYERS
    for value, got in zip(wanted.values(), zs.full_state_dict(model).values(), strict=True):
        same(got, value, how, 1e-5)
    zs.close(model)
    zs.checkpoint_activations(model, off=True)
    square(model, batches[0][0]).backward()


# -- the graph's life ----------------------------------------------------------------------------------------------


@every_place
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_forwards_then_backwards_in_either_order(activate, place, ranks):
    plain, ((a,), (b,)) = seeded(Stack, DIM), normal_batches(2, 1, 4, 6, DIM)

    def both(model, swap):
        losses = [square(model, a), square(model, b)]
        for loss in reversed(losses) if swap else losses:
            loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return grads

    def body(rank):
        model = activate(copy.deepcopy(plain), place, partition="auto", prefetch=1)
        results = [both(model, swap) for swap in (False, True, False)]
        assert zs.activation_report(model).held == {"device": 0, "host": 0, "disk": 0}
        return results

    wanted = [both(plain, swap) for swap in (False, True, False)]
    for results in run_threads(ranks, body):
        for mine, theirs in zip(results, wanted, strict=True):
            for name in theirs:
                same(mine[name], theirs[name], name, 0.0)


@every_place
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_that_is_kept_is_unpacked_again(activate, place, ranks):
    plain, ((batch,),) = seeded(Stack, DIM), normal_batches(1, 1, 4, DIM)
    square(plain, batch).backward()

    def body(rank):
        model = activate(copy.deepcopy(plain), place, partition="auto")
        loss = square(model, batch)
        for number in range(3):
            model.zero_grad()
            loss.backward(retain_graph=number < 2)
            for name, param in plain.named_parameters():
                same(dict(model.named_parameters())[name].grad, param.grad, name, 0.0)
        report = zs.activation_report(model)
        assert (report.packed, report.unpacked) == (LAYERS, 3 * LAYERS) and not any(report.held.values())
        # and with a graph of the gradients
        loss = square(model, batch)
        params = list(model.parameters())
        first = torch.autograd.grad(loss, params, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), params)
        return [*first, *second]

    loss = square(plain, batch)
    first = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), list(plain.parameters()))
    for results in run_threads(ranks, body):
        for mine, theirs in zip(results, [*first, *second], strict=True):
            same(mine.detach(), theirs.detach(), "first and second derivatives", 1e-6)


@every_place
def test_without_gradients_nothing_is_packed(activate, place):
    model, ((batch,),) = activate(seeded(Stack, DIM), place), normal_batches(1, 1, 4, DIM)
    with torch.no_grad():
        square(model, batch)
    with torch.inference_mode():
        square(model.eval(), batch)
    for param in model.parameters():
        param.requires_grad_(False)
    square(model, batch)
    assert zs.activation_report(model).packed == 0


@every_place
def test_exceptions_and_dropped_graphs_free_their_slots(activate, place):
    plain, ((batch,),) = seeded(Stack, DIM), normal_batches(1, 1, 4, DIM)
    model = activate(copy.deepcopy(plain), place)
    wanted = gradients(plain, square(plain, batch))
    gradients(model, square(model, batch))
    hook = model.last.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            square(model, batch)
        assert not any(zs.activation_report(model).held.values())
    hook.remove()

    loss = square(model, batch)
    handle = model.blocks[1].norm.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    for _ in range(3):
        loss = square(model, batch)  # the one before goes without a backward
        assert zs.activation_report(model).held[{"none": "device", "cpu": "host", "nvme": "disk"}[place]] <= 2 * 3 * 512
    mine = gradients(model, loss)
    assert not any(zs.activation_report(model).held.values())
    for name in wanted:
        same(mine[name], wanted[name], name, 0.0)


def test_a_packed_tensor_keeps_its_strides(activate):
    seen = []

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))
            self.weight = nn.Parameter(torch.ones(12))
            for block in self.blocks:
                block.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
                block[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))

        def forward(self, x):
            x = self.blocks[0]((x.repeat(1, 2) * self.weight)[:, :6])  # with gaps
            return self.blocks[1](x.mT)  # without, but in another order

    def run(model, x):
        seen.clear()
        loss = model(x).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters()], loss.item(), set(seen)

    plain, x = seeded(Strided), torch.randn(6, 6)
    model = activate(copy.deepcopy(plain))
    for mine, theirs in zip(run(model, x), run(plain, x), strict=True):
        if isinstance(mine, list):
            for left, right in zip(mine, theirs, strict=True):
                same(left, right, "gradient", 0.0)
        else:
            assert mine == theirs
    assert zs.activation_report(model).packed == 2


def test_a_tensor_that_all_blocks_keep_is_packed_once(activate):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList(nn.Bilinear(DIM, DIM, DIM) for _ in range(LAYERS))

        def forward(self, x):
            memory = self.encoder(x)
            for block in self.blocks:
                x = block(x, memory)
                memory = memory if block is not self.blocks[1] else memory.mul_(2)  # from here on it is another one
            return x

    plain, ((batch,),) = seeded(Decoder), normal_batches(1, 1, 4, DIM)
    model = activate(copy.deepcopy(plain))
    loss = square(model, batch)
    assert store_of(model).packed == 2 + 2  # of the blocks' own inputs the first needs no gradient
    assert gradients(model, loss).keys() == dict(model.named_parameters()).keys()
    plain_loss = Decoder.forward  # the in-place change is an error in plain torch: compare with a copy instead

    def forward(self, x):
        memory = self.encoder(x)
        for number, block in enumerate(self.blocks):
            x = block(x, memory)
            memory = memory * 2 if number == 1 else memory
        return x

    Decoder.forward = forward
    wanted = gradients(plain, square(plain, batch))
    Decoder.forward = plain_loss
    for name, param in model.named_parameters():
        same(param.grad, wanted[name], name, 1e-6)


# -- the model's own checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["none", "nvme"])
@pytest.mark.parametrize("model_type, inputs", [(Own, LAYERS), (OwnReentrant, LAYERS), (Nested, 1)])
def test_own_checkpoints(activate, place, model_type, inputs):
    """Only what checkpoints keep is packed, of that no parameter and no mask; everything else is saved as before."""
    batches = [batch * 2 for batch in normal_batches(2, 1, 4, DIM)]
    case = Case(seeded(model_type, DIM), batches, square)
    wanted, alone = reference(case), reference(Case(case.model, [batch[:1] for batch in batches], square))
    for mode in (None, {"stage": 3, "map_shared": False}):
        act = lambda model: activate(model, place, blocks=None, partition="auto")  # noqa: E731
        for trace, theirs in zip(run_threads(2, trained, case, mode, True, act), wanted, strict=True):
            compare(trace, theirs if mode else alone[0], 1e-5 if model_type is OwnReentrant else 0.0)
            assert trace.notes.packed == trace.notes.unpacked == 2 * inputs
            assert trace.notes.blocks == ()


def test_hooks_around_own_checkpoints_stay_in_force(activate):
    plain, ((batch,),) = seeded(Own, DIM), normal_batches(1, 1, 4, DIM)
    model = activate(copy.deepcopy(plain), blocks=None)
    seen = []

    def pack(tensor):
        if tensor.numel():  # checkpoints of torch before 2.13 save an empty one each
            seen.append(tensor.shape)
        return tensor.detach().clone()

    def packed(model):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = square(model, batch)
        return gradients(model, loss), list(seen)

    (wanted, everything), (mine, outside) = packed(plain), packed(model)
    assert len(everything) - len(outside) == 3 * LAYERS  # inputs, masks and parameters
    for name in wanted:
        same(mine[name], wanted[name], name, 0.0)


def test_in_place_changes_are_found_as_without_hooks(activate):
    class Changed(Own):
        def forward(self, x):
            y = torch.tanh(self.first(x))
            x = checkpoint(self.blocks[0], y * 1.0, use_reentrant=False)
            y.add_(1)
            return x

    model, ((batch,),) = activate(seeded(Changed, DIM), blocks=None), normal_batches(1, 1, 4, DIM)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(model, batch).backward()


def test_blocks_inside_a_checkpoint_of_the_model_are_left_alone(activate, capsys):
    plain, ((batch,),) = seeded(Nested, DIM), normal_batches(1, 1, 4, DIM)
    model = activate(copy.deepcopy(plain))
    wanted, mine = gradients(plain, square(plain, batch)), gradients(model, square(model, batch))
    for name in wanted:
        same(mine[name], wanted[name], name, 0.0)
    assert zs.activation_report(model).packed == 1  # the third block is outside
    assert capsys.readouterr().err.count("pass blocks=None") == 2  # for the first and the second, once


def test_transformers_gradient_checkpointing(activate):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=13
    )
    plain = seeded(transformers.LlamaForCausalLM, config)
    tokens = torch.arange(12).view(2, 6)

    def run(model, **options):
        return gradients(model, model(input_ids=tokens, labels=tokens, **options).loss)

    wanted = run(plain)
    switched = copy.deepcopy(plain)
    switched.gradient_checkpointing_enable({"use_reentrant": False})
    switched.train()
    activate(switched, "nvme")
    blocks = activate(copy.deepcopy(plain), "nvme")
    with pytest.raises(zs.ConfigError, match="use_cache=False"):
        run(blocks)
    for mine, model in ((run(switched), switched), (run(blocks, use_cache=False), blocks)):
        report = zs.activation_report(model)
        assert report.packed == report.unpacked == 2 and report.peak["disk"] == 2 * 2 * 6 * 16 * 4
        assert bool(report.blocks) == (model is blocks)
        for name in wanted:
            same(mine[name], wanted[name], name, 0.0)
