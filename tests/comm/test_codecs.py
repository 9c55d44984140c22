"""Codecs: how exact they are, what they do with zeros, infinities and odd sizes, and what compressed gradients converge to."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.engine.comm.sums import CHUNK_NUMEL, sum_in_rank_order
from zeroshard.errors import ConfigError
from zeroshard.packing.codecs import CODECS, ErrorFeedback, LowRank, TopK, block_quantization, codec_of
from zeroshard.utils import compression
from zeroshard.utils.compression import Compression

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 511, 1000, 4096 + 17]
BLOCKS = [32, 256, 1024]
SOME = [*CODECS, "top_k"]


def make(name: str, block: int = 256):
    return TopK(0.1) if name == "top_k" else codec_of(name, block)


def packed_of(codec, values):
    out = torch.full((codec.packed_nbytes(values.numel()),), 0xA5, dtype=torch.uint8)  # nothing may be left of it
    codec.pack(values, out)
    return out


def back(codec, packed, numel, dtype=torch.float32):
    out = torch.full((numel,), 77.0, dtype=dtype)
    codec.unpack(packed, out)
    return out


def round_trip(codec, values):
    return back(codec, packed_of(codec, values), values.numel())


def steps_of(codec, packed, numel):
    """(numel,): the step of each value, as the bytes tell it."""
    steps = packed[: 4 * codec.nblocks(numel)].clone().view(torch.float32)
    return steps.repeat_interleave(codec.block)[:numel]


def wild(numel, seed=0, decades=6.0):
    """Values whose blocks differ by many orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=g) * 10 ** (decades * (torch.rand(numel, generator=g) - 0.5))


def by_definition(codec, values):
    """The head of block_quantization.py, one operation after the other, over all blocks at once."""
    numel = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -numel % codec.block)).view(-1, codec.block)
    steps = blocks.abs().amax(1, keepdim=True) * torch.tensor(1 / codec.most, dtype=torch.float32)
    steps = steps.clamp_min(2.0**-100)
    quotients = blocks / steps
    codes = quotients.to(torch.float8_e4m3fn).float() if codec.name == "fp8" else quotients.round()
    return (codes * steps).view(-1)[:numel]


def test_a_codec_s_bytes_follow_from_the_bits_in_the_list_of_all(monkeypatch):
    """Which has every codec's name: options, codecs and plans read it."""
    assert list(CODECS) == list(compression.CODECS)

    class Int6(block_quantization.Int8):
        name = "int6"

    with pytest.raises(KeyError, match="int6"):
        Int6(32).packed_nbytes(1000)
    monkeypatch.setitem(compression.CODECS, "int6", 6)
    assert Int6(32).packed_nbytes(1000) == 32 * 4 + 752 and Int6(32).packed_nbytes(33) == 2 * 4 + 28


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", CODECS)
def test_values_are_those_of_the_definition_bit_for_bit(name, block, dtype):
    codec = codec_of(name, block)
    for numel in NUMELS:
        values = wild(numel, seed=numel).to(dtype)
        packed = packed_of(codec, values)
        expected = by_definition(codec, values)
        assert torch.equal(back(codec, packed, numel), expected), numel
        for other in DTYPES:
            assert torch.equal(back(codec, packed, numel, other), expected.to(other)), (numel, other)
        again = packed_of(codec, values.clone())
        assert torch.equal(packed, again)


@pytest.mark.parametrize("name", CODECS)
def test_chunks_of_a_long_tensor_meet(name, monkeypatch):
    """More than one pass, and a last block that is not whole."""
    monkeypatch.setattr(block_quantization, "CPU_CHUNK_NUMEL", 1 << 12)
    codec, values = codec_of(name), wild((1 << 14) + 333)
    assert torch.equal(round_trip(codec, values), by_definition(codec, values))
    low = back(codec, packed_of(codec, values), values.numel(), torch.bfloat16)
    assert torch.equal(low, by_definition(codec, values).bfloat16())


def test_the_largest_block_and_a_tensor_of_several_passes():
    codec = codec_of("int8", 1 << 14)
    values = wild(3 * (1 << 18) + 5)
    assert torch.equal(round_trip(codec, values), by_definition(codec, values))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150)
