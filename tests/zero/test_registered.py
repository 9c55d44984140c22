"""Codecs, resting places and communicators that a program has registered: those of docs/how-to/extend.md, in more uses, and refusals."""

import contextlib
import copy
import io
import math
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from zeroshard.engine.comm.base import DirectComm
from zeroshard.engine.comm.control import Group
from zeroshard.packing.codecs import ErrorFeedback
from zeroshard.seam import Codec, Rest, WrappedComm, engine_of, register
from zeroshard.testing import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"


def of_page(name):
    """The class of that name of the page, whose program is run on the way."""
    program = next(text for text in PAGE.read_text().split("```") if f"\nclass {name}(" in text).removeprefix("python\n")
    assert len(program.splitlines()) <= 40
    names = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, f"{PAGE.name}: {name}", "exec"), names)
    return names[name], printed.getvalue()


@pytest.fixture(scope="module")
def fp24():
    return of_page("Fp24")[0]


@pytest.fixture(scope="module")
def zlib_rest():
    return of_page("ZlibRest")[0]


@pytest.fixture(scope="module")
def counting():
    return of_page("Counting")[0]


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))


def train(rank, model, options, steps=3, then=None):
    model = copy.deepcopy(model)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), units=["Linear"], **options)
    losses, batches = [], torch.Generator().manual_seed(rank)
    for _ in range(steps):
        loss = model(torch.randn(8, 64, generator=batches)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses if then is None else (losses, then(model, optimizer))


# -- codecs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_codec_packs_what_is_sent_and_losses_are_the_same(fp24, stage):
    packed = []

    class Seen(fp24):
        def _pack(self, values, out):
            packed.append(values.numel())
            super()._pack(values, out)

    model = make_model()
    plain = {"stage": stage, "precision": "bf16", "reduce_dtype": "fp32"}
    exact = run_threads(2, train, model, plain)
    with register("seen24", codec=Seen()):
        compression = zs.Compression("seen24", force=True)
        assert run_threads(2, train, model, plain | {"zero_quantized_gradients": compression}) == exact
        gradients = len(packed)
        assert gradients == 2 * 2 * 2 * 3  # slices of two matrices, on two ranks, in three steps
        fp32 = run_threads(2, train, model, {"stage": stage, "zero_quantized_weights": compression})
        assert len(packed) > gradients
    for losses, others in zip(fp32, run_threads(2, train, model, {"stage": stage}), strict=True):
        assert losses != others and losses == pytest.approx(others, rel=1e-3)  # rounded to 15 bits


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 65, (1 << 18) + 5])
def test_the_codec_of_the_page_keeps_its_contract(fp24, numel):
    codec = fp24()
    codec.name = "fp24"
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values[0] = math.inf
    packed, out = torch.empty(codec.packed_nbytes(numel), dtype=torch.uint8), torch.empty(numel)
    codec.pack(values, packed)
    codec.unpack(packed, out)
    assert out[0] == math.inf and torch.allclose(out[1:], values[1:], rtol=2.0**-15)
    codec.pack(torch.full((numel,), math.nan), packed)
    codec.unpack(packed, out)
    assert not torch.isfinite(out).any()
    values[0] = 0.0
    codec.pack(values, packed)
    total, parts = torch.empty(numel), [packed, packed.clone()]
    codec.unpack(packed, out)
    codec.unpack_sum(parts, total, scale=0.5, accumulate=False)
    assert torch.equal(total, out)
    feedback = ErrorFeedback(codec)
    feedback.pack("buffer", values, packed)
    assert torch.equal(feedback.residuals["buffer"], values - out)


# -- resting places ----------------------------------------------------------------------------------------------

