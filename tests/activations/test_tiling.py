"""Memory-centric tiling: tiles are gathered one at a time, and the model is the one it was.

Two comparisons carry the proof: a tiled model under every stage equals itself on one process bit for bit (`zoo.check`),
and on one process it equals the untiled model, bit for bit where no sum was cut, within derived bounds elsewhere:
two evaluations of a sum of n products in any order differ by at most n eps sum|products| (Higham, section 3.1).
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import OddGPT, Task, assert_equal_runs, reference, train
from helpers import token_batches as micro_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from private_ranks import PostOffice, PrivateComm
from tiling_kit import (
    DIM,
    EPS,
    EPS_BF16,
    MODES,
    STAGE3,
    VOCAB,
    Checkpointed,
    CheckpointedReentrant,
    LossGPT,
    gpt,
    peak_bound,
    tiled,
    tiles_of,
)
from torch import Tensor, nn
from zoo import Case, check, run_threads, token_batches

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of

# -- training: sharded tiles equal tiles on one process, in bits -----------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tiles_train_as_on_one_process(tied, mode):
    check(Case(tiled(gpt(tied=tied), 4), token_batches(3, 2, VOCAB, 2, 5)), **mode)
    check(Case(tiled(gpt(LossGPT, tied), 4), token_batches(2, 1 + tied * 2, VOCAB, 2, 5)), **mode)


@pytest.mark.parametrize("units", ["leaf", "model", ("OddBlock",)], ids=str)
def test_tiles_are_units_in_every_mode(units):
    """Also inside a block that is a unit, and where small units are merged."""
    model = zs.tile(gpt(), max_bytes=480)  # tiles `into` (31, 7) and its bias, too
    assert len(tiles_of(model.blocks[0].into)) == 3
    case = Case(model, token_batches(1, 2, VOCAB, 2, 5))
    check(case, units=units, min_unit_numel=100, **STAGE3)

    def names(rank: int) -> list[str]:
        sharded, _ = zs.shard(copy.deepcopy(model), units=units, min_unit_numel=100, **STAGE3)
        return [unit.name for unit in runtime_of(sharded).units]

    found = run_threads(1, names)[0]
    for name in ("embedding.tiles.0", "blocks.0.into.tiles.0", "blocks.1.into.tiles.2"):
        assert name in found, found


@pytest.mark.parametrize("precision, scale", [("bf16", 1.0), ("fp16", 256.0)])
@pytest.mark.parametrize("cls", [OddGPT, LossGPT])
def test_low_precision(cls, precision, scale):
    task = Task(tiled(gpt(cls), 4), micro_batches(2, 2, 2, VOCAB), clip={1: 0.05})
    options = {"loss_scale": scale} if precision == "fp16" else {}
    got = run_threads(2, lambda rank: train(rank, task, precision=precision, **options, **STAGE3))
    expected = reference(task, 2, precision, got[0].coefficients, scale)
    for outcome in got:
        assert_equal_runs(outcome, expected)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
def test_ranks_without_common_memory(ordered):
    """Where a gather is NaN until it is waited for, sources are guarded, and units are prefetched."""
    task = Task(tiled(gpt(LossGPT), 4), micro_batches(3, 2, 2, VOCAB))
    office = PostOffice()

    def run(rank: int):
        comm = PrivateComm(office, rank, 2, ordered)
        return [train(rank, task, comm=comm, stage=3, prefetch_nbytes=nbytes) for nbytes in (0, 1 << 20)]

    expected = reference(task, 2)
    for outcomes in run_threads(2, run):
        for outcome in outcomes:
            assert_equal_runs(outcome, expected)


@pytest.mark.parametrize("frozen", [("embedding", "head"), ("blocks",), ("head",)], ids=str)
def test_frozen_tiles(frozen):
    model = gpt(tied=False)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    model = zs.tile(model, max_bytes=480)
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.startswith(frozen))
    check(Case(model, token_batches(2, 2, VOCAB, 2, 5)), **STAGE3)


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [OddGPT, LossGPT, Checkpointed, CheckpointedReentrant])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_no_two_tiles_are_gathered_at_one_time(cls, tied):
    """In forward, backward and recomputation. Without tiles the peak holds the whole table (257 x 7 x 4 bytes)."""
    model = zs.tile(gpt(cls, tied), max_bytes=480)

    def run(rank: int) -> tuple[int, int]:
        sharded, _ = zs.shard(copy.deepcopy(model), **STAGE3)
        for batches in token_batches(2, 2, VOCAB, 2, 5):
            sharded(*batches[rank]).backward()
            zs.full_gradients(sharded)
        return zs.report(sharded).peak["gathered units"], peak_bound(sharded)

    for peak, bound in run_threads(2, run):
        assert peak <= bound < VOCAB * DIM * 4


def test_a_tile_is_gathered_once_in_forward_and_once_in_backward():
    whole = gpt(LossGPT, tied=False)

    def run(rank: int) -> dict[str, int]:
        model, _ = zs.shard(tiled(whole, 4), **STAGE3)
        (batches,) = token_batches(1, 2, VOCAB, 2, 5)
        model(*batches[rank]).backward()
        return zs.report(model).communication["gather"].units

    counts = run_threads(2, run)[0]
    tiles = {name: count for name, count in counts.items() if ".tiles." in name}
    assert len(tiles) == 8 and set(tiles.values()) == {2}, tiles


def test_working_memory_falls_as_the_number_of_tiles():
    """The operator's own gathered bytes are its weight / T: the table of section 8.4 (T = 1, 2, 4, 16) in miniature."""
    peaks = {}
    for count in (1, 2, 4, 16):

        def run(rank: int, count: int = count) -> int:
            model = nn.Sequential(nn.Linear(32, 512, bias=False))
            model, _ = zs.shard(tiled(model, count, 512, 32), **STAGE3)
            model(torch.ones(2, 32)).sum().backward()
            return zs.report(model).peak["gathered units"]

        peaks[count] = run_threads(2, run)[0]
    assert peaks == {count: 512 * 32 * 4 // count for count in peaks}


# -- equal to the untiled model --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [OddGPT, LossGPT])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_training_equals_the_untiled_model(cls, count, tied):
    """Losses and gradients to a few units in the last place. An update of AdamW has a slope of lr / eps at most."""
    whole, parts = gpt(OddGPT, tied), gpt(cls, tied)
    lr, adam_eps, bound = 1e-2, 1e-3, 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr, eps=adam_eps) for m in (whole, parts)]
    assert zs.tile(parts, max_bytes=-(-VOCAB // count) * DIM * 4, optimizer=optimizers[1]) is parts
    assert len([*tiles_of(parts.embedding), *tiles_of(parts.head)]) == (2 * count if count > 1 else 0)
    for ((tokens, targets),) in token_batches(3, 1, VOCAB, 2, 5):
        losses = [model(tokens, targets) for model in (whole, parts)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
        expected = gradients(whole)
        noise = 1e-6 * max(grad.abs().max().item() for grad in expected.values())
        bound += noise * lr / adam_eps
        for name, grad in gradients(parts).items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=noise, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert bound < lr / 100
    for name, value in parts.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=0, atol=bound, msg=name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the whole parameters' names, read through the state dict of a copy that holds them as values."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.copy_(mine.grad)
    return twin.state_dict()


sizes = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(2, 70))  # batch, in, out


@given(sizes, st.sampled_from([1, 2, 4, 16]), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_linear_by_rows_and_by_columns(shape, count, bias, columns, low):
    batch, inputs, outputs = shape
    torch.manual_seed(batch)
    dtype, eps = (torch.bfloat16, EPS_BF16) if low else (torch.float32, EPS)
    whole = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    if columns:  # only where a row does not fit
        inputs, outputs = outputs, 1
        whole = nn.Linear(inputs, outputs, bias=bias).to(dtype)
        limit = (-(-inputs // count) + bias) * dtype.itemsize
    else:
        limit = -(-outputs // count) * (inputs + bias) * dtype.itemsize
    parts = zs.tile(copy.deepcopy(whole), max_bytes=max(limit, dtype.itemsize * (1 + bias)))
    x = [torch.randn(batch, 2, inputs).to(dtype).requires_grad_() for _ in range(1)] * 2
    y = [module(x_) for module, x_ in zip((whole, parts), x, strict=True)]
    grad = torch.randn_like(y[0])
    dx = [torch.autograd.grad(y_, x[0], grad, retain_graph=True)[0] for y_ in y]
    magnitude = F.linear(x[0].abs(), whole.weight.abs(), whole.bias.abs() if bias else None).float()
    tiles = len(tiles_of(parts)) or 1
    # bf16: products add up in fp32, what leaves a tile is rounded, and so is every sum over tiles
    terms = inputs + 1 if not low else (tiles + 1 if columns else 1)
    assert ((y[1] - y[0]).float().abs() <= terms * eps * magnitude * (1 + eps)).all()
    terms = outputs if not low else (1 if columns else tiles + 1)
    assert ((dx[1] - dx[0]).float().abs() <= terms * eps * (grad.abs() @ whole.weight.abs()).float() * (1 + eps)).all()
    for y_ in y:
        y_.backward(grad)
    got, terms = gradients(parts), 2 * batch if not low else 1
    bound = terms * eps * (grad.flatten(0, 1).abs().t() @ x[0].flatten(0, 1).abs()).float() * (1 + eps)
    assert ((got["weight"] - whole.weight.grad).float().abs() <= bound).all()
    if bias:
        bound = (2 * batch if not low else 2) * eps * grad.abs().float().sum((0, 1)) * (1 + eps)
        assert ((got["bias"] - whole.bias.grad).float().abs() <= bound).all()


def test_rows_at_multiples_of_sixteen_are_the_same_bits():
    """What the docstring says of kernels, at sizes of a real layer: outputs and weight gradients are exactly equal."""
    torch.manual_seed(0)
    whole = nn.Linear(128, 1024)
    parts, x = tiled(whole, 5, 1024, 129), torch.randn(64, 128)
    grad = torch.randn(64, 1024)
    for module in (whole, parts):
        module(x).backward(grad)
    assert torch.equal(parts(x), whole(x)) and torch.equal(gradients(parts)["weight"], whole.weight.grad)


@given(st.integers(3, 90), st.integers(1, 9), st.sampled_from([2, 3, 4, 16]), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_embedding_is_the_same_bits(rows, dim, count, padded, low):
    torch.manual_seed(rows)
    whole = nn.Embedding(rows, dim, padding_idx=rows // 2 if padded else None)
    whole = whole.to(torch.bfloat16) if low else whole
    parts = zs.tile(copy.deepcopy(whole), max_bytes=-(-rows // count) * dim * whole.weight.element_size())
    tokens = torch.randint(0, rows, (3, 11))
    grad = torch.randn(3, 11, dim).to(whole.weight.dtype)
    for module in (whole, parts):
        module(tokens).backward(grad)
    assert torch.equal(parts(tokens), whole(tokens)) and len(parts.tiles) >= 2
    assert torch.equal(gradients(parts)["weight"], whole.weight.grad)


@pytest.mark.parametrize("bad", [-1, VOCAB], ids=["below", "above"])
def test_a_token_outside_the_vocabulary_raises(bad):
    with pytest.raises(IndexError, match="out of range"):
        tiled(nn.Embedding(VOCAB, DIM), 4)(torch.tensor([3, bad]))


# -- cross entropy ---------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(2, 80)),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
    st.floats(0.1, 30.0),
)
@settings(max_examples=80)
def test_cross_entropy(shape, count, reduction, smoothing, dtype, bias, scale):
    batch, dim, vocab = shape
    generator = torch.Generator().manual_seed(vocab)
    whole = nn.Linear(dim, vocab, bias=bias)
    with torch.no_grad():
        for param in whole.parameters():
            param.normal_(generator=generator)
    whole.to(dtype)
    parts = zs.tile(copy.deepcopy(whole), max_bytes=-(-vocab // count) * (dim + bias) * dtype.itemsize)
    hidden = (torch.randn(batch, 3, dim, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, vocab, (batch, 3), generator=generator)
    targets[0, 0] = -7
    options = {"ignore_index": -7, "reduction": reduction, "label_smoothing": smoothing}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    logits = whole(inputs[0]).to(wide)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    got = zs.tiled_cross_entropy(inputs[1], parts, targets, **options)
    assert got.dtype == wide and got.shape == (targets.shape if reduction == "none" else ())
    # lse and the logits are sums of dim + 1 products, with errors of (dim + 1) eps |x||w|; exp and log add a few eps
    eps = torch.finfo(wide).eps
    size = F.linear(hidden.abs(), whole.weight.abs(), whole.bias.abs() if bias else None).max().item() + math.log(vocab)
    noise = (dim + 8) * eps * size if dtype != torch.bfloat16 else 8 * eps * size
    terms = targets.numel() if reduction == "sum" else 1
    assert (got.flatten() - wanted.flatten()).abs().max().item() <= 2 * terms * noise
    for loss in (wanted, got):
        loss.sum().backward()
    # dlogits have absolute errors of `noise` (relative, and below 1); in bf16 they, and what leaves a tile, are rounded
    mean = 1.0 / (targets.numel() - 1) if reduction == "mean" else 1.0
    relative = 4 * noise + (len(tiles_of(parts)) + 3) * (EPS_BF16 if dtype == torch.bfloat16 else vocab * eps)
    bound = relative * mean * 2 * whole.weight.abs().max().item()
    assert (inputs[1].grad - inputs[0].grad).abs().max().item() <= bound
    bound = relative * mean * 2 * hidden.abs().max().item() * targets.numel()
    difference = gradients(parts)["weight"] - whole.weight.grad
    assert difference.abs().max().item() <= bound


def test_cross_entropy_of_a_padded_vocabulary_and_of_nothing():
    """Logits of -inf for a whole tile, as padding of a vocabulary may have; no targets at all."""
    torch.manual_seed(0)
    whole = nn.Linear(4, 48)
    with torch.no_grad():
        whole.bias[30:] = -math.inf
    parts, x = tiled(whole, 3, 48, 5), torch.randn(6, 4)
    targets = torch.randint(0, 30, (6,))
    for head in (whole, parts):
        zs.tiled_cross_entropy(x, head, targets).backward()
    assert not whole.weight.grad.isnan().any()
    torch.testing.assert_close(gradients(parts)["weight"], whole.weight.grad)
    for head in (whole, parts):
        assert zs.tiled_cross_entropy(x, head, torch.full((6,), -100)).isnan()
        assert zs.tiled_cross_entropy(x[:0], head, targets[:0], reduction="sum") == 0


def test_logits_never_exist_whole():
    """The largest tensor that forward or backward makes is that of one tile."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
            return result

    head = tiled(nn.Linear(4, 512), 8, 512, 5)
    hidden, targets = torch.randn(100, 4, requires_grad=True), torch.randint(0, 512, (100,))
    with Largest() as largest:
        zs.tiled_cross_entropy(hidden, head, targets, label_smoothing=0.1).backward()
    assert largest.numel == 100 * 64


def test_cross_entropy_refuses_what_it_can_not_do():
    head, x = tiled(nn.Linear(4, 48), 3, 48, 5), torch.randn(6, 4)
    targets = torch.zeros(6, dtype=torch.long)
    for change, match in [
        ({"targets": targets.float()}, "class numbers"), ({"targets": targets[:3]}, "expected shape"),
        ({"reduction": "avg"}, "reduction"), ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"head": tiled(nn.Embedding(48, 4), 3, 48, 4)}, "expected a Linear"),
    ]:  # fmt: skip
        with pytest.raises(zs.ConfigError, match=match):
            zs.tiled_cross_entropy(**{"hidden": x, "head": head, "targets": targets, **change})
    for outside in (-1, 48):
        with pytest.raises(RuntimeError, match="classes 0 to 47"):
            zs.tiled_cross_entropy(x, head, targets + outside)
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(zs.ZeroshardError, match="forward hooks"):
        zs.tiled_cross_entropy(x, head, targets)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [None, {"stage": 2}, STAGE3], ids=str)
def test_torchs_encoder_layers_run_without_gradients(mode):
    """torch's inference kernels read linear1.weight, which is in the tiles: the layers leave them."""
    layer = nn.TransformerEncoderLayer(8, 2, 64, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    model = zs.tile(copy.deepcopy(plain), max_bytes=1024)
    assert len(tiles_of(model)) == 12
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    padding = torch.arange(5) >= torch.tensor([[5], [3]])

    def body(rank: int) -> list[Tensor]:
        if mode is not None:
            zs.shard(model, None, **mode)
        with torch.no_grad():
            return [model(x), model(x, src_key_padding_mask=padding)[~padding]]

    with torch.no_grad():
        wanted = [plain(x), plain(x, src_key_padding_mask=padding)[~padding]]
    for got, expected in zip(run_threads(1, body)[0], wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