@given(st.sampled_from(list(CODECS)), st.sampled_from([32, 64]), st.lists(FLOATS, max_size=150))
def test_the_error_is_at_most_half_a_step(name, block, values):
    codec, values = codec_of(name, block), torch.tensor(values, dtype=torch.float32)
    packed = packed_of(codec, values)
    found, step = back(codec, packed, values.numel()).double(), steps_of(codec, packed, values.numel()).double()
    bound = step / 2 if name != "fp8" else torch.maximum(values.double().abs() * 2**-4, step * 2**-10)
    assert ((found - values.double()).abs() <= bound * (1 + 2**-15)).all()
    assert (found[values == 0] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_steps_are_as_short_as_can_be(name):
    codec, values = codec_of(name, 64), wild(1000)
    packed = packed_of(codec, values)
    steps = packed[: 4 * 16].clone().view(torch.float32)
    largest = torch.stack([block.abs().max() for block in values.split(64)])
    torch.testing.assert_close(steps * codec.most, largest, rtol=1e-6, atol=0)
    found = back(codec, packed, 1000)
    at = [i * 64 + int(block.abs().argmax()) for i, block in enumerate(values.split(64))]
    torch.testing.assert_close(found[at], values[at], rtol=1e-6, atol=0)  # the largest of a block comes back


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_visible_in_its_block_alone(name, bad, dtype):
    codec, values = codec_of(name, 32), torch.randn(100).to(dtype)
    values[40] = bad
    packed = packed_of(codec, values)
    found = back(codec, packed, 100)
    assert found[32:64].isnan().all()
    for others in (slice(32), slice(64, None)):
        assert torch.equal(found[others], by_definition(codec, values[others]))
    for other in DTYPES:
        assert back(codec, packed, 100, other)[32:64].isnan().all()
    total = torch.zeros(100)
    square_sum = codec.unpack_sum([packed, packed_of(codec, torch.randn(100))], total, scale=0.5, accumulate=True)
    assert not math.isfinite(square_sum) and total[32:64].isnan().all() and total[:32].isfinite().all()
    steps, codes = packed[:16].clone().view(torch.float32), packed[16:]
    width = 16 if name == "int4" else 32
    assert steps[1] == math.inf and (codes[width : 2 * width] == 0).all()  # the same bytes whichever it was, on any device


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_the_smallest_values(name):
    codec = codec_of(name, 32)
    assert torch.equal(round_trip(codec, torch.zeros(100)), torch.zeros(100))
    for magnitude in (1e-45, 1e-38, 1e-31, 1e-29, 1e-20):
        values = torch.full((40,), magnitude)
        found = round_trip(codec, values)
        assert ((found - values).abs() <= 2.0**-101).all() or torch.allclose(found, values, rtol=1e-6, atol=0)
    largest = torch.full((33,), torch.finfo(torch.float32).max)
    torch.testing.assert_close(round_trip(codec, largest), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_halves_go_to_even(name):
    codec = codec_of(name, 32)
    values = torch.tensor([codec.most, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert round_trip(codec, values / 8).mul(8).tolist() == [codec.most, 0, 2, 2, 0, -2, -2]


def test_bytes_of_the_format():
    """Written down once more by hand: whoever reads them elsewhere relies on it."""
    values = torch.tensor([7.0, -1, 2, -7, 3])
    steps = torch.tensor([1.0]).view(torch.uint8).tolist()
    int4 = packed_of(codec_of("int4", 32), values)
    assert int4.tolist() == [*steps, 0x97, 0x3F, 0x02, 0]  # halves of 3 and 2 values: 7|-7, -1|3, 2|-
    int8 = packed_of(codec_of("int8", 32), values * 127 / 7)
    assert int8[4:].tolist() == [127, 256 - 18, 36, 256 - 127, 54, 0, 0, 0]
    nbytes = {name: codec_of(name).packed_nbytes(1 << 20) for name in CODECS}
    assert nbytes == {"int8": (1 << 20) + (1 << 14), "int4": (1 << 19) + (1 << 14), "fp8": (1 << 20) + (1 << 14)}
    for name in SOME:
        assert make(name).packed_nbytes(0) == 0 and all(make(name).packed_nbytes(n) % 4 == 0 for n in range(1, 600))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_of_parts_is_that_of_unpacked_ones_bit_for_bit(name, accumulate, scale, out_dtype):
    codec = make(name)
    for numel, ranks in ((0, 2), (77, 1), (1000, 3), (CHUNK_NUMEL + 300, 2)):
        parts = [packed_of(codec, wild(numel, seed=rank)) for rank in range(ranks)]
        before = torch.randn(numel, generator=torch.Generator().manual_seed(9)).to(out_dtype)
        found, expected = before.clone(), before.clone()
        plain = [back(codec, part, numel) for part in parts]
        squares = codec.unpack_sum(parts, found, scale=scale, accumulate=accumulate)
        assert squares == sum_in_rank_order(plain, expected, scale=scale, accumulate=accumulate)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", SOME)
def test_bytes_may_begin_at_any_address(name):
    codec, values = make(name), wild(500)
    memory = torch.zeros(codec.packed_nbytes(500) + 3, dtype=torch.uint8)
    codec.pack(values, memory[3:])
    assert torch.equal(memory[3:], packed_of(codec, values))
    assert torch.equal(back(codec, memory[3:], 500), round_trip(codec, values))


@pytest.mark.parametrize("name", CODECS)
def test_one_step_for_a_tensor_is_worse_than_blocks(name):
    """Gradients have few large values: they cost all others their precision where one step serves all. (e4m3 has exponents.)"""
    g = torch.Generator().manual_seed(3)
    values = torch.randn(1 << 14, generator=g)
    values[torch.randint(1 << 14, (8,), generator=g)] *= 60
    whole, blocks = codec_of(name, 1 << 14), codec_of(name, 128)
    errors = [codec.error(values, packed_of(codec, values)) for codec in (whole, blocks)]
    assert errors[1] < (0.6 if name != "fp8" else 1.01) * errors[0]
    assert blocks.error(torch.zeros(5), packed_of(blocks, torch.zeros(5))) == 0.0


def test_what_cannot_be_is_named():
    with pytest.raises(ConfigError, match="expected one of int8, int4, fp8, got 'int9'. Did you mean 'int8'"):
        codec_of("int9")
    for block in (0, 31, 48, 1 << 15, True, 32.0):
        with pytest.raises(ConfigError, match="int8: block: expected a power of two from 32 to 16384, got"):
            codec_of("int8", block)
    for field, wrong in {"ratio": (0, 1.5, -1, "1", True), "rank": (0, 2.0, True), "exempt": ("*", [1]), "force": (1,)}.items():
        for value in wrong:
            with pytest.raises(ConfigError, match=f"compression {field}: expected .*, got"):
                Compression("top_k", **{field: value})
    with pytest.raises(ValueError, match="expected slots apart, within 20"):
        LowRank([(0, (4, 4)), (15, (3,))], 20)
    codec = codec_of("int8")
    with pytest.raises(ValueError, match=r"int8: packed: expected a contiguous \(8,\) of uint8, got \(9,\) of uint8"):
        codec.pack(torch.zeros(4), torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="values: expected a contiguous .* got .* not contiguous"):
        codec.pack(torch.zeros(8)[::2], torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="out: expected .* got .* of int64"):
        codec.unpack(torch.zeros(8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))


# -- top-k -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 10, 1000, (1 << 16), (1 << 16) + 5])
def test_top_k_keeps_the_largest_and_their_places(numel):
    codec, values = TopK(0.01), wild(numel)
    k = max(1, math.ceil(0.01 * numel))
    assert codec.packed_nbytes(numel) == -(-k * (6 if numel <= 1 << 16 else 8) // 4) * 4
    found = round_trip(codec, values)
    kept = found != 0
    assert int(kept.sum()) == k and torch.equal(found[kept], values[kept])
    if k < numel:
        assert values[~kept].abs().max() <= values[kept].abs().min()


def test_top_k_takes_the_first_of_equal_ones_and_shows_what_is_not_finite():
    codec = TopK(0.25)
    assert round_trip(codec, torch.tensor([1.0, -2, 2, 2, -2, 2, 0, 0])).tolist() == [0, -2, 2, 0, 0, 0, 0, 0]
    for bad in (math.inf, math.nan):
        found = round_trip(codec, torch.tensor([1e30, 1e30, 1, bad, 0, 0, 0, 0]))
        assert not found[3].isfinite() and found[0] == torch.tensor(1e30) and (found[[1, 2, 4]] == 0).all()


# -- training with compressed gradients ------------------------------------------------------------------------------

RANKS, ROWS, COLUMNS = 3, 24, 16


class LeastSquares:
    """|A_r W - B_r|^2 / 2 for each rank r; a matrix W (24, 16) and a bias (16,) in one flat buffer, 8 elements between."""

    slots = [(0, (ROWS, COLUMNS)), (ROWS * COLUMNS + 8, (COLUMNS,))]
    numel = ROWS * COLUMNS + 8 + COLUMNS

    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.inputs = [torch.randn(64, ROWS, generator=g).double() / 8 for _ in range(RANKS)]
        self.targets = [torch.randn(64, COLUMNS, generator=g).double() for _ in range(RANKS)]

    def _split(self, flat):
        return flat[: ROWS * COLUMNS].view(ROWS, COLUMNS), flat[ROWS * COLUMNS + 8 :]

    def gradient(self, flat, rank):
        weight, bias = self._split(flat)
        error = self.inputs[rank].float() @ weight + bias / 8 - self.targets[rank].float()
        out = torch.zeros(self.numel)
        into, into_bias = self._split(out)
        into.copy_(self.inputs[rank].float().T @ error)
        into_bias.copy_(error.sum(0) / 8)
        return out

    def loss(self, flat):
        weight, bias = self._split(flat.double())
        errors = (x @ weight + bias / 8 - y for x, y in zip(self.inputs, self.targets, strict=True))
        return sum(error.square().sum().item() for error in errors)

    @functools.cached_property
    def least(self):
        flat = torch.zeros(self.numel)
        for _ in range(300):
            flat -= 0.4 * torch.stack([self.gradient(flat, rank) for rank in range(RANKS)]).mean(0)
        return self.loss(flat)

    def train(self, mean_of, steps=250, lr=0.05):
        """What the loss is above the least there is, as a part of that at the start."""
        flat = torch.zeros(self.numel)
        for _ in range(steps):
            flat -= lr * mean_of([self.gradient(flat, rank) for rank in range(RANKS)])
        return (self.loss(flat) - self.least) / (self.loss(torch.zeros(self.numel)) - self.least)


def packed_mean(codec, feedback):
    """The mean of gradients that travel packed."""
    feeders = [ErrorFeedback(codec) for _ in range(RANKS)]

    def mean_of(gradients):
        parts = []
        for feeder, gradient in zip(feeders, gradients, strict=True):
            out = torch.empty(codec.packed_nbytes(gradient.numel()), dtype=torch.uint8)
            feeder.pack("w", gradient, out) if feedback else codec.pack(gradient, out)
            parts.append(out)
        total = torch.empty_like(gradients[0])
        codec.unpack_sum(parts, total, scale=1 / len(parts), accumulate=False)
        return total

    return mean_of


@pytest.mark.parametrize("codec", [codec_of("int4", 32), codec_of("int8", 32), TopK(0.1)], ids=["int4", "int8", "top_k"])
def test_with_feedback_of_errors_training_ends_where_it_should(codec):
    """Without it, what the codec drops is lost for ever."""
    problem = LeastSquares()
    with_feedback, without = (problem.train(packed_mean(codec, feedback)) for feedback in (True, False))
    assert with_feedback < 0.02 and without > 5 * with_feedback, (with_feedback, without)
    assert problem.train(packed_mean(codec, True), steps=20) == problem.train(packed_mean(codec, True), steps=20)


def test_a_residual_is_what_packing_lost():
    codec = codec_of("int4", 32)
    feedback, out = ErrorFeedback(codec), torch.empty(codec.packed_nbytes(50), dtype=torch.uint8)
    values = torch.randn(50)
    feedback.pack(0, values, out)
    torch.testing.assert_close(feedback.residuals[0], values - back(codec, out, 50), rtol=0, atol=1e-6)
    sent = sum(_feed(feedback, codec, values, out) for _ in range(400))
    torch.testing.assert_close(sent / 400, values, rtol=0, atol=2e-3)  # nothing is lost over time
    values[3] = math.inf
    feedback.pack(0, values, out)
    assert back(codec, out, 50)[:32].isnan().all() and feedback.residuals[0].isfinite().all()
    feedback.pack(0, torch.randn(60), torch.empty(codec.packed_nbytes(60), dtype=torch.uint8))  # of another length: from zero
    feedback.clear()
    assert not feedback.residuals


def _feed(feedback, codec, values, out):
    feedback.pack(0, values, out)
    return back(codec, out, values.numel())


# -- low rank --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def the_same_values():
    """In every order of tests: how much of a random matrix is found depends on how near to singular its product with Q is."""
    torch.manual_seed(0)


class Ranks:
    """An all-reduce of ranks as threads that meet."""

    def __init__(self, world_size):
        self.barrier, self.given, self.sent = threading.Barrier(world_size, timeout=30), [None] * world_size, 0

    def all_reduce_mean(self, rank):
        def reduce(flat):
            self.given[rank] = flat
            self.barrier.wait()
            mean = sum(self.given) / len(self.given)
            self.barrier.wait()
            self.sent += flat.numel() if rank == 0 else 0
            return mean

        return reduce


def reduce(low_rank, flat, mean=lambda values: values):
    """Two all-reduces; without a function for them, those of one rank."""
    low_rank.finish(flat, mean(low_rank.second(flat, mean(low_rank.first(flat)))))


def low_rank_mean(rank_of_matrices, forget=False):
    compressors = [LowRank(LeastSquares.slots, LeastSquares.numel, rank=rank_of_matrices) for _ in range(RANKS)]
    ranks = Ranks(RANKS)

    def one(rank, gradient):
        flat = gradient.clone()
        reduce(compressors[rank], flat, ranks.all_reduce_mean(rank))
        if forget:
            compressors[rank]._matrices[0].error.zero_()
        return flat

    def mean_of(gradients):
        before = ranks.sent
        with ThreadPoolExecutor(RANKS) as pool:
            results = list(pool.map(one, range(RANKS), gradients))
        assert all(torch.equal(result, results[0]) for result in results)  # every rank steps alike
        assert ranks.sent - before == sum(compressors[0].sent_numels)
        return results[0]

    return mean_of


def test_low_rank_with_feedback_of_errors_converges():
    problem = LeastSquares()
    with_feedback, without = (problem.train(low_rank_mean(1, forget)) for forget in (False, True))
    assert with_feedback < 1e-4 and without > 0.05, (with_feedback, without)
    assert problem.train(low_rank_mean(1), steps=20) == problem.train(low_rank_mean(1), steps=20)


def test_low_rank_sends_thin_factors_and_vectors_as_they_are():
    low_rank = LowRank([(0, (64, 4, 8)), (2048, (100,)), (2160, (2, 3))], 2176, rank=2)
    assert low_rank.sent_numels == (2 * 64 + 128, 2 * 32) and low_rank.state_numel == 64 * 32 + 2 * 32
    assert LowRank([(0, (5,))], 8).sent_numels == (8, 0) and LowRank([], 0).sent_numels == (0, 0)
    flat = torch.randn(2176)
    exact = flat.clone()
    reduce(low_rank, flat)
    assert torch.equal(flat[2048:], exact[2048:]) and not torch.equal(flat[:2048], exact[:2048])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_is_exact_where_the_gradient_has_that_rank(dtype):
    """Of rank 2: the first step finds its columns, whatever Q was."""
    matrix = (torch.randn(40, 2) @ torch.randn(2, 30)).to(dtype)
    low_rank = LowRank([(0, (40, 30))], 1200, rank=2 if dtype == torch.float32 else 8)
    flat = matrix.flatten().clone()
    reduce(low_rank, flat)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(flat.view(40, 30), matrix, rtol=tolerance, atol=tolerance)


def test_low_rank_shows_what_is_not_finite_and_forgets_it():
    low_rank = LowRank([(0, (20, 10))], 208, rank=1)
    flat = torch.randn(208)
    flat[7] = math.inf
    reduce(low_rank, flat)
    assert not flat.isfinite().all()
    for values in (torch.zeros(208), torch.randn(208)):  # nothing of it in the next steps; a gradient of zeros is no harm
        reduce(low_rank, values)
        assert values.isfinite().all()
    assert values[:200].norm() > 0