RESTS = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "bf16": {"stage": 2, "precision": "bf16"},
    "split masters": {"stage": 2, "precision": "bf16", "master_weights": "split"},
    "coded states": {"stage": 2, "optimizer_states": "int8"},
    "delayed": {"stage": 2, "delayed_update": 1},
    "clipped": {"stage": 2, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("options", RESTS.values(), ids=RESTS)
def test_states_rest_in_a_place_of_the_program_and_losses_are_the_same(zlib_rest, options):
    written = []

    class Seen(zlib_rest):
        def store(self, start, source):
            written.append(source.numel())
            return super().store(start, source)

        def write(self, start, source):
            return self.store(start, source)

    model = make_model()
    with register("seen_zlib", rest=Seen):
        for fields in ({}, {"buffer_nbytes": 1 << 16, "buffer_count": 2}, {"ratio": 0.5}):  # the second: several slabs
            expected = run_threads(2, train, model, options | {"offload_optimizer": zs.Offload("cpu", **fields)})
            del written[:]
            assert run_threads(2, train, model, options | {"offload_optimizer": zs.Offload("seen_zlib", **fields)}) == expected
            assert written and max(written) > 1000


def test_states_of_words_that_never_occur_take_little_memory(zlib_rest):
    made = []

    class Seen(zlib_rest):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    with register("seen_zlib", rest=Seen):
        model = torch.nn.Embedding(4096, 64)
        model, optimizer = zs.shard(model, torch.optim.Adam(model.parameters()), stage=2, offload_optimizer="seen_zlib")
        model(torch.arange(16)).square().sum().backward()
        optimizer.step()
    held = engine_of(model).snapshot().held[zs.Tier.HOST]["optimizer states"]
    assert len(made) == 2 and held == sum(rest.nbytes for rest in made) == 2 * 4 * 4096 * 64  # counted at full size
    assert all(0 < sum(map(len, rest.pieces)) < rest.nbytes / 50 for rest in made)


def step(model, optimizer):
    model(torch.linspace(-1, 1, 64)[None]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_in_a_place_of_the_program_are_saved_loaded_and_averaged(zlib_rest, tmp_path, precision):
    def build(where):
        model = make_model()
        options = {"stage": 2, "precision": precision, "offload_optimizer": where}
        return zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), units=["Linear"], **options)

    def use(where):
        model, optimizer = build(where)
        average = zs.ema(model, 0.5)
        for _ in range(3):
            step(model, optimizer)
        zs.save(tmp_path / where, model, optimizer)
        with average.swapped():
            lent = zs.full_state_dict(model)
        return [lent, average.full_state_dict(), zs.full_state_dict(model)]

    with register("zlib", rest=zlib_rest):
        for expected, found in zip(use("cpu"), use("zlib"), strict=True):
            assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
        results = []
        for saved, where in (("cpu", "zlib"), ("zlib", "cpu")):
            model, optimizer = build(where)
            zs.load(tmp_path / saved, model, optimizer)
            step(model, optimizer)
            slices = engine_of(model).slices("master", "optimizer")
            results.append(
                {(each.kind, each.name): each.host(0, each.stop - each.start).clone() for each in slices if not each.single}
            )
        assert results[0].keys() == results[1].keys() and len(results[0]) == 4 * 3
        assert all(torch.equal(values, results[1][key]) and values.any() for key, values in results[0].items())


# -- communicators -----------------------------------------------------------------------------------------------

COMMS = {"stage 0": {"stage": 0}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3}, "replicas": {"stage": 3, "shard_size": 2}}
COMMS |= {"two hops": {"stage": 3, "zero_hpz_partition_size": 2}, "not mapped": {"stage": 3, "map_shared": False}}


@pytest.mark.parametrize("options", COMMS.values(), ids=COMMS)
def test_a_wrapped_communicator_sees_what_ranks_send_and_losses_are_the_same(counting, options):
    def counts(model, optimizer):
        return engine_of(model).ranks.count

    model, expected = make_model(), run_threads(4, train, make_model(), options)
    with register("counting", comm=counting):
        for losses, (found, count) in zip(
            expected, run_threads(4, train, model, options | {"comm": "counting"}, 3, counts), strict=True
        ):
            assert found == losses
            assert sum(n for label, n in count.items() if label.startswith("reduce")) >= 6  # two units, three steps
            assert options["stage"] == 0 or any(label.startswith("gather") for label in count)


def test_a_failure_of_a_peer_passes_a_wrapped_communicator(counting):
    def fail(rank):
        model, optimizer = zs.shard(torch.nn.Linear(64, 64), stage=3, comm="counting")
        if rank == 1:
            raise RuntimeError("rank 1 alone")
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
        engine_of(model).ranks.exchange(b"", "the end")

    with register("counting", comm=counting), pytest.raises(RuntimeError, match="rank 1 alone"):
        run_threads(2, fail, timeout_s=60)


def test_a_wrapped_communicator_passes_on_every_call():
    """A method that Comm or Control gets some day is passed on as well, unless it does nothing but call others."""
    derived = set("abort volume control alone forget holds invalidate open release".split())  # the last five: of `parts`
    fields = {*Group.__annotations__, "desk", "stall_timeout_s", "pending", "progress", "parts"}  # which `_wrap` copies
    flags = {"queue", "packs"}  # of Comms that are no DirectComm
    names = {name for each in DirectComm.__mro__ for name in vars(each) if not name.startswith("_")}
    assert names - derived - fields - flags - {*vars(WrappedComm)} == set()


# -- names -------------------------------------------------------------------------------------------------------


class Lacking(Rest):
    """A resting place without methods."""


def test_names_that_clash_are_refused(fp24, zlib_rest, counting):
    for name in ("int8", "top_k", "low_rank", "none"):
        with pytest.raises(zs.ConfigError, match=f"zeroshard itself has a codec named '{name}'. Choose another"):
            register(name, codec=fp24())
    with pytest.raises(zs.ConfigError, match="zeroshard itself has a resting place named 'nvme'"):
        register("nvme", rest=zlib_rest)
    with pytest.raises(zs.ConfigError, match="zeroshard itself has a communicator named 'auto'"):
        register("auto", comm=counting)
    first = register("mine", comm=counting)
    with pytest.raises(zs.ConfigError, match="'mine' is a communicator of this program already, .*Counting"):
        register("mine", comm=counting)
    with register("mine", rest=zlib_rest):  # another kind
        assert zs.Offload("mine").tier is zs.Tier.HOST
    first.remove()
    with register("mine", comm=counting):
        first.remove()  # does not remove another's
        zs.shard(torch.nn.Linear(4, 4), comm="mine")
    with pytest.raises(zs.ConfigError, match="comm: expected one of"):
        zs.shard(torch.nn.Linear(4, 4), comm="mine")


def test_things_that_are_none_are_refused(fp24, zlib_rest):
    wrong = [
        ({}, "expected one of codec=, rest= and comm=, got 0"),
        ({"codec": fp24(), "rest": zlib_rest}, "got 2 of them"),
        ({"codec": fp24}, "codec: expected an object of a subclass of zeroshard.seam.Codec, got <class"),
        ({"rest": zlib_rest(1, torch.float32, torch.empty(0))}, "rest: expected a subclass of zeroshard.seam.Rest"),
        ({"rest": Lacking}, "rest: Lacking lacks load, read, store, write"),
        ({"comm": DirectComm}, "comm: expected a subclass of zeroshard.seam.WrappedComm"),
    ]
    for options, message in wrong:
        with pytest.raises(zs.ConfigError, match=message):
            register("mine", **options)
    for name in ("", "a b", "a,b", 3):
        with pytest.raises(zs.ConfigError, match="expected a name of letters"):
            register(name, rest=zlib_rest)
    assert issubclass(fp24, Codec)


def test_options_that_do_not_take_a_registered_name_say_so(fp24, zlib_rest):
    with register("zlib", rest=zlib_rest), register("fp24", codec=fp24()):
        assert zs.Config(stage=2, offload_optimizer="zlib").offload_gradient.device == "cpu"
        for name in ("offload_param", "offload_gradient"):
            with pytest.raises(zs.ConfigError, match=f"{name}='zlib': .* Give it to offload_optimizer"):
                zs.Config(stage=3, **{name: "zlib"})
        model = torch.nn.Linear(64, 64)
        model, _ = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
        with pytest.raises(zs.ConfigError, match="Give it to offload_optimizer"):
            zs.offload_states(model, device=zs.Offload("zlib"))
        with pytest.raises(zs.ConfigError, match="Did you mean 'fp24'"):
            zs.Config(stage=2, zero_quantized_gradients="fp25")
        with pytest.raises(zs.ConfigError, match="'nvme', or 'zlib' of this program, got 'zlip'"):
            zs.Config(stage=2, offload_optimizer="zlip")
    with pytest.raises(zs.ConfigError, match="expected 'none', 'cpu' or 'nvme', got 'zlib'"):
        zs.Config(stage=2, offload_optimizer="zlib")
    with pytest.raises(zs.ConfigError, match="zero_quantized_gradients: expected"):
        zs.Config(stage=2, zero_quantized_gradients="fp24")


def test_a_name_that_was_removed_while_a_model_uses_it_says_so(zlib_rest):
    with register("zlib", rest=zlib_rest):
        model = make_model()
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload_optimizer="zlib")
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(zs.ConfigError, match="no resting place is named 'zlib' any more"):
        optimizer.step()
